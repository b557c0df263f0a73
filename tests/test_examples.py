"""The example scripts, run as a user runs them, in a folder of the user's."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedentopt.algorithms import Client, Round

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*words: str | Path, cwd: Path) -> str:
    """Standard output of a Python script or of the command line; a failure shows what it said."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def fedentopt(*words: str, cwd: Path) -> str:
    return run("-c", "from fedentopt.cli import main; main()", *words, cwd=cwd)


def rounds_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "rounds.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_selection_from_a_csv_takes_ten_lines(tmp_path: Path) -> None:
    script = EXAMPLES / "select_from_csv.py"
    code = [line for line in script.read_text().splitlines() if line and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 10
    lines = run(script, cwd=tmp_path).splitlines()
    assert len(lines) == 5
    with (EXAMPLES / "label_counts.csv").open(newline="") as stream:
        known = {row["client"] for row in csv.DictReader(stream)}
    cohorts = [re.findall(r"hospital-\d+", line) for line in lines]
    assert all(len(set(cohort)) == 4 for cohort in cohorts)
    assert {client for cohort in cohorts for client in cohort} <= known
    # The buffer keeps eight clients out, so two cohorts in a row share nobody.
    assert all(not set(now) & set(then) for now, then in itertools.pairwise(cohorts))


def test_selection_from_another_csv(tmp_path: Path) -> None:
    names = [f"k{i}" for i in range(16)]
    rows = [f"{name},{int(i % 2 == 0)},{int(i % 2)}" for i, name in enumerate(names)]
    (tmp_path / "mine.csv").write_text("\n".join(["client,a,b", *rows]))
    lines = run(EXAMPLES / "select_from_csv.py", "mine.csv", cwd=tmp_path).splitlines()
    assert len(lines) == 5
    assert all(line.endswith("(1.00 bits)") for line in lines), "two of each class: one bit"


def test_own_data(tmp_path: Path) -> None:
    lines = run(EXAMPLES / "own_data.py", "--out", "here", cwd=tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["fedavg", "fedentopt"]
    assert all(0 < float(line.split()[-2]) <= 100 for line in lines[:2])
    assert (tmp_path / lines[-1]).is_file()
    folders = [path.parent for path in (tmp_path / "here").glob("*/summary.json")]
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "run.json").read_text())["dataset"]["classes"] == ["zero", "one", "two"]
        assert (folder / "label_counts.csv").read_text().startswith("client,zero,one,two\n")


def test_own_model(tmp_path: Path) -> None:
    assert re.fullmatch(
        r"small_net: \d+\.\d % after 3 rounds\n", run(EXAMPLES / "own_model.py", "--out", "here", cwd=tmp_path)
    )
    (folder,) = [path.parent for path in (tmp_path / "here").glob("*/summary.json")]
    parameters = 3 * 8 * 9 + 8 + 8 * 16 * 9 + 16 + 256 * 32 + 32 + 32 * 10 + 10
    # Four clients per round get the model, four bytes per parameter.
    assert {int(row["bytes_down"]) for row in rounds_of(folder)} == {4 * 4 * parameters}


def test_sweep_trains_what_is_missing_and_no_more(tmp_path: Path) -> None:
    words = (EXAMPLES / "sweep.py", "--out", "here", "--rounds", "2")
    first = run(*words, cwd=tmp_path)
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "here").glob("*/summary.json")}
    assert len(stamps) == 6
    assert [line.split(": ")[0] for line in first.splitlines()[:3]] == [
        f"fedentopt:buffer={size}%" for size in (0, 40, 80)
    ]
    assert run(*words, cwd=tmp_path) == first
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps


def test_own_selector_and_algorithm(tmp_path: Path) -> None:
    file = EXAMPLES / "own_method.py"
    assert len(file.read_text().splitlines()) < 60
    (tmp_path / "own_method.py").write_text(file.read_text())
    common = ["--clients", "10", "--cohort", "4", "--rounds", "4", "--epochs", "1", "--workers", "1", "--out", "out"]
    fedentopt("run", "--selector", "own_method:RoundRobin", "--algorithm", "own_method:Damped", *common, cwd=tmp_path)
    (folder,) = [path.parent for path in (tmp_path / "out").glob("*/summary.json")]
    picks = [json.loads(row["clients"]) for row in rounds_of(folder)]
    assert picks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]


def test_own_algorithm_goes_half_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from own_method import Damped  # type: ignore[import-not-found,unused-ignore]

    shares, steps = np.array([0.25, 0.75]), np.array([3, 9])
    round_ = Round(1, (4, 7), shares, steps, np.ones((2, 3)), 0.1, 0.9, 10, torch.from_numpy)
    mixing = Damped(part=0.5, mu=0.1).mix(round_)
    assert mixing.own == 0.5
    assert mixing.clients.tolist() == [0.125, 0.375]
    assert Damped(part=0.5, mu=0.1).local_terms(Client(4, np.array([1, 2]))).mu == 0.1


def test_own_methods_with_a_memory_learn_and_go_on(tmp_path: Path) -> None:
    """The selector asks everybody first, then those with the highest losses; stopped and continued it does the same."""
    (tmp_path / "own_feedback.py").write_text((EXAMPLES / "own_feedback.py").read_text())
    common = ["--clients", "10", "--cohort", "4", "--epochs", "1", "--workers", "1", "--rounds", "5", "--out", "out"]
    common += ["--method", "own_feedback:SignStep:length=0.002+own_feedback:HardestFirst:forget=0.5", "--seeds", "0"]
    fedentopt("compare", *common, cwd=tmp_path)
    (folder,) = [path.parent for path in (tmp_path / "out").glob("*/summary.json")]
    picks = [set(json.loads(row["clients"])) for row in rounds_of(folder)]
    assert picks[0] | picks[1] | picks[2] == set(range(10))
    assert picks[0].isdisjoint(picks[1])
    config = json.loads((folder / "run.json").read_text())["config"]
    assert (config["algorithm.length"], config["selector.forget"]) == (0.002, 0.5)
