"""A node's data: its own, or its share of the data set that the app names.

Node config `data` is the path of an .npz file or of a folder of class folders on the node (its training split is
used). Such a node's classes are matched by name with the run config's `class-names`, so that a node which lacks a
class still numbers the others as everybody does. Without `data` the node is one of the app's `clients` shares.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from flwr.app import Context

from fedentopt.datasets import Dataset, load
from fedentopt.errors import InputError
from fedentopt.flower import client_id
from fedentopt.partition import partition
from fedentopt.simulation.config import RunConfig
from fedentopt_app.settings import run_settings


@cache
def load_data(name: str, image_size: int | None) -> Dataset:
    """Read a data set once a process."""
    return load(name, image_size=image_size)


def class_names(context: Context) -> tuple[str, ...]:
    """The classes of this run: named by the app, else those of its data set."""
    named = tuple(name.strip() for name in str(context.run_config.get("class-names", "")).split(",") if name.strip())
    config = run_settings(context.run_config)
    return named or load_data(config.dataset, config.image_size).class_names


def node_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, channels, H, W) and labels (n,) of this node."""
    config = run_settings(context.run_config)
    if "data" in context.node_config:
        return _own(str(context.node_config["data"]), config, class_names(context))
    data = load_data(config.dataset, config.image_size)
    share = _share(context, config)
    split = partition(
        data.y_train, config.partition, config.clients, config.seed,
        num_classes=data.num_classes, min_samples=config.least_samples,
    )  # fmt: skip
    indices = split.indices[share]
    return np.asarray(data.x_train[indices]), data.y_train[indices]


def node_labels(context: Context) -> np.ndarray:
    """The labels of this node."""
    return node_data(context)[1]


def number_of_classes(context: Context) -> int:
    """Length of a label count vector."""
    return len(class_names(context))


def _own(path: str, config: RunConfig, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    data = load_data(path, config.image_size)
    unknown = [name for name in data.class_names if name not in names]
    if unknown:
        raise InputError(f"data: class {unknown[0]!r} is not among the app's class-names ({', '.join(names)})")
    number = np.array([names.index(name) for name in data.class_names])
    return np.asarray(data.x_train), number[data.y_train]


def _share(context: Context, config: RunConfig) -> int:
    node = context.node_config
    if "partition-id" not in node:
        raise InputError("node config: set data (the node's own) or partition-id (a share of the app's data set)")
    share, shares = int(node["partition-id"]), int(node.get("num-partitions", config.clients))
    if shares != config.clients:
        raise InputError(f"clients: the app says {config.clients}, this node's num-partitions {shares}")
    if not 0 <= share < shares:
        raise InputError(f"partition-id: {share}; accepted: 0 to {shares - 1}")
    name = client_id(context)
    if name != share and name in range(shares):  # the server would take it for that share, whose counts it knows
        raise InputError(f"client-id: {name}, but partition-id is {share}; accepted: {share}, a text, or no client-id")
    return share
