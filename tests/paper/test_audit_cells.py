"""The cells about liars and about selection without reports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from command_line import commander
from fedentopt.paper.audit_page import audit_page
from fedentopt.paper.audit_table import liars_table
from fedentopt.paper.blocks import audit_cells, paper_cells
from fedentopt.paper.cells import Cell, distinct_runs
from fedentopt.paper.comparison import compare
from fedentopt.paper.exported import export, read_exported
from fedentopt.paper.measures import Measured, Results, settings_key


def test_what_is_compared() -> None:
    cells = [cell for cell in audit_cells() if cell.model == "lenet5"]
    assert Counter(cell.table for cell in cells) == {"inferred": 2 * 2 * 2 * 6, "liars": 2 * 2 * (2 * 4 * 3 + 2 + 2)}
    assert {cell.seeds for cell in cells} == {(0, 1, 2, 3, 4)}
    for cell in cells:
        assert cell.config is not None
        buffer = cell.config.of("selector").get("buffer")
        assert buffer == (None if cell.method == "fedavg" else {"dir:0.1": "50%", "classes:2": "70%"}[cell.partition])
        if cell.table == "liars":
            assert cell.config.number_of_liars in (0, 10, 30)
            assert cell.config.audit in ("off", "replace", "quarantine")
            assert cell.config.audit != "off" or cell.config.number_of_liars
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


ROOT = Path(__file__).resolve().parent.parent.parent


def measured(cell: Cell, seed: int, **figures: float) -> Measured:
    assert cell.config is not None
    return Measured(settings=settings_key(cell.config), seed=seed, rounds=500, **{"accuracy": 50.0 + seed} | figures)


def results_of(*found: Measured) -> Results:
    return Results(None, {(run.settings, run.seed): run for run in found})


def chosen(table: str, **wanted: object) -> Cell:
    """The LeNet-5 cell on CIFAR-10, Dir(0.1), whose run has these settings."""
    (cell,) = (
        cell for cell in audit_cells()
        if (cell.table, cell.model, cell.dataset, cell.partition) == (table, "lenet5", "cifar10", "dir:0.1")
        and cell.participation == 10
        and all(getattr(cell if name == "method" else cell.config, name) == value for name, value in wanted.items())
    )  # fmt: skip
    return cell


def test_the_table_of_liars_by_hand() -> None:
    policies = ("off", "replace", "quarantine")
    lied = {policy: chosen("liars", lie="uniform", liars="30%", audit=policy) for policy in policies}
    nobody = chosen("liars", number_of_liars=0, audit="quarantine")
    kept_away = {"suspects": 28.0, "honest_suspects": 1.0, "first_auc": 0.1, "third_auc": 0.2}
    runs = [
        *(measured(lied["off"], s, liars_chosen=3000, mean_entropy=2.5, believed_entropy=3.3) for s in (0, 1)),
        *(measured(lied["replace"], s, liars_chosen=1500, first_auc=0.9, third_auc=0.97) for s in (0, 1)),
        *(measured(lied["quarantine"], s, liars_chosen=150 * (s + 1), **kept_away) for s in (0, 1)),
        measured(nobody, 0, suspects=3.0),
    ]
    entries = compare([*lied.values(), nobody], results_of(*runs), lambda name: True)
    lies, honest = liars_table("liars", entries).sections[0].rows
    assert lies == (
        "uniform", "30", "50.50 ± 0.71", "50.50 ± 0.71", "50.50 ± 0.71", "2.00", "1.00", "0.15", "2.50 (3.30)",
        "0.90, 0.97", "27.0 of 30", "1.0", "2 of 5",
    )  # fmt: skip
    assert (honest[0], honest[1], honest[4], honest[11]) == ("none", "0", "50.00", "3.0")


def test_the_page_sets_both_beside_random_and_true_counts() -> None:
    cells = {
        "random": chosen("inferred", method="fedavg"), "true": chosen("inferred", method="fedentopt"),
        "inferred": chosen("inferred", method="inferred"),
        "lied": chosen("liars", lie="rare", liars="10%", audit="replace"),
    }  # fmt: skip
    level = {"random": 40.0, "true": 50.0, "inferred": 49.0, "lied": 45.0}
    runs = [
        measured(cell, seed, accuracy=level[name] + seed * (1 if name == "inferred" else 1.1))
        for name, cell in cells.items() for seed in (0, 1, 2)
    ]  # fmt: skip
    entries = compare(audit_cells(), results_of(*runs), lambda name: False)
    text = audit_page(entries, commands=[], remarks="A word.")
    assert "A word." in text
    assert "LeNet-5, CIFAR-10, Dir(0.1), 10 % | 50.00 ± 1.00 | **-1.10 [-1.35, -0.85]** | **+8.90" in text
    assert "10 rare | replace | 46.10 ± 1.10 | **+5.00 [+5.00, +5.00]** | **-5.00 [-5.00, -5.00]**" in text
    assert "(random 41.10 ± 1.10, no liars 51.10 ± 1.10)" in text
    assert "There are no results yet" in audit_page(
        compare(audit_cells(), Results(), lambda _: True), commands=[], remarks=""
    )


def test_the_page_is_that_of_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["reproduce", "liars", "--results", str(ROOT / "results/audit")]
    commander(monkeypatch, capsys)(*words, "--results-page", str(tmp_path / "AUDIT.md"))
    made = (tmp_path / "AUDIT.md").read_text(encoding="utf-8")
    assert made == (ROOT / "docs/AUDIT.md").read_text(encoding="utf-8")


def test_what_was_believed_comes_through_an_export(tmp_path: Path) -> None:
    cell = chosen("liars", lie="uniform", liars="30%", audit="quarantine")
    run = measured(
        cell, 0, suspects=28.0, honest_suspects=1.0, first_auc=0.9, liars_chosen=150.0, believed_entropy=3.25
    )
    export(tmp_path, [cell], results_of(run))
    assert read_exported(tmp_path).get(cell.config, 0) == run
