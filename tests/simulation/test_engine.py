"""The engine's guarantees: alone = in a sweep, resumed = straight through, divergence, traffic, availability."""

from __future__ import annotations

import copy
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import toy
from fedentopt.algorithms import Algorithm, LocalTerms, Mixing
from fedentopt.errors import InputError
from fedentopt.partition import parse, partition
from fedentopt.selection import RandomSelector, flips
from fedentopt.selection.measures import entropy
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.device import STOPPING
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from fedentopt.simulation.evaluation import Scores
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.local import train_client
from fedentopt.simulation.methods import build_algorithm, build_selector
from fedentopt.simulation.planning import RoundPlan, RunPlanner
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.trainers.choice import choose_trainer, resolve_device

METHODS = [
    {"algorithm": "fedavg", "selector": "fedentopt", "epsilon": 0.5, "buffer": "2"},
    {"algorithm": "scaffold", "scaffold_start": "random"},  # clients that have not trained yet remember something too
    {"algorithm": "fednova", "selector": "fedentopt", "buffer": "2"},
    {"algorithm": "fedentropy"},
    {"algorithm": "fedconcat", "clusters": 2, "rounds": 40, "concat_max_rounds": 12},
]
HARD = {"stragglers": 0.5, "dropout": 0.2, "rounds": 5}


def figures(outcome):
    """All of a run's numbers but the clock."""
    return [replace(record, seconds=0.0) for record in outcome.records]


def state(config: RunConfig, data) -> RunState:
    """A run of the linear model before its first round."""
    model, algorithm = toy.linear(3), build_algorithm(config)
    return RunState(
        config, toy.Memory(), data.y_train, 3, model, FlatLayout(model), torch.device("cpu"), algorithm,
        build_selector(config, algorithm),
    )  # fmt: skip


def same_bits(a, b):
    return figures(a) == figures(b) and all(torch.equal(a.model[n], b.model[n]) for n in a.model)


def test_alone_equals_in_a_sweep_bit_for_bit():
    data = toy.images(samples=90)
    configs = [toy.config(model="toy:branching", seed=s, **(HARD | m)) for m in METHODS for s in (0, 1)]
    together = toy.run(configs, data, workers=2)
    for config, outcome in zip(configs, together, strict=True):
        assert same_bits(outcome, toy.run([config], data, workers=1)[0]), config.method


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["algorithm"])
def test_resumed_equals_straight_through_bit_for_bit(method):
    data = toy.images(samples=90)
    config = toy.config(model="toy:normed", **(HARD | method))
    straight = toy.Memory()
    run_stack([Task(config, straight)], data, RunOptions(device="cpu", checkpoint_every=1))
    for checkpoint in straight.saves[:: max(1, len(straight.saves) // 4)]:
        again = toy.Memory()
        again.saved = checkpoint
        again.records = list(checkpoint[1])
        outcome = run_stack([Task(config, again)], data, RunOptions(device="cpu"))[0]
        assert same_bits(outcome, straight.outcome)


def test_a_checkpoint_whose_selector_cannot_go_on_is_named_and_left_alone():
    """Turns that FLIPS counted for the clusters of one k-means start mean nothing for those of ten."""
    data = toy.images(samples=400, classes=5)
    settings = {"selector": "flips", "clients": 30, "partition": "dir:0.5", "model": "toy:linear", "rounds": 4}
    first, second = (toy.config(seed=seed, **settings) for seed in (0, 1))
    straight = toy.Memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flips, "STARTS", 1)
        run_stack([Task(second, straight)], data, RunOptions(device="cpu", checkpoint_every=2))
    again = toy.Memory()
    again.saved = straight.saves[0]
    tasks = [Task(first, toy.Memory()), Task(second, again)]
    with pytest.raises(InputError, match=f"^checkpoint of {second.run_id}: state: counts the turns of clusters"):
        run_stack(tasks, data, RunOptions(device="cpu"))
    assert not hasattr(again, "begun")


def test_a_checkpoint_of_one_trainer_continues_in_another():
    data = toy.images(samples=90)
    config = toy.config(model="toy:branching", rounds=6, algorithm="scaffold")
    straight = toy.Memory()
    run_stack([Task(config, straight)], data, RunOptions(device="cpu", trainer="loop", checkpoint_every=3))
    again = toy.Memory()
    again.saved = straight.saves[0]
    outcome = run_stack([Task(config, again)], data, RunOptions(device="cpu", trainer="stacked"))[0]
    assert toy.difference(outcome, straight.outcome) < 1e-5


@pytest.fixture
def interruptible():
    """Ctrl-C as at a terminal, also where the tests run as a background job that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_saves_every_run_and_loses_nothing():
    data = toy.images(samples=90)
    config = toy.config(rounds=8)
    lines, told = [], threading.Event()
    straight = toy.run([config], data, say=lines.append)[0]
    assert STOPPING not in lines
    memory = toy.Memory()

    def say(line):
        lines.append(line)
        if line == STOPPING:
            told.set()

    def stop(event):
        if event.round == 3:
            os.kill(os.getpid(), signal.SIGINT)
            assert told.wait(60), "it is said at once, not when the round is over"

    with pytest.raises(KeyboardInterrupt):
        run_stack([Task(config, memory)], data, RunOptions(device="cpu", checkpoint_every=100, say=say), stop)
    assert lines.count(STOPPING) == 1
    memory.saved = memory.saves[-1]
    assert memory.saved[0].round == 3
    assert same_bits(run_stack([Task(config, memory)], data, RunOptions(device="cpu"))[0], straight)
    with pytest.raises(KeyboardInterrupt):  # the handler was put back
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_stops_within_the_round():
    memory = toy.Memory()

    def stop(event):
        os.kill(os.getpid(), signal.SIGINT)
        assert event.round == 1
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the round goes on")

    with pytest.raises(KeyboardInterrupt):
        run_stack([Task(toy.config(rounds=8), memory)], toy.images(samples=90), RunOptions(device="cpu"), stop)
    assert not memory.saves


def test_a_diverged_run_counts_as_chance_and_the_others_go_on():
    data = toy.images(samples=90)
    good, bad = toy.config(rounds=12), toy.config(rounds=12, lr=1e12, momentum=0.9)
    lines = []
    outcomes = toy.run([good, bad, good.replace(seed=1)], data, say=lines.append)
    assert outcomes[0].diverged_round is None
    assert same_bits(outcomes[0], toy.run([good], data)[0])
    diverged = outcomes[1]
    assert 1 <= diverged.diverged_round <= 12
    assert len(diverged.records) == 12
    for record in diverged.records[diverged.diverged_round - 1 :]:
        assert record.accuracy == pytest.approx(100 / 3)
        assert record.loss is None
    assert all(r.bytes_up == 0 and not r.trained for r in diverged.records[diverged.diverged_round :])
    assert all(bool(torch.isfinite(t).all()) for t in diverged.model.values())
    assert any("diverged in round" in line for line in lines)


def test_out_of_memory_splits_the_stack_and_goes_on(monkeypatch):
    from fedentopt.simulation.trainers.stacked import StackedTrainer

    data = toy.images(samples=90)
    config = toy.config(cohort="5")
    straight = toy.run([config], data, trainer="stacked")[0]
    original = StackedTrainer._train

    def scarce(self, starts, work):
        if work.rows > 2:
            raise torch.OutOfMemoryError("no room")
        return original(self, starts, work)

    monkeypatch.setattr(StackedTrainer, "_train", scarce)
    lines = []
    outcome = toy.run([config], data, trainer="stacked", say=lines.append)[0]
    assert toy.difference(outcome, straight) < 1e-6
    assert any("out of GPU memory" in line and "stacks of" in line for line in lines)


class Kept(Algorithm):
    """Remembers every client's last model."""

    keeps_models = True


LENT = [({"algorithm": name}, True) for name in ("fedavg", "fedprox", "fednova", "fedlc")]
LENT += [({"algorithm": name}, False) for name in ("scaffold", "fedavgm", "fedexp", "fedentropy")]
LENT += [
    ({"selector": "fedentopt", "epsilon": 0.5}, True), ({"selector": "pow-d"}, True), ({"selector": "oort"}, False),
    ({"selector": "hics-fl"}, False), ({"selector": "clustered-update"}, False),
    ({"liars": "50%", "lie": "forge-head"}, False),
]  # fmt: skip


def lending(monkeypatch, *, never: bool) -> list[bool]:
    """Whether the models of each round were lent, as stacks train; memory of the trainer's own does not last."""
    from fedentopt.simulation.trainers.stacked import StackedTrainer

    original, seen = StackedTrainer.train, []

    def train(self, starts, work, *, lend=False):
        seen.append(lend)
        if self._buffers is not None:
            self._buffers.w.fill_(torch.nan)
        return original(self, starts, work, lend=lend and not never)

    monkeypatch.setattr(StackedTrainer, "train", train)
    return seen


def test_models_that_nobody_else_reads_are_averaged_where_they_were_trained(monkeypatch):
    data = toy.images(samples=90)
    configs = [toy.config(model="toy:layered", **(HARD | {"rounds": 3} | method)) for method, _ in LENT]
    algorithms = [None] * len(LENT)
    configs.append(toy.config(model="toy:layered", **(HARD | {"rounds": 3})))
    algorithms.append(Kept())

    def run(which: list[int]):
        tasks = [Task(configs[i], toy.Memory(), algorithm=algorithms[i]) for i in which]
        return run_stack(tasks, data, RunOptions(device="cpu", trainer="stacked"))

    with monkeypatch.context() as patch:
        lending(patch, never=True)
        expected = run(list(range(len(configs))))
    seen = lending(monkeypatch, never=False)
    for i, lent in enumerate([*(lent for _, lent in LENT), False]):
        seen.clear()
        assert same_bits(run([i])[0], expected[i]), configs[i].method
        assert set(seen) == {lent}, configs[i].method
    seen.clear()
    together = run([0, 4, 8])  # who reads them has them, and the others lose nothing
    assert set(seen) == {False}
    assert all(same_bits(a, expected[i]) for a, i in zip(together, [0, 4, 8], strict=True))
    seen.clear()
    assert all(same_bits(a, expected[i]) for a, i in zip(run([0, 2, 8]), [0, 2, 8], strict=True))
    assert set(seen) == {True}


def test_records_tell_the_truth():
    data = toy.images(samples=90)
    config = toy.config(rounds=20, evaluate_every=4, selector="fedentopt", buffer="2", epsilon=1.0)
    memory = toy.Memory()
    outcome = run_stack([Task(config, memory)], data, RunOptions(device="cpu"))[0]
    parts = partition(data.y_train, parse(config.partition), 6, config.seed, num_classes=3, min_samples=1)
    assert [r.round for r in outcome.records] == list(range(1, 21))
    for record in outcome.records:
        total = parts.counts[list(record.clients)].sum(0)
        assert record.entropy == pytest.approx(entropy(total))
        assert record.classes_covered == int((total > 0).sum())
        assert (record.accuracy is not None) == (record.round % 4 == 0 or record.round > 10)
    np.testing.assert_array_equal(memory.begun.label_counts, parts.counts)
    assert memory.begun.reported_counts is not None
    assert not np.array_equal(memory.begun.reported_counts, parts.counts)


def test_evaluation_matches_the_saved_model():
    data = toy.images(samples=90)
    outcome = toy.run([toy.config(rounds=3)], data)[0]
    model = toy.linear(3)
    model.load_state_dict(outcome.model)
    x = (torch.from_numpy(data.x_test).float() / 255 - 0.4) / 0.25
    with torch.no_grad():
        logits = model(x)
    y = torch.from_numpy(data.y_test)
    last = outcome.records[-1]
    assert last.accuracy == pytest.approx(100 * float((logits.argmax(1) == y).float().mean()), abs=1e-4)
    assert last.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-4)
    for c in range(3):
        mine = logits[y == c].argmax(1) == c
        assert last.class_accuracy[c] == pytest.approx(100 * float(mine.float().mean()), abs=1e-4)
    assert last.worst_class_accuracy == min(last.class_accuracy)


def test_bytes_are_exactly_what_travels():
    data = toy.images(samples=90)
    model = (3 * 8 * 8 * 3 + 3) * 4  # the linear model in fp32
    plain = toy.run([toy.config()], data)[0].records
    assert [(r.bytes_up, r.bytes_down) for r in plain] == [(3 * model, 3 * model)] * 3
    aware = toy.run([toy.config(selector="fedentopt")], data)[0].records
    assert aware[0].bytes_up == 3 * model + 6 * 3 * 4  # all six clients send three counts once
    assert aware[1].bytes_up == 3 * model
    scaffold = toy.run([toy.config(algorithm="scaffold")], data)[0].records
    assert [(r.bytes_up, r.bytes_down) for r in scaffold] == [(6 * model, 6 * model)] * 3
    dropping = toy.run([toy.config(dropout=0.5, rounds=6)], data)[0].records
    assert all(r.bytes_up == len(r.trained) * model and r.bytes_down == 3 * model for r in dropping)
    assert any(len(r.trained) < 3 for r in dropping)


def test_a_round_in_which_all_drop_out_leaves_the_model_as_it_was():
    data = toy.images(samples=90)
    outcome = toy.run([toy.config(dropout=1.0, rounds=2)], data)[0]
    start = toy.run([toy.config(dropout=1.0, rounds=1)], data)[0]
    assert all(r.trained == () and len(r.clients) == 3 for r in outcome.records)
    assert toy.difference(outcome, start) == 0
    assert outcome.records[0].accuracy == outcome.records[1].accuracy


def test_stragglers_are_marked_once_and_draw_their_epochs_each_time():
    data = toy.images(samples=90)
    config = toy.config(clients=6, cohort="6", stragglers=0.5, epochs=5)
    run = state(config, data)
    assert len(run.planner.stragglers) == 3
    epochs = {k: {t.epochs for r in range(1, 40) for t in run.planner.plan(r).work if t.client == k} for k in range(6)}
    for client, seen in epochs.items():
        assert seen == ({1, 2, 3, 4, 5} if client in run.planner.stragglers else {5})


def test_clients_without_samples_are_refused_by_the_setting_unless_noise_hides_them():
    config = toy.config(clients=12, partition="dir:0.05", min_samples=0)
    with pytest.raises(
        InputError, match=r"min_samples: 0 left \d+ of 12 clients without a sample .*accepted: at least 1"
    ):
        toy.run([config], toy.images())
    outcome = toy.run([config.replace(epsilon=0.5, cohort="12")], toy.images())[0]
    assert all(len(r.clients) == 12 > len(r.trained) > 0 for r in outcome.records)


def test_methods_of_a_seed_share_partition_and_start():
    data = toy.images(samples=90)
    memories = [toy.Memory(), toy.Memory(), toy.Memory()]
    configs = [toy.config(dropout=1.0, algorithm=a, seed=s) for a, s in (("fedavg", 0), ("fedlc", 0), ("fedavg", 1))]
    tasks = [Task(c, m) for c, m in zip(configs, memories, strict=True)]
    run_stack(tasks, data, RunOptions(device="cpu"))
    assert np.array_equal(memories[0].begun.label_counts, memories[1].begun.label_counts)
    assert not np.array_equal(memories[0].begun.label_counts, memories[2].begun.label_counts)
    assert toy.difference(memories[0].outcome, memories[1].outcome) == 0
    assert toy.difference(memories[0].outcome, memories[2].outcome) > 0


def test_learning_rate_starts_at_its_setting_and_fedconcat_restarts_it():
    data = toy.images(samples=90)
    plain = state(toy.config(lr=0.1, lr_decay=0.5), data)
    assert [plain.lr(r) for r in (1, 2, 3)] == pytest.approx([0.1, 0.05, 0.025])
    concat = state(toy.config(algorithm="fedconcat", clusters=2, rounds=40, lr=0.1, lr_decay=0.5), data)
    assert concat.lr(concat.first_stage + 1) == pytest.approx(0.1)
    assert concat.rounds > concat.first_stage + 9


def test_local_training_equals_the_engines_client():
    """One client a round and all its data: the engine's global model is the client's model."""
    data = toy.images(samples=40)
    config = toy.config(model="toy:normed", clients=2, cohort="1", rounds=2, algorithm="fedprox", mu=0.1)
    outcome = toy.run([config], data)[0]
    parts = partition(data.y_train, parse(config.partition), 2, config.seed, num_classes=3, min_samples=1)
    from fedentopt.models import build
    from fedentopt.randomness import key

    model = build(config.model, 3, seed=key(config.seed, "model") >> 1, image_size=8)
    for record in outcome.records:
        own = parts.indices[record.clients[0]]
        train_client(
            model, data.x_train[own], data.y_train[own], config=config, round_=record.round, client=record.clients[0],
            num_classes=3, mean=data.mean, std=data.std,
        )  # fmt: skip
    for name, value in model.state_dict().items():
        assert torch.equal(value, outcome.model[name]), name


class Halfway(Algorithm):
    """A user's algorithm: the server goes half the way."""

    def local_terms(self, client):
        return LocalTerms(mu=0.5)

    def mix(self, round):
        return Mixing(0.5, 0.5 * round.shares)


def halfway(config):
    return Halfway()


def not_one(config):
    return object()


def failing(config):
    raise RuntimeError("out of ideas")


class Picks(RandomSelector):
    """Selects what it is told to."""

    def __init__(self, *clients):
        super().__init__(cohort_size=len(clients))
        self.told = clients

    def select(self, available=None, *, losses=None):
        return replace(super().select(available), clients=self.told)


def picks_nobody_known(config):
    return Picks(0, 1, config.clients)


def picks_one_twice(config):
    return Picks(2, 2)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{__name__}:not_one", "made a object without register, select"),
        (f"{__name__}:failing", "calling .*test_engine:failing raised RuntimeError: out of ideas"),
        ("broken_for_test:factory", "importing broken_for_test raised SyntaxError"),
        (f"{__name__}:picks_nobody_known", r"selected \(0, 1, 6\); accepted: .* distinct numbers from 0 to 5"),
        (f"{__name__}:picks_one_twice", r"selected \(2, 2\)"),
    ],
)
def test_a_users_own_selector_is_refused_by_what_is_wrong(path, words, tmp_path, monkeypatch):
    (tmp_path / "broken_for_test.py").write_text("x = (")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"selector: .*{words}"):
        toy.run([toy.config(selector=path)], toy.images(samples=90))


class Ends(RandomSelector):
    def pick(self, available, losses):
        raise SystemExit(0)


class Unprepared(RandomSelector):
    def __init__(self, cohort_size, seed=0):
        """Forgets `super().__init__`."""


class Unwilling(RandomSelector):
    def register(self, counts, **more):
        raise AttributeError("nobody")


@pytest.mark.parametrize(("name", "words"), [
    ("Ends", ": select raised SystemExit: 0"), ("Unwilling", ": register raised AttributeError: nobody"),
    ("Unprepared", r" is not set up; accepted: an __init__ that calls super\(\).__init__"),
])  # fmt: skip
def test_what_a_users_own_selector_raises_is_one_line_that_names_it(name, words):
    with pytest.raises(InputError, match=f"selector: '{__name__}:{name}'{words}"):
        toy.run([toy.config(selector=f"{__name__}:{name}")], toy.images(samples=90))


def test_a_users_own_algorithm_and_its_refusals():
    data = toy.images(samples=90)
    own = toy.run([toy.config(algorithm=f"{__name__}:halfway")], data)[0]
    assert toy.difference(own, toy.run([toy.config()], data)[0]) > 1e-4
    for path, words in (
        ("nowhere:factory", "no module 'nowhere'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:not_one", "made a object"),
    ):
        with pytest.raises(InputError, match=words):
            toy.run([toy.config(algorithm=path)], data)


def test_devices_and_trainers_that_are_not_there_are_refused():
    with pytest.raises(InputError, match="'tpu' is unknown"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            resolve_device("cuda")
    with pytest.raises(InputError, match="trainer: 'quick' is unknown"):
        choose_trainer("quick", toy.linear(3), torch.device("cpu"), 8)
    with pytest.raises(InputError, match="cannot share a stack"):
        toy.run([toy.config(), toy.config(batch_size=16)], toy.images())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_client_that_is_not_finite_spoils_its_own_model_only(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from fedentopt.simulation.aggregation import Blend, blend_models

    layout = FlatLayout(toy.normed(3))
    starts = torch.randn(3, layout.width, device=device)
    trained = torch.randn(4, layout.width, device=device)
    trained[1, 5] = torch.nan
    halves = np.array([0.5, 0.5])
    blends = [Blend(0, 0.0, np.array([0, 1]), halves, halves), Blend(2, 0.25, np.array([2, 3]), 0.75 * halves, halves)]
    new = blend_models(starts, trained, blends, layout)
    assert not bool(torch.isfinite(new[0]).all())
    assert torch.equal(new[1], starts[1])
    parameters = layout.parameter_width
    expected = 0.25 * starts[2] + 0.375 * (trained[2] + trained[3])
    torch.testing.assert_close(new[2, :parameters], expected[:parameters])
    torch.testing.assert_close(new[2, parameters:], 0.5 * (trained[2] + trained[3])[parameters:])


def test_a_class_without_test_samples_has_no_accuracy():
    data = toy.images(samples=90)
    keep = data.y_test != 1
    data = replace(data, x_test=data.x_test[keep], y_test=data.y_test[keep])
    last = toy.run([toy.config()], data)[0].records[-1]
    assert np.isnan(last.class_accuracy[1])
    assert last.worst_class_accuracy == min(last.class_accuracy[0], last.class_accuracy[2])
    assert 0 <= last.accuracy <= 100


def test_figures_of_a_test_by_hand():
    # 1 of 3 and 3 of 4 right: 57.14 % in all; a summed loss of 3.5 over 7 samples.
    scores = Scores(torch.tensor([[9, 9], [1, 3]]), torch.tensor([0.0, 3.5], dtype=torch.float64))
    accuracy, loss, per_class = scores.read(1, torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert (accuracy, loss) == (pytest.approx(400 / 7), 0.5)
    assert per_class == (pytest.approx(100 / 3), 75.0)


def test_the_end_of_a_run_is_a_number_however_large():
    assert [RunState.finished.fget(SimpleNamespace(round=int(done), rounds=500)) for done in ("499", "500")] == [
        False,
        True,
    ]


@pytest.mark.parametrize(("algorithm", "words"), [("scaffold", "keeps vectors"), ("fedntd", "a local objective")])
def test_local_training_refuses_what_it_cannot_do(algorithm, words):
    data, config = toy.images(samples=9), toy.config(algorithm=algorithm)
    with pytest.raises(InputError, match=f"algorithm: '{algorithm}' .*{words}"):
        train_client(
            toy.linear(3), data.x_train, data.y_train, config=config, round_=1, client=0, num_classes=3,
            mean=data.mean, std=data.std,
        )  # fmt: skip


def test_a_batch_beyond_all_samples_is_all_of_them():
    data, start, trained = toy.images(samples=9), toy.linear(3), []
    for size in (len(data.y_train), 10**9):
        model = copy.deepcopy(start)
        train_client(
            model, data.x_train, data.y_train, config=toy.config(algorithm="fedavg", batch_size=size), round_=1,
            client=0, num_classes=3, mean=data.mean, std=data.std,
        )  # fmt: skip
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_the_most_steps_of_a_client_and_a_round_without_anybody():
    labels = np.arange(70) % 3
    config = toy.config(partition="iid", clients=6, batch_size=5, epochs=3)  # twelve samples, or eleven: three batches
    planner = RunPlanner(config, labels, 3, build_selector(config, build_algorithm(config)))
    assert max(map(len, planner.parts.indices)) == 12
    assert planner.most_steps == 9
    assert RoundPlan(1, (0, 1), (), (), None).seconds == 0.0


class Forgetful(RandomSelector):
    """Remembers what JSON cannot keep."""

    name = "forgetful"
    kept: object = None

    def memory(self):
        return {"kept": self.kept}


@pytest.mark.parametrize("kept", [{1, 2}, (1, 2), {1: 2}, "circle"], ids=["set", "tuple", "number as a key", "circle"])
def test_a_memory_that_json_does_not_keep_is_refused(kept):
    circle: list[object] = []
    circle.append(circle)
    config = toy.config()
    selector = Forgetful(config.cohort_size)
    planner = RunPlanner(config, np.arange(70) % 3, 3, selector)
    assert planner.state_dict()["selector"]["kept"] is None
    selector.kept = circle if kept == "circle" else kept
    with pytest.raises(InputError, match="has a memory that JSON does not keep"):
        planner.state_dict()


def test_a_batch_size_beyond_all_data_is_all_of_a_clients_data():
    data = toy.images()
    whole, beyond = (toy.run([toy.config(batch_size=size)], data)[0] for size in (len(data.y_train), 10**20))
    assert toy.difference(whole, beyond) == 0
    assert [r.loss for r in whole.records] == [r.loss for r in beyond.records]
