"""One contestant's run under a limit of time: started as its users start it, timed from outside, stopped whole.

A contestant writes a line per round into a progress file (`cifar10_work.Progress`), so that a run that is stopped still
tells how far it came.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import without_paths

KEPT_LINES = 60  # of a log, from its beginning and from its end
GRACE = 5.0  # seconds for processes to end by themselves


def free_addresses(many: int) -> str:
    """Addresses on this machine that nobody listens on, for processes that have to find one another."""
    sockets = [socket.socket() for _ in range(many)]
    try:
        for one in sockets:
            one.bind(("localhost", 0))
        return ",".join(f"localhost:{one.getsockname()[1]}" for one in sockets)
    finally:
        for one in sockets:
            one.close()


def run(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    progress: Path,
    log: Path,
    limit: float,
    places: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run processes that belong together, of which the first writes `progress`; none of them outlives the limit.

    Gives what `summary` makes of the progress file. The log keeps the first process's output and all errors, without
    its middle, colours and the paths of this machine; `places` are further ones, each with what to call it.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        begun = time.time()
        processes = [
            subprocess.Popen(
                list(command), env=dict(environment), cwd=tempfile.gettempdir(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if number else said, stderr=said,
            )
            for number, (command, environment) in enumerate(zip(commands, environments, strict=True))
        ]  # fmt: skip
        try:
            codes = _wait(processes, begun + limit)
            wall = time.time() - begun
        finally:
            for process in processes:
                _end(process)
        said.seek(0)
        text = re.sub(r"\x1b\[[0-9;]*m", "", said.read())
        for place, name in {**(places or {}), sys.prefix: "python"}.items():
            text = text.replace(place, name)
        log.write_text(shortened(without_paths(text)))
    lines = _lines(progress)
    result = summary(lines, begun, wall)
    if codes is None:
        return result | {"stopped": True}
    if any(codes):
        tail = " ".join(log.read_text().strip().splitlines()[-12:])[-900:]
        return result | {"error": f"exit code {next(c for c in codes if c)}: {tail}"}
    if not result["done"]:
        return result | {"error": "it ended well, but did not say that it was done"}
    return result


def _wait(processes: Sequence[subprocess.Popen[bytes]], until: float) -> list[int] | None:
    """The exit codes once all have ended or one has failed; None when time is up."""
    while True:
        codes = [process.poll() for process in processes]
        ended = [code for code in codes if code is not None]
        if len(ended) == len(codes) or any(ended):
            return ended
        if time.time() >= until:
            return None
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def _lines(progress: Path) -> list[dict[str, Any]]:
    """The whole lines of a progress file; the last may be half-written where its writer was stopped."""
    found = []
    for line in progress.read_text().splitlines(keepends=True) if progress.exists() else ():
        if line.endswith("\n"):
            found.append(json.loads(line))
    return found


def summary(lines: Iterable[Mapping[str, Any]], begun: float, wall: float) -> dict[str, Any]:
    """What a progress file tells of a run that began at `begun` and took `wall` seconds.

    `startup_seconds` end when training can begin, where the contestant says so. A round's seconds are the time from one
    round's end to the next (median; mean, which holds the evaluations); the first round, in which kernels are compiled
    and memory is taken, is not among them.
    """
    lines = list(lines)
    facts: dict[str, Any] = {}
    for line in lines:
        facts |= {k: v for k, v in line.items() if k in ("parameters", "processes", "device", "trainer", "users")}
    ready = next((line["at"] - begun for line in lines if line.get("ready")), None)
    ends = [(line["round"], line["at"] - begun) for line in lines if "round" in line]
    each = [after[1] - before[1] for before, after in itertools.pairwise(ends)]
    curve = [
        [line["round"], round(line["at"] - begun, 2), line["accuracy"]] for line in lines
        if "round" in line and "accuracy" in line
    ]  # fmt: skip
    scores = [line["accuracy"] for line in lines if "accuracy" in line]
    return facts | {
        "wall_seconds": round(wall, 2),
        "startup_seconds": None if ready is None else round(ready, 2),
        "first_round_ended": round(ends[0][1], 2) if ends else None,
        "rounds": ends[-1][0] if ends else 0,
        "seconds_a_round": round(statistics.median(each), 5) if each else None,
        "mean_seconds_a_round": round((ends[-1][1] - ends[0][1]) / len(each), 5) if each else None,
        "accuracy": scores[-1] if scores else None,
        "accuracy_by_round": curve,
        "done": any(line.get("done") for line in lines),
    }


def whole_run(result: Mapping[str, Any], rounds: int) -> tuple[float | None, bool]:
    """Seconds of a run of `rounds` rounds, and whether they are reckoned instead of measured.

    Reckoned: to the end of the first round as measured, and the mean of the others for all that were left; at least the
    seconds that it had when it was stopped.
    """
    if result.get("done") and result["rounds"] == rounds:
        return result["wall_seconds"], False
    mean = result.get("mean_seconds_a_round")
    if mean is None:
        return None, True
    return round(max(result["first_round_ended"] + mean * (rounds - 1), result["wall_seconds"]), 1), True


def shortened(text: str) -> str:
    """A log without its middle where it is long."""
    lines = text.splitlines()
    left_out = len(lines) - 2 * KEPT_LINES
    if left_out <= 0:
        return text
    return "\n".join([*lines[:KEPT_LINES], f"... {left_out} lines left out ...", *lines[-KEPT_LINES:]]) + "\n"
