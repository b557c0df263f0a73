"""Trees of clients by Ward's linkage, from SciPy, and how to cut them.

Ward's linkage takes all distances between two clients: K (K - 1) / 2 numbers. Selectors that use it say how many
clients they serve.
"""

from __future__ import annotations

import importlib
import math
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


def pairs(table: np.ndarray, selector: str) -> np.ndarray:
    """What a symmetric table (n, n) has above its diagonal, row by row: one number per pair."""
    return np.asarray(scipy_part("spatial.distance", selector).squareform(table, checks=False))


def ward_tree(distances: np.ndarray, selector: str) -> np.ndarray:
    """Merges (n - 1, 2) of n clients, the closest first: clients are 0 to n - 1, merge i makes n + i.

    `distances` is (n, n), symmetric, 0 on its diagonal, or one number per pair (`pairs`).
    """
    n = len(distances) if distances.ndim == 2 else (1 + math.isqrt(1 + 8 * len(distances))) // 2
    if n < 2:
        return np.zeros((0, 2), dtype=np.int64)
    condensed = pairs(distances, selector) if distances.ndim == 2 else distances
    tree = scipy_part("cluster.hierarchy", selector).linkage(condensed, "ward")
    return np.asarray(tree[:, :2], dtype=np.int64)


def cut_into(tree: np.ndarray, groups: int) -> list[np.ndarray]:
    """That many groups (fewer where there are fewer clients), each ascending, the one with the lowest client first."""
    merges = tree.tolist()
    return _groups(merges, [True] * max(0, len(merges) + 1 - groups))


def cut_by_mass(tree: np.ndarray, masses: np.ndarray, most: int) -> list[np.ndarray]:
    """The largest groups of the tree whose mass is at most `most`, each ascending, lowest client first.

    A client alone is a group whatever its mass.
    """
    merges = tree.tolist()
    mass: list[int] = masses.tolist()
    together = []
    for a, b in merges:
        # A node that was not merged has more than the most, and so has whatever it is a part of.
        mass.append(mass[a] + mass[b])
        together.append(mass[-1] <= most)
    return _groups(merges, together)


def _groups(merges: list[list[int]], together: list[bool]) -> list[np.ndarray]:
    """Clients by the highest node they are together in, where `together` says which of the first merges hold."""
    n = len(merges) + 1
    root = list(range(2 * n - 1))
    for i in range(len(together) - 1, -1, -1):  # from the top of the tree down
        if together[i]:
            a, b = merges[i]
            root[a] = root[b] = root[n + i]
    found: dict[int, list[int]] = {}
    for client in range(n):
        found.setdefault(root[client], []).append(client)
    return [np.array(group) for group in found.values()]
