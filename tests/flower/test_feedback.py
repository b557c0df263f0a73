"""Selectors that learn from training, inside Flower: what they are told, and that they go on after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware, label_report
from fedentopt.flower.feedback import SERVED
from fedentopt.flower.heads import head_names
from fedentopt.selection import SELECTORS, Candidates, Head, Observation, OortSelector, Selector
from flower_fake_grid import CLASSES, FakeGrid, FastClock, Node, broken, silent, skewed

FEATURES = 3
CLIENTS = 8


def start_model() -> ArrayRecord:
    arrays = {
        "conv": np.zeros((4, 2), dtype=np.float32),
        "bn.num_batches_tracked": np.zeros((), dtype=np.int64),
        "fc.weight": np.zeros((CLASSES, FEATURES), dtype=np.float32),
        "fc.bias": np.zeros(CLASSES, dtype=np.float32),
    }
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def grid_of(metrics: Any = None, **config: Any) -> FakeGrid:
    """Clients whose every array moves by 1 plus their number, whose loss is their number plus 1 over the round."""
    labels = skewed(CLIENTS)
    grid = FakeGrid({1000 - 17 * k: Node(k, labels[k]) for k in range(CLIENTS)}, CLASSES)
    app = ClientApp()
    app.query("label_counts")(
        label_report(lambda context: grid.nodes[int(context.node_config["data"])].labels, CLASSES)
    )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["rank"])
        number = int(message.content.config_records["config"]["server-round"])
        told = message.content["arrays"]
        arrays = {}
        for name, array in told.items():
            values = array.numpy()
            arrays[name] = Array(np.asarray(values + np.asarray(1 + client, dtype=values.dtype)))
        record = {"num-examples": 20 + client, "train_loss": client + 1.0 / number, "train_loss_rms": 2.0 * client}
        record = record if metrics is None else metrics(record, client)
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(record)}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["rank"])
        grid.purposes.append(dict(message.content.config_records["config"]))  # type: ignore[attr-defined]
        assert "fc.weight" in message.content["arrays"]
        key = config.get("loss", "loss")
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 5, key: 10.0 - client})}), reply_to=message)

    grid.purposes = []  # type: ignore[attr-defined]
    grid._app = app
    return grid


class Noting(Selector):
    """Takes clients in turn, and notes what it is told."""

    name = "noting"

    def __init__(self, cohort_size: int, seed: int = 0) -> None:
        super().__init__(cohort_size, seed)
        self.seen: list[dict[Any, Observation]] = []

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        first = self.round * self.cohort_size
        return [int(available[(first + k) % available.size]) for k in range(self.cohort_size)]

    def observe(self, observations: Any) -> None:
        self.seen.append(dict(observations))


def noting(*needs: str) -> Noting:
    class Chosen(Noting):
        pass

    Chosen.needs = frozenset(needs)
    return Chosen(2)


def run(selector: Selector, grid: FakeGrid, rounds: int = 2, **options: Any) -> LabelAware:
    strategy = FedEntOpt(
        cohort_size=selector.cohort_size,
        num_classes=CLASSES,
        selector=selector,
        fraction_evaluate=0.0,
        min_available_nodes=1,
        **options,
    )
    strategy.clock = FastClock()
    strategy.start(grid, start_model(), num_rounds=rounds)
    return strategy


def test_the_loss_is_what_the_clients_say() -> None:
    selector = noting("loss")
    run(selector, grid_of(), rounds=2)
    assert selector.seen == [
        {0: Observation(20, loss=1.0, loss_rms=0.0), 1: Observation(21, loss=2.0, loss_rms=2.0)},
        {2: Observation(22, loss=2.5, loss_rms=4.0), 3: Observation(23, loss=3.5, loss_rms=6.0)},
    ]


def test_the_names_of_the_losses_may_be_others() -> None:
    def renamed(record: dict[str, Any], client: int) -> dict[str, Any]:
        return {"num-examples": record["num-examples"], "ce": 7.0}

    selector = noting("loss")
    run(selector, grid_of(renamed), rounds=1, loss_key="ce")
    assert selector.seen == [{0: Observation(20, loss=7.0), 1: Observation(21, loss=7.0)}]


def test_the_head_is_the_change_of_the_last_layer() -> None:
    selector = noting("head")
    run(selector, grid_of(), rounds=2)
    for number, clients in enumerate(([0, 1], [2, 3])):
        assert list(selector.seen[number]) == clients
        for client in clients:
            head = selector.seen[number][client].head
            assert isinstance(head, Head)
            np.testing.assert_allclose(head.weight, np.full((CLASSES, FEATURES), 1.0 + client), rtol=1e-5)
            assert head.bias is not None
            np.testing.assert_allclose(head.bias, np.full(CLASSES, 1.0 + client), rtol=1e-5)
            assert selector.seen[number][client].loss is None


@pytest.mark.parametrize(
    ("local", "told"),
    [
        ({"lr": 0.1, "lr_decay": 0.5, "batch_size": 10}, [0.2, 0.3, 0.15, 0.15]),  # of 20, 21, 22 and 23 samples
        ({"lr": 0.1, "steps": 4}, [0.4] * 4),
        ({"lr": 0.1}, [None] * 4),
        (None, [None] * 4),
    ],
)
def test_with_a_head_comes_its_travel_where_the_server_knows_everybodys_steps(
    local: dict[str, Any] | None, told: list[float | None]
) -> None:
    selector = noting("head")
    run(selector, grid_of(), rounds=2, local=local)
    assert [seen.travel for told in selector.seen for seen in told.values()] == [
        None if travel is None else pytest.approx(travel) for travel in told
    ]


def test_the_update_is_the_change_of_all_weights_in_the_models_order() -> None:
    selector = noting("update")
    run(selector, grid_of(), rounds=1)
    for client in (0, 1):
        update = selector.seen[0][client].update
        assert update is not None
        assert update.dtype == np.float32
        np.testing.assert_allclose(update, np.full(4 * 2 + CLASSES * FEATURES + CLASSES, 1.0 + client))


@pytest.mark.parametrize("reported", [False, True])
def test_seconds_are_reported_or_measured(reported: bool) -> None:
    def timed(record: dict[str, Any], client: int) -> dict[str, Any]:
        return {**record, "train_seconds": 100.0 + client} if reported else record

    selector = noting("seconds")
    grid = grid_of(timed)
    plain = grid.pull_messages
    strategy = FedEntOpt(
        cohort_size=2, num_classes=CLASSES, selector=selector, fraction_evaluate=0.0, min_available_nodes=1
    )
    strategy.clock = clock = FastClock()

    def late(names: Any) -> Any:
        names = [name for name in names if name in grid._ready]
        training = {name for name in names if grid._ready[name].metadata.message_type == "train"}
        slow = {name for name in training if grid._ready[name].metadata.src_node_id == 1000 - 17}
        return plain([name for name in names if name not in slow or clock.now() > 30])

    grid.pull_messages = late  # type: ignore[method-assign]
    strategy.start(grid, start_model(), num_rounds=1)
    seen = {client: seen.seconds for client, seen in selector.seen[0].items()}
    if reported:
        assert seen == {0: 100.0, 1: 101.0}
    else:
        assert seen[0] == 0.0
        assert seen[1] is not None
        assert 30 <= seen[1] < 35


class PowerOfChoice(Selector):
    """The clients with the largest losses among a few candidates, as an author may write it."""

    name = "largest-loss"
    needs: ClassVar[frozenset[str]] = frozenset({"candidate_loss"})
    few: int | None = None
    asked = 4

    def candidates(self, available: Any = None) -> Candidates:
        rows = self.available_numbers(available)
        drawn = self.rng(1).choice(rows, min(self.asked, rows.size), replace=False)
        return Candidates(tuple(self.clients[number] for number in sorted(drawn.tolist())), self.few)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        assert losses is not None
        order = np.argsort(-np.nan_to_num(losses, nan=-1.0), kind="stable")
        return [int(number) for number in order[: self.cohort_size]]


@pytest.mark.parametrize("key", ["loss", "eval_loss"])
def test_candidates_are_asked_for_the_loss_of_the_current_model_before_they_are_picked(key: str) -> None:
    grid = grid_of(loss=key)
    selector = PowerOfChoice(2, seed=3)
    strategy = run(selector, grid, rounds=3)
    kinds = [kind for kind, _ in grid.asked]
    assert kinds == ["query.label_counts", *["evaluate", "train"] * 3]
    asked = grid.sent("evaluate")
    assert [len(nodes) for nodes in asked] == [4, 4, 4]
    for nodes, entry in zip(asked, strategy.history, strict=True):
        clients = sorted((1000 - node) // 17 for node in nodes)
        assert entry.cohort.clients == tuple(clients[:2])  # the loss falls with the number
    assert grid.purposes[0] == {"server-round": 1, "purpose": "candidate-loss"}  # type: ignore[attr-defined]


def test_candidates_are_told_what_all_evaluations_are() -> None:
    grid = grid_of()
    strategy = FedEntOpt(
        cohort_size=2, num_classes=CLASSES, selector=PowerOfChoice(2, seed=3), fraction_evaluate=0.0,
        min_available_nodes=1,
    )  # fmt: skip
    strategy.start(grid, start_model(), num_rounds=2, evaluate_config=ConfigRecord({"batch-size": 64}))
    told = {"server-round": 2, "purpose": "candidate-loss", "batch-size": 64}
    assert grid.purposes[-1] == told  # type: ignore[attr-defined]


def test_candidates_may_be_asked_for_few_samples_and_one_that_fails_is_left_out() -> None:
    grid = grid_of()
    app = grid._app

    def half_broken(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "evaluate" and context.node_id == 1000:
            return broken(message)
        return app(message, context)

    grid._app = half_broken  # type: ignore[assignment]
    selector = PowerOfChoice(2, seed=3)
    selector.few = 32
    strategy = run(selector, grid, rounds=4)
    assert all(config["samples"] == 32 for config in grid.purposes)  # type: ignore[attr-defined]
    assert all(0 not in entry.cohort.clients for entry in strategy.history)


def test_a_candidate_that_says_nothing_holds_up_few_rounds() -> None:
    grid = grid_of()
    app = grid._app

    def half_silent(message: Message, context: Context) -> Message | None:
        hangs = message.metadata.message_type == "evaluate" and context.node_id == 1000
        return None if hangs else app(message, context)

    grid._app = half_silent  # type: ignore[assignment]
    selector = PowerOfChoice(2, seed=3)
    selector.asked = 99
    run(selector, grid, rounds=12)
    asked = [number for number, nodes in enumerate(grid.sent("evaluate"), start=1) if 1000 in nodes]
    assert asked == [1, 3, 6, 11]  # it sits out 1, 2, 4, ... rounds


def test_one_client_without_the_metric_ends_no_run_and_is_not_the_measure_of_others() -> None:
    """The first of a cohort of two leaves the loss out: it is the odd one, whoever comes first."""
    asked: list[int] = []

    def sly(record: dict[str, Any], client: int) -> dict[str, Any]:
        asked.append(client)
        return {k: v for k, v in record.items() if k != "train_loss"} if client == asked[0] else record

    strategy = run(noting("loss"), grid_of(sly), rounds=4)
    assert len(strategy.history) == 4
    assert strategy.feedback.seen == {"loss"}
    failed = {client for entry in strategy.history for client in entry.failed}
    assert len(failed) == 1


@pytest.mark.parametrize("need", ["loss", "candidate_loss"])
def test_two_hostile_clients_that_are_heard_first_end_no_run(need: str) -> None:
    """All that was heard in round 1 lacks the figure: so may a cohort of two, and two candidates."""
    hostile: list[int] = []

    def sly(record: dict[str, Any], client: int) -> dict[str, Any]:
        hostile.extend([client] if len(hostile) < 2 else [])
        return {k: v for k, v in record.items() if k != "train_loss"} if client in hostile else record

    if need == "loss":
        selector: Any = noting("loss")
        strategy = run(selector, grid_of(sly), rounds=4)
        assert [len(seen) for seen in selector.seen] == [0, 2, 2, 2]
    else:
        selector = PowerOfChoice(2, seed=3)
        selector.asked = 2
        grid = grid_of()
        app = grid._app

        def half_silent(message: Message, context: Context) -> Message:
            if message.metadata.message_type != "evaluate":
                return app(message, context)
            sly({}, context.node_id)
            reply = app(message, context)
            if context.node_id in hostile:
                reply.content["metrics"] = MetricRecord({"num-examples": 5})
            return reply

        grid._app = half_silent  # type: ignore[assignment]
        strategy = run(selector, grid, rounds=4)
    assert [len(entry.cohort.clients) for entry in strategy.history] == [2] * 4
    assert strategy.feedback.seen == {need}


def test_an_app_that_serves_nobody_is_told_once_more_than_a_quarter_was_heard(caplog) -> None:
    heard: list[int] = []

    def bare(record: dict[str, Any], client: int) -> dict[str, Any]:
        heard.append(client)
        return {"num-examples": record["num-examples"], "accuracy": 1.0}

    with pytest.raises(InputError, match="needs loss, but no reply has the metric 'train_loss'"):
        run(noting("loss"), grid_of(bare), rounds=8)
    assert len(heard) == 4  # in two rounds, of eight
    caplog.clear()
    run(noting("loss"), grid_of(bare), rounds=1)  # too short to hear enough: nobody would know
    (warned,) = [line for line in caplog.messages if "needs loss" in line]
    assert "no reply has the metric 'train_loss'; the replies have accuracy, num-examples" in warned
    caplog.clear()
    run(noting("loss"), grid_of(), rounds=1)
    assert not [line for line in caplog.messages if "needs loss" in line]


def test_an_app_that_does_not_serve_a_need_ends_the_run_with_one_sentence() -> None:
    def bare(record: dict[str, Any], client: int) -> dict[str, Any]:
        return {"num-examples": record["num-examples"], "accuracy": 1.0}

    with pytest.raises(InputError, match=r"needs loss, but no reply has the metric 'train_loss'.*accuracy, num-exampl"):
        run(noting("loss"), grid_of(bare), rounds=2)
    with pytest.raises(InputError, match="needs candidate_loss, but no reply has the metric 'loss' or 'eval_loss'"):
        run(PowerOfChoice(2), grid_of(loss="error"), rounds=1)
    with pytest.raises(InputError, match="head: no array of the model has 5 rows"):
        head_names(ArrayRecord({"a": Array(np.zeros((3, 4)))}), CLASSES)
    with pytest.raises(InputError, match="needs kept, which this strategy does not ask"):
        run(noting("kept"), grid_of(), rounds=1)


def test_oort_goes_by_the_mean_loss_where_apps_tell_nothing_else() -> None:
    def bare(record: dict[str, Any], client: int) -> dict[str, Any]:
        return {"num-examples": record["num-examples"], "train_loss": record["train_loss"]}

    selector = OortSelector(2, seed=1)
    strategy = run(selector, grid_of(bare), rounds=3)
    trained = {client for entry in strategy.history for client in entry.cohort.clients}
    told = dict(selector.memory()["utility"])
    assert told.keys() == trained
    last = strategy.history[-1].cohort.clients
    assert {client: told[client] for client in last} == {
        client: pytest.approx((20 + client) * (client + 1 / 3)) for client in last
    }


def test_one_client_without_the_figure_ends_nothing_once_others_had_it() -> None:
    grid = grid_of()
    selector = noting("loss")
    strategy = FedEntOpt(
        cohort_size=2, num_classes=CLASSES, selector=selector, fraction_evaluate=0.0, min_available_nodes=1
    )
    strategy.clock = FastClock()

    def fail(number: int, arrays: Any) -> None:
        for node in grid.nodes.values():
            node.train = silent if number == 1 else None

    strategy.start(grid, start_model(), num_rounds=3, evaluate_fn=fail)
    assert [len(seen) for seen in selector.seen] == [2, 0, 2]


def test_the_last_layer_is_found_by_its_shape_or_named() -> None:
    def of(**arrays: Any) -> ArrayRecord:
        return ArrayRecord({name: Array(np.zeros(shape, dtype=np.float32)) for name, shape in arrays.items()})

    assert head_names(of(a=(5, 9), b=(5,), c=(9, 9), d=(9,)), 5) == ("a", "b")
    assert head_names(of(a=(5, 9), b=(5,), c=(5, 7), d=(5,)), 5) == ("c", "d")
    assert head_names(of(a=(9, 5), b=(5,)), 5) == ("a", "b")  # Keras
    assert head_names(of(a=(9, 9), b=(5, 9)), 5) == ("b", None)
    assert head_names(of(x=(5, 9), y=(5, 9), z=(5,)), 5, ("x", "z")) == ("x", "z")
    with pytest.raises(InputError, match="head: 'q' is no array of the model"):
        head_names(of(a=(5, 9)), 5, ("q",))


class Learning(Selector):
    """Prefers clients with large losses and remembers: JSON by client, and arrays."""

    name = "learning"
    needs: ClassVar[frozenset[str]] = frozenset({"loss", "update", "candidate_loss"})

    def __init__(self, cohort_size: int, seed: int = 0) -> None:
        super().__init__(cohort_size, seed)
        self.losses: dict[Any, float] = {}
        self.mean = np.zeros(0, dtype=np.float32)

    def candidates(self, available: Any = None) -> Candidates:
        return Candidates(tuple(self.clients[number] for number in self.available_numbers(available)[:3]))

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        ids = self.clients
        known = np.array([1.0 + self.losses.get(ids[number], 0.0) for number in available])
        known += np.abs(self.mean).sum() + np.nan_to_num(losses)[available]  # type: ignore[arg-type]
        return self.rng().choice(available, self.cohort_size, False, known / known.sum()).tolist()

    def observe(self, observations: Any) -> None:
        for client, seen in observations.items():
            self.losses[client] = self.losses.get(client, 0.0) + seen.loss**3
            self.mean = 0.5 * (self.mean if self.mean.size else np.zeros_like(seen.update)) + seen.update

    def memory(self) -> dict[str, Any]:
        return {"losses": [[client, loss] for client, loss in self.losses.items()]}

    def remember(self, memory: Any) -> None:
        self.losses = dict(memory["losses"])

    def arrays(self) -> dict[str, np.ndarray]:
        return {"mean": self.mean}

    def load_arrays(self, arrays: Any) -> None:
        self.mean = np.array(arrays["mean"])


def test_what_a_selector_has_learnt_survives_a_stop(tmp_path: Path) -> None:
    want = run(Learning(2, seed=1), grid_of(), rounds=8)
    picked = []
    for rounds in (1, 3, 4, 8):
        strategy = run(Learning(2, seed=1), grid_of(), rounds=rounds, checkpoint_dir=tmp_path)
        picked += [entry.cohort.clients for entry in strategy.history]
    assert picked == [entry.cohort.clients for entry in want.history]
    assert isinstance(strategy.selector, Learning)
    assert isinstance(want.selector, Learning)
    assert strategy.selector.mean.tobytes() == want.selector.mean.tobytes()
    assert len(set(picked)) > 3


@pytest.mark.parametrize(
    ("needs", "begun", "continued", "told"),
    [
        (["loss"], {}, {"loss_key": "train_loss_rms"}, "loss_key: 'train_loss_rms', but the checkpoint was"),
        (["seconds"], {}, {"seconds_key": "time"}, "seconds_key: 'time', but"),
        (["candidate_loss"], {}, {"candidate_loss_keys": ("loss",)}, r"candidate_loss_keys: \['loss'\], but"),
        (["head"], {}, {"local": {"lr": 0.1, "steps": 3}}, r"local: {'lr': 0\.1, .*}, but .* {'lr': None, .*accepted"),
        (["head"], {"head": ("fc.weight",)}, {}, r"head: \['fc.weight', 'fc.bias'\], but .* \['fc.weight', None\]"),
        (["head"], {"head": "fc"}, {}, None),  # the same layer
        ([], {}, {"loss_key": "other", "head": "fc"}, None),  # nobody reads either
    ],
)
def test_what_a_selector_learns_is_read_from_the_same_place_after_a_stop(
    needs: list[str], begun: dict[str, Any], continued: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    run(noting(*needs), grid_of(), rounds=1, checkpoint_dir=tmp_path, **begun)
    grid = grid_of()
    if told is None:
        assert len(run(noting(*needs), grid, rounds=2, checkpoint_dir=tmp_path, **continued).history) == 1
        return
    with pytest.raises(InputError, match=told):
        run(noting(*needs), grid, rounds=2, checkpoint_dir=tmp_path, **continued)
    assert grid.asked == []


def served() -> list[str]:
    """The library's selectors that Flower can serve: they need no more than it can tell, and pick whole clients."""
    return [name for name in SELECTORS.names if SELECTORS.get(name).needs <= SERVED and name != "kl"]


@pytest.mark.parametrize("name", served())
def test_every_selector_that_can_be_served_runs_and_goes_on_after_a_stop(name: str, tmp_path: Path) -> None:
    def selector() -> Selector:
        return SELECTORS.get(name).for_run(cohort_size=2, clients=CLIENTS, seed=1)

    steps = {"lr": 0.1, "steps": 3}  # of which only those want to know that read labels from last layers
    want = run(selector(), grid_of(), rounds=6, local=steps)
    picked = []
    for rounds in (2, 3, 6):
        strategy = run(selector(), grid_of(), rounds=rounds, checkpoint_dir=tmp_path, local=steps)
        picked += [entry.cohort.clients for entry in strategy.history]
    assert picked == [entry.cohort.clients for entry in want.history]
    assert all(1 <= len(set(cohort)) <= 2 for cohort in picked)
    assert len({client for cohort in picked for client in cohort}) > 2
