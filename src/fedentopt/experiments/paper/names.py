"""How tables and figures write the names of methods, models, data sets and partitions: as the paper does."""

from __future__ import annotations

from fedentopt.experiments.paper.printed import DATASETS, MODELS, PARTITIONS

METHODS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
    "fedconcat": "FedConcat",
    "fedlc": "FedLC",
    "fedrs": "FedRS",
    "kl": "KL",
    "fedentropy": "FedEntropy",
    "fedentopt": "FedEntOpt",
}
TABLES = {
    "table1": "Table 1: baselines and FedEntOpt",
    "table2": "Table 2: combinations with FedEntOpt",
    "table3": "Table 3: dropout and straggling",
    "table4": "Table 4: medical images",
    "table5": "Table 5: communication",
    "table6": "Table 6: buffer size and selection diversity",
    "figure1": "Figure 1: entropy of the cohort's labels",
    "figure2": "Figure 2: participation",
    "grid-mu": "Grid: FedProx's proximal weight",
    "grid-weight-decay": "Grid: weight decay",
    "grid-buffer": "Grid: buffer size",
    "single-class": "Limit: clients with a single class",
}


def method(name: str) -> str:
    """`fedprox+fedentopt-dp` as FedProx + FedEntOpt (DP)."""
    plain = name.removesuffix("-dp")
    written = " + ".join(METHODS.get(part, part) for part in plain.split("+"))
    return f"{written} (DP)" if plain != name else written


def model(name: str) -> str:
    """`lenet5` as LeNet-5."""
    return _written(MODELS, name)


def dataset(name: str) -> str:
    """`cifar10` as CIFAR-10."""
    return _written(DATASETS, name)


def partition(name: str) -> str:
    """`dir:0.1` as Dir(0.1), `classes:2` as C=2."""
    if name.startswith("classes:"):
        return f"C={name.removeprefix('classes:')}"
    if name.startswith("dir:"):
        return f"Dir({name.removeprefix('dir:')})"
    return _written(PARTITIONS, name)


def table(name: str) -> str:
    """A table's title."""
    return TABLES.get(name, name)


def _written(names: dict[str, str], name: str) -> str:
    return {ours: printed for printed, ours in names.items()}.get(name, name)
