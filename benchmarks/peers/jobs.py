"""The frameworks, and one job of each: started as its users start it, timed from outside."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import work
from environments import FOLDER

HERE = Path(__file__).resolve().parent
QUIET = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "FLWR_HOME": str(FOLDER / "flwr-home"), "WANDB_MODE": "disabled", "NO_COLOR": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A framework: what pip installs, the script that does the work in it, and how it is started."""

    title: str
    packages: tuple[str, ...]
    script: str
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""


PEERS = {
    "flower": Peer(
        "Flower simulation", ("flwr[simulation]>=1.41,<1.43",), "flower_simulation.py", note="two Ray actors",
    ),
    "pfl": Peer(
        "pfl-research", ("pfl[pytorch]",), "pfl_simulation.py",
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.WORKERS)), note="two processes",
    ),
    # One process; on a quiet machine torch's two threads beat one, on a busy one they wait for each other.
    "fluke": Peer(
        "fluke", ("fluke-fl",), "fluke_simulation.py", environment={"OMP_NUM_THREADS": str(work.WORKERS)},
        note="one process, torch on two cores",
    ),
    "fluke-1-thread": Peer("fluke", ("fluke-fl",), "fluke_simulation.py", note="one process on one core"),
    "plain": Peer("plain PyTorch loop", ("numpy",), "plain_loop.py", note="two processes"),
}  # fmt: skip


class Failed(Exception):
    """A run ended badly; the message is the end of its log."""


def without_paths(text: str) -> str:
    """Output without the places of this machine: the checkout, the home folder, the run's scratch folder."""
    text = text.replace(str(HERE.parents[1]), ".").replace(str(Path.home()), "~")
    return re.sub(re.escape(tempfile.gettempdir()) + r"[/\\]tmp\w+", "scratch", text)


def measured(command: list[str], environment: dict[str, str], log: Path, timeout: float) -> float:
    """Wall seconds of a command; its output goes to `log`, without the paths of this machine."""
    load = os.getloadavg()[0]
    begun = time.perf_counter()
    try:
        result = subprocess.run(
            command, env=os.environ | QUIET | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout, cwd=tempfile.gettempdir(),
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise Failed(f"not done after {timeout:.0f} s") from late
    seconds = time.perf_counter() - begun
    text = without_paths(result.stdout)
    log.write_text(f"load average before: {load:.1f}\n{text}")
    if result.returncode:
        raise Failed(" ".join(text.strip().splitlines()[-8:])[-600:])
    return seconds


def run_peer(peer: Peer, python: Path, rounds: int, log: Path, timeout: float) -> dict[str, Any]:
    """One job of a peer."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        command = [str(python), *peer.launcher, str(HERE / peer.script), "--data", str(FOLDER / "data")]
        wall = measured([*command, "--rounds", str(rounds), "--out", str(out)], peer.environment, log, timeout)
        result: dict[str, Any] = json.loads(out.read_text())
    return result | {"wall_seconds": round(wall, 3)}


def run_ours(rounds: int, log: Path, timeout: float) -> dict[str, Any]:
    """One job of ours: the command line tool, as a user calls it."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "dataset": FOLDER / "data" / "work.npz", "data-dir": FOLDER / "data", "out": scratch, "partition": "iid",
            "model": "lenet5", "clients": work.CLIENTS, "cohort": work.COHORT, "rounds": rounds, "epochs": work.EPOCHS,
            "batch-size": work.BATCH, "lr": work.LR, "lr-decay": 1.0, "momentum": work.MOMENTUM,
            "weight-decay": work.WEIGHT_DECAY, "jitter": 0, "flip": 0, "grayscale": 0, "device": "cpu",
            "workers": work.WORKERS,
        }  # fmt: skip
        command = [sys.executable, "-c", "from fedentopt.cli import main; main()", "run", "--no-page"]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        wall = measured(command, {}, log, timeout)
        (table,) = Path(scratch).glob("*/rounds.csv")
        rows = list(csv.DictReader(table.open()))
        about = json.loads((table.parent / "run.json").read_text())
    return {
        "rounds": len(rows),
        "round_seconds": [round(float(row["seconds"]), 4) for row in rows[1:]],
        "accuracy": float(rows[-1]["accuracy"]),
        "trainer": about["trainer"],
        "versions": {name: version(name) for name in ("fedentopt", "torch", "numba", "numpy")},
        "wall_seconds": round(wall, 3),
    }
