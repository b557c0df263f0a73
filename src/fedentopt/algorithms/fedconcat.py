"""FedConcat: one model per cluster of similar clients, then their encoders side by side under one new layer.

Diao, Li & He, "Exploiting label skews in federated learning with model concatenation", AAAI 2024. Clients are
clustered by k-means on their normalised label histograms. Stage 1: FedAvg within each cluster, every cluster from the
same start; a cluster without a drawn member keeps its model. Stage 2: all encoders (everything but the last linear
layer) are frozen, their features concatenated, and one new linear layer is trained by unweighted FedAvg, a few
mini-batches per selected client and round.

The communication budget is that of FedAvg over T rounds:

    2 T1 M S + K c E + 2 T2 M L = 2 T M S

with S, E, L the parameters of model, encoder and new layer, c clusters, K clients, M a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, ModelSizes, SecondStage, algorithm
from fedentopt.errors import InputError
from fedentopt.settings import setting

LOCAL_BATCHES = 3  # mini-batches per client and round in stage 2
LEAST_SECOND = 10  # rounds of stage 2: the reported accuracy is the mean of its last ten


@algorithm("fedconcat", label="FedConcat")
class FedConcat(Algorithm):
    """FedAvg within clusters of clients, then one new layer on all clusters' encoders."""

    clusters: int = setting(5, help="FedConcat: number of clusters", low=1, option="clusters")
    share: float = setting(
        0.9, help="FedConcat: share of the rounds spent in stage 1", above=0, high=1, option="concat_share"
    )
    max_rounds: int = setting(
        500,
        help="FedConcat: most rounds of stage 2, whatever the communication budget allows",
        low=10,
        option="concat_max_rounds",
    )
    reads_label_counts = True

    def groups(self, label_counts: np.ndarray, seed: int) -> np.ndarray:
        return cluster_clients(label_counts, self.clusters, seed)

    def second_stage(self, rounds: int, cohort: int, clients: int, sizes: ModelSizes) -> SecondStage:
        layer = (self.clusters * sizes.features + 1) * sizes.classes
        numbers = sizes.parameters, sizes.encoder, layer
        budget = concat_budget(rounds, self.share, self.max_rounds, cohort, clients, self.clusters, numbers)
        return SecondStage(budget.first, budget.second, LOCAL_BATCHES)


@dataclass(frozen=True)
class ConcatBudget:
    """Rounds of the two stages."""

    first: int
    second: int


def concat_budget(
    rounds: int, share: float, most_second: int, cohort: int, clients: int, clusters: int, sizes: tuple[int, int, int]
) -> ConcatBudget:
    """Split the budget of `rounds` FedAvg rounds, to the nearest round. `sizes`: numbers of model, encoder, new layer.

    Stage 1 takes `share` of the rounds, or fewer if stage 2 would otherwise be left with under ten rounds; a budget
    that does not even allow one round of stage 1 and ten of stage 2 is refused.
    """
    model, encoder, layer = sizes
    for first in range(max(1, int(share * rounds + 1e-9)), 0, -1):
        left = 2 * (rounds - first) * cohort * model - clients * clusters * encoder
        second = round(left / (2 * cohort * layer))
        if second >= LEAST_SECOND:
            return ConcatBudget(first, min(second, most_second))
    least = clients * clusters * encoder + (2 * LEAST_SECOND - 1) * cohort * layer  # rounds to ten
    need = 1 + -(-least // (2 * cohort * model))
    raise InputError(
        f"rounds: {rounds} rounds of {cohort} clients do not pay for fedconcat's {clusters} encoders sent to {clients} "
        f"clients and ten rounds of its second stage; accepted: at least {need}"
    )


def cluster_clients(label_counts: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Cluster number of every client, by k-means on normalised histograms; counts below zero are read as zero."""
    from sklearn.cluster import KMeans

    counts = np.maximum(np.asarray(label_counts, dtype=np.float64), 0.0)
    if clusters > len(counts):
        raise InputError(f"clusters: {clusters} clusters for {len(counts)} clients; accepted: 1 to {len(counts)}")
    totals = counts.sum(axis=1, keepdims=True)
    uniform = np.full_like(counts, 1.0 / counts.shape[1])
    histograms = np.where(totals > 0, counts / np.where(totals > 0, totals, 1.0), uniform)
    labels: np.ndarray = KMeans(n_clusters=clusters, n_init=10, random_state=seed % 2**32).fit_predict(histograms)
    return labels.astype(np.int64)
