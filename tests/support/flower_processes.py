"""Flower's programs as a test starts them: loopback only, nothing reported home, every process ended by its id."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent

OPT_OUT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(
    what: str, ready: Callable[[], bool], seconds: float, alive: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait until `ready()`; fail after `seconds`, or when the process that should bring it about has ended."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        assert alive is None or alive.poll() is None, f"no {what}: the process ended with {alive.returncode}"
        time.sleep(0.2)


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs, read from /proc."""
    parent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                # The command's name stands in brackets and may hold spaces; the parent is two fields behind it.
                parent[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, its_parent in parent.items() if its_parent == known]
    return found[1:]


def command_of(pid: int) -> str:
    """The command line of a process, empty once it is gone."""
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
    return ""


class Programs:
    """The processes of one test. Use as a context manager: all are ended at the end, by their ids."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.home = folder / "flwr-home"
        self.home.mkdir(parents=True)
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])  # Flower starts its programs by name
        self.environment = {**os.environ, **OPT_OUT, "FLWR_HOME": str(self.home), "PATH": path, **environment}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        first, others = self._started[:1], self._started[1:]  # nodes say goodbye to the SuperLink, so it goes last
        self.end(others, signal.SIGTERM, patience=15)
        self.end(first, signal.SIGTERM, patience=5)

    def start(self, name: str, *words: str | Path) -> subprocess.Popen[bytes]:
        """Start one of Flower's programs; its output goes to `<name>.log`."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(BIN / str(words[0])), *map(str, words[1:])],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )
        self._started.append(process)
        return process

    def end(self, processes: Sequence[subprocess.Popen[bytes]], how: signal.Signals, patience: float = 30) -> None:
        """Signal processes, wait for them, and kill what is left of them and of their children."""
        running = [process for process in processes if process.poll() is None]
        family = {pid: command_of(pid) for process in running for pid in descendants(process.pid)}
        for process in running:
            process.send_signal(how)
        deadline = time.monotonic() + patience
        for process in running:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=30)
        for pid, command in family.items():
            if command and command_of(pid) == command:  # still the same process
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def call(self, *words: str | Path, seconds: float = 120) -> str:
        """Run a program to its end and return what it printed."""
        done = subprocess.run(
            [str(BIN / str(words[0])), *map(str, words[1:])],
            capture_output=True, text=True, env=self.environment, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self, name: str) -> str:
        """What a started program has printed so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def superlink(self, settings: str, *words: str | Path) -> tuple[subprocess.Popen[bytes], int]:
        """Start a SuperLink and make it the default of `flwr`; `settings` are lines of its config.toml."""
        port = free_port()
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{port}"\n{settings}\n'
        )
        process = self.start("superlink", "flower-superlink", "--port", str(port), *words)
        wait_for("SuperLink", lambda: listens(port), 90, process)
        return process, port
