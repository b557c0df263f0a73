"""Comparisons from Python: what may be given, what comes back, and that it is what the command line does."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import toy
from command_line import commander
from fedentopt.algorithms import Algorithm, Client, FedAvg, FedAvgM, FedProx, LocalTerms, setting
from fedentopt.datasets import from_arrays
from fedentopt.errors import InputError
from fedentopt.results.reading import find_runs
from fedentopt.selection import EntropySelector, Selector
from fedentopt.simulation import RunConfig, RunOptions, compare, simulate
from fedentopt.simulation.jobs import make_jobs

SMALL = {
    "clients": 8,
    "cohort": 3,
    "rounds": 3,
    "epochs": 1,
    "batch_size": 8,
    "min_samples": 1,
    "partition": "dir:0.5",
    "options": RunOptions(device="cpu", workers=1),
}


def arrays(samples: int = 120, classes: int = 3, size: int = 16) -> tuple[np.ndarray, ...]:
    data = toy.images(samples, classes, size=size)
    return data.x_train, data.y_train, data.x_test, data.y_test


class Near(Algorithm):
    """FedProx by another name."""

    mu: float = setting(0.2, help="weight of the proximal term", low=0)

    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(mu=self.mu)


class Last(Selector):
    """The last clients, always."""

    skip: int = setting(0, help="clients at the end to leave out", low=0)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return available[::-1][self.skip : self.skip + self.cohort_size].tolist()


class Unwritten(Selector):
    """Nobody has said how it picks."""


class Unmade(Selector):
    """Lacks something when it is made."""

    def __init__(self, nothing: str, cohort_size: int, seed: int = 0) -> None:
        super().__init__(cohort_size, seed=seed)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return []


class Seedless(Last):
    """Takes no seed."""

    def __init__(self, cohort_size: int) -> None:
        super().__init__(cohort_size)


class Closed(Last):
    """Takes no settings, though it declares one."""

    def __init__(self, cohort_size: int, seed: int = 0) -> None:
        super().__init__(cohort_size, seed)


class Bare(Last):
    """Leaves out what the base sets up."""

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        self.known: dict[str, float] = {}


class Forgetful(Last):
    """Cannot say what it remembers."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("lost")


class Broken(Algorithm):
    """Cannot be made."""

    def __post_init__(self) -> None:
        raise KeyError("lost")


def small_net(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, classes))


def test_arrays_a_model_and_methods_of_every_kind() -> None:
    methods = ["fedavg", "fedprox:mu=0.2", Near(mu=0.3), Last, (Near(mu=0.4), Last), FedProx(mu=0.5)]
    result = compare(methods, dataset=arrays(), model=small_net, image_size=16, seeds=[4, 1], **SMALL)
    assert result.summary["method"].tolist() == [
        "fedavg", "fedprox:mu=0.2", "Near(mu=0.3)", "Last(skip=0)", "Near(mu=0.4)+Last(skip=0)", "FedProx(mu=0.5)",
    ]  # fmt: skip
    assert result.summary["seeds"].tolist() == [2] * 6
    assert [run.seed for run in result.runs[:2]] == [4, 1]
    assert {run.config["model"].rpartition(":")[2] for run in result.runs} == {"small_net"}


def test_one_run_is_the_same_however_its_method_was_given() -> None:
    """By name, by settings of the whole comparison, as a built-in object, and as an own class that does the same."""
    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "seeds": 1, **SMALL}
    curves = [
        compare([method], **given, **more).rounds[["accuracy", "loss", "clients"]]
        for method, more in (
            ("fedprox:mu=0.2", {}),
            ("fedprox", {"mu": 0.2}),
            (FedProx(mu=0.2), {}),
            (Near(mu=0.2), {}),
            (Near, {}),
        )
    ]
    for other in curves[1:]:
        pd.testing.assert_frame_equal(other, curves[0])


class Net(nn.Module):
    """A model whose class takes the number of classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = small_net(classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_class_is_a_function_that_makes_models(tmp_path: Path) -> None:
    settings = SMALL | {"dataset": arrays(), "image_size": 16, "seeds": 2}
    by_class = compare(["fedavg"], model=Net, out=tmp_path, **settings)
    by_function = compare(["fedavg"], model=lambda classes: Net(classes), **settings)
    assert by_class.rounds["accuracy"].tolist() == by_function.rounds["accuracy"].tolist()
    assert compare(["fedavg"], model=Net, out=tmp_path, **settings).rounds["seconds"].tolist() == (
        by_class.rounds["seconds"].tolist()
    ), "what is kept was read"


def test_own_selectors_by_class_object_and_pair() -> None:
    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "seeds": 1, **SMALL}
    result = compare([Last, ("fedprox", Last(3, skip=2)), (Near(mu=0.5), EntropySelector)], **given)
    assert [run.method.count("+") for run in result.runs] == [0, 1, 1]
    picks = result.rounds.groupby("method", sort=False)["clients"].first().to_dict()
    assert picks["Last(skip=0)"] == [7, 6, 5]
    assert picks["fedprox+Last(skip=2)"] == [5, 4, 3]
    assert result.runs[1].config["selector.skip"] == 2


def test_what_comes_back(tmp_path: Path) -> None:
    result = compare(["fedavg", "fedentopt"], dataset=arrays(), image_size=16, seeds=2, **SMALL)
    assert len(result.rounds) == 2 * 2 * 3
    assert list(result.rounds.columns[:3]) == ["method", "seed", "round"]
    by_seed = result.rounds.groupby(["method", "seed"])["accuracy"].mean().unstack()
    gaps = (by_seed.loc["fedentopt"] - by_seed.loc["fedavg"]).to_numpy()
    row = result.summary.set_index("method").loc["fedentopt"]
    assert row["difference"] == pytest.approx(gaps.mean())
    half = 12.706204736 * gaps.std(ddof=1) / math.sqrt(2)  # Student's t, one degree of freedom
    assert (row["low"], row["high"]) == (pytest.approx(gaps.mean() - half), pytest.approx(gaps.mean() + half))
    assert isinstance(result.plot(), Figure)
    page = result.report(tmp_path / "page.html")
    assert "fedentopt" in page.read_text(encoding="utf-8")
    assert result.model("fedavg", 1).keys() == result.model("fedentopt", 0).keys()


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compare(["fedavg"], dataset=arrays(), image_size=16, seeds=1, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_out_keeps_runs_and_reads_them_again(tmp_path: Path) -> None:
    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "out": tmp_path / "kept", **SMALL}
    first = compare([FedAvg, Near(mu=0.3)], seeds=2, **given)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").glob("*/summary.json")}
    assert len(stamps) == 4
    again = compare([FedAvg, Near(mu=0.3)], seeds=2, **given)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    pd.testing.assert_frame_equal(first.summary, again.summary)
    about = json.loads(next((tmp_path / "kept").glob("*near*/run.json")).read_text())
    assert about["config"]["algorithm.mu"] == 0.3
    assert "command" not in about  # no command has these arrays, this model and this object
    assert len(about["code"]["digest"]) == 64
    other = arrays(samples=121)
    with pytest.raises(InputError, match="dataset: 'arrays' is not what"):
        compare([FedAvg], seeds=1, **given | {"dataset": other})


def test_code_without_a_source_cannot_be_kept(tmp_path: Path) -> None:
    made: dict[str, type] = {}
    exec(  # as an interpreter's prompt makes classes
        "from fedentopt.algorithms import Algorithm\nclass Typed(Algorithm):\n    pass\n", made
    )
    given = {"dataset": arrays(), "image_size": 16, "seeds": 1, **SMALL}
    assert len(compare([made["Typed"]], **given)) == 1
    with pytest.raises(InputError, match=r"out: the source of Typed.* cannot be read"):
        compare([made["Typed"]], out=tmp_path / "kept", **given)
    assert not (tmp_path / "kept").exists()


def test_the_same_as_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    command = commander(monkeypatch, capsys)
    words = ["--clients", 8, "--cohort", 3, "--rounds", 2, "--epochs", 1, "--workers", 1, "--device", "cpu"]
    said = command(
        "compare", "--method", "fedavg", "--method", "fedprox:mu=0.5", *words, "--seeds", "0,1", "--no-page",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert said.code == 0, said.err
    result = compare(
        ["fedavg", "fedprox:mu=0.5"], seeds=2, clients=8, cohort=3, rounds=2, epochs=1, options=SMALL["options"]
    )
    theirs = {run.run_id: [r.accuracy for r in run.records] for run in find_runs(tmp_path / "out")}
    assert {run.run_id: [r.accuracy for r in run.records] for run in result.runs} == theirs


def test_one_run_from_its_config() -> None:
    config = RunConfig(algorithm="fedprox", settings={"mu": 0.5}, clients=8, cohort="3", rounds=2, epochs=1)
    options = SMALL["options"]
    result = simulate(config, options=options)
    assert result.summary["method"].tolist() == ["fedprox"]
    assert result.runs[0].run_id == config.run_id
    given = simulate(config.replace(min_samples=1, image_size=16), dataset=arrays(), model=small_net, options=options)
    assert given.runs[0].config["dataset"] == "arrays"
    assert given.runs[0].config["model"].endswith(":small_net")
    with pytest.raises(InputError, match="config: 'fedavg' cannot be used; accepted: a RunConfig, or a mapping"):
        simulate("fedavg")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="settings: 1 is no name; accepted: algorithm, "):
        simulate({1: 2})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="dataset: tuple is no setting; accepted: a name in the mapping"):
        simulate({"dataset": arrays()})
    with pytest.raises(InputError, match=r"selector: Last is no name; accepted: a name, or compare\(\[...\], see"):
        simulate({"dataset": "digits", "selector": Last})
    with pytest.raises(InputError, match=r"algorithm: Near\(mu=0.2\) is no name; accepted: a name, or compare"):
        simulate({"dataset": "digits", "algorithm": Near()})


@pytest.mark.parametrize(
    ("methods", "more", "words"),
    [
        ([], {}, "methods: the list is empty"),
        (["fedavg", "fedavg"], {}, "names a method more than once"),
        (["fedprox", "fedavg", "moon", "random"], {}, "method: fedavg, random names a method more than once"),
        (["nonsense"], {}, "method: 'nonsense' is unknown"),
        ([3], {}, "method: 3 cannot be used; accepted: a name such as"),
        (["fedavg"], {"mu": 0.1}, "mu: no setting of fedavg"),
        (["fedavg"], {"round": 3}, r"round: no setting of fedavg; did you mean rounds\?; `fedentopt methods` lists"),
        (["fedavg"], {"algorithm": "fedprox"}, "algorithm: is part of a method's name"),
        (["fedavg"], {"seeds": 0}, "seeds: 0 is out of range"),
        (["fedavg"], {"seeds": []}, "seeds: the list is empty"),
        (["fedavg"], {"seeds": [1, 1]}, "gives 1 more than once"),
        (["fedavg"], {"rounds": 0}, "rounds: 0 is out of range"),
        (["fedavg"], {"dataset": 7}, "dataset: int cannot be used"),
        (["fedavg"], {"dataset": (1, 2, 3, 4)}, r"dataset: x_train of shape \(\) and type int64"),
        (
            ["fedavg"],
            {"options": {"device": "cpu"}},
            r"options: {'device': 'cpu'} cannot be used; accepted: RunOptions",
        ),
        (["fedavg"], {"options": RunOptions(out="mine")}, "options: out is 'mine'; accepted: the argument out="),
        (["fedavg"], {"options": RunOptions(log="tensorboard")}, "options: log is 'tensorboard'; accepted: none"),
        (["fedavg"], {"workers": 2}, r"workers: says how to run.*; accepted: options=RunOptions\(workers=...\)"),
        (["fedavg"], {"out": True}, "out: True cannot be used; accepted: a folder for the results, or none"),
        (["fedavg"], {"image_size": "16"}, "image_size: '16' has the wrong type; accepted: a whole number, 8 to 1024"),
        (["fedavg"], {"image_size": 16.0}, "image_size: 16.0 has the wrong type"),
        ([Selector], {}, "method: Selector does not say how to pick; accepted: a class that has pick"),
        ([Unwritten], {}, "method: Unwritten does not say how to pick; accepted: a class that has pick"),
        ([Unmade], {}, r"selector: calling \S+:Unmade.for_run raised TypeError: Unmade.__init__"),
        ([Seedless], {}, r"selector: Seedless.__init__ does not take seed, skip; accepted: __init__\(self, coh"),
        ([Closed], {}, r"Closed.__init__ does not take skip; accepted: .*, which hands them on to super\(\).__init__"),
        ([Bare], {}, r":Bare' is not set up; accepted: an __init__ that calls super\(\).__init__\(cohort_size, seed"),
        ([Bare(3)], {}, ":Bare' is not set up; accepted: an __init__ that calls"),
        ([Forgetful(3)], {}, r"selector: calling \S+:Forgetful.state_dict raised KeyError: 'lost'"),
        ([Broken], {}, r"algorithm: calling \S+:Broken raised KeyError: 'lost'"),
        (["fedavg"], {"model": 7}, "model: int; accepted: a name"),
        (["fedavg"], {"model": small_net(3)}, "model: Sequential is a model itself; accepted: a function that takes"),
        (
            ["fedavg"],
            {"model": lambda classes: small_net(classes).to("meta")},
            "has no weights; accepted: a model made",
        ),
        (["fedavg"], {"model": lambda classes: 7}, "returned int; accepted: torch.nn.Module"),
        (["fedavg"], {"model": lambda classes: 1 / 0}, "raised ZeroDivisionError"),
        ([Last(3)], {"epsilon": 0.5}, "epsilon: 0.5 is used by none of Last"),
        ([Last(5)], {}, "method: Last selects 5 clients, the run 3; accepted: cohort=5, or the class"),
        ([("fedentopt", "fedprox")], {}, r"accepted: a pair \(algorithm, selector\)"),
        ([("fedprox", "moon")], {}, r"accepted: a pair \(algorithm, selector\)"),
        ("fedavg", {}, "methods: 'fedavg' cannot be used; accepted: a list"),
        (42, {}, "methods: 42 cannot be used"),
        (["fedavg"], {"seeds": 2.0}, "seeds: 2.0 is out of range"),
        (["fedavg"], {"seeds": 2, "seed": 7}, "seeds: was given together with seed"),
        (["fedavg:model=vgg11"], {"model": small_net}, "names a model beside the one given"),
        (["fedavg:dataset=digits"], {}, "names a data set beside the arrays"),
    ],
)
def test_refusals(methods: list, more: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare(methods, **{"dataset": arrays(), "image_size": 16, "seeds": 1, **SMALL, **more})


def test_a_data_set_made_of_arrays_names_its_clients_and_has_its_size() -> None:
    x_train, y_train, x_test, y_test = arrays()
    owners = np.array(["east", "north", "west"])[np.arange(len(y_train)) % 3]
    data = from_arrays(x_train, y_train, x_test, y_test, client_train=owners, image_size=16)
    few = {name: value for name, value in SMALL.items() if name not in ("clients", "partition", "cohort")}
    found = compare(["fedavg"], dataset=data, partition="natural", cohort=3, model=small_net, seeds=1, **few)
    assert sorted(found.rounds.clients[0]) == [0, 1, 2]
    for methods, more in ((["fedavg"], {"image_size": 32}), (["fedavg:image_size=32"], {})):
        with pytest.raises(InputError, match="image_size: 32, but the data given has 16; accepted: that, or none"):
            compare(methods, dataset=data, model=small_net, seeds=1, **SMALL, **more)


def test_a_selector_with_clients_is_refused() -> None:
    used = EntropySelector(2)
    used.register(np.ones((4, 3)))
    with pytest.raises(InputError, match="EntropySelector has clients registered"):
        compare([used], dataset=arrays(), image_size=16, seeds=1, **SMALL)


def test_edited_code_is_refused_and_not_passed_off(tmp_path: Path) -> None:
    """As a user meets it: a file is edited between two commands with the same folder for results."""
    source = (
        "from fedentopt.algorithms import Algorithm, LocalTerms\nfrom helper import MU\n\n"
        "class Mine(Algorithm):\n    def local_terms(self, client):\n        return LocalTerms(mu=MU)\n"
    )
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "helper.py").write_text("MU = 0.1\n")
    words = [
        "run", "--algorithm", "mine:Mine", "--clients", "8", "--cohort", "3", "--rounds", "2", "--epochs", "1",
        "--workers", "1", "--no-page", "--out", "out",
    ]  # fmt: skip

    def fedentopt() -> subprocess.CompletedProcess[str]:
        program = "from fedentopt.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

    assert fedentopt().returncode == 0
    assert "finished already" in fedentopt().stderr
    (tmp_path / "helper.py").write_text("MU = 0.9\n")
    done = fedentopt()
    assert done.returncode == 2
    assert "code: the code behind mine-mine has changed since" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_stands_behind_a_name_is_meant_for_it() -> None:
    given = {"dataset": arrays(), "image_size": 16, "seeds": np.int64(1), **SMALL}
    methods = ["fedentopt-dp:epsilon=1", "fedentopt-dp", "fedprox:mu=0.5,lr=0.2", "fedprox"]
    result = compare(methods, **given, epsilon=2.0, mu=0.25, lr=0.1)
    configs = [run.config for run in result.runs]
    assert [config["epsilon"] for config in configs] == [1.0, 2.0, None, None]
    assert [config["mu"] for config in configs[2:]] == [0.5, 0.25]
    assert [config["lr"] for config in configs] == [0.1, 0.1, 0.2, 0.1]


def test_settings_of_single_methods_reach_classes_and_names_and_leave_objects() -> None:
    methods = [
        FedProx, FedProx(mu=0.5), Near, Near(mu=0.4), ("fedprox", Last),
        ("fedprox:mu=0.7", Last(3)), (Near(), "fedentopt"),
    ]  # fmt: skip
    jobs = make_jobs(methods, settings={"cohort": 3}, own={"mu": 0.25, "skip": 2, "buffer": "4"}, seeds=1)
    assert [(job.label, job.config.of("algorithm"), job.config.of("selector")) for job in jobs] == [
        ("FedProx(mu=0.25)", {"mu": 0.25}, {}),
        ("FedProx(mu=0.5)", {"mu": 0.5}, {}),
        ("Near(mu=0.25)", {"mu": 0.25}, {}),
        ("Near(mu=0.4)", {"mu": 0.4}, {}),
        ("fedprox+Last(skip=2)", {"mu": 0.25}, {"skip": 2}),
        ("fedprox:mu=0.7+Last(skip=0)", {"mu": 0.7}, {"skip": 0}),
        ("Near(mu=0.2)+fedentopt", {"mu": 0.2}, {"buffer": "4", "release": "fifo"}),
    ]
    assert [job.algorithm.settings() for job in jobs if job.algorithm] == [{"mu": 0.25}, {"mu": 0.4}, {"mu": 0.2}]
    with pytest.raises(
        InputError, match=r"mu: no setting of FedProx\(mu=0.5\) \(an object keeps those it was made with"
    ):
        make_jobs([FedProx(mu=0.5)], settings={}, own={"mu": 0.1}, seeds=1)
    with pytest.raises(
        InputError, match=r"beta: is a setting of .* and of .*; accepted: algorithm.beta and selector.beta"
    ):
        make_jobs([("fedavgm", "fed-cbs")], settings={}, own={"beta": 0.5}, seeds=1)
    [job] = make_jobs([("fedavgm:beta=0.5", "fed-cbs")], settings={}, own={"beta": 2}, seeds=1)  # one is said already
    assert (job.config.of("algorithm")["beta"], job.config.of("selector")["beta"]) == (0.5, 2.0)
    [job] = make_jobs([(FedAvgM, "fed-cbs")], settings={}, own={"algorithm.beta": 0.5, "selector.beta": 2}, seeds=1)
    assert (job.config.of("algorithm")["beta"], job.config.of("selector")["beta"]) == (0.5, 2.0)


@pytest.mark.parametrize("method", ["fedprox", FedProx, ("fedprox", "fedentopt"), (FedProx, EntropySelector)])
@pytest.mark.parametrize("key", ["algorithm.lr", "selector.lr", "algorithm.dataset"])
def test_a_setting_of_a_part_is_not_taken_for_one_of_the_run(method: Any, key: str) -> None:
    bare = key.partition(".")[2]
    with pytest.raises(InputError, match=rf"^{key}: no setting of \S+ \({bare} alone is one of the run\); `fedentopt"):
        make_jobs([method], settings={}, own={key: 0.5}, seeds=1)
    [job] = make_jobs([method], settings={}, own={"algorithm.mu": 0.5}, seeds=1)
    assert job.config.of("algorithm") == {"mu": 0.5}
    with pytest.raises(InputError, match=r"^mu: -1.0 is out of range"):
        make_jobs([method], settings={}, own={"algorithm.mu": -1}, seeds=1)


def test_seeds_may_be_an_array_of_whole_numbers() -> None:
    jobs = make_jobs(["fedavg"], settings={}, seeds=np.arange(2, 5))
    assert [job.config.seed for job in jobs] == [2, 3, 4]
    with pytest.raises(InputError, match="seeds: "):
        make_jobs(["fedavg"], settings={}, seeds=np.array([0.5, 1.0]))


class Scaled(Algorithm):
    """An algorithm with a constructor of its own, whose argument is no declared setting."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(mu=self.factor)


def test_other_objects_are_other_runs(tmp_path: Path) -> None:
    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "out": tmp_path, "seeds": 1, **SMALL}
    first = compare([Scaled(0.1), Last(3, skip=1), EntropySelector(3, buffer_size=1)], **given)
    again = compare([Scaled(5.0), Last(3, skip=2), EntropySelector(3, buffer_size=4)], **given)
    assert not {run.run_id for run in first.runs} & {run.run_id for run in again.runs}
    assert first.runs[2].config["selector.buffer_size"] == 1
    assert first.rounds["loss"].tolist() != again.rounds["loss"].tolist()


class Silent(Scaled):
    """The same, under a name of its own choice."""

    def __repr__(self) -> str:
        return "mine"


def test_objects_of_one_class_are_compared_under_names_of_their_own() -> None:
    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "seeds": 1, **SMALL}
    both = compare([Scaled(0.1), Scaled(5.0)], **given)
    assert both.summary.method.tolist() == ["Scaled(factor=0.1)", "Scaled(factor=5.0)"]
    heard: list[Any] = []
    with pytest.raises(InputError, match="method: mine is the name of two methods; accepted: a name for each"):
        compare([Silent(0.1), FedAvg, Silent(5.0)], progress=heard.append, **given)
    assert not heard, "refused before anything trains, not when it has"


class From(Selector):
    """A selector with a constructor of its own, whose argument is no declared setting."""

    def __init__(self, cohort_size: int, seed: int = 0, start: int = 0) -> None:
        super().__init__(cohort_size, seed)
        self.start = start

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return available[self.start :][: self.cohort_size].tolist()


def test_selectors_that_hold_other_values_are_other_runs(tmp_path: Path) -> None:
    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "seeds": 1, **SMALL}
    both = compare([From(3, start=1), From(3, start=2)], out=tmp_path, **given)
    assert both.rounds.groupby("method").clients.first().to_dict() == {
        "From(start=1)": [1, 2, 3],
        "From(start=2)": [2, 3, 4],
    }
    assert compare([From(3, start=4)], out=tmp_path, **given).rounds.clients[0] == [4, 5, 6]


factor = 0.1


class Reading(Algorithm):
    """An algorithm that reads a global name."""

    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(mu=factor)


def test_a_global_name_of_another_value_is_not_passed_off_as_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "out": tmp_path, "seeds": 1, **SMALL}
    compare([Reading], **given)
    assert len(compare([Reading], **given).runs) == 1
    monkeypatch.setitem(globals(), "factor", 5.0)
    with pytest.raises(InputError, match=r"code: .* has changed since .*options=RunOptions\(resume=False\)"):
        compare([Reading], **given)
    assert len(compare([Reading], **given | {"options": RunOptions(device="cpu", resume=False)}).runs) == 1


@pytest.mark.parametrize("how", ["model='__main__:net'", "model=net"])
def test_code_of_a_script_is_not_passed_off_as_what_it_was(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    text = (
        "from torch import nn\nfrom fedentopt.simulation import RunOptions, compare\n"
        "def net(c):\n    return nn.Sequential(nn.Flatten(), nn.Linear(768, WIDTH), nn.Linear(WIDTH, c))\n"
        f"compare(['fedavg'], {how}, seeds=1, out='kept', image_size=16, clients=10, cohort=2, rounds=1, epochs=1,\n"
        "    progress=False, options=RunOptions(device='cpu', workers=1))\n"
    )
    said = []
    for width in (4, 4, 8):
        script.write_text(f"WIDTH = {width}\n{text}")
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
        said.append((done.returncode, done.stderr.strip().rpartition("\n")[2]))
    assert said[:2] == [(0, ""), (0, "")]
    assert "InputError: code: the code behind fedavg has changed since" in said[2][1]


def test_a_class_that_a_function_makes_of_other_values_is_not_passed_off_as_the_first(tmp_path: Path) -> None:
    def near(factor: Any) -> type[Algorithm]:
        class Made(Algorithm):
            def local_terms(self, client: Client) -> LocalTerms:
                return LocalTerms(mu=float(np.sum(factor)))

        return Made

    given = {"dataset": arrays(), "model": small_net, "image_size": 16, "out": tmp_path, "seeds": 1, **SMALL}
    compare([near(0.1)], **given)
    assert len(compare([near(0.1)], **given).runs) == 1
    with pytest.raises(InputError, match=r"code: the code behind .* has changed since"):
        compare([near(0.5)], **given)
    with pytest.raises(
        InputError, match=r"out: the source of Made.* cannot be read, or it holds more than plain values"
    ):
        compare([near(np.random.default_rng(0))], **given)


def test_a_model_with_other_arguments_is_not_passed_off_as_the_first(tmp_path: Path) -> None:
    def net(classes: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    given = {"dataset": arrays(), "image_size": 16, "out": tmp_path, "seeds": 1, **SMALL}
    compare(["fedavg"], model=functools.partial(net, hidden=4), **given)
    with pytest.raises(InputError, match="code: the code behind fedavg has changed"):
        compare(["fedavg"], model=functools.partial(net, hidden=16), **given)
