"""The controllers over sites that are functions: who is asked, who trains, what is refused, going on after a stop."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="NVFlare is not installed")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.lr.fedavg import FedAvgLR

from fedentopt import EntropySelector
from fedentopt.errors import InputError
from fedentopt.nvflare import LabelAware, LabelAwareFedAvg, LabelAwareScaffold, kept_state, state
from fedentopt.nvflare.replies import check_reply
from fedentopt.nvflare.report import read_report, write_refusal, write_report
from fedentopt.selection import Selector
from fedentopt.server.backoff import Backoff
from nvflare_fake_sites import FakeServer, Site

CLASSES = 4
START = {"layer.weight": np.zeros((2, 3), np.float32), "head.weight": np.zeros((CLASSES, 2), np.float32)}
START |= {"head.bias": np.zeros(CLASSES, np.float32)}
COUNTS = {f"site-{k}": [20 * (k % 4 == c) + 5 * ((k + 1) % 4 == c) + k for c in range(CLASSES)] for k in range(1, 9)}

FIRST = "site-7"  # of a cohort of all sites, and so the first whose reply comes


def site(name: str, *, epsilon: float | None = None, train: Callable[[FLModel], Any] | None = None) -> Site:
    """A site that reports its counts and adds 1 to the model, or does with it what `train` says."""

    def answer(task: str, model: FLModel) -> Shareable | None:
        if task == "label_counts":
            return write_report(COUNTS[name], epsilon)
        reply = train(model) if train is not None else moved(model)
        return FLModelUtils.to_shareable(reply) if isinstance(reply, FLModel) else reply

    return answer


def moved(model: FLModel, by: float = 1.0, **more: Any) -> FLModel:
    meta = {"NUM_STEPS_CURRENT_ROUND": 1}
    controls = model.meta.get(AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL)
    if controls is not None:
        meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = {name: 0 * value + by for name, value in controls.items()}
    params = {name: value + np.float32(by) for name, value in model.params.items()}
    return FLModel(params=params, params_type=ParamsType.FULL, meta=meta, **more)


def everybody(**own: Site) -> dict[str, Site]:
    return {name: own.get(name.replace("-", "_"), site(name)) for name in COUNTS}


BASE = {"cohort_size": 2, "num_classes": CLASSES, "num_rounds": 6, "train_timeout": 9}


def fedavg(**settings: Any) -> LabelAwareFedAvg:
    return LabelAwareFedAvg(**BASE | settings)


def scaffold(**settings: Any) -> LabelAwareScaffold:
    return LabelAwareScaffold(**BASE | settings)


def cohorts(controller: LabelAware) -> list[tuple[str, ...]]:
    return [tuple(map(str, each.cohort.clients)) for each in controller.history]


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_cohorts_are_those_of_the_selector(tmp_path: Path, make: Callable[..., LabelAware]) -> None:
    server = FakeServer(tmp_path, everybody(), START)
    done = server.run(make(buffer_size=4, seed=7))
    selector = EntropySelector(2, 4, seed=7)
    selector.register({name: COUNTS[name] for name in sorted(COUNTS)})
    assert cohorts(done) == [selector.select().clients for _ in range(6)]
    assert server.panics == []
    assert [task for task, _, _ in server.asked] == ["label_counts", *["train"] * 6], "every site is asked once"
    assert server.asked[0][1] == tuple(sorted(COUNTS))
    assert all(timeout == 9 for task, _, timeout in server.asked if task == "train")
    assert np.array_equal(server.persistor.model["head.bias"], np.full(CLASSES, 6, np.float32))
    assert server.persistor.saved == 6


def wrong_replies() -> dict[str, Callable[[FLModel], Any]]:
    def without(model: FLModel, name: str) -> FLModel:
        reply = moved(model)
        del reply.params[name]
        return reply

    def put(model: FLModel, name: str, value: Any) -> FLModel:
        reply = moved(model)
        reply.params[name] = value
        return reply

    def weigh(model: FLModel, steps: Any) -> FLModel:
        reply = moved(model)
        reply.meta["NUM_STEPS_CURRENT_ROUND"] = steps
        return reply

    return {
        "error": lambda model: make_reply(ReturnCode.EXECUTION_EXCEPTION),
        "silence": lambda model: None,
        "no DXO": lambda model: Shareable({"hello": 1}),
        "metrics only": lambda model: FLModel(metrics={"loss": 1.0}),
        "empty": lambda model: FLModel(params={}, params_type=ParamsType.FULL),
        "missing": lambda model: without(model, "head.bias"),
        "unknown": lambda model: put(model, "more", np.zeros(1)),
        "shape": lambda model: put(model, "head.bias", np.zeros((CLASSES, 1))),
        "nan": lambda model: put(model, "head.bias", np.full(CLASSES, np.nan, np.float32)),
        "infinite": lambda model: moved(model, by=math.inf),
        "text": lambda model: put(model, "head.bias", np.array(["a"] * CLASSES)),
        "object": lambda model: put(model, "head.bias", None),
        "ragged": lambda model: put(model, "head.bias", [[1], [1, 2]]),
        "a list": lambda model: put(model, "head.bias", [1.0] * CLASSES),
        "a difference": lambda model: FLModel(params=moved(model).params, params_type=ParamsType.DIFF),
        "a long name": lambda model: put(model, "x" * 10**6, np.zeros(1)),
        "weight complex": lambda model: weigh(model, np.complex128(1j)),
        "weight 0": lambda model: weigh(model, 0),
        "weight nan": lambda model: weigh(model, math.nan),
        "weight inf": lambda model: weigh(model, math.inf),
        "weight huge": lambda model: weigh(model, 1e300),
        "weight text": lambda model: weigh(model, "many"),
    }


@pytest.mark.parametrize("make", [fedavg, scaffold])
@pytest.mark.parametrize("wrong", wrong_replies())
def test_a_wrong_reply_is_its_sites_failure_alone(tmp_path: Path, make: Callable[..., LabelAware], wrong: str) -> None:
    server = FakeServer(tmp_path, everybody(site_3=site("site-3", train=wrong_replies()[wrong])), START)
    done = server.run(make(cohort_size=8, num_rounds=7))
    assert server.panics == []
    failed = [each.round for each in done.history if "site-3" in each.failed]
    assert failed == [0, 2, 5], "left alone for one round, then two, then four"
    assert all(set(each.failed) <= {"site-3"} for each in done.history)
    assert all(0 < len(reason) <= 300 for each in done.history for reason in each.failed.values())
    assert [len(each.cohort.clients) for each in done.history] == [8, 7, 8, 7, 7, 8, 7]
    assert np.allclose(server.persistor.model["head.bias"], 7)


@pytest.mark.parametrize("make", [fedavg, scaffold])
@pytest.mark.parametrize("dtype", ["float16", "float64", "longdouble", ">f4", "int8"])
def test_the_model_keeps_its_types_whatever_type_a_site_sends(
    tmp_path: Path, make: Callable[..., LabelAware], dtype: str
) -> None:
    def other_type(model: FLModel) -> FLModel:
        reply = moved(model)
        reply.params = {name: np.asarray(value).astype(dtype) for name, value in reply.params.items()}
        return reply

    server = FakeServer(tmp_path, {**everybody(), FIRST: site(FIRST, train=other_type)}, START)
    done = server.run(make(cohort_size=8, num_rounds=2))
    assert [len(each.answered) for each in done.history] == [8, 8]
    assert {name: value.dtype for name, value in server.persistor.model.items()} == dict.fromkeys(START, np.float32)
    assert np.allclose(server.persistor.model["head.bias"], 2)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_tensors_keep_their_types_too_and_no_honest_site_fails_by_anothers(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    start = {"fc.weight": torch.zeros(CLASSES, 2), "batches": torch.tensor(100_000)}

    def train(model: FLModel, name: str) -> FLModel:
        params = {key: value + 1 for key, value in model.params.items()}
        if name == FIRST:
            params["fc.weight"] = params["fc.weight"].to(getattr(torch, dtype))
        return FLModel(params=params, params_type=ParamsType.FULL, meta={"NUM_STEPS_CURRENT_ROUND": 2.0})

    sites = {name: site(name, train=lambda model, name=name: train(model, name)) for name in COUNTS}
    server = FakeServer(tmp_path, sites, {})
    server.persistor.model = start
    done = server.run(fedavg(cohort_size=8, num_rounds=2))
    assert [each.failed for each in done.history] == [{}, {}]
    assert server.persistor.model["fc.weight"].dtype == torch.float32
    assert torch.allclose(server.persistor.model["fc.weight"], torch.full((CLASSES, 2), 2.0))
    assert torch.allclose(server.persistor.model["batches"].double(), torch.tensor(100_002.0).double())


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_whole_models_and_differences_are_in_no_round_averaged_with_each_other(
    tmp_path: Path, make: Callable[..., LabelAware]
) -> None:
    def difference(model: FLModel) -> FLModel:
        reply = moved(model)
        reply.params = {name: np.ones_like(value) for name, value in reply.params.items()}
        reply.params_type = ParamsType.DIFF
        return reply

    start = {name: value + np.float32(50) for name, value in START.items()}
    server = FakeServer(tmp_path, {**everybody(), FIRST: site(FIRST, train=difference)}, start)
    done = server.run(make(cohort_size=8, num_rounds=3))
    assert server.panics == []
    assert [len(each.answered) for each in done.history] == [7] * 3, "most decide, though the first was another"
    assert not any(FIRST in each.answered for each in done.history)
    assert "type" in done.history[0].failed[FIRST]
    assert np.allclose(server.persistor.model["head.bias"], 50 + 3)


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_what_most_of_a_few_answers_are_is_decided_when_no_more_are_awaited(
    tmp_path: Path, make: Callable[..., LabelAware]
) -> None:
    def difference(model: FLModel) -> FLModel:
        reply = moved(model)
        reply.params_type = ParamsType.DIFF
        return reply

    mute = {name: site(name, train=lambda model: None) for name in [*COUNTS][-5:] if name != FIRST}
    server = FakeServer(tmp_path, {**everybody(), **mute, FIRST: site(FIRST, train=difference)}, START)
    done = server.run(make(cohort_size=8, num_rounds=1))
    assert server.panics == []
    assert len(done.history[0].answered) == 8 - 1 - len(mute)
    assert np.allclose(server.persistor.model["head.bias"], 1)


@pytest.mark.parametrize("make", [fedavg, scaffold])
@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_that_disagree_the_one_that_sends_what_it_was_sent_is_used_whoever_was_faster(
    tmp_path: Path, make: Callable[..., LabelAware], odd: int
) -> None:
    def difference(model: FLModel) -> FLModel:
        reply = moved(model)
        reply.params_type = ParamsType.DIFF
        return reply

    start = {name: value + np.float32(50) for name, value in START.items()}
    first = cohorts(FakeServer(tmp_path / "a", everybody(), start).run(make(num_rounds=1)))[0]
    sites = {**everybody(), first[odd]: site(first[odd], train=difference)}
    server = FakeServer(tmp_path / "b", sites, start)
    done = server.run(make(num_rounds=1))
    assert server.panics == []
    assert cohorts(done) == [first]
    assert done.history[0].answered == [first[1 - odd]]
    assert "type" in done.history[0].failed[first[odd]]
    assert np.allclose(server.persistor.model["head.bias"], 51)


def test_no_more_models_are_held_than_it_takes_to_be_certain(tmp_path: Path) -> None:
    steps: list[str] = []

    class Noting(LabelAwareFedAvg):
        def _aggregate_one_result(self, result: FLModel) -> bool:
            steps.append("used")
            return bool(super()._aggregate_one_result(result))

    def telling(model: FLModel) -> FLModel:
        steps.append("came")
        return moved(model)

    server = FakeServer(tmp_path, {name: site(name, train=telling) for name in COUNTS}, START)
    server.run(Noting(**{**BASE, "cohort_size": 8, "num_rounds": 2}))
    assert server.panics == []
    assert steps == ["came"] * 5 + ["used"] * 5 + ["came", "used"] * (3 + 8)


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_metrics_that_cannot_be_averaged_are_dropped(tmp_path: Path, make: Callable[..., LabelAware]) -> None:
    odd: dict[str, Any] = {"loss": np.zeros(7), "auc": math.nan, "each": np.zeros(3), "note": "hello", 3: 1j}

    def usual(model: FLModel) -> FLModel:
        return moved(model, metrics={"loss": 2.0, "auc": 0.5, "each": np.array([1.0, 2.0]), "table": {"a": 1}})

    sites = {name: site(name, train=usual) for name in COUNTS}
    sites["site-8"] = site("site-8", train=lambda model: moved(model, metrics=odd))
    server = FakeServer(tmp_path, sites, START)
    done = server.run(make(cohort_size=8, num_rounds=1, selector="random", seed=1))
    assert server.panics == []
    assert len(done.history[0].answered) == 8
    assert np.allclose(server.persistor.model["head.bias"], 1)


@pytest.mark.parametrize("odd", [None, {}, {"loss": np.zeros(7)}, {"loss": "low"}])
@pytest.mark.parametrize("since", [0, 1])
def test_the_metrics_of_one_site_take_nothing_from_those_of_the_others(tmp_path: Path, odd: Any, since: int) -> None:
    """It is the first to answer, and NVFlare's early stopping goes by the averages: an array there ended the job."""
    sent = [0]

    def first(model: FLModel) -> FLModel:
        sent[0] += 1
        return moved(model, metrics=odd if sent[0] > since else {"loss": 2.0})

    sites = {name: site(name, train=lambda model: moved(model, metrics={"loss": 2.0})) for name in COUNTS}
    server = FakeServer(tmp_path, {**sites, FIRST: site(FIRST, train=first)}, START)
    done = server.run(fedavg(cohort_size=8, num_rounds=6, stop_cond="loss < 0.1", patience=3))
    assert server.panics == []
    assert [len(each.answered) for each in done.history] == [8] * 4, "the loss no longer improves, so it stops early"
    assert done.best_target_metric_value == 2.0


def garbage(rng: np.random.Generator) -> Any:
    """Anything a site might put where a number, an array or a dictionary belongs."""
    shape = tuple(int(n) for n in rng.integers(0, 4, rng.integers(0, 4)))
    kinds: list[Any] = [
        None, 0, -1, 10**400, math.nan, -math.inf, True, "", "x" * 50, b"\xff", [], [[1], [1, 2]], {}, {"a": None},
        np.zeros(shape), np.full(shape, np.nan), np.zeros(shape, complex), np.array(["a"]), np.array([None]), 1j,
        np.datetime64("2020"), np.float32(1), range(3), (1, 2), object(), lambda: None,
    ]  # fmt: skip
    return kinds[int(rng.integers(len(kinds)))]


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_sites_that_answer_anything_at_all_stop_no_job(tmp_path: Path, make: Callable[..., LabelAware]) -> None:
    rng = np.random.default_rng(1)
    sent = [0]

    def odd_trainer(task: str, model: FLModel) -> Shareable | None:
        return write_report([1, 2, 3, 4], None) if task == "label_counts" else odd(task, model)

    def odd(task: str, model: FLModel) -> Shareable | None:
        sent[0] += 1
        choice = int(rng.integers(6))
        if choice == 0:
            return make_reply(str(garbage(rng)))
        if choice == 1:
            return Shareable({"DXO": garbage(rng), "data": garbage(rng)})
        if task == "label_counts":
            return write_report([garbage(rng) for _ in range(CLASSES)], garbage(rng)) if choice < 5 else None
        reply = moved(model)
        for where in (reply.params, reply.meta):
            for name in list(where):
                if rng.random() < 0.3:
                    where[name] = garbage(rng)
        if rng.random() < 0.3:
            reply.metrics = {"loss": garbage(rng), str(garbage(rng)): garbage(rng)}
        try:
            return FLModelUtils.to_shareable(reply)
        except Exception:
            return None

    sites = {name: site(name) for name in ("site-1", "site-2")}
    sites |= {f"odd-{number}": odd if number % 2 else odd_trainer for number in range(20)}
    server = FakeServer(tmp_path, sites, START)
    done = make(cohort_size=22, num_rounds=250, selector="random")
    done.failing.over = done.census.pauses.over = lambda site, now: True  # no pauses: more replies
    server.run(done)
    assert server.panics == []
    assert sent[0] >= 5000
    assert sum(len(each.failed) for each in done.history) > 1000
    assert sum(name.startswith("odd") for each in done.history for name in each.answered) > 30, "some are harmless"
    assert all({"site-1", "site-2"} <= set(each.answered) for each in done.history)
    assert np.isfinite(server.persistor.model["head.bias"]).all()


def test_scaffold_refuses_wrong_control_terms(tmp_path: Path) -> None:
    def without(model: FLModel) -> FLModel:
        return FLModel(params=moved(model).params, params_type=ParamsType.FULL)

    def infinite(model: FLModel) -> FLModel:
        reply = moved(model)
        reply.meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF]["head.bias"][0] = np.inf
        return reply

    sites = everybody(site_1=site("site-1", train=without), site_2=site("site-2", train=infinite))
    server = FakeServer(tmp_path, sites, START)
    done = server.run(scaffold(cohort_size=8, num_rounds=1))
    assert set(done.history[0].failed) == {"site-1", "site-2"}
    assert server.panics == []
    assert np.array_equal(done._global_ctrl_weights["head.bias"], np.ones(CLASSES, np.float32))


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_a_round_without_a_usable_reply_leaves_the_model(tmp_path: Path, make: Callable[..., LabelAware]) -> None:
    silent = {name: site(name, train=lambda model: None) for name in COUNTS}
    server = FakeServer(tmp_path, silent, START)
    done = server.run(make(num_rounds=3, state="study"))
    assert server.panics == []
    assert [each.answered for each in done.history] == [[], [], []]
    assert not server.persistor.model["head.bias"].any()
    assert state.load(tmp_path / "fedentopt" / "study").rounds == 3


@pytest.mark.parametrize("make", [fedavg, scaffold])
@pytest.mark.parametrize("kind", [ParamsType.FULL, ParamsType.DIFF])
def test_an_average_that_overflows_leaves_the_model(
    tmp_path: Path, make: Callable[..., LabelAware], kind: ParamsType
) -> None:
    def train(model: FLModel) -> FLModel:
        reply = moved(model, by=3e38 if model.current_round < 2 else 1.0)
        reply.params_type = kind
        return reply

    server = FakeServer(tmp_path, {name: site(name, train=train) for name in COUNTS}, START)
    with np.errstate(over="ignore", invalid="ignore"):
        done = server.run(make(num_rounds=4))
    assert server.panics == []
    assert np.isfinite(server.persistor.model["head.bias"]).all()
    assert np.isfinite(getattr(done, "_global_ctrl_weights", {"none": 0.0}).popitem()[1]).all()
    assert all(each.answered for each in done.history), "and the rounds after it are as good as any"


@pytest.mark.parametrize(
    "answer",
    [
        write_refusal(),
        write_report([1, 2, 3], None),
        write_report([1, 2, 3, -4], None),
        write_report([0, 0, 0, 0], None),
        write_report([1, 2, 3, math.nan], 1.0),
        write_report([1, 2, 3, 1e300], 1.0),
        write_report([1, 2, 3, 4], -1.0),
        write_report(["a", "b", "c", "d"], None),
        make_reply(ReturnCode.EXECUTION_EXCEPTION),
        make_reply("x" * 10**6),
        make_reply("no\nround 9: cohort of everybody \x1b[2J"),
        Shareable(),
        None,
    ],
)
def test_a_site_without_usable_counts_is_left_out_and_asked_again(
    tmp_path: Path, answer: Shareable | None, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def mended_later(task: str, model: FLModel) -> Shareable | None:
        if task != "label_counts":
            return FLModelUtils.to_shareable(moved(model))
        asked.append(len(done.history))
        return answer if len(asked) < 3 else write_report(COUNTS["site-5"], None)

    server = FakeServer(tmp_path, everybody(site_5=mended_later), START)
    done = fedavg(cohort_size=8, num_rounds=7, query_timeout=60)
    server.run(done)
    assert asked == [0, 2, 5], "after a pause of one round, then of two"
    assert ["site-5" in each for each in cohorts(done)] == [False] * 5 + [True] * 2
    waits = [timeout for task, _, timeout in server.asked if task == "label_counts"]
    assert waits == [60, 10, 10], "one silent site does not hold up the others for long"
    told = [record.getMessage() for record in caplog.records if "site-5 is left out" in record.getMessage()]
    assert told
    assert all(line.isprintable() and len(line) < 500 for line in told)


def test_a_site_that_claims_everything_is_taken_for_ten_of_the_median(tmp_path: Path) -> None:
    def liar(task: str, model: FLModel) -> Shareable | None:
        if task == "label_counts":
            return write_report([2**53] * CLASSES, None)
        return FLModelUtils.to_shareable(moved(model))

    sites = everybody(site_8=liar)
    done = FakeServer(tmp_path / "capped", sites, START).run(fedavg(state="s"))
    honest = [float(sum(COUNTS[f"site-{k}"])) for k in range(1, 8)]
    most = 10 * float(np.median([*honest, 2.0**55]))
    np.testing.assert_allclose(done.members.selector.sizes, [*honest, most])
    assert done.members.size("site-8") == most
    again = FakeServer(tmp_path / "capped", sites, START).run(fedavg(state="s"))
    np.testing.assert_array_equal(again.members.selector.counts, done.members.selector.counts)
    late = FakeServer(tmp_path / "late", sites, START)
    late.away = {"site-1"}
    controller = fedavg(num_rounds=3)
    late.run(controller)
    late.away = set()
    controller.members.take([read_report("site-1", write_report(COUNTS["site-1"], None), CLASSES)])
    np.testing.assert_allclose(controller.members.selector.sizes, [*honest, most])
    free = FakeServer(tmp_path / "free", sites, START).run(fedavg(size_cap=0))
    assert free.members.selector.sizes.tolist() == [*honest, 2.0**55]


@pytest.mark.parametrize("selector", ["divfl", "hics-fl", "clustered-update"])
def test_a_site_may_come_before_known_ones_while_the_selector_has_seen_nobody_train(
    tmp_path: Path, selector: str
) -> None:
    """Nothing is kept of anybody yet: neither a late site nor a restart may trip over that."""
    nobody = {name: site(name, train=lambda model: None) for name in COUNTS}
    server = FakeServer(tmp_path, nobody, START)
    server.away = {"site-1"}
    done = server.run(fedavg(num_rounds=1, selector=selector, state="s"))
    server.away = set()
    again = server.run(fedavg(num_rounds=2, selector=selector, state="s"))
    assert server.panics == []
    assert list(done.members.selector.clients) == sorted(set(COUNTS) - {"site-1"})
    assert list(again.members.selector.clients) == sorted(COUNTS)


def test_pauses_in_a_state_name_the_round_from_which_a_site_is_tried_again() -> None:
    pauses = Backoff()
    pauses.load_state_dict(state.read_pauses({"site-1": [2, 5], "site-2": [1, 3]}))
    assert [pauses.over("site-1", now) for now in (3, 4, 5)] == [False, False, True]
    assert [pauses.over("site-2", now) for now in (2, 3)] == [False, True]
    assert state.write_pauses(pauses.state_dict()) == {"site-1": [2, 5], "site-2": [1, 3]}
    pauses.answered("site-2")  # what it owes is kept too
    assert state.write_pauses(pauses.state_dict()) == {"site-1": [2, 5], "site-2": [0, 3, 2]}
    again = Backoff()
    again.load_state_dict(state.read_pauses(state.write_pauses(pauses.state_dict())))
    assert again.state_dict() == pauses.state_dict()


def test_waiting_for_the_first_counts_costs_a_site_no_more_than_one_failure(tmp_path: Path) -> None:
    asked: list[str] = []

    def mended_at(question: int, name: str) -> Site:
        def answer(task: str, model: FLModel) -> Shareable | None:
            if task != "label_counts":
                return FLModelUtils.to_shareable(moved(model))
            asked.append(name)
            return write_report(COUNTS[name], None) if asked.count(name) > question else write_refusal()

        return answer

    sites = {"site-1": mended_at(5, "site-1"), "site-2": mended_at(6, "site-2")}
    controller = fedavg(cohort_size=2, num_rounds=4)
    controller.poll_interval = 0.001
    FakeServer(tmp_path, sites, START).run(controller)
    assert cohorts(controller)[:2] == [("site-1",), ("site-1",)]
    assert all(set(each) == {"site-1", "site-2"} for each in cohorts(controller)[2:])
    assert controller.census.pauses.state_dict() == []  # who has told its counts is not asked again


def test_sites_that_are_away_or_excluded_do_not_train(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, everybody(), START)
    server.away = {"site-1", "site-2"}
    done = server.run(fedavg(cohort_size=3, exclude=["site-7"]))
    trained = {name for each in cohorts(done) for name in each}
    assert trained <= set(COUNTS) - {"site-1", "site-2", "site-7"}
    assert all("site-7" not in targets for _, targets, _ in server.asked)


def test_without_anybody_the_job_ends_with_the_reason(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, {"site-1": lambda task, model: write_refusal()}, START)
    controller = fedavg(node_timeout=1)
    controller.poll_interval = 0.1
    server.run(controller)
    assert "no site with known label counts is connected" in server.panics[0]


def test_a_selector_of_parts_of_clients_is_refused(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, everybody(), START)
    server.run(fedavg(selector="kl"))
    assert "selector: KLSelector lets sites train on part of their data" in server.panics[0]
    assert all(task != "train" for task, _, _ in server.asked)


@pytest.mark.parametrize("make", [fedavg, scaffold])
@pytest.mark.parametrize("selector", ["clustered-size", "cycle", "random"])
def test_weights_that_the_average_does_not_take_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[..., LabelAware], selector: str
) -> None:
    server = FakeServer(tmp_path, everybody(), START)
    done = server.run(make(selector=selector, cohort_size=6))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    about = [line for line in told if "ClusteredSizeSelector defines weights for the average" in line]
    assert len(about) == (selector == "clustered-size")
    smaller = min(map(len, cohorts(done))) < 6
    assert smaller == (selector != "random"), "somebody is drawn twice, or two sites are left of a cycle"
    assert not any("instead of 6 sites" in line for line in told), "which is no want of sites"
    server = FakeServer(tmp_path / "few", everybody(), START)
    server.away = set(list(COUNTS)[:4])
    server.run(make(selector=selector, cohort_size=6))
    told = [record.getMessage() for record in caplog.records]
    assert sum("instead of 6 sites" in line for line in told) == 6, "this is one, every round"


@pytest.mark.parametrize("make", [fedavg, scaffold])
@pytest.mark.parametrize("settings", [{"buffer_size": 4}, {"selector": "random"}, {"selector": "fed-cbs"}])
def test_a_restarted_server_goes_on_as_if_nothing_had_been(
    tmp_path: Path, make: Callable[..., LabelAware], settings: dict[str, Any]
) -> None:
    whole = FakeServer(tmp_path / "whole", everybody(), START)
    straight = whole.run(make(num_rounds=8, state="a study", **settings))

    first = FakeServer(tmp_path / "cut", everybody(), START)
    killed = 5

    def dying(name: str) -> Site:
        def train(model: FLModel) -> FLModel:
            if model.current_round >= killed:
                raise KeyboardInterrupt
            return moved(model)

        return site(name, train=train)

    first.sites = {name: dying(name) for name in COUNTS}
    with pytest.raises(KeyboardInterrupt):
        first.run(make(num_rounds=8, state="a study", **settings))
    second = FakeServer(tmp_path / "cut", everybody(), START)  # a new job: its persistor has the start model only
    again = second.run(make(num_rounds=8, state="a study", **settings))

    assert second.panics == []
    assert cohorts(again) == cohorts(straight)[killed:]
    assert all(task == "train" for task, _, _ in second.asked), "nobody is asked again"
    for name in START:
        assert np.array_equal(second.persistor.model[name], whole.persistor.model[name])
    if make is scaffold:
        assert np.array_equal(again._global_ctrl_weights["head.bias"], straight._global_ctrl_weights["head.bias"])
    third = FakeServer(tmp_path / "cut", everybody(), START)
    assert third.run(make(num_rounds=8, state="a study", **settings)).history == [], "it is finished"


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_sites_are_told_the_rounds_of_the_whole_study_also_after_a_restart(
    tmp_path: Path, make: Callable[..., LabelAware]
) -> None:
    told: list[tuple[int, int, int]] = []

    def noting(model: FLModel) -> FLModel:
        told.append((model.current_round, model.start_round, model.total_rounds))
        return moved(model)

    for rounds in (4, 6):
        sites = {name: site(name, train=noting) for name in COUNTS}
        FakeServer(tmp_path, sites, START).run(make(num_rounds=rounds, state="s", start_round=10))
    assert told[-4:] == [(14, 10, 6), (14, 10, 6), (15, 10, 6), (15, 10, 6)]


class Newest(ModelAggregator):
    """An aggregator of one's own: the last reply."""

    def accept_model(self, model: FLModel) -> None:
        self.last = model

    def aggregate_model(self) -> FLModel:
        return self.last

    def reset_stats(self) -> None: ...


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"size_cap": 5}, "size_cap: 5, but the state was written with 10.0"),
        ({"seed": 2}, "seed: 2, but the state was written with 0"),
        ({"cohort_size": 3}, "cohort_size: 3, but the state was written with 2"),
        ({"buffer_size": 1}, "buffer_size: 1, but the state was written with 0"),
        ({"num_classes": 5}, "num_classes: 5, but the state was written with 4"),
        ({"selector": "random"}, "the state was written with"),
        ({"num_rounds": 1}, "num_rounds: 1, but the state is already at round 2"),
        ({"fedprox_mu": 0.5}, "fedprox_mu: 0.5, but the state was written with"),
        ({"exclude_vars": "head.*"}, "exclude_vars: 'head.*', but the state was written with None"),
        (
            {"aggregation_weights": {"site-1": 5.0}},
            "aggregation_weights: {'site-1': 5.0}, but the state was written with",
        ),
        ({"aggregator": Newest()}, "aggregator: 'Newest', but the state was written with None"),
    ],
)
def test_going_on_under_other_settings_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    FakeServer(tmp_path, everybody(), START).run(fedavg(num_rounds=2, state="s"))
    server = FakeServer(tmp_path, everybody(), START)
    server.run(fedavg(**{"num_rounds": 4, "state": "s"} | settings))
    assert len(server.panics) == 1
    assert reason in server.panics[0]
    assert server.asked == []


def test_going_on_with_another_loss_is_refused_where_the_selector_looks_at_it(tmp_path: Path) -> None:
    def both(model: FLModel) -> FLModel:
        return moved(model, metrics={"loss": 1.0, "other": 2.0})

    sites = {name: site(name, train=both) for name in COUNTS}
    for selector, panics in (("oort", 1), ("random", 0)):
        FakeServer(tmp_path / selector, sites, START).run(fedavg(num_rounds=2, state="s", selector=selector))
        server = FakeServer(tmp_path / selector, sites, START)
        server.run(fedavg(num_rounds=4, state="s", selector=selector, loss_metric="other"))
        assert len(server.panics) == panics
    assert state.load(tmp_path / "random" / "fedentopt" / "s").rounds == 4


def test_a_state_that_another_job_uses_is_refused_until_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare runs several jobs at a time, each in its process: submitted twice, two would write one state by turns."""
    monkeypatch.setattr(kept_state, "PATIENCE", 0.1)
    server = FakeServer(tmp_path, everybody(), START)
    server.run(fedavg(num_rounds=1, state="s"))
    folder = tmp_path / "fedentopt" / "s"
    assert sorted(path.name for path in folder.iterdir()) == ["state.npz"]
    holder = (
        "import sys, pathlib; from fedentopt.server.state_files import kept_alone\n"
        "with kept_alone(pathlib.Path(sys.argv[1]), 'state'): print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", holder, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        asked = len(server.asked)
        server.run(fedavg(num_rounds=2, state="s"))
        assert f"is in use by another run (process {other.pid}); accepted: " in server.panics[0]
        assert len(server.asked) == asked
        other.kill()
    assert server.run(fedavg(num_rounds=2, state="s"))._rounds_done == 2
    assert len(server.panics) == 1


def test_another_model_or_controller_or_a_damaged_state_is_refused(tmp_path: Path) -> None:
    FakeServer(tmp_path, everybody(), START).run(fedavg(num_rounds=2, state="s"))
    other = FakeServer(tmp_path, everybody(), START | {"head.bias": np.zeros(9, np.float32)})
    other.run(fedavg(num_rounds=4, state="s"))
    assert "another model: head.bias is (4,), not (9,)" in other.panics[0]
    other = FakeServer(tmp_path, everybody(), START)
    other.run(scaffold(num_rounds=4, state="s"))
    assert "written by LabelAwareFedAvg, but continued by LabelAwareScaffold" in other.panics[0]
    newest = tmp_path / "fedentopt" / "s" / "state.npz"
    newest.write_bytes(newest.read_bytes()[:-100])
    other = FakeServer(tmp_path, everybody(), START)
    other.run(fedavg(num_rounds=4, state="s"))
    assert "cannot be read" in other.panics[0]
    newest.unlink()
    other = FakeServer(tmp_path, everybody(), START)
    assert len(other.run(fedavg(num_rounds=4, state="s")).history) == 3, "the one before, after round 1"


def test_a_model_given_to_the_controller_is_continued_too(tmp_path: Path) -> None:
    given = {name: value.copy() for name, value in START.items()}
    settings = {"persistor_id": "", "state": "s", "save_filename": None}
    FakeServer(tmp_path, everybody(), START).run(fedavg(num_rounds=2, model=given, **settings))
    done = FakeServer(tmp_path, everybody(), START).run(fedavg(num_rounds=5, model=given, **settings))
    assert [each.round for each in done.history] == [2, 3, 4]
    assert np.array_equal(state.load(tmp_path / "fedentopt" / "s").arrays["model"]["head.bias"], np.full(CLASSES, 5))


def test_stopping_early_saves_every_round_and_its_memory(tmp_path: Path) -> None:
    sites = {name: site(name, train=lambda model: moved(model, metrics={"loss": 1.0})) for name in COUNTS}
    server = FakeServer(tmp_path, sites, START)
    server.run(fedavg(num_rounds=9, state="s", stop_cond="loss <= 0.5", patience=3))
    kept = state.load(tmp_path / "fedentopt" / "s")
    assert kept.meta["early_stop"] == {"num_fl_rounds_without_improvement": 2, "best_target_metric_value": 1.0}
    assert server.persistor.saved == 1, "NVFlare saves the best model only"


class Remembering(Selector):
    """Needs all that NVFlare can tell, and remembers what it was told."""

    name = "remembering"
    needs = frozenset({"loss", "head", "update", "seconds", "kept"})

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self.told: list[dict[Any, Any]] = []

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return available[: self.cohort_size].tolist()

    def observe(self, observations: Any) -> None:
        self.told.append(dict(observations))


class AsksCandidates(Remembering):
    name = "asks-candidates"
    needs = frozenset({"candidate_loss"})


@pytest.mark.parametrize("kind", [ParamsType.FULL, ParamsType.DIFF])
def test_selectors_are_told_what_they_need(tmp_path: Path, kind: ParamsType) -> None:
    def train(model: FLModel, **more: Any) -> FLModel:
        base = model.params if kind == ParamsType.FULL else {name: 0 * value for name, value in model.params.items()}
        params = {name: value + np.float32(2) for name, value in base.items()}
        return FLModel(params=params, params_type=kind, **more)

    told_all = partial(train, metrics={"loss": 0.5, "loss_rms": 0.75})
    sites = everybody(site_1=site("site-1", train=told_all), site_2=site("site-2", train=train))
    server = FakeServer(tmp_path, sites, START)
    controller = fedavg(num_rounds=1, selector=f"{__name__}:Remembering")
    told = server.run(controller).members.selector.told
    assert server.panics == []
    assert [set(each) for each in told] == [{"site-1"}]
    seen = told[0]["site-1"]
    assert (seen.loss, seen.loss_rms, seen.kept) == (0.5, 0.75, True)
    assert seen.samples == sum(COUNTS["site-1"])
    assert seen.seconds >= 0
    assert seen.update.dtype == np.float32
    assert np.array_equal(seen.update, np.full(sum(value.size for value in START.values()), 2, np.float32))
    assert np.array_equal(seen.head.weight, np.full((CLASSES, 2), 2, np.float32))
    assert np.array_equal(seen.head.bias, np.full(CLASSES, 2, np.float32))


class WatchesHeads(Remembering):
    name = "watches-heads"
    needs = frozenset({"head"})


@pytest.mark.parametrize(
    ("local", "told"),
    [
        ({"lr": 0.1, "lr_decay": 0.5, "batch_size": 10}, [0.3, 0.4, 0.15, 0.2]),  # of 29 and 33 samples
        ({"lr": 0.1, "epochs": 2, "batch_size": 29}, [0.2, 0.4] * 2),
        ({"lr": 0.1, "steps": 4}, [0.4] * 4),
        ({"lr": 0.1, "steps": 2, "momentum": 0.5}, [0.25] * 4),  # 0.1 + 0.1 (1 + 0.5)
        (None, [None] * 4),
    ],
)
def test_with_a_head_comes_its_travel_where_the_server_knows_everybodys_steps(
    tmp_path: Path, local: dict[str, Any] | None, told: list[float | None]
) -> None:
    server = FakeServer(tmp_path, everybody(), START)
    done = server.run(fedavg(num_rounds=2, selector=f"{__name__}:WatchesHeads", local=local, size_cap=1.0))
    assert server.panics == []
    assert [seen.travel for each in done.members.selector.told for seen in each.values()] == [
        None if travel is None else pytest.approx(travel) for travel in told
    ]


@pytest.mark.parametrize("selector", ["hics-fl", "divfl"])
def test_sites_that_differ_in_step_size_alone_are_the_same_to_a_selector_that_knows_it(
    tmp_path: Path, selector: str
) -> None:
    """Every site moves by its number of steps times the round's step size: per unit of that, all moved alike."""

    def by_its_steps(name: str) -> Site:
        steps = -(-sum(COUNTS[name]) // 10)
        return site(name, train=lambda model: moved(model, 0.1 * 0.5**model.current_round * steps))

    sites = {name: by_its_steps(name) for name in COUNTS}
    local = {"lr": 0.1, "lr_decay": 0.5, "batch_size": 10}
    for given, alike in ((local, True), (None, False)):
        server = FakeServer(tmp_path / selector / str(alike), sites, START)
        done = server.run(fedavg(num_rounds=5, selector=selector, local=given))
        assert server.panics == []
        rows = done.members.selector.arrays()["vectors"]
        assert len(rows) == len(COUNTS)
        assert np.allclose(rows, rows[0], rtol=1e-4) == alike
        if alike:
            assert np.allclose(rows, 1.0, rtol=1e-4)


HEADLESS = {"layer.weight": np.zeros((2, 3), np.float32), "scores": np.zeros((2, CLASSES), np.float32)}


@pytest.mark.parametrize("kept_by", ["FedAvg's persistor", "FedAvg", "SCAFFOLD's persistor"])
@pytest.mark.parametrize(
    ("selector", "start", "settings", "reason"),
    [
        ("hics-fl", HEADLESS, {}, "head: selector hics-fl needs the last layer, and no parameter of the model has"),
        ("divfl", HEADLESS, {}, "as head=[weight, bias], of layer.weight, scores, or a selector"),
        ("divfl", START, {"head": ["out.weight"]}, "head: the model has no parameter 'out.weight'; accepted: layer"),
    ],
)
def test_a_model_whose_last_layer_is_not_found_is_refused_once_before_anybody_is_asked(
    tmp_path: Path, kept_by: str, selector: str, start: dict[str, np.ndarray], settings: dict[str, Any], reason: str
) -> None:
    make = scaffold if kept_by == "SCAFFOLD's persistor" else fedavg
    given = {"model": dict(start), "persistor_id": ""} if kept_by == "FedAvg" else {}
    server = FakeServer(tmp_path, everybody(), start)
    controller = server.run(make(selector=selector, **settings, **given))
    assert len(server.panics) == 1
    assert reason in server.panics[0]
    assert server.asked == []
    assert controller.failing.state_dict() == Backoff().state_dict(), "no site's failure"
    done = FakeServer(tmp_path, everybody(), start).run(make(num_rounds=1, selector="random", **given))
    assert len(done.history[0].answered) == 2, "random does not look at models"


@pytest.mark.parametrize("selector", ["divfl", "clustered-update"])
def test_a_selector_that_needs_the_models_change_is_refused_where_the_job_starts_without_a_model(
    tmp_path: Path, selector: str
) -> None:
    server = FakeServer(tmp_path, everybody(), {})
    server.run(fedavg(selector=selector, allow_empty_global_weights=True))
    assert len(server.panics) == 1
    assert f"model: selector {selector} needs to know how sites change the model" in server.panics[0]
    assert server.asked == []


def test_a_model_without_a_last_layer_that_comes_later_ends_the_job_and_is_no_sites_failure(tmp_path: Path) -> None:
    class Shrinks(LabelAwareFedAvg):
        """Sends another model than the one it loaded."""

        def send_model(self, *args: Any, **kwargs: Any) -> None:
            kwargs["data"].params = dict(HEADLESS)
            super().send_model(*args, **kwargs)

    server = FakeServer(tmp_path, everybody(), START)
    done = server.run(Shrinks(**BASE, selector="divfl"))
    assert len(server.panics) == 1
    assert "head: selector divfl needs the last layer" in server.panics[0]
    assert [task for task, _, _ in server.asked] == ["label_counts"]
    assert done.failing.state_dict() == Backoff().state_dict()


@pytest.mark.parametrize("kind", [ParamsType.FULL, ParamsType.DIFF])
def test_changes_beyond_single_precision_are_left_out_without_a_warning(tmp_path: Path, kind: ParamsType) -> None:
    start = {name: value.astype(np.float64) for name, value in START.items()}

    def diverge(model: FLModel) -> FLModel:
        return FLModel(params={name: value + 1e300 for name, value in model.params.items()}, params_type=kind)

    def train(model: FLModel) -> FLModel:
        return FLModel(params={name: value + 1 for name, value in model.params.items()}, params_type=kind)

    sites = {name: site(name, train=diverge if name == "site-3" else train) for name in COUNTS}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        done = FakeServer(tmp_path, sites, start).run(fedavg(selector="divfl", num_rounds=1, cohort_size=8))
    assert sorted(done.history[0].answered) == sorted(COUNTS)
    assert sorted(done.members.selector.memory()["vectors"]) == sorted(set(COUNTS) - {"site-3"})


def test_a_state_is_continued_with_or_without_step_sizes_as_it_was_begun(tmp_path: Path) -> None:
    local = {"lr": 0.1, "steps": 4}
    server = FakeServer(tmp_path, everybody(), START)
    server.run(fedavg(num_rounds=1, selector="divfl", state="s"))
    server.run(fedavg(num_rounds=2, selector="divfl", state="s", local=local))
    assert len(server.panics) == 1
    assert "local: the state was written without it and is continued with it" in server.panics[0]
    again = server.run(fedavg(num_rounds=2, selector="divfl", state="s"))
    assert len(server.panics) == 1
    assert again._rounds_done == 2
    server.run(fedavg(num_rounds=1, selector="divfl", state="t", local=local))
    server.run(fedavg(num_rounds=2, selector="divfl", state="t"))
    assert "local: the state was written with it and is continued without it" in server.panics[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"selector": f"{__name__}:AsksCandidates"}, "needs candidate_loss, which NVFlare's sites are not asked for"),
        ({"selector": "unheard-of"}, "selector: 'unheard-of' is unknown"),
        ({"selector": "random", "buffer_size": 3}, "either a selector or buffer_size"),
        ({"selector": "random", "selector_args": {"colour": 1}}, "colour"),
        ({"selector_args": {"colour": 1}}, "selector_args: given without a selector"),
        ({"num_clients": 5}, "cohort_size says how many sites train"),
        ({"cohort_size": 0}, "cohort_size: 0 is out of range"),
        ({"num_classes": 0}, "num_classes: 0 is not accepted"),
        ({"target": [0.5, 0.5]}, "target: 2 weights; accepted: 4"),
        ({"train_timeout": -1}, "train_timeout: -1 is not accepted"),
        ({"query_timeout": 1.5}, "query_timeout: 1.5 is not accepted"),
        ({"state": "../elsewhere"}, "state: '../elsewhere' is not accepted"),
        ({"state": ""}, "state: '' is not accepted"),
        ({"head": "fc"}, "head: 'fc' is not accepted"),
        ({"head": [1]}, r"head: \[1\] is not accepted"),
        ({"exclude": "site-1"}, "exclude: 'site-1' is not accepted; accepted: a list of sites' names"),
        ({"exclude": [1]}, r"exclude: \[1\] is not accepted"),
        ({"selector": "inferred"}, "selector: inferred takes a census in which every site trains"),
        ({"local": {"lr": 0.1, "steps": 3}}, "local: selector fedentopt does not look at last layers"),
        ({"local": {"lr": 0.1}, "selector": "divfl"}, "local: {'lr': 0.1} does not say every site's steps"),
        ({"local": {"steps": 5}, "selector": "divfl"}, "accepted: lr, and steps or batch_size"),
        ({"local": {"rate": 0.1}, "selector": "divfl"}, "local: 'rate' is unknown"),
        ({"local": 0.1, "selector": "divfl"}, "local: 0.1 is not accepted; accepted: a mapping of lr"),
    ],
)
def test_wrong_settings_are_refused_when_the_job_is_made(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason.replace("(", r"\(")):
        fedavg(**settings)


class Descendant(FedAvg):
    """A FedAvg that might remember something."""


class LabelAwareDescendant(LabelAware, Descendant):
    pass


class LabelAwareRegression(LabelAware, FedAvgLR):
    """Its sites return gradients."""


class Recording(FedAvg):
    """Keeps something where the selection keeps its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history: dict[int, float] = {}


class LabelAwareRecording(LabelAware, Recording):
    pass


def test_controllers_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="LabelAwareRecording: what selection is joined to keeps something as 'hist"):
        LabelAwareRecording(**BASE)
    with pytest.raises(InputError, match="FedAvgLR cannot be joined; accepted: FedAvg, Scaffold"):
        LabelAwareRegression(**BASE)
    with pytest.raises(InputError, match="state: Descendant may remember more than is kept"):
        LabelAwareDescendant(**BASE, state="s")
    done = FakeServer(tmp_path, everybody(), START).run(LabelAwareDescendant(**BASE))
    assert len(done.history) == 6


def test_a_model_of_torch_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    start = {"fc.weight": torch.zeros(CLASSES, 2), "fc.bias": torch.zeros(CLASSES, dtype=torch.bfloat16)}

    def train(model: FLModel) -> FLModel:
        return FLModel(params={name: value + 1 for name, value in model.params.items()}, params_type=ParamsType.FULL)

    sites = {name: site(name, train=train) for name in COUNTS}
    sites["site-2"] = site(
        "site-2", train=lambda model: FLModel(params={**start, "fc.bias": start["fc.bias"] * np.nan})
    )
    for rounds in (2, 5):
        server = FakeServer(tmp_path, sites, {})
        server.persistor.model = {name: value.clone() for name, value in start.items()}
        done = server.run(fedavg(cohort_size=8, num_rounds=rounds, state="torch"))
        assert server.panics == []
    assert [each.round for each in done.history] == [2, 3, 4]
    assert set(done.history[0].failed) == {"site-2"}, "picked again after its pause"
    model = server.persistor.model
    assert model["fc.bias"].dtype == torch.bfloat16
    assert torch.allclose(model["fc.weight"], torch.full((CLASSES, 2), 5.0))


def test_noisy_counts_may_be_negative(tmp_path: Path) -> None:
    def noisy(task: str, model: FLModel) -> Shareable:
        return write_report([-3, 4, 0, 9], 1.0) if task == "label_counts" else FLModelUtils.to_shareable(moved(model))

    done = FakeServer(tmp_path, everybody(site_4=noisy), START).run(fedavg(cohort_size=8, num_rounds=1))
    assert "site-4" in cohorts(done)[0]
    assert done.members.reports["site-4"].epsilon == 1.0


@pytest.mark.parametrize(("own", "sent"), [("uint8", -1), ("int32", 2**40), ("bool", 5)])
def test_whole_numbers_are_not_folded_into_a_smaller_type(own: str, sent: int) -> None:
    reply = FLModel(params={"batches": np.array([sent])}, params_type=ParamsType.FULL)
    check_reply(FLModel(params={"batches": np.zeros(1, own)}, params_type=ParamsType.FULL), reply)
    assert reply.params["batches"].tolist() == [sent]
