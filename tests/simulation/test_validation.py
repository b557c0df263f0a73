"""What clients hold out, natural clients in runs, and accuracy per client."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import toy
from fedentopt.cli.result_table import print_methods
from fedentopt.datasets import Dataset
from fedentopt.datasets.clients import ClientIds
from fedentopt.errors import InputError
from fedentopt.partition import partition
from fedentopt.results.reading import read_run
from fedentopt.simulation import RunOptions, compare, simulate
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import Stack, Task
from fedentopt.simulation.sweep import run_sweep
from fedentopt.simulation.validation import client_accuracies, hold_out

LABELS = np.arange(400) % 4
SMALL: dict[str, Any] = {
    "clients": 6,
    "cohort": "2",
    "rounds": 3,
    "epochs": 1,
    "partition": "iid",
    "model": "toy:linear",
}


def test_held_out_and_left_are_the_whole() -> None:
    parts = partition(LABELS, "dir:0.5", 10, 0)
    left, held = hold_out(parts, LABELS, 0.2, seed=3)
    for client, samples in enumerate(parts.indices):
        own = held.samples[held.clients == client]
        assert len(own) == round(0.2 * len(samples))
        assert np.array_equal(np.sort(np.concatenate([own, left.indices[client]])), samples)
        assert np.array_equal(np.bincount(LABELS[left.indices[client]], minlength=4), left.counts[client])
    again, other = (hold_out(parts, LABELS, 0.2, seed=seed)[1] for seed in (3, 4))
    assert again.key == held.key != other.key


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.9, "validation: 0.9 holds out all 1 samples of client 1; accepted: a smaller share"),
        (0.01, "validation: 0.01 holds out nothing, since no client has more than 9 samples; accepted: a larger share"),
    ],
)
def test_shares_that_leave_nothing_are_refused(share: float, message: str) -> None:
    labels = np.zeros(10, dtype=np.int64)
    parts = partition(labels, "natural", 2, 0, owners=np.array([0] * 9 + [1]))
    with pytest.raises(InputError, match=re.escape(message)):
        hold_out(parts, labels, share, 0)


def test_the_default_leaves_a_run_as_it_was(tmp_path: Path) -> None:
    config = RunConfig()
    assert "validation" not in config.to_dict()
    assert "client_accuracy" not in config.to_dict()
    assert RunConfig(validation=0.1).run_id != config.run_id
    run = simulate({**SMALL, "min_samples": 1}, dataset=toy.images(60), out=tmp_path).runs[0]
    assert run.path is not None
    assert "validation" not in (run.path / "rounds.csv").read_text()
    assert not {"validation_accuracy", "client_accuracy"} & run.summary.keys()
    assert not (run.path / "client_accuracy.csv").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedconcat:clusters=2"])
def test_validation_is_that_of_the_model_on_what_was_held_out(method: str, tmp_path: Path) -> None:
    """The final model, loaded from its file and run by plain torch on the samples that the clients hold out."""
    data = toy.images(120)
    settings = {**SMALL, "validation": 0.25, "client_accuracy": True, "evaluate_every": 1, "seed": 5}
    settings |= {"rounds": 20} if method != "fedavg" else {}
    result = compare(
        [method], dataset=data, seeds=[5], out=tmp_path, **{k: v for k, v in settings.items() if k != "seed"}
    )
    run = result.runs[0]
    parts = partition(data.y_train, "iid", 6, 5, num_classes=3)
    left, held = hold_out(parts, data.y_train, 0.25, 5)
    assert run.labels.counts is not None
    assert np.array_equal(run.labels.counts, left.counts)
    last = run.records[-1]
    assert last.validation_accuracy is not None
    model = run.model
    assert model is not None
    x = ((torch.from_numpy(data.x_train[held.samples]).float() / 255 - 0.4) / 0.25).flatten(1)
    if method == "fedavg":
        logits = F.linear(x, model["1.weight"], model["1.bias"])
    else:  # the encoders of a linear model pass the images on as they are
        logits = F.linear(torch.cat([x, x], 1), model["head.weight"], model["head.bias"])
    y = torch.from_numpy(data.y_train[held.samples])
    right = logits.argmax(1) == y
    assert last.validation_accuracy == pytest.approx(100 * right.float().mean().item(), abs=1e-6)
    assert last.validation_loss == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-4)
    if method == "fedavg":
        per_client = [100 * right[torch.from_numpy(held.clients == k)].float().mean().item() for k in range(6)]
        assert run.path is not None
        with (run.path / "client_accuracy.csv").open() as file:
            written = [float(row["accuracy"]) for row in csv.DictReader(file)]
        assert written == pytest.approx(per_client)
        about = run.summary["client_accuracy"]
        assert about == {
            "mean": pytest.approx(np.mean(per_client)), "worst_tenth": pytest.approx(min(per_client)), "clients": 6,
            "measured_on": "validation",
        }  # fmt: skip
    curve = [record.validation_accuracy for record in run.records]
    assert run.summary["validation_accuracy"] == pytest.approx(np.mean(curve[-10:]))
    assert {"validation_accuracy", "validation_loss"} <= set(result.rounds.columns)
    assert result.summary["validation_accuracy"][0] == pytest.approx(run.summary["validation_accuracy"])
    [method] = result.methods
    assert method.to_dict()["validation_accuracy"]["mean"] == pytest.approx(run.summary["validation_accuracy"])


def test_validation_is_the_same_alone_in_a_stack_and_in_memory(tmp_path: Path) -> None:
    data = toy.images(90)
    settings: dict[str, Any] = {**SMALL, "validation": 0.2}
    together = compare(["fedavg", "fedentopt"], dataset=data, seeds=2, **settings)
    alone = compare(["fedentopt"], dataset=data, seeds=[1], out=tmp_path, **settings)
    mine = [run for run in together.runs if run.method == "fedentopt" and run.seed == 1]
    assert _validation(mine[0].records) == _validation(alone.runs[0].records)
    assert _validation(read_run(alone.runs[0].path).records) == _validation(mine[0].records)  # type: ignore[arg-type]


def test_runs_that_hold_out_the_same_samples_may_be_evaluated_together() -> None:
    """As on CUDA: one pass for runs of one seed, whatever their method; other seeds hold out other samples."""
    data, options = toy.images(90), RunOptions(device="cpu")
    configs = [
        RunConfig(**SMALL, validation=0.2, selector=selector, seed=seed)
        for selector, seed in (("random", 0), ("fedentopt", 0), ("random", 1))
    ]
    stack = Stack([Task(c, toy.Memory()) for c in configs], data, torch.device("cpu"), options, None)
    try:
        stack._tick(stack.runs)
        first, second, other = (run.planner.held_out for run in stack.runs)
        assert first is not None
        assert second is not None
        assert other is not None
        assert first.key == second.key != other.key
        alone = stack.evaluator.validate(stack.runs[:2])
        hits, loss = stack.evaluator._validate(stack.runs[:2])
        assert not torch.equal(hits[0], hits[1])  # other cohorts, other models
        for place in range(2):
            assert torch.equal(hits[place], alone.hits[place])
            assert loss[place].item() == pytest.approx(alone.loss[place].item(), rel=1e-6)
    finally:
        stack.trainer.close()


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, []),
        ({"validation": 0.2}, ["validation"]),
        ({"client_accuracy": True}, ["clients", "worst tenth"]),
        ({"validation": 0.2, "client_accuracy": True}, ["validation", "clients", "worst tenth"]),
    ],
)
def test_tables_and_page_show_what_was_asked_for(
    asked: dict[str, Any], shown: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Held-out data and accuracy per client: in the terminal, in Python, as JSON and on the page, and only there."""
    result = compare(["fedavg", "fedentopt"], dataset=toy.images(90), seeds=2, **SMALL, **asked)
    print_methods(result.methods, [])
    told = capsys.readouterr().out
    page = result.report(tmp_path / "page.html").read_text()
    for name, column, figure, heading in (
        ("validation", "validation_accuracy", ("validation_accuracy",), "Validation %"),
        ("clients", "client_mean", ("client_accuracy", "mean"), "Mean of clients %"),
        ("worst tenth", "client_worst_tenth", ("client_accuracy", "worst_tenth"), "Worst tenth of clients %"),
    ):
        there = name in shown
        assert (f"{name} %" in told) is there
        assert (column in result.summary.columns) is there
        assert (heading in page) is there
        assert all((figure[0] in method.to_dict()) is there for method in result.methods)
        if there:
            for place, method in enumerate(result.methods):
                values = [run.summary[figure[0]] for run in method.runs]
                mean = np.mean([value[figure[1]] if len(figure) > 1 else value for value in values])
                in_json: Any = method.to_dict()[figure[0]]
                assert (in_json[figure[1]] if len(figure) > 1 else in_json)["mean"] == pytest.approx(mean)
                assert result.summary[column][place] == pytest.approx(mean)
                assert f"{mean:.1f} ± " in told
                assert f'data-value="{mean:.6g}"' in page
    on = "on what it holds out" if "validation" in asked else "by the test split's classes"
    assert (on in " ".join(told.split())) is ("client_accuracy" in asked)


def _validation(records: Any) -> list[Any]:
    return [(r.round, r.validation_accuracy, r.validation_loss) for r in records]


def test_accuracy_per_client_from_the_test_split_by_hand() -> None:
    counts = np.array([[10, 0, 30], [0, 5, 5], [0, 0, 7]])
    values, of = client_accuracies(
        3, held_out=None, hits=None, counts=counts, class_accuracy=(80.0, 40.0, float("nan")), chance=None
    )
    assert of == "test"
    assert values[:2] == [80.0, 40.0]  # the class without test samples is left out
    assert np.isnan(values[2])
    diverged, _ = client_accuracies(2, held_out=None, hits=None, counts=counts[:2], class_accuracy=None, chance=50.0)
    assert diverged == [50.0, 50.0]


def test_accuracy_per_client_without_validation(tmp_path: Path) -> None:
    run = simulate({**SMALL, "client_accuracy": True}, dataset=toy.images(60), out=tmp_path).runs[0]
    classes = np.array(run.records[-1].class_accuracy)
    assert run.labels.counts is not None
    expected = run.labels.counts @ classes / run.labels.counts.sum(axis=1)
    about = run.summary["client_accuracy"]
    assert about["measured_on"] == "test"
    assert about["mean"] == pytest.approx(expected.mean())
    assert about["worst_tenth"] == pytest.approx(expected.min())


def named(data: Dataset, ids: list[str]) -> Dataset:
    names = tuple(sorted(set(ids)))
    return replace(data, clients=ClientIds(names, np.array([names.index(one) for one in ids])))


def test_natural_clients_train_under_their_names(tmp_path: Path) -> None:
    ids = [("7", "north", "5,5")[i % 3] if i < 50 else "north" for i in range(60)]
    data = named(toy.images(60), ids)
    settings = {**SMALL, "partition": " natural", "cohort": "2"}  # spaces change nothing
    del settings["clients"]
    memory = simulate(settings, dataset=data).runs[0]
    run = simulate(settings, dataset=data, out=tmp_path).runs[0]
    assert run.path is not None
    assert json.loads((run.path / "run.json").read_text())["config"]["clients"] == 3
    with (run.path / "label_counts.csv").open() as file:
        counted = {
            row["client"]: int(row["class 0"]) + int(row["class 1"]) + int(row["class 2"])
            for row in csv.DictReader(file)
        }
    assert counted == {name: ids.count(name) for name in ("5,5", "7", "north")}
    with (run.path / "rounds.csv").open() as file:
        cohorts = [json.loads(row["clients"]) for row in csv.DictReader(file)]
    assert all(set(cohort) <= {"5,5", "7", "north"} and len(cohort) == 2 for cohort in cohorts)
    again = read_run(run.path)
    assert again.labels.clients == memory.labels.clients == ("5,5", "7", "north")
    assert [r.clients for r in again.records] == [r.clients for r in memory.records]
    assert [[again.labels.clients[k] for k in r.clients] for r in again.records] == cohorts


def test_natural_clients_refusals() -> None:
    data = named(toy.images(60), ["a", "b", "c"] * 20)
    with pytest.raises(InputError, match="clients: 6 asked for, but the data names 3 clients; accepted: 3"):
        simulate({**SMALL, "partition": "natural"}, dataset=data)
    without = {name: value for name, value in SMALL.items() if name != "clients"} | {"partition": "natural"}
    with pytest.raises(InputError, match=r"partition: natural needs data that says which client .* toy does not"):
        simulate(without, dataset=toy.images(60))


def test_data_with_clients_of_its_own_says_so_when_it_is_cut() -> None:
    said: list[str] = []
    data = named(toy.images(60), ["a", "b", "c"] * 20)
    simulate({**SMALL, "rounds": 1}, dataset=data, options=RunOptions(say=said.append))
    assert any("toy names 3 clients of its own; --partition natural uses them" in line for line in said)


def test_a_resumed_run_keeps_its_names_and_figures(tmp_path: Path) -> None:
    """Stopped after round 2 and continued, the table is the same but for the time it took."""
    data = named(toy.images(60), ["a", "b", "c"] * 20)
    config = RunConfig(**{**SMALL, "clients": 3, "partition": "natural", "validation": 0.2, "rounds": 4})

    class Stop(Exception):
        pass

    def stop(event: Any) -> None:
        if event.round == 3:
            raise Stop

    options = RunOptions(out=str(tmp_path / "a"), checkpoint_every=1)
    with pytest.raises(Stop):
        run_sweep([config], options, data=data, progress=stop)
    (first,) = run_sweep([config], options, data=data)
    (straight,) = run_sweep([config], RunOptions(out=str(tmp_path / "b")), data=data)
    assert first.path is not None
    assert straight.path is not None
    assert "resumed" in json.loads((first.path / "run.json").read_text())
    tables = [_without_seconds(run.path) for run in (first, straight)]  # type: ignore[arg-type]
    assert tables[0] == tables[1]


def _without_seconds(path: Path) -> list[dict[str, str]]:
    with (path / "rounds.csv").open() as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]
