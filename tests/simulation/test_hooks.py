"""One's own algorithms in whole runs: every hook of every tier, resumed, stacked, counted, and refused where wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import toy
from fedentopt.algorithms import ALGORITHMS, Algorithm, FedAvgM, LocalTerms, Mixing, Round, SecondStage, overrides
from fedentopt.errors import InputError
from fedentopt.own_code import code_digest
from fedentopt.randomness import generator
from fedentopt.results.records import Outcome
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from fedentopt.simulation.methods import check_algorithm
from own_methods import Grouped, Judging, State
from reference_runs import HARD, TRAINERS, World, check, cohorts

M = __name__
CPU = RunOptions(device="cpu")


# --- each tier against straight-line torch
def data_tier(world: World, rounds: Sequence[Sequence[int]]) -> torch.Tensor:
    w = world.start
    shift = 0.1 * torch.arange(3)
    for r, cohort in enumerate(rounds, 1):
        trained = []
        for k in cohort:
            scale = torch.where(world.counts[k] > 0, 1.0, 0.5)

            def proximal(q: torch.Tensor, k: int = k, start: torch.Tensor = w) -> torch.Tensor:
                return 0.2 * (1 + k) / 2 * (q - start).square().sum()

            trained.append(world.train(w, r, k, logits=lambda z, scale=scale: scale * z + shift, extra=proximal))
        own = world.counts[list(cohort)]
        steps = torch.tensor([t.steps for t in trained])
        even = 1 / (1 + own.max(1).values - own.min(1).values) + steps / world.cfg.clients
        w = 0.25 * w + 0.75 * even / even.sum() @ torch.stack([t.w for t in trained])
    return w


def state_tier(world: World, rounds: Sequence[Sequence[int]]) -> torch.Tensor:
    after, w = dict(world.cfg.of("algorithm")).get("after", False), world.start
    trend, pace = torch.zeros_like(w), torch.full_like(w, 0.8)
    drift = torch.full((world.cfg.clients, len(w)), 0.01, dtype=torch.float64)
    for r, cohort in enumerate(rounds, 1):
        trained = []
        for k in cohort:
            push = 0.3 * trend + 0.5 * drift[k]
            trained.append(world.train(w, r, k, **{"push_after" if after else "push": push}))
        way = torch.stack([(w - t.w) / (t.steps * world.lr(r)) for t in trained])
        for k, own in zip(cohort, way, strict=True):
            drift[k] = 0.5 * drift[k] + 0.2 * own
        trend = trend + way.sum(0) / world.cfg.clients
        shares = world.shares(cohort).sqrt() / world.shares(cohort).sqrt().sum()
        w = w + pace * (shares @ torch.stack([t.w - w for t in trained])) - 0.001 * trend
        pace = 0.9 * pace
    return w - 0.01 * trend


def fair(world: World, rounds: Sequence[Sequence[int]]) -> torch.Tensor:
    w, q, number = world.start, 2.0, len(world.start)
    for r, cohort in enumerate(rounds, 1):
        above, below = torch.zeros_like(w), torch.tensor(0.0, dtype=torch.float64)
        for k in cohort:
            samples = world.parts.indices[k]
            loss = nn.functional.cross_entropy(world.logits(w, samples), world.y[torch.from_numpy(samples)])
            change = (w - world.train(w, r, k).w) / world.lr(r)
            above = above + loss**q * change
            below = below + q * loss ** (q - 1) * change.square().sum() + loss**q / world.lr(r)
        # Entry 579 of a row is padding; the linear model's own lie as torch has them.
        noise = generator(world.cfg.seed, "server", r, 7).standard_normal(number + 1, dtype=np.float32)[:number]
        w = w - above / (below * (1 + 0.1 * r)) + 0.01 * torch.from_numpy(noise).double()
    return w


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"algorithm": "own_methods:Data", "algorithm.strength": 0.2}, data_tier),
        ({"algorithm": "own_methods:State"}, state_tier),
        ({"algorithm": "own_methods:State", "algorithm.after": True}, state_tier),
        ({"algorithm": "own_methods:Fair"}, fair),
    ],
)
def test_own_algorithms_equal_straight_line_torch(settings, reference, trainer):
    data, cfg = toy.images(samples=70), toy.config(**HARD | settings)
    outcome = toy.run([cfg], data, trainer=trainer)[0]
    assert outcome.diverged_round is None
    world = World(cfg, data)
    check(outcome, world.named(reference(world, cohorts(outcome))))


class Headed(Algorithm):
    """Clients are pushed along the last round's change, which the server alone remembers."""

    server_vectors = ("change",)

    def push(self, vectors):
        return -0.5 * vectors.server["change"]

    def absorb(self, vectors, start, trained, round):
        vectors.server["change"] = (trained - start).mean(0)


def headed(world: World, rounds: Sequence[Sequence[int]]) -> torch.Tensor:
    w = world.start
    change = torch.zeros_like(w)
    for r, cohort in enumerate(rounds, 1):
        trained = torch.stack([world.train(w, r, k, push=-0.5 * change).w for k in cohort])
        change, w = (trained - w).mean(0), world.shares(cohort) @ trained
    return w


def test_a_push_of_server_vectors_alone_is_one_row_for_everybody():
    data, cfg = toy.images(samples=70), toy.config(**HARD | {"algorithm": f"{M}:Headed"})
    (outcome,) = toy.run([cfg], data)
    world = World(cfg, data)
    check(outcome, world.named(headed(world, cohorts(outcome))))


def test_where_the_push_enters_matters():
    data = toy.images(samples=70)
    inside, after = (
        toy.config(**HARD | {"algorithm": "own_methods:State", "algorithm.after": after}) for after in (False, True)
    )
    assert toy.difference(*toy.run([inside, after], data)) > 1e-4


def test_evaluated_is_what_is_scored_and_saved_and_not_what_goes_on():
    data, cfg = toy.images(samples=70), toy.config(**HARD | {"algorithm": "own_methods:State"})
    memory = toy.Memory()
    (outcome,) = run_stack([Task(cfg, memory)], data, replace(CPU, checkpoint_every=1))
    model = toy.linear(3)
    model.load_state_dict(outcome.model)
    x = (torch.from_numpy(data.x_test).float() / 255 - 0.4) / 0.25
    y = torch.from_numpy(data.y_test)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y).item()
    assert outcome.records[-1].loss == pytest.approx(loss, rel=1e-5)
    # What a checkpoint keeps is the model that goes on, from which the one scored that round differs by the trend.
    for saved, records in memory.saves:
        flat = saved.tensors["models"][0, :579] - 0.01 * saved.tensors["vectors.server.trend"][:579]
        model.load_state_dict({"1.weight": flat[:576].view(3, 192), "1.bias": flat[576:]})
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(x), y).item()
        assert records[-1].loss == pytest.approx(loss, rel=1e-5)


# --- what hooks are told
class Spy(Algorithm):
    """Notes what it is told."""

    reads_label_counts = True
    reads_losses = True
    server_vectors = ("v",)
    client_vectors = ("c",)

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Any] = []
        self.rounds: list[Round] = []
        self.absorbed: list[tuple[Any, ...]] = []
        self.stepped: list[tuple[Any, ...]] = []
        self.judged: list[Any] = []

    def local_terms(self, client):
        self.clients.append(client)
        return LocalTerms()

    def mix(self, round):
        self.rounds.append(round)
        return Mixing(0.0, round.shares)

    def absorb(self, vectors, start, trained, round):
        shapes = {n: tuple(v.shape) for n, v in (vectors.server | vectors.client).items()}
        self.absorbed.append((shapes, tuple(start.shape), tuple(trained.shape), round))

    def step(self, server, start, trained, shares):
        self.stepped.append((sorted(server), tuple(start.shape), tuple(trained.shape), shares.tolist()))
        return shares @ trained

    def judge(self, soft_labels, samples):
        self.judged.append((soft_labels, samples))
        return [0, len(samples) - 1]  # a list, and 0 twice where one client trained


def spied(**settings: Any) -> tuple[Spy, toy.Memory]:
    spy, memory = Spy(), toy.Memory()
    cfg = toy.config(**HARD | {"algorithm": f"{M}:Spy", "cohort": "3"} | settings)
    run_stack([Task(cfg, memory, algorithm=spy)], toy.images(samples=70), CPU)
    return spy, memory


@pytest.mark.parametrize("epsilon", [None, 0.5])
def test_what_a_round_is_told(epsilon):
    spy, memory = spied(epsilon=epsilon, dropout=0.3)
    counts, reported = memory.begun.label_counts, memory.begun.reported_counts
    sizes = counts.sum(1)
    trained = [record for record in memory.records if record.trained]
    assert [client.number for client in spy.clients] == [k for record in trained for k in record.trained]
    for client in spy.clients:  # what a client minimises, it knows without noise
        np.testing.assert_array_equal(client.label_counts, counts[client.number])
    assert len(spy.rounds) == len(spy.absorbed) == len(spy.stepped) == len(spy.judged) == len(trained)
    width = 580  # 579 parameters of the linear model, to a multiple of four
    for record, told, absorbed, stepped, judged in zip(
        trained, spy.rounds, spy.absorbed, spy.stepped, spy.judged, strict=True
    ):
        everybody = record.trained
        kept = tuple(dict.fromkeys((everybody[0], everybody[-1])))
        assert record.clients == kept
        for round_, clients in ((told, kept), (absorbed[3], everybody)):
            assert round_.number == record.round
            assert round_.clients == clients
            np.testing.assert_allclose(round_.shares, sizes[list(clients)] / sizes[list(clients)].sum())
            np.testing.assert_array_equal(round_.steps, 2 * -(-sizes[list(clients)] // 16))
            read = counts if reported is None else np.maximum(reported, 0)
            np.testing.assert_array_equal(round_.label_counts, read[list(clients)])
            assert round_.lr == pytest.approx(0.05 * 0.9 ** (record.round - 1))
            assert (round_.momentum, round_.total_clients) == (0.9, 5)
            assert torch.equal(round_.tensor(np.array([1.5, 2.5], np.float32)), torch.tensor([1.5, 2.5]))
            assert round_.seed == 5
        told_by = dict(zip(everybody, absorbed[3].losses.tolist(), strict=True))
        assert told.losses.tolist() == [told_by[k] for k in kept]
        assert len(set(told_by.values())) == len(everybody)
        assert absorbed[:3] == ({"v": (width,), "c": (len(everybody), width)}, (width,), (len(everybody), width))
        assert stepped[:3] == (["v"], (width,), (len(kept), width))
        assert stepped[3] == pytest.approx((sizes[list(kept)] / sizes[list(kept)].sum()).tolist())
        soft, samples = judged
        assert soft.shape == (len(everybody), 3)
        np.testing.assert_allclose(soft.sum(1), 1, rtol=1e-5)
        np.testing.assert_array_equal(samples, sizes[list(everybody)])


class Plain(Algorithm):
    """FedAvg, but on flat rows, with 0 / 0 where a row holds no parameter."""

    server_vectors = ("ones",)

    def initial(self, vector):
        return 1.0

    def step(self, server, start, trained, shares):
        assert float(server["ones"].sum()) == 579, "the padding holds nothing"
        change = shares @ (trained - start)
        server["ones"] = change / change
        return start + change * (change / change)


def test_the_padding_of_a_row_is_nobodys_business():
    data = toy.images(samples=70)
    own, plain = (toy.run([toy.config(**HARD | {"algorithm": a})], data)[0] for a in (f"{M}:Plain", "fedavg"))
    assert own.diverged_round is None
    assert toy.difference(own, plain) < 1e-5


# --- resumed, in a stack, counted
OWN = ["Data", "State", "Fair", "Code", "Judging", "Grouped"]
LEFT = [
    name for name in ALGORITHMS.names if name not in ("fedavg", "scaffold", "fednova", "fedentropy", "fedconcat")
]  # those are in test_engine
EVERY = [*LEFT, *(f"own_methods:{name}" for name in OWN)]
UNEVEN = {"stragglers": 0.5, "dropout": 0.2, "rounds": 5, "model": "toy:normed", "speed_spread": 0.5}


def figures(outcome: Outcome) -> list[Any]:
    return [replace(record, seconds=0.0) for record in outcome.records]


def same_bits(a: Outcome, b: Outcome) -> bool:
    return figures(a) == figures(b) and all(torch.equal(a.model[n], b.model[n]) for n in a.model)


@pytest.mark.parametrize("algorithm", EVERY)
def test_resumed_after_every_round_equals_straight_through_bit_for_bit(algorithm):
    data, cfg = toy.images(samples=90), toy.config(**UNEVEN, algorithm=algorithm)
    straight = toy.Memory()
    run_stack([Task(cfg, straight)], data, replace(CPU, checkpoint_every=1))
    assert [saved.round for saved, _ in straight.saves] == list(range(1, straight.outcome.rounds))
    for saved, records in straight.saves:
        again = toy.Memory()
        again.saved, again.records = (saved, records), list(records)
        (outcome,) = run_stack([Task(cfg, again)], data, CPU)
        assert same_bits(outcome, straight.outcome), saved.round


@pytest.mark.parametrize("code", [False, True])
def test_alone_equals_in_a_stack_bit_for_bit(code):
    data = toy.images(samples=90)
    named = [name for name in EVERY if (name in ("fedntd", "moon", "own_methods:Code")) == code]
    configs = [toy.config(**UNEVEN, algorithm=name, seed=seed) for name in named for seed in (0, 1)]
    together = toy.run(configs, data, workers=2)
    for cfg, outcome in zip(configs, together, strict=True):
        assert same_bits(outcome, toy.run([cfg], data, workers=1)[0]), cfg.method


def test_a_checkpoint_lacks_nothing_of_a_method_or_is_refused():
    data, cfg = toy.images(samples=90), toy.config(algorithm="own_methods:State")
    memory = toy.Memory()
    run_stack([Task(cfg, memory)], data, replace(CPU, checkpoint_every=1))
    saved, records = memory.saves[0]
    assert set(saved.tensors) == {"models", "vectors.server.trend", "vectors.server.pace"}
    trained = sorted(records[0].trained)
    kept = sorted((row.vector, row.client) for row in saved.rows)  # those that train on meanwhile are handed over first
    assert kept == [("vectors.client.drift", k) for k in trained]
    assert {row.values.shape for row in saved.rows} == {(580,)}
    for broken, words in (
        (
            {n: t for n, t in saved.tensors.items() if n != "vectors.server.pace"},
            "vectors.server.pace of shape nothing",
        ),
        (saved.tensors | {"vectors.client.drift": torch.zeros(5, 580)}, r"vectors.client.drift of shape \(5, 580\)"),
    ):
        again = toy.Memory()
        again.saved = (replace(saved, tensors=broken), records)
        with pytest.raises(InputError, match=f"checkpoint of .*{words}.*start anew without resuming"):
            run_stack([Task(cfg, again)], data, CPU)


def test_bytes_are_what_a_method_says_it_sends():
    data = toy.images(samples=90)
    model = (3 * 8 * 8 * 3 + 3) * 4
    state = toy.run([toy.config(algorithm="own_methods:State")], data)[0].records
    assert [(r.bytes_up, r.bytes_down) for r in state] == [(3 * 2 * model, 3 * 3 * model)] * 3
    judging = toy.run([toy.config(algorithm="own_methods:Judging")], data)[0].records
    counts = 6 * 3 * 4  # its draw reads label counts: all clients send theirs once
    assert [r.bytes_up for r in judging] == [
        3 * (2 * model + 3 * 4) + counts, 3 * (2 * model + 3 * 4), 3 * (2 * model + 3 * 4)
    ]  # fmt: skip
    assert [r.bytes_down for r in judging] == [3 * 3 * model] * 3
    fair = toy.run([toy.config(algorithm="own_methods:Fair")], data)[0].records
    assert [(r.bytes_up, r.bytes_down) for r in fair] == [(3 * (model + 4), 3 * model)] * 3  # and a loss
    silent = toy.run([toy.config(algorithm="feddyn")], data)[0].records
    assert [(r.bytes_up, r.bytes_down) for r in silent] == [(3 * model, 3 * model)] * 3


class GroupedByLoss(Grouped):
    reads_losses = True

    def mix(self, round: Round) -> Mixing:
        return Mixing(0.0, round.losses / round.losses.sum())


def test_no_losses_are_sent_in_a_second_stage_which_reads_none():
    cfg = toy.config(algorithm=f"{M}:GroupedByLoss", rounds=5, **toy.PLAIN)
    records = toy.run([cfg], toy.images(samples=90))[0].records
    model, layer = (3 * 8 * 8 * 3 + 3) * 4, (2 * 192 + 1) * 3 * 4
    counts = 6 * 3 * 4  # groups read the labels of all
    assert [r.bytes_up for r in records] == [3 * (model + 4) + counts, *[3 * (model + 4)] * 2, *[3 * layer] * 3]


def test_groups_and_a_second_stage_of_ones_own():
    data, cfg = toy.images(samples=90), toy.config(algorithm="own_methods:Grouped", rounds=5, **toy.PLAIN)
    memory = toy.Memory()
    (outcome,) = run_stack([Task(cfg, memory)], data, replace(CPU, checkpoint_every=1))
    assert outcome.rounds == len(outcome.records) == 6  # 5 - 2 and 3
    assert [("head" in saved.tensors) for saved, _ in memory.saves] == [False, False, False, True, True]
    assert {name.rpartition(".")[0] for name in outcome.model} == {"encoder.0.1", "encoder.1.1", "head"}
    assert outcome.model["head.weight"].shape == (3, 2 * 192)
    # Every group is trained by its own clients: the models of a group that drew nobody stay.
    before = None
    for (saved, _), record in zip(memory.saves[:3], memory.records, strict=False):
        models = saved.tensors["models"]
        if before is not None:
            moved = [not torch.equal(models[g], before[g]) for g in (0, 1)]
            assert moved == [any(k % 2 == g for k in record.trained) for g in (0, 1)]
        before = models
    # What the new layer costs: (2 * 192 + 1) * 3 numbers of 4 bytes, and once all encoders, which have none here.
    layer = (2 * 192 + 1) * 3 * 4
    assert [(r.bytes_up, r.bytes_down) for r in outcome.records[3:]] == [(3 * layer, 3 * layer)] * 3


def test_a_second_stage_needs_a_last_layer():
    with pytest.raises(InputError, match=r"model: Sequential has no nn\.Linear layer"):
        toy.run([toy.config(algorithm="own_methods:Grouped", model=f"{M}:headless")], toy.images())


def headless(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_an_own_draw_learns_who_was_kept():
    data, cfg = toy.images(samples=90), toy.config(algorithm="own_methods:Judging", rounds=4)
    memory = toy.Memory()
    run_stack([Task(cfg, memory)], data, replace(CPU, checkpoint_every=1))
    sizes, kept = memory.begun.label_counts.sum(1), {}
    for saved, records in memory.saves:
        record = records[-1]
        assert len(record.clients) == len(record.trained) - 1 == 2
        for k in record.trained:
            seconds = float(sizes[k]) * 2 / 1000
            kept[k] = kept.get(k, 0.0) + (seconds if k in record.clients else -0.5 * seconds)
        assert dict(saved.meta["planner"]["selector"]["kept"]) == pytest.approx(kept)


def test_the_digest_of_own_code_goes_with_the_run():
    memory, plain = toy.Memory(), toy.Memory()
    cfg = toy.config(algorithm="own_methods:Data", rounds=1)
    run_stack([Task(cfg, memory)], toy.images(), CPU)
    assert memory.begun.code_digest == code_digest(["own_methods:Data", "toy:linear"]) != ""
    run_stack([Task(cfg, plain, code="given")], toy.images(), CPU)
    assert plain.begun.code_digest == "given"


def test_a_second_run_of_an_object_starts_afresh():
    """What a method remembers is the run's, not the object's: also where two runs of a stack share it."""
    data, cfg, own = toy.images(samples=70), toy.config(algorithm="own_methods:State"), State()
    first, second = (run_stack([Task(cfg, toy.Memory(), algorithm=own)], data, CPU)[0] for _ in range(2))
    both = run_stack([Task(cfg, toy.Memory(), algorithm=own) for _ in range(2)], data, CPU)
    assert all(same_bits(first, other) for other in (second, *both))


# --- refused
def wrong(hook: str, *values: Any, **more: Any) -> Algorithm:
    """An algorithm whose `hook` gives the first value; `more` are further attributes of its class."""

    def gives(self: Algorithm, *_: Any) -> Any:
        if isinstance(values[0], BaseException):
            raise values[0]
        return values[0](*_) if callable(values[0]) else values[0]

    return type("Wrong", (Algorithm,), {hook: gives, **more})()


def step(self, server, start, trained, shares):
    return start


def loss(self, model, start, batch, context):
    return nn.functional.cross_entropy(model(batch.x), batch.y)


def forget(vectors, *_: Any) -> None:
    del vectors.server["v"]


def invent(vectors, *_: Any) -> None:
    vectors.client["other"] = vectors.client["v"]


def shorten(vectors, *_: Any) -> None:
    vectors.client["v"] = vectors.client["v"][:, :5]


def drop(server, start, *_: Any) -> torch.Tensor:
    server.clear()
    return start


VECTORS = {"server_vectors": ("v",), "client_vectors": ("v",)}
WRONG = [
    (wrong("local_terms", None), "local_terms gave None; accepted: LocalTerms"),
    (
        wrong("local_terms", LocalTerms(logit_shift=np.zeros(2))),
        "gave logit_shift of shape (2,); accepted: (3,), one",
    ),
    (wrong("local_terms", LocalTerms(mu=float("nan"))), "local_terms gave mu nan; accepted: a finite number"),
    (wrong("local_terms", LocalTerms(logit_scale=np.array(["a"] * 3))), "local_terms gave logit_scale ['a' 'a' 'a'];"),
    (
        wrong("local_terms", LocalTerms(logit_shift=[[1, 2], [3], []])),
        "local_terms gave logit_shift [[1, 2], [3], []];",
    ),
    (wrong("local_terms", LocalTerms(mu="1")), "local_terms gave mu '1'; accepted: a finite number"),
    (
        wrong("local_terms", LocalTerms(logit_scale=np.ones(3)), local_loss=loss),
        "local_terms gave logit_scale; accepted: none beside a local_loss, which sees plain logits",
    ),
    (wrong("local_terms", KeyError("k")), "local_terms raised KeyError: 'k'"),
    (wrong("mix", np.ones(3)), "mix gave [1. 1. 1.]; accepted: Mixing"),
    (wrong("mix", Mixing(0.0, np.ones(2))), "mix gave factors of shape (2,); accepted: (3,), one per client"),
    (wrong("mix", Mixing(0.5, np.ones(3)), step=step), "mix gave own 0.5; accepted: 0 where step combines"),
    (wrong("mix", Mixing(0.0, ["a", "b", "c"])), "mix gave factors ['a', 'b', 'c']; accepted: (3,) numbers, one"),
    (wrong("mix", Mixing("half", np.ones(3))), "mix gave own 'half'; accepted: a number"),
    (wrong("mix", Mixing(None, np.ones(3))), "mix gave own None; accepted: a number"),
    (wrong("mix", RuntimeError("two\nlines")), "mix raised RuntimeError: two"),
    (wrong("push", None), "push gave NoneType; accepted: a tensor of shape (3, 580)"),
    (wrong("push", torch.zeros(579)), "push gave torch.float32 of shape (579,); accepted: floats of shape (3, 580)"),
    (wrong("push", torch.zeros(3, 580).long()), "push gave torch.int64 of shape (3, 580); accepted: floats of shape"),
    (wrong("absorb", forget, **VECTORS), "absorb gave vectors []; accepted: ['v'], as declared"),
    (wrong("absorb", invent, **VECTORS), "absorb gave vectors ['other', 'v']; accepted: ['v'], as declared"),
    (
        wrong("absorb", shorten, **VECTORS),
        "absorb (v) gave torch.float32 of shape (3, 5); accepted: floats of shape",
    ),
    (wrong("absorb", AttributeError("no")), "absorb raised AttributeError: no"),
    (wrong("step", np.zeros(580)), "step gave ndarray; accepted: a tensor of shape (580,)"),
    (wrong("step", torch.zeros(3, 580)), "step gave torch.float32 of shape (3, 580); accepted: floats of shape (580,)"),
    (wrong("step", drop, **VECTORS), "step gave vectors []; accepted: ['v'], as declared"),
    (wrong("step", ValueError("boom")), "step raised ValueError: boom"),
    (
        wrong("evaluated", torch.zeros(3)),
        "evaluated gave torch.float32 of shape (3,); accepted: floats of shape (580",
    ),
    (wrong("initial", "much", server_vectors=("v",)), "initial gave 'much' for v; accepted: a finite number"),
    (wrong("initial", float("inf"), client_vectors=("c",)), "initial gave inf for c; accepted: a finite number"),
    (wrong("judge", []), "judge gave []; accepted: at least one index from 0 to 2"),
    (wrong("judge", None), "judge gave None; accepted: at least one index from 0 to 2"),
    (wrong("judge", [0, 3]), "judge gave [0, 3]; accepted: at least one index from 0 to 2"),
    (wrong("judge", np.array([True, False, True])), "judge gave [ True False True]; accepted: at least one index"),
    (wrong("judge", [0.5, 1.5]), "judge gave [0.5, 1.5]; accepted: at least one index from 0 to 2"),
    (wrong("judge", [-1]), "judge gave [-1]; accepted: at least one index from 0 to 2"),
    (
        wrong("groups", np.zeros(5, int)),
        "groups gave [0 0 0 0 0]; accepted: one whole number from 0 for each of 6",
    ),
    (wrong("groups", [[1, 2], [3]]), "groups gave [[1, 2], [3]]; accepted: one whole number from 0 for each of 6"),
    (
        wrong("groups", [0, 1, 2, 3, 4, 10**9]),
        "1000000000]; accepted: one whole number from 0 for each of 6 clients, b",
    ),
    (wrong("groups", np.zeros(6)), "groups gave [0. 0. 0. 0. 0. 0.]; accepted: one whole number from 0"),
    (wrong("groups", [0, 1, 0, 1, 0, -1]), "groups gave [0, 1, 0, 1, 0, -1]; accepted: one whole number from 0"),
    (wrong("second_stage", (3, 3, 3)), "second_stage gave (3, 3, 3); accepted: SecondStage of whole numbers, at least"),
    (wrong("second_stage", SecondStage(0, 3, 3)), "second_stage gave SecondStage(first=0, rounds=3, local_batches=3);"),
    (wrong("second_stage", SecondStage(3, 2.5, 3)), "accepted: SecondStage of whole numbers, at least 1 each, or None"),
    (wrong("local_loss", ValueError("boom")), "local_loss raised ValueError: boom"),
    (wrong("local_terms", SystemExit(0)), "local_terms raised SystemExit: 0"),
    (wrong("local_loss", SystemExit(0)), "local_loss raised SystemExit: 0"),
]


@pytest.mark.parametrize(("algorithm", "words"), WRONG, ids=[words[:60] for _, words in WRONG])
def test_a_hook_that_gives_what_it_must_not_is_named(algorithm, words):
    task = Task(toy.config(algorithm=f"{M}:Wrong"), toy.Memory(), algorithm=algorithm)
    with pytest.raises(InputError) as caught:
        run_stack([task], toy.images(samples=90), CPU)
    text = str(caught.value)
    assert text.startswith("algorithm: ")
    assert f"{M}:Wrong" in text
    assert words in text
    assert "\n" not in text
    assert len(text) < 250


def test_a_step_is_given_the_round_by_its_name_alone():
    class Named(Algorithm):
        def step(self, server, start, trained, shares, *, round):
            assert round.losses is None, "which it does not read"
            return start + round.number * (shares @ (trained - start))

    class Open(Algorithm):
        def step(self, *given):
            assert len(given) == 4
            return given[1] + given[3] @ (given[2] - given[1])

    class Decorated(Algorithm):
        @torch.no_grad()
        def step(self, server, start, trained, shares, round):
            return start + round.number * (shares @ (trained - start))

    data, cfg = toy.images(samples=70), toy.config(**HARD | {"rounds": 1})
    plain = toy.run([cfg], data)[0]
    for made in (Named(), Open(), Decorated()):
        named = cfg.replace(algorithm=f"{M}:{type(made).__name__}")
        (outcome,) = run_stack([Task(named, toy.Memory(), algorithm=made)], data, CPU)
        assert toy.difference(outcome, plain) < 1e-6


def test_losses_that_nothing_could_read_are_refused():
    with pytest.raises(InputError, match="'my:Odd' reads losses for a mix, step or absorb that it does not have"):
        check_algorithm(type("Odd", (Algorithm,), {"reads_losses": True})(), "my:Odd")


def test_a_long_answer_is_cut():
    task = Task(toy.config(algorithm=f"{M}:Wrong"), toy.Memory(), algorithm=wrong("mix", "x" * 1000))
    with pytest.raises(InputError, match=r"mix gave x{77}\.\.\.; accepted: Mixing"):
        run_stack([task], toy.images(samples=90), CPU)


def test_an_exception_of_a_built_in_method_is_a_bug_and_passes(monkeypatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(FedAvgM, "step", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        toy.run([toy.config(algorithm="fedavgm")], toy.images(samples=90))


def hook(*_: Any) -> None:
    """Any hook."""


CONTRADICTIONS = [
    ({"correction": "gradient"}, "sets correction, which nothing reads; accepted: push() and push_enters"),
    ({"judges_soft_labels": True}, "sets judges_soft_labels, which nothing reads; accepted: judge()"),
    ({"model_vectors": 2}, "sets model_vectors, which nothing reads; accepted: sends_down and sends_up"),
    ({"push_enters": "before"}, "has push_enters 'before'; accepted: 'gradient' or 'after'"),
    ({"server_vectors": "v"}, "has server_vectors 'v'; accepted: a tuple of names"),
    ({"client_vectors": ["v"]}, "has client_vectors ['v']; accepted: a tuple of names"),
    ({"server_vectors": (1,)}, "has server_vectors (1,); accepted: a tuple of names"),
    ({"sends_down": ("v",)}, "sends ('v',); accepted: names of ()"),
    ({"client_vectors": ("a",), "sends_up": ("b",)}, "sends ('b',); accepted: names of ('a',)"),
    ({"groups": hook, "step": hook}, "has groups and step; accepted: one of them"),
    ({"groups": hook, "push": hook, "absorb": hook}, "has groups and absorb, push; accepted: one of them"),
    ({"groups": hook, "evaluated": hook}, "has groups and evaluated; accepted: one of them"),
    ({"local_loss": hook, "second_stage": hook}, "has a local_loss and a second stage; accepted: one of them"),
    ({"keeps_models": True}, "keeps models for a local_loss that it does not have"),
    ({"own_selector": 3}, "has the own_selector 3; accepted: a class of the kind Selector"),
]


@pytest.mark.parametrize(("attributes", "words"), CONTRADICTIONS, ids=[words[:50] for _, words in CONTRADICTIONS])
def test_declarations_that_contradict_each_other_are_refused(attributes, words):
    made = type("Odd", (Algorithm,), attributes)()
    with pytest.raises(InputError) as caught:
        check_algorithm(made, "my.module:Odd")
    assert str(caught.value) == f"algorithm: 'my.module:Odd' {words}"


class OldGradient(Algorithm):
    correction = "gradient"


class OldJudge(Algorithm):
    judges_soft_labels = True


@pytest.mark.parametrize("name", ["OldGradient", "OldJudge"])
def test_declarations_of_before_are_refused_in_a_run(name):
    with pytest.raises(InputError, match=f"algorithm: '{M}:{name}' sets .*, which nothing reads"):
        toy.run([toy.config(algorithm=f"{M}:{name}")], toy.images())


def test_what_is_registered_and_what_stands_here_contradicts_nothing():
    for cls in (*ALGORITHMS, Judging):
        assert check_algorithm(cls(), cls.__name__).settings() == cls().settings()
    assert not overrides(Algorithm(), "step")
    assert overrides(Judging(), "step")
