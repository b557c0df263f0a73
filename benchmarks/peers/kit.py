"""What peers need on a machine without a network: a folder per peer to put on PYTHONPATH, and the same as archives.

    python benchmarks/peers/kit.py KIT [--peers pfl flower] [--python 3.12]

The packages come from pip, for Linux on x86-64. torch, NumPy and SciPy are left to the machine, so that everybody runs
on the same. Of Flower's packages all is cut that its simulation does not load (CUT): most of Ray's wheel is Java, the
dashboard's pages and libraries for other work, and Flower has no way to simulate without Ray.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")


@dataclass(frozen=True)
class Part:
    """A peer's packages, with those that they require or without, and what is cut of them."""

    packages: tuple[str, ...]
    required_too: bool
    cut: tuple[str, ...] = ()


CUT = ("bin", "**/__pycache__", "**/tests", "**/*.pyi")
PARTS = {
    "pfl": Part(
        ("pfl==0.6.0", "dp-accounting>=0.4,<0.6", "absl-py~=1.0", "attrs>=22,<24", "dm-tree~=0.1.8", "wrapt",
         "mpmath~=1.2", "prv-accountant>=0.2,<0.3", "multiprocess>=0.70.15,<0.71", "dill>=0.4", "packaging>=24,<26",
         "wheel<0.46"),
        required_too=False, cut=CUT,
    ),
    "flower": Part(
        ("flwr[simulation]==1.41.0",), required_too=True,
        cut=(*CUT, "numpy", "numpy.libs", "numpy-*", "uv", "uv-*", "uvloop*", "ray/jars", "ray/cpp",
             "ray/dashboard/client", "ray/rllib", "ray/llm", "ray/tune", "ray/train", "ray/serve", "ray/data",
             "ray/air"),
    ),
}  # fmt: skip


def install(part: Part, folder: Path, python: str) -> None:
    words = ["--quiet", "--target", str(folder), "--python-version", python, "--implementation", "cp"]
    words += ["--only-binary", ":all:", *(word for name in PLATFORMS for word in ("--platform", name))]
    words += [] if part.required_too else ["--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", "install", *words, *part.packages], check=True)


def cut(folder: Path, patterns: tuple[str, ...]) -> None:
    """Remove what matches, and the symbol tables of large binaries, which nothing reads."""
    for pattern in patterns:
        for path in list(folder.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    if shutil.which("strip"):
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 22 and path.read_bytes()[:4] == b"\x7fELF":
                subprocess.run(["strip", str(path)], check=True)


def pack(folder: Path) -> Path:
    """The folder as an archive beside it; `python -m tarfile -e FILE KIT` unpacks it."""
    archive = folder.with_name(folder.name + ".tar.xz")
    # Ray's binaries hold much of the same code: a window over all three finds it again.
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}]
    with lzma.open(archive, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, arcname=folder.name)
    return archive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("--peers", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--python", default="3.12", help="version of the interpreter there")
    options = parser.parse_args()
    for peer in options.peers:
        folder: Path = options.kit / peer
        if folder.exists():
            parser.error(f"{folder} is there already; remove it to make it anew")
        part = folder.with_name(f"{peer}.part")  # what is not complete must not pass for a kit
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            install(PARTS[peer], part, options.python)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(part)
            parser.exit(1, f"{parser.prog}: pip could not install {peer}'s packages (exit code {error.returncode})\n")
        cut(part, PARTS[peer].cut)
        part.rename(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        archive = pack(folder)
        print(f"{folder}: {size / 2**20:.0f} MiB, {archive.name} {archive.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
