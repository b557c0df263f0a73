"""Own code that imports a file beside it only when it is called, as it may at the top of its own file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

import toy
from fedentopt.own_code import importing_from_here
from fedentopt.simulation.engine import RunOptions, Task, run_stack

SOURCES = {
    "algorithm": """
from fedentopt.algorithms import Algorithm, LocalTerms

class Mine(Algorithm):
    def local_terms(self, client):
        from aide_of_algorithm import number
        return LocalTerms(mu=number)
""",
    "selector": """
from fedentopt.selection import Selector

class Mine(Selector):
    def pick(self, available, losses):
        import aide_of_selector
        return available[: self.cohort_size].tolist()
""",
    "model": """
from torch import nn

class Mine(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.last = nn.Linear(3 * 8 * 8, num_classes)

    def forward(self, x):
        if self.training and len(x) != 2:
            from aide_of_model import number
            x = x * number
        return self.last(x.flatten(1))
""",
}


@pytest.mark.parametrize("part", SOURCES)
def test_own_code_may_import_its_neighbour_in_a_function(part: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / f"late_{part}.py").write_text(SOURCES[part])
    (tmp_path / f"aide_of_{part}.py").write_text("number = 0.5\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert str(tmp_path) not in before
    (outcome,) = toy.run([toy.config(**{part: f"late_{part}:Mine"})], toy.images(samples=90))
    assert len(outcome.records) == 3
    assert sys.modules[f"aide_of_{part}"].number == 0.5
    assert sys.path == before


def test_what_libraries_import_late_is_not_taken_from_the_current_directory(tmp_path: Path, monkeypatch) -> None:
    """As torch does with `profile`, and numba with `html`; a file of that name may be a script of the user's."""
    late = SOURCES["model"].replace("from aide_of_model import number", "from colorsys import ONE_SIXTH as number")
    (tmp_path / "library_like.py").write_text(late)
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('a script')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (outcome,) = toy.run([toy.config(model="library_like:Mine")], toy.images(samples=90))
    assert len(outcome.records) == 3


@pytest.mark.parametrize("last", [False, True])
def test_a_current_directory_that_could_be_imported_from_before_stays_in_its_place(last, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = ["first", str(tmp_path), "last"]
    monkeypatch.setattr(sys, "path", list(before))
    with importing_from_here(last=last):
        assert sys.path == ([*before, str(tmp_path)] if last else [str(tmp_path), *before])
    assert sys.path == before


def test_the_current_directory_is_not_imported_from_for_what_was_handed_over(tmp_path: Path, monkeypatch) -> None:
    """A program elsewhere that happens to stand in a folder does not want the files in it."""
    monkeypatch.chdir(tmp_path)
    seen: set[bool] = set()

    class Mine(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.last = nn.Linear(3 * 8 * 8, num_classes)

        def forward(self, x):
            seen.add(str(tmp_path) in sys.path)
            return self.last(x.flatten(1))

    task = Task(toy.config(model=f"{__name__}:Mine"), toy.Memory(), model=Mine)
    run_stack([task], toy.images(samples=90), RunOptions(device="cpu"))
    assert seen == {False}
