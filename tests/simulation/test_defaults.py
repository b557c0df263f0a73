"""One set of defaults per data set, whichever front door a run comes in by."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from command_line import Said, commander
from fedentopt.cli import compare as compare_command
from fedentopt.cli import run as run_command
from fedentopt.simulation import RunConfig, api, compare, simulate
from fedentopt.simulation.command import command_of
from fedentopt.simulation.jobs import DATASET_DEFAULTS


class Enough(Exception):
    """Raised where runs would begin."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs that the front doors ask for, none of which is run."""
    found: list[RunConfig] = []

    def instead(jobs, *more, **named):
        found.extend(job.config for job in jobs)
        raise Enough

    monkeypatch.setattr(compare_command, "conduct", instead)
    monkeypatch.setattr(run_command, "conduct", instead)
    monkeypatch.setattr(api, "run_jobs", instead)
    return found


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commander(monkeypatch, capsys)


@pytest.mark.parametrize("dataset", ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "my.npz"])
@pytest.mark.parametrize("given", [{}, {"lr": 0.2, "rounds": 7}, {"flip": 0.25}])
def test_run_compare_and_the_api_ask_for_the_same_run(
    asked: list[RunConfig], command: Callable[..., Said], dataset: str, given: dict[str, float]
) -> None:
    words = ["--dataset", dataset, *(word for name, value in given.items() for word in (f"--{name}", value))]
    doors: list[Callable[[], object]] = [
        lambda: command("run", *words, "--seed", 4, "--selector", "fedentopt"),
        lambda: command("compare", *words, "--seed", 4, "--method", "fedentopt"),
        lambda: compare(["fedentopt"], dataset=dataset, seeds=[4], **given),
        lambda: compare([f"fedentopt:dataset={dataset}"], seeds=[4], **given),
        lambda: simulate({"dataset": dataset, "selector": "fedentopt", "seed": 4, **given}),
    ]
    for door in doors:
        with pytest.raises(Enough):
            door()
    expected = DATASET_DEFAULTS.get(dataset, {}) | given
    assert asked == [RunConfig(dataset=dataset, selector="fedentopt", seed=4, **expected)] * len(doors)


def test_without_a_name_it_is_digits(asked: list[RunConfig], command: Callable[..., Said]) -> None:
    for door in (lambda: command("run"), lambda: compare(["fedavg"], seeds=1), lambda: simulate({})):
        with pytest.raises(Enough):
            door()
    assert asked == [RunConfig(rounds=30, lr=0.03, flip=0.0)] * 3


def test_a_config_is_run_as_it_stands_and_its_command_makes_it_again(
    asked: list[RunConfig], command: Callable[..., Said]
) -> None:
    plain, changed = RunConfig(), RunConfig(lr=0.5, flip=0.0, rounds=30)
    for config in (plain, changed):
        with pytest.raises(Enough):
            simulate(config)
        with pytest.raises(Enough):
            command(*shlex.split(command_of(config))[1:])
    assert asked == [plain, plain, changed, changed]


def test_the_help_names_the_values(command: Callable[..., Said]) -> None:
    for name in ("run", "compare"):
        said = command(name, "--help", columns=200)
        for words in ("100; digits: 30", "0.01; digits: 0.03", "0.5; digits: 0.0; mnist: 0.0"):
            assert f"(default: {words})" in said.out
