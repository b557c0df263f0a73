"""Liars, the audit and the census in real rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import toy
from fedentopt.algorithms import Algorithm, Client, LocalTerms
from fedentopt.audit import Suspicion, area_under_curve
from fedentopt.datasets import load
from fedentopt.errors import InputError
from fedentopt.results.records import Outcome, RoundRecord
from fedentopt.selection import InferredSelector, Observation
from fedentopt.simulation import compare, simulate
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Stack, Task, run_stack
from fedentopt.simulation.jobs import with_own
from fedentopt.simulation.lies import claims, draw_liars

CPU = RunOptions(device="cpu")
MANY = {
    "clients": 12,
    "cohort": "4",
    "rounds": 6,
    "epochs": 3,
    "partition": "classes:1",
    "lr": 0.05,
    "selector": "fedentopt",
}
DATA = toy.images(samples=240, classes=4)
M = __name__


def without_bias(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, num_classes, bias=False))


def without_head(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, num_classes, 8), nn.Flatten())


def two_per_class(num_classes: int) -> nn.Module:
    """Logits are the larger of two outputs."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 64, 2 * num_classes), nn.Unflatten(1, (1, -1)), nn.MaxPool1d(2), nn.Flatten()
    )


class PlainSelector:
    """A selector of one's own that is no `Selector`, and whose counts stay what they were."""

    def register(self, counts: Any, **more: Any) -> None: ...

    def select(self, *args: Any, **more: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def plain_selector(*sizes: Any, **settings: Any) -> PlainSelector:
    return PlainSelector()


def stack_of(data: Any = DATA, **settings: Any) -> Stack:
    config = toy.config(**toy.PLAIN | MANY | settings)
    return Stack([Task(config, toy.Memory())], data, torch.device("cpu"), CPU, None)


def run(data: Any = DATA, **settings: Any) -> tuple[Outcome, Stack]:
    stack = stack_of(data, **settings)
    (outcome,) = stack.run(lambda: False)
    return outcome, stack


# --- lies
def test_lies() -> None:
    counts = np.array([[5, 0, 2], [9, 3, 0], [4, 4, 0], [1, 1, 1]])
    honest = claims(counts, (), "uniform", 0)
    np.testing.assert_array_equal(honest, counts)
    uniform = claims(counts, (0, 2), "uniform", 0)
    np.testing.assert_array_equal(uniform[[1, 3]], counts[[1, 3]])
    assert sorted(uniform[0].tolist()) == [2, 2, 3]
    assert uniform.sum(axis=1).tolist() == counts.sum(axis=1).tolist()
    assert claims(counts, (0,), "inflate", 0)[0].tolist() == [12, 12, 12]
    assert claims(counts, (0,), "rare", 0)[0].tolist() == [0, 0, 7]
    assert sorted(claims(counts, (0,), "permute", 3)[0].tolist()) == [0, 2, 5]
    np.testing.assert_array_equal(claims(counts, (0, 2), "forge-head", 0), uniform)
    kinds = {tuple(claims(counts, (0,), "mixed", seed)[0].tolist()) for seed in range(30)}
    assert (12, 12, 12) in kinds
    assert (0, 0, 7) in kinds
    assert draw_liars(3, 10, 1) == draw_liars(3, 10, 1) != draw_liars(3, 10, 2)


def test_liars_train_honestly() -> None:
    """Under random selection nothing looks at reports: not a bit may differ."""
    plain, _ = run(selector="random")
    lied, stack = run(selector="random", liars="50%", lie="rare")
    assert toy.difference(plain, lied) == 0
    planner = stack.runs[0].planner
    assert len(planner.liars) == 6
    assert planner.reported is not None
    changed = np.flatnonzero((planner.reported != planner.counts).any(axis=1))
    assert set(changed) <= set(planner.liars)


def test_a_forger_sends_the_bias_it_got() -> None:
    plain, _ = run(rounds=1, cohort="12", selector="random")
    forged, _ = run(rounds=1, cohort="12", selector="random", liars="12", lie="forge-head")
    moved = {name: float((plain.model[name] - forged.model[name]).abs().max()) for name in plain.model}
    assert moved["1.weight"] == 0
    assert moved["1.bias"] > 1e-4


@pytest.mark.parametrize("variant", ["niid", "gradient"])
def test_forgers_leave_in_what_the_server_takes_out(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would be told by it."""
    more = {"algorithm": "scaffold", "scaffold_variant": variant, "selector": "random"}
    stack = stack_of(rounds=3, cohort="12", liars="4", lie="forge-head", audit="warn", **more)
    planner = stack.runs[0].planner
    told: list[Observation] = []
    tell = planner.observe

    def listen(observations: dict[int, Observation]) -> None:
        told.extend(observations[k] for k in planner.liars)
        tell(observations)

    monkeypatch.setattr(planner, "observe", listen)
    stack.run(lambda: False)
    assert max(np.abs(seen.drift.bias).max() for seen in told) > 1e-5
    for seen in told:
        np.testing.assert_allclose(seen.head.bias, seen.drift.bias, atol=1e-6)


def test_forgers_without_a_bias_look_even_too() -> None:
    _, stack = run(rounds=3, selector="random", liars="12", lie="forge-head", audit="warn", model=f"{M}:without_bias")
    planner = stack.runs[0].planner
    assert planner.audit is not None
    for k in planner.audit.suspicions():
        np.testing.assert_allclose(planner.audit.estimate(k).shares, 0.25, atol=1e-3)


def test_forgers_forge_in_a_census_too() -> None:
    _, stack = run(selector="inferred", rounds=1, liars="12", lie="forge-head")
    for k in range(12):
        np.testing.assert_allclose(inferred(stack).estimate(k), 0.25, atol=1e-3)


# --- the audit
def test_replaced_reports_are_close_to_the_truth_and_select_well() -> None:
    lied, _ = run(liars="50%", lie="rare", rounds=12, cohort="4", buffer="0")
    mended, stack = run(liars="50%", lie="rare", rounds=12, cohort="4", buffer="0", audit="replace")
    planner = stack.runs[0].planner
    assert planner.audit is not None
    seen = [k for k in range(12) if planner.audit.times_seen(k)]
    for k in seen:
        estimate = planner.audit.estimate(k)
        assert estimate is not None
        truth = planner.counts[k] / planner.counts[k].sum()
        assert np.abs(estimate.shares - truth).sum() / 2 < 0.3
    later = slice(6, None)
    assert np.mean([r.entropy for r in mended.records[later]]) > np.mean([r.entropy for r in lied.records[later]])


def test_suspects_in_quarantine_are_not_chosen() -> None:
    outcome, stack = run(liars="2", lie="uniform", rounds=14, audit="quarantine", buffer="0")
    planner = stack.runs[0].planner
    assert planner.audit is not None
    suspects = planner.audit.suspects()
    assert set(suspects) == set(planner.liars)
    assert not set(outcome.records[-1].clients) & set(planner.liars)


def test_a_quarantine_that_leaves_too_few_lets_the_least_suspected_in(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = stack_of(audit="quarantine", buffer="0").runs[0].planner
    assert planner.audit is not None
    shares = np.full(4, 0.25)
    scores = {k: Suspicion(20.0 - k, 0.5, 0.1, shares, shares) for k in range(10)}
    monkeypatch.setattr(planner.audit, "suspects", lambda: scores)
    assert sorted(planner.plan(1).selected) == [8, 9, 10, 11]
    monkeypatch.setattr(planner.audit, "suspects", dict)
    assert len(planner.plan(2).selected) == 4


def test_reports_for_an_audit_are_counted() -> None:
    """Random selection needs none, its audit does."""
    plain, _ = run(selector="random", rounds=1)
    watched, _ = run(selector="random", rounds=1, audit="warn")
    assert watched.records[0].bytes_up - plain.records[0].bytes_up == 12 * 4 * 4


def test_rounds_say_what_the_server_knew() -> None:
    outcome, stack = run(liars="2", lie="rare", rounds=8, audit="warn", buffer="0")
    planner = stack.runs[0].planner
    first, last = outcome.records[0], outcome.records[-1]
    assert (first.estimate_error, first.suspicion_auc, first.suspects) == (None, None, 0)
    assert first.liars_chosen == len(set(first.clients) & set(planner.liars))
    assert last.estimate_error is not None
    assert last.estimate_error < 0.3
    assert last.suspicion_auc is None or last.suspicion_auc > 0.9
    claimed = planner.reported[list(last.clients)].sum(axis=0)
    shares = claimed[claimed > 0] / claimed.sum()
    assert last.believed_entropy == pytest.approx(-(shares * np.log2(shares)).sum())
    plain, _ = run()
    assert plain.records[0].believed_entropy is None
    inferring, _ = run(selector="inferred", rounds=1)
    assert inferring.records[0].estimate_error < 0.15


def test_the_area_under_a_curve() -> None:
    assert area_under_curve([3.0, 1.0], [2.0, 1.0]) == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert area_under_curve([], [1.0]) is None


def test_warning_changes_no_bit() -> None:
    plain, _ = run(liars="4", lie="uniform")
    warned, stack = run(liars="4", lie="uniform", audit="warn")
    assert toy.difference(plain, warned) == 0
    assert [r.clients for r in plain.records] == [r.clients for r in warned.records]
    assert stack.runs[0].planner.audit is not None


def test_caps_bound_what_a_claim_is_worth() -> None:
    stack = stack_of(liars="1", lie="inflate", size_cap=1)
    planner = stack.runs[0].planner
    (liar,) = planner.liars
    assert planner.selector.counts[liar].sum() <= np.median(planner.counts.sum(axis=1)) + 1e-9


@pytest.mark.parametrize("variant", ["niid", "gradient"])
def test_corrections_are_taken_out_of_what_is_told(variant: str) -> None:
    """SCAFFOLD pushes biases about; what is left after its known part shows the labels as FedAvg's does."""
    _, plain = run(rounds=8, audit="warn", selector="random", cohort="12")
    _, stack = run(
        rounds=8, audit="warn", selector="random", cohort="12", algorithm="scaffold", scaffold_variant=variant
    )
    for one in (plain, stack):
        planner = one.runs[0].planner
        assert planner.audit is not None
        errors = []
        for k in range(12):
            estimate = planner.audit.estimate(k)
            assert estimate is not None
            errors.append(np.abs(estimate.shares - planner.counts[k] / planner.counts[k].sum()).sum() / 2)
        assert np.mean(errors) < 0.2


@pytest.mark.parametrize("algorithm", ["fedlc", "fedrs", "balanced-softmax"])
def test_algorithms_that_change_the_bias_on_purpose_are_refused(algorithm: str) -> None:
    with pytest.raises(InputError, match=f"audit: warn reads labels from .* which {algorithm} changes on purpose"):
        stack_of(algorithm=algorithm, audit="warn")
    with pytest.raises(InputError, match=f"selector: 'inferred' reads labels .* which {algorithm} changes"):
        stack_of(algorithm=algorithm, selector="inferred")
    stack_of(algorithm=algorithm, size_cap=3)


@pytest.mark.parametrize("algorithm", ["fedlc", "fedrs", "balanced-softmax"])
def test_so_they_are_where_the_bias_tells_how_even_labels_are(algorithm: str) -> None:
    told = f"selector: 'hics-fl' reads labels from the bias of last layers, which {algorithm} changes on purpose"
    with pytest.raises(InputError, match=told):
        stack_of(algorithm=algorithm, selector="hics-fl")
    small: dict[str, Any] = {"dataset": "digits", "clients": 6, "cohort": "2", "rounds": 1, "epochs": 1}
    with pytest.raises(InputError, match=told):
        compare([f"{algorithm}+hics-fl"], seeds=1, **small)
    with pytest.raises(InputError, match=told):
        simulate({"algorithm": algorithm, "selector": "hics-fl", **small})
    stack_of(algorithm=algorithm, selector="divfl")  # compares changes, whatever they tell
    stack_of(algorithm="fedprox", selector="hics-fl")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"selector": "random", "audit": "replace"}, "audit: replace changes nothing, since 'random' does not select"),
        ({"selector": "clustered-size", "audit": "replace"}, "audit: replace changes nothing, since 'clustered-size'"),
        ({"selector": "random", "algorithm": "fedentropy", "audit": "replace"}, "nothing, since 'fedentropy'"),
        ({"selector": "inferred", "audit": "warn"}, "audit: warn is about label reports, and 'inferred' takes none"),
        ({"selector": "inferred", "size_cap": 2.0}, "size_cap: 2 changes nothing, since 'inferred' selects without"),
        ({"selector": "random", "size_cap": 2.0}, "size_cap: 2 changes nothing, since 'random' selects without"),
        ({"selector": f"{M}:plain_selector", "audit": "replace"}, "and '.*plain_selector' has no update"),
        ({"model": f"{M}:without_head", "audit": "warn"}, "audit: warn needs the change of the last layer"),
        ({"model": f"{M}:without_head", "liars": "2", "lie": "forge-head"}, "lie: forge-head needs the change of the"),
        ({"model": f"{M}:two_per_class", "audit": "warn"}, "has 8 outputs for 4 classes; accepted: a model whose last"),
    ],
)
def test_what_would_change_nothing_or_tell_nothing_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        stack_of(**settings)


def test_an_algorithm_is_not_asked_for_terms_before_anybody_trains() -> None:
    """Whoever has no sample never trains, and its terms may not even be defined."""

    class Counting(Algorithm):
        def local_terms(self, client: Client) -> LocalTerms:
            raise AssertionError(client)

    config = toy.config(**toy.PLAIN | MANY)
    Stack([Task(config, toy.Memory(), algorithm=Counting())], DATA, torch.device("cpu"), CPU, None)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="liars: '13' are more than there are clients; accepted: 0 to 12"):
        toy.config(**MANY | {"liars": "13"})
    with pytest.raises(InputError, match="lie: 'big' is unknown; accepted: uniform, inflate"):
        toy.config(lie="big")
    with pytest.raises(InputError, match="audit: 'no' is unknown; accepted: off, warn"):
        toy.config(audit="no")


# --- without reports
def inferred(stack: Stack) -> InferredSelector:
    selector = stack.runs[0].planner.selector
    assert isinstance(selector, InferredSelector)
    return selector


def test_a_census_tells_labels_before_round_1() -> None:
    outcome, stack = run(selector="inferred", rounds=2)
    planner = stack.runs[0].planner
    for k in range(12):
        estimate = inferred(stack).estimate(k)
        assert estimate is not None
        assert np.abs(estimate - planner.counts[k] / planner.counts[k].sum()).sum() / 2 < 0.15
    first, second = outcome.records
    model = (3 * 64 * 4 + 4) * 4
    assert first.bytes_up - second.bytes_up == 12 * 4 * 4
    assert first.bytes_down - second.bytes_down == 12 * model
    assert first.simulated_seconds > second.simulated_seconds
    assert first.classes_covered == 4


def test_no_report_is_looked_at() -> None:
    """Whatever clients claim, cohorts and models are the same."""
    honest, _ = run(selector="inferred", **{"selector.buffer": "2"})
    lied, _ = run(selector="inferred", liars="100%", lie="inflate", **{"selector.buffer": "2"})
    assert [r.clients for r in honest.records] == [r.clients for r in lied.records]
    assert toy.difference(honest, lied) == 0


def test_without_a_census_everybody_trains_once_first() -> None:
    outcome, _ = run(selector="inferred", rounds=5, **{"selector.census_epochs": 0, "selector.buffer": "0"})
    first = [client for record in outcome.records[:3] for client in record.clients]
    assert sorted(first) == list(range(12))
    assert outcome.records[0].bytes_down == outcome.records[1].bytes_down


def test_the_buffer_option_is_meant_for_every_kind_of_fedentopt() -> None:
    assert with_own({"selector": "inferred"}, {}, {"buffer": "7"})["selector.buffer"] == "7"
    assert with_own({"selector": "fedentopt"}, {}, {"buffer": "7"})["selector.buffer"] == "7"
    assert (
        not {"algorithm.mu", "selector.buffer"} & with_own({"algorithm": "moon"}, {}, {"mu": 7.0, "buffer": "7"}).keys()
    )


def test_a_census_can_be_short() -> None:
    _, stack = run(selector="inferred", rounds=1, **{"selector.census_samples": 4})
    plan = stack_of(selector="inferred", **{"selector.census_samples": 4}).runs[0].planner.census()
    assert plan is not None
    assert {len(task.samples) for task in plan.work} == {4}
    assert inferred(stack).estimate(0) is not None
    sizes = stack.runs[0].planner.counts.sum(axis=1)
    np.testing.assert_allclose(inferred(stack).sizes, sizes)


def same(settings: dict[str, Any], at: int) -> None:
    config: RunConfig = toy.config(**toy.PLAIN | MANY | settings)
    options = RunOptions(device="cpu", checkpoint_every=at)
    straight = toy.Memory()
    (whole,) = run_stack([Task(config, straight)], DATA, options)
    resumed = toy.Memory()
    resumed.saved = straight.saves[0]
    resumed.records = list(straight.saves[0][1])
    assert resumed.saved[0].round == at
    (rest,) = run_stack([Task(config, resumed)], DATA, options)
    assert [timeless(record) for record in rest.records] == [timeless(record) for record in whole.records]
    assert rest.clients == whole.clients
    assert toy.difference(whole, rest) == 0


def timeless(record: RoundRecord) -> RoundRecord:
    """Without what this machine took."""
    return replace(record, seconds=0.0, selection_seconds=0.0)


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"selector": "inferred"},
        {"selector": "inferred", "selector.census_epochs": 0},
        {"audit": "replace", "liars": "4", "lie": "mixed"},
        {"audit": "quarantine", "liars": "4", "lie": "uniform", "epsilon": 1.0, "buffer": "0"},
        {"audit": "replace", "algorithm": "scaffold", "size_cap": 2.0},
    ],
)
def test_a_run_that_was_stopped_goes_on(settings: dict[str, Any], at: int) -> None:
    same(settings, at)


def test_alone_and_in_a_stack() -> None:
    configs = [
        toy.config(**toy.PLAIN | MANY | more)
        for more in (
            {"selector": "inferred"},
            {"audit": "replace", "liars": "4"},
            {"selector": "inferred", "seed": 3},
            {},
        )
    ]
    together = toy.run(configs, DATA)
    for config, outcome in zip(configs, together, strict=True):
        (alone,) = toy.run([config], DATA)
        assert [r.clients for r in alone.records] == [r.clients for r in outcome.records]
        assert toy.difference(alone, outcome) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "toy:normed"},
        {"algorithm": "fedprox", "mu": 0.1},
        {"stragglers": 0.5, "dropout": 0.2, "epochs": 4},
        {"momentum": 0.9, "lr": 0.005, "weight_decay": 0.01},
    ],
    ids=["batch-norm", "fedprox", "stragglers", "momentum"],
)
def test_estimates_survive(settings: dict[str, Any]) -> None:
    _, stack = run(**{"rounds": 4, "audit": "warn", "selector": "random", "cohort": "12"} | settings)
    planner = stack.runs[0].planner
    assert planner.audit is not None
    shares = planner.counts / planner.counts.sum(axis=1, keepdims=True)
    found = {k: planner.audit.estimate(k) for k in range(12) if planner.audit.times_seen(k)}
    assert len(found) > 8
    assert np.mean([np.abs(estimate.shares - shares[k]).sum() / 2 for k, estimate in found.items()]) < 0.2
    assert planner.audit.suspects() == {}


@pytest.mark.parametrize("epsilon", [None, 0.5])
@pytest.mark.parametrize("partition", ["dir:0.1", "dir:0.5", "iid"])
def test_honest_clients_are_not_accused(partition: str, epsilon: float | None) -> None:
    """Real images, many seeds: at most 2 % of the clients of a run, on average, in the worst of its rounds."""
    settings = {"clients": 30, "cohort": "6", "buffer": "12", "rounds": 15, "epochs": 2, "evaluate_every": 15}
    base = {"dataset": "digits", "partition": partition, "audit": "warn", "selector": "fedentopt", "epsilon": epsilon}
    configs = [RunConfig.from_dict(base | settings | {"seed": seed}) for seed in range(6)]
    outcomes = toy.run(configs, load("digits"))
    worst = [max(record.suspects for record in outcome.records) for outcome in outcomes]
    assert np.mean(worst) <= 0.02 * 30
    assert all(outcome.records[-1].estimate_error is not None for outcome in outcomes)


def test_liars_are_found_among_real_images() -> None:
    settings = {"clients": 30, "cohort": "6", "buffer": "12", "rounds": 15, "epochs": 2, "evaluate_every": 15}
    base = {"dataset": "digits", "partition": "classes:2", "audit": "warn", "selector": "fedentopt"}
    lies = {"liars": "30%", "lie": "uniform"}
    outcomes = toy.run([RunConfig.from_dict(base | settings | lies | {"seed": s}) for s in range(3)], load("digits"))
    last = [outcome.records[-1] for outcome in outcomes]
    assert sum(record.honest_suspects for record in last) <= 0.02 * 21 * 3
    assert sum(record.suspects - record.honest_suspects for record in last) >= 0.7 * 9 * 3
    assert min(record.third_auc for record in last) > 0.95
