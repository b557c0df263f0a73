"""The example app's settings, data and strategies, without a federation around them."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware
from fedentopt.partition import partition
from fedentopt.results.reading import RunResult, find_runs
from fedentopt.selection import InferredSelector
from fedentopt.selection.measures import entropy
from flower_fake_grid import FakeGrid, Node, dead, model

APP = Path(__file__).parent.parent.parent / "examples" / "flower-app"
WRITTEN = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
FURTHER = WRITTEN.pop("fedentopt")
DEFAULTS = {**WRITTEN, **{f"fedentopt.{name}": value for name, value in FURTHER.items()}}  # as Flower flattens them


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
    assert (strategy.cohort_size, strategy.roster.buffer_size, strategy.min_available_nodes) == (2, 2, 6)
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
        ({"cohort": "30"}, "cohort: '30' gives 30 of 6"),
        ({"buffer": "90%"}, "buffer: '90%'"),
        ({"partition": "dir:0"}, "partition"),
        ({"colour": 1}, "colour: unknown setting"),
        ({"label_epsilon": "much"}, "label-epsilon .*'much'"),
        ({"label_epsilon": 0}, "label-epsilon .* 0 is not accepted"),
        ({"min_nodes": 21}, "min-nodes: 21 .* 1 to 6, or 0"),
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
    parts = partition(data.y_train, "dir:0.3", 6, 0, num_classes=10, min_samples=1)
    for share in (0, 5):
        images, labels = node_data(context({"partition-id": share, "num-partitions": 6}))
        assert np.array_equal(labels, data.y_train[parts.indices[share]])
        assert np.array_equal(images, data.x_train[parts.indices[share]])


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ({}, "set data .* or partition-id"),
        ({"partition-id": 20, "num-partitions": 20}, "partition-id: 20; accepted: 0 to 19"),
        (
            {"partition-id": 3, "num-partitions": 20, "client-id": "4"},
            "client-id: 4, but partition-id is 3; accepted: 3, a text",
        ),
        ({"partition-id": 0}, "num-partitions: not in the node config"),
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
    told = context({"data": str(path), "class-names": "ant, bee, owl"}, class_names="owl, ant")
    assert node_labels(told).tolist() == [2, 0, 0, 2]
    assert number_of_classes(told) == 3
    with pytest.raises(InputError, match="class 'owl' is not among the class-names"):
        node_labels(context({"data": str(path), "class-names": "ant, bee"}))
    with pytest.raises(InputError, match="class-names: not in the node config"):
        node_labels(context({"data": str(path)}, class_names="ant, bee, owl"))


def test_a_share_may_have_a_name() -> None:
    from fedentopt_app.data import node_labels

    share = {"partition-id": 3, "num-partitions": 20}
    labels = node_labels(context(share))
    for name in ("ward-d", 3, "3", 20):
        assert np.array_equal(node_labels(context({**share, "client-id": name})), labels)


def test_a_real_node_trains_on_the_share_its_owner_says_or_not_at_all() -> None:
    from fedentopt_app.data import check_agreement, node_labels

    owner = {"partition-id": 3, "num-partitions": 20}
    labels = node_labels(context(owner))
    check_agreement(context(owner, clients=20))
    for other in ({"partition": "dir:9"}, {"clients": 21}, {"seed": 1}, {"dataset": "/etc/passwd"}):
        told = context(owner, **{"clients": 20, **other})
        assert np.array_equal(node_labels(told), labels)
        with pytest.raises(InputError, match=r"the app says .* this node's owner"):
            check_agreement(told)
    check_agreement(context({**owner, "seed": 1, "partition": "dir:9"}, clients=20, seed=1, partition="dir:9"))


def test_a_simulated_node_holds_the_share_the_run_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedentopt_app.data import check_agreement, node_labels

    share = {"partition-id": 3, "num-partitions": 10}
    owners = node_labels(context(share))
    monkeypatch.setattr("fedentopt.flower.client.simulated", lambda: True)
    told = context(share, clients=10, partition="dir:9", seed=1)
    check_agreement(told)
    assert not np.array_equal(node_labels(told), owners)
    assert np.array_equal(node_labels(context(share, clients=10)), owners)


class Run:
    """A run of the app's books on a grid in memory, which may be stopped and go on from its checkpoint."""

    def __init__(self, tmp_path: Path, grid: FakeGrid, cohort: int, **settings: Any) -> None:
        self.folder, self.grid, self.cohort = tmp_path, grid, cohort
        self.told = context(cohort=str(cohort), buffer="1", **settings).run_config
        self.trained: list[tuple[tuple[int | str, ...], tuple[int | str, ...]]] = []
        self.scores: dict[int, tuple[float, float, list[float]]] = {}  # by round, where others than 50 %

    def to(self, rounds: int, **options: Any) -> RunResult:
        from fedentopt_app.data import load_data
        from fedentopt_app.record import Bookkeeper
        from fedentopt_app.settings import run_settings

        strategy = FedEntOpt(
            cohort_size=self.cohort,
            buffer_size=1,
            num_classes=10,
            node_timeout=0.05,
            min_available_nodes=1,
            fraction_evaluate=0.0,
            checkpoint_dir=self.folder / "checkpoint",
            **options,
        )
        config = run_settings({**self.told, "rounds": rounds})
        books = Bookkeeper(config, load_data("digits", None), strategy, bool(self.told["class-names"]))

        def evaluate(number: int, arrays: Any) -> Any:
            if number == 0:
                return None
            last = strategy.history[-1]
            self.trained.append((last.cohort.clients, last.answered))
            return books.round_metrics(1.0, 28, self.scores.get(number, (50.0, 1.0, [50.0] * 10)))

        result = strategy.start(self.grid, model(), num_rounds=rounds, evaluate_fn=evaluate)
        path = books.write(self.folder / f"out{rounds}", self.told, result)
        (run,) = find_runs(path.parent)
        return run


def rows(path: Path) -> list[list[float]]:
    return [[float(cell) for cell in line.split(",")[1:]] for line in path.read_text().splitlines()[1:]]


def holding(*classes: int) -> np.ndarray:
    return np.repeat(classes, 30)


@pytest.mark.parametrize("stops", [[9], [3, 4, 9]])
def test_rounds_name_the_clients_that_trained_when_some_of_them_are_forgotten_or_excluded(
    tmp_path: Path, stops: list[int]
) -> None:
    held = {"bergen": (6, 7), "oslo": (0, 1), "turku": (2, 3), "york": (4, 5)}
    grid = FakeGrid({10 + place: Node(name, holding(*held[name])) for place, name in enumerate(held)}, 10)
    run = Run(tmp_path, grid, 2, clients=4, class_names=",".join(map(str, range(10))))
    seen = grid.get_node_ids

    def online() -> Any:
        grid.offline = {10} if len(run.trained) >= 2 else set()  # bergen trains and is then away for good
        return seen()

    grid.get_node_ids = online  # type: ignore[method-assign]
    for place, stop in enumerate(stops):
        done = run.to(stop, forget_after=2, exclude=["oslo"] if place else [])
    order = ["bergen", "oslo", "turku", "york"]
    assert {"bergen", "oslo"} <= {client for clients, _ in run.trained for client in clients}
    assert [[order[row] for row in record.clients] for record in done.records] == [list(c) for c, _ in run.trained]
    table = rows(done.path / "label_counts.csv")
    assert len(table) == 4
    assert table[2:] == [np.bincount(holding(*held[name]), minlength=10).tolist() for name in order[2:]]


@pytest.mark.parametrize("stops", [[5], [1, 2, 5]])
def test_rounds_name_the_clients_that_trained_however_late_others_join(tmp_path: Path, stops: list[int]) -> None:
    held = {"bergen": (6, 7), "oslo": (0, 1), "turku": (2, 3), 9: (4, 5)}
    grid = FakeGrid({10 + place: Node(name, holding(*held[name])) for place, name in enumerate(held)}, 10)
    grid.nodes[11].train = dead
    joins = {1: {10, 13}, 2: {13}, 3: set()}  # who is away in a round; those who come sort before those who are there
    run = Run(tmp_path, grid, 1, clients=4, class_names=",".join(map(str, range(10))))
    seen = grid.get_node_ids

    def online() -> Any:
        grid.offline = joins[min(len(run.trained) + 1, 3)]
        return seen()

    grid.get_node_ids = online  # type: ignore[method-assign]
    for stop in stops:
        done = run.to(stop)
    order: list[int | str] = [9, "bergen", "oslo", "turku"]
    table = rows(done.path / "label_counts.csv")
    assert table == [np.bincount(holding(*held[name]), minlength=10).tolist() for name in order]
    assert {"bergen", "oslo", "turku"} == {client for clients, _ in run.trained for client in clients}
    assert [[order[row] for row in record.clients] for record in done.records] == [list(c) for c, _ in run.trained]
    assert [[order[row] for row in record.trained] for record in done.records] == [list(a) for _, a in run.trained]
    assert ("oslo",) in [clients for clients, answered in run.trained if not answered]


def test_shares_whose_nodes_have_names_are_booked_by_name(tmp_path: Path) -> None:
    names = ["ward-d", "ward-b", 2, "ward-a"]
    noisy = {"label-epsilon": 1.0}
    grid = FakeGrid({10 + n: Node(name, holding(n, n + 1), config=noisy) for n, name in enumerate(names)}, 10)
    run = Run(tmp_path, grid, 2, clients=4)
    done = run.to(4)
    order: list[int | str] = [2, "ward-a", "ward-b", "ward-d"]
    assert [[order[row] for row in record.clients] for record in done.records] == [list(c) for c, _ in run.trained]
    counts, reported = rows(done.path / "label_counts.csv"), rows(done.path / "reported_counts.csv")
    from fedentopt_app.data import load_data

    data = load_data("digits", None)
    share = partition(data.y_train, "dir:0.3", 4, 0, num_classes=10, min_samples=1).counts[2]
    assert counts[0] == share.tolist()  # its number says which share it is, and that the server cut
    assert counts[1:] == np.maximum(reported[1:], 0).tolist()
    for record in done.records:
        assert record.entropy == pytest.approx(entropy(np.sum([counts[row] for row in record.clients], axis=0)))


def test_shares_by_number_keep_a_row_each_also_for_those_never_met(tmp_path: Path) -> None:
    grid = FakeGrid({10 + n: Node(n, holding(n, n + 1)) for n in (3, 1)}, 10)
    run = Run(tmp_path, grid, 1, clients=4)
    done = run.to(2)
    assert len(rows(done.path / "label_counts.csv")) == 4
    assert [record.clients for record in done.records] == [clients for clients, _ in run.trained]


@pytest.mark.parametrize("stops", [[4], [1, 3, 4]])
def test_a_run_that_diverges_is_at_chance_from_there_on_as_in_the_simulator(tmp_path: Path, stops: list[int]) -> None:
    run = Run(tmp_path, FakeGrid({10 + n: Node(n, holding(n, n + 1)) for n in range(4)}, 10), 2, clients=4)
    guess = (9.9, np.nan, [99.0] + [0.0] * 9)  # the largest of ten NaNs is the first
    run.scores = {3: guess, 4: guess}
    for stop in stops:
        done = run.to(stop)
    assert [record.accuracy for record in done.records] == [50.0, 50.0, 10.0, 10.0]
    assert [record.loss for record in done.records] == [1.0, 1.0, None, None]
    assert done.records[2].class_accuracy == (10.0,) * 10
    assert done.summary["diverged_round"] == 3
    assert done.summary["accuracy"] == 30.0


def test_a_class_without_test_images_is_none_the_model_fails(tmp_path: Path) -> None:
    from fedentopt_app.data import load_data
    from fedentopt_app.evaluation import evaluate

    data = load_data("digits", None)
    seen = data.y_test != 4
    part = dataclasses.replace(data, x_test=data.x_test[seen], y_test=data.y_test[seen])

    class AlwaysTwo(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[2].expand(len(images), 10)

    accuracy, _, classes = evaluate(AlwaysTwo(), part)
    assert accuracy == pytest.approx(100 * np.mean(part.y_test == 2))
    assert classes[2] == 100.0
    assert np.isnan(classes[4])
    run = Run(tmp_path, FakeGrid({10 + n: Node(n, holding(n, n + 1)) for n in range(4)}, 10), 2, clients=4)
    run.scores = dict.fromkeys((1, 2, 3), (90.0, 0.1, [80.0] * 4 + [np.nan] + [70.0] * 5))
    run.to(2)
    done = run.to(3)
    assert [record.worst_class_accuracy for record in done.records] == [70.0] * 3
    assert done.summary["worst_class_accuracy"] == 70.0
    assert done.summary["class_accuracy"][4] is None


def test_settings_under_fedentopt_reach_the_strategy() -> None:
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import run_settings

    told = context()
    told.run_config |= {"fedentopt.exclude": "oslo, 7", "fedentopt.replacements": 1, "fedentopt.release": "random"}
    strategy = make_strategy(run_settings(told.run_config), told, 10)
    assert strategy.census.exclude == {"oslo", 7}
    assert strategy.replacements == 1
    assert strategy.selector.release == "random"  # type: ignore[attr-defined]
    told.run_config["fedentopt.colour"] = 1
    with pytest.raises(
        InputError, match=r"fedentopt\.colour: unknown setting; accepted: strategy, selector, .*buffer-size"
    ):
        make_strategy(run_settings(told.run_config), told, 10)


def test_a_run_is_not_continued_with_other_shares(tmp_path: Path) -> None:
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import run_settings

    def strategy(**more: Any) -> LabelAware:
        told = context(checkpoint=str(tmp_path), min_nodes=1, clients=4, label_epsilon="none", **more)
        return make_strategy(run_settings(told.run_config), told, 10)

    grid = FakeGrid({10 + n: Node(n, holding(n, n + 1)) for n in range(4)}, 10)
    strategy().start(grid, model(), num_rounds=1)
    strategy(rounds=20, node_timeout=7.0).start(grid, model(), num_rounds=2)
    with pytest.raises(InputError, match=r"partition: 'dir:0\.5', but the checkpoint was written with 'dir:0\.3'"):
        strategy(partition="dir:0.5").start(grid, model(), num_rounds=3)


def test_results_are_written_as_the_run_goes_and_the_folder_is_tried_first(tmp_path: Path) -> None:
    from fedentopt_app.data import load_data
    from fedentopt_app.record import Bookkeeper
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import run_settings

    seen: list[int] = []

    def go(rounds: int, out: Path) -> Path:
        told = context(checkpoint=str(tmp_path / "c"), min_nodes=1, clients=4, label_epsilon="none")
        config = run_settings({**told.run_config, "rounds": rounds})
        strategy = make_strategy(config, told, 10)
        books = Bookkeeper(config, load_data("digits", None), strategy, False)
        books.begin(out, told.run_config)
        strategy.progress.callbacks += (books.note, lambda record: seen.append(lines(out)))
        grid = FakeGrid({10 + n: Node(n, holding(n, n + 1)) for n in range(4)}, 10)

        def evaluate(number: int, arrays: Any) -> Any:
            return books.round_metrics(1.0, 28, (50.0, 1.0, [50.0] * 10)) if number else None

        result = strategy.start(grid, model(), num_rounds=rounds, evaluate_fn=evaluate)
        return books.write(out, told.run_config, result)

    def lines(out: Path) -> int:
        (table,) = out.glob("*/rounds.csv")
        return len(table.read_text().splitlines()) - 1

    go(2, tmp_path / "out")
    go(4, tmp_path / "out2")
    assert seen == [1, 2, 3, 4]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="out: "):
        go(5, tmp_path / "file" / "deeper")
    assert seen == [1, 2, 3, 4]


def test_the_app_keeps_the_rules_of_flowers_hub() -> None:
    files = [path for path in APP.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    accepted = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
    assert all(path.suffix in accepted or path.name in ("LICENSE", ".gitignore", ".editorconfig") for path in files)
    assert len(files) <= 1000
    assert sum(path.stat().st_size for path in files) <= 10 * 2**20
    for path in files:
        assert path.stat().st_size <= 2**20
        path.read_text(encoding="utf-8")
    about = tomllib.loads((APP / "pyproject.toml").read_text())
    assert {"name", "version", "description"} <= about["project"].keys()
    assert about["project"]["license"] == {"file": "LICENSE"}
    assert (APP / "LICENSE").read_text() == (APP.parent.parent / "LICENSE").read_text()
    assert about["tool"]["flwr"]["app"]["fab-format-version"] == 1
    assert about["tool"]["flwr"]["app"]["flwr-version-target"] == "1.41.0"
    assert (WRITTEN["clients"], WRITTEN["cohort"], WRITTEN["buffer"]) == (6, "2", "2")
    assert WRITTEN["min-nodes"] == 0  # waits for all of them


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            {"algorithm": "fedlc", "audit": "warn"},
            "audit: 'warn' reads labels from the bias .* fedlc changes on purpose",
        ),
        (
            {"algorithm": "fedrs", "selector": "inferred"},
            "selector: 'inferred' reads labels .* fedrs changes on purpose",
        ),
        ({"audit": "loud"}, "audit"),
        ({"audit": "warn", "selector": "inferred"}, "audit: warn is about label reports, and 'inferred' takes none"),
        ({"audit": "replace", "selector": "random"}, "audit: replace changes nothing"),
    ],
)
def test_an_audit_that_the_app_cannot_honour_is_refused(setting: dict[str, Any], told: str) -> None:
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import run_settings

    with pytest.raises(InputError, match=told):
        make_strategy(run_settings(context(**setting).run_config), context(**setting), 10)


def test_the_app_tells_the_strategy_how_its_clients_train() -> None:
    from fedentopt_app.server_app import make_strategy
    from fedentopt_app.settings import run_settings

    told = context(audit="quarantine", lr=0.03, epochs=2)
    strategy = make_strategy(run_settings(told.run_config), told, 10)
    assert strategy.watch is not None
    assert strategy.watch.policy == "quarantine"
    local = strategy.learning.heads.local
    assert (local.lr, local.epochs, local.batch_size, local.momentum, local.lr_decay) == (0.03, 2, 16, 0.9, 0.98)
    told = context(selector="inferred", census_epochs=0)
    selector = make_strategy(run_settings(told.run_config), told, 10).selector
    assert isinstance(selector, InferredSelector)
    assert (selector.census_epochs, selector.buffer_size, selector.census()) == (0, 2, None)
    assert run_settings(context().run_config).to_dict().get("audit", "off") == "off"


def test_a_node_of_the_app_does_a_census_and_sends_its_last_layer_alone() -> None:
    from fedentopt_app.client_app import app
    from fedentopt_app.data import load_data

    from fedentopt.models import build

    data = load_data("digits", None)
    start = build("lenet5", 10, seed=0, image_size=data.image_size).state_dict()
    told = ConfigRecord(
        {"server-round": 1, "census": 1, "local-epochs": 1, "mean": list(data.mean), "std": list(data.std)}
    )
    owner = {"partition-id": 3, "num-partitions": 6, "label-epsilon": "none"}
    message = Message(RecordDict({"arrays": ArrayRecord(start), "config": told}), 7, "train")
    reply = app(message, context(owner, selector="inferred", label_epsilon="none"))
    assert not reply.has_error(), reply.error
    assert [array.shape for array in reply.content["arrays"].values()] == [(10, 84), (10,)]
    assert reply.content["client"] == {"release": 1, "client-id": 3, "census": 1}
