"""Table 5: what travels. Exact sizes of our models beside the printed ones; nothing is trained for it.

The paper counts 4 bytes per parameter, and 4·C·K bytes for the label counts of all clients, sent once. What a client
really sends also holds the running statistics of its normalisation layers, which are not parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fedentopt.paper.cells import Cell
from fedentopt.paper.printed import DATASETS, table_rows


@dataclass(frozen=True)
class Size:
    """Bytes of one model's parameters, of all that a client sends, and of the label counts of all clients."""

    parameters: int
    state: int
    labels: int
    classes: int
    clients: int


def size(cell: Cell) -> Size | None:
    """Sizes for a cell's model and data set; None where there is no torch to build the model with.

    Only the paper's data sets have one: a model's size hangs on the number of classes.
    """
    shape = shapes().get(cell.dataset)
    return _size(cell.model, *shape) if shape else None


def shapes() -> dict[str, tuple[int, int]]:
    """Classes and clients of the paper's data sets."""
    return {DATASETS[row["dataset"]]: (int(row["classes"]), int(row["clients"])) for row in table_rows("table5")}


@cache
def _size(model: str, classes: int, clients: int) -> Size | None:
    try:
        from fedentopt.models import build
    except ImportError:
        return None
    network = build(model, classes, seed=0)
    return Size(
        parameters=4 * sum(tensor.numel() for tensor in network.parameters()),
        state=sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values()),
        labels=4 * classes * clients,
        classes=classes,
        clients=clients,
    )
