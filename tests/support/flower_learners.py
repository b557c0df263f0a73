"""A federation whose clients learn: softmax regression on points around a centre per class, by SGD in NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.flower import LabelAware, client_id, label_report
from flower_fake_grid import CLASSES, FakeGrid, Node, says

FEATURES, LR, BATCH, EPOCHS = 8, 0.1, 8, 2
LOCAL = {"lr": LR, "batch_size": BATCH, "epochs": EPOCHS}
CENTRES = np.random.default_rng(7).normal(size=(CLASSES, FEATURES))


def start_model() -> ArrayRecord:
    arrays = {"fc.weight": np.zeros((CLASSES, FEATURES)), "fc.bias": np.zeros(CLASSES)}
    return ArrayRecord({name: Array(array.astype(np.float32)) for name, array in arrays.items()})


def skewed_labels(clients: int, samples: int = 48, seed: int = 3) -> list[np.ndarray]:
    """Labels of clients that hold one or two classes, every class with somebody."""
    rng = np.random.default_rng(seed)
    rows = []
    for client in range(clients):
        other = int(rng.integers(CLASSES))
        rows.append(np.where(rng.random(samples) < 0.7, client % CLASSES, other))
    return rows


def fit(weight: np.ndarray, bias: np.ndarray, labels: np.ndarray, seed: int, epochs: int) -> None:
    """Train in place."""
    rng = np.random.default_rng(seed)
    points = CENTRES[labels] + rng.normal(size=(len(labels), FEATURES))
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for first in range(0, len(labels), BATCH):
            chosen = order[first : first + BATCH]
            logits = points[chosen] @ weight.T + bias
            wrong = np.exp(logits - logits.max(axis=1, keepdims=True))
            wrong /= wrong.sum(axis=1, keepdims=True)
            wrong[np.arange(len(chosen)), labels[chosen]] -= 1
            weight -= LR * wrong.T @ points[chosen] / len(chosen)
            bias -= LR * wrong.mean(axis=0)


def learners(
    labels: list[np.ndarray],
    *,
    liars: Iterable[int] = (),
    named: bool = True,
    metrics: dict[str, Any] | None = None,
    follows: bool = False,
    first: int = 1000,
    step: int = 17,
) -> FakeGrid:
    """Clients 0, 1, ... with these labels. `liars` claim as many samples of every class; `named` ones give their
    client id when they train; `metrics` go into every reply; those that `follow` do a census as it is asked."""
    grid = FakeGrid({first - step * k: Node(k, row) for k, row in enumerate(labels)}, CLASSES)
    app = ClientApp()
    app.query("label_counts")(
        label_report(lambda context: grid.nodes[int(context.node_config["data"])].labels, CLASSES)
    )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own = grid.nodes[int(context.node_config["data"])].labels
        told = message.content.config_records["config"]
        census = follows and "census" in told
        arrays = {name: array.numpy().astype(np.float64) for name, array in message.content["arrays"].items()}
        seed = 100 * int(told["server-round"]) + int(context.node_config["rank"])
        fit(arrays["fc.weight"], arrays["fc.bias"], own, seed, int(told["local-epochs"]) if census else EPOCHS)
        about = ConfigRecord({"client-id": client_id(context)} if named else {})
        if census:
            about["census"] = 1
            arrays = {"fc.bias": arrays["fc.bias"], "fc.weight": arrays["fc.weight"]}
            grid.alone += 1  # type: ignore[attr-defined]
        record = ArrayRecord({name: Array(array.astype(np.float32)) for name, array in arrays.items()})
        numbers = MetricRecord({"num-examples": len(own), **(metrics or {})})
        return Message(RecordDict({"arrays": record, "metrics": numbers, "client": about}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 0.5})}), reply_to=message)

    grid._app = app
    grid.alone = 0  # type: ignore[attr-defined]  # replies with the last layer only
    for node in grid.nodes.values():
        if node.client in set(liars):
            node.query = says(node.client, [len(node.labels) // CLASSES] * CLASSES)
    return grid


def picked(strategy: LabelAware) -> list[tuple[Any, ...]]:
    """The cohorts of a strategy's rounds."""
    return [entry.cohort.clients for entry in strategy.history]


def node_of(grid: FakeGrid, client: int) -> int:
    """The node that this client is."""
    return next(number for number, node in grid.nodes.items() if node.client == client)
