"""Trees of clients by Ward's linkage, from SciPy, and how to cut them.

Ward's linkage takes all distances between two clients: K (K - 1) / 2 numbers. Selectors that use it say how many
clients they serve.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from fedentopt.errors import InputError

LARGEST = 5000
"""Clients up to which all distances are worked with: 100 MB of them, and a tree in a second or two."""


def scipy_part(name: str, selector: str) -> Any:
    """A module of SciPy for a selector; refused, with what to install, where it is missing."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise InputError(
            f"selector: {selector!r} needs SciPy, which is not installed; accepted: pip install 'fedentopt[selectors]'"
        ) from error


def ward_tree(distances: np.ndarray, selector: str) -> np.ndarray:
    """Merges (n - 1, 2) of n clients, the closest first: clients are 0 to n - 1, merge i makes n + i.

    `distances` is (n, n), symmetric, 0 on its diagonal.
    """
    n = len(distances)
    if n < 2:
        return np.zeros((0, 2), dtype=np.int64)
    condensed = scipy_part("spatial.distance", selector).squareform(distances, checks=False)
    tree = scipy_part("cluster.hierarchy", selector).linkage(condensed, "ward")
    return np.asarray(tree[:, :2], dtype=np.int64)


def cut_into(tree: np.ndarray, groups: int) -> list[np.ndarray]:
    """That many groups (fewer where there are fewer clients), each ascending, the one with the lowest client first."""
    n = len(tree) + 1
    members: dict[int, list[int]] = {client: [client] for client in range(n)}
    for i, (a, b) in enumerate(tree[: max(0, n - groups)].tolist()):
        members[n + i] = members.pop(a) + members.pop(b)
    return sorted((np.sort(group) for group in members.values()), key=lambda group: int(group[0]))


def cut_by_mass(tree: np.ndarray, masses: np.ndarray, most: int) -> list[np.ndarray]:
    """The largest groups of the tree whose mass is at most `most`, each ascending, lowest client first.

    A client alone is a group whatever its mass.
    """
    n = len(tree) + 1
    members: dict[int, list[int]] = {client: [client] for client in range(n)}
    mass: list[int | None] = [int(one) for one in masses]
    for i, (a, b) in enumerate(tree.tolist()):
        together = None if mass[a] is None or mass[b] is None else mass[a] + mass[b]
        if together is not None and together <= most:
            members[n + i] = members.pop(a) + members.pop(b)
            mass.append(together)
        else:
            mass.append(None)
    return sorted((np.sort(group) for group in members.values()), key=lambda group: int(group[0]))
