"""What the runs say, as a table."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import work
from jobs import PEERS


def machine() -> dict[str, Any]:
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {"processor": model, "cores": os.cpu_count(), "system": platform.system(), "date": str(date.today())}


def steady(run: dict[str, Any]) -> float:
    """Seconds of a round once everything is warm: the median of all but the first."""
    seconds: list[float] = run["round_seconds"]
    return statistics.median(seconds) if seconds else float("nan")


def wall(run: dict[str, Any]) -> float:
    """Seconds of a whole job, start-up included."""
    seconds: float = run["wall_seconds"]
    return seconds


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    about, rounds = report["machine"], report["rounds"]
    lines = [
        "# Our engine and its peers on the same work",
        "",
        f"{work.CLIENTS} clients of {work.SAMPLES} images, {work.COHORT} a round, {work.EPOCHS} local epochs, batches "
        f"of {work.BATCH}, LeNet-5 (62,006 parameters), fp32, two workers on the CPU, no augmentation.",
        f"{about['processor']}, {about['cores']} cores, {about['date']}. Medians over {report['repeats']} turns; a "
        "ratio is the peer's time by that of our run just before it.",
        "Load average before each run (others' work on this machine): "
        f"{min(report['loads']):.1f} to {max(report['loads']):.1f}.",
        "",
        f"| framework | seconds per round | ours beside it | ratio | job of {rounds} rounds with start-up, s "
        "| ours beside it | ratio | accuracy after, % | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in report["peers"].items():
        peer = PEERS[name]
        if "error" in entry:
            lines.append(f"| {peer.title} | failed: {entry['error']} | | | | | | | {peer.note} |".replace("\n", " "))
            continue
        pairs = [(turn["ours"], turn["peer"]) for turn in entry["turns"]]
        versions = pairs[0][1]["versions"]
        own = next((f" {versions[p]}" for p in ("flwr", "pfl", "fluke-fl") if p in versions), f" {versions['torch']}")
        cells = [f"{peer.title}{own}"]
        figures: tuple[Callable[[dict[str, Any]], float], ...] = (steady, wall)
        for figure in figures:
            theirs, ours = [figure(p) for _, p in pairs], [figure(o) for o, _ in pairs]
            ratios = sorted(t / o for t, o in zip(theirs, ours, strict=True))
            spread = f"{statistics.median(ratios):.1f} ({ratios[0]:.1f}–{ratios[-1]:.1f})"
            cells += [f"{statistics.median(theirs):.2f}", f"{statistics.median(ours):.2f}", spread]
        cells += [f"{statistics.median(p['accuracy'] for _, p in pairs):.1f}", peer.note]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Ours: {report['trainer']}; accuracy after, {report['accuracy']:.1f} %.", ""]
    return "\n".join(lines)
