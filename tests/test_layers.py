"""The arrows of the house go one way: which room may import which, and what may be imported without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fedentopt"

ROOTS = {
    "errors", "labels", "files", "pages", "randomness", "settings", "registry", "own_code", "own_names", "own_objects",
    "own_hooks",
    "privacy", "partition", "audit",
}  # fmt: skip
MAY_IMPORT = {
    "errors": set(),
    "labels": {"errors"},
    "files": {"errors"},
    "pages": {"errors", "files"},
    "randomness": set(),
    "settings": {"errors"},
    "registry": {"errors", "settings"},
    "own_code": {"errors"},
    "own_names": set(),
    "own_objects": {"own_code", "own_names"},
    "own_hooks": {"errors", "own_names", "settings"},
    "privacy": {"errors", "labels"},
    "partition": {"errors", "labels", "randomness"},
    "audit": {"errors", "labels"},
    "release": {"errors", "labels", "files", "privacy"},
    "selection": ROOTS,
    "server": {"errors", "files", "audit", "selection"},
    "tables": {"errors", "labels"},
    "plan": ROOTS | {"selection", "results"},
    "algorithms": ROOTS | {"selection"},
    "models": ROOTS,
    "datasets": ROOTS,
    "results": ROOTS | {"selection"},
    "report": ROOTS | {"selection", "algorithms", "results"},
    "simulation": ROOTS | {"selection", "algorithms", "models", "datasets", "results", "report"},
    "paper": ROOTS | {"selection", "algorithms", "models", "datasets", "results", "report", "simulation"},
    "bench": ROOTS | {"selection", "algorithms", "models", "datasets", "results", "simulation"},
    "flower": ROOTS | {"selection", "release", "server"},
    "nvflare": ROOTS | {"selection", "release", "server"},
    "cli": ROOTS
    | {"selection", "algorithms", "models", "datasets", "results", "report", "simulation", "paper", "bench"}
    | {"tables", "plan"},
}
"""Rooms by name. `simulation` may reach `report` for one thing: a comparison's own page and plot."""

KERNELS = ("simulation.triton", "simulation.numba")


def modules() -> list[tuple[str, Path]]:
    """Dotted name below the package, and file, of every module but the package's own two."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in ("", "__main__"):
            found.append((name, path))
    return found


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, for running or for types, below `fedentopt.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("fedentopt.") for name in names if name.startswith("fedentopt.")}


def room(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_a_room_imports_only_the_rooms_below_it(name: str, path: Path) -> None:
    rooms = {room(other) for other in imported(path)} & MAY_IMPORT.keys()
    assert rooms - {room(name)} <= MAY_IMPORT[room(name)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_have_one_door(kernels: str) -> None:
    """Code outside a room of kernels imports names from its `__init__`, not the files inside; it may name its own
    interface and, where a whole step is written out, the pieces."""
    inside = {p.stem for p in (SOURCE / kernels.replace(".", "/")).glob("*.py")} - {"__init__"}
    for name, path in modules():
        if name.startswith((kernels, "bench")):
            continue
        reached = {other.removeprefix(f"{kernels}.") for other in imported(path) if other.startswith(f"{kernels}.")}
        through_files = {other.partition(".")[0] for other in reached if "." in other} & inside
        assert not through_files, f"{name} reaches into {kernels}: {sorted(through_files)}"


def test_the_largest_count_has_one_home() -> None:
    """A report that is accepted in one place is not refused in another: all read one number."""
    homes = [
        name
        for name, path in modules()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and "LARGEST_COUNT" in [getattr(to, "id", "") for to in node.targets]
    ]
    assert homes == ["labels"]


def test_every_room_has_its_arrows() -> None:
    assert {room(name) for name, _ in modules()} == MAY_IMPORT.keys()


def test_the_map_names_every_room() -> None:
    _, _, rooms = (SOURCE.parent.parent / "docs" / "map.md").read_text(encoding="utf-8").partition("## The rooms")
    listed, _, arrows = rooms.partition("Arrows go one way")
    places = {name: f"{name}/" if (SOURCE / name).is_dir() else f"{name}.py" for name in MAY_IMPORT}
    assert set(places.values()) - set(re.findall(r"[\w.]+/?", listed)) == set()
    named = set(re.findall(r"`(\w+)/`", "".join(line for line in arrows.splitlines() if line.startswith("|"))))
    assert {name for name in MAY_IMPORT.keys() - ROOTS if f"{name}/" in places.values()} - named == set()


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("fedentopt", ("torch", "typer", "rich", "scipy", "pandas")),
        ("fedentopt.algorithms", ("torch", "sklearn")),
        ("fedentopt.release", ("torch", "flwr", "opendp")),
        ("fedentopt.server.members", ("torch", "flwr", "nvflare")),
        ("fedentopt.results", ("torch", "pandas")),
        ("fedentopt.report", ("torch", "pandas", "fedentopt.simulation")),
        ("fedentopt.simulation", ("torch", "pandas")),
        ("fedentopt.cli", ("torch", "pandas", "matplotlib")),
    ],
)
def test_what_an_import_does_not_bring(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print(*[name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
