"""What README, guides and remarks say in figures, beside the results they say it of.

The tables of README and of the guide on lying clients are compared cell by cell. In prose every "mean ± deviation" has
to be that of some cell, and every "difference [low, high]" the interval between two cells of one setting. Which ones a
sentence means it says in words: a figure that new seeds have moved is found here, mostly, one that belongs to another
cell is not. Figures without deviation or interval, most of those in prose, are not compared with anything.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Set
from itertools import permutations
from pathlib import Path

import pytest

from fedentopt.results.statistics import Spread, paired_interval

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PROSE = (
    "README.md", "docs/reproducing.md", "docs/lying-clients.md", "results/paper/remarks.md", "results/audit/remarks.md",
)  # fmt: skip
NUMBER = r"[+−-]?\d+\.\d+"
SETTING = ("model", "dataset", "partition", "availability", "participation")
COLUMNS = [("cifar10", "dir:0.1"), ("cifar10", "classes:2"), ("cifar100", "dir:0.1"), ("cifar100", "classes:2")]
LIARS = "liars fedentopt liars=30% lie=uniform audit="
ROWS = {
    "random selection (FedAvg)": "table1 fedavg",
    "FedEntOpt": "table1 fedentopt",
    "FedEntOpt, noisy counts (ε = 0.5)": "table1 fedentopt-dp",
    "SCAFFOLD, random selection": "table1 scaffold",
    "FedLC, random selection": "table1 fedlc",
    "30 of 100 clients claim even labels": f"{LIARS}off",
    "the same with `--audit replace`": f"{LIARS}replace",
    "no reports at all (`--selector inferred`)": "inferred inferred",
}
MEANS = {  # of the guide: clients per round, and which cells
    "random selection": ("10", "table1 fedavg"),
    "FedEntOpt, nobody lies": ("10", "table1 fedentopt"),
    "30 of 100 claim even labels": ("10", f"{LIARS}off"),
    "the same, `replace`": ("10", f"{LIARS}replace"),
    "the same, `quarantine`": ("10", f"{LIARS}quarantine"),
    "no reports: `inferred`": ("10", "inferred inferred"),
    "four per round: random selection": ("4", "figure2 fedavg"),
    "four per round: FedEntOpt": ("4", "figure2 fedentopt"),
    "four per round: `inferred`": ("4", "inferred inferred"),
}
HEADS = {"LeNet-5, 5 seeds": ("lenet5", 5), "VGG-11, 3 seeds": ("vgg11", 3)}
"""README's tables of methods, by what stands above the first column: whose, and of how many seeds."""
DIFFERENCES = {
    "FedEntOpt − FedAvg [95 % interval]": ("table1 fedentopt", "table1 fedavg"),
}

Setting = tuple[str, ...]
Cells = dict[Setting, dict[str, dict[int, float]]]

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="results/ is not part of this copy")


@pytest.fixture(scope="module")
def cells() -> Cells:
    """Accuracies by setting, by table, method, buffer (where a table has several) and what is swept, and by seed."""
    found: Cells = {}
    for path in sorted([*RESULTS.glob("paper/*.csv"), *RESULTS.glob("audit/*.csv")]):
        if path.stem.endswith("_curves"):
            continue
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            buffer = row["buffer"] if path.stem in ("table6", "grid-buffer", "single-class") else ""
            name = " ".join(part for part in (path.stem, row["method"], buffer, row["swept"]) if part)
            own = found.setdefault(tuple(row[field] for field in SETTING), {}).setdefault(name, {})
            own[int(row["seed"])] = float(row["accuracy"] or "nan")
    return found


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def says(text: str, value: float) -> bool:
    """Whether this is the value, rounded to as many places as are written."""
    return abs(number(text) - value) < 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-4


def prose(page: str) -> str:
    """A page as running text, without its tables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return " ".join(" ".join(line for line in text.splitlines() if not line.startswith("|")).split())


def lines(page: str, labels: Set[str]) -> Iterator[tuple[str, list[str]]]:
    """The lines of a page's tables that begin with these labels; each has to be there."""
    seen = set()
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        label, *columns = [cell.strip() for cell in line.strip("|").split("|")]
        if label in labels:
            seen.add(label)
            yield label, columns
    assert seen == labels


def test_the_tables_of_readme(cells: Cells) -> None:
    model, usual = "", 0
    seen: dict[str, int] = {}
    for label, columns in lines("README.md", HEADS.keys() | ROWS.keys() | DIFFERENCES.keys()):
        seen[label] = seen.get(label, 0) + 1
        if label in HEADS:
            model, usual = HEADS[label]
            continue
        if not ROWS.get(label, "table1").startswith("table1"):  # of the table on lying clients, whose head is empty
            model, usual = HEADS["LeNet-5, 5 seeds"]
        for (dataset, partition), said in zip(COLUMNS, columns, strict=True):
            own = cells[model, dataset, partition, "", "10"]
            if label in ROWS:
                values = own[ROWS[label]]
                spread = Spread.of(values.values())
                true: tuple[float, ...] = (spread.mean, spread.std)
                few = re.findall(r"\((\d+) seeds\)", said)
                assert [int(one) for one in few] == ([] if len(values) == usual else [len(values)]), (label, said)
            else:
                gap = paired_interval(*(own[name] for name in DIFFERENCES[label]))
                assert gap is not None
                true = (gap.mean, gap.low, gap.high)
            written = re.findall(NUMBER, said)
            assert len(written) == len(true)
            assert all(map(says, written, true)), f"{label}, {model}, {dataset}, {partition}: {said}, but it is {true}"
    of_methods = {label for label in seen if label in DIFFERENCES or ROWS.get(label, "").startswith("table1")}
    assert {label: seen[label] for label in of_methods} == dict.fromkeys(of_methods, len(HEADS))


def test_the_table_of_the_guide_on_lying_clients(cells: Cells) -> None:
    for label, columns in lines("docs/lying-clients.md", MEANS.keys()):
        participation, name = MEANS[label]
        for (dataset, partition), said in zip(COLUMNS, columns, strict=True):
            mean = Spread.of(cells["lenet5", dataset, partition, "", participation][name].values()).mean
            assert says(said, mean), f"{label}, {dataset}, {partition}: {said}, but it is {mean}"


def test_the_table_of_runs_on_a_gpu_and_on_a_cpu() -> None:
    made: dict[tuple[str, ...], float] = {}
    for device in ("paper", "lenet5_cpu"):
        for row in csv.DictReader((RESULTS / device / "table1.csv").read_text(encoding="utf-8").splitlines()):
            if (row["model"], row["dataset"]) == ("lenet5", "cifar10"):
                made[device, row["partition"], row["method"], row["seed"]] = float(row["value"])
    columns = [(device, partition) for partition in ("dir:0.1", "classes:2") for device in ("paper", "lenet5_cpu")]
    for label, said in lines("docs/reproducing.md", {"FedNova, as in Table 1", "SCAFFOLD, as in Table 1"}):
        method = label.partition(",")[0].lower()
        for column, figures in zip(columns, said, strict=True):
            true = [made[*column, method, seed] for seed in ("0", "1")]
            assert all(map(says, figures.split(", "), true)), f"{label}, {column}: {figures}, but it is {true}"


@pytest.mark.parametrize("page", PROSE)
def test_means_in_prose_are_those_of_a_cell(cells: Cells, page: str) -> None:
    spreads = [Spread.of(own.values()) for setting in cells.values() for own in setting.values()]
    wrong = [
        f"{mean} ± {std}"
        for mean, std in re.findall(r"(\d+\.\d+) ± (\d+\.\d+)", prose(page))
        if not any(says(mean, spread.mean) and says(std, spread.std) for spread in spreads)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PROSE)
def test_intervals_in_prose_are_those_of_two_cells(cells: Cells, page: str) -> None:
    """Or stand so in a table, as those over several cells do."""
    intervals = [
        (gap.mean, gap.low, gap.high)
        for setting in cells.values()
        for ours, theirs in permutations(setting.values(), 2)
        if (gap := paired_interval(ours, theirs)) is not None
    ]
    tables = "".join(path.read_text(encoding="utf-8") for path in RESULTS.glob("*/tables/*.md"))
    wrong = [
        f"{mean} [{low}, {high}]"
        for mean, low, high in re.findall(rf"({NUMBER})(?: points)? \[({NUMBER}), ({NUMBER})\]", prose(page))
        if f"{mean} [{low}, {high}]" not in tables
        and not any(all(map(says, (mean, low, high), gap)) for gap in intervals)
    ]
    assert wrong == []
