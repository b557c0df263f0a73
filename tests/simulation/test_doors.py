"""The kernels and the trainers are sealed rooms: code outside one imports from its door, the package itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "src" / "fedentopt"


def imported(file: Path) -> Iterator[str]:
    """Modules that a file imports from, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("room", ["triton", "numba", "trainers"])
def test_code_outside_a_room_imports_from_its_door(room: str) -> None:
    outside = [file for file in SOURCE.rglob("*.py") if file.parent != SOURCE / "simulation" / room]
    past = {
        str(file.relative_to(SOURCE)): name
        for file in outside
        for name in imported(file)
        if name.startswith(f"fedentopt.simulation.{room}.")
    }
    assert not past
    used = {name for file in outside for name in imported(file)}
    assert f"fedentopt.simulation.{room}" in used


@pytest.mark.parametrize("room", ["triton", "numba"])
def test_kernels_know_nothing_of_trainers(room: str) -> None:
    known = {name for file in (SOURCE / "simulation" / room).glob("*.py") for name in imported(file)}
    assert not [name for name in known if name.startswith("fedentopt.simulation.trainers")]
