"""An environment of its own for every peer, made once with pip, by package name only."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent / ".envs"  # ignored by git


class CannotInstall(Exception):
    """pip refused; the message is the end of what it said."""


def python_of(name: str, packages: tuple[str, ...]) -> Path:
    """The interpreter of environment `name`, which is made if it is not there, with our version of torch."""
    home = FOLDER / name
    python, done = home / "bin" / "python", home / "complete"
    wanted = "\n".join((*packages, f"torch=={version('torch').partition('+')[0]}"))
    if not (done.exists() and done.read_text() == wanted):
        print(f"making the environment of {name}: {', '.join(wanted.splitlines())}", flush=True)
        _say_why([sys.executable, "-m", "venv", "--clear", str(home)])
        _say_why([str(python), "-m", "pip", "install", "--quiet", *wanted.splitlines()])
        done.write_text(wanted)
    return python


def _say_why(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise CannotInstall((result.stderr or result.stdout).strip()[-600:])
