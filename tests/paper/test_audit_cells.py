"""The cells about liars and about selection without reports."""

from __future__ import annotations

from collections import Counter

import pytest

from command_line import commander
from fedentopt.paper.blocks import audit_cells, paper_cells
from fedentopt.paper.cells import distinct_runs


def test_what_is_compared() -> None:
    cells = [cell for cell in audit_cells() if cell.model == "lenet5"]
    assert Counter(cell.table for cell in cells) == {"inferred": 2 * 2 * 2 * 6, "liars": 2 * 2 * 2 * 4 * 3}
    assert {cell.seeds for cell in cells} == {(0, 1, 2, 3, 4)}
    for cell in cells:
        assert cell.config is not None
        buffer = cell.config.of("selector").get("buffer")
        assert buffer == (None if cell.method == "fedavg" else {"dir:0.1": "50%", "classes:2": "70%"}[cell.partition])
        if cell.table == "liars":
            assert cell.config.number_of_liars in (10, 30)
            assert cell.config.audit in ("off", "replace", "quarantine")
    epsilons = {cell.config.epsilon for cell in cells if cell.method == "fedentopt-dp" and cell.config}
    assert epsilons == {0.5, 0.1, 0.05}


def test_honest_runs_are_the_papers_own() -> None:
    """What was run for the paper's tables is not run again."""
    known = {run.digest() for run in distinct_runs(paper_cells())}
    plain = [cell for cell in audit_cells() if cell.method in ("fedavg", "fedentopt") and cell.table == "inferred"]
    assert plain
    for cell in plain:
        assert cell.config is not None
        assert cell.config.digest() in known


def test_they_go_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = commander(monkeypatch, capsys)("reproduce", "liars", "--list", "--dataset", "cifar10", "--model", "lenet5")
    assert "lie forge-head, audit quarantine" in str(said)
