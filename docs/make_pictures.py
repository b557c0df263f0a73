"""Draws the pictures of the documentation, with the package's own partitions and selectors.

    python docs/make_pictures.py [FOLDER]

writes SVG files into FOLDER (default: docs/pictures). Nothing is trained: label counts and picks are all it takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedentopt import Cohort, EntropySelector, KLSelector, RandomSelector, Selector
from fedentopt.partition import parse, partition
from fedentopt.privacy import laplace_noise
from fedentopt.selection.measures import entropy, selection_entropy

CLASSES, CLIENTS, COHORT, ROUNDS, PARTITIONS = 10, 100, 10, 100, 5
RARE = 0.01  # of a round's samples: below, a class is as good as missing
# Okabe and Ito's colours; the two extra ones make ten classes.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#8C6D31")
RANDOM, BALANCED, RAREST = "#000000", "#0072B2", "#D55E00"


def label_table(spec: str, seed: int, samples: int = 50_000) -> np.ndarray:
    """Label counts of 100 clients under a partition of as many samples as CIFAR-10 has."""
    return partition(np.arange(samples) % CLASSES, parse(spec), CLIENTS, seed).counts


def cohorts(selector: Selector, reported: np.ndarray, *, noisy: bool = False) -> list[Cohort]:
    """The cohorts of all rounds, from counts as reported."""
    selector.register(reported, noisy=noisy)
    return [selector.select() for _ in range(ROUNDS)]


def entropies(chosen: Sequence[Cohort], true: np.ndarray) -> list[float]:
    """Entropy of what each cohort truly holds, whatever was reported."""
    return [entropy(true[list(cohort.clients)].sum(axis=0)) for cohort in chosen]


def covered(chosen: Sequence[Cohort], true: np.ndarray) -> float:
    """Per cent of the cohorts that truly hold every class."""
    return 100 * float(np.mean([(true[list(cohort.clients)].sum(axis=0) > 0).all() for cohort in chosen]))


def levels(axes: Axes) -> None:
    """The most a cohort can reach, and the least that proves every class to be there."""
    axes.axhline(np.log2(CLASSES), color="#777777", linewidth=1, linestyle="--", label="log₂(C): perfectly even")
    axes.axhline(
        np.log2(CLASSES - 1), color="#777777", linewidth=1, linestyle=":", label="log₂(C−1): above, none missing"
    )


def draw_opening(figure: Figure) -> None:
    """What thirty rounds train on: every class of every cohort, by chance and by choice; what is lacking is marked."""
    rounds, few = 30, 5
    true = label_table("dir:0.1", 0)
    panels = (
        ("Five clients at random", cohorts(RandomSelector(few), true)),
        ("Five clients by FedEntOpt", cohorts(EntropySelector(few, buffer_size=50), true)),
    )
    for axes, (name, chosen) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        held = np.stack([true[list(cohort.clients)].sum(axis=0) for cohort in chosen[:rounds]])
        shares = (held / held.sum(axis=1, keepdims=True)).T
        for label, at in np.ndindex(shares.shape):
            # The area of a square is the class's share of the round; a fair one fills its cell.
            lacking = shares[label, at] < RARE
            side = 0.92 * (1.0 if lacking else min(1.0, float(np.sqrt(shares[label, at] * CLASSES))))
            corner = at + 1 - side / 2, label - side / 2
            axes.add_patch(Rectangle(corner, side, side, color=RAREST if lacking else BALANCED, linewidth=0))
        gaps = int((shares < RARE).any(axis=0).sum())
        axes.set_title(f"{name}: {gaps} of {rounds} rounds lack a class", fontsize=11)
        axes.set(xlim=(0.4, rounds + 0.6), ylim=(CLASSES - 0.4, -0.6), xlabel="round", aspect="equal")
        axes.set(xticks=[1, 10, 20, 30], yticks=range(CLASSES))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.axes[0].set_ylabel("class")
    marks = [Rectangle((0, 0), 1, 1, color=colour) for colour in (BALANCED, RAREST)]
    told = ["share of the round's samples (full square: a tenth or more)", "under 1 %, or none at all"]
    figure.legend(marks, told, loc="outside lower center", ncols=2, frameon=False, fontsize=9)


def draw_clients(figure: Figure) -> None:
    """What label skew looks like: twenty clients under each partition."""
    for axes, spec in zip(figure.subplots(1, 3, sharey=True), ("iid", "classes:2", "dir:0.1"), strict=True):
        shares = label_table(spec, 0)[:20]
        shares = shares / shares.sum(axis=1, keepdims=True)
        left = np.zeros(len(shares))
        for label in range(CLASSES):
            axes.barh(range(len(shares)), shares[:, label], left=left, color=COLOURS[label], height=0.85)
            left += shares[:, label]
        axes.set(title=spec, xlabel="share of each class", xlim=(0, 1))
    figure.axes[0].set(ylabel="client", yticks=range(0, 20, 5))
    figure.axes[0].invert_yaxis()


def draw_cohorts(figure: Figure) -> None:
    """The labels of one round's cohort: chance against choice, the round random selection covers least."""
    true = label_table("dir:0.1", 0)
    by_chance = cohorts(RandomSelector(COHORT), true)
    by_choice = cohorts(EntropySelector(COHORT, buffer_size=50), true)
    at = int(np.argmin([cohort.classes_covered for cohort in by_chance]))
    for axes, cohort, name, colour in zip(
        figure.subplots(1, 2), (by_chance[at], by_choice[at]), ("random", "FedEntOpt"), (RANDOM, BALANCED), strict=True
    ):
        bottom = np.zeros(CLASSES)
        for order, client in enumerate(cohort.clients):
            counts = true[client]
            axes.bar(
                range(CLASSES),
                counts,
                bottom=bottom,
                color=colour,
                alpha=0.85 if order % 2 else 0.6,
                edgecolor="white",
                linewidth=0.7,
            )
            bottom += counts
        for label in np.flatnonzero(bottom == 0):
            axes.annotate("✕", (label, 0), ha="center", va="bottom", color=RAREST, fontsize=15, fontweight="bold")
        bits = f"{cohort.entropy:.2f} of {np.log2(CLASSES):.2f} bits"
        axes.set(title=f"{name}, round {at + 1}: {bits}", xlabel="class", xticks=range(CLASSES))
    figure.axes[0].set(ylabel="samples of the cohort")


def draw_entropy(figure: Figure) -> None:
    """Entropy round by round on one partition."""
    axes = figure.subplots()
    true = label_table("dir:0.1", 0)
    for name, colour, style, selector in (
        ("random", RANDOM, "-", RandomSelector(COHORT)),
        ("KL", RAREST, "--", KLSelector(COHORT)),
        ("FedEntOpt, Q = 50", BALANCED, "-", EntropySelector(COHORT, buffer_size=50)),
    ):
        axes.plot(
            range(1, ROUNDS + 1),
            entropies(cohorts(selector, true), true),
            style,
            color=colour,
            label=name,
            linewidth=1.3,
        )
    levels(axes)
    axes.set(xlabel="round", ylabel="cohort entropy (bits)", ylim=(1.7, 3.4))
    axes.legend(frameon=False, loc="lower right", ncols=3)


def draw_buffer(figure: Figure) -> None:
    """What the buffer trades: everybody's turn against the evenness of a cohort."""
    sizes = range(0, 91, 10)
    left, right = figure.subplots(1, 2)
    for spec, colour, style in (("dir:0.1", BALANCED, "-"), ("classes:2", RAREST, "--")):
        fair, even = [], []
        for size in sizes:
            times, bits = [], []
            for seed in range(PARTITIONS):
                true = label_table(spec, seed)
                chosen = cohorts(EntropySelector(COHORT, buffer_size=size, seed=seed), true)
                counts = np.bincount([int(k) for cohort in chosen for k in cohort.clients], minlength=CLIENTS)
                times.append(selection_entropy(counts))
                bits.append(np.mean(entropies(chosen, true)))
            fair.append(np.mean(times))
            even.append(np.mean(bits))
        left.plot(sizes, even, style, color=colour, marker="o", markersize=4, label=spec)
        right.plot(sizes, fair, style, color=colour, marker="o", markersize=4, label=spec)
    levels(left)
    left.set(
        xlabel="buffer Q (of 100 clients)",
        ylabel="mean cohort entropy (bits)",
        title="evenness of a cohort",
        ylim=(2.5, 3.4),
    )
    right.set(xlabel="buffer Q (of 100 clients)", ylabel="H_norm", title="evenness of participation", ylim=(0.6, 1.02))
    left.legend(frameon=False, loc="lower left")


def draw_cohort_size(figure: Figure) -> None:
    """How many clients per round it takes to see every class."""
    sizes = range(2, 21, 2)
    for axes, spec in zip(figure.subplots(1, 2, sharey=True), ("dir:0.1", "classes:2"), strict=True):
        for name, colour, style in (("random", RANDOM, "--"), ("FedEntOpt, Q = 50", BALANCED, "-")):
            shares = []
            for size in sizes:
                seen = []
                for seed in range(PARTITIONS):
                    true = label_table(spec, seed)
                    selector: Any = RandomSelector(size, seed) if name == "random" else EntropySelector(size, 50, seed)
                    seen.append(covered(cohorts(selector, true), true))
                shares.append(np.mean(seen))
            axes.plot(sizes, shares, style, color=colour, marker="o", markersize=4, label=name)
        axes.set(title=spec, xlabel="cohort M (of 100 clients)", xticks=list(sizes)[::2], ylim=(-3, 103))
    figure.axes[0].set(ylabel="rounds with every class (%)")
    figure.axes[1].legend(frameon=False, loc="lower right")


def draw_noise(figure: Figure) -> None:
    """What noise costs, for clients with many and with few samples."""
    budgets = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    axes = figure.subplots()
    for samples, colour, style in ((50_000, BALANCED, "-"), (5_000, "#009E73", "--"), (1_500, RAREST, ":")):
        bits = []
        for epsilon in budgets:
            runs = []
            for seed in range(PARTITIONS):
                true = partition(np.arange(samples) % CLASSES, parse("dir:0.1"), CLIENTS, seed, min_samples=1).counts
                reported = laplace_noise(true, epsilon, np.random.default_rng(seed))
                selector = EntropySelector(COHORT, buffer_size=50, seed=seed)
                runs.append(np.mean(entropies(cohorts(selector, reported, noisy=True), true)))
            bits.append(np.mean(runs))
        label = f"{samples // CLIENTS} samples per client"
        axes.plot(budgets, bits, style, color=colour, marker="o", markersize=4, label=label)
    levels(axes)
    axes.set(
        xscale="log",
        xlabel="privacy budget ε (smaller is more private)",
        ylabel="true cohort entropy (bits)",
        ylim=(2.5, 3.4),
    )
    axes.legend(frameon=False, loc="lower right")


PICTURES = {
    "opening": (draw_opening, (10.5, 2.9)),
    "clients": (draw_clients, (9, 3.6)),
    "cohorts": (draw_cohorts, (9, 3.2)),
    "entropy": (draw_entropy, (9, 3.4)),
    "buffer": (draw_buffer, (9, 3.4)),
    "cohort-size": (draw_cohort_size, (9, 3.2)),
    "noise": (draw_noise, (7, 3.6)),
}


def main(folder: Path) -> None:
    """Draw all pictures; a fixed salt and no date keep the files the same from run to run."""
    folder.mkdir(parents=True, exist_ok=True)
    style = {"svg.hashsalt": "fedentopt", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
             "axes.spines.right": False, "font.family": "sans-serif"}  # fmt: skip
    for name, (draw, size) in PICTURES.items():
        with rc_context(style):
            figure = Figure(figsize=size, layout="constrained", facecolor="white")
            draw(figure)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures")
