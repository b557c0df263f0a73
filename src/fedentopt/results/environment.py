"""What a result depends on besides its settings: versions and hardware. No host name, no path of the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import fedentopt


@functools.cache  # of the files as they are when first asked for, which should be before anything trains
def source_digest() -> str:
    """SHA-256 over all Python and data files of the package, by which anyone can tell the same code again."""
    root = Path(fedentopt.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml", ".csv")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache  # the same for every run of a sweep, and asking git takes a moment
def environment() -> dict[str, Any]:
    """Versions of the code and its libraries, and the processor, for `run.json`."""
    import numpy
    import torch

    return {
        "fedentopt": fedentopt.__version__,
        "commit": commit(Path(fedentopt.__file__).resolve().parent),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": str(torch.__version__),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def commit(package: Path) -> str | None:
    """Commit of the checkout that holds `package` as src/fedentopt, `+changes` behind it where files differ.

    None for an installed package, also when it lies inside somebody else's repository.
    """
    root = package.parent.parent
    if package.parent.name != "src" or not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return None
    changed = _git(root, "status", "--porcelain", "--", "src")
    return f"{head}+changes" if changed else head


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
