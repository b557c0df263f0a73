"""The audit in Flower: liars are named from the replies of their training, and what follows from that."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedXgbBagging,
    Strategy,
)

from fedentopt.audit import Suspicion, travel_of
from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware, LocalTraining, start, strategy_from
from fedentopt.flower.audit import Watch
from fedentopt.flower.checkpoint import Checkpoint, load, save
from fedentopt.flower.heads import head_names
from fedentopt.flower.progress import Progress
from fedentopt.flower.report import Report
from fedentopt.selection import ClusteredSizeSelector, InferredSelector, RandomSelector
from flower_fake_grid import CLASSES, FastClock, says
from flower_learners import LOCAL, LR, learners, node_of, picked, skewed_labels, start_model

LIARS = (1, 6, 9)
LABELS = skewed_labels(12)
EVERYBODY: dict[str, Any] = {"cohort_size": 12, "buffer_size": 0}


def made(kind: type[LabelAware] = FedEntOpt, **options: Any) -> Any:
    usual: dict[str, Any] = {
        "cohort_size": 4, "num_classes": CLASSES, "fraction_evaluate": 0.0, "min_available_nodes": 1, "local": LOCAL,
    }  # fmt: skip
    if "selector" not in options:
        usual["buffer_size"] = 4
    strategy = kind(**{**usual, **options})
    strategy.clock = FastClock()
    return strategy


# --- who is found
@pytest.mark.parametrize("audit", ["warn", "replace", "quarantine"])
def test_liars_are_found_and_named_and_honest_clients_are_not(audit: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = made(audit=audit)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=10)
    assert tuple(strategy.suspects()) == LIARS
    assert all(isinstance(why, Suspicion) for why in strategy.suspects().values())
    told = [record.getMessage() for record in caplog.records if "is suspected" in record.getMessage()]
    assert len(told) == 3  # each once, though it is suspected in many rounds
    for client in LIARS:
        assert any(f"client {client} (node {1000 - 17 * client}) is suspected: report and" in line for line in told)
    last = result.rounds[10]
    assert last["suspects"] == list(LIARS)
    assert last["suspicions"]["6"] == str(strategy.suspects()[6])
    assert result.train_metrics_clientapp[10]["selection-suspects"] == 3


def test_nobody_is_suspected_where_nobody_lies() -> None:
    for options, rounds in ((EVERYBODY, 3), ({}, 8)):
        strategy = made(audit="quarantine", **options)
        strategy.start(learners(LABELS), start_model(), num_rounds=rounds)
        assert len(strategy.watch._audit.suspicions()) > 8  # so many were looked at
        assert not any(entry.suspects for entry in strategy.history)


def test_balanced_clients_come_out_balanced_since_their_steps_are_known() -> None:
    even = [np.arange(40) % CLASSES for _ in range(12)]
    strategy = made(audit="replace", **EVERYBODY)
    strategy.start(learners(even), start_model(), num_rounds=1)
    assert not strategy.suspects()
    shares = strategy.selector.counts / strategy.selector.counts.sum(axis=1, keepdims=True)
    assert np.abs(shares - 1 / CLASSES).sum(axis=1).max() / 2 < 0.1


def test_warn_changes_no_pick_replace_and_quarantine_do() -> None:
    rounds = {}
    for audit in ("off", "warn", "replace", "quarantine"):
        strategy = made(audit=audit)
        strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=10)
        rounds[audit] = picked(strategy)
        if audit == "off":
            assert strategy.suspects() == {}
    assert rounds["warn"] == rounds["off"]
    taken = {audit: sum(c in LIARS for cohort in cohorts for c in cohort) for audit, cohorts in rounds.items()}
    assert taken["replace"] < taken["off"]
    late = [client for cohort in rounds["quarantine"][5:] for client in cohort]
    assert not set(late) & set(LIARS)


def test_replace_believes_the_estimate_at_the_size_that_is_claimed() -> None:
    strategy = made(audit="replace")
    strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=8)
    number = strategy.selector.numbers_of([6])[0]
    true = np.bincount(LABELS[6], minlength=CLASSES) / len(LABELS[6])
    counts = strategy.selector.counts[number]
    assert counts.sum() == pytest.approx(45)  # what it claims, less than the 48 that it says when it trains
    assert np.abs(counts / counts.sum() - true).sum() / 2 < 0.15


def test_the_size_of_one_who_is_believed_stays_within_the_cap() -> None:
    grid = learners(LABELS, liars=LIARS)
    grid.nodes[node_of(grid, 6)].query = says(6, [100000] * CLASSES)
    strategy = made(audit="replace", size_cap=3.0)
    strategy.start(grid, start_model(), num_rounds=6)
    assert strategy.watch._audit.times_seen(6)
    assert strategy.selector.counts[strategy.selector.numbers_of([6])[0]].sum() == pytest.approx(48)  # its weight


# --- quarantine
def by_hand(watch: Watch, monkeypatch: pytest.MonkeyPatch, scores: dict[Any, float]) -> None:
    why = {c: Suspicion(score, 0.5, 0.1, np.ones(2) / 2, np.ones(2) / 2) for c, score in scores.items()}
    monkeypatch.setattr(watch._audit, "suspects", lambda: why)
    watch._found = None


def test_the_least_suspected_fill_a_cohort_that_others_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(2, "quarantine")
    by_hand(watch, monkeypatch, {1: 9.0, 3: 4.0, 4: 5.0, 7: 1.0})
    assert watch.admitted([0, 1, 2, 3, 4], 2) == [0, 2]
    assert watch.admitted([0, 1, 2, 3, 4], 4) == [0, 2, 3, 4]
    assert watch.admitted([1, 3], 0) == []
    other = Watch(2, "warn")
    by_hand(other, monkeypatch, {1: 9.0})
    assert other.admitted([0, 1], 0) == [0, 1]
    assert other.due(8) == []


def test_those_in_quarantine_are_asked_again_after_1_2_4_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(2, "quarantine")
    by_hand(watch, monkeypatch, {5: 3.0})
    watch.tell(10, lambda client: 1)
    assert [number for number in range(10, 30) if watch.due(number) == [5]] == [11, 12, 14, 18, 26]


def test_a_liar_that_reports_the_truth_is_let_back(caplog: pytest.LogCaptureFixture) -> None:
    grid = learners(LABELS, liars=LIARS)
    strategy = made(audit="quarantine")

    def mend(number: int, arrays: ArrayRecord) -> None:
        if number == 6:
            assert 6 in strategy.suspects()
            grid.nodes[node_of(grid, 6)].query = None

    with caplog.at_level(logging.INFO, "flwr"):
        strategy.start(grid, start_model(), num_rounds=14, evaluate_fn=mend)
    assert tuple(strategy.suspects()) == (1, 9)
    assert "client 6 is no longer suspected: its new report fits" in caplog.text
    assert any(6 in cohort for cohort in picked(strategy)[6:])


def test_clients_that_leave_are_forgotten() -> None:
    grid = learners(LABELS, liars=LIARS)
    strategy = made(audit="quarantine", forget_after=2)

    def leave(number: int, arrays: ArrayRecord) -> None:
        if number == 6:
            assert 6 in strategy.suspects()
            grid.offline.add(node_of(grid, 6))

    strategy.start(grid, start_model(), num_rounds=10, evaluate_fn=leave)
    assert tuple(strategy.suspects()) == (1, 9)
    assert not strategy.watch._audit.times_seen(6)


def test_the_noise_that_excuses_is_the_usual_one_and_not_what_a_client_claims() -> None:
    watch = Watch(2, "warn")
    watch.take([Report(k, np.ones(2), 1.0) for k in range(4)] + [Report(9, np.ones(2), 0.001)])
    assert watch._audit.epsilon == 1.0
    watch.take([Report(k, np.ones(2), 1.0, samples_per_person=4) for k in range(4)])
    assert watch._audit.epsilon == 0.25
    watch.take([Report(k, np.ones(2), None) for k in range(4)])
    assert watch._audit.epsilon is None
    watch.forget(range(4))
    watch.take([Report(9, np.ones(2), 0.5)])
    assert watch._audit.epsilon == 0.5


# --- stopped and continued
@pytest.mark.parametrize("audit", ["replace", "quarantine"])
def test_a_run_stopped_in_the_middle_of_its_audit_goes_on_with_the_same_picks(audit: str, tmp_path: Path) -> None:
    whole = made(audit=audit)
    want = whole.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=9)
    cohorts = []
    for rounds in (1, 4, 9):
        strategy = made(audit=audit, checkpoint_dir=tmp_path)
        result = strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=rounds)
        cohorts += picked(strategy)
    assert cohorts == picked(whole)
    assert strategy.state_dict()["federation"] == whole.state_dict()["federation"]
    assert strategy.watch.arrays()["shares"].tobytes() == whole.watch.arrays()["shares"].tobytes()
    assert {client: str(why) for client, why in strategy.suspects().items()} == {
        client: str(why) for client, why in whole.suspects().items()
    }
    for name, array in want.arrays.items():
        assert array.data == result.arrays[name].data
    with pytest.raises(InputError, match=f"audit: None, but the checkpoint was written with '{audit}'"):
        made(checkpoint_dir=tmp_path).start(learners(LABELS), start_model(), num_rounds=10)


def test_a_checkpoint_keeps_of_suspects_and_reasons_what_changed_and_gives_back_whole_records(tmp_path: Path) -> None:
    """For thousands of suspects and over hundreds of rounds they were 90 MB, written after every round."""
    told = tmp_path / "rounds.jsonl"
    options: dict[str, Any] = {"audit": "warn", "checkpoint_dir": tmp_path / "c", "metrics_file": told, "size_cap": 1.0}

    def run(rounds: int, **more: Any) -> Any:
        grid = learners(LABELS, liars=LIARS)
        grid.nodes[node_of(grid, 3)].query = says(3, (3 * np.bincount(LABELS[3], minlength=CLASSES)).tolist())
        return made(**{**options, **more}).start(grid, start_model(), num_rounds=rounds)

    whole = run(24, checkpoint_dir=None)
    lines = told.read_text()
    assert whole.rounds[24]["suspects"] == [1, 3, 6, 9]  # 3 claims too many samples
    assert list(whole.rounds[24]["suspicions"]) == ["1", "6", "9"]
    for rounds in (1, 20):
        run(rounds)
    found = load(tmp_path / "c")
    assert found is not None
    told_of = [whole.rounds[number]["suspicions"] for number in range(1, 21)]
    changes = sum(dict(before).get(client) != why for before, now in zip([{}, *told_of], told_of, strict=False)
                  for client, why in now.items())  # fmt: skip
    assert 3 < changes < sum(map(len, told_of))
    assert json.dumps(found.meta["rounds"]).count("report and training differ") == changes
    earlier = {str(number): whole.rounds[number] for number in range(1, 21)}  # as they were written before
    for meta in (found.meta, {**found.meta, "rounds": earlier}):
        save(tmp_path / "c", replace(found, meta=meta))
        result = run(24)
        assert told.read_text() == lines
        assert result.rounds == whole.rounds
        after = load(tmp_path / "c")
        assert after is not None
        assert json.dumps(after.meta["rounds"]).count("report and training differ") < changes + 10


def test_a_line_of_the_file_does_not_repeat_the_reasons_of_many_suspects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Records have them all; a line has those that are new or changed, and names the others."""
    told = tmp_path / "rounds.jsonl"

    def run(rounds: int = 24) -> dict[int, dict[str, Any]]:
        options: dict[str, Any] = {"audit": "warn", "metrics_file": told, "checkpoint_dir": tmp_path / "c"}
        return made(**options).start(learners(LABELS, liars=LIARS), start_model(), num_rounds=rounds).rounds

    run(4)
    monkeypatch.setattr("fedentopt.flower.kept_records.MOST_REPEATED", 2)
    rounds = run()
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    named = [line.pop("suspicions_as_before", []) for line in lines]
    assert sum(map(len, named)) > 3
    known: dict[str, str] = {}
    for names, line, record in zip(named, lines, rounds.values(), strict=True):
        assert not set(names) & set(line["suspicions"])
        assert all(known.get(name) != why for name, why in line["suspicions"].items()) or len(line["suspicions"]) <= 2
        known |= line["suspicions"]
        assert {**line, "suspicions": {name: known[name] for name in [*line["suspicions"], *names]}} == record


def test_a_line_after_one_that_could_not_be_written_holds_all_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedentopt.flower.kept_records.MOST_REPEATED", 0)
    progress = Progress(tmp_path / "m.jsonl")
    progress.begin({})
    for number in (1, 2, 3, 4):
        lost = number == 2
        if lost:
            (tmp_path / "m.jsonl").rename(tmp_path / "away")
            (tmp_path / "m.jsonl").mkdir()
        progress.tell({"round": number, "suspicions": {"6": "why"}})
        if lost:
            (tmp_path / "m.jsonl").rmdir()
            (tmp_path / "away").rename(tmp_path / "m.jsonl")
    told = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [(line["round"], line["suspicions"]) for line in told] == [(1, {"6": "why"}), (3, {"6": "why"}), (4, {})]
    assert told[2]["suspicions_as_before"] == ["6"]


def test_estimates_lie_in_a_checkpoint_as_arrays_and_are_read_where_they_are_text(tmp_path: Path) -> None:
    """As text, 2,000 clients of 1,000 classes were 37 MB and most of a second after every round."""
    whole = made(audit="replace")
    whole.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=9)
    first = made(audit="replace", checkpoint_dir=tmp_path)
    first.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=4)
    found = load(tmp_path)
    assert found is not None
    kept = found.meta["selection"]["federation"]["roster"]["audit"]["audit"]
    assert [entry[2] for entry in kept["seen"]] == [None] * len(kept["seen"])
    assert found.arrays["watch"]["shares"].shape == (len(kept["seen"]), CLASSES)
    for entry, row in zip(kept["seen"], found.arrays["watch"]["shares"], strict=True):
        entry[2] = row.tolist()
    before = {name: group for name, group in found.arrays.items() if name != "watch"}
    save(tmp_path, Checkpoint(found.round, before, found.meta))
    strategy = made(audit="replace", checkpoint_dir=tmp_path)
    strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=9)
    assert picked(first) + picked(strategy) == picked(whole)
    assert strategy.watch.arrays()["shares"].tobytes() == whole.watch.arrays()["shares"].tobytes()


def test_a_checkpoint_without_an_audit_goes_on_with_one_that_only_watches(tmp_path: Path) -> None:
    made(checkpoint_dir=tmp_path).start(learners(LABELS, liars=LIARS), start_model(), num_rounds=2)
    found = load(tmp_path)
    assert found is not None
    assert "audit" not in found.meta["selection"]["federation"]["roster"]
    before = {name: value for name, value in found.meta["selection"].items() if name != "trained"}
    save(tmp_path, Checkpoint(found.round, found.arrays, {**found.meta, "selection": before}))  # as they used to be
    strategy = made(audit="warn", checkpoint_dir=tmp_path)
    strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=12)
    assert tuple(strategy.suspects()) == LIARS
    made(checkpoint_dir=tmp_path).start(learners(LABELS, liars=LIARS), start_model(), num_rounds=13)


# --- what cannot be honoured
def wrappers(strategy: Strategy) -> list[Strategy]:
    return [
        DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 1.0, 4),
        DifferentialPrivacyClientSideFixedClipping(strategy, 0.1, 1.0, 4),
        DifferentialPrivacyServerSideAdaptiveClipping(strategy, 0.1, 4),
        DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.1, 4),
    ]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("what", ["audit: warn", "selector: 'inferred'"])
def test_under_wrappers_that_hide_single_updates_it_is_refused(number: int, what: str) -> None:
    options: dict[str, Any] = {"audit": "warn"} if what.startswith("audit") else {"selector": InferredSelector(4)}
    grid = learners(LABELS)
    wrapper = wrappers(made(**options))[number]
    with pytest.raises(InputError, match=rf"{what}: reads labels .* which {type(wrapper).__name__} is there to hide"):
        start(wrapper, grid, start_model(), num_rounds=1)
    with pytest.raises(InputError, match=rf"{what}: reads the replies.*accepted: fedentopt.flower.start"):
        wrapper.start(grid, start_model(), num_rounds=1)
    assert not grid.sent("train")


class Around(DifferentialPrivacyServerSideFixedClipping.__mro__[2]):  # type: ignore[misc]  # Flower's Strategy
    """A wrapper of one's own that passes everything on."""

    def __init__(self, strategy: Any, hides: bool) -> None:
        self.strategy, self.hides_updates = strategy, hides

    def __getattribute__(self, name: str) -> Any:
        inner = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")
        return getattr(self.strategy, name) if name in inner else super().__getattribute__(name)

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = summary = None  # type: ignore[assignment]


def test_a_wrapper_of_ones_own_may_say_that_it_hides_updates() -> None:
    open_one = made(audit="warn", **EVERYBODY)
    start(Around(open_one, False), learners(LABELS, liars=LIARS), start_model(), num_rounds=1)
    assert tuple(open_one.suspects()) == LIARS
    with pytest.raises(InputError, match="which Around is there to hide"):
        start(Around(made(audit="warn"), True), learners(LABELS), start_model(), num_rounds=1)


def test_an_audit_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="audit: 'loud' is unknown; accepted: off, warn, replace, quarantine"):
        made(audit="loud")
    with pytest.raises(InputError, match="audit: warn is about label reports, and 'inferred' takes none"):
        made(audit="warn", selector=InferredSelector(4))
    for selector in (RandomSelector(4), ClusteredSizeSelector(4)):
        with pytest.raises(InputError, match="audit: replace changes nothing"):
            made(audit="replace", selector=selector)
    made(audit="quarantine", selector=RandomSelector(4)).start(learners(LABELS), start_model(), num_rounds=1)


def test_boosted_trees_have_no_last_layer() -> None:
    class EntTrees(LabelAware, FedXgbBagging):
        pass

    trees = ArrayRecord({"0": Array(np.zeros(3, dtype=np.uint8))})
    with pytest.raises(InputError, match="head: no array of the model has 5 rows"):
        made(EntTrees, audit="warn").start(learners(LABELS), trees, num_rounds=1)


def test_strategies_that_change_the_model_on_the_server_are_audited_too() -> None:
    class EntAdam(LabelAware, FedAdam):
        pass

    strategy = made(EntAdam, audit="warn", eta=0.05, **EVERYBODY)
    strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=2)
    assert tuple(strategy.suspects()) == LIARS


# --- which arrays
def of(**arrays: Any) -> ArrayRecord:
    shapes = {name.replace("__", "."): shape for name, shape in arrays.items()}
    return ArrayRecord({name: Array(np.zeros(shape, dtype=np.float32)) for name, shape in shapes.items()})


def test_the_last_layer_by_name() -> None:
    model = of(fc2__weight=(5, 9), fc2__bias=(5,), fc3__weight=(5, 5), fc3__bias=(5,))
    assert head_names(model, 5) == ("fc3.weight", "fc3.bias")
    assert head_names(model, 5, "fc2") == head_names(model, 5, ("fc2",)) == ("fc2.weight", "fc2.bias")
    assert head_names(model, 5, ("fc2.bias", "fc2.weight")) == ("fc2.weight", "fc2.bias")
    assert head_names(model, 5, "fc2.weight") == ("fc2.weight", None)
    for wrong, why in (
        ("fc", "head: 'fc' is no array of the model; accepted: fc2.weight, fc2.bias, fc3.weight, fc3.bias"),
        (("fc2.bias",), r"head: fc2.bias \(5,\); accepted: a weight with 5 rows or columns"),
        (("fc2.weight", "fc3.weight"), "accepted: a weight with 5 rows"),
    ):
        with pytest.raises(InputError, match=why):
            head_names(model, 5, wrong)


def test_the_last_layer_by_shape() -> None:
    assert head_names(of(kernel0=(5, 9), bias0=(9,), kernel1=(9, 5), bias1=(5,)), 5) == ("kernel1", "bias1")  # Keras
    flax = ArrayRecord({"Dense/bias": Array(np.zeros(5)), "Dense/kernel": Array(np.zeros((9, 5)))})
    assert head_names(flax, 5) == ("Dense/kernel", "Dense/bias")
    assert head_names(of(fc__weight=(5, 9), bn__weight=(5,), bn__bias=(5,)), 5) == ("fc.weight", None)
    with pytest.raises(InputError, match=r"head: fc.weight has 5 rows and a bias, but emb.weight comes after it; name"):
        head_names(of(fc__weight=(5, 9), fc__bias=(5,), emb__weight=(5, 3)), 5)
    with pytest.raises(InputError, match=r"head: a.weight and b.weight both have 5 rows or columns and no bias; name"):
        head_names(of(a__weight=(5, 9), b__weight=(5, 9)), 5)


def test_a_model_whose_last_layer_is_not_found_costs_no_round() -> None:
    grid = learners(LABELS)
    with pytest.raises(InputError, match="head: no array of the model has 5 rows"):
        made(audit="warn").start(grid, of(a=(3, 4), b=(3,)), num_rounds=1)
    assert not grid.asked
    strategy = made(audit="warn", head="fc", **EVERYBODY)
    strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=1)
    assert tuple(strategy.suspects()) == LIARS


# --- how far clients move
def test_the_travel_comes_from_the_server_or_from_the_clients() -> None:
    steps = 12
    told = learners(LABELS, liars=LIARS, metrics={"train_travel": travel_of(LR, 0.0, steps)})
    for options in ({"local": None}, {"local": {"lr": LR, "steps": steps}}, {"local": LocalTraining(**LOCAL)}):
        strategy = made(audit="warn", **EVERYBODY, **options)
        strategy.start(told, start_model(), num_rounds=1)
        assert tuple(strategy.suspects()) == LIARS
    with pytest.raises(InputError, match=r"local: the sizes of clients' steps are not known.*metric 'train_travel'"):
        made(audit="warn", local=None).start(learners(LABELS), start_model(), num_rounds=1)


@pytest.mark.parametrize(
    ("told", "followed", "want"),
    [
        ({}, False, 0.1 * 2 * 7),
        ({"server-round": 3}, False, 0.1 * 0.5**2 * 2 * 7),
        ({"lr": 0.3, "server-round": 3}, False, 0.3 * 2 * 7),
        ({"local-epochs": 5}, False, 0.1 * 5 * 7),
        ({"batch-size": 50}, False, 0.1 * 2 * 1),
        ({"census": 1, "local-epochs": 1}, False, 0.1 * 2 * 7),  # a client that trains as always
        ({"census": 1, "local-epochs": 1}, True, 0.1 * 7),
        ({"census": 1, "local-epochs": 1, "samples": 20}, True, 0.1 * 3),
    ],
)
def test_steps_are_counted_as_the_message_says(told: dict[str, Any], followed: bool, want: float) -> None:
    local = LocalTraining(lr=0.1, epochs=2, batch_size=7, lr_decay=0.5)
    assert local.travel(49, told, followed) == pytest.approx(want)


def test_momentum_and_fixed_steps_count() -> None:
    assert LocalTraining(lr=0.1, steps=9, momentum=0.9).travel(1, {}) == pytest.approx(travel_of(0.1, 0.9, 9))
    assert LocalTraining(lr=0.1, steps=9).travel(1, {"momentum": 0.5}) == pytest.approx(travel_of(0.1, 0.5, 9))
    assert LocalTraining(lr=0.1, steps=9).travel(1, {"census": 1, "local-epochs": 1}, True) is None
    assert LocalTraining(lr=0.1).travel(9, {}) is None
    assert LocalTraining(batch_size=3).travel(9, {}) is None


@pytest.mark.parametrize(
    ("local", "why"),
    [
        ({"lr": 0}, "local: lr 0 is out of range"),
        ({"epochs": 0}, "local: epochs 0 is out of range"),
        ({"epochs": None}, "local: epochs None"),
        ({"batch_size": 2.5}, "local: batch_size 2.5"),
        ({"momentum": 1.0}, "local: momentum 1.0 is out of range"),
        ({"lr_decay": -1}, "local: lr_decay -1"),
        ({"steps": 3, "batch_size": 4}, "local: give either steps, or"),
        ({"rate": 1}, "local: 'rate' is unknown; accepted: lr, epochs"),
    ],
)
def test_bad_settings_of_local_training_are_refused(local: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        made(audit="warn", local=local)


def test_who_says_that_it_went_far_is_not_believed_beyond_ten_times_the_usual() -> None:
    grid = learners(LABELS, metrics={"train_travel": 1.2})
    strategy = made(audit="warn", local=None, **EVERYBODY)
    train = grid._app

    def boast(message: Any) -> Any:
        from flwr.app import Context, RecordDict

        context = Context(1, node_of(grid, 3), {"data": node_of(grid, 3), "rank": 3}, RecordDict(), {})
        reply = train(message, context)
        next(iter(reply.content.metric_records.values()))["train_travel"] = 1e9
        return reply

    grid.nodes[node_of(grid, 3)].train = boast
    seen: dict[Any, Any] = {}
    watch = strategy.watch
    strategy.watch.observe, kept = lambda told: seen.update(told) or kept(told), watch.observe
    strategy.start(grid, start_model(), num_rounds=1)
    assert [round(seen[client].travel, 3) for client in (0, 3)] == [1.2, 12.0]


@pytest.mark.parametrize("start", [0.0, -2e38])
def test_a_last_layer_that_moved_further_than_it_can_ends_nothing_and_spoils_nobody(start: float) -> None:
    """From 0 to 2e38 is far; from -2e38 it is more than a float32 can hold."""
    grid = learners(LABELS, liars=LIARS)
    inner, wild = grid._app, node_of(grid, 3)

    def leap(message: Any, context: Any) -> Any:
        reply = inner(message, context)
        if context.node_id == wild and message.metadata.message_type == "train":
            bias = np.where(np.arange(CLASSES) == 0, 2e38, 0.0).astype(np.float32)
            reply.content["arrays"] = ArrayRecord({**reply.content["arrays"], "fc.bias": Array(bias)})
        return reply

    grid._app = leap  # type: ignore[assignment]
    model = start_model()
    bias = np.zeros(CLASSES, dtype=np.float32)
    bias[0] = start
    strategy = made(audit="warn", **EVERYBODY)
    strategy.start(grid, ArrayRecord({**model, "fc.bias": Array(bias)}), num_rounds=1)
    if start == 0:
        assert set(LIARS) <= set(strategy.suspects()) <= {*LIARS, 3}
        assert strategy.watch._audit.estimate(3).shares[0] > 0.9
    else:
        assert strategy.watch._audit.times_seen(3) == 0
        assert strategy.watch._audit.times_seen(4) == 1


@pytest.mark.parametrize("audit", ["warn", "inferred"])
def test_a_last_layer_without_a_bias_that_cannot_be_read_ends_nothing(audit: str) -> None:
    wild: set[int] = set()
    for travel, weight in ((1e-120, None), (5e-324, None), (1.2, 3e38)):
        grid = learners(LABELS, metrics={"train_travel": 1.2})
        inner = grid._app
        wild.add(node_of(grid, 3))

        def answer(message: Any, context: Any, inner: Any = inner, travel: float = travel, weight: Any = weight) -> Any:
            if message.metadata.message_type != "train":
                return inner(message, context)
            with_bias = ArrayRecord({**message.content["arrays"], "fc.bias": start_model()["fc.bias"]})
            message.content["arrays"] = with_bias
            reply = inner(message, context)
            reply.content["arrays"] = ArrayRecord({"fc.weight": reply.content["arrays"]["fc.weight"]})
            if context.node_id in wild:
                reply.content["metrics"]["train_travel"] = travel
                if weight is not None:
                    array = Array(np.full(start_model()["fc.weight"].shape, weight, np.float32))
                    reply.content["arrays"] = ArrayRecord({"fc.weight": array})
            return reply

        grid._app = answer  # type: ignore[assignment]
        model = ArrayRecord({"fc.weight": start_model()["fc.weight"]})
        if audit == "warn":
            strategy = made(audit="warn", local=None, **EVERYBODY)
        else:
            strategy = made(selector=InferredSelector(4), local=None)
        strategy.start(grid, model, num_rounds=1)
        seen = strategy.selector if audit == "inferred" else strategy.watch._audit
        assert seen.times_seen(3) == seen.times_seen(f"node-{node_of(grid, 3)}") == 0
        assert seen.times_seen(4) > 0


@pytest.mark.parametrize("cap", [10.0, None])
def test_one_who_claims_all_there_can_be_of_every_class_ends_nothing(cap: float | None) -> None:
    grid = learners(LABELS[:2])
    for client in (0, 1):
        grid.nodes[node_of(grid, client)].query = says(client, [2**53] * CLASSES)
    strategy = made(audit="replace", size_cap=cap, weight_cap=None, cohort_size=2, buffer_size=0)
    strategy.start(grid, start_model(), num_rounds=2)
    assert [len(entry.answered) for entry in strategy.history] == [2, 2]
    assert strategy.selector.counts.max() <= 2**53


def test_one_who_reports_nothing_but_noise_does_not_end_a_run_of_two() -> None:
    """Its ratio of samples to weight is the usual one of two, and the other is then taken for a single sample."""
    grid = learners(LABELS[:2])
    grid.nodes[node_of(grid, 0)].query = says(0, [-1] * CLASSES, 0.5)
    strategy = made(audit="warn", cohort_size=2, buffer_size=0, weight_cap=None)
    strategy.start(grid, start_model(), num_rounds=2)
    assert [len(entry.answered) for entry in strategy.history] == [2, 2]


def test_after_a_stop_another_way_to_count_steps_has_to_be_shown_to_work(tmp_path: Path) -> None:
    made(audit="warn", checkpoint_dir=tmp_path).start(learners(LABELS), start_model(), num_rounds=1)
    with pytest.raises(InputError, match="the sizes of clients' steps are not known"):
        made(audit="warn", checkpoint_dir=tmp_path, local=None).start(learners(LABELS), start_model(), num_rounds=2)


def test_weights_that_are_no_numbers_of_samples_do_not_mislead() -> None:
    for factor in (0, 5):  # all 1, or samples times epochs
        grid = learners(LABELS, liars=LIARS)
        inner = grid._app

        def other(message: Any, context: Any, inner: Any = inner, factor: int = factor) -> Any:
            reply = inner(message, context)
            for record in reply.content.metric_records.values() if not reply.has_error() else ():
                if "num-examples" in record:
                    record["num-examples"] = record["num-examples"] * factor or 1
            return reply

        grid._app = other  # type: ignore[assignment]
        strategy = made(audit="replace")
        strategy.start(grid, start_model(), num_rounds=8)
        assert tuple(strategy.suspects()) == LIARS
        assert strategy.selector.counts.sum(axis=1) == pytest.approx([48 if k not in LIARS else 45 for k in range(12)])


# --- from the run config
def test_from_the_run_config() -> None:
    told = {
        "cohort-size": 12, "num-classes": CLASSES, "buffer-size": 0, "audit": "quarantine", "local-lr": LR,
        "local-batch-size": 8, "local-epochs": 2, "head": "fc", "fraction-evaluate": 0.0, "min-available-nodes": 1,
    }  # fmt: skip
    strategy = strategy_from({f"fedentopt.{name}": value for name, value in told.items()})
    strategy.clock = FastClock()
    strategy.start(learners(LABELS, liars=LIARS), start_model(), num_rounds=1)
    assert tuple(strategy.suspects()) == LIARS
    assert strategy.learning.heads.local == LocalTraining(lr=LR, batch_size=8, epochs=2)
    with pytest.raises(InputError, match="local: 'rate' is unknown"):
        strategy_from({"fedentopt.cohort-size": 2, "fedentopt.num-classes": 5, "fedentopt.local-rate": 1.0})
    with pytest.raises(InputError, match="local-batch-size, local-epochs, local-lr, local-lr-decay, local-momentum"):
        strategy_from({"fedentopt.cohort-size": 2, "fedentopt.num-classes": 5, "fedentopt.bogus": 1.0})
