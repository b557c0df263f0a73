"""A node's data: its own, or its share of a data set; on a real node that is the owner's to say, not the server's.

Node config `data` is the path of an .npz file or of a folder of class folders on the node (its training split is
used), and `class-names` its owner's list of the federation's classes, separated by commas: a node which lacks a class
still numbers the others as everybody does, and no server can have them counted in another order. Without `data` the
node holds share `partition-id` of `num-partitions` of `dataset`, cut by `partition` and `seed`: the node config's, or
those below. A simulated node has no owner, so the run config says all of this.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from flwr.app import Context

from fedentopt.datasets import Dataset, load
from fedentopt.errors import InputError
from fedentopt.flower import client_id, owner_context
from fedentopt.partition import partition
from fedentopt.simulation.config import RunConfig
from fedentopt_app.settings import run_settings

DEFAULTS = {"dataset": "digits", "partition": "dir:0.3", "seed": 0}


@cache
def load_data(name: str, image_size: int | None) -> Dataset:
    """Read a data set once a process."""
    return load(name, image_size=image_size)


def class_names(context: Context) -> tuple[str, ...]:
    """The classes of this run as the server sees them: named by the app, else those of its data set."""
    config = run_settings(context.run_config)
    return _listed(context.run_config) or load_data(config.dataset, config.image_size).class_names


def node_data(context: Context, image_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, channels, H, W) and labels (n,) of this node."""
    context = owner_context(context)
    if "data" in context.node_config:
        return _own(str(context.node_config["data"]), image_size, node_classes(context))
    if "partition-id" not in context.node_config:
        raise InputError("node config: set data (the node's own) or partition-id (a share of a data set)")
    cut, share = _cut(context), _share(context)
    data = load_data(cut.dataset, image_size)
    split = partition(
        data.y_train, cut.partition, cut.clients, cut.seed, num_classes=data.num_classes, min_samples=cut.least_samples
    )
    indices = split.indices[share]
    return np.asarray(data.x_train[indices]), data.y_train[indices]


def node_labels(context: Context) -> np.ndarray:
    """The labels of this node."""
    return node_data(context)[1]


def node_classes(context: Context) -> tuple[str, ...]:
    """The classes that this node counts, in their order."""
    context = owner_context(context)
    if "data" not in context.node_config:
        return load_data(_cut(context).dataset, None).class_names
    names = _listed(context.node_config) or _listed(context.run_config)
    if not names:  # never from the data, which may lack a class, and whose list would then give that away
        raise InputError("class-names: not in the node config; accepted: the federation's classes, as in 'ant,bee,owl'")
    return names


def number_of_classes(context: Context) -> int:
    """Length of a label count vector."""
    return len(node_classes(context))


def check_agreement(context: Context) -> None:
    """Refuse to train where the server's idea of the data is another one: its model would mean other classes."""
    config = run_settings(context.run_config)
    if "data" in context.node_config:
        ours: Any = node_classes(context)
        theirs: Any = _listed(context.run_config)
    else:
        cut = _cut(owner_context(context))
        ours = (cut.dataset, cut.partition, cut.clients, cut.seed)
        theirs = (config.dataset, config.partition, config.clients, config.seed)
    if ours != theirs:
        raise InputError(f"run config: the app says {theirs}, this node's owner {ours}; accepted: the owner's")


def _own(path: str, image_size: int | None, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    data = load_data(path, image_size)
    unknown = [name for name in data.class_names if name not in names]
    if unknown:
        raise InputError(f"data: class {unknown[0]!r} is not among the class-names ({', '.join(names)})")
    number = np.array([names.index(name) for name in data.class_names])
    return np.asarray(data.x_train), number[data.y_train]


def _listed(config: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name.strip() for name in str(config.get("class-names", "")).split(",") if name.strip())


def _cut(context: Context) -> RunConfig:
    """How a data set is cut into shares; a real node's context has no run config here."""
    node, run = context.node_config, context.run_config
    fields = {name: node.get(name, run.get(name, default)) for name, default in DEFAULTS.items()}
    clients = node.get("num-partitions", run.get("clients"))
    if clients is None:
        raise InputError("num-partitions: not in the node config; accepted: the number of shares")
    return RunConfig.from_dict({**fields, "clients": clients, "cohort": "1"})


def _share(context: Context) -> int:
    node, shares = context.node_config, _cut(context).clients
    share = int(node["partition-id"])
    if not 0 <= share < shares:
        raise InputError(f"partition-id: {share}; accepted: 0 to {shares - 1}")
    name = client_id(context)
    if name != share and name in range(shares):  # the server would take it for that share, whose counts it knows
        raise InputError(f"client-id: {name}, but partition-id is {share}; accepted: {share}, a text, or no client-id")
    return share
