"""`fedentopt reproduce`, whole commands: on digits end to end, stopped and continued, on tiny official files."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import tiny_data
from command_line import Said, commander
from fedentopt import KLSelector
from fedentopt.cli.reproduce_progress import Reporter, RoundCount, duration
from fedentopt.datasets import load
from fedentopt.files import locked_folder
from fedentopt.paper.estimate import Speed, costs, known_speeds, training_samples
from fedentopt.results import environment
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.planning import RunPlanner

MINI = """
[settings]
clients = 10
participation = 20
rounds = 3
seeds = 2
epochs = 1
lr = 0.05
evaluate_every = 1

[[cells]]
table = "mini"
metric = "accuracy"
model = "lenet5"
dataset = "digits"
partition = "classes:2"
method = ["fedavg", "fedentopt"]
paper = 12.5

[[cells]]
table = "mini-change"
metric = "accuracy_change"
model = "lenet5"
dataset = "digits"
partition = "classes:2"
method = "fedprox+fedentopt"

[[cells]]
table = "mini-entropy"
metric = "entropy"
model = "lenet5"
dataset = "digits"
partition = "classes:2"
method = ["fedavg", "fedentopt"]
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commander(monkeypatch, capsys)


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    path = tmp_path / "mini.toml"
    path.write_text(MINI)
    return path


def cells_of(said: Said) -> list[dict]:
    assert said.code == 0, said.err
    return json.loads(said.out)["cells"]


def rounds_of(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Rounds of every run below a folder, without the seconds they took."""
    runs = {}
    for path in sorted(folder.glob("*/rounds.csv")):
        with path.open(newline="") as file:
            rows = [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]
        runs[path.parent.name] = rows
    return runs


def test_a_dry_run_says_which_speeds_are_measured_and_which_estimated(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    where = ("reproduce", "vgg11-open", "--out", tmp_path, "--device", "cuda", "--dry-run")
    lines = {line["model"]: line for line in json.loads(command(*where, "--json").out)["stacks"]}
    assert {model: line["speed"] for model, line in lines.items()} == {"vgg11": "measured", "vgg11-bn": "estimated"}
    for line in lines.values():
        assert line["seconds"] == pytest.approx(line["samples"] / line["samples_per_second"])
    said = command(*where).out
    assert re.search(r"vgg11 .*measured .*\n.*vgg11-bn .*estimated ", said)
    assert "speeds of one H200: measured for vgg11; estimated for vgg11-bn" in said
    given = command(*where, "--samples-per-second", 100).out
    assert "time at the speed that was given" in given
    assert "measured" not in given


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_model_of_the_paper_has_one_speed(device: str) -> None:
    about = tomllib.loads(files("fedentopt.paper").joinpath("speed.toml").read_text(encoding="utf-8"))[device]
    assert not about["measured"].keys() & about["estimated"].keys()
    _, speeds = known_speeds(device)
    assert speeds.keys() >= {"lenet5", "vgg11", "vgg11-bn", "efficientnet-b0", "efficientnet-b3", "efficientnet-lite0"}
    assert speeds["lenet5"].source == "measured"


def test_a_miniature_from_cells_to_tables(command: Callable[..., Said], mini: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    where = ("--cells", mini, "--out", out, "--device", "cpu", "--workers", 1)
    assert {cell["state"] for cell in cells_of(command("reproduce", "all", *where, "--list", "--json"))} == {"not-run"}

    planned = json.loads(command("reproduce", *where, "--dry-run", "--json", "--samples-per-second", 100).out)
    # Five cells; FedAvg, FedEntOpt, FedProx and FedProx + FedEntOpt in two seeds each.
    assert (planned["cells"], planned["wanted"], planned["runs"]) == (5, 8, 8)
    assert planned["samples"] == 8 * round(3 * 2 * 1438 / 10)
    assert planned["seconds"] == pytest.approx(planned["samples"] / 100)

    # A trial of two rounds is told apart from the cells it is a trial of.
    trial = cells_of(command("reproduce", "mini", *where, "--rounds", 2, "--seeds", 0, "--json", "--no-page"))
    assert [cell["state"] for cell in trial] == ["partly", "partly"]
    assert trial[0]["ours"] is not None
    assert {cell["state"] for cell in cells_of(command("reproduce", *where, "--list", "--json"))} == {"not-run"}
    again = cells_of(command("reproduce", "mini", *where, "--list", "--json", "--rounds", 2, "--seeds", 0))
    assert [(cell["state"], cell["seeds"]) for cell in again] == [("partly", [0]), ("partly", [0])]

    one = cells_of(command("reproduce", "mini", *where, "--method", "fedavg", "--seeds", 1, "--json", "--no-page"))
    assert [(cell["method"], cell["state"], cell["seeds"]) for cell in one] == [("fedavg", "done", [1])]
    before = rounds_of(out)

    said = command("reproduce", "all", *where, "--export", kept, "--max-stack", 5, "--json")
    cells = cells_of(said)
    assert [(cell["table"], cell["method"], cell["state"], cell["seeds"]) for cell in cells] == [
        ("mini", "fedavg", "done", [0, 1]),
        ("mini", "fedentopt", "done", [0, 1]),
        ("mini-change", "fedprox+fedentopt", "done", [0, 1]),
        ("mini-entropy", "fedavg", "done", [0, 1]),
        ("mini-entropy", "fedentopt", "done", [0, 1]),
    ]
    assert "stack 2 of 2" in said.err  # seven runs were left, five at most in a stack
    after = rounds_of(out)
    assert {name: after[name] for name in before} == before  # what was finished was not run again
    assert len([name for name in after if name not in before]) == 7
    accuracy = [float(row["accuracy"]) for name, rows in after.items() for row in rows
                if name.startswith("fedavg_") and len(rows) == 3]  # fmt: skip
    assert cells[0]["ours"] == pytest.approx(sum(accuracy) / 6, abs=1e-3)
    assert cells[0]["paper"] == 12.5

    files = {Path(name).relative_to(tmp_path).as_posix() for name in json.loads(said.out)["files"]}
    assert {f"out/tables/mini.{kind}" for kind in ("md", "csv", "tex")} <= files
    assert {"out/figures/mini-entropy.svg", "out/figures/mini-entropy.png", "out/report.html"} <= files
    assert {"kept/mini.csv", "kept/mini-entropy_curves.csv", "kept/tables/mini-change.tex"} <= files
    assert all((tmp_path / name).stat().st_size for name in files)
    log = json.loads((kept / "provenance.json").read_text())["commands"]
    assert [entry["runs"] for entry in log] == [1, 7]  # a trial is behind no result
    assert "--export kept" in log[-1]["command"]
    assert str(tmp_path) not in json.dumps(log)

    # From the exported folder alone, on a machine without the runs: the same cells, the same bytes.
    alone = tmp_path / "alone"
    shown = command("reproduce", "--cells", mini, "--results", kept, "--out", alone, "--json")
    assert cells_of(shown) == cells
    for table in ("mini", "mini-change", "mini-entropy"):
        for kind in ("md", "csv", "tex"):
            made = (alone / "tables" / f"{table}.{kind}").read_bytes()
            assert made == (out / "tables" / f"{table}.{kind}").read_bytes()
            assert made == (kept / "tables" / f"{table}.{kind}").read_bytes()
    # One seed asked for: the committed tables are those of the plan all the same.
    before = {path.name: path.read_bytes() for path in (kept / "tables").iterdir()}
    seed = command(
        "reproduce", "mini", *where, "--method", "fedavg", "--seeds", 1, "--no-run", "--export", kept, "--no-page"
    )
    assert seed.code == 0
    assert {path.name: path.read_bytes() for path in (kept / "tables").iterdir()} == before
    # What another machine has exported needs no run here.
    other = command("reproduce", "--cells", mini, "--out", tmp_path / "other", "--known", kept, "--no-page")
    assert other.code == 0
    assert "nothing to do" in other.err
    assert "5 cells: 5 done" in other.out


def test_stopped_and_continued_equals_straight_through(
    command: Callable[..., Said], mini: Path, tmp_path: Path
) -> None:
    mini.write_text(MINI.replace("rounds = 3", "rounds = 40"))
    words = [
        "reproduce",
        "mini",
        "--cells",
        str(mini),
        "--seeds",
        "0",
        "--device",
        "cpu",
        "--workers",
        "1",
        "--no-page",
    ]
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    start = [sys.executable, "-c", "from fedentopt.cli import main; main()"]
    process = subprocess.Popen(
        [*start, *words, "--out", str(stopped), "--checkpoint-every", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    end = time.monotonic() + 120
    while time.monotonic() < end and len(rounds_of(stopped)) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.count("stopping after this round") == 1
    assert "the same command goes on there" in errors
    done = {name: len(rows) for name, rows in rounds_of(stopped).items()}
    assert len(done) == 2
    assert all(0 < count < 40 for count in done.values())
    assert not list(stopped.glob("*/summary.json"))
    assert [cell["state"] for cell in cells_of(command(*words, "--out", stopped, "--list", "--json"))] == [
        "not-run"
    ] * 2
    # The estimate is of the rounds that are left: of 40, two clients with a tenth of the samples in each.
    planned = json.loads(command(*words, "--out", stopped, "--dry-run", "--json").out)
    assert (planned["runs"], planned["begun"]) == (2, 2)
    assert planned["samples"] == pytest.approx(sum(40 - count for count in done.values()) * 2 * 1438 / 10, abs=2)
    assert "2 still to be done, 2 of them from a checkpoint" in command(*words, "--out", stopped, "--dry-run").out

    went_on = cells_of(command(*words, "--out", stopped, "--json"))
    assert [cell["state"] for cell in went_on] == ["done", "done"]
    for name, count in done.items():
        about = json.loads((stopped / name / "run.json").read_text())
        assert about["resumed"][0]["round"] == count + 1
    assert went_on == cells_of(command(*words, "--out", straight, "--json"))
    assert rounds_of(stopped) == rounds_of(straight)

    for name in done:
        (stopped / name / ".lock").write_text("4194305\n")  # as a stack that is killed leaves it in finished runs
    assert went_on == cells_of(command(*words, "--out", stopped, "--json"))
    assert not list(stopped.glob("*/.lock"))


def test_cells_whose_data_is_not_there_are_listed_and_refused(command: Callable[..., Said], tmp_path: Path) -> None:
    data = tmp_path / "data"
    tiny_data.class_folders(data / "cinic10", {"train": 60, "test": 2}, tiny_data.CINIC_CLASSES)
    listed = cells_of(command("reproduce", "table1", "--list", "--json", "--data-dir", data, "--out", tmp_path / "out"))
    states = {cell["dataset"]: cell["state"] for cell in listed}
    assert states == {"cifar10": "missing-data", "cifar100": "missing-data", "cinic10": "not-run"}
    said = command("reproduce", "table1", "--dataset", "cifar10", "--data-dir", data, "--out", tmp_path / "out")
    assert said.code == 2
    assert "cifar10" in said.err
    assert "data fetch" in said.err
    # The cell of the paper itself, cut to a round, on 600 images in the official layout: 200 clients of three.
    said = command(
        "reproduce", "table1", "--dataset", "cifar10,cinic10", "--model", "lenet5", "--partition", "classes:2",
        "--method", "fedavg,fedentopt", "--rounds", 1, "--seeds", 0, "--data-dir", data, "--out", tmp_path / "out",
        "--device", "cpu", "--workers", 1, "--no-page", "--json",
    )  # fmt: skip
    found = {(cell["dataset"], cell["method"]): cell["state"] for cell in cells_of(said)}
    assert found == {
        ("cifar10", "fedavg"): "missing-data",
        ("cifar10", "fedentopt"): "missing-data",
        ("cinic10", "fedavg"): "partly",
        ("cinic10", "fedentopt"): "partly",
    }
    assert "cifar10: its files are not there, 2 runs are left out" in said.err
    (run,) = (tmp_path / "out").glob("fedentopt_cinic10_*/rounds.csv")
    with run.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert len(json.loads(row["clients"])) == 20


MEDICAL = """
[settings]
clients = 4
participation = 50
rounds = 1
seeds = 1
epochs = 1
image_size = 32
min_samples = 1

[[cells]]
table = "table4"
metric = "accuracy"
model = "efficientnet-b0"
dataset = ["pathmnist", "tissuemnist", "brain-tumor-mri"]
partition = "dir:0.1"
method = ["fedavg", "fedentopt"]
buffer = 25
"""


def test_medical_cells_run_on_tiny_files_in_their_official_layout(command: Callable[..., Said], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    tiny_data.medmnist(data / "pathmnist.npz", side=28, grey=False, classes=9, train=54)
    tiny_data.medmnist(data / "tissuemnist.npz", side=28, grey=True, classes=8, train=48, test=8)
    tiny_data.class_folders(data / "brain-tumor-mri", {"Training": 12, "Testing": 2}, tiny_data.BRAIN_CLASSES)
    listed = cells_of(command("reproduce", "table4", "--list", "--json", "--data-dir", data, "--out", tmp_path / "o"))
    assert {cell["state"] for cell in listed} == {"not-run"}  # the paper's own cells find these files
    path = tmp_path / "medical.toml"
    path.write_text(MEDICAL)
    said = command(
        "reproduce", "all", "--cells", path, "--data-dir", data, "--out", tmp_path / "out", "--device", "cpu",
        "--workers", 1, "--no-page", "--no-figures", "--json",
    )  # fmt: skip
    assert [(cell["dataset"], cell["state"]) for cell in cells_of(said)] == [
        (name, "done") for name in ("pathmnist", "tissuemnist", "brain-tumor-mri") for _ in range(2)
    ]
    assert said.err.count("stack ") == 3  # one a data set and model


def test_runs_of_a_data_set_in_two_published_sizes_are_not_averaged(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of 28 pixels are scaled up to 32 until there are larger ones: other data under the same name."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    tiny_data.medmnist(Path("data/pathmnist.npz"), side=28, grey=False, classes=9, train=54)
    datasets = '"pathmnist", "tissuemnist", "brain-tumor-mri"'
    Path("cells.toml").write_text(MEDICAL.replace("efficientnet-b0", "lenet5").replace(datasets, '"pathmnist"'))
    quick = ("--data-dir", "data", "--device", "cpu", "--workers", 1, "--no-page")
    words = ("reproduce", "all", "--cells", "cells.toml", *quick, "--no-figures")
    assert command(*words, "--out", "out", "--seeds", 0, "--export", "first").code == 0
    setting = (
        "--dataset pathmnist --image-size 32 --partition iid --clients 4 --cohort 2 --buffer 1 --rounds 1 --epochs 1"
    )
    single = ("compare", *setting.split(), "--out", "compared", *quick)
    assert command(*single, "--seeds", "0").code == 0
    assert command(*words, "--out", "out", "--seeds", "0,1").code == 0

    tiny_data.medmnist(Path("data/pathmnist_64.npz"), side=64, grey=False, classes=9, train=54)
    before = sorted(Path().glob("*/*/summary.json"))
    for where, said in (
        ((*words, "--out", "out", "--seeds", 2), "dataset: 'pathmnist' is not what out/fedavg_pathmnist_"),
        ((*words, "--out", "new", "--seeds", 1, "--known", "first"), "known: the data behind fedavg on pathmnist have"),
        ((*words, "--out", "new", "--seeds", 1, "--export", "first"), "export: first holds results of fedavg on path"),
        ((*single, "--seeds", "0,1"), "dataset: 'pathmnist' is not what compared/fedavg_pathmnist_"),
    ):
        refused = command(*where)
        assert (refused.code, said in refused.err.replace("\n", " ")) == (2, True), refused.err
    assert sorted(Path().glob("*/*/summary.json")) == before
    Path("data/pathmnist_64.npz").unlink()
    assert command(*words, "--out", "out", "--seeds", 2).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "'table9' is unknown; accepted: table1"),
        (["table1", "--model", "resnet"], "model: no cell of table1 has 'resnet'; accepted: lenet5, vgg11"),
        (
            ["figure2", "--participation", "12"],
            "participation: no cell of figure2 has 12.0; accepted: 4, 5, 6, 7, 8, 9",
        ),
        (["figure2", "--participation", "few"], "participation: 'few' is not a number"),
        (["table1", "--seeds", "0,x"], "seeds: '0,x' cannot be read"),
        (["table1", "--rounds", "0"], "rounds: 0 is out of range"),
        (["table1", "--rounds", "5", "--export", "e"], "export: runs cut short with --rounds are no results"),
        (["table1", "--results", "none"], "results: none is not a folder"),
        (["table1", "--results", "a", "--known", "b"], "known: does not go with --results"),
        (["table1", "--cells", "none.toml"], "none.toml cannot be read"),
        (["table1", "--dry-run", "--json", "--samples-per-second", "nan"], "samples-per-second: nan is no speed"),
        (["table1", "--dry-run", "--json", "--samples-per-second", "inf"], "samples-per-second: inf is no speed"),
    ],
)
def test_wrong_words_are_refused_with_what_would_do(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("reproduce", *words)
    assert (said.code, message in said.err.replace("\n", " ")) == (2, True), said.err
    assert not list(tmp_path.iterdir())


def test_the_list_shows_committed_results_where_there_are_no_runs(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedentopt.paper.blocks import paper_cells
    from fedentopt.paper.exported import export
    from fedentopt.paper.measures import Measured, Results, settings_key

    cell = paper_cells()[0]
    assert cell.config is not None
    key = settings_key(cell.config)
    runs = {(key, seed): Measured(settings=key, seed=seed, rounds=500, accuracy=47.0) for seed in range(5)}
    export(tmp_path / "results" / "paper", paper_cells(), Results(None, runs))
    monkeypatch.chdir(tmp_path)
    row = ("table1", "--model", "lenet5", "--dataset", "cifar10", "--partition", "dir:0.1", "--method", "fedavg")
    said = command("reproduce", *row, "--list", "--json")
    assert "these are the results in results/paper" in said.err
    (listed,) = cells_of(said)
    assert (listed["state"], listed["ours"], listed["std"], listed["seeds"]) == ("done", 47.0, 0.0, [0, 1, 2, 3, 4])
    (elsewhere,) = cells_of(command("reproduce", *row, "--list", "--json", "--out", "nowhere"))
    assert elsewhere["seeds"] == []
    export(tmp_path / "mine", paper_cells(), Results(None, {(key, 3): runs[key, 3]}))
    (mine,) = cells_of(command("reproduce", *row, "--list", "--json", "--known", "mine"))
    assert (mine["state"], mine["seeds"]) == ("partly", [3])
    shown = command("reproduce", *row, "--list")
    assert "table1, lenet5, cifar10, accuracy, 10 % of clients" in shown.out
    assert "1 cells: 1 done" in shown.out


def test_exporting_adds_and_takes_nothing_away(command: Callable[..., Said], mini: Path, tmp_path: Path) -> None:
    out, first, second = tmp_path / "out", tmp_path / "first", tmp_path / "second"
    quick = ("--device", "cpu", "--workers", 1, "--no-page", "--no-figures")
    said = command("reproduce", "mini", "--cells", mini, "--out", out, "--seeds", "1-3", "--export", first, *quick)
    assert said.code == 0, said.err

    def seeds(folder: Path) -> list[tuple[str, str, str]]:
        with (folder / "mini.csv").open(newline="") as file:
            return [(row["partition"], row["method"], row["seed"]) for row in csv.DictReader(file)]

    ran = [("classes:2", method, str(seed)) for method in ("fedavg", "fedentopt") for seed in (1, 2, 3)]
    assert seeds(first) == ran
    # Seeds that the cells do not ask for travel too, from an exported folder and from run folders.
    assert command("reproduce", "--cells", mini, "--results", first, "--export", second).code == 0
    assert (second / "mini.csv").read_bytes() == (first / "mini.csv").read_bytes()
    third = tmp_path / "third"
    assert command("reproduce", "--cells", mini, "--out", out, "--no-run", "--export", third, *quick).code == 0
    assert seeds(third) == ran

    # Another file's cells of the same table, and rows made with other settings, stay.
    other = tmp_path / "other.toml"
    other.write_text(mini.read_text().replace("classes:2", "iid"))
    words = ("--cells", other, "--out", out, "--method", "fedavg", "--seeds", "0", *quick)
    assert command("reproduce", "mini", *words, "--export", first).code == 0
    assert seeds(first) == [("iid", "fedavg", "0"), *ran]
    assert command("reproduce", "--cells", mini, "--results", second, "--export", first).code == 0
    assert sorted(seeds(first)) == sorted([("iid", "fedavg", "0"), *ran])
    once = (first / "mini.csv").read_bytes()
    assert command("reproduce", "--cells", mini, "--results", second, "--export", first).code == 0
    assert (first / "mini.csv").read_bytes() == once


def test_exports_into_one_folder_at_once_keep_each_others_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedentopt.paper import exported
    from fedentopt.paper.blocks import paper_cells
    from fedentopt.paper.measures import Measured, Results, settings_key
    from fedentopt.paper.reproduction import Reproduction

    cells = paper_cells()[:2]
    requests = []
    for cell in cells:
        assert cell.config is not None
        key = settings_key(cell.config)
        run = Measured(settings=key, seed=0, rounds=500, accuracy=47.0)
        requests.append(Reproduction(cells, cells, Results(None, {(key, 0): run})))
    write, other = exported.write_text, threading.Thread(target=lambda: requests[1].export(tmp_path))

    def while_another_begins(path: Path, text: str) -> None:
        if not other.ident:
            other.start()
            other.join(0.5)  # as long as it takes to read, add and write, unless it has to wait
        write(path, text)

    monkeypatch.setattr(exported, "write_text", while_another_begins)
    requests[0].export(tmp_path)
    other.join()
    with (tmp_path / f"{cells[0].table}.csv").open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == [cell.method for cell in cells]
    assert not list(tmp_path.glob(".lock"))


def test_an_export_that_has_to_wait_too_long_does_not_stop_training(
    command: Callable[..., Said], mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedentopt.paper.reproduction.FOLDER_PATIENCE", 0.1)
    out, kept = tmp_path / "out", tmp_path / "kept"
    kept.mkdir()
    words = ("reproduce", "mini", "--cells", mini, "--out", out, "--seeds", 0, "--export", kept, "--max-stack", 1)
    words += ("--device", "cpu", "--workers", 1, "--no-page", "--no-figures")
    with locked_folder(kept):
        said = command(*words)
    assert said.code == 2
    assert said.err.replace("\n", " ").count("in use by another fedentopt") == 3  # two stacks, and the end
    assert len(list(out.glob("*/summary.json"))) == 2
    assert not list(kept.iterdir())
    assert "nothing to do" in command(*words).err
    with (kept / "mini.csv").open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["fedavg", "fedentopt"]
    assert [entry["runs"] for entry in json.loads((kept / "provenance.json").read_text())["commands"]] == [2]


def test_the_log_is_of_the_code_as_training_began(
    command: Callable[..., Said], mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, begin = tmp_path / "package", Reporter.say
    shutil.copytree(Path(environment.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment.fedentopt, "__file__", str(package / "__init__.py"))
    environment.source_digest.cache_clear()
    before = environment.source_digest()

    def say(self: Reporter, line: str) -> None:
        begin(self, line)
        (package / "errors.py").write_text("# edited while the runs train\n")

    monkeypatch.setattr(Reporter, "say", say)
    try:
        environment.source_digest.cache_clear()
        words = ("--cells", mini, "--seeds", 0, "--method", "fedavg", "--device", "cpu", "--no-page", "--no-figures")
        assert command("reproduce", "mini", *words, "--out", tmp_path / "out").code == 0
        (entry,) = json.loads((tmp_path / "out" / "provenance.json").read_text())["commands"]
        assert entry["sources"] == before
    finally:
        environment.source_digest.cache_clear()


def test_runs_of_another_command_are_not_logged_as_ones_own(
    command: Callable[..., Said], mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands in one folder: while the first stack trains, the other command does the run of the second."""
    out = tmp_path / "out"
    words = ("reproduce", "mini", "--cells", mini, "--out", out, "--device", "cpu", "--no-page", "--no-figures")
    begin, count = Reporter.say, []

    def say(self: Reporter, line: str) -> None:
        begin(self, line)
        if line.startswith("stack 1 of 2"):
            count.append(self._count)
            assert subprocess.run([sys.executable, "-m", "fedentopt", *map(str, words), "--method", "fedentopt",
                                   "--seeds", "0"], check=False).returncode == 0  # fmt: skip

    monkeypatch.setattr(Reporter, "say", say)
    assert command(*words, "--seeds", 0, "--max-stack", 1).code == 0
    log = json.loads((out / "provenance.json").read_text())["commands"]
    assert sorted((entry["runs"], "--max-stack" in entry["command"]) for entry in log) == [(1, False), (1, True)]
    assert (count[0].done, count[0].total) == (3, 3)  # the other's three rounds are not waited for


OWN_CELLS = """
[settings]
clients = 10
participation = 20
rounds = 1
seeds = 2
epochs = 1

[[cells]]
table = "own"
metric = "accuracy"
model = "lenet5"
dataset = "own_data.npz"
partition = "iid"
image_size = 32
method = ["fedavg", "own_mixing:Part"]
"""
OWN_CODE = """
from fedentopt.algorithms import Algorithm, Mixing

class Part(Algorithm):
    def mix(self, round):
        return Mixing(own=1 - 0.5, clients=0.5 * round.shares)
"""


def test_runs_of_other_code_or_other_data_are_not_averaged_with_new_ones(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def draw(seed: int) -> None:
        rng, labels = np.random.default_rng(seed), np.arange(60) % 3
        images = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8)
        np.savez("own_data.npz", x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])

    draw(0)
    Path("own_mixing.py").write_text(OWN_CODE)
    Path("cells.toml").write_text(OWN_CELLS)
    quick = ("--no-page", "--no-figures", "--workers", 1, "--device", "cpu")
    words = ("reproduce", "own", "--cells", "cells.toml", *quick)
    assert command(*words, "--out", "out", "--seeds", 0, "--export", "first").code == 0

    Path("own_mixing.py").write_text(OWN_CODE.replace("0.5", "0.25"))
    more = ("--method", "fedavg", "--seeds", 1)  # the table has the other method's row, too
    for where, said in (
        (("--out", "out", *more), "code: the code behind own-mixing-part has changed since out/own-mixing-part_"),
        (("--out", "out", "--no-run"), "code: the code behind own-mixing-part has changed since out/own-mixing-part_"),
        (("--out", "new", "--known", "first"), "known: the code behind own-mixing-part has changed since its results"),
        (
            ("--out", "new", "--export", "first"),
            "export: first holds results of own-mixing-part on own_data.npz by other code",
        ),
    ):
        refused = command(*words, *where)
        assert (refused.code, said in refused.err.replace("\n", " ")) == (2, True), refused.err
    # A list shows the other cells all the same.
    listed = command(*words, "--out", "out", "--list", "--json")
    assert [(cell["method"], cell["state"]) for cell in cells_of(listed)] == [
        ("fedavg", "partly"),
        ("own_mixing:Part", "refused"),
    ]
    assert listed.err.count("refused: code: the code behind own-mixing-part has changed since") == 1
    assert not Path("new").exists()
    assert len(list(Path("out").glob("*/run.json"))) == 2
    # What was exported stands by itself, whatever the code is now, and is not mixed with that of the new code.
    assert command(*words, "--results", "first", "--export", "copy").code == 0
    assert command(*words, "--out", "new", "--seeds", 1, "--export", "second").code == 0
    mixed = command(*words, "--results", "second", "--export", "first")
    assert (mixed.code, "by other code" in mixed.err) == (2, True)
    assert Path("first/own.csv").read_bytes() == Path("copy/own.csv").read_bytes()

    Path("own_mixing.py").write_text(OWN_CODE)
    assert command(*words, "--out", "out", "--seeds", "0,1", "--known", "first").code == 0
    draw(1)
    refused = command(*words, "--out", "out", "--seeds", 2)
    assert (refused.code, "dataset: 'own_data.npz' is not what out/" in refused.err) == (2, True), refused.err
    for where, said in (
        (
            ("--out", "other", "--known", "first"),
            "known: the data behind fedavg on own_data.npz have changed since its results",
        ),
        (
            ("--out", "other", "--export", "first"),
            "export: first holds results of fedavg on own_data.npz by other data",
        ),
    ):
        refused = command(*words, *where, "--seeds", 2)
        assert (refused.code, said in refused.err.replace("\n", " ")) == (2, True), refused.err
    assert not Path("other").exists()
    assert command(*words, "--results", "first", "--export", "third").code == 0, "whatever the data is now"
    assert command(*words, "--out", "other", "--seeds", 2, "--export", "fourth").code == 0
    mixed = command(*words, "--results", "fourth", "--export", "third")
    assert (mixed.code, "by other data" in mixed.err) == (2, True)
    # Runs that others are only compared with count, too.
    draw(0)
    change = OWN_CELLS.replace("accuracy", "accuracy_change").replace('["fedavg", ', '["fedprox+fedentopt"]#')
    Path("cells.toml").write_text(change)
    assert command(*words, "--out", "change", "--seeds", 0).code == 0
    shutil.rmtree(*Path("change").glob("fedprox+*"))
    draw(1)
    refused = command(*words, "--out", "change", "--seeds", 0)
    assert (refused.code, "'own_data.npz' is not what change/fedprox_" in refused.err) == (2, True), refused.err


def test_runs_from_other_start_weights_are_not_averaged_with_new_ones(
    command: Callable[..., Said], mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    from fedentopt.models import build

    monkeypatch.chdir(tmp_path)
    mini.write_text(MINI.replace("seeds = 2", 'seeds = 2\nweights = "start.safetensors"'))
    save_file(build("lenet5", 10, seed=1).state_dict(), "start.safetensors")
    words = ("reproduce", "mini", "--cells", mini, "--method", "fedavg", "--no-page", "--no-figures", "--workers", 1)
    words += ("--device", "cpu")
    assert command(*words, "--out", "out", "--seeds", 0, "--export", "first").code == 0
    save_file(build("lenet5", 10, seed=2).state_dict(), "start.safetensors")
    for where, said in (
        (("--out", "out"), "weights: the file is not the one that out/fedavg_digits_classes2_lenet5_s0_"),
        (("--out", "new", "--known", "first"), "known: the weights behind fedavg on digits have changed since"),
        (("--out", "new", "--export", "first"), "export: first holds results of fedavg on digits by other weights"),
    ):
        refused = command(*words, *where, "--seeds", 1)
        assert (refused.code, said in refused.err.replace("\n", " ")) == (2, True), refused.err
    assert not Path("new").exists()


def test_a_run_whose_partition_was_spelt_otherwise_is_done(
    command: Callable[..., Said], mini: Path, tmp_path: Path
) -> None:
    words = ("reproduce", "mini", "--cells", mini, "--seeds", "3", "--method", "fedavg", "--out", tmp_path / "out")
    quick = ("--device", "cpu", "--workers", 1, "--no-page", "--no-figures", "--json")
    (done,) = cells_of(command(*words, *quick))
    (folder,) = (path.parent for path in (tmp_path / "out").glob("*/run.json"))
    about = json.loads((folder / "run.json").read_text())
    about["config"]["partition"] = "classes:02"
    (folder / "run.json").write_text(json.dumps(about))
    folder.rename(folder.with_name(folder.name.replace("classes2", "classes02")))
    (tmp_path / "out" / "provenance.json").unlink()
    assert cells_of(command(*words, "--list", "--json")) == [done]
    assert "nothing to do" in command(*words, *quick).err
    # It is found by its own seed, too, where the cells ask for others.
    where = ("--out", tmp_path / "out", "--no-run", "--export", tmp_path / "exported")
    assert command("reproduce", "mini", "--cells", mini, *where, *quick).code == 0
    with (tmp_path / "exported" / "mini.csv").open(newline="") as file:
        assert [(row["method"], row["seed"]) for row in csv.DictReader(file)] == [("fedavg", "3")]


def test_what_is_known_is_exported_with_the_commands_behind_it(
    command: Callable[..., Said], mini: Path, tmp_path: Path
) -> None:
    """Two machines, each with a seed: the second's folder holds the rows of both, and says what made them."""
    quick = ("--device", "cpu", "--workers", 1, "--no-page", "--no-figures", "--method", "fedavg")
    first, second = tmp_path / "first", tmp_path / "second"
    words = ("reproduce", "mini", "--cells", mini, *quick)
    assert command(*words, "--out", tmp_path / "a", "--seeds", "0", "--export", first).code == 0
    more = ("--out", tmp_path / "b", "--known", first, "--export", second)
    (first / "provenance.json").rename(first / "aside")
    (first / "provenance.json").write_text("{")
    said = command(*words, "--seeds", "0,1", *more)
    assert (said.code, "provenance.json: cannot be read" in said.err.replace("\n", "")) == (2, True)
    assert not (tmp_path / "b").exists(), "before anything is trained"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "provenance.json").write_text("{")
    said = command(*words, "--seeds", "1", "--out", tmp_path / "b")  # what a run's own log would be added to
    assert (said.code, "provenance.json: cannot be read" in said.err.replace("\n", "")) == (2, True)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["provenance.json"]
    assert command(*words, "--out", tmp_path / "b", "--no-run").code == 0, "which adds nothing to it"
    (tmp_path / "b" / "provenance.json").unlink()
    assert command("reproduce", "--cells", mini, "--results", first, "--export", second).code == 2
    assert not second.exists(), "rows without the commands behind them"
    (first / "aside").replace(first / "provenance.json")
    assert command(*words, "--seeds", "0,1", *more).code == 0
    with (second / "mini.csv").open(newline="") as file:
        assert [row["seed"] for row in csv.DictReader(file)] == ["0", "1"]
    logged = json.loads((second / "provenance.json").read_text())["commands"]
    assert sorted(("--seeds 0 " in entry["command"], entry["runs"]) for entry in logged) == [(False, 1), (True, 1)]


def test_what_cannot_be_exported_into_is_refused_before_training(
    command: Callable[..., Said], mini: Path, tmp_path: Path
) -> None:
    words = ("reproduce", "mini", "--cells", mini, "--device", "cpu", "--no-page", "--out", tmp_path / "out")
    (tmp_path / "file").write_text("")
    said = command(*words, "--export", tmp_path / "file")
    assert (said.code, "export: " in said.err, "is not a folder" in said.err) == (2, True, True)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "mini.csv").write_text("table,seed\n")
    said = command(*words, "--export", damaged)
    assert (said.code, "mini.csv: column" in said.err.replace("\n", "")) == (2, True)
    assert not (tmp_path / "out").exists()
    said = command("reproduce", "--known", tmp_path / "nowhere", "--list")
    assert (said.code, "known: " in said.err) == (2, True)
    said = command("reproduce", "--out", tmp_path / "file", "--list")
    assert (said.code, "out: " in said.err) == (2, True)


@pytest.mark.parametrize("option", ["results", "known"])
def test_a_folder_of_runs_is_no_folder_of_exported_results(
    command: Callable[..., Said], mini: Path, tmp_path: Path, option: str
) -> None:
    (tmp_path / "out" / "fedavg_digits").mkdir(parents=True)
    (tmp_path / "out" / "fedavg_digits" / "run.json").write_text("{}")
    said = command("reproduce", "mini", "--cells", mini, f"--{option}", tmp_path / "out", "--dry-run")
    assert (said.code, said.out) == (2, "")
    assert f"{option}: {tmp_path / 'out'} holds runs; accepted: a folder that `reproduce --export` made" in said.err


@pytest.mark.parametrize("model", ["resnet", "nowhere:small"])
def test_a_model_that_is_not_there_is_refused_before_the_first_stack(
    command: Callable[..., Said], mini: Path, tmp_path: Path, model: str
) -> None:
    mini.write_text(MINI.replace('model = "lenet5"', f'model = ["lenet5", "{model}"]'))
    said = command("reproduce", "mini", "--cells", mini, "--device", "cpu", "--out", tmp_path / "out")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: model: ")
    assert model.partition(":")[0] in said.err
    assert not (tmp_path / "out").exists()


def test_no_word_of_a_table_is_cut_in_a_narrow_terminal(
    command: Callable[..., Said], mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("reproduce", "mini-change", "--cells", mini, "--device", "cpu", "--no-page", "--out", tmp_path / "out")
    assert command(*words).code == 0
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    said = command(*words, "--no-run", columns=50)
    assert "FedEntOpt" in said.out
    assert "difference" in said.out
    assert "…" not in said.out


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_results_that_are_no_numbers_are_refused(command: Callable[..., Said], tmp_path: Path, number: str) -> None:
    from fedentopt.paper.blocks import paper_cells
    from fedentopt.paper.exported import export
    from fedentopt.paper.measures import Measured, Results, settings_key

    key = settings_key(paper_cells()[0].config)
    runs = {(key, 0): Measured(settings=key, seed=0, rounds=500, accuracy=47.125)}
    export(tmp_path, paper_cells(), Results(None, runs))
    path = tmp_path / "table1.csv"
    path.write_text(path.read_text().replace("47.125", number))
    said = command("reproduce", "table1", "--results", tmp_path, "--list", "--json")
    assert (said.code, said.out) == (2, "")
    assert f"table1.csv, line 2: accuracy '{number}' is not a finite number" in said.err.replace("\n", "")


def test_a_command_that_finished_nothing_leaves_no_trace_in_the_log(
    command: Callable[..., Said], mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "paper").mkdir(parents=True)
    said = command("reproduce", "mini", "--cells", mini, "--device", "cuda:99", "--export", "kept", "--no-page")
    assert said.code == 2
    assert not list(tmp_path.glob("**/provenance.json"))
    assert "these are the results in results/paper" in command("reproduce", "table5", "--list").err


def test_a_small_dry_run_is_readable(command: Callable[..., Said], mini: Path, tmp_path: Path) -> None:
    words = ("reproduce", "mini", "--cells", mini, "--out", tmp_path / "out", "--dry-run", "--method", "fedavg")
    said = " ".join(command(*words, "--seeds", 0, "--device", "cpu").out.split())
    assert "lenet5 digits 1 863 55,000 measured below 1 s 1 cell needs 1 run, 1 still to be done; speeds" in said
    mini.write_text(MINI.replace('"lenet5"', '"torch.nn:Identity"'))
    said = " ".join(command(*words, "--seeds", 0, "--device", "cpu").out.split())
    assert said.endswith("; no speed is known for torch.nn:Identity (--samples-per-second gives one)")
    said = " ".join(command(*words, "--seeds", 0, "--samples-per-second", 863).out.split())
    assert "863 given 1 s" in said
    assert said.endswith("time at the speed that was given")


def test_a_terminal_has_no_columns_without_figures(command: Callable[..., Said], mini: Path, tmp_path: Path) -> None:
    words = ("reproduce", "mini", "--cells", mini, "--out", tmp_path / "out", "--device", "cpu", "--no-page")
    words += ("--seeds", 0, "--rounds", 1, "--no-figures")
    said = command(*words).out
    assert "without figures" not in said
    assert re.search("^method +ours +paper +difference +against FedAvg, 95 % interval +seeds$", said, re.M)
    mini.write_text(MINI.replace("paper = 12.5", ""))
    said = command(*words).out
    assert "\nwithout figures: paper; difference\n" in said
    assert re.search("^method +ours +against FedAvg, 95 % interval +seeds$", said, re.M)
    assert re.search(r"^FedAvg +\d+\.\d\d +– +1, cut to 1 round$", said, re.M)
    assert "| paper | difference |" in (tmp_path / "out" / "tables" / "mini.md").read_text()


def test_samples_of_a_run_by_hand() -> None:
    plain = RunConfig(dataset="cifar10", rounds=500)
    assert training_samples(plain, 50_000) == 12_500_000  # 500 rounds, 10 clients, 500 samples, 5 epochs
    lost = RunConfig(dataset="cifar10", rounds=500, dropout=0.3)
    assert training_samples(lost, 50_000) == 8_750_000
    slow = RunConfig(dataset="cifar10", rounds=500, stragglers=0.5)
    assert training_samples(slow, 50_000) == 10_000_000  # half of the clients do three of five epochs
    held_out = RunConfig(dataset="cifar10", rounds=500, validation=0.1)
    assert training_samples(held_out, 50_000) == 11_250_000
    concat = RunConfig(dataset="cifar10", rounds=500, algorithm="fedconcat")
    assert training_samples(concat, 50_000) == 0.9 * 12_500_000 + 500 * 10 * 3 * 64


@pytest.mark.parametrize(("split", "most"), [("dir:0.1", True), ("classes:2", False)])
def test_samples_of_a_run_with_kl_are_those_of_the_clients_it_takes(split: str, most: bool) -> None:
    config = RunConfig(dataset="digits", selector="kl", partition=split, clients=20, cohort="4", rounds=3, epochs=2)
    labels = load("digits").y_train
    plan = RunPlanner(config, labels, 10, KLSelector(4)).plan(0)
    usual = training_samples(replace(config, selector="random"), len(labels))
    expected = training_samples(config, len(labels))
    assert expected == pytest.approx(3 * 2 * int(plan.sizes.sum()), rel=0.1)
    assert (expected > 1.2 * usual) == most


def test_rows_that_were_not_asked_for_are_of_the_seeds_that_were(
    command: Callable[..., Said], mini: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("reproduce", "mini", "--cells", mini, "--out", out, "--device", "cpu", "--no-page", "--no-figures")
    assert command(*words).code == 0

    def seeds(name: str) -> list[tuple[str, str]]:
        with (out / "tables" / name).open(newline="") as file:
            return [(row["method"], row["seeds"]) for row in csv.DictReader(file)]

    assert seeds("mini.csv") == [("fedavg", "0 1"), ("fedentopt", "0 1")]
    # FedAvg over seed 1 beside FedEntOpt over both would compare partitions, not methods.
    assert command(*words, "--method", "fedavg", "--seeds", 1, "--no-run").code == 0
    assert seeds("mini.csv") == [("fedavg", "1"), ("fedentopt", "1")]
    assert command(*words, "--method", "fedavg", "--no-run").code == 0
    assert seeds("mini.csv") == [("fedavg", "0 1"), ("fedentopt", "0 1")]


def test_time_left_counts_only_what_this_command_does() -> None:
    first, second = RunConfig(rounds=10, seed=0), RunConfig(rounds=10, seed=1)
    count = RoundCount([first, second], now=100.0)
    assert count.line(now=100.0) == "0 of 20 rounds, 0 of 2 runs"
    count.add(first.run_id, 6, 10)  # continued: rounds 1 to 5 were done before
    assert (count.done, count.total) == (1, 15)
    for number in range(7, 11):
        count.add(first.run_id, number, 10)
    assert count.line(now=110.0) == "5 of 15 rounds, 1 of 2 runs, 10 s so far, about 20 s left"
    assert [duration(value) for value in (5, 600, 7200, 3 * 86400)] == ["5 s", "10 min", "2.0 h", "3.0 days"]


def test_time_left_counts_rounds_by_what_they_cost() -> None:
    quick, slow = RunConfig(dataset="digits", rounds=10), RunConfig(dataset="cifar10", model="vgg11", rounds=10)
    sizes, speeds = {"digits": 1000, "cifar10": 5000}, {"lenet5": Speed(100.0, "given"), "vgg11": Speed(1.0, "given")}
    found = costs([quick, slow], sizes.get, speeds.get)
    assert found == {
        quick.run_id: training_samples(quick, 1000) / 100 / 10,
        slow.run_id: training_samples(slow, 5000) / 10,
    }
    # One that is not known cannot be compared with the others.
    assert costs([quick, slow], {"digits": 1000}.get, speeds.get) == {}
    assert costs([quick, slow], sizes.get, {"vgg11": speeds["vgg11"]}.get) == {}

    count = RoundCount([quick, slow], 0.0, {quick.run_id: 1.0, slow.run_id: 49.0})
    for number in range(1, 11):
        count.add(quick.run_id, number, 10)
    # Half of the rounds, and 10 of 500 parts of the work.
    assert count.line(40.0) == "10 of 20 rounds, 1 of 2 runs, 40 s so far, about 33 min left"
    assert count.work == (10.0, 500.0)
