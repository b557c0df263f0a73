"""Result folders for tests of the page: real partitions and real picks, invented accuracies.

Nothing is trained here. The accuracies follow a made-up formula and mean nothing; the clients of every round
come from the package's own selectors, so that entropies, heat maps and label charts are the real thing.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs import run_config
from fedentopt import EntropySelector, KLSelector, RandomSelector
from fedentopt.partition import parse, partition
from fedentopt.selection.measures import selection_entropy
from fedentopt.settings import amount
from fedentopt.simulation.config import RunConfig

HEADER = [
    "round", "accuracy", "loss", "worst_class_accuracy", "class_accuracy", "entropy", "classes_covered",
    "clients", "trained", "bytes_up", "bytes_down", "seconds",
]  # fmt: skip
MODEL_BYTES = 248_024


def write_run(
    directory: Path,
    config: RunConfig,
    *,
    classes: Sequence[str],
    clients: Sequence[str] | None = None,
    samples: int = 2000,
    stop_after: int | None = None,
    diverged_round: int | None = None,
    command: str = "fedentopt compare --out DIR",
) -> Path:
    """Write one run folder. `stop_after` leaves it unfinished after that round."""
    rng = np.random.default_rng([config.seed, 99])
    labels = np.arange(samples) % len(classes)
    counts = partition(labels, parse(config.partition), config.clients, config.seed, min_samples=1).counts
    names = list(clients) if clients is not None else [str(k) for k in range(config.clients)]
    selector: Any
    if config.selector == "fedentopt":
        selector = EntropySelector(
            config.cohort_size,
            buffer_size=amount(config.of("selector")["buffer"], config.clients, "buffer"),
            seed=config.seed,
        )
    elif config.selector == "kl":
        selector = KLSelector(config.cohort_size)
    else:
        selector = RandomSelector(config.cohort_size, seed=config.seed)
    selector.register(counts)
    rows: list[list[Any]] = []
    times = np.zeros(config.clients, dtype=int)
    knows = np.zeros(len(classes))
    for number in range(1, (stop_after or config.rounds) + 1):
        cohort = selector.select()
        picked = list(cohort.clients)
        times[picked] += 1
        together = counts[picked].sum(axis=0)
        share = together / together.sum()
        bits = float(-(share[share > 0] * np.log2(share[share > 0])).sum())
        trained = [k for k in picked if rng.random() >= config.dropout]
        # Invented: a class is learned while the cohort brings it and fades while it does not.
        knows = np.where(together > 0, knows + 0.15 * (90 - knows), 0.6 * knows)
        if diverged_round is not None and number >= diverged_round:
            knows = np.zeros(len(classes))
            knows[0] = 100.0
        accuracy = float(knows.mean())
        evaluated = number % config.evaluate_every == 0 or number > config.rounds - 10
        client_names = [names[k] if clients is not None else int(k) for k in picked]
        trained_names = [names[k] if clients is not None else int(k) for k in trained]
        rows.append(
            [
                number,
                accuracy if evaluated else "",
                (2.3 * math.exp(-accuracy / 50)) if evaluated else "",
                float(knows.min()) if evaluated else "",
                json.dumps([round(float(value), 4) for value in knows]) if evaluated else "",
                bits,
                int((together > 0).sum()),
                json.dumps(client_names),
                json.dumps(trained_names),
                MODEL_BYTES * len(trained) + (8 * counts.size if number == 1 else 0),
                MODEL_BYTES * len(picked),
                0.01,
            ]
        )
    folder = directory / config.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps(
            {
                "config": config.to_dict(),
                "method": config.method,
                "run_id": config.run_id,
                "fedentopt": "0.1.0",
                "python": "3.11",
                "numpy": "2.0",
                "torch": "none",
                "platform": "test data, nothing was trained",
                "device": "none",
                "trainer": "none",
                "command": command,
                "started": "2026-01-01T00:00:00",
                "dataset": {"name": config.dataset, "classes": list(classes), "train": samples, "test": 0},
            }
        )
    )
    with (folder / "rounds.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([HEADER, *rows])
    with (folder / "label_counts.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [["client", *classes], *([n, *c] for n, c in zip(names, counts.tolist(), strict=True))]
        )
    if stop_after is None:
        last = [row for row in rows if row[1] != ""][-10:]
        per_class = np.mean([json.loads(row[4]) for row in last], axis=0)
        (folder / "summary.json").write_text(
            json.dumps(
                {
                    "accuracy": float(np.mean([row[1] for row in last])),
                    "final_accuracy": last[-1][1],
                    "best_accuracy": max(row[1] for row in rows if row[1] != ""),
                    "class_accuracy": per_class.tolist(),
                    "worst_class_accuracy": float(per_class.min()),
                    "h_norm": selection_entropy(times),
                    "never_selected": int((times == 0).sum()),
                    "mean_entropy": float(np.mean([row[5] for row in rows])),
                    "min_entropy": float(min(row[5] for row in rows)),
                    "rounds_to": {},
                    "bytes_up": sum(row[9] for row in rows),
                    "bytes_down": sum(row[10] for row in rows),
                    "diverged_round": diverged_round,
                    "rounds": config.rounds,
                    "seconds": 0.1,
                    "finished": True,
                    "chance": 100 / len(classes),
                }
            )
        )
    return folder


def write_comparison(
    directory: Path,
    *,
    classes: Sequence[str] = tuple(f"digit {i}" for i in range(10)),
    clients: int | Sequence[str] = 40,
    seeds: int = 3,
    **settings: Any,
) -> Path:
    """Random selection, FedEntOpt and FedEntOpt with noise (the noise itself plays no role here)."""
    names = None if isinstance(clients, int) else clients
    number = clients if isinstance(clients, int) else len(clients)
    methods: tuple[dict[str, Any], ...] = ({}, {"selector": "fedentopt"}, {"selector": "fedentopt", "epsilon": 0.5})
    for method in methods:
        for seed in range(seeds):
            config = run_config(**{"rounds": 20, "clients": number, "seed": seed, **settings, **method})
            write_run(directory, config, classes=classes, clients=names)
    return directory
