"""Continuing a run: only as the run it was, with everything its strategy and selector remember."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, Strategy

from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware, start
from fedentopt.selection import Selector
from flower_fake_grid import CLASSES, FakeGrid, FastClock, broken, federation, model

COMMON: dict[str, Any] = {
    "cohort_size": 3, "buffer_size": 4, "num_classes": CLASSES, "seed": 5, "fraction_evaluate": 0.0,
    "min_available_nodes": 1,
}  # fmt: skip


class EntAdam(LabelAware, FedAdam):
    pass


def made(cls: type[LabelAware] = FedEntOpt, **options: Any) -> LabelAware:
    strategy = cls(**{**COMMON, **options})
    strategy.clock = FastClock()
    return strategy


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"settings": {"partition": "dir:0.3"}}, {"settings": {"partition": "dir:0.1"}}, "partition: 'dir:0.1', but"),
        ({"settings": {"lr": 0.1, "a": 1}}, {"settings": {"lr": 0.2}}, r"lr: 0\.2, but .* 0\.1 \(and 1 more: a\)"),
        ({}, {"settings": {"lr": 0.1}}, "lr: 0.1, but the checkpoint was written with None"),
        ({"settings": {"data": Path("/a")}}, {"settings": {"data": Path("/b")}}, "data: '/b', but the checkpoint was"),
        ({"settings": {"on": {1, 2}}}, {"settings": {"on": {1, 3}}}, r"on: \['1', '3'\], but the checkpoint was"),
        ({}, {"weighted_by_key": "norm_bit"}, "weighted_by_key: 'norm_bit'"),
        ({}, {"size_cap": None}, "size_cap: None, but the checkpoint was written with 10.0"),
        ({}, {"release": "random"}, "release: 'random', but"),
        ({"eta": 0.1}, {"eta": 0.2}, "eta: 0.2, but the checkpoint was written with 0.1"),
    ],
)
def test_a_run_is_not_continued_under_other_settings(before: Any, after: Any, told: str, tmp_path: Path) -> None:
    cls = EntAdam if "eta" in before else FedEntOpt
    made(cls, checkpoint_dir=tmp_path, **before).start(federation(), model(), num_rounds=1)
    grid = federation()
    with pytest.raises(InputError, match=told):
        made(cls, checkpoint_dir=tmp_path, **after).start(grid, model(), num_rounds=2)
    assert grid.asked == []
    assert made(cls, checkpoint_dir=tmp_path, **before).start(grid, model(), num_rounds=2).rounds.keys() == {1, 2}


def test_what_nodes_are_told_is_part_of_the_run(tmp_path: Path) -> None:
    first = ConfigRecord({"lr": 0.1, "blob": b"abc"})
    made(checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=1, train_config=first)
    other = ConfigRecord({"lr": 0.2, "blob": b"abc"})
    with pytest.raises(InputError, match=r"train_config: lr: 0\.2, but the checkpoint was written with 0\.1"):
        made(checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2, train_config=other)
    same = ConfigRecord({"lr": 0.1, "blob": b"abc"})
    made(checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2, train_config=same)


def test_patience_rounds_and_who_is_excluded_may_change(tmp_path: Path) -> None:
    made(checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=1)
    more = {
        "node_timeout": 3.0,
        "query_timeout": 4.0,
        "min_available_nodes": 2,
        "exclude": [1],
        "fraction_evaluate": 0.5,
    }
    made(checkpoint_dir=tmp_path, **more).start(federation(), model(), num_rounds=3)


# --- strategies of one's own
class Counting(LabelAware, FedAvg):
    """Remembers, and says nothing about it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rounds_seen = 0
        self.total = np.zeros(2)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.rounds_seen += 1
        self.total += server_round
        return super().aggregate_train(server_round, replies)


class Telling(Counting):
    """Remembers, and gives it to the checkpoint."""

    def memory(self) -> dict[str, Any]:
        return {"rounds_seen": self.rounds_seen, "total": self.total}

    def remember(self, memory: Any) -> None:
        self.rounds_seen, self.total = memory["rounds_seen"], np.array(memory["total"])


def test_a_strategy_with_memory_is_continued_with_it_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(Counting, checkpoint_dir=tmp_path / "a").start(federation(), model(), num_rounds=2)
    assert any("does not hold Counting.rounds_seen, Counting.total" in line for line in caplog.messages)
    with pytest.raises(InputError, match=r"Counting\.rounds_seen, Counting\.total.*memory\(\)"):
        made(Counting, checkpoint_dir=tmp_path / "a").start(federation(), model(), num_rounds=3)
    made(Telling, checkpoint_dir=tmp_path / "b").start(federation(), model(), num_rounds=2)
    again = made(Telling, checkpoint_dir=tmp_path / "b")
    again.start(federation(), model(), num_rounds=4)
    assert again.rounds_seen == 4  # type: ignore[attr-defined]
    assert again.total.tolist() == [10.0, 10.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        ({"a": np.float32(1)}, r"np.float32\(1.0\) \(float32\) is not kept by JSON; accepted: numbers of Python's own"),
        ({"a": [{"b": {1, 2}}]}, r"\{1, 2\} \(set\) is not kept by JSON"),
        ({"a": {1: 0.5}}, "the key 1 is no text, and would come back as such"),
    ],
)
def test_a_memory_that_would_not_come_back_is_refused_by_name(tmp_path: Path, memory: Any, told: str) -> None:
    class Forgetful(Selector):
        def pick(self, available: Any, losses: Any) -> list[int]:
            return [int(number) for number in available[:3]]

        def memory(self) -> dict[str, Any]:
            return dict(memory)

    class Remembering(Telling):
        def memory(self) -> dict[str, Any]:
            return dict(memory)

    with pytest.raises(InputError, match=rf"^strategy: memory\(\) of Remembering: {told}"):
        made(Remembering, checkpoint_dir=tmp_path / "a").start(federation(), model(), num_rounds=2)
    own = {"selector": Forgetful(3), "buffer_size": 0, "seed": 0}
    with pytest.raises(InputError, match=rf"^selector: memory\(\) of Forgetful: {told}"):
        made(checkpoint_dir=tmp_path / "b", **own).start(federation(), model(), num_rounds=2)


class Halving(LabelAware, FedAvg):
    """Halves the learning rate in the config that it is handed, as the strategy of Flower's tutorial does."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        if server_round % 2 == 0:
            config["lr"] *= 0.5
            config["times"] = [*config.get("times", []), b"halved"]
        return super().configure_train(server_round, arrays, config, grid)


def rates(grid: FakeGrid) -> list[tuple[int, float, int]]:
    """Round, learning rate and halvings so far, as each training message had them."""
    return [(config["server-round"], config["lr"], len(config.get("times", []))) for config in grid.configs]


def test_what_a_strategy_writes_into_what_nodes_are_told_outlives_a_stop(tmp_path: Path) -> None:
    straight, before, after = federation(), federation(), federation()
    made(Halving).start(straight, model(), num_rounds=6, train_config=ConfigRecord({"lr": 0.8}))
    for rounds, grid in ((4, before), (6, after)):
        told = ConfigRecord({"lr": 0.8})
        made(Halving, checkpoint_dir=tmp_path).start(grid, model(), num_rounds=rounds, train_config=told)
    assert rates(before) + rates(after) == rates(straight)
    assert rates(straight)[-1] == (6, 0.1, 3)


def test_a_strategy_that_changes_what_nodes_are_told_does_so_once_in_a_round_with_stand_ins() -> None:
    grid = federation()
    for node in list(grid.nodes)[:5]:
        grid.nodes[node].train = broken
    strategy = made(Halving, replacements=2)
    strategy.start(grid, model(), num_rounds=4, train_config=ConfigRecord({"lr": 0.8}))
    assert sum(len(entry.stood_in) for entry in strategy.history) > 2
    assert {*rates(grid)} == {(1, 0.8, 0), (2, 0.4, 1), (3, 0.4, 1), (4, 0.2, 2)}


def test_the_memory_of_a_strategy_that_is_joined_is_noticed_too(tmp_path: Path) -> None:
    class Best(FedAvg):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.best = 0.0

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            self.best += 1.0
            return super().aggregate_train(server_round, replies)

    class Joined(LabelAware, Best):
        pass

    made(Joined, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    with pytest.raises(InputError, match=r"does not hold Joined\.best, which changed from round to round"):
        made(Joined, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)


def test_a_strategy_may_set_what_flowers_own_have_anew_in_each_round(tmp_path: Path) -> None:
    """Such as who is evaluated, by the round's number: that is no memory, and no reason not to continue."""

    class Sometimes(FedEntOpt):
        def configure_evaluate(self, server_round: int, *args: Any) -> Any:
            self.fraction_evaluate = float(server_round % 2)
            return super().configure_evaluate(server_round, *args)

    made(Sometimes, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    result = made(Sometimes, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=4)
    assert {*result.evaluate_metrics_clientapp} == {1, 3}


def test_a_config_into_which_a_strategy_wrote_is_the_same_config(tmp_path: Path) -> None:
    """In a notebook the object that was handed over is handed over again."""

    class EntProx(LabelAware, FedProx):
        pass

    told = ConfigRecord({"lr": 0.8})
    made(EntProx, checkpoint_dir=tmp_path, proximal_mu=0.1).start(federation(), model(), 2, train_config=told)
    assert told["proximal-mu"] == 0.1
    grid = federation()
    made(EntProx, checkpoint_dir=tmp_path, proximal_mu=0.1).start(grid, model(), 4, train_config=told)
    assert [config["server-round"] for config in grid.configs[::3]] == [3, 4]
    made(EntProx, checkpoint_dir=tmp_path, proximal_mu=0.1).start(
        grid, model(), 5, train_config=ConfigRecord({"lr": 0.8})
    )
    with pytest.raises(InputError, match=r"^train_config: lr: 0\.7, but the checkpoint was written with 0\.8"):
        made(EntProx, checkpoint_dir=tmp_path, proximal_mu=0.1).start(
            grid, model(), 6, train_config=ConfigRecord({"lr": 0.7})
        )


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [
        ("m_t", None, [np.ones(2)]),
        ("v_t", 0.0, 0.5),
        ("momentum_vector", None, {"w": np.ones(2)}),
        ("clipping_norm", "median", "mean"),
        ("accountant", None, 3),
    ],
)
def test_a_strategy_may_mean_something_else_by_the_names_of_flowers(
    tmp_path: Path, name: str, first: Any, later: Any
) -> None:
    class Own(FedAvg):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            setattr(self, name, first)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            setattr(self, name, later)
            return super().aggregate_train(server_round, replies)

    class Joined(LabelAware, Own):
        pass

    result = made(Joined, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    assert [record["problem"] for record in result.rounds.values()] == [None, None]
    with pytest.raises(InputError, match=rf"does not hold Joined\.{name}, which changed from round to round"):
        made(Joined, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)


class NoFedAvg(Strategy):
    """A strategy from scratch."""

    def configure_train(self, *args: Any) -> Any:
        raise NotImplementedError

    configure_evaluate = aggregate_train = aggregate_evaluate = summary = configure_train


class OwnLoop(FedAvg):
    """A strategy with a round loop of its own."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_strategies_that_cannot_be_joined_are_refused_in_one_line() -> None:
    class Joined(LabelAware, NoFedAvg):
        pass

    class Looping(LabelAware, OwnLoop):
        pass

    with pytest.raises(InputError, match="Joined: NoFedAvg does not descend from FedAvg"):
        Joined(**COMMON)
    with pytest.raises(InputError, match=r"Looping: OwnLoop has a start\(\) of its own"):
        Looping(**COMMON)


def test_strategies_that_use_the_names_of_the_selection_are_refused() -> None:
    """Else each would find the other's things there, and every round be void."""

    class Keeping(FedAvg):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.history: dict[int, float] = {}

    class Suspecting(FedAvg):
        def suspects(self, number: int) -> int:
            return number

    class Sampling(FedAvg):
        def __init__(self, seed: int = 0, **strategy_options: Any) -> None:
            super().__init__(**strategy_options)
            self.drawn_with = seed

    class Joined(LabelAware, Keeping):
        pass

    class Other(LabelAware, Suspecting):
        pass

    class Third(LabelAware, Sampling):
        pass

    with pytest.raises(InputError, match=r"Joined: what selection is joined to keeps something as 'history', where"):
        Joined(**COMMON)
    with pytest.raises(InputError, match=r"Other: Suspecting has 'suspects' of its own, which LabelAware's would"):
        Other(**COMMON)
    with pytest.raises(InputError, match="seed: Sampling takes it too, and LabelAware would not hand it on"):
        Third(**COMMON)
    assert Third(cohort_size=3, num_classes=CLASSES).drawn_with == 0


def test_a_start_that_calls_ours_works() -> None:
    class Announcing(LabelAware, FedAvg):
        started = 0

        def start(self, *args: Any, **kwargs: Any) -> Any:
            self.started += 1
            return super().start(*args, **kwargs)

    strategy = made(Announcing)
    assert strategy.start(federation(), model(), num_rounds=2).rounds.keys() == {1, 2}
    assert strategy.started == 1  # type: ignore[attr-defined]


def test_a_wrapper_with_a_start_of_its_own_is_refused() -> None:
    class Wrapper(NoFedAvg):
        def __init__(self, strategy: Strategy) -> None:
            self.strategy = strategy

        def start(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(InputError, match=r"Wrapper has a start\(\) of its own"):
        start(Wrapper(made()), federation(), model())


def test_an_old_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    header = {"format": "fedentopt flower checkpoint", "version": 1}
    np.savez(tmp_path / "checkpoint.npz", header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))
    with pytest.raises(InputError, match=r"version 1, not .* 2\); remove it"):
        made(checkpoint_dir=tmp_path).start(federation(), model())


def test_the_models_of_a_stopped_and_a_straight_run_are_the_same_also_when_clients_fail(tmp_path: Path) -> None:
    def grid() -> Any:
        made_grid = federation()
        made_grid.nodes[1000].train = broken
        return made_grid

    want = made(cohort_size=6, buffer_size=1).start(grid(), model(), num_rounds=9)
    for rounds in (1, 2, 4, 9):
        strategy = made(cohort_size=6, buffer_size=1, checkpoint_dir=tmp_path)
        got = strategy.start(grid(), model(), num_rounds=rounds)
    drop = {"seconds"}
    assert {r: {k: v for k, v in record.items() if k not in drop} for r, record in got.rounds.items()} == {
        r: {k: v for k, v in record.items() if k not in drop} for r, record in want.rounds.items()
    }
    assert isinstance(got.arrays, ArrayRecord)
    assert got.arrays["w"].numpy().tobytes() == want.arrays["w"].numpy().tobytes()
