"""`fedentopt compare`, whole commands on the embedded digits."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Said, commander
from fedentopt.cli import compare as compare_command
from fedentopt.results.reading import find_runs
from fedentopt.selection import KLSelector
from fedentopt.selection.measures import entropy
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.jobs import DEFAULT_METHODS, make_jobs

SMALL = shlex.split("--clients 20 --cohort 2 --buffer 4 --rounds 3 --epochs 1 --device cpu --workers 1")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commander(monkeypatch, capsys)


def test_a_comparison_ends_with_a_table_plots_and_a_page(command: Callable[..., Said], tmp_path: Path) -> None:
    said = command("compare", *SMALL, "--seeds", "0,1", "--out", tmp_path, "--target", 9)
    assert said.code == 0, said.err
    runs = find_runs(tmp_path)
    assert sorted((run.method, run.seed) for run in runs) == [
        (method, seed) for method in ("fedavg", "fedentopt", "fedentopt-dp") for seed in (0, 1)
    ]
    table = [line for line in said.out.splitlines() if "±" in line and line.startswith("fed")]
    assert [line.split()[0] for line in table] == ["fedavg", "fedentopt", "fedentopt-dp"]
    for line in table:
        mine = [run.summary["accuracy"] for run in runs if run.method == line.split()[0]]
        mean = sum(mine) / 2
        std = abs(mine[0] - mine[1]) / 2**0.5
        assert re.match(rf"\S+\s+{mean:.1f} ± {std:.1f} ", line)
        theirs = [run.summary["accuracy"] for run in runs if run.method == "fedavg"]
        beside = re.search(rf"^{line.split()[0]}  +(\S+)  (\S+) to (\S+)", said.out, re.MULTILINE)
        if line.startswith("fedavg "):
            assert beside is None
            continue
        assert beside is not None, said.out
        assert beside[1] == f"{mean - sum(theirs) / 2:+.1f}"
        assert float(beside[2]) <= float(beside[1]) <= float(beside[3])
    assert "mean of the last three rounds" in said.out
    assert "to 9 %" in said.out
    for name in ("accuracy.png", "accuracy.svg", "report.html"):
        assert (tmp_path / name).stat().st_size > 1000
        assert str(tmp_path / name) in said.out
    assert said.out.rstrip().endswith("report.html")


def test_a_page_of_somebody_else_is_found_before_anything_trains(command: Callable[..., Said], tmp_path: Path) -> None:
    mine = tmp_path / "report.html"
    mine.write_text("<html>my own report</html>")
    said = command("compare", *SMALL, "--seeds", 0, "--out", tmp_path)
    assert (said.code, said.out) == (2, "")
    assert "report.html: is there and no page of fedentopt" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert mine.read_text() == "<html>my own report</html>"


def test_the_table_is_shown_where_a_plot_cannot_be_written(command: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "accuracy.png").mkdir()
    said = command("compare", *SMALL, "--method", "fedavg", "--seeds", 0, "--out", tmp_path)
    assert said.code == 2
    assert "accuracy.png: Is a directory" in said.err
    assert "accuracy: test accuracy" in said.out


def test_a_method_given_with_and_without_a_default_counts_every_seed_once(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    words = ("compare", *SMALL, "--rounds", 1, "--seeds", "0,1", "--no-page", "--out", tmp_path)
    alone = command(*words, "--method", "fedavg")
    twice = command(*words, "--method", "fedavg", "--method", "fedavg:lr=0.03")
    assert twice.code == 0, twice.err
    assert twice.out == alone.out
    assert "sample standard deviation over 2 seeds" in twice.out
    assert "2 of 4 runs are given more than once" in twice.err
    found = json.loads(command(*words, "--method", "fedavg", "--method", "fedavg:lr=0.03", "--json").out)
    assert [run["seed"] for run in found["runs"]] == found["methods"][0]["seeds"] == [0, 1]


def test_one_number_among_seeds_is_a_seed_and_this_is_said(command: Callable[..., Said], tmp_path: Path) -> None:
    words = ("compare", *SMALL, "--method", "fedavg", "--rounds", 1, "--out", tmp_path)
    said = command(*words, "--seeds", 3)
    assert [run.seed for run in find_runs(tmp_path)] == [3]
    assert "--seeds 3: one seed, 3; 3 seeds are 0-2" in said.err
    assert "one seed" not in command(*words, "--seeds", 0).err


def test_the_entropy_is_of_all_labels_that_clients_hold_and_the_table_says_so(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    """KL has its clients train on part of their data; what stands under `entropy` is of all of it."""
    small = "--method kl --clients 20 --cohort 10 --rounds 1 --epochs 1 --device cpu --workers 1 --seeds 1"
    said = command("compare", *shlex.split(small), "--out", tmp_path)
    assert said.code == 0, said.err
    assert "entropy: bits of all labels that the selected clients hold, at most 3.32" in " ".join(said.out.split())
    (run,) = find_runs(tmp_path)
    (chosen,) = run.rounds.clients
    assert run.labels.counts is not None
    held = run.labels.counts[list(chosen)]
    selector = KLSelector(10)
    selector.register(run.labels.counts)
    limits = selector.select().sample_limits
    assert limits is not None
    used = sum(limits.values())
    assert run.rounds.entropy.tolist() == [pytest.approx(entropy(held.sum(0)))]
    assert entropy(used) > entropy(held.sum(0)) + 0.01


def test_a_comparison_as_json_with_methods_and_epsilon(command: Callable[..., Said], tmp_path: Path) -> None:
    words = "--method fednova --method fedprox+kl --method fedentopt-dp --epsilon 2 --seed 3"
    said = command("compare", *SMALL, *shlex.split(words), "--out", tmp_path, "--json")
    assert said.code == 0, said.err
    printed = json.loads(said.out)
    assert [method["method"] for method in printed["methods"]] == ["fednova", "fedprox+kl", "fedentopt-dp"]
    assert [method["accuracy"]["std"] for method in printed["methods"]] == [None] * 3
    first, *others = printed["methods"]
    assert first["difference"] is None
    for other in others:
        expected = other["accuracy"]["mean"] - first["accuracy"]["mean"]
        shown = {"to": "fednova", "mean": pytest.approx(expected), "low": None, "high": None, "seeds": 1}
        assert other["difference"] == shown
    assert Path(printed["page"]).exists()
    epsilons = {run.method: run.config["epsilon"] for run in find_runs(tmp_path)}
    assert epsilons == {"fednova": None, "fedprox+kl": None, "fedentopt-dp": 2.0}
    assert {run.seed for run in find_runs(tmp_path)} == {3}
    # All in one stack: the engine says so once.
    assert said.err.count("3 run(s) on cpu") == 1


def test_commas_between_methods_and_between_their_settings(command: Callable[..., Said], tmp_path: Path) -> None:
    words = "--method fedavg,kl --method fedprox+fedentopt:mu=0.1,buffer=1 --seed 3"
    said = command("compare", *SMALL, *shlex.split(words), "--out", tmp_path, "--json")
    assert said.code == 0, said.err
    methods = [method["method"] for method in json.loads(said.out)["methods"]]
    assert methods == ["fedavg", "kl", "fedprox+fedentopt"]
    (prox,) = (run.config for run in find_runs(tmp_path) if run.method == methods[2])
    assert (prox["mu"], prox["buffer"]) == (0.1, "1")
    said = command(
        "compare", *SMALL, "--method", "own_methods:Data,own_methods:State", "--out", tmp_path / "own", "--json"
    )
    assert said.code == 0, said.err
    methods = [method["method"] for method in json.loads(said.out)["methods"]]
    assert methods == ["own-methods-data", "own-methods-state"]
    said = command("compare", *SMALL, "--method", "fedavg,fedsomething", "--out", tmp_path / "wrong")
    assert said.code == 2
    assert "method: 'fedsomething' is unknown" in said.err


def test_methods_from_a_file(command: Callable[..., Said], tmp_path: Path) -> None:
    file = tmp_path / "compare.toml"
    file.write_text(
        'methods = ["fedavg", "kl"]\nseeds = "4-5"\nclients = 20\ncohort = 2\nrounds = 1\nepochs = 1\n'
        'device = "cpu"\nworkers = 1\nbuffer = 2\n'
    )
    said = command("compare", "--config", file, "--out", tmp_path / "out", "--json")
    assert said.code == 0, said.err
    assert [(m["method"], m["seeds"]) for m in json.loads(said.out)["methods"]] == [
        ("fedavg", [4, 5]),
        ("kl", [4, 5]),
    ]


def test_without_options_it_is_the_demonstration() -> None:
    configs = [job.config for job in make_jobs(DEFAULT_METHODS, settings={})]
    assert [(c.method, c.seed) for c in configs] == [
        (method, seed) for method in ("fedavg", "fedentopt", "fedentopt-dp") for seed in (0, 1, 2)
    ]
    assert {(c.dataset, c.partition, c.clients, c.cohort_size) for c in configs} == {("digits", "dir:0.1", 100, 10)}
    assert {c.epsilon for c in configs} == {None, 0.5}


def test_the_digits_settings_are_for_digits_only(
    command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[RunConfig] = []

    class Enough(Exception):
        pass

    def conduct(jobs, options, **more):
        asked.extend(job.config for job in jobs)
        raise Enough

    monkeypatch.setattr(compare_command, "conduct", conduct)
    for words in ([], ["--dataset", "cifar10"], ["--lr", "0.2"]):
        with pytest.raises(Enough):
            command("compare", *words, "--method", "fedavg", "--seed", 0)
    digits, cifar, own = asked
    assert (digits.rounds, digits.lr, digits.flip) == (30, 0.03, 0.0)
    assert cifar == RunConfig(dataset="cifar10")
    assert (own.rounds, own.lr, own.flip) == (30, 0.2, 0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method fedsgd", "method: 'fedsgd' is unknown"),
        ("--method fedavg --method fedavg", "method: fedavg, fedavg names a method more than once"),
        ("--method fedavg --method random", "method: fedavg, random names a method more than once"),
        ("--method fedavg --epsilon 1", "epsilon: 1 is used by none of fedavg"),
        ("--epsilon none", "epsilon: none cannot go with fedentopt-dp"),
        ("--epsilon 0", "epsilon: 0.0 is out of range"),
        ("--algorithm fedprox", "--algorithm"),
        ("--selector kl", "--selector"),
        ("--clients 10 --cohort 10", "buffer: '50%' gives 5 clients"),
    ],
)
def test_wrong_input_is_refused_by_name_with_code_2(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("compare", *shlex.split(words))
    assert said.code == 2
    assert message in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods = 'fedavg'", "methods: 'fedavg' cannot be used; accepted: a list of names"),
        ("methods = []", "methods: [] cannot be used"),
        ("methods = [1]", "methods: [1] cannot be used"),
        ("algorithm = 'fedavg'", "algorithm: unknown setting in"),
    ],
)
def test_a_wrong_file_is_refused(command: Callable[..., Said], tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    said = command("compare", "--config", file, "--out", tmp_path / "out")
    assert said.code == 2
    assert message in said.err


def test_a_package_that_the_page_needs_is_missed_before_training(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    said = command("compare", *SMALL, "--out", tmp_path / "out")
    assert said.code == 2
    assert "needs plotly; pip install 'fedentopt[sim]'" in said.err
    assert not (tmp_path / "out").exists()
