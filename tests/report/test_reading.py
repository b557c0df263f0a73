"""Result folders that cannot be used are refused with the file, the place in it and what was expected."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import pytest

from fedentopt.errors import InputError
from fedentopt.report import write_report
from fedentopt.results.reading import find_runs, read_folder
from fedentopt.simulation.config import RunConfig
from result_folders import write_run

DAMAGED = {"diverged_round": math.inf, "h_norm": "high", "accuracy": math.nan, "rounds": 3.5, "bytes_up": None}
ABOUT = ("dataset", "code", "weights", "seed")
CLASSES = tuple("abcdefghij")


def _break(folder: Path, case: str) -> None:
    rounds = folder / "rounds.csv"
    lines = rounds.read_text().splitlines()
    cells = next(csv.reader([lines[1]]))
    if case == "run.json":
        (folder / "run.json").write_text("{")
    elif case == "config":
        (folder / "run.json").write_text('{"config": 3}')
    elif case == "column":
        rounds.write_text("\n".join(line.split(",", 1)[1] for line in lines))
    elif case == "short line":
        rounds.write_text("\n".join([*lines, "4,1"]))
    elif case == "number":
        rounds.write_text("\n".join([lines[0], ",".join(["1", "many", *(f'"{c}"' for c in cells[2:])])]))
    elif case == "stranger":
        cells[7] = "[999]"
        rounds.write_text("\n".join([lines[0], ",".join(f'"{c}"' for c in cells)]))
    elif case == "no list":
        cells[7] = "{}"
        rounds.write_text("\n".join([lines[0], ",".join(f'"{c}"' for c in cells)]))
    elif case == "classes":
        cells[4] = "[1, 2]"
        rounds.write_text("\n".join([lines[0], ",".join(f'"{c}"' for c in cells)]))
    elif case == "no counts":
        (folder / "label_counts.csv").unlink()
        info = json.loads((folder / "run.json").read_text())
        del info["dataset"]["classes"]
        (folder / "run.json").write_text(json.dumps(info))
    elif case == "counts":
        (folder / "label_counts.csv").write_text("client,a\n0,many\n")
    elif case == "twice":
        text = (folder / "label_counts.csv").read_text()
        (folder / "label_counts.csv").write_text(text + text.splitlines()[1] + "\n")
    elif case in ABOUT:
        about = json.loads((folder / "run.json").read_text())
        about |= {"config": about["config"] | {"seed": None}} if case == "seed" else {case: 3}
        (folder / "run.json").write_text(json.dumps(about))
    elif case in DAMAGED:
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {case: DAMAGED[case]}))
    elif case == "paper":
        (folder.parent / "paper_figures.json").write_text('{"fedavg": "high"}')


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("run.json", r"run\.json: is not JSON"),
        ("config", r"run\.json: field 'config'"),
        ("column", r"rounds\.csv: column 'round' is missing"),
        ("short line", r"rounds\.csv: line 5 has 2 cells, the header has 12"),
        ("number", r"rounds\.csv: round 1, column accuracy: 'many' is not a number"),
        ("stranger", r"rounds\.csv: round 1, column clients: client '999' has no row"),
        ("no list", r"rounds\.csv: round 1, column clients: '{}' is not a JSON list"),
        ("classes", r"rounds\.csv: round 1, column class_accuracy: 2 values for 10 classes"),
        ("no counts", r"label_counts\.csv: missing, and run\.json names no classes"),
        ("counts", r"label_counts\.csv: line 2: 'many' is not a number"),
        ("twice", r"label_counts\.csv: a client is listed twice"),
        *((name, rf"run\.json: {name} is 3; accepted: an object; delete the run's folder") for name in ABOUT[:3]),
        ("seed", r"run\.json: seed is None; accepted: a whole number"),
        ("diverged_round", r"summary\.json: diverged_round is inf; accepted: a whole number or null; delete the run's"),
        ("h_norm", r"summary\.json: h_norm is 'high'; accepted: a finite number or null"),
        ("accuracy", r"summary\.json: accuracy is nan; accepted: a finite number or null"),
        ("rounds", r"summary\.json: rounds is 3\.5; accepted: a whole number; "),
        ("bytes_up", r"summary\.json: bytes_up is None; accepted: a finite number; "),
        ("paper", r"paper_figures\.json: figure 'high' of 'fedavg'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, case: str, message: str) -> None:
    _break(write_run(tmp_path, RunConfig(clients=20, rounds=3), classes=CLASSES), case)
    with pytest.raises(InputError, match=message):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_folders_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no results in it"):
        write_report(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"config": {}}')
    with pytest.raises(InputError, match="none has finished a round"):
        write_report(tmp_path)


def test_a_folder_that_was_never_put_in_place_is_no_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, RunConfig(clients=10, rounds=2), classes=("a", "b"))
    shutil.copytree(folder, tmp_path / f".{folder.name}.part")
    assert [run.run_id for run in read_folder(tmp_path).runs] == [folder.name]


def test_a_run_that_is_there_in_two_spellings_counts_once(tmp_path: Path) -> None:
    """Versions before kept a partition as it was typed, and `--no-resume` writes such a run under its name of now."""
    now = RunConfig(clients=20, rounds=3)
    other = write_run(tmp_path, RunConfig(clients=20, rounds=3, seed=1), classes=CLASSES)
    folders = {"now": write_run(tmp_path, now, classes=CLASSES)}
    for spelling in ("dir:.1", "dir:1e-1"):
        old = RunConfig(clients=20, rounds=3)
        object.__setattr__(old, "partition", spelling)
        folders[spelling] = write_run(tmp_path, old, classes=CLASSES)
    folders["copy"] = shutil.copytree(folders["now"], tmp_path / "a-copy")
    found = read_folder(tmp_path)
    assert [run.path for run in found.runs] == [folders["now"], other]
    assert sorted(found.doubles) == sorted(folder.name for what, folder in folders.items() if what != "now")
    assert [run.path for run in find_runs(tmp_path)] == [folders["now"], other]
    text = write_report(tmp_path).read_text()
    assert "2 runs" in text
    for name in found.doubles:
        assert name in text.partition("Not shown, another folder holds a run of the same settings")[2]
    (folders["now"] / "summary.json").unlink()  # begun anew and not finished: the finished one counts
    (folders["copy"] / "summary.json").unlink()
    assert [run.path for run in find_runs(tmp_path)] == [run.path for run in read_folder(tmp_path).runs]
    assert read_folder(tmp_path).runs[0].finished
