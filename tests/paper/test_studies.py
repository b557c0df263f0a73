"""Two studies beside the paper's tables: what bf16 costs, and what the paper leaves open for VGG-11."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from command_line import commander
from fedentopt.paper.bf16_table import Pair, bf16_table, pairs, verdict
from fedentopt.paper.blocks import paper_cells
from fedentopt.paper.cells import Cell, distinct_runs
from fedentopt.paper.comparison import Comparison, compare
from fedentopt.paper.measures import Measured, Results, settings_key
from fedentopt.paper.open_choices import AS_CHOSEN, change, found, open_choices_table
from fedentopt.paper.results_page import page

ROOT = Path(__file__).resolve().parent.parent.parent
BF16 = [cell for cell in paper_cells() if cell.table == "bf16"]
OPEN = [cell for cell in paper_cells() if cell.table == "vgg11-open"]
TABLE1 = {run.digest() for run in distinct_runs(cell for cell in paper_cells() if cell.table == "table1")}


def known(cells: Sequence[Cell], accuracy: dict[int, float] | float) -> list[Measured]:
    """A run of every cell and seed; accuracy by seed, or the same for all."""
    runs = []
    for cell in cells:
        assert cell.config is not None
        for seed in cell.seeds:
            value = accuracy if isinstance(accuracy, float) else accuracy[seed]
            runs.append(Measured(settings=settings_key(cell.config), seed=seed, rounds=500, accuracy=value))
    return runs


def entries(cells: Sequence[Cell], *runs: Measured) -> list[Comparison]:
    results = Results(None, {(run.settings, run.seed): run for run in runs})
    return compare(cells, results, lambda name: True)


def of(cells: Sequence[Cell], **wanted: object) -> list[Cell]:
    return [
        cell for cell in cells
        if all(getattr(cell if hasattr(cell, name) else cell.config, name) == value for name, value in wanted.items())
    ]  # fmt: skip


# --- bf16
def test_bf16_runs_stand_beside_those_of_table_1() -> None:
    assert Counter(cell.model for cell in BF16) == {"vgg11": 12, "lenet5": 12}
    assert {cell.seeds for cell in of(BF16, model="vgg11")} == {(0, 1, 2)}
    for cell in BF16:
        assert cell.config is not None
        assert (cell.config.digest() in TABLE1) == (cell.config.precision == "fp32")
    for pair in pairs(entries(BF16)):
        assert pair.tf32.cell.config is not None
        assert pair.tf32.cell.config.replace(precision="bf16") == pair.bf16.cell.config


def test_pairs_differ_in_nothing_else() -> None:
    """Neither in a setting that the table's rows do not name."""
    both = of(BF16, model="lenet5", method="fedavg", partition="dir:0.1")
    slower = [dataclasses.replace(cell, config=cell.config and cell.config.replace(lr=0.001)) for cell in both]
    runs = known(both, 50.0), known(slower, 40.0)
    assert [pair.tf32.ours for pair in pairs(entries([*both, *slower], *runs[0], *runs[1]))] == [50.0, 40.0]


def vgg(tf32: dict[int, float], bf16: dict[int, float]) -> list[Pair]:
    """The six pairs of VGG-11, all with these accuracies by seed."""
    cells = of(BF16, model="vgg11")
    low, high = ([c for c in cells if c.config and c.config.precision == p] for p in ("fp32", "bf16"))
    return pairs(entries(cells, *known(low, tf32), *known(high, bf16)))


FLAT = {0: 50.0, 1: 60.0, 2: 70.0}


def test_bf16s_differences_by_hand() -> None:
    # -1, 0, +1 in each of six: mean 0, deviation sqrt(12 / 17), t(0.975, 17) = 2.1098: half an interval is 0.418.
    assert verdict(vgg(FLAT, {0: 49.0, 1: 60.0, 2: 71.0})) == (
        "VGG-11: bf16 minus TF32 is +0.00 [-0.42, +0.42] points over 18 pairs of runs. A cost of more than 1 point is "
        "ruled out, and no method by itself is clearly lower; tables may use bf16."
    )
    pair = vgg(FLAT, {0: 49.0, 1: 60.0, 2: 71.0})[0]
    table = bf16_table("bf16", [pair.tf32, pair.bf16])
    # Deviation 1, t(0.975, 2) = 4.3027, over sqrt(3).
    assert table.sections[0].heading == "VGG-11, CIFAR-10, Dir(0.1)"
    assert table.sections[0].rows == (("FedAvg", "60.00 ± 10.00", "60.00 ± 11.00", "+0.00 [-2.48, +2.48]", "3"),)


def test_a_wide_interval_rules_no_cost_out() -> None:
    said = verdict(vgg(FLAT, {0: 46.0, 1: 60.0, 2: 74.0}))
    assert "+0.00 [-1.67, +1.67]" in said
    assert "That shows no clear cost, but does not rule out one of more than 1 point" in said
    assert said.endswith("tables stay with TF32.")


def test_a_small_but_clear_cost_is_one() -> None:
    said = verdict(vgg(FLAT, {0: 49.5, 1: 59.6, 2: 69.8}))  # well within a point
    assert "bf16 costs accuracy" in said
    assert said.endswith("tables stay with TF32.")


def test_one_method_that_is_clearly_lower_is_named() -> None:
    good = vgg(FLAT, {0: 49.0, 1: 60.0, 2: 71.0})
    [bad] = [pair for pair in vgg(FLAT, {0: 49.50, 1: 59.51, 2: 69.49}) if pair.name == "SCAFFOLD under C=2"]
    said = verdict([bad if pair.name == bad.name else pair for pair in good])
    assert "bf16 costs accuracy, clearly so with SCAFFOLD under C=2; tables stay with TF32." in said


def test_nothing_is_said_of_bf16_before_its_runs_are_there() -> None:
    cells = of(BF16, model="vgg11")
    tf32 = [c for c in cells if c.config and c.config.precision == "fp32"]
    half = known([c for c in cells if c not in tf32], FLAT)[:-1]
    for runs, count in (((), 0), (known(tf32, FLAT), 0), ([*known(tf32, FLAT), *half], 17)):
        table = bf16_table("bf16", entries(cells, *runs))
        assert f"VGG-11: {count} of 18 pairs of full-length runs are there, so nothing is said" in table.note
    assert "ruled out" not in table.note
    trial = entries([cell.cut(3) for cell in cells], *known([cell.cut(3) for cell in cells], FLAT))
    assert "VGG-11: 0 of 18 pairs of full-length runs are there" in bf16_table("bf16", trial).note


def test_fewer_runs_than_a_verdict_takes_give_none() -> None:
    """All that was asked for is there, all are equal, and still: one seed, or one method, tells too little."""
    one_seed = [cell.with_seeds((0,)) for cell in of(BF16, model="vgg11")]
    one_method, one_partition = of(BF16, model="vgg11", method="fedavg"), of(BF16, model="vgg11", partition="dir:0.1")
    for cells in (one_seed, one_method, one_partition):
        note = bf16_table("bf16", entries(cells, *known(cells, FLAT))).note
        assert note.endswith(
            "VGG-11: a verdict on bf16 takes 3 methods under 2 partitions with 3 seeds each, and fewer were asked for, "
            "so nothing is said."
        )


def with_diverged(tf32: bool, bf16: bool) -> str:
    """The verdict where seed 0 of SCAFFOLD under Dir(0.1) diverged in these precisions, all other pairs being near."""
    cells = of(BF16, model="vgg11")
    runs = []
    for cell in cells:
        assert cell.config is not None
        low = cell.config.precision == "bf16"
        bad = (bf16 if low else tf32) and (cell.method, cell.partition) == ("scaffold", "dir:0.1")
        for run in known([cell], {0: 49.9, 1: 60.0, 2: 70.1} if low else FLAT):
            lost = bad and run.seed == 0
            runs.append(dataclasses.replace(run, accuracy=10.0, diverged_round=3) if lost else run)
    return verdict(pairs(entries(cells, *runs)))


def test_pairs_that_diverge_in_both_precisions_are_no_evidence() -> None:
    said = with_diverged(tf32=True, bf16=True)
    assert (
        "points over 17 pairs of runs. No evidence are pairs that end at chance in both: SCAFFOLD under Dir(0.1) (1). "
        "A cost of more than 1 point is ruled out"
    ) in said


def with_stuck(
    *stuck: tuple[str, str], bf16: float = 10.4, tf32: float = 10.0
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The note, which ends with the verdict, and the rows of VGG-11 where all runs of these methods and partitions
    never learned, without diverging, and all other pairs differ by -1, 0 and +1."""
    cells = of(BF16, model="vgg11")
    runs = []
    for cell in cells:
        assert cell.config is not None
        low = cell.config.precision == "bf16"
        if (cell.method, cell.partition) in stuck:
            runs += known([cell], bf16 if low else tf32)
        else:
            runs += known([cell], {0: 49.0, 1: 60.0, 2: 71.0} if low else FLAT)
    made = entries(cells, *runs)
    table = bf16_table("bf16", made)
    return table.note, {f"{section.heading}, {row[0]}": row for section in table.sections for row in section.rows}


def test_two_runs_that_never_learned_are_no_agreement() -> None:
    """Three of eighteen pairs that are equal would have made the interval narrower."""
    said, rows = with_stuck(("scaffold", "dir:0.1"))
    # -1, 0, +1 in each of five: deviation sqrt(10 / 14), t(0.975, 14) = 2.1448, over sqrt(15).
    assert said.endswith(
        "outside the interval. Seeds that end at chance in both, at most 1 point above it, have no accuracy to lose "
        "and are not compared. VGG-11: bf16 minus TF32 is +0.00 [-0.47, +0.47] points over 15 pairs of runs. No "
        "evidence are pairs that end at chance in both: SCAFFOLD under Dir(0.1) (3). A cost of more than 1 point is "
        "ruled out, and no method by itself is clearly lower; tables may use bf16."
    )
    assert rows["VGG-11, CIFAR-10, Dir(0.1), SCAFFOLD"][1:] == (
        "10.00 ± 0.00", "10.40 ± 0.00", "–", "0 of 3 (3 at chance in both)",
    )  # fmt: skip
    assert rows["VGG-11, CIFAR-10, Dir(0.1), FedAvg"][-1] == "3"


def test_what_is_at_chance_in_bf16_alone_is_a_cost() -> None:
    said, rows = with_stuck(("scaffold", "dir:0.1"), tf32=30.0, bf16=10.0)
    assert "No evidence" not in said
    assert "at chance" not in said
    assert said.endswith("tables stay with TF32.")
    assert rows["VGG-11, CIFAR-10, Dir(0.1), SCAFFOLD"][-1] == "3"
    near, _ = with_stuck(("scaffold", "dir:0.1"), tf32=11.1, bf16=10.0)  # beyond the margin above chance
    assert "No evidence" not in near


def test_a_method_that_never_learns_anywhere_is_none_that_a_verdict_stands_on() -> None:
    said, _ = with_stuck(("scaffold", "dir:0.1"), ("scaffold", "classes:2"))
    assert said.endswith(
        "VGG-11: a verdict on bf16 takes 3 methods under 2 partitions with 3 seeds each, and fewer end above chance, "
        "so nothing is said. No evidence are pairs that end at chance in both: SCAFFOLD under Dir(0.1) (3) and "
        "SCAFFOLD under C=2 (3)."
    )
    methods = ("fedavg", "fedentopt", "scaffold")
    said, _ = with_stuck(*((method, partition) for method in methods for partition in ("dir:0.1", "classes:2")))
    assert "fewer end above chance, so nothing is said." in said


def test_a_run_that_diverges_with_bf16_alone_settles_it() -> None:
    said = with_diverged(tf32=False, bf16=True)
    assert said.endswith(
        "Runs that TF32 brings to their end diverge with bf16: SCAFFOLD under Dir(0.1) (1); tables stay with TF32."
    )
    assert "diverge with" not in with_diverged(tf32=True, bf16=False)


# --- what is open
def test_every_change_is_one_change() -> None:
    base = {cell.method: cell for cell in OPEN if not cell.swept and cell.model == "vgg11"}
    assert base.keys() == {"fedavg", "fednova", "scaffold", "fedentopt"}
    for cell in OPEN:
        assert (cell.seeds, cell.partition, cell.dataset) == ((0, 1), "dir:0.1", "cifar10")
        mine, plain = cell.config, base[cell.method].config
        assert mine is not None
        assert plain is not None
        assert plain.digest() in TABLE1
        ours, theirs = mine.to_dict(), plain.to_dict()
        differing = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
        assert len(differing) == (cell is not base[cell.method])
    words = Counter(change(entry) for entry in entries(OPEN))
    assert len(words) == 8
    assert words[AS_CHOSEN] == words["BatchNorm after every convolution"] == 4
    assert not any("_" in what for what in words), "every change has words"


def test_the_table_of_open_choices_by_hand() -> None:
    """FedAvg, printed 58.33: 48 and 52 as chosen, 58 and 57 with BatchNorm."""
    plain, normed = (of(OPEN, method="fedavg", model=model, swept=())[0] for model in ("vgg11", "vgg11-bn"))
    some = entries(OPEN, *known([plain], {0: 48.0, 1: 52.0}), *known([normed], {0: 58.0, 1: 57.0}))
    [section] = open_choices_table("vgg11-open", some).sections
    rows = {row[0]: row[1:] for row in section.rows}
    assert len(rows) == len(OPEN) == len(section.rows)
    assert rows["FedAvg, as in Table 1"] == ("50.00 ± 2.83", "–", "58.33", "-8.33", "2")
    name = "FedAvg, BatchNorm after every convolution"
    assert rows[name] == ("57.50 ± 0.71", "+10.00, +5.00", "58.33", "-0.83", "2")
    assert rows["FedNova, as in Table 1"] == ("–", "–", "49.66", "–", "0 of 2")


def test_a_change_is_judged_by_all_its_methods_and_only_when_they_are_there() -> None:
    normed = of(OPEN, model="vgg11-bn")
    assert "near with" not in found(entries(OPEN, *known(normed[:3], 60.0)))
    said = found(entries(OPEN, *known(normed, 60.0)))  # printed: 58.33, 49.66, 61.89, 63.79
    assert (
        "BatchNorm after every convolution: near with FedAvg (+1.7), SCAFFOLD (-1.9), FedEntOpt (-3.8); far with "
        "FedNova (+10.3)."
    ) in said
    assert "Nothing is said yet, for want of runs, of: as in Table 1, " in said
    single = [cell.with_seeds((0,)) for cell in OPEN]
    assert "near with" not in found(entries(single, *known(single, 60.0))), "one seed may be that seed's partition"


def test_the_page_shows_both_studies_once_something_is_known() -> None:
    cells = [*BF16, *OPEN]
    text = page(entries(cells, *known(of(BF16, model="vgg11"), 50.0)), [], "", {}, own=True)
    assert "## Arithmetic: bf16 beside TF32" in text
    assert "VGG-11, CIFAR-10, C=2" in text
    assert "VGG-11: bf16 minus TF32 is +0.00 [+0.00, +0.00] points over 18 pairs of runs." in text
    assert "FedEntOpt, as in Table 1 | 50.00 ± 0.00 |" in text


def test_a_study_of_which_only_the_papers_runs_are_known_is_folded() -> None:
    cells = [*(cell for cell in paper_cells() if cell.table == "table1"), *of(BF16, model="vgg11")]
    tf32 = known(of(cells, table="table1", model="vgg11", dataset="cifar10"), FLAT)
    assert "<summary>Arithmetic: bf16 beside TF32: 6 of 12 cells have results" in page(
        entries(cells, *tf32), [], "", {}
    )
    bf16 = known(of(BF16, model="vgg11", method="fedavg", precision="bf16"), FLAT)
    assert "## Arithmetic: bf16 beside TF32" in page(entries(cells, *tf32, *bf16), [], "", {})


@pytest.mark.parametrize(("study", "wanted"), [("bf16", 96), ("vgg11-open", 40)])
def test_known_results_of_table_1_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, study: str, wanted: int
) -> None:
    asked = ("reproduce", study, "--seeds", "0", "--device", "cuda", "--json", "--dry-run", "--out", str(tmp_path))
    shutil.copytree(ROOT / "results" / "paper", tmp_path / "known", ignore=shutil.ignore_patterns(f"{study}*"))
    known_too = ("--known", str(tmp_path / "known"))
    run = commander(monkeypatch, capsys)
    alone, sharing = (json.loads(run(*asked, *more).out) for more in ((), known_too))
    cells = BF16 if study == "bf16" else OPEN
    assert alone["runs"] == len(cells)
    assert sharing["runs"] == alone["runs"] - sum(c.config.digest() in TABLE1 for c in cells if c.config)
    assert len(distinct_runs(cells)) == wanted
    assert all(stack["seconds"] or stack["samples"] is None for stack in sharing["stacks"]), "every model has a speed"
