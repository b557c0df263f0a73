"""The list of cells equals the paper's, and every cell's settings are those of its text."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from fedentopt.errors import InputError
from fedentopt.paper.blocks import cells_from_file, paper_cells
from fedentopt.paper.cells import Cell, distinct_runs, select
from fedentopt.paper.measures import Results
from fedentopt.paper.open_choices import OPEN_CHOICES
from fedentopt.paper.reproduction import Reproduction
from fedentopt.settings import amount
from fedentopt.simulation.config import RunConfig

CELLS = paper_cells()
TABLES = {
    "table1": "table1_accuracy.csv",
    "table2": "table2_combinations.csv",
    "table3": "table3_availability.csv",
    "table4": "table4_medical.csv",
    "table5": "table5_communication.csv",
    "table6": "table6_buffer.csv",
}
# Written out by hand here, so that a wrong name in the package does not hide itself.
OURS = {
    "LeNet-5": "lenet5", "VGG-11": "vgg11", "EfficientNet-B0": "efficientnet-b0", "EfficientNet-B3": "efficientnet-b3",
    "CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "CINIC-10": "cinic10", "PathMNIST": "pathmnist",
    "TissueMNIST": "tissuemnist", "Brain-Tumor MRI": "brain-tumor-mri", "Dir(0.1)": "dir:0.1", "C=2": "classes:2",
    "FedAvg": "fedavg", "FedProx": "fedprox", "FedNova": "fednova", "SCAFFOLD": "scaffold", "FedConcat": "fedconcat",
    "FedLC": "fedlc", "FedRS": "fedrs", "KL": "kl", "FedEntOpt": "fedentopt", "FedEntOpt (DP)": "fedentopt-dp",
    "FedProx + FedEntOpt": "fedprox+fedentopt", "FedNova + FedEntOpt": "fednova+fedentopt",
    "SCAFFOLD + FedEntOpt": "scaffold+fedentopt", "FedRS + FedEntOpt": "fedrs+fedentopt",
    "FedLC + FedEntOpt": "fedlc+fedentopt",
}  # fmt: skip


def buffer_size(config: RunConfig) -> int:
    """Clients that the run's selector keeps out."""
    return amount(config.of("selector")["buffer"], config.clients, "buffer")


def of(table: str) -> list[Cell]:
    return [cell for cell in CELLS if cell.table == table]


def one(table: str, **fields: object) -> Cell:
    found = [cell for cell in of(table) if all(getattr(cell, name) == value for name, value in fields.items())]
    assert len(found) == 1, (table, fields, found)
    return found[0]


def config(table: str, **fields: object) -> RunConfig:
    found = one(table, **fields).config
    assert found is not None
    return found


def printed_rows(table: str) -> list[dict[str, str]]:
    text = files("fedentopt.paper").joinpath("printed", TABLES[table]).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_the_tables_have_320_cells_and_the_figures_come_on_top() -> None:
    counts = Counter(cell.table for cell in CELLS if not cell.extra)
    tables = {name: count for name, count in counts.items() if name.startswith("table")}
    assert tables == {"table1": 120, "table2": 60, "table3": 48, "table4": 48, "table5": 12, "table6": 32}
    assert sum(tables.values()) == 320
    assert counts["figure1"] == 3
    assert counts["figure2"] == 6 * 10 * 2 * 2 * 2
    assert len({cell.identity for cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize("table", TABLES)
def test_every_printed_figure_has_its_cell_and_every_cell_its_figure(table: str) -> None:
    expected = set()
    for row in printed_rows(table):
        place = (
            OURS[row["model"]] if "model" in row else "lenet5",
            OURS[row["dataset"]],
            OURS[row["partition"]] if "partition" in row else None,
            OURS[row["method"]] if "method" in row else ("fedentopt" if table == "table6" else None),
            row.get("simulation"),
        )
        buffer = int(row["buffer_percent"]) if "buffer_percent" in row else None
        for metric, mean, std in (
            ("accuracy", "accuracy_mean", "accuracy_std"),
            ("accuracy_change", "accuracy_change", None),
            ("h_norm", "h_norm_mean", "h_norm_std"),
            ("model_mb", "model_mb", None),
        ):
            if mean in row:
                spread = float(row[std]) if std else None
                expected.add((*place, buffer, metric, float(row[mean]), spread))
    found = {
        (
            cell.model, cell.dataset, cell.partition, cell.method, cell.availability,
            cell.buffer if table == "table6" else None, cell.metric, cell.paper, cell.paper_std,
        )
        for cell in of(table)
    }  # fmt: skip
    assert found == expected


def test_figure_cells_are_the_ones_of_the_text() -> None:
    assert {cell.method for cell in of("figure1")} == {"fedavg", "fedentropy", "fedentopt"}
    assert {(cell.dataset, cell.partition, cell.metric) for cell in of("figure1")} == {
        ("cifar10", "classes:2", "entropy")
    }
    assert {cell.participation for cell in of("figure2")} == {4, 5, 6, 7, 8, 9}
    assert {cell.method for cell in of("figure2")} == {cell.method for cell in of("table1")}
    assert {(cell.dataset, cell.partition) for cell in of("figure2")} == {
        (dataset, partition) for dataset in ("cifar10", "cifar100") for partition in ("dir:0.1", "classes:2")
    }


def test_common_settings_are_the_ones_of_the_text() -> None:
    for cell in CELLS:
        for run in (cell.config, cell.baseline, cell.reference):
            if run is None:
                continue
            decay = dict(cell.swept).get("lr_decay", 0.98)  # one study asks what another one does
            assert decay == 0.98 or cell.table in OPEN_CHOICES
            assert (run.epochs, run.batch_size, run.momentum, run.lr_decay) == (5, 64, 0.9, decay)
            assert (run.flip, run.grayscale, run.jitter) == (0.5, 0.1, 0.2)
            assert run.evaluate_every == 5  # one value for all, or cells would not share runs
            assert run.model == cell.model
            assert run.dataset == cell.dataset
            assert run.partition == cell.partition


@pytest.mark.parametrize(
    ("dataset", "clients", "cohort", "rounds", "lr"),
    [
        ("cifar10", 100, 10, 500, 0.01),
        ("cifar100", 100, 10, 500, 0.01),
        ("cinic10", 200, 20, 500, 0.01),
        ("pathmnist", 100, 5, 200, 0.001),
        ("tissuemnist", 100, 5, 200, 0.001),
        ("brain-tumor-mri", 40, 2, 200, 0.001),
    ],
)
def test_settings_of_a_data_set(dataset: str, clients: int, cohort: int, rounds: int, lr: float) -> None:
    cells = [
        cell for cell in CELLS if cell.dataset == dataset and cell.table in ("table1", "table2", "table3", "table4")
    ]
    assert cells
    for cell in cells:
        assert cell.config is not None
        found = (cell.config.clients, cell.config.cohort_size, cell.config.rounds, cell.config.lr)
        assert found == (clients, cohort, rounds, lr)
        assert cell.full_rounds == rounds


def test_settings_of_models_partitions_and_methods() -> None:
    decay = {(cell.model, cell.config.weight_decay) for cell in CELLS if cell.config and not cell.extra}
    assert decay == {("lenet5", 5e-4), ("vgg11", 1e-3), ("efficientnet-b0", 5e-4), ("efficientnet-b3", 5e-4)}
    row = {"model": "lenet5", "dataset": "cifar10"}
    for partition, buffer in (("dir:0.1", 50), ("classes:2", 70)):
        own = config("table1", **row, partition=partition, method="fedentopt")
        assert (buffer_size(own), own.selector, own.algorithm, own.epsilon) == (buffer, "fedentopt", "fedavg", None)
        private = config("table1", **row, partition=partition, method="fedentopt-dp")
        assert private == dataclasses.replace(own, epsilon=0.5)
    cinic = config("table1", model="vgg11", dataset="cinic10", partition="classes:2", method="fedentopt")
    assert buffer_size(cinic) == 140
    assert buffer_size(config("table4", model="efficientnet-b3", dataset="brain-tumor-mri", method="fedentopt")) == 20
    assert config("table1", **row, partition="dir:0.1", method="fedprox").of("algorithm")["mu"] == 1e-4
    assert config("table1", **row, partition="dir:0.1", method="fedrs").of("algorithm")["alpha"] == 0.5
    assert config("table1", **row, partition="dir:0.1", method="fedlc").of("algorithm")["tau"] == 1.0
    assert config("table1", **row, partition="dir:0.1", method="fedconcat").of("algorithm")["clusters"] == 5
    assert config("table1", **row, partition="dir:0.1", method="kl").selector == "kl"
    lost = config("table3", **row, partition="dir:0.1", method="fedprox", availability="dropout")
    assert (lost.dropout, lost.stragglers, lost.algorithm) == (0.3, 0.0, "fedprox")
    slow = config("table3", **row, partition="dir:0.1", method="fedentopt", availability="straggling")
    assert (slow.dropout, slow.stragglers, buffer_size(slow)) == (0.0, 0.5, 50)
    assert config("figure1", method="fedentropy").algorithm == "fedentropy"
    assert {cell.config.rounds for cell in of("figure1") if cell.config} == {100}
    low = config(
        "figure2", model="vgg11", dataset="cifar100", partition="classes:2", method="fedentopt", participation=4
    )
    assert (low.cohort_size, buffer_size(low), low.weight_decay) == (4, 70, 1e-3)


def test_five_seeds_for_lenet5_and_three_elsewhere() -> None:
    for study in OPEN_CHOICES:  # of single changes
        assert {cell.seeds for cell in of(study)} == {(0, 1)}
    assert {(cell.model, cell.seeds) for cell in CELLS if cell.config and cell.table not in OPEN_CHOICES} == {
        ("lenet5", (0, 1, 2, 3, 4)),
        ("vgg11", (0, 1, 2)),
        ("efficientnet-b0", (0, 1, 2)),
        ("efficientnet-b3", (0, 1, 2)),
        ("efficientnet-lite0", (0, 1, 2)),
    }
    assert all(not cell.seeds for cell in of("table5"))


def test_cells_that_need_the_same_run_share_it() -> None:
    table1 = {cell.config for cell in of("table1")}
    assert config("table6", dataset="cifar10", partition="dir:0.1", buffer=50, metric="h_norm") in table1
    for cell in of("table6"):
        twin = one("table6", **{**_fields(cell), "metric": "accuracy" if cell.metric == "h_norm" else "h_norm"})
        assert twin.config == cell.config
    for cell in of("table2"):
        assert cell.baseline in table1
        assert cell.baseline is not None
        assert cell.config is not None
        assert cell.baseline.selector == "random"
        assert cell.baseline.algorithm == cell.config.algorithm
    # FedAvg is what everything is compared with; it must be a run that some cell has anyway.
    runs = {cell.config for cell in CELLS if not cell.extra}
    assert {cell.reference for cell in CELLS if cell.config and not cell.extra} <= runs
    grid = [cell for cell in CELLS if cell.table == "grid-mu" and dict(cell.swept)["mu"] == 1e-4]
    assert len(grid) == 2
    assert {cell.config for cell in grid} <= table1
    # 120 + 60 of tables 1 and 2, 48 + 48, 14 of table 6 that table 1 lacks, 3 + 480 of the figures.
    distinct = {cell.config for cell in CELLS if cell.config and not cell.extra}
    assert len(distinct) == 120 + 60 + 48 + 48 + 14 + 3 + 480
    assert len(distinct_runs(of("table6"))) == 16 * 5


def _fields(cell: Cell) -> dict[str, object]:
    names = ("model", "dataset", "partition", "method", "buffer", "metric")
    return {name: getattr(cell, name) for name in names}


def test_cutting_keeps_the_paper_rounds_in_mind() -> None:
    cell = one("table2", model="lenet5", dataset="cifar10", partition="dir:0.1", method="fedprox+fedentopt")
    short = cell.cut(7)
    assert {run.rounds for run in short.runs()} == {7}
    assert short.shortened
    assert not cell.shortened
    assert not one("figure1", method="fedavg").cut(500).shortened  # 100 rounds are all it has


def test_all_cells_of_a_seed_come_before_those_of_the_next() -> None:
    cells = select(CELLS, "table3,table2", model=["vgg11"], dataset=["cifar10"])
    runs = Reproduction(CELLS, cells, Results(None, {})).unfinished()
    assert [run.seed for run in runs] == sorted([0, 1, 2] * (12 + 20))
    first = [run for run in runs if run.seed == 0]
    assert [run.dropout > 0 or run.stragglers > 0 for run in first] == [True] * 12 + [False] * 20  # tables as named


def test_filters_choose_and_refuse() -> None:
    chosen = select(CELLS, "table1", model=["lenet5"], partition=["dir:0.1"], method=["fedavg", "kl"])
    assert len(chosen) == 3 * 2
    assert {cell.table for cell in select(CELLS, "all")} == {*TABLES, "figure1", "figure2"}
    assert {cell.table for cell in select(CELLS, "single-class")} == {"single-class"}
    both = select(CELLS, "table3, table2,table3")  # in this order, each cell once
    assert both == [*select(CELLS, "table3"), *select(CELLS, "table2")]
    assert select(CELLS, "all,table2,grid-mu") == [*select(CELLS, "all"), *select(CELLS, "grid-mu")]
    with pytest.raises(InputError, match="'table7' is unknown; accepted: table1"):
        select(CELLS, "table1,table7")
    with pytest.raises(InputError, match="'' is unknown; accepted: table1"):
        select(CELLS, "table1,")
    with pytest.raises(InputError, match="'table7' is unknown; accepted: table1"):
        select(CELLS, "table7")
    with pytest.raises(InputError, match=r"model: no cell of table4 has 'lenet5'; accepted: efficientnet-b0"):
        select(CELLS, "table4", model=["lenet5"])
    extras = [cell for cell in CELLS if cell.extra]
    with pytest.raises(InputError, match="all: all cells are extra, which it leaves out; accepted: grid-mu, "):
        select(extras, "all")
    with pytest.raises(InputError, match="no cell of all has all of: model lenet5, dataset pathmnist"):
        select(CELLS, "all", model=["lenet5"], dataset=["pathmnist"])


OWN = """
[settings]
clients = 10
participation = 30
rounds = 6
seeds = [3, 5]

[dataset.digits]
lr = 0.1

[[cells]]
table = "mine"
metric = ["accuracy", "h_norm"]
model = "lenet5"
dataset = "digits"
partition = ["dir:0.1", "iid"]
method = ["fedavg", "fedprox+fedentopt"]
mu = [0.5, 1.0]
"""


def test_a_file_of_ones_own_stands_on_the_papers_settings(tmp_path: Path) -> None:
    path = tmp_path / "cells.toml"
    path.write_text(OWN)
    cells = cells_from_file(path)
    assert len(cells) == 2 * 2 * 2 * 2
    last = cells[-1]
    assert last.config is not None
    assert (last.config.clients, last.config.cohort_size, last.config.rounds, last.config.lr) == (10, 3, 6, 0.1)
    assert (last.config.momentum, last.config.lr_decay, last.config.weight_decay) == (0.9, 0.98, 5e-4)
    assert last.config.of("algorithm")["mu"] == 1.0
    assert (last.participation, last.buffer, last.seeds, last.paper) == (30, 50, (3, 5), None)
    dirichlet = next(c for c in cells if c.partition == "dir:0.1" and c.config and c.config.selector == "fedentopt")
    assert dirichlet.config is not None
    assert buffer_size(dirichlet.config) == 5  # 50 % for dir:0.1, as in the paper
    # FedAvg looks at no mu: its two cells are one run.
    fedavg = {c.config for c in cells if c.method == "fedavg" and c.partition == "iid"}
    assert len(fedavg) == 1
    assert last.reference in fedavg


@pytest.mark.parametrize(
    ("cell", "section"), [("dir:0.10", "dir:0.1"), ("dir:0.1", "dir:.10"), ("dir:1e-1", "dir:0.1")]
)
def test_a_partitions_section_is_read_whatever_it_is_spelt_like(cell: str, section: str, tmp_path: Path) -> None:
    path = tmp_path / "cells.toml"
    path.write_text(OWN.replace('"dir:0.1"', f'"{cell}"') + f'[partition."{section}"]\nweight_decay = 0.002\n')
    cells = [found for found in cells_from_file(path) if found.partition != "iid"]
    assert {found.partition for found in cells} == {"dir:0.1"}
    assert select(cells_from_file(path), "mine", partition=[cell]) == cells
    assert {found.config and found.config.weight_decay for found in cells} == {0.002}
    own = next(found.config for found in cells if found.config and found.config.selector == "fedentopt")
    assert buffer_size(own) == 5  # the paper's own section about it is read too


def test_sections_that_cells_read_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "cells.toml"
    sections = ("method.fedprox", "method.fedentopt", 'method."fedprox+fedentopt"', "method.fedavg", "partition.iid")
    named = (*sections, "model.lenet5", "dataset.digits", "availability.asleep")
    text = OWN.replace("mu = [0.5, 1.0]", 'availability = "asleep"').replace("[dataset.digits]\nlr = 0.1\n", "")
    text = text.replace('method = ["fedavg", "fedprox+fedentopt"]', 'method = "fedprox+fedentopt"')
    path.write_text(text + "".join(f"[{name}]\nlr = 0.{at}\n" for at, name in enumerate(named, 1)))
    assert {cell.config and cell.config.lr for cell in cells_from_file(path)} == {0.8}  # availability comes last


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[cells]\n", "not valid TOML"),
        ("[settings]\nrounds = 3\n", "has no \\[\\[cells\\]\\] block"),
        (OWN.replace("[settings]", "[sttings]"), "\\[sttings\\] is unknown; accepted: settings"),
        (OWN.replace("[dataset.digits]\nlr = 0.1", "[dataset]\nlr = 0.1"), "dataset is not a section"),
        (
            OWN + "[method.fedprx]\nmu = 0.1\n",
            r"\[method.fedprx\] is read by no cell; did you mean fedprox\? accepted: fedavg, fedentopt, fedprox, "
            r"fedprox\+fedentopt$",
        ),
        (OWN + "[dataset.digit]\nlr = 0.2\n", r"\[dataset.digit\] is read by no cell; did you mean digits\?"),
        (OWN + "[model.vgg11]\nlr = 0.2\n", r"\[model.vgg11\] is read by no cell; accepted: lenet5$"),
        (OWN + '[partition."dir:0.20"]\nlr = 0.2\n', r"\[partition.dir:0.20\] is read .* accepted: dir:0.1, iid$"),
        (
            OWN + '[partition."dir:0.10"]\nlr = 0.2\n[partition."dir:1e-1"]\nlr = 0.3\n',
            r"\[partition.dir:1e-1\] and \[partition.dir:0.10\] are the same; accepted: one of them$",
        ),
        (OWN.replace('"dir:0.1"', '"dir:0.1", "dir:0.10"'), "names a cell that is already there: .*dir:0.1"),
        (
            OWN + "[availability.drop]\ndropout = 0.2\n",
            r"\[availability.drop\] is read by no cell; accepted: no \[availability.NAME\]$",
        ),
        (OWN.replace('metric = ["accuracy", "h_norm"]', ""), "block 1: metric is missing"),
        (OWN.replace('"h_norm"', '"hnorm"'), "block 1: metric: 'hnorm' is unknown; accepted: accuracy"),
        (OWN.replace('partition = ["dir:0.1", "iid"]', ""), "block 1: partition is missing"),
        (OWN.replace('"iid"', '"dir:0.1"'), "block 1: names a cell that is already there: mine"),
        (OWN.replace('"iid"', '"iid:3"'), "block 1: .*iid:3"),
        (OWN.replace('"fedavg"', '"fedwhat"'), "block 1: method: 'fedwhat' is unknown"),
        (OWN.replace("mu = [0.5, 1.0]", "mu = [0.5, -1.0]"), "block 1: mu: -1.0 is out of range"),
        (OWN.replace("mu = [0.5, 1.0]", "mue = 1.0"), "block 1: mue: unknown setting"),
        (OWN.replace("seeds = [3, 5]", "seeds = [3, 3]"), "seeds: \\[3, 3\\] cannot be used"),
        (OWN.replace("seeds = [3, 5]", "seeds = 0"), "seeds: 0 cannot be used"),
        (OWN.replace("participation = 30", 'participation = "30%"'), "participation: '30%' is not a number"),
        (OWN.replace("mu = [0.5, 1.0]", 'availability = "sleepy"'), "availability: 'sleepy' has no section"),
        (OWN.replace('["accuracy", "h_norm"]', '"accuracy_change"'), "'fedavg' has no baseline to change from"),
        (OWN.replace('["accuracy", "h_norm"]', '"validation_accuracy"'), "block 1: validation: nothing is held out"),
        (OWN.replace('model = "lenet5"', "model = 5"), "block 1: model: 5 is not a name"),
        (OWN.replace('model = "lenet5"', "model = []"), "block 1: model: the list is empty"),
        (OWN + 'paper = "x"\n', "block 1: paper: 'x' cannot be used; accepted: a finite number"),
        (OWN + "paper = [50.0, 51.0]\n", "block 1: paper: \\[50.0, 51.0\\] cannot be used; accepted: a finite number"),
        (OWN + "paper = nan\n", "block 1: paper: nan cannot be used; accepted: a finite number"),
        (OWN + "paper = -inf\n", "block 1: paper: -inf cannot be used; accepted: a finite number"),
        (OWN + "paper = true\n", "block 1: paper: True cannot be used; accepted: a finite number"),
        (OWN + f"paper = 1{'0' * 400}\n", "block 1: paper: 10+ cannot be used; accepted: a finite number"),
        (OWN + f"paper = 1{'0' * 5000}\n", "not valid TOML"),
        (OWN + 'extra = "no"\n', "block 1: extra: 'no' cannot be used; accepted: true or false"),
        (OWN.replace("seeds = [3, 5]", "seeds = 100000000"), "seeds: 100000000 are too many; accepted: at most 1000"),
        (OWN.replace("seeds = [3, 5]", f"seeds = {list(range(1001))}"), "seeds: a list of 1001 are too many"),
        (OWN.replace("seeds = [3, 5]", f"seeds = [1{'0' * 400}]"), "seeds: .* cannot be used"),
        *(
            (OWN.replace('"mine"', f"'{name}'"), f"table: '{re.escape(name)}' cannot be used; accepted: letters")
            for name in ("", "x_curves", "../esc", "a/b", "a b", "-a", "_a", "a.b", "ä", "all", "rounds-to-target")
        ),
        (OWN.replace("mu = [0.5, 1.0]", "buffer = {a = 1}"), "block 1: buffer: {'a': 1} is not a number"),
        (OWN.replace("mu = [0.5, 1.0]", "participation = [[1]]"), "block 1: participation: \\[1\\] is not a number"),
        (
            OWN.replace("mu = [0.5, 1.0]", "fedlc_tau = [[1]]"),
            "block 1: fedlc_tau: \\[1\\] cannot be used; accepted: a sin",
        ),
        (OWN.replace('["accuracy", "h_norm"]', '"model_mb"').replace("mu =", "mue ="), "block 1: mue: unknown setting"),
        *(
            (OWN.replace("mu = [0.5, 1.0]", f"{name} = 1"), f"block 1: {name}: cannot be set here; accepted: {word}")
            for name, word in (("seed", "seeds"), ("algorithm", "method"), ("selector", "method"))
        ),
        (OWN.replace("rounds = ", "seed = 1\nrounds = "), "\\[settings\\]: seed: cannot be set here; accepted: seeds"),
        (
            OWN.replace("[dataset.digits]", '[dataset.digits]\nmodel = "vgg11"'),
            "\\[dataset\\]: model: cannot be set here",
        ),
        (
            OWN.replace("mu = [0.5, 1.0]", "cohort = 5\nparticipation = 5"),
            "block 1: cohort: says the same as participation",
        ),
        *(
            (OWN.replace("mu = [0.5, 1.0]", given), "block 1: fedlc_tau: fedavg does not look at it; accepted: .*fedlc")
            for given in ("fedlc_tau = 0.5", "fedlc_tau = [0.5, 1.0]")
        ),
        (OWN.replace('"mine"', r'"mine\n"'), "block 1: table: 'mine.*' cannot be used"),
        (OWN.replace('"mine"', "5"), "block 1: table: 5 cannot be used"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_block(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cells.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as refusal:
        cells_from_file(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "block", "clients"),
    [
        ("", "cohort = 5", [5]),
        ("", "cohort = [5, 6]", [5, 6]),
        ("[settings]\ncohort = 5", "", [5]),
        ("[settings]\ncohort = 5", "participation = 7", [7]),
        ("[settings]\ncohort = 5\n[dataset.cifar10]\nparticipation = 8", "", [8]),
    ],
)
def test_a_number_of_clients_takes_the_place_of_the_papers_share(
    tmp_path: Path, settings: str, block: str, clients: list[int]
) -> None:
    path = tmp_path / "cells.toml"
    cell = 'table = "t"\nmetric = "accuracy"\nmodel = "lenet5"\ndataset = "cifar10"\npartition = "iid"'
    path.write_text(f'{settings}\n[[cells]]\n{cell}\nmethod = "fedentopt"\n{block}\n')
    cells = cells_from_file(path)
    assert [cell.config.cohort_size for cell in cells if cell.config] == clients
    assert [cell.participation for cell in cells] == clients  # of a hundred
    assert [cell.reference.cohort_size for cell in cells if cell.reference] == clients


@pytest.mark.parametrize("line", ["paper = 50", "paper = -0.5", "seeds = 1000"])
def test_numbers_within_bounds_are_taken(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cells.toml"
    path.write_text(OWN + line + "\n")
    cell = cells_from_file(path)[0]
    assert cell.paper in (None, 50, -0.5)
    assert len(cell.seeds) in (2, 1000)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        cells_from_file(tmp_path / "none.toml")
    binary = tmp_path / "cells.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not text"):
        cells_from_file(binary)
