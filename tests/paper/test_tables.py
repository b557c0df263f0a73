"""Ours beside the paper's: states, tables, exported results, the committed ones byte for byte."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from fedentopt.errors import InputError
from fedentopt.paper import names, provenance
from fedentopt.paper.bf16_table import BF16
from fedentopt.paper.blocks import audit_cells, cells_from_file, paper_cells, selector_cells
from fedentopt.paper.cells import Cell
from fedentopt.paper.comparison import Comparison, compare
from fedentopt.paper.exported import export, read_exported
from fedentopt.paper.figures import write_figures
from fedentopt.paper.findings import findings
from fedentopt.paper.formats import Section, Table, latex, markdown
from fedentopt.paper.measures import Curve, Measured, Results, settings_key
from fedentopt.paper.open_choices import OPEN_CHOICES
from fedentopt.paper.pretraining_table import PRETRAINING
from fedentopt.paper.reproduction import Reproduction
from fedentopt.paper.results_page import commands_behind, write_results_page
from fedentopt.paper.selector_table import bench_settings
from fedentopt.paper.selector_tuned import with_tuned
from fedentopt.paper.sizes import size
from fedentopt.paper.tables import summary_csv, tables, write_paper_figures, write_tables
from fedentopt.results.reading import RUN, SUMMARY
from fedentopt.results.summary import summarise
from fedentopt.simulation.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent.parent
CELLS = paper_cells()
LENET = [cell for cell in CELLS if cell.model == "lenet5" and cell.dataset == "cifar10" and cell.partition == "dir:0.1"]


def of(table: str, **fields: object) -> list[Cell]:
    return [c for c in LENET if c.table == table and all(getattr(c, name) == value for name, value in fields.items())]


def run(config: RunConfig | None, seed: int, accuracy: float, **more: object) -> tuple[tuple[str, int], Measured]:
    """A finished run with this accuracy."""
    assert config is not None
    key = settings_key(config)
    given: dict[str, object] = {"h_norm": 0.9, "never_selected": 0, "mean_entropy": 3.0, "min_entropy": 2.5, **more}
    return (key, seed), Measured(settings=key, seed=seed, rounds=config.rounds, accuracy=accuracy, **given)  # type: ignore[arg-type]


def known(*runs: tuple[tuple[str, int], Measured], curves: dict[tuple[str, int], Curve] | None = None) -> Results:
    return Results(None, dict(runs), curves)


def entry(results: Results, cell: Cell) -> Comparison:
    return compare([cell], results, lambda name: True)[0]


FEDAVG, FEDENTOPT = of("table1", method="fedavg")[0], of("table1", method="fedentopt")[0]
PROX, CHANGE = of("table1", method="fedprox")[0], of("table2", method="fedprox+fedentopt")[0]
FIVE = known(
    *(run(FEDAVG.config, seed, value) for seed, value in enumerate((48.0, 50.0, 46.0, 49.0, 47.0))),
    *(run(FEDENTOPT.config, seed, value) for seed, value in enumerate((54.0, 55.0, 53.0, 54.0, 54.0))),
)


def test_a_cell_is_done_when_all_wanted_seeds_are_there_at_full_length() -> None:
    assert entry(FIVE, FEDAVG).state == "done"
    assert entry(FIVE, FEDAVG.with_seeds((0, 7))).state == "partly"
    assert entry(FIVE, FEDAVG.with_seeds((0, 7))).listed()["seeds"] == [0]
    assert entry(FIVE, PROX).state == "not-run"
    assert compare([PROX], FIVE, lambda name: False)[0].state == "missing-data"
    assert compare([FEDAVG], FIVE, lambda name: False)[0].state == "done"  # what is known stays known


def test_a_run_cut_short_never_makes_a_cell_done() -> None:
    short = FEDAVG.cut(20)
    results = known(*(run(short.config, seed, 40.0) for seed in range(5)))
    assert entry(results, FEDAVG).state == "not-run"  # the short runs are others
    assert entry(results, short).state == "partly"
    assert entry(results, short).ours == 40.0
    assert "5, cut to 20 rounds" in markdown(tables([entry(results, short)])[0])


def test_what_the_list_says_of_a_cell() -> None:
    assert entry(FIVE, FEDENTOPT).listed() == {
        "table": "table1", "model": "lenet5", "dataset": "cifar10", "partition": "dir:0.1", "method": "fedentopt",
        "availability": None, "participation": 10, "buffer": 50, "metric": "accuracy", "paper": 52.80, "ours": 54.0,
        "std": pytest.approx(0.7071, abs=1e-4), "seeds": [0, 1, 2, 3, 4], "state": "done",
    }  # fmt: skip
    listed = entry(FIVE, next(c for c in CELLS if c.table == "grid-mu")).listed()
    assert listed["settings"] == {"mu": 0.0001}
    size_of_lenet = entry(FIVE, next(c for c in CELLS if c.table == "table5")).listed()
    assert (size_of_lenet["ours"], size_of_lenet["state"]) == (0.248024, "done")
    assert [size_of_lenet[name] for name in ("partition", "method", "participation", "buffer", "std")] == [None] * 5


def test_against_fedavg_is_paired_by_seed() -> None:
    gap = entry(FIVE, FEDENTOPT).against
    assert gap is not None
    # Differences 6, 5, 7, 5, 7: mean 6, deviation 1, so 6 ± 2.7764 / √5.
    assert (gap.mean, gap.seeds, gap.clear) == (6.0, 5, True)
    assert gap.low == pytest.approx(6 - 2.776445 / 5**0.5, abs=1e-6)
    assert entry(FIVE, FEDAVG).against is None
    few = known(run(FEDAVG.config, 0, 40.0), run(FEDENTOPT.config, 0, 50.0), run(FEDENTOPT.config, 1, 51.0))
    one = entry(few, FEDENTOPT)
    assert (one.against, one.lead) == (None, 10.0)  # one shared seed is no interval
    assert (names.against(one), names.against(entry(few, FEDAVG))) == ("+10.00", "–")
    (row,) = csv.DictReader(io.StringIO(summary_csv([one])))
    assert [row[name] for name in ("against_fedavg", "low", "high", "shared_seeds")] == ["10.000000", "", "", "1"]


SIZES = """
[[cells]]
table = "TABLE"
metric = "accuracy"
model = "lenet5"
dataset = "pathmnist"
partition = "classes:2"
participation = 10
seeds = 2
image_size = [28, 224]
method = ["METHODS"]
"""


def cells_of_sizes(tmp_path: Path, table: str, *methods: str) -> list[Cell]:
    file = tmp_path / "sizes.toml"
    file.write_text(SIZES.replace("TABLE", table).replace("METHODS", '", "'.join(methods)))
    return cells_from_file(file)


def test_images_of_two_sizes_are_two_data_sets(tmp_path: Path) -> None:
    cells = cells_of_sizes(tmp_path, "mine", "fedavg", "fedentopt")
    results = known(*(run(c.config, seed, 40.0 + n) for n, c in enumerate(cells) for seed in (0, 1)))
    (table,) = tables(compare(cells, results, lambda name: True))
    assert {section.heading: [row[0] for row in section.rows] for section in table.sections} == {
        "LeNet-5, PathMNIST (28 px), C=2": ["FedAvg", "FedEntOpt"],
        "LeNet-5, PathMNIST, C=2": ["FedAvg", "FedEntOpt"],  # its usual size needs no word
    }
    svg = next(
        path
        for path in write_figures(tmp_path, compare(cells_of_figure(cells), results, lambda name: True), results)
        if path.suffix == ".svg"
    )
    shown = "".join(ElementTree.parse(svg).getroot().itertext())
    assert "LeNet-5, PathMNIST (28 px), C=2" in shown
    assert "LeNet-5, PathMNIST, C=2" in shown


def cells_of_figure(cells: list[Cell]) -> list[Cell]:
    """The same cells as one figure's, at two shares of the clients."""
    return [dataclasses.replace(cell, table="figure2", participation=share) for cell in cells for share in (5, 10)]


def test_selectors_on_images_of_two_sizes_are_compared_within_each(tmp_path: Path) -> None:
    cells = cells_of_sizes(tmp_path, "selectors", "random", "fedentopt")
    results = known(*(run(c.config, seed, 40.0 + n) for n, c in enumerate(cells) for seed in (0, 1)))
    found = bench_settings(compare(cells, results, lambda name: True))
    by_size = {setting.heading: [e.ours for e in setting.entries] for setting in found}
    assert by_size == {"LeNet-5, PathMNIST (28 px), C=2": [40.0, 42.0], "LeNet-5, PathMNIST, C=2": [41.0, 43.0]}


@pytest.mark.parametrize("beside", ["another seed", "what it is compared with"])
def test_results_of_different_data_of_one_name_are_not_averaged(tmp_path: Path, beside: str) -> None:
    cell = cells_of_sizes(tmp_path, "mine", "fedentopt")[0]
    one, other = "1" * 32, "2" * 32
    if beside == "another seed":
        runs = [run(cell.config, 0, 40.0, data=one), run(cell.config, 1, 50.0, data=other)]
    else:
        runs = [run(cell.config, 0, 40.0, data=one), run(cell.reference, 0, 50.0, data=other)]
    with pytest.raises(
        InputError, match=r"^dataset: fedentopt on pathmnist stands on results of different data .*11111111 .*22222222"
    ):
        entry(known(*runs), cell)
    runs = [(key, dataclasses.replace(measured, data=one)) for key, measured in runs]
    assert entry(known(*runs), cell).ours is not None


def test_the_page_shows_a_printed_figure_for_its_own_images_alone(tmp_path: Path) -> None:
    rules = json.loads(write_paper_figures(tmp_path, CELLS).read_text())
    assert {(rule["dataset"], rule["fine_labels"], rule["image_size"]) for rule in rules} == {
        (cell.dataset, False, None) for cell in CELLS if cell.metric == "accuracy" and cell.paper is not None
    }


def test_a_change_is_the_difference_to_the_same_baseline_seed_by_seed() -> None:
    results = known(
        *(run(PROX.config, seed, value) for seed, value in enumerate((40.0, 42.0, 44.0))),
        *(run(CHANGE.config, seed, value) for seed, value in enumerate((47.0, 48.0, 52.0))),
        *(run(FEDAVG.config, seed, 41.0) for seed in range(3)),
    )
    found = entry(results, CHANGE)
    assert found.values == {0: 7.0, 1: 6.0, 2: 8.0}
    assert (found.ours, found.std, found.state) == (7.0, 1.0, "partly")
    assert found.difference == pytest.approx(7.0 - 7.67)
    assert found.interval is not None
    assert found.interval.low == pytest.approx(7 - 4.302653 / 3**0.5, abs=1e-5)
    assert found.against is not None
    assert found.against.mean == pytest.approx((47 + 48 + 52) / 3 - 41)
    alone = known(*(run(CHANGE.config, seed, 50.0) for seed in range(5)))
    assert entry(alone, CHANGE).state == "not-run"  # without the baseline there is no change


def test_a_table_in_markdown_and_latex() -> None:
    diverged = [run(PROX.config, seed, 10.0, diverged_round=44 if seed < 2 else None) for seed in range(3)]
    results = known(*diverged, *((key, value) for key, value in FIVE._exported.items()))
    entries = compare(of("table1"), results, lambda name: True)
    table, rounds = tables(entries)
    text = markdown(table)
    assert "## LeNet-5, CIFAR-10, Dir(0.1)" in text
    assert "| FedAvg | 48.00 ± 1.58 | 46.61 ± 0.17 | +1.39 | – | 5 |" in text
    assert "| FedEntOpt | 54.00 ± 0.71 | 52.80 ± 0.03 | +1.20 | **+6.00 [+4.76, +7.24]** | 5 |" in text
    assert (
        "| FedProx | 10.00 ± 0.00 (2 diverged) | 44.84 ± 0.20 | -34.84 | **-38.00 [-42.97, -33.03]** | 3 of 5 |" in text
    )
    assert "| KL | – | 34.76 ± 0.01 | – | – | 0 of 5 |" in text
    tex = latex(table)
    assert "FedEntOpt & 54.00 $\\pm$ 0.71 & 52.80 $\\pm$ 0.03 & +1.20 & \\textbf{+6.00 [+4.76, +7.24]} & 5 \\\\" in tex
    assert "$-$34.84" in tex
    assert tex.count("\\begin{longtable}{lrrrrr}") == tex.count("\\end{longtable}") == 1
    body = [
        line
        for line in tex.splitlines()
        if line.endswith("\\\\") and "multicolumn" not in line and "caption" not in line
    ]
    assert {line.count(" & ") for line in body} == {5}
    assert rounds.name == "rounds-to-target"


def test_latex_escapes_what_users_may_write() -> None:
    table = Table("x", "100 % & more_", "a#b", ("a", "b"), (Section("{c}", (("\\d~^$", "-1.0"),)),))
    tex = latex(table)
    assert "100 \\% \\& more\\_" in tex
    assert "a\\#b" in tex
    assert "\\{c\\}" in tex
    assert "\\textbackslash{}d\\textasciitilde{}\\textasciicircum{}\\$ & $-$1.0" in tex
    assert "a \\| b" in markdown(Table("x", "t", "n", ("a | b",), (Section("", (("c",),)),)))
    signs = latex(Table("x", "t", "n", ("a", "b"), (Section("", (("p < 0.001 > 0 | q", "2 × 3"),)),)))
    assert "p $<$ 0.001 $>$ 0 $|$ q & 2 $\\times$ 3" in signs


def test_rounds_to_a_target_say_how_many_seeds_get_there() -> None:
    results = known(
        *(
            run(FEDAVG.config, seed, 48.0, rounds_to_40=100, rounds_to_45=[200, None, 300, None, None][seed])
            for seed in range(5)
        ),
        *(run(FEDENTOPT.config, seed, 54.0, rounds_to_40=40, rounds_to_45=50, rounds_to_50=90) for seed in range(5)),
    )
    entries = compare(of("table1"), results, lambda name: True)
    text = markdown(tables(entries)[1])
    assert "| FedAvg | 100 | 250 (2 of 5) | – (0 of 5) | 5 |" in text
    assert "| FedEntOpt | 40 | 50 | 90 | 5 |" in text
    sooner = next(found.ours for found in findings(entries) if "sooner" in found.claim)
    assert sooner == (
        "To 40 % it needs 0.40 of FedAvg's rounds (1 setting). "
        "In 1 setting all its seeds get to 45 %, but not all of FedAvg's. "
        "In 1 setting all its seeds get to 50 %, but not all of FedAvg's."
    )


def test_the_buffer_table_shows_diversity_and_clients_never_selected() -> None:
    cells = of("table6")
    runs = [
        run(cell.config, seed, 50.0 + (cell.buffer or 0) / 25, h_norm=0.7 + (cell.buffer or 0) / 300,
            never_selected=seed if cell.buffer == 0 else 0)
        for cell in cells if cell.metric == "accuracy" for seed in range(5)
    ]  # fmt: skip
    entries = compare(cells, known(*runs), lambda name: True)
    text = markdown(tables(entries)[0])
    assert (
        "| 0 % | 50.00 ± 0.00 | 49.84 ± 0.77 | +0.16 | – | 0.700 ± 0.000 | 0.896 ± 0.002 | -0.196 | 0, 1, 2, 3, 4 | 5 |"
        in text
    )
    said = {found.claim: found.ours for found in findings(entries)}
    assert said["a larger buffer makes selection more even"].startswith(
        "H_norm rises with the buffer in 1 of 1 settings"
    )
    assert said["every client was selected at least once"] == (
        "Not in 4 of 20 runs (Dir(0.1), Q=0 %): up to 4 clients were never selected."
    )


def test_findings_count_settings_and_what_is_clear() -> None:
    second = [cell for cell in CELLS if cell.table == "table1" and cell.model == "vgg11" and cell.dataset == "cifar10"]
    vgg = {(cell.partition, cell.method): cell for cell in second}
    results = known(
        *FIVE._exported.items(),
        run(vgg["dir:0.1", "fedavg"].config, 0, 60.0),  # one seed: a gain, but nothing clear about it
        run(vgg["dir:0.1", "fedentopt"].config, 0, 61.0),
        run(vgg["classes:2", "fedavg"].config, 0, 60.0),
        run(vgg["classes:2", "fedentopt"].config, 0, 58.0),
        run(vgg["classes:2", "kl"].config, 0, 59.0),
    )
    said = {found.claim: found.ours for found in findings(compare(CELLS, results, lambda name: True))}
    assert said["FedEntOpt beats FedAvg"] == (
        "Above FedAvg in 2 of 3 settings (-2.00 to +6.00 points), clearly (95 % interval above zero) in 1."
    )
    assert (
        said["FedEntOpt, with noise or without, is the best of its row"] == "Best in 0 of 1 settings; elsewhere FedAvg."
    )
    assert said["baselines gain when FedEntOpt selects for them"] == "Not run yet."


def said_of(*runs: tuple[tuple[str, int], Measured]) -> dict[str, str]:
    """What is said of each claim when only these runs are there."""
    return {found.claim: found.ours for found in findings(compare(CELLS, known(*runs), lambda name: True))}


def test_findings_compare_seeds_with_themselves() -> None:
    fedavg = [run(FEDAVG.config, seed, 40.0 + 10 * seed, rounds_to_40=100 + 100 * seed) for seed in range(3)]
    # Of FedEntOpt only the worst seed is there: below FedAvg's mean, above FedAvg in that seed.
    said = said_of(*fedavg, run(FEDENTOPT.config, 0, 45.0, rounds_to_40=50))
    assert said["FedEntOpt beats FedAvg"].startswith("Above FedAvg in 1 of 1 settings (+5.00 to +5.00 points)")
    assert said["FedEntOpt reaches a target accuracy sooner"] == "To 40 % it needs 0.50 of FedAvg's rounds (1 setting)."
    assert said_of(*fedavg, run(FEDENTOPT.config, 4, 45.0))["FedEntOpt beats FedAvg"] == "Not run yet."


def test_findings_compare_participation_in_the_same_settings() -> None:
    claim = "FedEntOpt keeps its accuracy at low participation"
    cells = {
        (cell.partition, cell.method, cell.participation): cell.config
        for cell in CELLS
        if cell.table == "figure2" and cell.model == "lenet5" and cell.dataset == "cifar10"
    }
    both = [
        run(cells["dir:0.1", method, share], 0, accuracy)
        for method, share, accuracy in (
            ("fedavg", 4, 40.0),
            ("fedavg", 9, 50.0),
            ("fedentopt", 4, 52.0),
            ("fedentopt", 9, 53.0),
        )
    ]
    alone = [run(cells["classes:2", "fedentopt", share], 0, accuracy) for share, accuracy in ((4, 20.0), (9, 60.0))]
    assert said_of(*both, *alone)[claim].endswith("mean of the settings: FedEntOpt -1.00, FedAvg -10.00.")
    assert said_of(*alone)[claim] == "Not run yet."
    # A second seed that one of them lacks has another partition.
    more = [run(cells["dir:0.1", "fedentopt", 4], 1, 20.0), run(cells["dir:0.1", "fedavg", 9], 1, 90.0)]
    assert said_of(*both, *more)[claim].endswith("mean of the settings: FedEntOpt -1.00, FedAvg -10.00.")
    assert said_of(*both[:3], run(cells["dir:0.1", "fedentopt", 9], 1, 53.0))[claim] == "Not run yet."


def test_findings_about_buffers_need_two_and_a_rise() -> None:
    claim = "a larger buffer makes selection more even"
    table = [cell for cell in CELLS if cell.table == "table6" and cell.metric == "h_norm"]
    row = [cell for cell in table if (cell.dataset, cell.partition) == ("cifar10", "classes:2")]
    first, second = [run(cell.config, 0, 50.0, h_norm=0.9, never_selected=2) for cell in row[:2]]
    assert said_of(first)[claim] == "Not run yet."
    assert said_of(first, second)[claim].startswith("H_norm rises with the buffer in 0 of 1 settings")
    risen = run(row[1].config, 0, 50.0, h_norm=0.91, never_selected=1)
    assert said_of(first, risen)[claim].startswith("H_norm rises with the buffer in 1 of 1 settings")
    more = run(row[0].config, 1, 50.0, h_norm=0.95)  # in a seed that the larger buffer lacks
    assert said_of(first, risen, more)[claim].startswith("H_norm rises with the buffer in 1 of 1 settings")
    assert said_of(more, risen)[claim] == "Not run yet."
    everyone = "every client was selected at least once"
    assert said_of(first, risen)[everyone].endswith("up to 2 clients were never selected.")
    assert said_of(risen)[everyone].endswith(": a client was never selected.")


def test_sizes_are_those_of_our_models_by_hand() -> None:
    by_place = {(cell.model, cell.dataset): size(cell) for cell in CELLS if cell.table == "table5"}
    lenet = by_place["lenet5", "cifar10"]
    assert lenet is not None
    assert (lenet.parameters, lenet.state, lenet.labels) == (4 * 62_006, 4 * 62_006, 4 * 10 * 100)
    coarse = by_place["lenet5", "cifar100"]
    assert coarse is not None
    assert coarse.parameters - lenet.parameters == 4 * 10 * (84 + 1)
    b0 = by_place["efficientnet-b0", "brain-tumor-mri"]
    assert b0 is not None
    assert b0.parameters == 4 * (4_007_548 + 4 * 1281)  # torchvision's B0 without its head, and a head for 4 classes
    assert b0.state > b0.parameters  # running statistics travel too
    assert b0.labels == 4 * 4 * 40


def test_exported_results_give_the_same_bytes(tmp_path: Path) -> None:
    results = _many()
    assert export(tmp_path / "a", CELLS, results)
    again = read_exported(tmp_path / "a")
    for cells in (LENET, CELLS):
        ours, theirs = (compare(cells, source, lambda name: True) for source in (results, again))
        assert summary_csv(ours) == summary_csv(theirs)
        assert [markdown(table) for table in tables(ours)] == [markdown(table) for table in tables(theirs)]
    export(tmp_path / "b", CELLS, again)
    assert _content(tmp_path / "a") == _content(tmp_path / "b")
    with (tmp_path / "a" / "table2.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 5  # a row per cell and seed
    assert {row["seed"] for row in rows} == {"0", "1", "2", "3", "4"}
    assert float(rows[0]["value"]) == pytest.approx(float(rows[0]["accuracy"]) - float(rows[0]["baseline_accuracy"]))


def test_exporting_adds_to_what_is_there(tmp_path: Path) -> None:
    export(tmp_path, CELLS, known(*(run(FEDAVG.config, seed, 40.0 + seed) for seed in (0, 1))))
    export(tmp_path, CELLS, known(run(FEDAVG.config, 1, 50.0), run(FEDENTOPT.config, 0, 60.0)))
    merged = read_exported(tmp_path)
    assert entry(merged, FEDAVG).values == {0: 40.0, 1: 50.0}  # the newer figure of seed 1
    assert entry(merged, FEDENTOPT).values == {0: 60.0}
    beyond = FEDAVG.with_seeds((0, 1, 17))
    export(tmp_path, [beyond], known(run(FEDAVG.config, 17, 45.0)))
    export(tmp_path, CELLS, known())  # seed 17 is not among the default ones, and stays
    assert entry(read_exported(tmp_path), beyond).values == {0: 40.0, 1: 50.0, 17: 45.0}


def test_figures_that_another_export_replaces_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    first = known(run(FEDAVG.config, 0, 48.0, seconds=1.0), run(FEDENTOPT.config, 0, 50.0))
    export(tmp_path, [FEDAVG, FEDENTOPT], first, said.append)
    again = known(run(FEDAVG.config, 0, 48.0, seconds=2.0), run(FEDENTOPT.config, 1, 51.0))
    export(tmp_path, [FEDAVG, FEDENTOPT], again, said.append)
    assert said == []  # the same figures, and others' seeds
    export(tmp_path, [FEDAVG, FEDENTOPT], known(run(FEDENTOPT.config, 0, 50.5)), said.append)
    assert said == [
        f"export: {tmp_path} had other figures of 1 run, which are replaced: fedentopt on cifar10, dir:0.1, seed 0: "
        "accuracy 50.0 became 50.5"
    ]
    assert entry(read_exported(tmp_path), FEDENTOPT).values == {0: 50.5, 1: 51.0}


def test_a_folder_has_one_set_of_figures_of_a_run(tmp_path: Path) -> None:
    (six,) = of("table6", metric="accuracy", buffer=50)  # FedEntOpt's run of Table 1
    assert six.config == FEDENTOPT.config
    export(tmp_path, [six], known(run(six.config, 0, 50.0)))
    before = _content(tmp_path)
    with pytest.raises(
        InputError, match=r"export: .*table1.csv .*table6.csv.* other figures of it \(accuracy 50.5 and 50"
    ):
        export(tmp_path, [FEDENTOPT], known(run(six.config, 0, 50.5)))
    assert _content(tmp_path) == before
    export(tmp_path / "other", [FEDENTOPT], known(run(six.config, 0, 50.5)))
    shutil.copy(tmp_path / "other" / "table1.csv", tmp_path)
    with pytest.raises(InputError, match=r"results: .*table1.csv, line 2 and .*table6.csv, line 2 are of one run"):
        read_exported(tmp_path)


def test_a_baseline_without_a_cell_of_its_own_is_exported_with_the_change(tmp_path: Path) -> None:
    results = known(
        *(run(PROX.config, s, 40.0) for s in range(5)), *(run(CHANGE.config, s, 45.0 + s) for s in range(5))
    )
    export(tmp_path, [CHANGE], results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table2.csv"]
    assert entry(read_exported(tmp_path), CHANGE).values == {0: 5.0, 1: 6.0, 2: 7.0, 3: 8.0, 4: 9.0}


def test_rows_of_other_settings_do_not_count(tmp_path: Path) -> None:
    export(tmp_path, CELLS, FIVE)
    assert FEDAVG.config is not None
    other = dataclasses.replace(FEDAVG, config=dataclasses.replace(FEDAVG.config, weight_decay=0.1))
    assert entry(read_exported(tmp_path), other).state == "not-run"
    assert entry(read_exported(tmp_path), FEDAVG.cut(20)).state == "not-run"


def test_thinned_curves_keep_every_round_where_the_figure_is_a_curve(tmp_path: Path) -> None:
    long: Curve = [(number, float(number), 3.0) for number in range(5, 505, 5)]
    short: Curve = [(number, None, 2.0 + number / 1000) for number in range(1, 101)]
    first = next(cell for cell in CELLS if cell.table == "figure1")
    results = known(
        run(FEDAVG.config, 0, 40.0),
        run(first.config, 0, 40.0),
        curves={run(FEDAVG.config, 0, 0.0)[0]: long, run(first.config, 0, 0.0)[0]: short},
    )
    export(tmp_path, CELLS, results)
    again = read_exported(tmp_path)
    assert FEDAVG.config is not None
    assert first.config is not None
    assert [point[0] for point in again.curve(FEDAVG.config, 0)] == list(range(25, 501, 25))
    assert again.curve(first.config, 0) == short
    assert not (tmp_path / "figure2_curves.csv").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("accuracy,final", "akkuracy,final"), "table1.csv: column accuracy is missing"),
        (
            lambda text: text.replace(",48.0,", ",fourty,"),
            "table1.csv, line 2: (value|accuracy) 'fourty' is not a number",
        ),
        (lambda text: re.sub(r",[0-9a-f]{8}\n", ",\n", text), "table1.csv, line 2: settings is empty"),
        (lambda text: text.replace("fedavg", '"fedavg', 1), "table1.csv, line .*: cannot be read as CSV"),
        (lambda text: text.replace("fedavg", '"' + "x" * 200_000, 1), "table1.csv, line .*: cannot be read as CSV"),
        (lambda text: f"{text}>>>>>>> other\n", "table1.csv, line .*: 1 cells, the header has"),
        (lambda text: text.rstrip()[:-20], "table1.csv, line .* cells, the header has"),
    ],
)
def test_a_damaged_export_is_refused_by_line(tmp_path: Path, change, message: str) -> None:
    export(tmp_path, CELLS, FIVE)
    path = tmp_path / "table1.csv"
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=message):
        read_exported(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        read_exported(tmp_path / "none")


def test_code_with_changes_is_not_shown_as_its_commit() -> None:
    def shown(**entry: str) -> str:
        return commands_behind([{"command": "fedentopt", "runs": 1, "fedentopt": "1.0", **entry}])

    assert "| 1.0, 0123456789ab+changes |" in shown(commit="0123456789abcdef+changes")
    assert "| 1.0, 0123456789ab |" in shown(commit="0123456789abcdef")
    assert "| 1.0, sources fedcba987654 |" in shown(sources="fedcba9876543210")
    assert "<summary>1 command</summary>" in shown()


def test_the_log_of_commands_keeps_each_once_and_no_paths(tmp_path: Path) -> None:
    words = ["reproduce", "table1", "--out", "/srv/me/secret/out", "--data-dir=/srv/me/data", "--model", "lenet5"]
    assert provenance.command_line(words) == "fedentopt reproduce table1 --out out --data-dir=data --model lenet5"
    one = {"command": "a", "started": "2026-01-02"}
    provenance.merge(tmp_path, [one])
    provenance.merge(tmp_path, [one, {"command": "b", "started": "2026-01-01"}])
    assert [entry["command"] for entry in provenance.read(tmp_path)] == ["b", "a"]
    later = one | {"seconds": 9, "runs": 3}
    provenance.merge(tmp_path, [later])
    provenance.merge(tmp_path, [one, later])
    assert provenance.read(tmp_path)[1:] == [later], "a command that went on has one entry, its last"
    damaged = (later | {"seconds": seconds} for seconds in ("many", [1], None, math.inf, 10**400))
    for text in ("[", *(json.dumps({"commands": [entry]}) for entry in damaged)):
        (tmp_path / "provenance.json").write_text(text)
        with pytest.raises(InputError, match=r"provenance\.json: cannot be read"):
            provenance.read(tmp_path)


@pytest.mark.parametrize(
    ("words", "logged"),
    [
        ("all --out /some/where/a --data-dir=/else/where/b/ --seeds 0", "all --out a --data-dir=b --seeds 0"),
        ("all --ray head.example:6379 --out=x", "all --ray ADDRESS --out=x"),
        ("all --ray=ray://10.0.0.1:10001", "all --ray=ADDRESS"),
        ("all --ray local --ray-workers 2", "all --ray local --ray-workers 2"),
        ("all --dataset /some/where/x.npz,digits", "all --dataset x.npz,digits"),
        ("all --dataset=/some/where/x.npz --method fedavg", "all --dataset=x.npz --method fedavg"),
    ],
)
def test_a_logged_command_names_no_machine_and_no_path(words: str, logged: str) -> None:
    assert provenance.command_line(words.split()) == f"fedentopt {logged}"


def test_figures_are_drawn_and_the_same_twice(tmp_path: Path) -> None:
    results = _many()
    entries = compare(CELLS, results, lambda name: True)
    first = write_figures(tmp_path / "a", entries, results)
    assert sorted(path.name for path in first) == [
        f"{name}.{kind}" for name in ("accuracy", "figure1", "figure2") for kind in ("png", "svg")
    ]
    write_figures(tmp_path / "b", entries, results)
    for path in first:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    drawn = (tmp_path / "a" / "figure1.svg").read_text()
    for words in (
        "Communication round",
        "Label entropy of the cohort (bits)",
        "Random (FedAvg)",
        "FedEntropy",
        "log₂ 9",
    ):
        assert words in drawn
    assert "Participation (%)" in (tmp_path / "a" / "figure2.svg").read_text()
    assert write_figures(tmp_path / "c", compare(CELLS, known(), lambda name: True), known()) == []
    assert not (tmp_path / "c").exists()


def test_the_page_of_results_says_what_differs(tmp_path: Path) -> None:
    results = _many()
    (tmp_path / "remarks.md").write_text("## Remarks\n\nBy hand.\n")
    provenance.merge(
        tmp_path, [{"command": "fedentopt reproduce", "started": "2026", "seconds": 90, "device": "GPU X"}]
    )
    written = write_results_page(tmp_path / "docs" / "RESULTS.md", Reproduction(CELLS, CELLS, results), tmp_path)
    text = written[0].read_text()
    assert "By hand." in text
    assert "| 1 | LeNet-5, CIFAR-10, Dir(0.1) | FedNova | 50.00 ± 0.00 | 10.00 ± 0.00 | +40.00 |" in text
    assert "![Figure 1: entropy of the cohort's labels](results/figure1.svg)" in text
    assert (tmp_path / "docs" / "results" / "figure1.svg").exists()
    assert "`fedentopt reproduce` |" in text
    assert "GPU X" in text
    assert "VGG-11, CIFAR-10" not in text  # nothing known of it, so no empty section
    assert text.index("## What was found") < text.index("## How this page is made") < text.index("## Where we differ")
    assert "Nowhere among the settings that were run." in text  # all of them have 50 per cent


def test_a_page_without_results_says_that_nothing_was_run(tmp_path: Path) -> None:
    alone = [cell for cell in LENET if cell.table == "table1" and cell.method == "fedentopt"][:1]
    one = Results(None, dict(run(cell.config, 0, 50.0) for cell in alone if cell.config))
    for results, near in ((Results(None, {}), False), (one, True)):
        text = write_results_page(tmp_path / "page.md", Reproduction(LENET, LENET, results), tmp_path)[0].read_text()
        sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
        assert "\nNot run yet.\n" in sections["Where another method is ahead of FedEntOpt"]
        assert ("\nNot run yet.\n" in sections["Where we differ"]) is not near
        assert "Nowhere" not in text


def test_methods_ahead_of_fedentopt_are_named_with_their_interval(tmp_path: Path) -> None:
    wanted = {"fedavg": (50, 60), "scaffold": (53, 65), "fedentopt": (52, 62), "fedentopt-dp": (70, 70)}
    cells = [cell for cell in LENET if cell.table == "table1" and cell.method in wanted]
    runs = dict(
        run(cell.config, seed, float(wanted[cell.method][seed])) for cell in cells for seed in (0, 1) if cell.config
    )
    results = Results(None, runs)
    text = write_results_page(tmp_path / "page.md", Reproduction(cells, cells, results), tmp_path)[0].read_text()
    [line] = [line for line in text.splitlines() if line.startswith("| LeNet-5, CIFAR-10, Dir(0.1) | SCAFFOLD")]
    # Differences 1 and 3: mean 2, deviation √2, t(0.975, 1) = 12.706, so half an interval is 12.706.
    assert "| 59.00 ± 8.49 | 57.00 ± 7.07 | +2.00 [-10.71, +14.71] | 2 |" in line
    assert "| FedAvg | 55" not in text.partition("## How")[0]


def test_methods_are_compared_with_fedentopt_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    wanted = {  # seed 0 is an easy partition: FedLC's mean is the highest, and it is the lowest of its seed
        "fedlc": {0: 80.0},
        "scaffold": {0: 81.0, 1: 53.0, 2: 53.0},
        "fedentopt": {0: 82.0, 1: 50.0, 2: 51.0},
        "kl": {3: 99.0},  # shares no seed with anyone
    }
    cells = [cell for cell in LENET if cell.table == "table1" and cell.method in wanted]
    runs = dict(
        run(cell.config, seed, value)
        for cell in cells
        if cell.config
        for seed, value in wanted[cell.method or ""].items()
    )
    results = Results(None, runs)
    text = write_results_page(tmp_path / "page.md", Reproduction(cells, cells, results), tmp_path)[0].read_text()
    section = text.partition("## Where another method is ahead")[2].partition("\n## ")[0]
    [line] = [line for line in section.splitlines() if line.startswith("| LeNet-5")]
    # Differences -1, 3 and 2: mean 4/3, deviation 2.0817, t(0.975, 2) = 4.3027, so half an interval is 5.17.
    assert line.endswith("| SCAFFOLD | 62.33 ± 16.17 | 61.00 ± 18.19 | +1.33 [-3.84, +6.50] | 3 |")
    assert "| Best in 0 of 1 settings; elsewhere SCAFFOLD. |" in text
    runs |= dict(run(cell.config, 0, 83.0) for cell in cells if cell.config and cell.method == "fedlc")
    results = Results(None, runs)
    text = write_results_page(tmp_path / "page.md", Reproduction(cells, cells, results), tmp_path)[0].read_text()
    assert "| FedLC | 83.00 | 82.00 | +1.00 | 1 |" in text


def test_a_row_whose_methods_share_no_seed_is_not_called_best() -> None:
    seeds = {"fedentopt": 0, "fedavg": 1, "scaffold": 1}
    cells = [cell for cell in LENET if cell.table == "table1" and cell.method in seeds]
    runs = dict(run(cell.config, seeds[cell.method or ""], 50.0) for cell in cells if cell.config)
    said = {found.claim: found.ours for found in findings(compare(cells, Results(None, runs), lambda name: True))}
    assert said["FedEntOpt, with noise or without, is the best of its row"] == "Not run yet."


def test_committed_results_give_the_committed_tables_byte_for_byte(tmp_path: Path) -> None:
    committed = ROOT / "results" / "paper"
    request = Reproduction(CELLS, CELLS, read_exported(committed), tmp_path)
    rows = {path.stem for path in committed.glob("*.csv")} | {"table5"}
    write_tables(tmp_path / "tables", request.compare([cell for cell in CELLS if cell.table in rows]))
    assert _content(tmp_path / "tables") == _content(committed / "tables")
    write_results_page(tmp_path / "docs" / "RESULTS.md", request, committed)
    assert (tmp_path / "docs" / "RESULTS.md").read_text() == (ROOT / "docs" / "RESULTS.md").read_text()
    export(tmp_path / "again", CELLS, request.results)
    shutil.rmtree(tmp_path / "again" / "tables", ignore_errors=True)
    assert _content(tmp_path / "again") == {k: v for k, v in _content(committed).items() if k.endswith(".csv")}
    for path in (*committed.rglob("*"), *(ROOT / "docs" / "results").glob("*")):
        assert not path.is_file() or path.stat().st_size < 1_000_000, path


@pytest.mark.parametrize(("name", "cells"), [("selectors", selector_cells), ("audit", audit_cells)])
def test_committed_tables_of_the_benchmarks_are_those_of_their_results(
    tmp_path: Path, name: str, cells: Callable[[], list[Cell]]
) -> None:
    committed = ROOT / "results" / name
    results = read_exported(committed)
    request = Reproduction(cells(), [], results)
    rows = {path.stem for path in committed.glob("*.csv")}
    shown = [cell for cell in with_tuned(request.plan, results, "all") if cell.table in rows]
    write_tables(tmp_path, request.compare(shown))
    assert _content(tmp_path) == _content(committed / "tables")


def _many() -> Results:
    """Every LeNet-5 run of CIFAR-10, Dir(0.1), and Figure 1, at 50 per cent, with curves."""
    cells = [*LENET, *(cell for cell in CELLS if cell.table == "figure1")]
    cells = [cell for cell in cells if cell.table in ("table1", "table2", "table6", "figure1", "figure2")]
    cells = [
        cell for cell in cells if cell.table != "table2" or cell.method in ("fedprox+fedentopt", "fednova+fedentopt")
    ]
    runs = dict(
        run(config, seed, 50.0) for c in cells for config in (c.config, c.baseline) if config for seed in c.seeds
    )
    curve: Curve = [(number, number / 4 if number % 5 == 0 else None, 3.0) for number in range(1, 101)]
    return Results(None, runs, dict.fromkeys(runs, curve))


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_the_csv_of_a_table_has_a_row_a_cell() -> None:
    rows = list(csv.DictReader(io.StringIO(summary_csv(compare(of("table1"), FIVE, lambda name: True)))))
    assert len(rows) == 10
    found = next(row for row in rows if row["method"] == "fedentopt")
    assert json.loads(found["against_fedavg"]) == 6.0
    assert (found["ours"], found["paper"], found["seeds"], found["state"]) == (
        "54.000000",
        "52.800000",
        "0 1 2 3 4",
        "done",
    )


OWN = """
[settings]
clients = 20
participation = 20
rounds = 5
seeds = 2
"""
BLOCK = """
[[cells]]
table = "own"
model = "lenet5"
dataset = "digits"
partition = "classes:2"
"""


def own(tmp_path: Path, *blocks: str) -> tuple[list[Comparison], Results]:
    """The cells of a file with these blocks, every one with figures of its own: 20.00, 21.00, ... in order of runs."""
    path = tmp_path / "own.toml"
    path.write_text(OWN + "".join(BLOCK + block + "\n" for block in blocks))
    cells = cells_from_file(path)
    configs = list(dict.fromkeys(config for c in cells for config in (c.config, c.baseline) if config))
    curve: Curve = [(number, 30.0, 2.0) for number in range(1, 6)]
    runs = dict(
        run(config, seed, 20.0 + number, h_norm=0.5 + number / 100, mean_entropy=1.0 + number / 100)
        for number, config in enumerate(configs) for seed in range(2)
    )  # fmt: skip
    results = Results(None, runs, dict.fromkeys(runs, curve))
    return compare(cells, results, lambda name: True), results


def rows_of(entries: list[Comparison]) -> list[tuple[str, ...]]:
    """First two columns of all rows of the only table."""
    (table,) = tables(entries)
    return [row[:2] for section in table.sections for row in section.rows]


def test_rows_that_would_read_alike_say_what_differs(tmp_path: Path) -> None:
    change = 'metric = "accuracy_change"\nmethod = "fedprox+fedentopt"\nmu = [0.0001, 0.01]'
    assert [row[0] for row in rows_of(own(tmp_path, change)[0])] == [
        "FedProx + FedEntOpt, mu 0.0001",
        "FedProx + FedEntOpt, mu 0.01",
    ]
    buffers = 'metric = "accuracy"\nmethod = "fedentopt"\nbuffer = [25, 50]'
    assert rows_of(own(tmp_path, buffers, 'metric = "accuracy"\nmethod = "kl"')[0]) == [
        ("FedEntOpt, buffer 25 %", "20.00 ± 0.00"),
        ("FedEntOpt, buffer 50 %", "21.00 ± 0.00"),
        ("KL", "22.00 ± 0.00"),  # nothing else is called so
    ]
    # A method that does not look at mu has one run for both values, and still two cells.
    both = 'metric = "accuracy"\nmethod = ["fedavg", "fedprox"]\nmu = [1, 2]\nlr = [0.5, 0.1]\nextra = true'
    names = [row[0] for row in rows_of(own(tmp_path, both)[0])]
    assert names == [f"{m}, mu {mu}, lr {lr}" for m in ("FedAvg", "FedProx") for mu in (1, 2) for lr in (0.5, 0.1)]


def test_rows_of_two_blocks_say_what_differs_though_only_one_sweeps_it(tmp_path: Path) -> None:
    block = 'metric = "accuracy"\nmethod = "fedprox"\nmu = '
    names = [row[0] for row in rows_of(own(tmp_path, block + "[0.5, 1.0]", block + "0.1\nmomentum = 0.0")[0])]
    assert names == [
        "FedProx, mu 0.5, momentum 0.9",
        "FedProx, mu 1.0, momentum 0.9",
        "FedProx, mu 0.1, momentum 0.0",
    ]
    # Settings that a run's identity leaves out at their defaults have these defaults all the same.
    names = [row[0] for row in rows_of(own(tmp_path, block + "[0.5]", block + '0.1\ninitialisation = "layers"')[0])]
    assert names == ["FedProx, mu 0.5, initialisation network", "FedProx, mu 0.1, initialisation layers"]
    block = 'metric = "accuracy"\nmethod = "scaffold"\n'
    names = [row[0] for row in rows_of(own(tmp_path, block, block + 'scaffold_start = ["random"]')[0])]
    assert names == ["SCAFFOLD, scaffold_start zero", "SCAFFOLD, scaffold_start random"]


def test_no_cell_of_a_table_by_participation_is_dropped(tmp_path: Path) -> None:
    block = 'metric = "accuracy"\nmethod = "fedentopt"\nparticipation = [10, 20]\nbuffer = [25, 50]'
    entries, results = own(tmp_path, block)
    (table,) = tables(entries)
    assert table.columns == ("method", "10 %", "20 %")
    assert table.sections[0].rows == (
        ("FedEntOpt, buffer 25 %", "20.00 ± 0.00", "22.00 ± 0.00"),
        ("FedEntOpt, buffer 50 %", "21.00 ± 0.00", "23.00 ± 0.00"),
    )
    assert "CIFAR-100" not in table.note
    write_figures(tmp_path, entries, results)
    drawn = (tmp_path / "own.svg").read_text()
    assert "FedEntOpt, buffer 25 %" in drawn
    assert "FedEntOpt, buffer 50 %" in drawn
    printed, _ = own(tmp_path, block + "\npaper = 30")  # which columns by participation have no room for
    assert [row[0] for row in rows_of(printed)] == [
        f"FedEntOpt, participation {share} %, buffer {buffer} %" for share in (10, 20) for buffer in (25, 50)
    ]
    assert markdown(tables(printed)[0]).count("| 30.00 |") == 4


def test_a_table_by_participation_says_which_figures_lack_seeds(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        OWN + '[model.lenet5]\nstand_ins = ["bf16"]\n' + BLOCK
        + 'metric = "accuracy"\nmethod = "fedavg"\nparticipation = [10, 20, 30]\n'
    )  # fmt: skip
    some, both, none = cells_from_file(tmp_path / "own.toml")
    assert both.config is not None
    bf16 = dataclasses.replace(both.config, precision="bf16")
    results = known(run(some.config, 1, 20.0), run(both.config, 0, 30.0), run(bf16, 1, 32.0))
    (table,) = tables(compare([some, both, none], results, lambda name: True))
    assert table.sections[0].rows == (("FedAvg (1, 2, 0 of 2 seeds)", "20.00", "31.00 ± 1.41 (1 in bf16)", "–"),)
    only_one = known(run(some.config, 1, 20.0), run(both.config, 0, 30.0))
    (table,) = tables(compare([some, both], only_one, lambda name: True))
    assert table.sections[0].rows == (("FedAvg (1 of 2 seeds)", "20.00", "30.00"),)
    assert "mean of the last five rounds" in table.note
    assert "± sample standard deviation over seeds" in table.note
    assert "trial" not in table.note
    results = known(run(some.cut(3).config, 0, 20.0), run(some.cut(3).config, 1, 20.0))
    (table,) = tables(compare([cell.cut(3) for cell in (some, both)], results, lambda name: True))
    assert "A trial: runs are cut to 3 rounds." in table.note


def test_notes_say_which_rounds_an_accuracy_is_of(tmp_path: Path) -> None:
    def note(block: str, rounds: int | None = None) -> str:
        entries, results = own(tmp_path, block + '\nmethod = "fedprox"\nmu = [0.1, 1.0]')
        cells = [entry.cell if rounds is None else entry.cell.cut(rounds) for entry in entries]
        return tables(compare(cells, results, lambda name: True))[0].note

    accuracy = 'metric = "accuracy"'
    assert "mean of the last five rounds." in note(accuracy)
    assert "per cent, of the last round." in note(accuracy, 1)
    assert "mean of the last ten rounds." in note(f"{accuracy}\nrounds = 12")
    assert "mean of the last ten rounds, of all where there are fewer." in note(f"{accuracy}\nrounds = [4, 12]")
    assert "mean of the last five rounds." in note('metric = "validation_accuracy"\nvalidation = 0.1')
    trial = [cell.cut(3) for cell in CELLS if cell.table in (BF16, OPEN_CHOICES, PRETRAINING)]
    for table in tables(compare(trial, known(), lambda name: True)):
        assert "mean of the last three rounds" in table.note


def test_a_note_speaks_only_of_columns_that_are_there(tmp_path: Path) -> None:
    (alone,) = tables(own(tmp_path, 'metric = "h_norm"\nmethod = "fedentopt"')[0])
    assert "gainst FedAvg" not in alone.note
    assert "± sample standard deviation over seeds" in alone.note
    (both,) = tables(own(tmp_path, 'metric = ["accuracy", "h_norm"]\nmethod = ["fedavg", "fedentopt"]')[0])
    assert "Against FedAvg: mean of the differences" in both.note


def test_every_metric_has_its_own_columns(tmp_path: Path) -> None:
    block = 'metric = ["accuracy", "entropy", "model_mb"]\nmethod = ["fedavg", "fedentopt"]'
    entries, _ = own(tmp_path, block)
    accuracy, entropy, sizes = tables(entries)
    assert {accuracy.name, entropy.name, sizes.name} == {"own"}
    assert len({accuracy.title, entropy.title, sizes.title}) == 3
    shown = [[row[:2] for row in table.sections[0].rows] for table in (accuracy, entropy)]
    assert shown == [
        [("FedAvg", "20.00 ± 0.00"), ("FedEntOpt", "21.00 ± 0.00")],
        [("FedAvg", "1.000 ± 0.000"), ("FedEntOpt", "1.010 ± 0.000")],
    ]
    assert (accuracy.columns[1], entropy.columns[1]) == ("ours", "mean over rounds, ours")
    assert "Ten classes" not in entropy.note  # nothing is known of this data set's
    names = [row[0] for row in sizes.sections[0].rows]
    assert names == ["digits, LeNet-5, method fedavg", "digits, LeNet-5, method fedentopt"]
    written = {path.name: path for path in write_tables(tmp_path / "tables", entries)}
    assert sorted(written) == ["own.csv", "own.md", "own.tex"]
    text, tex = written["own.md"].read_text(), written["own.tex"].read_text()
    assert all(markdown(table) in text and latex(table) in tex for table in (accuracy, entropy, sizes))
    labels = re.findall(r"label\{(.*?)\}", tex)
    assert len(set(labels)) == len(labels) == 3


def test_diversity_alone_beside_accuracy_and_of_methods_without_a_buffer(tmp_path: Path) -> None:
    (alone,) = tables(own(tmp_path, 'metric = "h_norm"\nmethod = "fedentopt"')[0])
    assert alone.columns[:2] == ("method", "H_norm, ours")
    assert alone.sections[0].rows == (("FedEntOpt", "0.500 ± 0.000", "–", "–", "0, 0", "2"),)
    (both,) = tables(own(tmp_path, 'metric = ["accuracy", "h_norm"]\nmethod = ["fedavg", "fedentopt"]')[0])
    shown = [(row[0], row[1], row[5]) for row in both.sections[0].rows]
    assert shown == [("FedAvg", "20.00 ± 0.00", "0.500 ± 0.000"), ("FedEntOpt", "21.00 ± 0.00", "0.510 ± 0.000")]
    assert [both.columns[number] for number in (0, 1, 5)] == ["method", "accuracy, ours", "H_norm, ours"]
    apart = ('metric = "accuracy"\nmethod = "fedavg"', 'metric = "h_norm"\nmethod = "fedentopt"\nseeds = [1]')
    (some,) = tables(own(tmp_path, *apart)[0])
    shown = [(row[0], row[1], row[5], row[-1]) for row in some.sections[0].rows]
    assert shown == [("FedAvg", "20.00 ± 0.00", "–", "2"), ("FedEntOpt", "–", "0.510", "1")]
    swept = 'metric = ["accuracy", "h_norm"]\nmethod = "fedprox+fedentopt"\nbuffer = [25, 50]\nmu = [1.0, 2.0]'
    (table,) = tables(own(tmp_path, swept)[0])
    assert table.columns[0] == "buffer"
    assert table.note.startswith("FedProx + FedEntOpt by buffer size")
    assert [row[0] for row in table.sections[0].rows] == [
        "25 %, mu 1.0", "25 %, mu 2.0", "50 %, mu 1.0", "50 %, mu 2.0",
    ]  # fmt: skip


@pytest.mark.parametrize("metrics", ['"accuracy"', '"entropy"', '"h_norm"', '["accuracy", "h_norm", "entropy"]'])
def test_every_cell_is_in_a_row_of_its_own(tmp_path: Path, metrics: str) -> None:
    block = 'method = ["fedentopt", "fedprox+fedentopt"]\nparticipation = [10, 20]\nbuffer = [25, 50]\nlr = [0.1, 0.2]'
    entries, _ = own(tmp_path, f"metric = {metrics}\n{block}")
    made = tables(entries)
    text = "\n".join(markdown(table) for table in made)
    for entry_ in entries:
        digits = 2 if entry_.cell.metric == "accuracy" else 3
        assert f"| {entry_.ours:.{digits}f} ± " in text, entry_.cell
    for table in made:
        for section in table.sections:
            names = [row[0] for row in section.rows]
            assert len(set(names)) == len(names)


def test_cells_far_from_the_printed_figure_say_what_differs(tmp_path: Path) -> None:
    entries, results = own(tmp_path, 'metric = "accuracy"\nmethod = "fedprox"\nmu = [0.5, 1.0]\npaper = 60')
    cells = [entry_.cell for entry_ in entries]
    text = write_results_page(tmp_path / "page.md", Reproduction(cells, cells, results), tmp_path)[0].read_text()
    far = [line for line in text.splitlines() if line.startswith("| own | LeNet-5, digits, C=2 |")]
    assert [line.split(" | ")[2] for line in far] == ["FedProx, mu 0.5", "FedProx, mu 1.0"]


def test_the_paper_claims_nothing_of_cells_of_ones_own(tmp_path: Path) -> None:
    entries, results = own(tmp_path, 'metric = "accuracy"\nmethod = ["fedavg", "fedentopt"]')
    cells = [dataclasses.replace(entry_.cell, table="table1") for entry_ in entries]
    request = Reproduction(cells, cells, results)
    text = write_results_page(tmp_path / "page.md", request, tmp_path, own=True)[0].read_text()
    assert "| FedEntOpt | 21.00 ± 0.00 |" in text
    assert not re.search("paper says|arXiv|printed figure", text)


def test_names_with_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    entries, results = own(tmp_path, 'metric = "accuracy"\nparticipation = [10, 20]\nmethod = "fedavg"')
    odd = [
        dataclasses.replace(entry_, cell=dataclasses.replace(entry_.cell, dataset=r"a$\nothing$b", method="$x$"))
        for entry_ in entries
    ]
    svg = next(path for path in write_figures(tmp_path / "figures", odd, results) if path.suffix == ".svg")
    shown = "".join(ElementTree.parse(svg).getroot().itertext())
    assert r"LeNet-5, a$\nothing$b, C=2" in shown
    assert "$x$" in shown


def test_a_legend_of_long_names_is_not_wider_than_its_panels(tmp_path: Path) -> None:
    def shape(block: str) -> tuple[int, int]:
        entries, results = own(tmp_path, f'metric = "entropy"\nmethod = ["fedavg", "fedentopt"]\n{block}')
        write_figures(tmp_path, entries, results)
        with Image.open(tmp_path / "own.png") as picture:
            return picture.size

    width, height = shape("")
    wider, higher = shape("lr = [0.1, 0.2]\nmomentum = [0.8, 0.9]")  # eight lines
    assert wider < 1.3 * width
    assert higher > height + 200


def test_panels_that_were_not_run_have_no_marks_and_rounds_are_whole(tmp_path: Path) -> None:
    entries, results = own(tmp_path, 'metric = "accuracy"\nparticipation = [10, 20]\nmethod = "fedavg"')

    def moved(**fields: str) -> list[Comparison]:
        return [dataclasses.replace(entry_, cell=dataclasses.replace(entry_.cell, **fields)) for entry_ in entries]

    shown = [*entries, *moved(partition="iid"), *moved(model="vgg11")]  # vgg11 with iid is not there
    svg = next(path for path in write_figures(tmp_path / "figures", shown, results) if path.suffix == ".svg")
    words = [text.strip() for text in ElementTree.parse(svg).getroot().itertext()]
    assert words.count("not run") == 1
    assert words.count("20") == 3
    curves, results = own(tmp_path, 'metric = "entropy"\nmethod = "fedavg"')
    svg = next(path for path in write_figures(tmp_path / "figures", curves, results) if path.suffix == ".svg")
    marks = [text.strip() for text in ElementTree.parse(svg).getroot().itertext()]
    assert [mark for mark in marks if re.fullmatch(r"\d+(\.\d+)?", mark)][:5] == ["1", "2", "3", "4", "5"]


def test_remarks_that_are_no_text_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    remarks = tmp_path / "remarks.md"
    remarks.write_bytes("## Bemerkungen \xfcber".encode("latin-1"))
    page = tmp_path / "docs" / "RESULTS.md"
    with pytest.raises(InputError, match=f"{re.escape(str(remarks))}: is not text in UTF-8"):
        write_results_page(page, Reproduction(CELLS, CELLS, known()), tmp_path)
    assert not page.parent.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: {"finished": True}, "accuracy is missing"),
        (lambda whole: {k: v for k, v in whole.items() if k != "rounds_to"}, "rounds_to is missing"),
        (lambda whole: {k: v for k, v in whole.items() if k != "h_norm"}, "h_norm is missing"),
        (lambda whole: whole | {"rounds_to": [1]}, "rounds_to is \\[1\\]; accepted"),
        (lambda whole: whole | {"rounds_to": {"40": "soon"}}, "rounds_to 40 is 'soon'; accepted"),
        (lambda whole: whole | {"rounds": None}, "rounds is None; accepted: a whole number"),
        (lambda whole: whole | {"accuracy": "high"}, "accuracy is 'high'; accepted: a finite number or null"),
        (lambda whole: whole | {"accuracy": float("nan")}, "accuracy is nan; accepted: a finite number or null"),
    ],
)
def test_a_run_folder_with_an_incomplete_summary_is_refused_by_file_and_key(
    tmp_path: Path, change, message: str
) -> None:
    config = FEDAVG.config
    assert config is not None
    folder = tmp_path / config.run_id
    folder.mkdir()
    (folder / RUN).write_text(json.dumps({"config": config.to_dict(), "dataset": {"classes": ["a", "b"]}}))
    (folder / "rounds.csv").write_text(
        "round,accuracy,loss,worst_class_accuracy,class_accuracy,entropy,classes_covered,clients,trained,bytes_up,"
        "bytes_down,seconds\n"
    )
    whole = summarise([], rounds=500, num_classes=2, clients=100)
    (folder / SUMMARY).write_text(json.dumps(whole))
    assert Results(tmp_path).get(config, 0) is not None
    (folder / SUMMARY).write_text(json.dumps(change(whole)))
    with pytest.raises(InputError, match=f"{re.escape(str(folder / SUMMARY))}: {message}"):
        Results(tmp_path).get(config, 0)
    (folder / SUMMARY).write_text(json.dumps(whole))
    (folder / RUN).write_text(json.dumps({"config": config.to_dict()}))
    with pytest.raises(InputError, match=r"run\.json: the classes of the dataset are missing"):
        Results(tmp_path).get(config, 0)
