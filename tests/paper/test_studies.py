"""Studies beside the paper's tables: what bf16 costs, what is open for two networks, what pre-training is worth."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from command_line import commander
from fedentopt.paper.bf16_table import Pair, bf16_table, pairs, verdict
from fedentopt.paper.blocks import cells_from_file, paper_cells
from fedentopt.paper.cells import Cell, distinct_runs
from fedentopt.paper.comparison import Comparison, compare
from fedentopt.paper.exported import export, read_exported
from fedentopt.paper.measures import Measured, Results, settings_key
from fedentopt.paper.open_choices import AS_CHOSEN, change, found, open_choices_table
from fedentopt.paper.pretraining_table import found as found_of_pretraining
from fedentopt.paper.pretraining_table import pretraining_table
from fedentopt.paper.reproduction import Reproduction
from fedentopt.paper.results_page import page
from fedentopt.paper.tables import summary_csv, tables
from fedentopt.simulation.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent.parent
BF16 = [cell for cell in paper_cells() if cell.table == "bf16"]
OPEN = [cell for cell in paper_cells() if cell.table == "vgg11-open"]
OPEN_LENET = [cell for cell in paper_cells() if cell.table == "lenet5-open"]
MRI = [cell for cell in paper_cells() if cell.table == "mri-pretraining"]
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


def vgg_entries(tf32: dict[int, float], bf16: dict[int, float]) -> list[Comparison]:
    """The cells of VGG-11, all with these accuracies by seed."""
    cells = of(BF16, model="vgg11")
    low, high = ([c for c in cells if c.config and c.config.precision == p] for p in ("fp32", "bf16"))
    return entries(cells, *known(low, tf32), *known(high, bf16))


def vgg(tf32: dict[int, float], bf16: dict[int, float]) -> list[Pair]:
    """The six pairs of VGG-11."""
    return pairs(vgg_entries(tf32, bf16))


FLAT = {0: 50.0, 1: 60.0, 2: 70.0}


def test_bf16s_differences_by_hand() -> None:
    # -1, 0, +1 in each of six: mean 0, deviation sqrt(12 / 17), t(0.975, 17) = 2.1098: half an interval is 0.418.
    assert verdict(vgg(FLAT, {0: 49.0, 1: 60.0, 2: 71.0})) == (
        "VGG-11: bf16 minus TF32 is +0.00 [-0.42, +0.42] points over 18 pairs of runs. A cost of more than 1 point is "
        "ruled out, and no method under one partition is clearly lower; tables may use bf16."
    )
    pair = vgg(FLAT, {0: 49.0, 1: 60.0, 2: 71.0})[0]
    table = bf16_table("bf16", [pair.tf32, pair.bf16])
    # Deviation 1, t(0.975, 2) = 4.3027, over sqrt(3).
    assert table.sections[0].heading == "VGG-11, CIFAR-10, Dir(0.1)"
    assert table.sections[0].rows == (("FedAvg", "60.00 ± 10.00", "60.00 ± 11.00", "+0.00 [-2.48, +2.48]", "3"),)


def test_means_are_over_the_seeds_of_both() -> None:
    """Where bf16 lacks the best seed, it is not thereby the lower one."""
    pair = of(BF16, model="vgg11", method="fedavg", partition="dir:0.1")
    low, high = ([c for c in pair if c.config and c.config.precision == p] for p in ("fp32", "bf16"))
    for bf16, row in (
        ({0: 51.0, 1: 61.0}, ("55.00 ± 7.07", "56.00 ± 7.07", "**+1.00 [+1.00, +1.00]**", "2 of 3")),
        ({}, ("60.00 ± 10.00", "–", "–", "0 of 3")),
    ):
        some = [run for run in known(high, FLAT | bf16) if run.seed in bf16]
        assert bf16_table("bf16", entries(pair, *known(low, FLAT), *some)).sections[0].rows == (("FedAvg", *row),)


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


def test_a_method_that_is_lower_over_all_partitions_together_is_named() -> None:
    """Not enough to forbid bf16, but the table shows the row in bold: the verdict above it may not deny it."""
    uneven = {"dir:0.1": {0: 49.0, 1: 59.4, 2: 70.0}, "classes:2": {0: 49.9, 1: 59.2, 2: 69.6}}
    runs: list[Measured] = []
    for cell in of(BF16, model="vgg11"):
        assert cell.config is not None
        lower = uneven[cell.partition or ""] if cell.method == "fedentopt" else {0: 49.0, 1: 60.0, 2: 71.0}
        runs += known([cell], lower if cell.config.precision == "bf16" else FLAT)
    table = bf16_table("bf16", entries(of(BF16, model="vgg11"), *runs))
    # -1, -0.6, 0, -0.1, -0.8 and -0.4: mean -0.483, deviation 0.3920, t(0.975, 5) = 2.5706, over sqrt(6).
    assert ("FedEntOpt", "–", "–", "**-0.48 [-0.89, -0.07]**", "6 pairs") in table.sections[-1].rows
    assert table.note.endswith(
        "no method under one partition is clearly lower (over all of them together FedEntOpt is, by 0.48); tables may "
        "use bf16."
    )


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
        "points over 17 pairs of runs. No evidence are pairs whose run in TF32 ends at chance: SCAFFOLD under Dir(0.1) "
        "(1). A cost of more than 1 point is ruled out"
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
        "outside the interval. Seeds whose run in TF32 ends at chance, at most 1 point above it, have no accuracy to "
        "lose and are not compared. VGG-11: bf16 minus TF32 is +0.00 [-0.47, +0.47] points over 15 pairs of runs. No "
        "evidence are pairs whose run in TF32 ends at chance: SCAFFOLD under Dir(0.1) (3). A cost of more than 1 point "
        "is ruled out, and no method under one partition is clearly lower; tables may use bf16."
    )
    assert rows["VGG-11, CIFAR-10, Dir(0.1), SCAFFOLD"][1:] == (
        "10.00 ± 0.00", "10.40 ± 0.00", "–", "0 of 3 (3 at chance in TF32)",
    )  # fmt: skip
    assert rows["VGG-11, CIFAR-10, Dir(0.1), FedAvg"][-1] == "3"


@pytest.mark.parametrize("everywhere", [False, True])
def test_what_is_at_chance_in_tf32_alone_hides_no_cost_elsewhere(everywhere: bool) -> None:
    """All other pairs lose three points, unevenly; forty points where TF32 never learned would have outweighed that."""
    runs = []
    for cell in of(BF16, model="vgg11"):
        assert cell.config is not None
        low, lost = (
            cell.config.precision == "bf16",
            cell.method == "scaffold" and (everywhere or cell.partition == "dir:0.1"),
        )
        lower = {0: 43.0, 1: 57.0, 2: 71.0}
        runs += known([cell], (50.0 if lost else lower) if low else (10.0 if lost else FLAT))
    table = bf16_table("bf16", entries(of(BF16, model="vgg11"), *runs))
    assert "No evidence are pairs whose run in TF32 ends at chance: SCAFFOLD under Dir(0.1) (3)" in table.note
    assert "may use bf16" not in table.note
    assert ("bf16 minus TF32 is -3.00 [" in table.note) == (not everywhere)
    row = next(row for section in table.sections for row in section.rows if row[0] == "SCAFFOLD")
    assert row[1:] == ("10.00 ± 0.00", "50.00 ± 0.00", "–", "0 of 3 (3 at chance in TF32)")


def test_a_run_that_diverges_in_tf32_alone_is_not_compared() -> None:
    assert "over 17 pairs" in with_diverged(tf32=True, bf16=False)


def test_what_is_at_chance_in_bf16_alone_is_a_cost() -> None:
    said, rows = with_stuck(("scaffold", "dir:0.1"), tf32=30.0, bf16=10.0)
    assert "No evidence" not in said
    assert "at chance" not in said
    assert said.endswith("tables stay with TF32.")
    assert rows["VGG-11, CIFAR-10, Dir(0.1), SCAFFOLD"][-1] == "3"
    near, _ = with_stuck(("scaffold", "dir:0.1"), tf32=11.1, bf16=10.0)  # beyond the margin above chance
    assert "No evidence" not in near


def test_a_method_that_swings_does_not_hide_what_others_lose() -> None:
    """FedAvg loses 0.3 to 0.5 in every seed of both partitions, SCAFFOLD gains 2 to 4."""
    cells, runs = of(BF16, model="vgg11"), []
    for cell in cells:
        assert cell.config is not None
        gains = (
            {"fedavg": -0.3, "scaffold": 2.0}.get(cell.method or "", 0.0) if cell.config.precision == "bf16" else 0.0
        )
        spread = {"fedavg": -0.1, "scaffold": 1.0}.get(cell.method or "", 0.0) if gains else 0.0
        runs += known([cell], {seed: 50.0 + gains + spread * seed for seed in (0, 1, 2)})
    table = bf16_table("bf16", entries(cells, *runs))
    assert table.sections[-1].heading == "VGG-11, all partitions together"
    rows = {row[0]: row[3:] for row in table.sections[-1].rows}
    # Twice -0.3, -0.4, -0.5: deviation sqrt(0.04 / 5), t(0.975, 5) = 2.5706, over sqrt(6).
    assert rows["FedAvg"] == ("**-0.40 [-0.49, -0.31]**", "6 pairs")
    assert rows["SCAFFOLD"] == ("**+3.00 [+2.06, +3.94]**", "6 pairs")
    assert "together" not in bf16_table("bf16", entries(cells, *runs[1:])).sections[-1].heading


def test_chance_is_that_of_the_data_set() -> None:
    """Of any that is known by name, and of the labels that are asked for."""
    plain = of(BF16, model="vgg11", method="fedavg", partition="dir:0.1")
    for dataset, fine, chance in (("digits", False, 10.0), ("brain-tumor-mri", False, 25.0), ("cifar100", True, 1.0)):
        cells = [
            dataclasses.replace(
                cell, dataset=dataset, config=cell.config and cell.config.replace(dataset=dataset, fine_labels=fine)
            )
            for cell in plain
        ]
        for above, lost in ((0.9, {0, 1, 2}), (1.1, set())):
            [pair] = pairs(entries(cells, *known(cells, chance + above)))
            assert pair.at_chance == lost


def test_a_method_that_never_learns_anywhere_is_none_that_a_verdict_stands_on() -> None:
    said, _ = with_stuck(("scaffold", "dir:0.1"), ("scaffold", "classes:2"))
    assert said.endswith(
        "VGG-11: a verdict on bf16 takes 3 methods under 2 partitions with 3 seeds each, and fewer end above chance, "
        "so nothing is said. No evidence are pairs whose run in TF32 ends at chance: SCAFFOLD under Dir(0.1) (3) and "
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
@pytest.mark.parametrize(
    ("cells", "model", "partitions"),
    [(OPEN, "vgg11", {"dir:0.1"}), (OPEN_LENET, "lenet5", {"dir:0.1", "classes:2"})], ids=["vgg11", "lenet5"],
)  # fmt: skip
def test_every_change_is_one_change(cells: list[Cell], model: str, partitions: set[str]) -> None:
    base = {(cell.partition, cell.method): cell for cell in cells if not cell.swept and cell.model == model}
    methods = {"fedavg", "fednova", "scaffold", "fedentopt"}
    assert base.keys() == {(partition, method) for partition in partitions for method in methods}
    for cell in cells:
        assert (cell.seeds, cell.dataset) == ((0, 1), "cifar10")
        mine, plain = cell.config, base[cell.partition, cell.method].config
        assert mine is not None
        assert plain is not None
        assert plain.digest() in TABLE1
        ours, theirs = mine.to_dict(), plain.to_dict()
        differing = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
        assert len(differing) == (cell is not base[cell.partition, cell.method])
    assert not any("_" in change(entry) for entry in entries(cells)), "every change has words"


def test_what_is_changed() -> None:
    words = Counter(change(entry) for entry in entries(OPEN))
    assert len(words) == 8
    assert words[AS_CHOSEN] == words["BatchNorm after every convolution"] == 4
    assert Counter(change(entry) for entry in entries(OPEN_LENET)) == {
        AS_CHOSEN: 8,
        "learning rate × 0.998 per round": 8,
        "control variates start as a random network": 2,
        "server's control variate over the cohort alone": 2,
        "correction inside the gradient": 2,
        "normalised by numbers of steps": 1,
    }


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


def test_changes_of_cells_that_the_paper_does_not_have_are_not_judged() -> None:
    other = [dataclasses.replace(cell, dataset="digits") for cell in OPEN]
    assert found(entries(other, *known(other, 60.0))) == ""


def test_a_change_is_judged_by_all_its_methods_and_only_when_they_are_there() -> None:
    normed = of(OPEN, model="vgg11-bn")
    assert "near with" not in found(entries(OPEN, *known(normed[:3], 60.0)))
    said = found(entries(OPEN, *known(normed, 60.0)))  # printed: 58.33, 49.66, 61.89, 63.79
    assert (
        "BatchNorm after every convolution: near with FedAvg (+1.7), SCAFFOLD (-1.9), FedEntOpt (-3.8); far with "
        "FedNova (+10.3)."
    ) in said
    assert "Nothing is said yet, for want of runs, of: as in Table 1, " in said
    lost = [dataclasses.replace(run, accuracy=10.0, diverged_round=7) for run in known([normed[1]], 60.0)[:1]]
    assert "far with FedNova (-14.7, 1 of 2 diverged)." in found(entries(OPEN, *known(normed, 60.0), *lost))
    single = [cell.with_seeds((0,)) for cell in OPEN]
    assert "near with" not in found(entries(single, *known(single, 60.0))), "one seed may be that seed's partition"


def test_a_change_under_two_partitions_is_judged_under_each() -> None:
    """SCAFFOLD, printed 14.12 and 32.21: 40 and 44 as chosen, 12 and 20 from a random network under Dir(0.1)."""
    name = "control variates start as a random network"
    own = of(OPEN_LENET, method="scaffold", partition="dir:0.1", swept=())
    [uneven, even] = (
        [cell for cell in of(OPEN_LENET, partition=partition) if ("scaffold_start", "random") in cell.swept]
        for partition in ("dir:0.1", "classes:2")
    )
    some = [*known(own, {0: 40.0, 1: 44.0}), *known(uneven, {0: 12.0, 1: 20.0})]
    assert found(entries(OPEN_LENET, *some)).startswith("Nothing is said yet"), "of one partition alone"
    with_both = entries(OPEN_LENET, *some, *known(even, 50.0))
    sections = {section.heading: section.rows for section in open_choices_table("lenet5-open", with_both).sections}
    assert list(sections) == ["LeNet-5, CIFAR-10, Dir(0.1)", "LeNet-5, CIFAR-10, C=2"]
    rows = {row[0]: row[1:] for row in sections["LeNet-5, CIFAR-10, Dir(0.1)"]}
    assert rows[f"SCAFFOLD, {name}"] == ("16.00 ± 5.66", "-28.00, -24.00", "14.12", "+1.88", "2")
    rows = {row[0]: row[1:] for row in sections["LeNet-5, CIFAR-10, C=2"]}
    assert rows[f"SCAFFOLD, {name}"] == ("50.00 ± 0.00", "–", "32.21", "+17.79", "2")
    assert (
        f"{name[0].upper() + name[1:]}: near with SCAFFOLD under Dir(0.1) (+1.9); far with SCAFFOLD under C=2 (+17.8)."
    ) in found(with_both)


# --- pre-training
def mri(random: dict[int, float], pretrained: dict[int, float], b0: dict[int, float]) -> list[Comparison]:
    """All cells of the study with these accuracies by seed, whatever the method."""
    runs = []
    for cell in MRI:
        assert cell.config is not None
        values = b0 if cell.model == "efficientnet-b0" else pretrained if cell.config.weights else random
        runs += [run for run in known([cell], dict.fromkeys(cell.seeds, 0.0) | values) if run.seed in values]
    return entries(MRI, *runs)


def test_the_table_of_starts_by_hand() -> None:
    """FedAvg, printed 60.02 with B0: 40, 41 and 42 from random weights, 19, 20 and 21 points more from ImageNet's."""
    made = mri({0: 40.0, 1: 41.0, 2: 42.0}, {0: 59.0, 1: 61.0, 2: 63.0}, {0: 40.0, 1: 42.0, 2: 44.0})
    table = pretraining_table("mri-pretraining", made)
    rows = {f"{section.heading}: {row[0]}": row[1:] for section in table.sections for row in section.rows}
    assert len(rows) == len(MRI)
    lite, b0 = "EfficientNet-Lite0, Brain-Tumor MRI, Dir(0.1)", "EfficientNet-B0, Brain-Tumor MRI, Dir(0.1)"
    assert rows[f"{lite}: FedAvg, random weights"] == ("41.00 ± 1.00", "–", "–", "–", "–", "3")
    # Deviation 1, t(0.975, 2) = 4.3027, over sqrt(3).
    assert rows[f"{lite}: FedAvg, ImageNet's weights"] == (
        "61.00 ± 2.00", "**+20.00 [+17.52, +22.48]**", "–", "–", "–", "3",
    )  # fmt: skip
    assert rows[f"{b0}: FedAvg, random weights"] == ("42.00 ± 2.00", "–", "–", "60.02", "-18.02", "3")
    assert rows[f"{b0}: FedEntOpt, random weights"][3:] == ("69.65", "-27.65", "3")
    assert table.note.endswith(table.found)
    assert table.found == (
        "FedAvg: ImageNet's weights change EfficientNet-Lite0 by +20.00 [+17.52, +22.48] points over 3 seeds; "
        "EfficientNet-B0 from random weights lacks 18.0 points to the printed figure: pre-training may be worth that. "
        "FedEntOpt: ImageNet's weights change EfficientNet-Lite0 by +20.00 [+17.52, +22.48] points over 3 seeds; "
        "EfficientNet-B0 from random weights lacks 27.7 points to the printed figure: pre-training changes less."
    )


@pytest.mark.parametrize(
    ("pretrained", "b0", "said"),
    [
        ({0: 69.0, 1: 71.0, 2: 70.0}, 42.0, "lacks 18.0 points to the printed figure: pre-training changes as much or"),
        ({0: 30.0, 1: 31.0, 2: 30.0}, 42.0, "lacks 18.0 points to the printed figure: pre-training does not help."),
        ({0: 25.0, 1: 90.0, 2: 60.0}, 42.0, "pre-training may be worth that, but so few seeds do not tell."),
        ({0: 69.0, 1: 71.0, 2: 70.0}, 58.0, "is -2.0 points from the printed figure, so there is nothing to explain."),
    ],
)
def test_what_pre_training_is_worth_beside_what_is_missing(pretrained: dict[int, float], b0: float, said: str) -> None:
    made = mri({0: 40.0, 1: 40.0, 2: 40.0}, pretrained, dict.fromkeys(range(3), b0))
    assert said in found_of_pretraining([entry for entry in made if entry.cell.method == "fedavg"])


def test_nothing_is_said_of_pre_training_by_a_single_seed_or_a_trial() -> None:
    waits = "for want of two seeds of both starts at full length, of: FedAvg with EfficientNet-Lite0, FedEntOpt with"
    table = pretraining_table("mri-pretraining", mri({0: 40.0}, {0: 60.0, 1: 61.0}, {0: 42.0}))
    assert waits in table.found
    assert "change" not in table.found
    rows = {row[0]: row for row in table.sections[0].rows}
    assert rows["FedAvg, ImageNet's weights"][2] == "+20.00"  # a single difference has no interval
    assert waits in found_of_pretraining(entries(MRI))
    cut = [cell.cut(3) for cell in MRI]
    assert waits in found_of_pretraining(entries(cut, *known(cut, {0: 40.0, 1: 41.0, 2: 42.0})))
    alone = found_of_pretraining(mri({0: 40.0, 1: 41.0}, {0: 60.0, 1: 61.0}, {}))
    assert "over 2 seeds; the network that the paper prints has no results yet." in alone
    lite = [entry for entry in mri({0: 40.0, 1: 41.0}, {0: 60.0, 1: 61.0}, {}) if entry.cell.model != "efficientnet-b0"]
    assert found_of_pretraining(lite).count("points over 2 seeds.") == 2


def test_diverged_starts_are_named() -> None:
    made = mri({0: 40.0, 1: 41.0, 2: 42.0}, {0: 59.0, 1: 61.0, 2: 63.0}, {0: 42.0})
    bad = [
        dataclasses.replace(entry, runs=tuple(dataclasses.replace(run, diverged_round=4) for run in entry.runs[:1]))
        if entry.cell.config and entry.cell.config.weights is None else entry
        for entry in made
    ]  # fmt: skip
    assert "over 3 seeds (1 from random weights diverged); EfficientNet-B0" in found_of_pretraining(bad)


def test_a_machine_is_told_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("reproduce", "bf16", "--results", str(ROOT / "results" / "paper"), "--out", str(tmp_path), "--json")
    said = json.loads(commander(monkeypatch, capsys)(*words, "--no-figures").out)
    assert said["found"].keys() == {"bf16"}
    assert said["found"]["bf16"] in (tmp_path / "tables" / "bf16.md").read_text()
    assert said["found"]["bf16"].startswith("VGG-11: ")


def test_a_terminal_says_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedentopt.cli.reproduce_show import print_tables

    monkeypatch.setenv("COLUMNS", "100")
    print_tables(vgg_entries(FLAT, {0: 49.0, 1: 60.0, 2: 71.0}), [])
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "no method under one partition is clearly lower; tables may use bf16." in printed
    print_tables(entries(BF16), [])
    assert "nothing is said" not in capsys.readouterr().out, "of what no figure is shown"


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


@pytest.mark.parametrize(("study", "wanted"), [("bf16", 96), ("vgg11-open", 40), ("lenet5-open", 46)])
def test_known_results_of_table_1_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, study: str, wanted: int
) -> None:
    asked = ("reproduce", study, "--seeds", "0", "--device", "cuda", "--json", "--dry-run", "--out", str(tmp_path))
    shutil.copytree(ROOT / "results" / "paper", tmp_path / "known", ignore=shutil.ignore_patterns(f"{study}*"))
    known_too = ("--known", str(tmp_path / "known"))
    run = commander(monkeypatch, capsys)
    alone, sharing = (json.loads(run(*asked, *more).out) for more in ((), known_too))
    cells = {"bf16": BF16, "vgg11-open": OPEN, "lenet5-open": OPEN_LENET}[study]
    assert alone["runs"] == len(cells)
    assert sharing["runs"] == alone["runs"] - sum(c.config.digest() in TABLE1 for c in cells if c.config)
    assert len(distinct_runs(cells)) == wanted
    assert all(stack["seconds"] or stack["samples"] is None for stack in sharing["stacks"]), "every model has a speed"


# --- runs in another precision that count
VGG = next(
    cell for cell in paper_cells()
    if (cell.table, cell.model, cell.dataset, cell.partition, cell.method)
    == ("table2", "vgg11", "cifar10", "dir:0.1", "fedprox+fedentopt")
)  # fmt: skip


def measured(config: RunConfig, seed: int, accuracy: float) -> Measured:
    return Measured(settings=settings_key(config), seed=seed, rounds=500, accuracy=accuracy)


def test_bf16_counts_where_it_was_shown_to_cost_nothing() -> None:
    """Every model whose cells take it has the committed study's word for it; that study itself does not take it."""
    cells = paper_cells()
    taking = {cell.model for cell in cells if cell.stand_ins}
    assert taking == {"vgg11"}
    assert all(
        cell.stand_ins == ("bf16",) for cell in cells if cell.model == "vgg11" and cell.config and cell not in BF16
    )
    assert not any(cell.stand_ins for cell in BF16)
    if not (ROOT / "results").is_dir():
        pytest.skip("results/ is not part of this copy")
    made = pairs(compare(BF16, read_exported(ROOT / "results" / "paper"), lambda name: True))
    for model in taking:
        assert verdict([pair for pair in made if pair.bf16.cell.model == model]).endswith("tables may use bf16.")


def test_a_run_in_bf16_stands_in_for_one_that_is_not_there() -> None:
    assert VGG.config is not None
    assert VGG.baseline is not None
    other, base = (dataclasses.replace(config, precision="bf16") for config in (VGG.config, VGG.baseline))
    runs = [
        measured(VGG.config, 0, 60.0), measured(other, 0, 10.0), measured(VGG.baseline, 0, 50.0),
        measured(other, 1, 64.0), measured(VGG.baseline, 1, 61.0), measured(base, 1, 20.0),
        measured(other, 2, 66.0), measured(base, 2, 61.0),
    ]  # fmt: skip
    [entry] = entries([VGG], *runs)
    assert entry.values == {0: 10.0, 1: 3.0, 2: 5.0}  # its own first, for the run and for what it is compared with
    assert entry.stand_ins == {"bf16": [1, 2]}
    assert entry.state == "done"
    assert entry.listed()["seeds_bf16"] == [1, 2]
    [table] = tables([entry])
    assert table.sections[0].rows[0][-1] == "3 (2 in bf16)"
    assert "in bf16 had" in table.note
    header, row = csv.reader(summary_csv([entry]).splitlines())
    assert dict(zip(header, row, strict=True))["seeds_bf16"] == "1 2"
    [entry] = entries([VGG], *runs[:1], runs[2])
    assert "seeds_bf16" not in entry.listed()
    assert "bf16" not in tables([entry])[0].note
    assert "bf16" not in summary_csv([entry])
    # Of a change, what it is compared with counts as well.
    [entry] = entries([VGG], measured(VGG.config, 1, 60.0), measured(base, 1, 50.0))
    assert (entry.values, entry.stand_ins) == ({1: 10.0}, {"bf16": [1]})


def test_figures_by_participation_say_what_stands_in() -> None:
    figure2 = [cell for cell in paper_cells() if cell.table == "figure2"]
    cells = of(figure2, model="vgg11", dataset="cifar10", partition="dir:0.1", method="kl")
    assert len(cells) == 6
    runs = [measured(dataclasses.replace(cell.config, precision="bf16"), 0, 40.0) for cell in cells[:1] if cell.config]
    [table] = tables(entries(cells, *runs))
    assert table.sections[0].rows[0][1:3] == ("40.00 (1 in bf16)", "–")
    assert "in bf16 had" in table.note


def test_what_stands_in_is_exported_and_read_again(tmp_path: Path) -> None:
    assert VGG.config is not None
    assert VGG.baseline is not None
    other = dataclasses.replace(VGG.config, precision="bf16")
    runs = [measured(other, 1, 64.0), measured(VGG.baseline, 1, 61.0)]
    curve = [(25, 30.0, 2.5), (500, 64.0, 2.5)]
    results = Results(None, {(run.settings, run.seed): run for run in runs}, {(settings_key(other), 1): curve})
    export(tmp_path, [VGG], results)
    again = read_exported(tmp_path)
    assert again.value(VGG, 1) == 3.0
    assert again.curve_of(VGG, VGG.config, 1) == curve
    assert again.get(VGG.config, 1) is None
    export(tmp_path, [VGG], Results(None, {(run.settings, run.seed): run for run in [measured(VGG.config, 1, 65.0)]}))
    assert read_exported(tmp_path).value(VGG, 1) == 3.0  # half of a change is none
    own = [measured(VGG.config, 1, 65.0), runs[1]]
    export(tmp_path, [VGG], Results(None, {(run.settings, run.seed): run for run in own}))
    assert read_exported(tmp_path).value(VGG, 1) == 4.0
    assert read_exported(tmp_path).get(other, 1) is not None
    kept = (tmp_path / "table2.csv").read_text()
    export(tmp_path, [VGG], results)  # nothing that only stands in comes before it
    assert (tmp_path / "table2.csv").read_text() == kept


def test_what_is_to_do_in_bf16() -> None:
    assert VGG.config is not None
    assert VGG.baseline is not None
    there = measured(VGG.baseline, 0, 50.0)
    results = Results(None, {(there.settings, 0): there})
    todo = Reproduction([VGG], [VGG], results, precision="bf16").unfinished()
    assert {run.precision for run in todo} == {"bf16"}
    assert [(run.selector, run.seed) for run in todo] == [
        ("fedentopt", 0), ("fedentopt", 1), ("random", 1), ("fedentopt", 2), ("random", 2),
    ]  # fmt: skip
    assert {run.precision for run in Reproduction([VGG], [VGG], results).unfinished()} == {"fp32"}
    for seed in VGG.seeds:
        for config in (VGG.config, VGG.baseline):
            run = measured(dataclasses.replace(config, precision="bf16"), seed, 50.0)
            results = Results(None, {**results._exported, (run.settings, seed): run})
    assert Reproduction([VGG], [VGG], results).unfinished() == []
    asked = Reproduction([VGG], [VGG], results, precision="fp32").unfinished()  # by name, so nothing stands in
    assert len(asked) == 5
    assert {run.precision for run in asked} == {"fp32"}


def test_precisions_that_count_for_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = commander(monkeypatch, capsys)
    done = run("reproduce", "table1", "--precision", "bf16", "--dry-run")
    assert done.code == 2
    assert "runs in 'bf16' do not count for lenet5 in table1; accepted there: fp32" in done.err
    done = run("reproduce", "table3", "--model", "vgg11", "--precision", "bf16", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["runs"] == 24 * 3
    cells = tmp_path / "cells.toml"
    text = (
        '[[cells]]\ntable = "t"\nmetric = "accuracy"\nmodel = "lenet5"\ndataset = "digits"\npartition = "classes:2"\n'
    )
    text += 'method = "fedavg"\nclients = 10\ncohort = 2\nrounds = 1\nseeds = 1\n'
    for given, words in (
        ('stand_ins = ["fp16"]', "stand_ins: precision"),
        ("stand_ins = [3]", "stand_ins: 3 cannot be used"),
    ):
        cells.write_text(f"{text}{given}\n")
        done = run("reproduce", "t", "--cells", str(cells), "--dry-run")
        assert done.code == 2
        assert words in done.err
    done = run("reproduce", "table5", "--precision", "bf16", "--dry-run")
    assert done.code == 2
    assert "these cells need none" in done.err
    vgg = text.replace("lenet5", "vgg11")
    for file, wanted in (
        (f'{text}stand_ins = ["bf16", "fp32"]\n', ("bf16",)), (text, ()), (vgg, ("bf16",)),
        (f"{vgg}stand_ins = []\n", ()),
        (f'[settings]\nprecision = "fp32-exact"\n{vgg}', ()), (f'{vgg}precision = "fp32-exact"\n', ()),
        (f'{vgg}precision = "fp32-exact"\nstand_ins = ["fp32"]\n', ("fp32",)),
    ):  # fmt: skip
        cells.write_text(file)
        [cell] = cells_from_file(cells)
        assert cell.stand_ins == wanted, file
