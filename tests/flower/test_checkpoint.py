"""Joined to Flower's strategies, wrapped in its DP wrappers, stopped and continued: the same run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware, start
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.server import state_files
from flower_fake_grid import CLASSES, FakeGrid, federation, model

COMMON: dict[str, Any] = {
    "cohort_size": 3,
    "buffer_size": 4,
    "num_classes": CLASSES,
    "seed": 5,
    "fraction_evaluate": 0.0,
    "min_available_nodes": 1,
}


class EntProx(LabelAware, FedProx):
    pass


class EntAdam(LabelAware, FedAdam):
    pass


class EntYogi(LabelAware, FedYogi):
    pass


class EntAdagrad(LabelAware, FedAdagrad):
    pass


class EntAvgM(LabelAware, FedAvgM):
    pass


class EntMedian(LabelAware, FedMedian):
    pass


class EntTrimmed(LabelAware, FedTrimmedAvg):
    pass


class EntQ(LabelAware, QFedAvg):
    pass


class EntKrum(LabelAware, Krum):
    pass


class EntMultiKrum(LabelAware, MultiKrum):
    pass


class EntBulyan(LabelAware, Bulyan):
    pass


class Accountant:
    """Flower's accountant protocol, counting releases."""

    def __init__(self) -> None:
        self.config = PrivacyConfig(1e-5, 8, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
        self.num_releases = 0

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        self.num_releases += count

    def get_privacy_spent(self, delta: float | None = None) -> Any:
        class Spent:
            epsilon, delta, num_releases = 0.1 * self.num_releases, 1e-5, self.num_releases

        return Spent

    def state_dict(self) -> dict[str, object]:
        return {"releases": self.num_releases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_releases = state["releases"]


Build = Callable[..., Strategy]

JOINED: dict[str, Build] = {
    "FedAvg": lambda **more: FedEntOpt(**COMMON, **more),
    "FedProx": lambda **more: EntProx(**COMMON, proximal_mu=0.1, **more),
    "FedAdam": lambda **more: EntAdam(**COMMON, **more),
    "FedYogi": lambda **more: EntYogi(**COMMON, **more),
    "FedAdagrad": lambda **more: EntAdagrad(**COMMON, **more),
    "FedAvgM": lambda **more: EntAvgM(**COMMON, server_momentum=0.9, **more),
    "FedMedian": lambda **more: EntMedian(**COMMON, **more),
    "FedTrimmedAvg": lambda **more: EntTrimmed(**COMMON, beta=0.3, **more),
    "QFedAvg": lambda **more: EntQ(**COMMON, client_learning_rate=0.1, **more),
    "Krum": lambda **more: EntKrum(**COMMON, num_malicious_nodes=1, **more),
    "MultiKrum": lambda **more: EntMultiKrum(**COMMON, num_malicious_nodes=1, num_nodes_to_select=2, **more),
    "Bulyan": lambda **more: EntBulyan(**COMMON, **more),
}
# Noise multiplier 0: what is compared is state, and Flower's noise cannot be seeded.
WRAPPED: dict[str, Build] = {
    "server-side fixed": lambda **more: DifferentialPrivacyServerSideFixedClipping(
        FedEntOpt(**COMMON, **more), 0.0, 0.5, 3
    ),
    "client-side fixed": lambda **more: DifferentialPrivacyClientSideFixedClipping(
        FedEntOpt(**COMMON, **more), 0.0, 0.5, 3
    ),
    "server-side adaptive": lambda **more: DifferentialPrivacyServerSideAdaptiveClipping(
        FedEntOpt(**COMMON, **more), 0.0, 3, clipped_count_stddev=0.0
    ),
    "client-side adaptive": lambda **more: DifferentialPrivacyClientSideAdaptiveClipping(
        FedEntOpt(**COMMON, **more), 0.0, 3, clipped_count_stddev=0.0
    ),
    "around FedAdam": lambda **more: DifferentialPrivacyServerSideFixedClipping(EntAdam(**COMMON, **more), 0.0, 0.5, 3),
}
PLAIN: dict[str, Callable[..., FedAvg]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda **o: FedProx(proximal_mu=0.1, **o),
    "FedAdam": FedAdam,
    "FedYogi": FedYogi,
    "FedAdagrad": FedAdagrad,
    "FedAvgM": lambda **o: FedAvgM(server_momentum=0.9, **o),
    "FedMedian": FedMedian,
    "FedTrimmedAvg": lambda **o: FedTrimmedAvg(beta=0.3, **o),
    "QFedAvg": lambda **o: QFedAvg(client_learning_rate=0.1, **o),
    "Krum": lambda **o: Krum(num_malicious_nodes=1, **o),
    "MultiKrum": lambda **o: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2, **o),
    "Bulyan": Bulyan,
}


def inner(strategy: Strategy) -> LabelAware:
    found = getattr(strategy, "strategy", strategy)
    assert isinstance(found, LabelAware)
    return found


def raw(arrays: ArrayRecord) -> list[bytes]:
    return [array.tobytes() for array in arrays.to_numpy_ndarrays()]


def picked(strategy: Strategy) -> list[tuple[int | str, ...]]:
    return [entry.cohort.clients for entry in inner(strategy).history]


@pytest.mark.parametrize("name", JOINED)
def test_a_joined_strategy_aggregates_as_flowers_own_does(name: str) -> None:
    """With everybody in the cohort there is nothing to select, and the model must be Flower's."""
    cls = type(JOINED[name]())
    options = {**COMMON, "cohort_size": 8, "buffer_size": 0}
    extra = {
        "FedProx": {"proximal_mu": 0.1},
        "FedAvgM": {"server_momentum": 0.9},
        "FedTrimmedAvg": {"beta": 0.3},
        "QFedAvg": {"client_learning_rate": 0.1},
        "Krum": {"num_malicious_nodes": 1},
        "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 2},
    }.get(name, {})
    grid = federation()
    got = cls(**options, **extra).start(grid, model(), num_rounds=3).arrays
    plain = PLAIN[name](fraction_evaluate=0.0)
    want = plain.start(federation(), model(), num_rounds=3).arrays
    for a, b in zip(got.to_numpy_ndarrays(), want.to_numpy_ndarrays(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert np.abs(a).min() > 0
    if name == "FedProx":
        assert all(config["proximal-mu"] == 0.1 for config in grid.configs)


@pytest.mark.parametrize("name", WRAPPED)
def test_inside_a_dp_wrapper_the_cohorts_are_the_same(name: str) -> None:
    alone = JOINED["FedAvg"]()
    alone.start(federation(), model(), num_rounds=4)
    by_flower, by_us = WRAPPED[name](), WRAPPED[name]()
    grid = federation()
    first = by_flower.start(grid, model(), num_rounds=4)
    second = start(by_us, federation(), model(), num_rounds=4)
    assert picked(by_flower) == picked(by_us) == picked(alone)
    for a, b in zip(first.arrays.to_numpy_ndarrays(), second.arrays.to_numpy_ndarrays(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert np.abs(a).min() > 0
    if name.startswith("client-side"):
        assert all("clipping_norm" in config for config in grid.configs)


@pytest.mark.parametrize(
    "wrapper", [DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping]
)
def test_flowers_privacy_accounting_accepts_the_strategy_and_survives_a_stop(wrapper: Any, tmp_path: Path) -> None:
    def build(accountant: Accountant | None, noise: float = 1.0) -> Any:
        strategy = FedEntOpt(**COMMON, checkpoint_dir=tmp_path, weighted_by_key="norm_bit")
        return wrapper(strategy, noise, 0.5, 3, accountant=accountant)

    first, second = Accountant(), Accountant()
    start(build(first), federation(), model(), num_rounds=2)
    assert first.num_releases == 2
    start(build(second), federation(), model(), num_rounds=5)
    assert second.num_releases == 5  # the two releases before the stop are not forgotten
    with pytest.raises(InputError, match="accountant"):
        start(build(None), federation(), model(), num_rounds=6)
    with pytest.raises(InputError, match=r"noise_multiplier: 2\.0, but the checkpoint was written with 1\.0"):
        start(build(Accountant(), noise=2.0), federation(), model(), num_rounds=6)


@pytest.mark.parametrize("on", ["the server", "the nodes"])
def test_a_model_that_was_shown_before_a_stop_stays_accounted_for(on: str, tmp_path: Path) -> None:
    def build(accountant: Accountant) -> Any:
        options = {**COMMON, "fraction_evaluate": 1.0, "checkpoint_dir": tmp_path, "weighted_by_key": "norm_bit"}
        return DifferentialPrivacyServerSideFixedClipping(FedEntOpt(**options), 1.0, 0.5, 3, accountant=accountant)

    shown: list[bytes] = []

    def show(number: int, arrays: ArrayRecord) -> None:
        shown.append(arrays["w"].numpy().tobytes())
        if number == 2 and on == "the server":
            raise StopError

    def before_send(kind: str) -> None:
        if kind == "evaluate" and on == "the nodes" and len(shown) == 2:
            raise StopError

    grid = federation()
    grid.before_send = before_send
    with pytest.raises(StopError):
        start(build(Accountant()), grid, model(), num_rounds=4, evaluate_fn=show)
    accountant = Accountant()
    again = start(build(accountant), federation(), model(), num_rounds=4, evaluate_fn=show)
    assert accountant.num_releases == 4
    released = len(shown) - 1 + (on == "the nodes")  # the start model is nobody's data
    assert released == 4
    assert list(again.rounds) == [1, 2, 3, 4]


def test_a_stop_between_the_two_checkpoints_of_a_round_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With privacy accounting a round is written before its evaluation and after it."""

    class Counting(FedEntOpt):
        rounds_seen = 0

        def configure_train(self, *words: Any) -> Any:
            self.rounds_seen += 1
            return super().configure_train(*words)

    def build(kind: type[FedEntOpt], folder: str) -> Any:
        strategy = kind(**COMMON, checkpoint_dir=tmp_path / folder, weighted_by_key="norm_bit")
        return DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 0.5, 3, accountant=Accountant())

    def stop(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            raise StopError

    with pytest.raises(StopError):
        start(build(Counting, "a"), federation(), model(), num_rounds=3, evaluate_fn=stop)
    with pytest.raises(InputError, match=r"does not hold Counting\.rounds_seen"):
        start(build(Counting, "a"), federation(), model(), num_rounds=3)

    def full(*words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(number: int, arrays: ArrayRecord) -> None:
        if number == 2:
            monkeypatch.setattr(state_files, "write_archive", full)

    with pytest.raises(InputError, match=r"round 2 cannot be written.*to go on after round 2$"):
        start(build(FedEntOpt, "b"), federation(), model(), num_rounds=3, evaluate_fn=fill)
    monkeypatch.undo()
    assert list(start(build(FedEntOpt, "b"), federation(), model(), num_rounds=3).rounds) == [1, 2, 3]


class StopError(Exception):
    """Stands for a kill."""


def stop_in_round(grid: FakeGrid, number: int) -> FakeGrid:
    rounds: list[str] = []

    def before_send(kind: str) -> None:
        if kind == "train":
            rounds.append(kind)
            if len(rounds) == number:
                raise StopError

    grid.before_send = before_send
    return grid


@pytest.mark.parametrize("name", [*JOINED, *WRAPPED])
def test_a_run_killed_in_a_round_and_continued_is_the_run_that_went_straight_through(name: str, tmp_path: Path) -> None:
    build = {**JOINED, **WRAPPED}[name]
    evaluated: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        evaluated.append(server_round)
        return MetricRecord({"mean": float(np.mean(arrays["w"].numpy()))})

    straight = build()
    want = start(straight, federation(), model(), num_rounds=6, evaluate_fn=evaluate)
    evaluated.clear()
    killed = build(checkpoint_dir=tmp_path)
    with pytest.raises(StopError):
        start(killed, stop_in_round(federation(shuffle=3), 4), model(), num_rounds=6, evaluate_fn=evaluate)
    again = build(checkpoint_dir=tmp_path)
    # New node ids, as in a new simulation: every node is asked again and takes its client's old place.
    grid = federation(shuffle=4, first=77_000)
    got = start(again, grid, model(), num_rounds=6, evaluate_fn=evaluate)
    assert raw(got.arrays) == raw(want.arrays)
    assert picked(killed)[:3] + picked(again) == picked(straight)
    assert inner(again).selector.state_dict() == inner(straight).selector.state_dict()
    assert evaluated == [0, 1, 2, 3, 4, 5, 6]
    assert got.evaluate_metrics_serverapp == want.evaluate_metrics_serverapp
    assert got.train_metrics_clientapp == want.train_metrics_clientapp
    assert [config["server-round"] for config in grid.configs] == [4, 4, 4, 5, 5, 5, 6, 6, 6]


def test_nodes_that_kept_their_id_are_not_asked_again(tmp_path: Path) -> None:
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    grid = federation()
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(grid, model(), num_rounds=4)
    assert grid.sent("query") == []
    assert len(grid.sent("train")) == 2


def test_a_finished_run_started_again_trains_nobody_and_returns_its_model(tmp_path: Path) -> None:
    want = FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)
    grid = federation()
    got = FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(grid, model(), num_rounds=3)
    assert grid.asked == []
    assert raw(got.arrays) == raw(want.arrays)


def test_noisy_counts_survive_bit_for_bit(tmp_path: Path) -> None:
    grid = federation()
    for node in grid.nodes.values():
        node.config["label-epsilon"] = 0.3
    first = FedEntOpt(**COMMON, checkpoint_dir=tmp_path)
    first.start(grid, model(), num_rounds=2)
    second = FedEntOpt(**COMMON, checkpoint_dir=tmp_path)
    second.start(grid, model(), num_rounds=2)
    for client, member in first.census.members.items():
        assert second.census.members[client].report.counts.tobytes() == member.report.counts.tobytes()
        assert second.census.members[client].report.epsilon == 0.3


def test_settings_that_numpy_computed_are_kept_too(tmp_path: Path) -> None:
    told = COMMON | {name: np.int64(COMMON[name]) for name in ("cohort_size", "buffer_size", "num_classes", "seed")}
    FedEntOpt(**told, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    again, whole = FedEntOpt(**COMMON, checkpoint_dir=tmp_path), FedEntOpt(**COMMON)
    again.start(federation(), model(), num_rounds=4)
    whole.start(federation(), model(), num_rounds=4)
    assert picked(again) == picked(whole)[2:]


@pytest.mark.parametrize("kind", ["file", "below a file", "link to nowhere"])
def test_a_folder_that_cannot_hold_a_checkpoint_is_refused_before_a_round_is_spent(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "link to nowhere":  # such as to a volume that is not mounted
        place.symlink_to(tmp_path / "volume" / "checkpoints")
    else:
        place.write_text("")
    grid = federation()
    with pytest.raises(InputError, match=r"checkpoint_dir: .*accepted: a folder that can be written to"):
        FedEntOpt(**COMMON, checkpoint_dir=place / "deeper" if kind == "below a file" else place).start(grid, model())
    assert grid.asked == []


def test_a_stop_while_the_checkpoint_is_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    before = (tmp_path / checkpoints.FILE).read_bytes()

    def fail(*args: Any) -> None:
        raise StopError

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StopError):
        FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)
    assert (tmp_path / checkpoints.FILE).read_bytes() == before
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {checkpoints.FILE, checkpoints.PREVIOUS}
    assert not any(name.endswith(".part") for name in names)


def test_a_stop_in_the_first_save_after_a_damaged_checkpoint_leaves_one_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)
    newest = tmp_path / checkpoints.FILE
    damaged = newest.read_bytes()[:-100]
    newest.unlink()
    newest.write_bytes(damaged)
    keep = state_files.name_again

    def stop(path: Path, other: Path) -> None:
        keep(path, other)
        raise StopError

    monkeypatch.setattr(state_files, "name_again", stop)
    with pytest.raises(StopError):
        FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=4)
    found = checkpoints.load(tmp_path)
    assert found is not None
    assert found.round == 2
    assert (tmp_path / checkpoints.DAMAGED).read_bytes() == damaged


def test_a_full_disk_ends_the_run_in_one_sentence_and_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(state_files, "write_archive", full)
        with pytest.raises(InputError, match=r"round 3 cannot be written to .*: No space left on device; .* round 2"):
            FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)
    again = FedEntOpt(**COMMON, checkpoint_dir=tmp_path)
    again.start(federation(), model(), num_rounds=3)
    assert [entry.round for entry in again.history] == [3]


@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpoint_whose_files_are_removed_while_the_run_goes_on_is_written_anew(
    tmp_path: Path, whole: bool
) -> None:
    """Whoever tidies up removes files that have not changed for days, such as those that hold the clients."""
    folder = tmp_path / "checkpoint"

    def tidy(number: int, arrays: ArrayRecord) -> None:
        if number == 2 and whole:
            shutil.rmtree(folder)
        elif number == 2:
            for path in folder.glob("clients-*.npz"):
                path.unlink()

    FedEntOpt(**COMMON, checkpoint_dir=folder).start(federation(), model(), num_rounds=3, evaluate_fn=tidy)
    again, straight = FedEntOpt(**COMMON, checkpoint_dir=folder), FedEntOpt(**COMMON)
    again.start(federation(), model(), num_rounds=5)
    straight.start(federation(), model(), num_rounds=5)
    assert picked(again) == picked(straight)[3:]


def test_a_folder_in_which_another_process_keeps_its_checkpoint_is_refused(tmp_path: Path) -> None:
    """`flwr run` may be started again while the ServerApp of the first one, whose log it lost, goes on."""
    holder = (
        "import sys, pathlib; from fedentopt.flower import checkpoint\n"
        "with checkpoint.in_use(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", holder, str(tmp_path)]
    grid = federation()
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        told = rf"checkpoint_dir: .* is in use by another run \(process {other.pid}\); accepted: "
        with pytest.raises(InputError, match=told):
            FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(grid, model(), num_rounds=1)
        assert grid.asked == []
        other.kill()  # as a machine that loses power: nothing is left to clean up
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(grid, model(), num_rounds=1)
    assert (tmp_path / checkpoints.FILE).is_file()


def test_a_folder_in_which_another_run_of_this_process_keeps_its_checkpoint_is_refused(tmp_path: Path) -> None:
    refused = []

    def start_another(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            link = tmp_path / "link"
            link.symlink_to(tmp_path / "run")
            for folder in (tmp_path / "run", link):
                with pytest.raises(InputError, match=rf"in use by another run \(process {os.getpid()}, this one\)"):
                    FedEntOpt(**COMMON, checkpoint_dir=folder).start(federation(), model(), num_rounds=5)
                refused.append(folder)
        if number == 2:
            raise KeyboardInterrupt  # as in a notebook

    strategy = FedEntOpt(**COMMON, checkpoint_dir=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        strategy.start(federation(), model(), num_rounds=3, evaluate_fn=start_another)
    assert len(refused) == 2
    again, straight = FedEntOpt(**COMMON, checkpoint_dir=tmp_path / "run"), FedEntOpt(**COMMON)
    again.start(federation(), model(), num_rounds=4)
    straight.start(federation(), model(), num_rounds=4)
    assert picked(again) == picked(straight)[1:]


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam])
def test_the_same_object_goes_on_from_its_checkpoint_and_not_from_what_came_after(tmp_path: Path, kind: Any) -> None:
    """A notebook in which a cell is interrupted and run again, while the one that makes the strategy is not."""
    made = type("Made", (LabelAware, kind), {})
    more = {"server_momentum": 0.9} if kind is FedAvgM else {}
    stops = [1, 3]

    def interrupt(number: int, arrays: ArrayRecord) -> None:
        if number == stops[0]:
            del stops[0]
            raise KeyboardInterrupt

    first = made(**COMMON, **more, checkpoint_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.start(federation(), model(), num_rounds=5, evaluate_fn=interrupt)
    with pytest.raises(InputError, match="holds no checkpoint, and this strategy has begun a run before; accepted"):
        first.start(federation(), model(), num_rounds=5)
    again = made(**COMMON, **more, checkpoint_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        again.start(federation(), model(), num_rounds=5, evaluate_fn=interrupt)
    stops.append(0)
    ended = again.start(federation(), model(), num_rounds=5, evaluate_fn=interrupt)
    straight = made(**COMMON, **more).start(federation(), model(), num_rounds=5)
    assert [ended.rounds[n]["cohort"] for n in range(1, 6)] == [straight.rounds[n]["cohort"] for n in range(1, 6)]
    for name, array in straight.arrays.items():
        assert np.array_equal(ended.arrays[name].numpy(), array.numpy())


def test_a_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=1)
    with np.load(tmp_path / checkpoints.FILE, allow_pickle=False) as archive:
        assert all(archive[name].dtype.kind in "fiu" for name in archive.files)
    evil = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / checkpoints.FILE, header=evil)
    with pytest.raises(InputError, match=r"checkpoint\.npz cannot be read"):
        checkpoints.load(tmp_path)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_is_opened_and_no_later_version_read(tmp_path: Path) -> None:
    path, header = tmp_path / checkpoints.FILE, {"format": checkpoints.FILES.kind, "version": 2, "round": 1, "meta": {}}

    def write(array: np.ndarray, **change: Any) -> None:
        text = json.dumps(header | {"groups": ["model"], "names": [["model", "w"]]} | change).encode()
        np.savez(path, **{"header": np.frombuffer(text, dtype=np.uint8), "000000": array})  # type: ignore[arg-type]

    write(np.ones(2))
    found = checkpoints.load(tmp_path)
    assert found is not None
    assert found.arrays["model"]["w"].tolist() == [1, 1]
    write(np.array([Trap(tmp_path / "sprung")], dtype=object))
    with pytest.raises(InputError, match="cannot be read"):
        checkpoints.load(tmp_path)
    assert not (tmp_path / "sprung").exists()
    for version in (1, 3):
        write(np.ones(2), version=version)
        with pytest.raises(InputError, match=f"version {version}"):
            checkpoints.load(tmp_path)


def test_a_checkpoint_is_its_owners_alone_in_a_folder_made_where_it_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    checkpoints.make_folder(folder)
    checkpoints.make_folder(folder)
    other = tmp_path / "c" / "d"
    for _ in range(2):
        checkpoints.save(other, checkpoints.Checkpoint(1, {"model": {"w": np.ones(2)}}, {}))
    if os.name == "posix":
        assert (other / checkpoints.FILE).stat().st_mode & 0o777 == 0o600


def test_the_start_model_is_evaluated_as_round_0() -> None:
    asked: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        asked.append(server_round)
        return MetricRecord({"round": server_round})

    result = start(FedEntOpt(**COMMON), federation(), model(), num_rounds=2, evaluate_fn=evaluate)
    assert asked == [0, 1, 2]
    assert {number: dict(record) for number, record in result.evaluate_metrics_serverapp.items()} == {
        number: {"round": number} for number in range(3)
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cohort_size": 2}, "cohort_size: 2, but the checkpoint was written with 3"),
        ({"buffer_size": 1}, "buffer_size: 1, but the checkpoint was written with 4"),
        ({"seed": 6}, "seed: 6, but the checkpoint was written with 5"),
        ({"num_classes": 4}, "num_classes: 4, but the checkpoint was written with 5"),
        ({"target": [1, 1, 1, 1, 2]}, "target: "),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=1)
    with pytest.raises(InputError, match=told):
        FedEntOpt(**{**COMMON, **options}, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)


def test_a_checkpoint_of_another_model_strategy_or_length_is_refused(tmp_path: Path) -> None:
    FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    other = ArrayRecord({"w": Array(np.zeros((2, 4), dtype=np.float32)), "b": Array(np.zeros(1, dtype=np.float32))})
    with pytest.raises(InputError, match=r"another model: w is \(2, 3\), not \(2, 4\)"):
        FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), other, num_rounds=3)
    with pytest.raises(InputError, match="written by FedEntOpt, continued by EntAdam"):
        EntAdam(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)
    EntAdam(**COMMON, checkpoint_dir=tmp_path / "adam").start(federation(), model(), num_rounds=2)
    with pytest.raises(InputError, match="written by EntAdam, continued by FedEntOpt"):
        FedEntOpt(**COMMON, checkpoint_dir=tmp_path / "adam").start(federation(), model(), num_rounds=3)
    with pytest.raises(InputError, match=r"num_rounds: 1, but .* round 2"):
        FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=1)
    for name in (checkpoints.FILE, checkpoints.PREVIOUS):
        (tmp_path / name).write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(InputError, match=r"checkpoint\.npz cannot be read"):
        FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=3)


def test_a_folder_in_the_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / checkpoints.FILE).mkdir()
    with pytest.raises(InputError, match=r"checkpoint\.npz cannot be read"):
        FedEntOpt(**COMMON, checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=1)


def test_a_checkpoint_with_any_byte_damaged_is_refused_or_reads_the_same(tmp_path: Path) -> None:
    meta = {"a": [1, 2.5], "b": "x"}
    checkpoints.save(tmp_path, checkpoints.Checkpoint(3, {"m": {"w": np.arange(4.0)}}, meta))
    path = tmp_path / checkpoints.FILE
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        for mask in (0x01, 0xFF):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
            try:
                found = checkpoints.load(tmp_path)
            except InputError as error:
                assert "checkpoint.npz cannot be read" in str(error)  # noqa: PT017
                refused += 1
                continue
            assert found is not None  # a byte that nobody reads: a date, a flag
            assert (found.round, found.meta, found.arrays["m"]["w"].tolist()) == (3, meta, [0.0, 1.0, 2.0, 3.0])
    assert refused > len(whole)  # more than half of the trials


class EntTrees(LabelAware, FedXgbBagging):
    pass


def test_a_model_that_grows_every_round_is_continued_too(tmp_path: Path) -> None:
    def trees(*ids: int) -> bytes:
        parameters = {"num_trees": str(len(ids)), "num_parallel_tree": "1"}
        forest = {
            "gbtree_model_param": parameters,
            "iteration_indptr": list(range(len(ids) + 1)),
            "trees": [{"id": number} for number in ids],
            "tree_info": [0] * len(ids),
        }
        return json.dumps({"learner": {"gradient_booster": {"model": forest}}}).encode()

    def boost(message: Message) -> Message:
        arrays = ArrayRecord([np.frombuffer(trees(0), dtype=np.uint8)])
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    def grown(rounds: int, folder: Path) -> int:
        grid = federation()
        for node in grid.nodes.values():
            node.train = boost
        empty = ArrayRecord([np.zeros(0, dtype=np.uint8)])
        result = EntTrees(**COMMON, checkpoint_dir=folder).start(grid, empty, num_rounds=rounds)
        model = json.loads(result.arrays["0"].numpy().tobytes())["learner"]["gradient_booster"]["model"]
        return len(model["trees"])

    assert grown(2, tmp_path) == 2 * COMMON["cohort_size"]
    assert grown(4, tmp_path) == grown(4, tmp_path / "straight") == 4 * COMMON["cohort_size"]


def test_a_wrapper_started_by_flower_says_how_to_get_checkpoints(tmp_path: Path) -> None:
    wrapper = WRAPPED["server-side fixed"](checkpoint_dir=tmp_path)
    with pytest.raises(InputError, match=r"fedentopt\.flower\.start\(wrapper"):
        wrapper.start(federation(), model(), num_rounds=1)


def test_a_strategy_without_selection_is_refused() -> None:
    with pytest.raises(InputError, match="FedAvg neither is nor wraps a LabelAware strategy"):
        start(FedAvg(), federation(), model())


def test_a_wrapper_of_a_wrapper_without_selection_is_refused() -> None:
    outer, inner = FedAvg(), FedAvg()
    outer.strategy, inner.strategy = inner, None  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="FedAvg neither is nor wraps a LabelAware strategy"):
        start(outer, federation(), model())
