"""The benchmark measures what it says: the same cohorts both ways, and little memory where counts are sparse."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from command_line import commander
from fedentopt import EntropySelector
from fedentopt.bench import selection as benchmark
from fedentopt.cli.bench import selection
from fedentopt.errors import InputError


@pytest.mark.parametrize("case", ["paper", "thousands"])
def test_naive_numpy_finds_the_same_cohort(case: str) -> None:
    speed = benchmark.measure(case)
    assert speed.same_cohort is True
    assert speed.naive_ms is not None
    assert speed.times == pytest.approx(speed.naive_ms / speed.ours_ms)


def test_the_benchmark_would_notice_another_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "naive_cohort", lambda counts, first, size: list(range(size)))
    assert benchmark.measure("paper").same_cohort is False


def test_many_clients_with_everything_there_is_to_rule_out() -> None:
    """Above the size from which most clients are ruled out unseen, against naive NumPy for a few picks."""
    counts = benchmark.dense_counts(benchmark.Case(140_000, 5, 12))
    selector = EntropySelector(12, seed=2)
    selector.register(counts)
    cohort = selector.select()
    assert benchmark.naive_cohort(counts, int(cohort.clients[0]), 12) == list(cohort.clients)


def test_sparse_counts_stay_sparse() -> None:
    """100,000 clients with 1,000 classes would be 800 MB as a table; the whole process must stay below 300 MB."""
    code = (
        "from fedentopt import EntropySelector\n"
        "from fedentopt.bench.selection import Case, peak_mb, _sparse\n"
        "selector = EntropySelector(20, buffer_size=50_000)\n"
        "selector.register(_sparse(Case(100_000, 1_000, 20, held=5)))\n"
        "cohort = selector.select()\n"
        "print(len(cohort.clients), cohort.label_counts.size, peak_mb())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    clients, classes, peak = said.stdout.split()
    assert (clients, classes) == ("20", "1000")
    assert float(peak) < 300


def _slow_speed(name: str, same: bool = True) -> benchmark.Speed:
    case = benchmark.CASES[name]
    sizes = (case.clients, case.classes, case.cohort, 1500.0, 1500.0, 999.0)
    return benchmark.Speed(name, *sizes, naive_ms=99e3, times=99.9, same_cohort=same, peak_mb=1234.0)


def test_the_table_fits_a_narrow_terminal_and_tells_of_differences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "run_case", lambda name: _slow_speed(name, name != "million"))
    monkeypatch.setenv("COLUMNS", "80")
    selection(case=list(benchmark.CASES), selector=None, json=False)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "million-sparse 1,000,000   1,000    100 1.5 s 999 ms 99.0 s 99.9 x 1,234 MB" in shown
    assert "NOT the same cohorts both ways: million\n" in shown


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fedentopt = commander(monkeypatch, capsys)
    (speed,) = json.loads(fedentopt("bench", "selection", "--case", "paper", "--json").out)["selection"]
    assert speed["case"] == "paper"
    assert (speed["clients"], speed["classes"], speed["cohort"]) == (100, 10, 10)
    assert speed["same_cohort"] is True
    shown = fedentopt("bench", "selection", "--case", "paper").out
    assert "both ways found the same cohorts" in shown
    said = fedentopt("bench", "selection", "--case", "none")
    assert said.code == 2
    assert "case: 'none' is unknown; accepted: paper, thousands, million, million-noisy, million-sparse" in said.err
    with pytest.raises(InputError, match="case: 'none'"):
        benchmark.run_case("none")


def test_data_is_what_the_case_says() -> None:
    sparse = benchmark._sparse(benchmark.Case(500, 100, 5, held=5))
    lengths = np.diff(sparse.indptr)
    assert (lengths.min(), lengths.max()) == (1, 5)
    for start, stop in zip(sparse.indptr[:-1], sparse.indptr[1:], strict=True):
        assert len(set(sparse.indices[start:stop].tolist())) == stop - start
    dense = benchmark.dense_counts(benchmark.Case(500, 10, 5))
    assert dense.shape == (500, 10)
    assert dense.sum(axis=1).min() >= 10
