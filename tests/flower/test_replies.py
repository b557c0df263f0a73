"""Replies that cannot be averaged: each is its sender's failure, named, and the round goes on without it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedXgbBagging, QFedAvg

from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.selection.measures import entropy
from flower_fake_grid import CLASSES, FakeGrid, FastClock, broken, federation, model, says

COMMON: dict[str, Any] = {
    "cohort_size": 4,
    "buffer_size": 0,
    "num_classes": CLASSES,
    "seed": 5,
    "fraction_evaluate": 0.0,
    "min_available_nodes": 1,
}
GOOD = {"num-examples": 20, "norm_bit": 1.0, "train_loss": 0.5}


def made(cls: type[LabelAware] = FedEntOpt, **options: Any) -> LabelAware:
    strategy = cls(**{**COMMON, **options})
    strategy.clock = FastClock()
    return strategy


def reply(
    metrics: Any = None, arrays: Any = None, *, records: Callable[[RecordDict], RecordDict] = lambda content: content
) -> Callable[[Message], Message]:
    """A reply as a client would send it, but for what is given."""

    def answer(message: Message) -> Message:
        told = message.content["arrays"]
        trained = arrays(told) if arrays is not None else ArrayRecord({n: told[n] for n in told})
        content = RecordDict({"arrays": trained, "metrics": MetricRecord(GOOD if metrics is None else metrics)})
        return Message(records(content), reply_to=message)

    return answer


def changed(**more: Any) -> Callable[[ArrayRecord], ArrayRecord]:
    return lambda told: ArrayRecord({**{name: told[name] for name in told}, **more})


def filled(value: float, dtype: Any = np.float32) -> Callable[[ArrayRecord], ArrayRecord]:
    return changed(w=Array(np.full((2, 3), value, dtype=dtype)))


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name not in names}


def lying_array(**fields: Any) -> Array:
    """An array whose description and bytes disagree."""
    array = Array(np.zeros((2, 3), dtype=np.float32))
    for name, value in fields.items():
        array.__dict__[name] = value
    return array


def with_header(shape: str) -> bytes:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + b"\0" * 24


BAD: dict[str, tuple[Callable[[Message], Message], str]] = {
    "no num-examples": (reply(without("num-examples")), "'num-examples' is missing"),
    "no examples": (reply({**GOOD, "num-examples": 0}), "num-examples: 0"),
    "negative examples": (reply({**GOOD, "num-examples": -5}), "num-examples: -5"),
    "examples beyond floats": (reply({**GOOD, "num-examples": 10**400}), "finite numbers"),
    "2^53 examples": (reply({**GOOD, "num-examples": 2**53}), "times what is usual"),
    "a list of examples": (reply({**GOOD, "num-examples": [1, 2]}), "one number above 0"),
    "NaN examples": (reply({**GOOD, "num-examples": float("nan")}), "finite numbers"),
    "a metric less": (reply(without("norm_bit")), "'norm_bit' is missing, in the others' replies one number"),
    "a metric more": (reply({**GOOD, "extra": 1.0}), "'extra' is one number, in the others' replies missing"),
    "a list for a number": (reply({**GOOD, "train_loss": [0.5]}), "'train_loss' is 1 numbers"),
    "too many metrics": (reply({**GOOD, **{f"{k}": 0.5 for k in range(20_000)}}), "accepted: at most 65536"),
    "a metric too long": (reply({**GOOD, "each": [0.5] * 66_000}), "accepted: at most 65536"),
    "a name too long": (reply({**GOOD, "x" * 66_000: 0.5}), "accepted: at most 65536"),
    "NaN loss": (reply({**GOOD, "train_loss": float("nan")}), "'train_loss': nan"),
    "infinite loss": (reply({**GOOD, "train_loss": float("inf")}), "'train_loss': inf"),
    "no arrays": (reply(records=lambda c: RecordDict({"metrics": c["metrics"]})), "0 ArrayRecords"),
    "no metrics": (reply(records=lambda c: RecordDict({"arrays": c["arrays"]})), "0 MetricRecords"),
    "nothing": (reply(records=lambda c: RecordDict()), "0 ArrayRecords"),
    "two models": (reply(records=lambda c: RecordDict({**c, "more": c["arrays"]})), "2 ArrayRecords"),
    "two metrics": (reply(records=lambda c: RecordDict({**c, "more": c["metrics"]})), "2 MetricRecords"),
    "another name": (
        reply(records=lambda c: RecordDict({"a": c["arrays"], "metrics": c["metrics"]})),
        "ArrayRecord 'a'",
    ),
    "an array less": (reply(arrays=lambda told: ArrayRecord({"w": told["w"]})), "missing array 'b'"),
    "an array more": (reply(arrays=changed(z=Array(np.zeros(1)))), "unknown array 'z'"),
    "another shape": (reply(arrays=changed(w=Array(np.zeros((3, 2), dtype=np.float32)))), r"shape (3, 2)"),
    "a shape that broadcasts": (reply(arrays=changed(w=Array(np.zeros(3, dtype=np.float32)))), "shape (3,)"),
    "NaN": (reply(arrays=filled(float("nan"))), "6 values are not finite"),
    "infinity": (reply(arrays=filled(float("-inf"))), "6 values are not finite"),
    "beyond single precision": (reply(arrays=filled(1e300, np.float64)), "6 values are not finite"),
    "complex": (reply(arrays=filled(1, np.complex64)), "complex64"),
    "texts": (reply(arrays=changed(w=Array(np.full((2, 3), "a")))), "accepted: numbers"),
    "no array": (reply(arrays=changed(w=lying_array(data=b"hello"))), "cannot be read"),
    "a pickle": (reply(arrays=changed(w=lying_array(data=b"\x80\x04K\x01."))), "cannot be read"),
    "an archive": (reply(arrays=changed(w=lying_array(data=b"PK\x03\x04..."))), "cannot be read"),
    "bytes cut off": (reply(arrays=changed(w=lying_array(data=with_header("(2, 3)")[:-4]))), "do not fit"),
    "a terabyte": (reply(arrays=changed(w=lying_array(data=with_header("(500000, 500000)")))), "do not fit"),
    "serialised otherwise": (reply(arrays=changed(w=lying_array(stype="pickle"))), "serialised as 'pickle'"),
}


@functools.cache
def first_cohort() -> tuple[Any, ...]:
    return run(made(), federation()).history[0].cohort.clients


def victim_of(grid: FakeGrid) -> tuple[int, Any]:
    """A client of the first cohort, and its node."""
    client = first_cohort()[2]
    return client, next(node for node in grid.nodes.values() if node.client == client)


def run(strategy: LabelAware, grid: FakeGrid, rounds: int = 1, **more: Any) -> LabelAware:
    strategy.result = strategy.start(grid, model(), num_rounds=rounds, **more)  # type: ignore[attr-defined]
    return strategy


@pytest.mark.parametrize("kind", BAD)
def test_a_reply_that_cannot_be_averaged_is_its_senders_failure(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    trouble, reason = BAD[kind]
    grid = federation()
    client, node = victim_of(grid)
    node.train = trouble
    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy = run(made(), grid)
    (entry,) = strategy.history
    assert reason in entry.failed[client]
    assert set(entry.failed) == {client}
    assert entry.answered == tuple(other for other in entry.cohort.clients if other != client)
    assert any(f"client {client} did not train" in line and reason in line for line in caplog.messages)
    # The model is that of the others.
    grid = federation()
    _, node = victim_of(grid)
    node.train = broken
    assert raw(strategy) == raw(run(made(), grid))


def raw(strategy: LabelAware) -> list[bytes]:
    arrays = strategy.result.arrays  # type: ignore[attr-defined]
    return [array.tobytes() for array in arrays.to_numpy_ndarrays()]


def test_what_a_node_says_of_its_error_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    grid = federation()
    _, node = victim_of(grid)
    text = "no\n[ROUND 9/9]\x1b[2J" + "x" * 10**5
    node.train = lambda message: Message(Error(code=1, reason=text), reply_to=message)
    with caplog.at_level(logging.INFO, logger="flwr"):
        run(made(), grid)
    told = [record.getMessage().strip() for record in caplog.records if "xxx" in record.getMessage()]
    assert len(told) == 2, "ours and Flower's"
    assert all(line.replace("\t", " ").isprintable() and len(line) < 500 for line in told)


def test_arrays_in_another_order_are_the_same_model() -> None:
    grid = federation()
    app = grid._app

    def backwards(message: Message, context: Any) -> Message:
        answer = app(message, context)
        if message.metadata.message_type == "train":
            told = answer.content["arrays"]
            answer.content["arrays"] = ArrayRecord({name: told[name] for name in reversed(list(told))})
        return answer

    grid._app = backwards  # type: ignore[assignment]
    strategy = run(made(), grid)
    assert not strategy.history[0].failed
    assert raw(strategy) == raw(run(made(), federation()))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.longdouble, ">f4", np.int8, np.bool_])
def test_the_model_keeps_its_type_whatever_type_a_client_sends(dtype: Any) -> None:
    grid = federation()
    first = next(node for node in grid.nodes.values() if node.client == first_cohort()[0])
    first.train = reply(arrays=changed(w=Array(np.ones((2, 3), dtype)), b=Array(np.ones(3, dtype))))
    start = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32)), "b": Array(np.zeros(3, np.int64))})
    strategy = made()
    found = strategy.start(grid, start, num_rounds=2)
    assert all(first.client in each.answered for each in strategy.history if first.client in each.cohort.clients)
    assert {name: array.dtype for name, array in found.arrays.items()} == {"w": "float32", "b": "float64"}


def test_honest_clients_of_any_size_and_any_way_of_weighing_are_let_through() -> None:
    """Weights by samples, by samples times epochs, all alike: a large client is none that lies."""
    labels = [np.arange(CLASSES).repeat(4), *(np.arange(CLASSES) for _ in range(6)), np.arange(CLASSES).repeat(90)]
    for weigh in (len, lambda own: 20 * len(own), lambda own: 1):
        grid = federation()
        for node, own in zip(grid.nodes.values(), labels, strict=True):
            node.labels = own
            node.train = reply({**GOOD, "num-examples": weigh(own)})
        assert not run(made(cohort_size=8), grid).history[0].failed


def test_a_small_client_whose_noise_is_mostly_below_0_belies_nobody() -> None:
    grid = federation(2)
    small, large = grid.nodes.values()
    for node, counts in ((small, [30, 25, -20, -18, -16]), (large, [120, 110, 90, 95, 85])):
        node.query = says(node.client, counts, 0.1)
        node.train = reply({**GOOD, "num-examples": max(1, sum(counts))})  # as `LabelReport.weight` makes it
    assert not run(made(cohort_size=2), grid).history[0].failed


def test_the_smaller_of_two_weights_is_the_usual_one() -> None:
    grid = federation(2)
    liar = grid.nodes[983]
    liar.train = reply({**GOOD, "num-examples": 2**40})
    assert set(run(made(cohort_size=2), grid).history[0].failed) == {liar.client}
    assert not run(made(cohort_size=2, weight_cap=None), grid).history[0].failed


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_that_disagree_the_one_that_names_the_model_as_it_was_sent_is_used(odd: int) -> None:
    cohort = run(made(cohort_size=2), federation()).history[0].cohort.clients
    grid = federation()
    node = next(node for node in grid.nodes.values() if node.client == cohort[odd])
    node.train = reply(records=lambda content: RecordDict({"mine": content["arrays"], "metrics": content["metrics"]}))
    entry = run(made(cohort_size=2), grid).history[0]
    assert entry.cohort.clients == cohort
    assert entry.answered == (cohort[1 - odd],)
    assert "ArrayRecord 'mine', the others' is 'arrays'" in entry.failed[cohort[odd]]


def test_clients_that_fail_sit_out_longer_and_longer_and_one_that_answers_is_forgiven() -> None:
    grid = federation()
    bad = grid.nodes[1000]
    bad.train = broken
    strategy = run(made(cohort_size=7), grid, rounds=20)
    tried = [entry.round for entry in strategy.history if bad.client in entry.cohort.clients]
    # Seven of eight train: it is in every cohort it may be in. Pauses of 1, 2, 4 and 8 rounds.
    assert np.diff(tried).tolist() == sorted(np.diff(tried).tolist())
    assert np.diff(tried)[:3].tolist() == [2, 3, 5]
    bad.train = None
    later = run(strategy, grid, rounds=40)
    assert bad.client not in dict.fromkeys(client for client, *_ in later.federation.backoff.state_dict())


def test_one_that_answers_and_is_silent_in_turn_costs_the_timeout_seldom(tmp_path: Path) -> None:
    """An answer ended all: it was every third round, for as long as the run lasted."""
    grid = federation()
    work, asked = grid._work, [0]

    def in_turn(message: Message) -> Message | None:
        if message.metadata.message_type != "train" or message.metadata.dst_node_id != 1000:
            return work(message)
        asked[0] += 1
        return None if asked[0] % 2 else work(message)

    grid._work = in_turn  # type: ignore[method-assign]
    waited, silent = 0.0, []
    for rounds in (20, 60):  # stopped and continued
        strategy = made(cohort_size=7, checkpoint_dir=tmp_path)
        strategy.start(grid, model(), num_rounds=rounds, timeout=600)
        waited += strategy.clock.now()
        silent += [entry.round for entry in strategy.history if entry.failed]
    assert silent == [1, 4, 7, 11, 15, 21, 27, 37, 47]
    assert waited == pytest.approx(len(silent) * 600, rel=0.1)


def test_when_everybody_fails_nobody_sits_out_for_ever() -> None:
    grid = federation(4)
    for node in grid.nodes.values():
        node.train = broken
    strategy = run(made(cohort_size=2), grid, rounds=12)
    assert all(len(entry.cohort.clients) == 2 for entry in strategy.history)
    assert {client for entry in strategy.history for client in entry.cohort.clients} == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [1, 5])
def test_a_stand_in_is_asked_for_a_client_that_failed(number: int) -> None:
    grid = federation()
    client, node = victim_of(grid)
    node.train = broken
    strategy = run(made(replacements=number), grid)
    (entry,) = strategy.history
    assert len(entry.stood_in) == 1
    assert entry.stood_in[0] not in entry.cohort.clients
    assert set(entry.answered) == {*entry.cohort.clients, *entry.stood_in} - {client}
    assert [len(nodes) for nodes in grid.sent("train")] == [4, 1]
    # It is the client that makes the labels of those left most even.
    counts = strategy.selector.counts
    left = counts[[c for c in entry.cohort.clients if c != client]].sum(0)
    free = [c for c in range(8) if c not in entry.cohort.clients]
    assert entry.stood_in[0] == max(free, key=lambda c: entropy(left + counts[c]))


def test_a_stand_in_that_fails_too_is_booked() -> None:
    grid = federation()
    for node in grid.nodes.values():
        node.train = broken
    entry = run(made(replacements=2), grid).history[0]
    assert len(entry.failed) == 6
    assert entry.answered == ()


def test_excluded_clients_never_train_also_after_a_restart(tmp_path: Path) -> None:
    first = run(made(checkpoint_dir=tmp_path), federation(), rounds=2)
    assert 3 in first.selector.clients
    grid = federation()
    second = run(made(checkpoint_dir=tmp_path, exclude=[3, "5"]), grid, rounds=8)
    assert second.selector.clients == (0, 1, 2, 4, 6, 7)
    picked = {client for entry in second.history for client in entry.cohort.clients}
    assert not picked & {3, 5}
    assert len(second.history) == 6
    third = run(made(checkpoint_dir=tmp_path), grid, rounds=12)  # let in again: asked again
    assert set(third.selector.clients) == set(range(8))


def test_a_node_excluded_by_its_id_is_not_even_asked() -> None:
    grid = federation()
    strategy = run(made(exclude=["node-983"]), grid)
    assert grid.sent("query") == [sorted(set(grid.nodes) - {983})]
    assert 1 not in strategy.selector.clients


# --- a model that is not finite
class EntAdam(LabelAware, FedAdam):
    pass


class EntAvgM(LabelAware, FedAvgM):
    pass


@pytest.mark.parametrize(
    ("cls", "options"),
    [(FedEntOpt, {}), (EntAdam, {}), (EntAvgM, {"server_momentum": 0.9, "server_learning_rate": 10.0})],
)
def test_a_model_that_is_not_finite_replaces_nothing(
    cls: type[LabelAware], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are finite one by one, and no longer when the server has added, squared or pushed them on."""
    grid = federation()
    strategy = made(cls, checkpoint_dir=tmp_path, **options)
    for node in grid.nodes.values():
        node.train = reply(arrays=filled(1.0))
    good = strategy.start(grid, model(), num_rounds=2)
    before = checkpoints.load(tmp_path)
    # FedAdam's moments make the model double precision.
    huge = filled(1e200, np.float64) if cls is EntAdam else filled(3e38)
    for node in grid.nodes.values():
        node.train = reply(arrays=huge)
    if cls is FedEntOpt:  # a plain average of finite numbers is finite: the overflow is put in by hand
        plain = FedEntOpt.aggregate_train

        def overflow(self: Any, number: int, answers: Any) -> Any:
            arrays, metrics = plain(self, number, answers)
            return ArrayRecord({name: Array(arrays[name].numpy() * np.float32(1e38)) for name in arrays}), metrics

        monkeypatch.setattr(FedEntOpt, "aggregate_train", overflow)
    again = made(cls, checkpoint_dir=tmp_path, **options)
    result = again.start(grid, model(), num_rounds=3)
    assert [a.tobytes() for a in result.arrays.to_numpy_ndarrays()] == [
        a.tobytes() for a in good.arrays.to_numpy_ndarrays()
    ]
    assert again.history[0].problem == "the aggregated model is not finite"
    after = checkpoints.load(tmp_path)
    assert before is not None
    assert after is not None
    assert after.round == 3
    for group, arrays in before.arrays.items():  # moments and momentum too
        for name, array in arrays.items():
            assert after.arrays[group][name].tobytes() == array.tobytes()
    monkeypatch.undo()
    for node in grid.nodes.values():
        node.train = reply(arrays=filled(1.0))
    assert again.start(grid, model(), num_rounds=4).rounds[4]["problem"] is None


def test_a_start_model_that_is_not_finite_is_refused() -> None:
    grid = federation()
    with pytest.raises(InputError, match="initial_arrays"):
        made().start(grid, ArrayRecord({"w": Array(np.array([np.nan], dtype=np.float32))}))
    assert grid.asked == []


def test_an_aggregation_that_raises_leaves_the_model_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = FedEntOpt.aggregate_train

    def sometimes(self: Any, number: int, answers: Any) -> Any:
        calls.append(number)
        if number == 2:
            raise RuntimeError("no")
        return plain(self, number, answers)

    monkeypatch.setattr(FedEntOpt, "aggregate_train", sometimes)
    strategy = run(made(), federation(), rounds=3)
    assert calls == [1, 2, 3]
    assert [entry.problem is None for entry in strategy.history] == [True, False, True]
    assert strategy.history[1].problem == "aggregation failed: RuntimeError('no')"


class EntQ(LabelAware, QFedAvg):
    pass


@pytest.mark.parametrize("loss", [None, -1.0, [0.5]])
def test_a_loss_that_q_fedavg_cannot_weigh_by_is_its_senders_failure(loss: Any) -> None:
    grid = federation()
    client, node = victim_of(grid)
    node.train = reply({**GOOD, "train_loss": loss} if loss is not None else without("train_loss"))
    entry = run(made(EntQ, client_learning_rate=0.1), grid).history[0]
    assert set(entry.failed) == {client}
    assert "train_loss" in entry.failed[client]
    assert entry.problem is None


class EntTrees(LabelAware, FedXgbBagging):
    pass


@pytest.mark.parametrize(
    "bad", [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"learner": {"gradient_booster": {"model": 3}}}']
)
def test_boosted_trees_that_are_none_are_their_senders_failure(bad: bytes) -> None:
    parameters = {"num_trees": "1", "num_parallel_tree": "1"}
    forest = {"gbtree_model_param": parameters, "iteration_indptr": [0, 1], "trees": [{"id": 0}], "tree_info": [0]}
    good = json.dumps({"learner": {"gradient_booster": {"model": forest}}}).encode()

    def grown(data: bytes) -> Callable[[Message], Message]:
        return reply({"num-examples": 1}, lambda told: ArrayRecord([np.frombuffer(data, dtype=np.uint8)]))

    grid = federation()
    for node in grid.nodes.values():
        node.train = grown(good)
    client, node = victim_of(grid)
    node.train = grown(bad)
    strategy = made(EntTrees)
    result = strategy.start(grid, ArrayRecord([np.zeros(0, dtype=np.uint8)]), num_rounds=2)
    assert set(strategy.history[0].failed) == {client}
    trees = json.loads(result.arrays["0"].numpy().tobytes())["learner"]["gradient_booster"]["model"]["trees"]
    assert len(trees) == 3 + len(strategy.history[1].answered)


# --- evaluation
def test_an_evaluation_that_cannot_be_averaged_is_left_out() -> None:
    grid = federation()
    app = grid._app

    def sometimes(message: Message, context: Any) -> Message:
        if message.metadata.message_type == "evaluate" and context.node_id == 1000:
            metrics = MetricRecord({"num-examples": 1, "loss": float("nan")})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        if message.metadata.message_type == "evaluate" and context.node_id == 983:
            return Message(RecordDict({"config": ConfigRecord({"a": 1})}), reply_to=message)
        return app(message, context)

    grid._app = sometimes  # type: ignore[assignment]
    strategy = run(made(fraction_evaluate=1.0), grid, rounds=2)
    assert set(strategy.history[0].not_evaluated) == {0, 1}
    result = strategy.result  # type: ignore[attr-defined]
    assert result.evaluate_metrics_clientapp[2]["loss"] == pytest.approx(0.5)
    assert all(not entry.failed for entry in strategy.history)


# --- replies that Flower itself cannot read
def test_a_reply_that_the_grid_trips_over_is_its_senders_failure() -> None:
    grid = federation()
    client, node = victim_of(grid)
    poison: list[str] = []
    plain = grid.pull_messages

    def bad(message: Message) -> None:
        poison.append(message.metadata.message_id)

    def pull_messages(names: Any) -> Any:
        names = list(names)
        if set(names) & set(poison):
            raise ValueError("object cannot be inflated")
        return plain(names)

    node.train = bad
    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    strategy = run(made(), grid)
    assert "its reply cannot be read (object cannot be inflated)" in strategy.history[0].failed[client]
    assert len(strategy.history[0].answered) == 3


def test_a_superlink_that_is_gone_is_nobodys_failure() -> None:
    grid = federation()

    def gone(*_: Any) -> Any:
        raise ConnectionError("SuperLink is gone")

    def pull_messages(names: Any) -> Any:
        grid.get_node_ids = gone  # type: ignore[method-assign]
        raise ConnectionError("SuperLink is gone")

    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        run(made(), grid)
