"""How often clients that claim even labels make up half of a cohort, with either way of leaving the buffer.

    python benchmarks/liars_in_cohorts.py

Selection alone: tables of label counts of K clients, a tenth of whom report their number of samples spread evenly over
all classes, whatever they hold. Printed per table and `release`: the share of rounds in which at least half of the
cohort are liars, and, without any liar, how even cohorts and selection are (mean entropy in bits, H_norm).
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from fedentopt import EntropySelector
from fedentopt.partition import partition
from fedentopt.selection.measures import selection_entropy

RELEASES = ("fifo", "random")


def main() -> None:
    """Measure and print one JSON line per table and release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--buffer", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--liars", type=float, default=0.1)
    told = parser.parse_args()
    labels = np.repeat(np.arange(10), 5000)  # as CIFAR-10 has them
    for spec in ("dir:0.1", "dir:0.3", "classes:2"):
        for release in RELEASES:
            half, entropies, evenness, shares = [], [], [], []
            for seed in range(told.seeds):
                counts = partition(labels, spec, told.clients, seed, num_classes=10, min_samples=10).counts
                liars = np.random.default_rng(seed).choice(told.clients, int(told.liars * told.clients), replace=False)
                claimed = counts.astype(float)
                claimed[liars] = counts[liars].sum(1, keepdims=True) / 10
                for table, lying in ((claimed, True), (counts, False)):
                    selector = EntropySelector(told.cohort, told.buffer, seed=seed, release=release)
                    selector.register(table)
                    picked = [selector.select() for _ in range(told.rounds)]
                    if lying:
                        half += [2 * np.isin(c.clients, liars).sum() >= told.cohort for c in picked]
                        shares += [np.isin(c.clients, liars).mean() for c in picked]
                    else:
                        entropies += [cohort.entropy for cohort in picked]
                        times = np.bincount([n for c in picked for n in c.clients], minlength=told.clients)
                        evenness.append(selection_entropy(times))
            print(
                json.dumps(
                    {
                        "partition": spec,
                        "release": release,
                        "rounds_half_liars_percent": round(100 * float(np.mean(half)), 2),
                        "liars_share_percent": round(100 * float(np.mean(shares)), 2),
                        "honest_entropy_bits": round(float(np.mean(entropies)), 4),
                        "honest_h_norm": round(float(np.mean(evenness)), 4),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
