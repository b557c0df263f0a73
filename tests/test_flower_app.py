"""The example app's settings, data and strategies, without a federation around them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")

from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from fedentopt.errors import InputError
from fedentopt.flower import LabelAware
from fedentopt.partition import partition

APP = Path(__file__).parent.parent / "examples" / "flower-app"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


@pytest.fixture(autouse=True)
def app_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(APP), *sys.path])
    monkeypatch.setenv("FEDENTOPT_DATA", str(tmp_path / "data"))


def context(node: dict[str, Any] | None = None, **run: Any) -> Context:
    told = {**DEFAULTS, **{name.replace("_", "-"): value for name, value in run.items()}}
    return Context(1, 2, node or {}, RecordDict(), told)


@pytest.mark.parametrize(
    ("algorithm", "base", "method"),
    [
        ("fedavg", FedAvg, "fedentopt-dp"),
        ("fedprox", FedProx, "fedprox+fedentopt-dp"),
        ("fedrs", FedAvg, "fedrs+fedentopt-dp"),
        ("fedlc", FedAvg, "fedlc+fedentopt-dp"),
        ("fedadam", FedAdam, "flwr-fedadam+fedentopt-dp"),
        ("fedyogi", FedYogi, "flwr-fedyogi+fedentopt-dp"),
        ("fedavgm", FedAvgM, "flwr-fedavgm+fedentopt-dp"),
    ],
)
def test_every_algorithm_of_the_app_makes_its_strategy(algorithm: str, base: type, method: str) -> None:
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import local_settings, run_settings

    config = run_settings(context(algorithm=algorithm).run_config)
    strategy = make_strategy(config, context(algorithm=algorithm), 10)
    assert isinstance(strategy, LabelAware)
    assert isinstance(strategy, base)
    assert config.method == method
    assert (strategy.cohort_size, strategy.roster.buffer_size, strategy.min_available_nodes) == (4, 8, 20)
    assert local_settings(config).algorithm in ("fedavg", "fedprox", "fedrs", "fedlc")


def test_random_selection_is_a_selector_like_any_other() -> None:
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import run_settings

    told = context(selector="random", label_epsilon="none")
    config = run_settings(told.run_config)
    assert (config.method, config.epsilon) == ("fedavg", None)
    assert type(make_strategy(config, told, 10).selector).__name__ == "RandomSelector"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"algorithm": "scaffold"}, "algorithm: 'scaffold'"),
        ({"selector": "kl"}, "selector: 'kl'"),
        ({"cohort": "30"}, "cohort: '30' gives 30 of 20"),
        ({"buffer": "90%"}, "buffer: '90%'"),
        ({"partition": "dir:0"}, "partition"),
        ({"colour": 1}, "colour: unknown setting"),
        ({"label_epsilon": "much"}, "label-epsilon .*'much'"),
        ({"label_epsilon": 0}, "label-epsilon .* 0 is not accepted"),
        ({"min_nodes": 21}, "min-nodes: 21 .* 1 to 20, or 0"),
        ({"min_nodes": -1}, "min-nodes: -1"),
        ({"node_timeout": "long"}, "node-timeout: 'long'"),
        ({"query_timeout": 0.0}, "query-timeout: 0.0"),
    ],
)
def test_settings_the_app_cannot_honour_are_refused(setting: dict[str, Any], told: str) -> None:
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import run_settings

    with pytest.raises(InputError, match=told):
        make_strategy(run_settings(context(**setting).run_config), context(**setting), 10)


def test_folders_must_be_absolute() -> None:
    from fedentopt_app.settings import folder

    assert folder(context().run_config, "out") is None
    with pytest.raises(InputError, match="out: 'results' is not an absolute path"):
        folder(context(out="results").run_config, "out")


def test_the_shares_of_the_nodes_are_the_simulators_partition() -> None:
    from fedentopt_app.data import load_data, node_data

    data = load_data("digits", None)
    parts = partition(data.y_train, "dir:0.3", 20, 0, num_classes=10, min_samples=1)
    for share in (0, 19):
        images, labels = node_data(context({"partition-id": share, "num-partitions": 20}))
        assert np.array_equal(labels, data.y_train[parts.indices[share]])
        assert np.array_equal(images, data.x_train[parts.indices[share]])


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ({}, "set data .* or partition-id"),
        ({"partition-id": 20}, "partition-id: 20; accepted: 0 to 19"),
        ({"partition-id": 0, "num-partitions": 4}, "clients: the app says 20, this node's num-partitions 4"),
    ],
)
def test_a_node_that_is_no_share_says_why(node: dict[str, Any], told: str) -> None:
    from fedentopt_app.data import node_data

    with pytest.raises(InputError, match=told):
        node_data(context(node))


def test_a_nodes_own_classes_are_matched_by_name(tmp_path: Path) -> None:
    from fedentopt_app.data import node_labels, number_of_classes

    path = tmp_path / "own.npz"
    images = np.zeros((4, 8, 8), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=[0, 1, 1, 0], x_test=images, y_test=[0, 1, 0, 1], class_names=["owl", "ant"])
    told = context({"data": str(path)}, class_names="ant, bee, owl")
    assert node_labels(told).tolist() == [2, 0, 0, 2]
    assert number_of_classes(told) == 3
    with pytest.raises(InputError, match="class 'owl' is not among the app's class-names"):
        node_labels(context({"data": str(path)}, class_names="ant, bee"))
