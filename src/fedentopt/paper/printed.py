"""The figures the paper prints, from the files in `printed/`, under our names."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

MODELS = {
    "LeNet-5": "lenet5",
    "VGG-11": "vgg11",
    "EfficientNet-B0": "efficientnet-b0",
    "EfficientNet-B3": "efficientnet-b3",
}
DATASETS = {
    "CIFAR-10": "cifar10",
    "CINIC-10": "cinic10",
    "CIFAR-100": "cifar100",
    "PathMNIST": "pathmnist",
    "TissueMNIST": "tissuemnist",
    "Brain-Tumor MRI": "brain-tumor-mri",
}
PARTITIONS = {"Dir(0.1)": "dir:0.1", "C=2": "classes:2"}
FILES = {
    "table1": "table1_accuracy.csv",
    "table2": "table2_combinations.csv",
    "table3": "table3_availability.csv",
    "table4": "table4_medical.csv",
    "table5": "table5_communication.csv",
    "table6": "table6_buffer.csv",
}


class Place(NamedTuple):
    """Where a figure stands; None where the table has no such column."""

    table: str
    metric: str
    model: str
    dataset: str
    partition: str | None
    method: str | None
    availability: str | None
    buffer: int | None


class Printed(NamedTuple):
    """A printed figure; the standard deviation only where one is printed."""

    mean: float
    std: float | None


def method_name(printed: str) -> str:
    """`FedEntOpt (DP)` is fedentopt-dp, `FedProx + FedEntOpt` is fedprox+fedentopt."""
    return printed.lower().replace(" (dp)", "-dp").replace(" ", "")


def table_rows(table: str) -> list[dict[str, str]]:
    """The rows of one printed table as they stand in its file."""
    text = files(__package__).joinpath("printed", FILES[table]).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def printed_figures() -> dict[Place, Printed]:
    """Every figure of the six tables."""
    figures: dict[Place, Printed] = {}
    for table in FILES:
        for row in table_rows(table):
            for metric in ("accuracy", "accuracy_change", "h_norm", "model_mb"):
                mean = row.get(f"{metric}_mean", row.get(metric))
                if mean is None:
                    continue
                std = row.get(f"{metric}_std")
                place = Place(
                    table=table,
                    metric=metric,
                    model=MODELS[row["model"]] if "model" in row else "lenet5",  # table 6 has no such column
                    dataset=DATASETS[row["dataset"]],
                    partition=PARTITIONS[row["partition"]] if "partition" in row else None,
                    method=_method(table, row),
                    availability=row.get("simulation"),
                    buffer=int(row["buffer_percent"]) if "buffer_percent" in row else None,
                )
                figures[place] = Printed(float(mean), float(std) if std else None)
    return figures


def printed_accuracy(table: str, model: str, dataset: str, partition: str | None, method: str | None) -> float | None:
    """The mean accuracy printed there; None where there is none."""
    figure = printed_figures().get(Place(table, "accuracy", model, dataset, partition, method, None, None))
    return None if figure is None else figure.mean


def _method(table: str, row: dict[str, str]) -> str | None:
    if "method" in row:
        return method_name(row["method"])
    return "fedentopt" if table == "table6" else None
