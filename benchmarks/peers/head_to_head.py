"""Our engine, pfl-research and Flower on pfl-research's CIFAR-10 workload, one after the other on one device.

    python benchmarks/peers/kit.py KIT                                 # once, where there is a network
    python benchmarks/peers/head_to_head.py --device cuda --data-dir DATA --kit KIT [--limit 200] [--out FOLDER]

`cifar10_work.py` says what the workload is. The order: how many processes serve pfl best, tried as its guide says (1
and up to 5 on one GPU, here for --probe-rounds rounds each, at most --probe-limit seconds); ours, pfl, ours, pfl, ...
for --turns turns, each with a seed and thereby users of its own (pfl only in the first --pfl-turns of them, where time
is short); then Flower once. Everybody runs under this interpreter, torch and NumPy, a peer with its own packages from
the kit; all start as new processes and are timed from outside, start-up included. Our first turn compiles its kernels
(their cache is a new, empty folder), later turns find them. Who is not done within the limit is stopped; rounds,
seconds per round and accuracy until then are reported, and the whole run's time is marked as reckoned.
Written after every run: head_to_head.json, head_to_head.md and logs/ in the --out folder. The exit code is 1 where one
of the runs failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cifar10_work as work  # noqa: E402
import contest  # noqa: E402
from jobs import QUIET  # noqa: E402
from pfl_cifar10 import users  # noqa: E402
from timed_runs import made_with, random_images  # noqa: E402

from fedentopt.datasets import Dataset, load  # noqa: E402
from fedentopt.errors import InputError  # noqa: E402
from fedentopt.simulation.trainers import resolve_device  # noqa: E402

OWN = ("FLWR_HOME", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # of QUIET, what is not taken over
MOST_OF_AN_ERROR = 250  # letters in a table


class Contest:
    """Runs contestants, keeps what they said, and writes it down after each."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.out: Path = options.out
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = made_with() | {
            "rounds": options.rounds, "limit": options.limit, "probes": [], "runs": [],
            "peers": {peer: versions(options.kit / peer) for peer in options.peers},
        }  # fmt: skip

    def environment(self, peer: str) -> dict[str, str]:
        """That of this process, with nothing to import but a peer's part of the kit."""
        quiet = {name: value for name, value in QUIET.items() if name not in OWN}
        return os.environ | quiet | {
            "PYTHONPATH": str(self.options.kit.resolve() / peer), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "FLWR_HOME": str(self.scratch / "flwr"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }  # fmt: skip

    def turn(
        self, name: str, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], limit: float
    ) -> dict[str, Any]:
        """One run, its log in a file of its own."""
        number = len(self.report["probes"]) + len(self.report["runs"]) + 1
        log = self.out / "logs" / f"{number:02}-{name}.txt"
        places = {str(self.options.kit.resolve()): "kit", str(self.scratch): "scratch"}
        result = contest.run(commands, environments, self.progress, log, limit, places)
        self.progress.unlink(missing_ok=True)
        return result

    @property
    def progress(self) -> Path:
        return self.scratch / "progress.jsonl"

    def peer_command(self, script: str, rounds: int, seed: int, *more: str) -> list[str]:
        return [
            sys.executable, str(HERE / script), "--data", str(self.scratch / "data"), "--rounds", str(rounds),
            "--seed", str(seed), "--device", self.options.device, "--progress", str(self.progress), *more,
        ]  # fmt: skip

    def ours(self, seed: int) -> None:
        own = [] if self.options.data_dir is None else [
            "--dataset", "cifar10", "--data-dir", str(self.options.data_dir.resolve())
        ]  # fmt: skip
        command = [
            sys.executable, str(HERE / "pfl_cifar10.py"), "--device", self.options.device, "--seed", str(seed),
            "--rounds", str(self.options.rounds), "--progress", str(self.progress), *own,
        ]  # fmt: skip
        source = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {
            "TRITON_CACHE_DIR": str(self.scratch / "triton"), "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"
        }  # fmt: skip
        self.keep("ours", seed, self.turn(f"ours-seed-{seed}", [command], [environment], self.options.limit))

    def pfl(self, name: str, rounds: int, seed: int, processes: int, gloo: bool, limit: float) -> dict[str, Any]:
        command = self.peer_command("pfl_on_gpu.py", rounds, seed, *(["--gloo"] if gloo else []))
        environments = [self.environment("pfl") for _ in range(processes)]
        if processes > 1:
            addresses = contest.free_addresses(processes)
            for rank, environment in enumerate(environments):
                environment |= {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)}
        return self.turn(name, [command] * processes, environments, limit)

    def best_processes(self) -> tuple[int, bool]:
        """How many processes of pfl are fastest, and whether they need gloo; all that was tried is kept."""
        tried, gloo, limit = self.options.processes, False, min(self.options.probe_limit, self.options.limit)
        if max(tried) > 1:
            result = self.pfl("pfl-as-shipped", 2, 0, 2, False, limit)
            gloo = not result["done"]
            self.keep_probe("as shipped", 2, result)
        if len(tried) == 1:
            return tried[0], gloo and tried[0] > 1
        speeds = {}
        for processes in tried:
            shared = gloo and processes > 1
            result = self.pfl(f"pfl-{processes}-processes", self.options.probe_rounds, 0, processes, shared, limit)
            self.keep_probe("gloo" if shared else "as shipped", processes, result)
            if result["seconds_a_round"] is not None and "error" not in result:
                speeds[processes] = result["seconds_a_round"]
        best = min(speeds, key=speeds.__getitem__, default=1)
        return best, gloo and best > 1

    def flower(self) -> None:
        command = self.peer_command("flower_on_gpu.py", self.options.rounds, 0, "--actors", str(self.options.actors))
        result = self.turn("flower", [command], [self.environment("flower")], self.options.flower_limit)
        self.keep("flower", 0, result)

    def keep_probe(self, how: str, processes: int, result: dict[str, Any]) -> None:
        few = {k: result[k] for k in ("rounds", "seconds_a_round", "startup_seconds", "wall_seconds", "done")}
        failed = {"error": result["error"]} if "error" in result else {}
        if not result["done"] and not failed and result["seconds_a_round"] is None:
            failed = {"error": "stopped before its second round ended"}
        self.report["probes"].append({"how": how, "processes": processes, **few, **failed})
        print(f"pfl, {processes} processes, {how}: {few}{' FAILED' if failed else ''}", flush=True)
        self.write()

    def keep(self, who: str, seed: int, result: dict[str, Any]) -> None:
        seconds, reckoned = contest.whole_run(result, self.options.rounds)
        entry = {"who": who, "seed": seed, **result, "whole_run_seconds": seconds, "reckoned": reckoned}
        self.report["runs"].append(entry)
        print("| " + " | ".join(row(entry)) + " |", flush=True)
        self.write()

    def write(self) -> None:
        (self.out / "head_to_head.json").write_text(json.dumps(self.report, indent=1) + "\n")
        (self.out / "head_to_head.md").write_text(table(self.report))


def versions(folder: Path) -> dict[str, str]:
    """What a part of the kit holds, of the packages that matter here."""
    found = {one.metadata["Name"]: one.version for one in distributions(path=[str(folder)])}
    return {name: found[name] for name in ("pfl", "flwr", "ray") if name in found}


def failed(error: str) -> str:
    """Why a run failed, for a table's cell: of a long log its end, where the reason stands."""
    text = " ".join(error.replace("|", "/").split())
    begin, _, rest = text.partition(": ")
    return f"failed: {text}" if len(text) <= MOST_OF_AN_ERROR else f"failed: {begin}: ... {rest[-MOST_OF_AN_ERROR:]}"


def row(run: Mapping[str, Any]) -> list[str]:
    """A run's cells: a time that was not measured to its end says so."""
    seconds, mean = run["whole_run_seconds"], run["seconds_a_round"]
    whole = "" if seconds is None else f"about {seconds:.0f} (reckoned)" if run["reckoned"] else f"{seconds:.1f}"
    if "error" in run:
        whole = failed(run["error"])
    return [
        run["who"], str(run["seed"]), str(run.get("processes", 1)),
        "" if run["first_round_ended"] is None else f"{run['first_round_ended']:.1f}",
        "" if mean is None else f"{mean:.4f}", f"{run['rounds']:,}", f"{run['wall_seconds']:.1f}", whole,
        "" if run["accuracy"] is None else f"{run['accuracy']:.2f}",
    ]  # fmt: skip


def ratios(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every peer's whole run by that of our run before it."""
    lines, last = [], None
    for run in runs:
        if run["who"] == "ours":
            last = run
        elif last is not None and run["whole_run_seconds"] and last["whole_run_seconds"] and "error" not in run:
            marked = " (reckoned)" if run["reckoned"] or last["reckoned"] else ""
            ratio = run["whole_run_seconds"] / last["whole_run_seconds"]
            lines.append(f"- {run['who']}, seed {run['seed']}: {ratio:.1f} times the seconds of ours{marked}")
    return lines


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    runs = report["runs"]
    device = next((run["device"] for run in runs if run["who"] == "ours" and "device" in run), "")
    names = {"pfl": "pfl-research", "flwr": "Flower", "ray": "Ray"}
    packages = [f"{names[name]} {version}" for peer in report["peers"].values() for name, version in peer.items()]
    lines = [
        "# Ours, pfl-research and Flower on pfl-research's CIFAR-10 workload", "",
        f"{work.USERS:,} users of {work.IMAGES} images, {work.COHORT} per round, {report['rounds']:,} rounds, batches "
        f"of {work.BATCH}, evaluation every tenth round. {device}. {', '.join(packages)}; torch {report['torch']}.",
        f"`{report['command']}`", "",
        "| who | seed | processes | first round ended, s | seconds per round | rounds done | stopped or ended, s "
        f"| {report['rounds']:,} rounds with start-up, s | accuracy, % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *("| " + " | ".join(row(run)) + " |" for run in runs), "", *ratios(runs), "",
        "Seconds per round: the median from the second round on. Reckoned: the run was stopped at the limit; the time "
        "to the end of its first round, and the mean of its other rounds for all that were left. The accuracy is then "
        "that of the last evaluation before the stop.", "",
    ]  # fmt: skip
    if report["probes"]:
        lines += ["Processes tried for pfl:", "", "| processes | joined | seconds per round |", "| ---: | --- | --- |"]
        for probe in report["probes"]:
            speed = f"{probe['seconds_a_round']:.4f}" if probe["seconds_a_round"] else ""
            speed += "" if probe["done"] else f", stopped after {probe['rounds']} rounds"
            if "error" in probe:
                speed = failed(probe["error"])
            lines.append(f"| {probe['processes']} | {probe['how']} | {speed} |")
        lines.append("")
    return "\n".join(lines)


def images(data_dir: Path | None) -> Dataset:
    return random_images() if data_dir is None else load("cifar10", data_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--data-dir", type=Path, help="holds CIFAR-10; without it random images, and chance accuracy")
    parser.add_argument("--kit", type=Path, required=True, help="the folder that kit.py made")
    parser.add_argument("--peers", nargs="*", choices=["pfl", "flower"], default=["pfl", "flower"])
    parser.add_argument("--rounds", type=int, default=work.ROUNDS)
    parser.add_argument("--turns", type=int, default=2, help="of ours and pfl")
    parser.add_argument("--pfl-turns", type=int, help="of pfl, where it is to have fewer; by default --turns")
    parser.add_argument("--limit", type=float, default=200, help="seconds per run, start-up included")
    parser.add_argument("--flower-limit", type=float, help="seconds of Flower's run; by default --limit")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 3, 5], help="of pfl, to try on the device")
    parser.add_argument("--probe-rounds", type=int, default=25)
    # Processes of pfl may wait for one another for ever.
    parser.add_argument("--probe-limit", type=float, default=60, help="seconds of each of pfl's trials")
    parser.add_argument("--actors", type=int, default=10, help="of Flower, that share the device")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "head_to_head")
    options = parser.parse_args()
    options.flower_limit = options.limit if options.flower_limit is None else options.flower_limit
    options.pfl_turns = options.turns if options.pfl_turns is None else options.pfl_turns
    for name in ("limit", "flower_limit", "probe_limit"):
        if not getattr(options, name) > 0:  # NaN is not
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name):g}: accepted: seconds, more than 0")
    for name, low in (("rounds", 2), ("turns", 1), ("pfl_turns", 1), ("probe_rounds", 3), ("actors", 1)):
        if getattr(options, name) < low:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: accepted: {low} or more")
    if min(options.processes) < 1:
        parser.error(f"--processes {min(options.processes)}: accepted: 1 or more")
    for peer in options.peers:
        if not (options.kit / peer).is_dir():
            parser.error(f"--kit {options.kit}: it has no folder {peer}; python benchmarks/peers/kit.py makes it")
    try:
        resolve_device(options.device)
        data = images(options.data_dir)
        options.out.mkdir(parents=True, exist_ok=True)
    except InputError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror or error}; accepted: a folder, or one to be made")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contestants end with this process
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        splits = {"train": (data.x_train, data.y_train), "test": (data.x_test, data.y_test)}
        by_seed = {seed: users(data.y_train, seed) for seed in range(options.turns)}
        work.write_data(scratch / "data", splits, (data.mean, data.std), by_seed)
        contestants = Contest(options, scratch)
        processes, gloo = contestants.best_processes() if "pfl" in options.peers else (1, False)
        for seed in range(options.turns):
            contestants.ours(seed)
            if "pfl" in options.peers and seed < options.pfl_turns:
                result = contestants.pfl(f"pfl-seed-{seed}", options.rounds, seed, processes, gloo, options.limit)
                contestants.keep("pfl", seed, result)
        if "flower" in options.peers:
            contestants.flower()
    print((options.out / "head_to_head.md").read_text())
    if any("error" in run for run in contestants.report["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
