"""Values that runs, clients and rounds share cannot be changed by one of them."""

from __future__ import annotations

import ast
from pathlib import Path

import fedentopt

PACKAGES = ("algorithms", "selection", "simulation", "flower")
CHANGING = {
    "algorithms/algorithm.py:Vectors",  # names are put in and taken out
    "flower/feedback.py:Feedback",
    "flower/heads.py:Heads",  # learns where last layers lie and whose steps are known
    "flower/loop.py:_Run",
    "flower/progress.py:RoundSelection",
    "flower/progress.py:SelectionResult",  # failures are noted when replies come
    "simulation/aggregation.py:Blend",
    "simulation/checkpoints.py:_Block",  # memory that is used again
    "simulation/feedback.py:Feedback",
    "simulation/trainers/wide_net.py:_Kept",
}


def test_dataclasses_are_frozen_but_those_that_are_filled_step_by_step() -> None:
    package = Path(fedentopt.__file__).parent
    found = {
        f"{path.relative_to(package).as_posix()}:{node.name}"
        for name in PACKAGES
        for path in (package / name).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.split("(")[0] == "dataclass" and "frozen=True" not in decorator
    }
    assert found == CHANGING
