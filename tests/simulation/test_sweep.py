"""Sweeps: what is trained together, what is trained at all, and what happens when something is in the way."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs import run_config
from fedentopt import datasets
from fedentopt.errors import InputError
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import find_runs
from fedentopt.simulation import engine, sweep
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.methods import parse_method, parse_seeds
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import form_stacks, run_in_memory, run_sweep
from toy_run import CONFIG, drive


class ToyData(str):
    """Stands in for a data set."""

    notes: tuple[str, ...] = ()


class ToyEngine:
    """Stands in for the engine: keeps what it was asked for, in order, and drives toy runs."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.stop_in: str | None = None

    def load(self, name: str, data_dir: Path | None = None, **how: object) -> ToyData:
        if name == "missing":
            raise InputError("dataset: 'missing' is not there")
        self.events.append(f"load {name}")
        return ToyData(f"data of {name}")

    def simulate(self, tasks, data, options, progress=None):
        self.events.append((data, [task.config.run_id for task in tasks]))
        outcomes = []
        for task in tasks:
            if task.config.run_id == self.stop_in:
                drive(task.recorder, task.config, stop_after=5)
                raise KeyboardInterrupt
            outcomes.append(drive(task.recorder, task.config))
        return outcomes

    @property
    def stacks(self) -> list[object]:
        return [event for event in self.events if isinstance(event, tuple)]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyEngine:
    toy = ToyEngine()
    monkeypatch.setattr(datasets, "load", toy.load)
    monkeypatch.setattr(engine, "run_stack", toy.simulate)
    return toy


def seeds(*numbers: int, **changes: object) -> list[RunConfig]:
    return [replace(CONFIG, seed=number, **changes) for number in numbers]


def test_runs_of_a_kind_share_a_stack_and_a_data_set_is_loaded_once(toy: ToyEngine, tmp_path: Path) -> None:
    alike = [*seeds(0, 1), *seeds(0, algorithm="fednova", lr=0.5)]
    wide = seeds(0, batch_size=8)
    other = seeds(0, dataset="cifar10")
    order = [alike[0], other[0], wide[0], *alike[1:]]
    results = run_sweep(order, RunOptions(out=str(tmp_path)))
    assert [run.config for run in results] == [config.to_dict() for config in order]
    assert toy.events == [
        "load cifar10",
        "load digits",
        ("data of digits", [c.run_id for c in alike]),
        ("data of digits", [c.run_id for c in wide]),
        ("data of cifar10", [c.run_id for c in other]),
    ]


@pytest.mark.parametrize(("most", "sizes"), [(None, [7]), (7, [7]), (3, [2, 2, 3]), (4, [3, 4]), (1, [1] * 7)])
def test_stacks_are_equal_parts_in_order(most: int | None, sizes: list[int]) -> None:
    runs = seeds(*range(7))
    stacks = form_stacks(runs, most)
    assert [len(stack) for stack in stacks] == sizes
    assert [run for stack in stacks for run in stack] == runs
    with pytest.raises(InputError, match="max-stack: 0 is out of range"):
        form_stacks(runs, 0)


INFINITY = -1


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
@pytest.mark.parametrize(
    ("soft", "hard", "runs", "asked"),
    [
        (256, 4096, 100, (612, 4096)),  # a file per run, and 512 for everything else
        (256, 400, 100, (400, 400)),  # as many as may be
        (256, INFINITY, 100, (612, INFINITY)),
        (256, 256, 100, None),
        (1024, 4096, 100, None),
        (612, 4096, 100, None),
        (INFINITY, INFINITY, 100, None),
    ],
)
def test_as_many_open_files_as_locks_need(
    soft: int, hard: int, runs: int, asked: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_to.append(limits))
    sweep._allow_files(runs)
    assert set_to == ([asked] if asked else [])


def test_a_missing_data_set_is_known_before_anything_trains(toy: ToyEngine, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'missing'"):
        run_sweep([*seeds(0), *seeds(0, dataset="missing")], RunOptions(out=str(tmp_path)))
    assert toy.stacks == []
    assert list(tmp_path.iterdir()) == []


def test_configs_given_twice_run_once_and_it_is_said(toy: ToyEngine, tmp_path: Path) -> None:
    lines: list[str] = []
    results = run_sweep([*seeds(0, 1), *seeds(0)], RunOptions(out=str(tmp_path), say=lines.append))
    assert [run.seed for run in results] == [0, 1, 0]
    assert lines == ["1 of 3 runs are given more than once; each runs once"]
    assert len(find_runs(tmp_path)) == 2


def test_finished_runs_are_read_and_not_repeated(toy: ToyEngine, tmp_path: Path) -> None:
    run_sweep(seeds(0, 1), RunOptions(out=str(tmp_path)))
    toy.events.clear()
    lines: list[str] = []
    results = run_sweep(seeds(0, 1, 2), RunOptions(out=str(tmp_path), say=lines.append))
    assert toy.stacks == [("data of digits", [seeds(2)[0].run_id])]
    assert lines == ["2 of 3 runs are finished already (--no-resume repeats them)"]
    assert [run.seed for run in results] == [0, 1, 2]
    toy.events.clear()
    run_sweep(seeds(0, 1, 2), RunOptions(out=str(tmp_path)))
    assert toy.events == []  # not even the data are touched
    run_sweep(seeds(1), RunOptions(out=str(tmp_path), resume=False))
    assert len(toy.stacks) == 1


def test_what_a_person_should_know_about_the_data_is_said_once(
    toy: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyData, "notes", ("no test split, so a fifth is the test",))
    lines: list[str] = []
    run_sweep([*seeds(0, 1), *seeds(0, image_size=16)], RunOptions(out=str(tmp_path), say=lines.append))
    assert lines == ["no test split, so a fifth is the test"]


def test_a_run_that_another_process_finished_meanwhile_is_left_alone(
    toy: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_load(name: str, data_dir: Path | None = None, **how: object) -> ToyData:
        drive(RunFolder(tmp_path, CONFIG))
        return ToyData("data")

    monkeypatch.setattr(datasets, "load", slow_load)
    run_sweep(seeds(0, 1), RunOptions(out=str(tmp_path)))
    assert toy.stacks == [("data", [seeds(1)[0].run_id])]


def test_a_stack_that_was_killed_leaves_no_lock_behind_for_good(toy: ToyEngine, tmp_path: Path) -> None:
    """Of a stack's runs some are finished when it is killed; nobody takes the locks of those again."""
    run_sweep(seeds(0), RunOptions(out=str(tmp_path)))
    for config in seeds(0, 1):
        folder = tmp_path / config.run_id
        folder.mkdir(exist_ok=True)
        (folder / ".lock").write_text("4194305\n")  # a process that there cannot be
    run_sweep(seeds(0, 1), RunOptions(out=str(tmp_path)))
    assert not list(tmp_path.glob("*/.lock"))


def test_an_interrupted_sweep_keeps_what_is_done_and_continues(toy: ToyEngine, tmp_path: Path) -> None:
    toy.stop_in = seeds(1)[0].run_id
    with pytest.raises(KeyboardInterrupt):
        run_sweep(seeds(0, 1, 2), RunOptions(out=str(tmp_path)))
    assert [run.seed for run in find_runs(tmp_path)] == [0]
    assert not list(tmp_path.glob("*/.lock"))
    assert {path.name for path in tmp_path.iterdir()} == {config.run_id for config in seeds(0, 1)}
    toy.stop_in = None
    toy.events.clear()
    lines: list[str] = []
    run_sweep(seeds(0, 1, 2), RunOptions(out=str(tmp_path), say=lines.append))
    assert lines == [
        "1 of 3 runs are finished already (--no-resume repeats them)",
        "1 of 3 runs go on from their checkpoints (--no-resume starts them afresh)",
    ]
    assert toy.stacks == [("data of digits", [config.run_id for config in seeds(1, 2)])]
    resumed = json.loads((tmp_path / seeds(1)[0].run_id / "run.json").read_text())["resumed"]
    assert [part["round"] for part in resumed] == [5]


def test_targets_reach_the_summary(toy: ToyEngine, tmp_path: Path) -> None:
    (run,) = run_sweep(seeds(0), RunOptions(out=str(tmp_path), target=(12.5,)))
    assert "12.5" in run.summary["rounds_to"]


def test_an_out_folder_that_is_a_file_is_refused(toy: ToyEngine, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out: cannot create the folder"):
        run_sweep(seeds(0), RunOptions(out=str(tmp_path / "out")))


def test_a_diverged_run_is_chance_and_does_not_touch_its_neighbour(tmp_path: Path) -> None:
    sound = run_config(clients=20, cohort="2", rounds=3, epochs=1, seed=1)
    wild = replace(sound, lr=1e25)
    options = RunOptions(out=str(tmp_path / "both"), device="cpu", workers=1)
    good, bad = run_sweep([sound, wild], options)
    assert bad.summary["diverged_round"] == 1
    assert bad.summary["accuracy"] == bad.summary["worst_class_accuracy"] == 10
    assert good.summary["diverged_round"] is None
    (alone,) = run_sweep([sound], replace(options, out=str(tmp_path / "alone")))
    assert [replace(r, seconds=0) for r in good.records] == [replace(r, seconds=0) for r in alone.records]


def test_runs_in_memory_are_those_of_a_folder_and_leave_no_file(
    toy: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    order = [*seeds(0, 1), *seeds(0, batch_size=8), *seeds(0)]
    runs = run_in_memory(order, RunOptions(target=(12.5,)))
    assert [run.config for run in runs] == [config.to_dict() for config in order]
    assert [len(ids) for _, ids in toy.stacks] == [2, 1]
    assert list(tmp_path.iterdir()) == []
    (read,) = run_sweep(seeds(1), RunOptions(target=(12.5,), out=str(tmp_path / "out")))
    assert runs[1].summary == read.summary
    assert runs[1].about["command"] == read.about["command"]
    assert runs[1].model is not None
    assert runs[1].model.keys() == {"layer.weight"}


def test_data_that_are_given_are_not_looked_for(toy: ToyEngine, tmp_path: Path) -> None:
    mine = ToyData("mine")
    mine.notes, lines = ("a note",), []
    config = replace(CONFIG, dataset="missing")
    options = RunOptions(out=str(tmp_path), say=lines.append)
    (run,) = run_sweep([config], options, data=mine)
    run_in_memory([config], options, data=mine)
    assert toy.events == [(mine, [run.run_id])] * 2
    assert lines == ["a note"] * 2


@pytest.mark.parametrize(
    ("text", "expected"), [("0,1,2", (0, 1, 2)), ("0-4", (0, 1, 2, 3, 4)), (" 7 , 1-2", (7, 1, 2)), ("3-3", (3,))]
)
def test_seeds(text: str, expected: tuple[int, ...]) -> None:
    assert parse_seeds(text) == expected


@pytest.mark.parametrize("text", ["", ",", "1,", "-1", "1--2", "one", "1;2", "1.0", "²"])
def test_seeds_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="seeds: "):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("name", "algorithm", "selector", "epsilon"),
    [
        ("fedavg", "fedavg", "random", None),
        ("fedentopt", "fedavg", "fedentopt", None),
        ("fedentopt-dp", "fedavg", "fedentopt", 0.5),
        ("fedprox+fedentopt", "fedprox", "fedentopt", None),
        ("scaffold+fedentopt-dp", "scaffold", "fedentopt", 0.5),
        ("kl", "fedavg", "kl", None),
        ("KL-DP", "fedavg", "kl", 0.5),
        ("fedconcat", "fedconcat", "random", None),
        ("fedconcat-dp", "fedconcat", "random", 0.5),
        ("fedentropy", "fedentropy", "random", None),
        ("random", "fedavg", "random", None),
        ("own.Code:Make", "own.Code:Make", "random", None),
        ("fedprox+own:pick-dp", "fedprox", "own:pick", 0.5),
    ],
)
def test_methods_by_name(name: str, algorithm: str, selector: str, epsilon: float | None) -> None:
    assert parse_method(name) == {"algorithm": algorithm, "selector": selector, "epsilon": epsilon}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "fednova", "scaffold", "fedrs", "fedlc", "fedconcat"])
@pytest.mark.parametrize("selector", ["random", "fedentopt", "kl"])
def test_a_configs_method_name_reads_back_as_its_settings(algorithm: str, selector: str) -> None:
    for epsilon in (None, 0.5) if selector != "random" or algorithm == "fedconcat" else (None,):
        config = run_config(algorithm=algorithm, selector=selector, epsilon=epsilon)
        assert run_config(**parse_method(config.method)) == config


@pytest.mark.parametrize("name", ["", "fedsgd", "fedavg+", "+kl", "fedentopt+fedavg", "a+b+c", "fedavg-dp", "-dp"])
def test_unknown_methods_are_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=r"method: '.*accepted: "):
        parse_method(name)
