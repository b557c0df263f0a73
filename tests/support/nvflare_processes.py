"""NVFlare as a test starts it: the simulator, and a proof-of-concept deployment of real processes on loopback ports.

Every process is ended by its id. NVFlare's folders, also the one it keeps in the user's home, lie in the test's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flower_processes import command_of, descendants, free_port, listens, wait_for

SCRIPTS = Path(__file__).parent / "nvflare_job"
SERVER, ADMIN = "server", "admin@nvidia.com"
SIMULATOR_RACE = "Communication error with client"
"""What NVFlare's simulator logs when two of its clients were given the same port: it goes on without them."""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of NVFlare's programs: a home of the test's, and this checkout's package and scripts."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).parent.parent.parent / "src"
    paths = [str(source), str(SCRIPTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children at once, as a machine that loses power does."""
    family = {pid: command_of(pid) for pid in descendants(process.pid)} if process.poll() is None else {}
    process.kill()
    process.wait(timeout=30)
    for pid, command in family.items():
        if command and command_of(pid) == command:  # still the same process
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def simulate(folder: Path, *words: str | Path, seconds: float = 150, tries: int = 6) -> str:
    """Run a Python script that runs a job in NVFlare's simulator; its log. Again where NVFlare lost a client."""
    for number in range(tries):
        place = folder / f"try-{number}"
        place.mkdir(parents=True)
        log = place / "log.txt"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=place,
                env=environment(place),
            )
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                if SIMULATOR_RACE in log.read_text(errors="replace"):
                    break
                time.sleep(0.5)
            code = process.poll()
            end(process)
        text = log.read_text(errors="replace")
        if SIMULATOR_RACE not in text:
            assert code == 0, text[-5000:]
            return text
    pytest.skip(f"NVFlare's simulator gave two clients one port in each of {tries} tries")


class Deployment:
    """A server and sites with certificates of their own. Use as a context manager: all are ended at the end."""

    def __init__(self, folder: Path, sites: int) -> None:
        import yaml

        self.folder, self.port = folder, free_port()
        self.environment = environment(folder)
        self.sites = [f"site-{number}" for number in range(1, sites + 1)]
        people = [{"name": ADMIN, "org": "nvidia", "type": "admin", "role": "project_admin"}]
        server = {
            "name": SERVER,
            "org": "nvidia",
            "type": "server",
            "fed_learn_port": self.port,
            "default_host": "localhost",
        }
        clients = [{"name": site, "org": "nvidia", "type": "client"} for site in self.sites]
        implementation = "nvflare.lighter.impl"
        project = {
            "api_version": 3,
            "name": "test",
            "participants": [server, *people, *clients],
            "builders": [
                {
                    "path": f"{implementation}.workspace.WorkspaceBuilder",
                    "args": {"template_file": ["master_template.yml"]},
                },
                {"path": f"{implementation}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
                {"path": f"{implementation}.cert.CertBuilder"},
                {"path": f"{implementation}.signature.SignatureBuilder"},
            ],
        }
        (folder / "project.yml").write_text(yaml.safe_dump(project))
        done = subprocess.run(
            [sys.executable, "-m", "nvflare.cli", "poc", "prepare", "-i", str(folder / "project.yml")],
            capture_output=True, text=True, env=self.environment, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        self.kits = next((folder / "poc").glob("*/prod_00"))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def start(self, *names: str) -> None:
        """Start the server or sites, by the commands of their start.sh; the server is waited for."""
        for name in names:
            kit = self.kits / name
            role = "server" if name == SERVER else "client"
            program = f"nvflare.private.fed.app.{role}.{role}_train"
            who = [] if name == SERVER else [f"uid={name}"]
            self._starts += 1
            with (self.folder / f"{name}-{self._starts}.log").open("wb") as log:
                self.running[name] = subprocess.Popen(
                    [sys.executable, "-u", "-m", program, "-m", str(kit), "-s", f"fed_{role}.json",
                     "--set", "secure_train=true", *who, "org=nvidia", "config_folder=config"],
                    stdout=log, stderr=subprocess.STDOUT, env=self.environment, cwd=self.folder,
                )  # fmt: skip
        wait_for("server", lambda: listens(self.port), 60, self.running[SERVER])  # sites try until it is there

    def kill(self, name: str) -> None:
        """End a participant without a word, its jobs too."""
        end(self.running.pop(name))

    def session(self) -> Any:
        """A session of the administrator's, waited for; close it."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        deadline = time.monotonic() + 30
        while True:
            try:
                return new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=5.0)
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def submit(self, job: Path, sites: int) -> str:
        """Submit a job as soon as so many sites are registered; its id."""
        session = self.session()
        try:
            wait_for("sites", lambda: len(session.get_system_info().client_info) >= sites, 60)
            return str(session.submit_job(str(job)))
        finally:
            session.close()

    def status(self, job: str) -> str:
        """What the server says of a job."""
        session = self.session()
        try:
            return str(session.get_job_status(job))
        finally:
            session.close()

    def log(self, job: str) -> str:
        """The server's log of a job that runs or ended abnormally; empty before it starts."""
        path = self.kits / SERVER / job / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""
