"""`fedentopt --version [--json]`: what a report of a bug has to say. No host name, no path of the machine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import typer

from fedentopt import __version__
from fedentopt.cli.console import print_json

PACKAGES = (
    "numpy", "typer", "rich", "torch", "torchvision", "scikit-learn", "scipy", "pandas", "safetensors", "pillow",
    "matplotlib", "plotly", "numba", "triton", "flwr", "opendp", "nvflare", "ray", "tensorboard",
)  # fmt: skip


def show(json: bool) -> None:
    """Print the version, with `json` all versions and the devices."""
    if json:
        print_json(describe())
    else:
        typer.echo(f"fedentopt {__version__}")


def describe() -> dict[str, Any]:
    """Versions of the code and of what it uses (null: not installed), the platform, the devices torch sees."""
    return {
        "fedentopt": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _installed(name) for name in PACKAGES},
        "devices": _devices(),
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    try:
        import torch
    except ImportError:  # not there, or there and broken, which the versions show
        return ["cpu"]
    cuda = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return ["cpu", *cuda]
