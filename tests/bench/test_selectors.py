"""Benchmarks of selectors: a round of each measured, what feedback costs a stack, both as commands print them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from command_line import commander
from fedentopt.bench import selection as cases
from fedentopt.bench import selectors as benchmark
from fedentopt.bench import stack
from fedentopt.cli.bench import selection
from fedentopt.selection import SELECTORS, ClientId, Observation, Selector


@pytest.mark.parametrize("name", SELECTORS.names)
def test_a_round_of_every_selector_is_measured(name: str) -> None:
    speed = benchmark.measure(name, clients=300, cohort=5)
    assert (speed.selector, speed.clients, speed.classes, speed.cohort) == (name, 300, 10, 5)
    assert min(speed.first_ms, speed.next_ms, speed.fedentopt_ms) > 0
    assert speed.times == pytest.approx(speed.next_ms / speed.fedentopt_ms)
    assert speed.largest == SELECTORS.get(name).largest
    assert speed.needs == sorted(SELECTORS.get(name).needs)
    assert speed.all_pairs == (name in ("hics-fl", "clustered-update", "clustered-label", "divfl"))


def test_no_more_clients_than_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SELECTORS.get("cycle"), "largest", 40)
    assert benchmark.measure("cycle", clients=300, cohort=5).clients == 40


@pytest.mark.parametrize("name", ["rpow-d", "oort", "hics-fl", "divfl", "clustered-update"])
def test_what_clients_told_is_known_of_everybody_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round costs most when there is most to look through."""
    told: list[int] = []
    cls = SELECTORS.get(name)
    observe = cls.observe

    def watched(self: Selector, observations: Mapping[ClientId, Observation]) -> None:
        told.append(len(observations))
        observe(self, observations)

    monkeypatch.setattr(cls, "observe", watched)
    benchmark.measure(name, clients=300, cohort=5)
    assert told[0] == 300
    assert max(told[1:]) <= 5


def made_up(name: str) -> benchmark.SelectorSpeed:
    speed = (999_000.0, 0.5, 20.0, 0.025, 5000 if name == "divfl" else None, [], 1234.0, name == "divfl")
    return benchmark.SelectorSpeed(name, 1_000_000, 10, 100, *speed)


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fedentopt = commander(monkeypatch, capsys)
    monkeypatch.setattr(benchmark, "CLIENTS", 200)
    monkeypatch.setattr(benchmark, "run_selector", made_up)
    found = json.loads(fedentopt("bench", "selection", "--selector", "divfl", "--selector", "oort", "--json").out)
    assert [speed["selector"] for speed in found["selectors"]] == ["divfl", "oort"]
    assert "selection" not in found
    said = fedentopt("bench", "selection", "--selector", "none")
    assert said.code == 2
    assert "selector: 'none' is unknown; accepted: random, fedentopt" in said.err
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cases, "CASES", {})
    selection(case=None, selector=None, json=False)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "divfl            1,000,000 999.0 s 0.50 ms 0.03 x 5,000* 1,234 MB" in shown
    assert len([line for line in shown.splitlines() if "1,000,000" in line]) == len(SELECTORS.names)


def test_a_process_of_its_own_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode, stdout, stderr = 1, "", "out of memory"

    monkeypatch.setattr(benchmark.subprocess, "run", lambda *args, **more: Failed())
    with pytest.raises(RuntimeError, match="the benchmark of oort failed:\nout of memory"):
        benchmark.run_selector("oort")


def test_a_stack_beside_random_selection() -> None:
    case = stack.StackCase(runs=2, clients=4, samples=20, cohort=2, rounds=2, epochs=1)
    random, recent, asking = stack.bench_stack("cpu", case=case, names=["rpow-d", "pow-d"], repeats=1, workers=1)
    assert (random.selector, random.share) == ("random", 1.0)
    assert (recent.selector, recent.asked) == ("rpow-d", 0.0)
    assert asking.asked == 2.0, "four clients are asked, two train for one epoch"
    assert min(random.samples_per_second, recent.samples_per_second, recent.share) > 0
    report = stack.stack_json([random, recent], "cpu")
    assert [speed["selector"] for speed in report["selectors"]] == ["random", "rpow-d"]
    assert {"fedentopt", "commit", "torch", "device", "sources"} <= report.keys()
    assert stack.feedback_selectors() == [
        "pow-d", "cpow-d", "rpow-d", "hics-fl", "clustered-update", "oort", "divfl", "inferred"
    ]  # fmt: skip


def test_a_census_is_training() -> None:
    case = stack.StackCase(runs=1, clients=4, samples=20, cohort=2, rounds=3, epochs=2)
    _, trained, _ = stack._run(case, "inferred", stack._images(case), stack.RunOptions(device="cpu", workers=1))
    assert trained == 3 * 2 * 20 * 2 + 4 * 20


def test_speed_beside_random_selection_is_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever trains on three quarters of the samples in half the time is one and a half times as fast, not twice."""
    runs = {"random": (2.0, 400, 0), "clustered-update": (1.0, 300, 0)}
    monkeypatch.setattr(stack, "_run", lambda case, name, data, options: runs[name])
    case = stack.StackCase(runs=1, clients=2, samples=5, cohort=1, rounds=1, epochs=1)
    _, found = stack.bench_stack("cpu", case=case, names=["clustered-update"], repeats=2)
    assert (found.samples_per_second, found.share) == (300.0, 1.5)


def test_the_command_for_a_stack(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = [stack.StackSpeed("random", 1000.0, 1.0, 0.0), stack.StackSpeed("pow-d", 700.0, 0.7, 2.0)]
    monkeypatch.setattr(stack, "bench_stack", lambda device, repeats: iter(speeds))
    fedentopt = commander(monkeypatch, capsys)
    shown = fedentopt("bench", "engine", "--selectors", "--device", "cpu").out
    assert "70.0 %" in shown
    assert "2.00" in shown
    found = json.loads(fedentopt("bench", "engine", "--selectors", "--device", "cpu", "--json").out)
    assert [speed["share"] for speed in found["selectors"]] == [1.0, 0.7]
    said = fedentopt("bench", "engine", "--selectors", "--model", "vgg11")
    assert said.code == 2
    assert "model: vgg11 with --selectors; accepted: none, it measures lenet5" in said.err
