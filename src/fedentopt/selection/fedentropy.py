"""FedEntropy's judgment after training: drop the clients that make the cohort's soft labels less even.

Ling et al.: FedEntropy: Efficient Device Grouping for Federated Learning Using Maximum Entropy Judgment (2022).
Every client sends its mean softmax over its own data. The server takes away, one at a time, the client whose
absence raises the entropy of the mean (weighted by numbers of samples) most, until none raises it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.selection.measures import row_scores
from fedentopt.selection.scoring import TIE_BITS, lowest_within_tie


def judge(soft_labels: ArrayLike, weights: ArrayLike) -> np.ndarray:
    """Indices of the clients kept, ascending; at least one.

    `soft_labels` is (M, C), not negative; `weights` are the M numbers of samples. A removal must gain more
    than 1e-9 bits, and equal gains go to the lowest index, so that no removal hangs on rounding.
    """
    soft = np.asarray(soft_labels, dtype=np.float64)
    n = np.asarray(weights, dtype=np.float64)
    if soft.ndim != 2 or not soft.size or not np.isfinite(soft).all() or (soft < 0).any():
        raise InputError(
            f"soft_labels: an array of shape {soft.shape}; accepted: (clients, classes), finite, 0 or more"
        )
    if n.shape != (len(soft),) or not np.isfinite(n).all() or (n < 0).any() or not n.sum() > 0:
        raise InputError(f"weights: {n.tolist()}; accepted: one for each of {len(soft)} clients, 0 or more, not all 0")
    weighted = soft * n[:, None]
    kept = np.arange(len(soft))
    while kept.size > 1:
        # Summed anew for every removal: subtracting from the total could leave traces of what was taken away.
        without = np.stack([np.delete(weighted[kept], i, axis=0).sum(axis=0) for i in range(kept.size)])
        scores = row_scores(without)
        if scores.max() <= row_scores(weighted[kept].sum(axis=0)[None, :])[0] + TIE_BITS:
            break
        kept = np.delete(kept, lowest_within_tie(scores))
    return kept
