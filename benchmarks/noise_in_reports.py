"""What noise in label reports costs selection: true evenness of cohorts that were chosen by noisy counts.

    python benchmarks/noise_in_reports.py

Selection alone: 100 clients with the buffers of the paper, ten even classes, 500 or 50 samples per client on average.
Printed per budget: the mean true entropy of the cohorts in bits and the share of rounds with all ten classes, over
`--seeds` partitions of `--rounds` rounds each, as a Markdown table.
"""

from __future__ import annotations

import argparse

import numpy as np

from fedentopt import EntropySelector
from fedentopt.partition import partition
from fedentopt.privacy import laplace_noise
from fedentopt.selection import RandomSelector
from fedentopt.selection.measures import entropy

CLIENTS, COHORT, CLASSES = 100, 10, 10
BUFFERS = {"dir:0.1": 50, "classes:2": 70}
BUDGETS = (None, 0.5, 0.1, 0.05, 0.01)


def evenness(spec: str, size: int, epsilon: float | None, chooses: bool, seeds: int, rounds: int) -> str:
    """Mean true entropy, and in brackets the per cent of rounds with every class."""
    entropies, complete = [], []
    labels = np.repeat(np.arange(CLASSES), size * CLIENTS // CLASSES)
    for seed in range(seeds):
        counts = partition(labels, spec, CLIENTS, seed, num_classes=CLASSES, min_samples=1).counts
        if chooses:
            selector = EntropySelector(COHORT, BUFFERS[spec], seed=seed)
            noisy = None if epsilon is None else laplace_noise(counts, epsilon, np.random.default_rng(seed))
            selector.register(counts if noisy is None else noisy, noisy=noisy is not None)
        else:
            selector = RandomSelector(COHORT, seed=seed)
            selector.register(counts)
        for _ in range(rounds):
            total = counts[list(selector.select().clients)].sum(axis=0)
            entropies.append(entropy(total))
            complete.append(bool((total > 0).all()))
    return f"{np.mean(entropies):.3f} ({100 * np.mean(complete):.0f} %)"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=200)
    told = parser.parse_args()
    columns = [(size, spec) for size in (500, 50) for spec in BUFFERS]
    names = {"dir:0.1": "Dir(0.1)", "classes:2": "C=2"}
    print(f"| ε | {' | '.join(f'{size} samples, {names[spec]}' for size, spec in columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    for epsilon in (*BUDGETS, "random"):
        noise = epsilon if isinstance(epsilon, float) else None
        cells = [evenness(spec, size, noise, epsilon != "random", told.seeds, told.rounds) for size, spec in columns]
        print(f"| {'none' if epsilon is None else epsilon} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
