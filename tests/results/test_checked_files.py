"""Results whose files were changed by hand: commands that read them say which file and field, and what would do."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Said, commander
from fedentopt.cli import main
from fedentopt.errors import InputError
from fedentopt.results.checked_files import ALWAYS, read_about, read_summary

OPTIONS = (
    "--method fedavg --clients 8 --cohort 2 --rounds 1 --epochs 1 --client-accuracy --device cpu --workers 1 --no-page"
)
MISSING = object()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on digits, as `compare` leaves it."""
    out = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedentopt", "compare", *shlex.split(OPTIONS), "--seed", "0", "--out", str(out)])
        with pytest.raises(SystemExit, match=r"^0$"):
            main()
    return out


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commander(monkeypatch, capsys)


def changed(comparison: Path, folder: Path, file: str, place: str, value: Any) -> Path:
    """A copy of the comparison in `folder`, with a field of its run's file changed: `config/dropout` is in another."""
    shutil.copytree(comparison, folder)
    (path,) = folder.glob(f"*/{file}")
    content = json.loads(path.read_text())
    *outer, name = place.split("/")
    part = content
    for one in outer:
        part = part[one]
    if value is MISSING:
        del part[name]
    else:
        part[name] = value
    path.write_text(json.dumps(content))
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent != folder}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        *((name, MISSING, f"{name} is missing; accepted: {kind.accepted}; delete") for name, kind in ALWAYS.items()),
        ("finished", MISSING, "finished is missing; accepted: true or false; "),
        ("finished", "yes", "finished is 'yes'; accepted: true or false; "),
        ("class_accuracy", [], "class_accuracy is []; accepted: a list of numbers, one per class; "),
        ("class_accuracy", [1.0, {}], "class_accuracy 1 is {}; accepted: a finite number or null; "),
        ("rounds_to", None, "rounds_to is None; accepted: rounds by accuracy; "),
        ("client_accuracy", "high", "client_accuracy is 'high'; accepted: an object; "),
        ("client_accuracy/mean", "high", "client_accuracy mean is 'high'; accepted: a finite number or null; "),
        ("client_accuracy/measured_on", "train", "client_accuracy measured_on is 'train'; accepted: 'test' or 'vali"),
        ("client_accuracy/clients", float("nan"), "client_accuracy is {'mean': "),
        ("validation_accuracy", [], "validation_accuracy is []; accepted: a finite number or null; "),
        ("selection_seconds", "long", "selection_seconds is 'long'; accepted: a finite number; "),
    ],
)
def test_a_summary_that_cannot_be_used_is_refused_and_nothing_is_lost(
    command: Callable[..., Said], comparison: Path, tmp_path: Path, place: str, value: Any, message: str
) -> None:
    out = tmp_path / "out"
    path = changed(comparison, out, "summary.json", place, value)
    before = contents(out)
    # A second seed, which would have to be trained: the damaged run is found before.
    for words in (["report", out], ["compare", *shlex.split(OPTIONS), "--seeds", "0,1", "--out", out, "--json"]):
        said = command(*words, columns=1000)
        assert said.code == 2, said.out
        assert said.err.startswith(f"error: {path}: {message}")
        assert said.err.count("\n") == 1
    assert contents(out) == before


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("config/dropout", "often", "dropout is 'often'; accepted: a finite number or null; "),
        ("config/stragglers", [None], "stragglers is [None]; accepted: a finite number or null; "),
        ("dataset/digest", 7, "dataset digest is 7; accepted: text; "),
        ("code", [], "code is []; accepted: an object; "),
        ("resumed", 3, "resumed is 3; accepted: a list; "),
    ],
)
def test_notes_of_a_run_that_cannot_be_used_are_refused(
    command: Callable[..., Said], comparison: Path, tmp_path: Path, place: str, value: Any, message: str
) -> None:
    out = tmp_path / "out"
    path = changed(comparison, out, "run.json", place, value)
    said = command("report", out, columns=1000)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {path}: {message}")


def test_what_is_null_or_unknown_is_no_damage(comparison: Path, tmp_path: Path) -> None:
    about = read_about(changed(comparison, tmp_path / "a", "run.json", "weights", None))
    assert "weights" not in about
    summary = read_summary(changed(comparison, tmp_path / "b", "summary.json", "mood", ["fine"]))
    assert summary["mood"] == ["fine"]
    assert read_summary(changed(comparison, tmp_path / "c", "summary.json", "finished", False)) == {}
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(InputError, match="is not JSON"):
        read_summary(tmp_path / "empty.json")


@pytest.mark.parametrize("accuracy", ["1e30", "-3", "101"])
def test_accuracies_beyond_per_cents_are_refused(
    command: Callable[..., Said], comparison: Path, tmp_path: Path, accuracy: str
) -> None:
    shutil.copytree(comparison, tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*/rounds.csv")
    header, line = path.read_text().splitlines()
    path.write_text("\n".join([header, ",".join([line.split(",")[0], accuracy, *line.split(",")[2:]])]))
    said = command("report", tmp_path / "out", columns=1000)
    assert (said.code, said.out) == (2, "")
    assert said.err == f"error: {path}: round 1, column accuracy: '{accuracy}' is not a number from 0 to 100\n"
