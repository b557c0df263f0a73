"""Our engine against its peers on the same work, in one go, taking turns: ours, a peer, ours, the next peer, ...

    python benchmarks/peers/run.py [--rounds 5] [--repeats 3] [--peers flower pfl fluke plain]

`work.py` says what the work is. Every peer has an environment of its own (`environments.py`; the first run installs
them) and the same release of torch as ours. Before anything is timed, everybody does one round, so that files are in
memory and our kernels are compiled. A peer that cannot be installed or fails is listed with its error.
Written to results/: peers.json (every run), peers.md (the table), logs/ (what each run printed).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import work
from environments import FOLDER, CannotInstall, python_of
from jobs import HERE, PEERS, Failed, run_ours, run_peer
from table import machine, steady, table

RESULTS = HERE / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["flower", "pfl", "fluke", "plain"])
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a run counts as failed")
    options = parser.parse_args()
    if options.rounds < 2 or options.repeats < 1:
        parser.error("at least two rounds and one repeat: the first round is not counted")

    if not (FOLDER / "data" / "work.npz").exists():
        work.make_data(FOLDER / "data")
    shutil.rmtree(RESULTS / "logs", ignore_errors=True)
    (RESULTS / "logs").mkdir(parents=True)
    loads: list[float] = []

    def turn(name: str, job: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        loads.append(os.getloadavg()[0])
        result = job(RESULTS / "logs" / f"{len(loads):02}-{name}.txt")
        print(f"{name}: {steady(result):.2f} s a round, "
              f"{result['wall_seconds']:.1f} s in all, accuracy {result['accuracy']} %", flush=True)  # fmt: skip
        return result

    print("warming up", flush=True)
    turn("ours", lambda log: run_ours(1, log, options.timeout))
    entries: dict[str, dict[str, Any]] = {}
    pythons: dict[str, Path] = {}
    for name in options.peers:
        try:
            peer = PEERS[name]
            pythons[name] = python_of(name.partition("-")[0], peer.packages)
            turn(name, lambda log, n=name: run_peer(PEERS[n], pythons[n], 1, log, options.timeout))
            entries[name] = {"turns": []}
        except (CannotInstall, Failed) as error:
            entries[name] = {"error": str(error)}
            print(f"{name} failed: {error}", flush=True)

    ours: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        for name, entry in entries.items():
            if "error" in entry:
                continue
            ours.append(turn("ours", lambda log: run_ours(options.rounds, log, options.timeout)))
            try:
                theirs = turn(
                    name,
                    lambda log, n=name: run_peer(PEERS[n], pythons[n], options.rounds, log, options.timeout),
                )  # fmt: skip
                entry["turns"].append({"ours": ours[-1], "peer": theirs})
            except Failed as error:
                entry["error"] = str(error)
    if not ours:
        sys.exit("no peer could be run; see above")
    report = {
        "command": f"python benchmarks/peers/run.py --rounds {options.rounds} --repeats {options.repeats}",
        "machine": machine(), "rounds": options.rounds, "repeats": options.repeats, "loads": loads,
        "trainer": ours[-1]["trainer"], "accuracy": statistics.median(run["accuracy"] for run in ours),
        "peers": entries,
    }  # fmt: skip
    (RESULTS / "peers.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "peers.md").write_text(table(report))
    print((RESULTS / "peers.md").read_text())


if __name__ == "__main__":
    main()
