"""The strategy against a grid in memory: who is asked, who is picked, and what becomes of nodes that misbehave."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg, FedXgbCyclic

from doc_blocks import blocks
from fedentopt import EntropySelector, KLSelector, RandomSelector
from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware, NoClientsError, start
from fedentopt.selection.fedentropy import ValueSelector
from flower_fake_grid import CLASSES, FakeGrid, FastClock, Node, broken, dead, federation, model, says, silent, skewed


def strategy(cohort: int = 2, buffer: int = 3, **options: Any) -> FedEntOpt:
    made = FedEntOpt(
        cohort_size=cohort,
        buffer_size=buffer,
        num_classes=CLASSES,
        seed=5,
        **{"node_timeout": 0.05, "fraction_evaluate": 0.0, "min_available_nodes": 1, **options},
    )
    made.clock = FastClock()
    return made


def picked(made: LabelAware) -> list[tuple[int | str, ...]]:
    return [entry.cohort.clients for entry in made.history]


def node_of(grid: FakeGrid, client: int | str) -> int:
    return next(number for number, node in grid.nodes.items() if node.client == client)


def reference(clients: int, rounds: int, cohort: int = 2, buffer: int = 3) -> list[tuple[int | str, ...]]:
    """What the selection library picks when it is handed the counts."""
    selector = EntropySelector(cohort, buffer, seed=5)
    selector.register(np.stack([np.bincount(labels, minlength=CLASSES) for labels in skewed(clients)]))
    return [selector.select().clients for _ in range(rounds)]


@pytest.mark.parametrize(("shuffle", "first", "step"), [(0, 1000, 17), (1, 1000, 17), (2, 2**63, 3)])
def test_cohorts_are_those_of_the_library_whatever_the_node_ids_and_the_order_of_replies(
    shuffle: int, first: int, step: int
) -> None:
    made = strategy()
    made.start(federation(shuffle=shuffle, first=first, step=step), model(), num_rounds=6)
    assert picked(made) == reference(8, 6)


def test_every_node_is_asked_once_and_only_the_cohort_trains() -> None:
    grid, made = federation(), strategy()
    made.start(grid, model(), num_rounds=4)
    assert [sorted(nodes) for nodes in grid.sent("query")] == [sorted(grid.nodes)]
    assert grid.sent("train") == [[node_of(grid, client) for client in cohort] for cohort in picked(made)]
    assert [config["server-round"] for config in grid.configs] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_average_does_not_depend_on_who_was_fastest() -> None:
    results = [
        strategy(cohort=5, buffer=0).start(federation(shuffle=s), model(), num_rounds=4).arrays for s in range(5)
    ]
    first = results[0].to_numpy_ndarrays()
    assert any(array.any() for array in first)
    for other in results[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, other.to_numpy_ndarrays(), strict=True))


def test_a_late_joiner_is_asked_when_it_appears_and_stands_behind_those_known() -> None:
    grid, made = federation(), strategy()
    late = node_of(grid, 0)
    grid.offline.add(late)
    made.start(grid, model(), num_rounds=2)
    assert made.selector.clients == tuple(range(1, 8))
    grid.offline.clear()
    buffer = made.selector.buffer
    made.configure_train(3, model(), ConfigRecord(), grid)
    assert grid.sent("query")[1:] == [[late]]
    assert made.selector.clients == (*range(1, 8), 0)
    assert not set(picked(made)[2]) & set(buffer[-2:])  # the buffer outlived the newcomer


BAD: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "error reply": (broken, "division by zero"),
    "timeout": (silent, "no answer within 9 s"),
    "dead node": (dead, "Node Unavailable"),
    "wrong length": (says(3, [1, 2, 3]), "accepted: 5 numbers"),
    "NaN": (says(3, [1.0, float("nan"), 0.0, 0.0, 0.0], 0.5), "nan"),
    "infinite": (says(3, [1.0, float("inf"), 0.0, 0.0, 0.0], 0.5), "inf"),
    "negative true counts": (says(3, [5, -1, 0, 0, 0]), "-1"),
    "beyond floats": (says(3, [10**400, 1, 1, 1, 1]), "too large"),
    "no samples": (says(3, [0, 0, 0, 0, 0]), "all label counts are 0"),
    "no client id": (says("", [1, 1, 1, 1, 1]), "client-id"),
    "a client id of a megabyte": (says("x" * 10**6, [1, 1, 1, 1, 1]), "client-id"),
    "epsilon 0": (says(3, [1.0] * 5, 0.0), "epsilon"),
    "epsilon a truth value": (says(3, [1.0] * 5, True), "epsilon True is not a number"),
    "counts not a list": (says(3, 7), "must be a list"),  # type: ignore[arg-type]
    "another reply": (lambda message: Message(RecordDict(), reply_to=message), "no label report"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_node_without_usable_counts_is_left_out_with_a_reason_and_asked_again_after_growing_pauses(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    trouble, reason = BAD[kind]
    grid, made = federation(), strategy(query_timeout=9, query_pause=4)
    bad = node_of(grid, 3)
    grid.nodes[bad].query = trouble
    asked_at = []

    def between_rounds(number: int, arrays: Any) -> None:
        made.clock.sleep(10)  # training takes this long

    def note(kind: str) -> None:
        if kind.startswith("query"):
            asked_at.append(made.clock.now())

    grid.before_send = note
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid, model(), num_rounds=12, evaluate_fn=between_rounds)
    assert all(3 not in cohort for cohort in picked(made))
    assert grid.sent("query") == [sorted(grid.nodes), *([bad] for _ in asked_at[1:])]
    pauses = np.diff(asked_at)
    assert 3 <= len(pauses) <= 5
    assert (pauses[1:] >= pauses[:-1]).all()  # 4, 8, 16, 32 s, or the first round after
    assert pauses[-1] >= 32
    told = [record.getMessage() for record in caplog.records if f"node {bad} is left out" in record.getMessage()]
    assert max(map(len, told)) < 400
    assert len(told) >= len(asked_at) - 1
    assert all(reason in text for text in told)
    assert "(asked again in 4 s)" in told[0]
    assert "(asked again in 8 s)" in told[1]
    grid.nodes[bad].query = None  # its owner has repaired it
    made.clock.sleep(700)
    made.configure_train(13, model(), ConfigRecord(), grid)
    assert 3 in made.selector.clients
    assert bad not in made.census.refusals


def test_a_large_federation_without_counts_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """As where nobody has set label-epsilon: one cause, and as many lines as nodes at every new question."""
    grid = federation(120)
    good = node_of(grid, 7)
    for number, node in grid.nodes.items():
        node.config = {"label-epsilon": "none"} if number == good else {}
    made = strategy(query_pause=1)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid, model(), num_rounds=2, evaluate_fn=lambda *_: made.clock.sleep(10))
    told = [line for line in caplog.messages if "left out" in line]
    assert [len(nodes) for nodes in grid.sent("query")] == [120, 119]
    assert len(told) == 2 * 21
    assert [line for line in told if "more nodes" in line] == [
        "99 more nodes are left out (reasons at level DEBUG)"
    ] * 2
    assert len(made.census.refusals) == 119


def test_a_node_may_be_given_up_after_so_many_attempts(caplog: pytest.LogCaptureFixture) -> None:
    grid, made = federation(), strategy(query_attempts=2)
    bad = node_of(grid, 3)
    grid.nodes[bad].query = broken
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid, model(), num_rounds=6, evaluate_fn=lambda *_: made.clock.sleep(1000))
    assert grid.sent("query") == [sorted(grid.nodes), [bad]]
    assert any("not asked again" in text for text in caplog.messages)


def test_one_silent_node_does_not_hold_up_the_others_and_may_answer_later() -> None:
    grid, made = federation(), strategy(query_timeout=300, query_patience=20)
    slow = node_of(grid, 3)
    late: list[Message] = []
    grid.nodes[slow].query = lambda message: late.append(message)
    made.start(grid, model(), num_rounds=2)
    assert 20 <= made.clock.now() < 30  # once, after the last answer, and not 300 s, nor again in round 2
    assert len(picked(made)) == 2
    assert made.selector.clients == (0, 1, 2, 4, 5, 6, 7)
    grid._ready[late[0].metadata.message_id] = says(3, [1, 2, 3, 4, 5])(late[0])
    made.configure_train(3, model(), ConfigRecord(), grid)
    assert made.selector.clients == (0, 1, 2, 4, 5, 6, 7, 3)
    assert grid.sent("query") == [sorted(grid.nodes)]  # the first question was answered, no second was needed


def test_a_silent_node_is_waited_for_while_too_few_are_known() -> None:
    grid, made = federation(3), strategy(query_timeout=50, query_patience=20)
    for client in (1, 2):
        grid.nodes[node_of(grid, client)].query = silent
    made.start(grid, model(), num_rounds=1)
    assert 50 <= made.clock.now() < 60
    assert picked(made) == [(0,)]


def test_noisy_reports_may_be_negative_or_empty() -> None:
    grid, made = federation(), strategy()
    grid.nodes[node_of(grid, 3)].query = says(3, [-2.5, 4.0, -0.5, 0.0, 1.0], 0.5)
    grid.nodes[node_of(grid, 4)].query = says(4, [-2.5, -4.0, -0.5, -1.0, -1.0], 0.5)
    grid.nodes[node_of(grid, 5)].query = says(5, [-2.5, 4.0, -0.5, 0.0, 1.0], 1)  # a whole epsilon is a number too
    made.start(grid, model(), num_rounds=1)
    assert made.selector.clients == tuple(range(8))


def test_two_unknown_nodes_under_one_id_are_both_kept_out_until_one_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    grid, made = federation(), strategy()
    grid.nodes[7] = Node(3, skewed(8)[3])
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid, model(), num_rounds=4)
    assert all(3 not in cohort for cohort in picked(made))
    told = [text for text in caplog.messages if "client id 3 is also claimed" in text]
    assert len(told) == 2  # one per node, said once
    grid.offline.add(7)
    made.configure_train(5, model(), ConfigRecord(), grid)
    assert 3 in made.selector.clients
    assert made.census.node_of(3) == node_of(grid, 3)
    assert len(grid.sent("query")) == 1  # both had answered already


def test_a_contested_id_keeps_nobody_else_out() -> None:
    grid, made = federation(), strategy()
    grid.nodes[7] = Node(0, skewed(8)[0])  # contested, and the first in order
    made.start(grid, model(), num_rounds=1)
    assert made.selector.clients == tuple(range(1, 8))


def test_a_newcomer_under_the_id_of_a_live_client_is_held_back_and_takes_over_once_that_one_is_gone() -> None:
    grid, made = federation(), strategy()
    made.start(grid, model(), num_rounds=1)
    old = node_of(grid, 3)
    grid.nodes[7] = Node(3, skewed(8)[3])
    made.configure_train(2, model(), ConfigRecord(), grid)
    assert made.census.node_of(3) == old
    grid.offline.add(old)
    made.configure_train(3, model(), ConfigRecord(), grid)
    assert made.census.node_of(3) == 7
    assert made.selector.clients == tuple(range(8))
    assert grid.sent("query")[1:] == [[7]]


def test_two_nodes_that_take_turns_as_one_client_are_let_in_at_every_turn() -> None:
    grid, made = federation(), strategy(cohort=8, buffer=0)
    first = node_of(grid, 3)
    grid.nodes[7] = Node(3, skewed(8)[3])
    for turn in range(1, 12):
        here, away = (first, 7) if turn % 2 else (7, first)
        grid.offline = {away}
        made.configure_train(turn, model(), ConfigRecord(), grid)
        assert made.census.node_of(3) == here
        assert 3 in picked(made)[-1]


def test_a_newcomer_held_back_time_and_again_still_takes_over() -> None:
    grid, made = federation(), strategy(cohort=8, buffer=0)
    first = node_of(grid, 3)
    grid.nodes[7] = Node(3, skewed(8)[3])
    for turn in range(1, 9):
        grid.offline = {7} if turn % 2 else set()
        made.configure_train(turn, model(), ConfigRecord(), grid)
        assert made.census.node_of(3) == first
    grid.offline = {7}
    made.configure_train(9, model(), ConfigRecord(), grid)
    grid.offline = {first}
    made.configure_train(10, model(), ConfigRecord(), grid)
    assert made.census.node_of(3) == 7


def test_a_restarted_node_keeps_its_clients_place_in_the_buffer() -> None:
    grid, made = federation(), strategy()
    made.start(grid, model(), num_rounds=2)
    buffered = made.selector.buffer
    client = buffered[-1]
    old = node_of(grid, client)
    grid.nodes[7] = grid.nodes.pop(old)
    made.configure_train(3, model(), ConfigRecord(), grid)
    assert grid.sent("query")[1:] == [[7]]
    assert picked(made) == reference(8, 3)


def test_a_restarted_node_with_new_data_brings_its_new_counts() -> None:
    grid, made = federation(), strategy()
    made.start(grid, model(), num_rounds=1)
    grid.nodes.pop(node_of(grid, 6))
    grid.nodes[7] = Node(6, np.full(200, 4))
    made.configure_train(2, model(), ConfigRecord(), grid)
    assert made.census.members[6].report.counts.tolist() == [0, 0, 0, 0, 200]
    assert made.selector.counts[6].tolist() == [0, 0, 0, 0, 200]
    same = EntropySelector(2, 3, seed=5)
    counts = np.stack([np.bincount(labels, minlength=CLASSES) for labels in skewed(8)])
    same.register(counts)
    assert picked(made)[0] == same.select().clients
    same.update({6: [0, 0, 0, 0, 200]})
    assert picked(made)[1] == same.select().clients


def test_a_node_that_dies_in_a_round_is_named_and_the_round_completes_with_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid, made = federation(), strategy(cohort=4)
    victim = reference(8, 1, cohort=4)[0][1]
    number = node_of(grid, victim)
    grid.nodes[number].train = dead  # the SuperLink answers in its place
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = made.start(grid, model(), num_rounds=1)
    entry = made.history[0]
    assert set(entry.failed) == {victim}
    assert entry.answered == tuple(client for client in entry.cohort.clients if client != victim)
    assert any(f"client {victim} did not train: error 5" in text for text in caplog.messages)
    assert any(array.any() for array in result.arrays.to_numpy_ndarrays())
    # From then on it is offline: not picked, but still in the buffer.
    grid.offline.add(number)
    buffer = made.selector.buffer
    assert victim in buffer
    made.configure_train(2, model(), ConfigRecord(), grid)
    assert victim not in picked(made)[1]
    available = EntropySelector(4, 3, seed=5)
    available.register(np.stack([np.bincount(labels, minlength=CLASSES) for labels in skewed(8)]))
    available.select()
    assert picked(made)[1] == available.select(available=[c for c in range(8) if c != victim]).clients


def test_an_offline_node_keeps_its_place_in_the_buffer_and_returns_unasked() -> None:
    grid, made = federation(), strategy(buffer=6)
    made.start(grid, model(), num_rounds=1)
    away = made.selector.buffer[0]
    grid.offline.add(node_of(grid, away))
    made.configure_train(2, model(), ConfigRecord(), grid)
    assert made.selector.buffer[0] == away
    grid.offline.clear()
    made.configure_train(3, model(), ConfigRecord(), grid)
    assert away not in picked(made)[2]
    assert made.selector.buffer[0] == away
    assert len(grid.sent("query")) == 1


def test_a_node_that_times_out_in_training_is_matched_by_its_message() -> None:
    grid, made = federation(), strategy(cohort=3)
    victim = reference(8, 1, cohort=3)[0][0]
    grid.nodes[node_of(grid, victim)].train = silent
    made.start(grid, model(), num_rounds=1, timeout=12)
    assert made.history[0].failed == {victim: "no answer within 12 s"}


def test_when_all_of_a_cohort_fail_the_model_stays() -> None:
    grid, made = federation(), strategy()
    for node in grid.nodes.values():
        node.train = dead
    result = made.start(grid, model(), num_rounds=2)
    assert not any(array.any() for array in result.arrays.to_numpy_ndarrays())
    assert [len(entry.failed) for entry in made.history] == [2, 2]


def test_when_all_nodes_are_gone_the_run_ends_with_the_reason() -> None:
    grid, made = federation(), strategy(min_available_nodes=3)
    made.start(grid, model(), num_rounds=1)
    grid.offline.update(grid.nodes)
    with pytest.raises(NoClientsError, match=r"round 2: 0 node\(s\) online .* asks for 3"):
        made.configure_train(2, model(), ConfigRecord(), grid)


def test_when_no_node_tells_its_counts_the_run_ends_with_every_reason(caplog: pytest.LogCaptureFixture) -> None:
    grid, made = federation(2), strategy(node_timeout=8.0)
    for node in grid.nodes.values():
        node.query = broken
    with (
        caplog.at_level(logging.WARNING, logger="flwr"),
        pytest.raises(NoClientsError, match=r"node 983: error 2.*division by zero.*node 1000: error 2"),
    ):
        made.start(grid, model(), num_rounds=1)
    assert len(grid.sent("query")) == 2
    assert [text for text in caplog.messages if "waiting 8 s for one at most" in text] != []


def test_a_node_that_tells_its_counts_is_waited_for_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    grid, made = federation(2), strategy(query_attempts=1, node_timeout=30.0)
    for node in grid.nodes.values():
        node.query = broken
    look = grid.get_node_ids
    seen: list[int] = []

    def get_node_ids() -> Any:
        seen.append(1)
        if len(seen) == 5:
            grid.nodes[7] = Node(5, skewed(8)[5])
        return look()

    grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.configure_train(1, model(), ConfigRecord(), grid)
    assert picked(made) == [(5,)]
    assert len([text for text in caplog.messages if "waiting 30 s for one at most" in text]) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.configure_train(2, model(), ConfigRecord(), grid)
    assert not [text for text in caplog.messages if "for one at most" in text]


def test_waits_are_as_long_as_flowers_and_the_documentations() -> None:
    ours, flowers = inspect.signature(start).parameters, inspect.signature(FedAvg.start).parameters
    assert {name: ours[name].default for name in ("num_rounds", "timeout")} == {
        name: flowers[name].default for name in ("num_rounds", "timeout")
    }
    made = FedEntOpt(cohort_size=2, num_classes=CLASSES)
    assert (made.federation.node_timeout, made.census.timeout, made.census.attempts, made.federation.poll_interval) == (
        600,
        300,
        None,
        1,
    )


def test_evaluation_on_the_nodes_is_not_waited_for_without_end(caplog: pytest.LogCaptureFixture) -> None:
    grid, made = federation(), strategy(fraction_evaluate=1.0, min_evaluate_nodes=2)

    def all_die(kind: str) -> None:
        if kind == "train":
            grid.offline.update(grid.nodes)

    grid.before_send = all_die
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid, model(), num_rounds=1)
    assert any("no evaluation on the nodes" in text for text in caplog.messages)


def test_a_node_that_goes_while_evaluation_is_configured_is_not_waited_for() -> None:
    grid, made = federation(), strategy(fraction_evaluate=1.0, min_evaluate_nodes=8)
    made.configure_train(1, model(), ConfigRecord(), grid)
    look = grid.get_node_ids
    seen: list[int] = []

    def get_node_ids() -> Any:
        seen.append(1)
        assert len(seen) < 5, "waits for the node that has gone"
        online = look()
        grid.offline.add(1000)  # it goes after the first look
        return online

    grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    messages = list(made.configure_evaluate(1, model(), ConfigRecord(), grid))
    assert sorted(message.metadata.dst_node_id for message in messages) == sorted(grid.nodes)


def test_evaluation_on_the_nodes_runs_as_in_flower() -> None:
    grid, made = federation(), strategy(fraction_evaluate=0.5, min_evaluate_nodes=1)
    result = made.start(grid, model(), num_rounds=2)
    assert [len(nodes) for nodes in grid.sent("evaluate")] == [4, 4]
    assert result.evaluate_metrics_clientapp[2]["loss"] == pytest.approx(0.5)


def test_nodes_that_are_still_connecting_are_waited_for() -> None:
    grid, made = federation(), strategy(min_available_nodes=8, node_timeout=30.0)
    grid.offline.update(list(grid.nodes)[3:])
    seen: list[int] = []
    look = grid.get_node_ids

    def get_node_ids() -> Any:
        seen.append(1)
        if len(seen) > 3:
            grid.offline.clear()
        return look()

    grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    made.start(grid, model(), num_rounds=1)
    assert picked(made) == reference(8, 1)


def test_a_buffer_too_large_for_the_clients_known_so_far_is_cut_and_grows_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid, made = federation(), strategy(cohort=2, buffer=6)
    grid.offline.update(list(grid.nodes)[3:])
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid, model(), num_rounds=1)
    assert any("buffer of 1 instead of 6: 3 clients are known" in text for text in caplog.messages)
    grid.offline.clear()
    made.configure_train(2, model(), ConfigRecord(), grid)
    assert made.selector.buffer_size == 6


def test_texts_as_client_ids_are_ordered_too() -> None:
    labels = skewed(4)
    names = ["oslo", "bern", "riga", "12"]
    grid = FakeGrid({9 + k: Node(name, labels[k]) for k, name in enumerate(names)}, CLASSES)
    made = strategy()
    made.start(grid, model(), num_rounds=1)
    assert made.selector.clients == (12, "bern", "oslo", "riga")


def test_another_selector_may_be_given() -> None:
    grid = federation()
    made = FedEntOpt(cohort_size=3, num_classes=CLASSES, selector=RandomSelector(3, seed=2), fraction_evaluate=0.0)
    made.start(grid, model(), num_rounds=3)
    same = RandomSelector(3, seed=2)
    same.register(np.stack([np.bincount(labels, minlength=CLASSES) for labels in skewed(8)]))
    assert picked(made) == [same.select().clients for _ in range(3)]


def test_a_selector_that_uses_part_of_a_clients_data_is_refused() -> None:
    made = FedEntOpt(cohort_size=3, num_classes=CLASSES, selector=KLSelector(3), fraction_evaluate=0.0)
    with pytest.raises(InputError, match="KLSelector lets clients train on part of their data"):
        made.start(federation(), model(), num_rounds=1)


def test_a_strategy_that_trains_other_nodes_than_it_is_given_is_refused() -> None:
    class EntCyclic(LabelAware, FedXgbCyclic):
        pass

    made = EntCyclic(cohort_size=3, num_classes=CLASSES, fraction_evaluate=0.0)
    with pytest.raises(InputError, match="does not train every node it is given"):
        made.start(federation(), model(), num_rounds=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fraction_train": 0.5}, "fraction_train"),
        ({"min_train_nodes": 2}, "min_train_nodes"),
        ({"cohort": 0}, "cohort_size"),
        ({"buffer": -1}, "buffer_size"),
        ({"num_classes": 0}, "num_classes"),
        ({"query_timeout": 0}, "query_timeout"),
        ({"query_timeout": True}, "query_timeout"),
        ({"query_timeout": "5"}, "query_timeout"),
        ({"query_timeout": float("inf")}, "query_timeout"),
        ({"query_attempts": 0}, "query_attempts"),
        ({"node_timeout": float("nan")}, "node_timeout"),
        ({"selector": RandomSelector(2)}, "selector"),
        ({"selector": RandomSelector(2), "buffer": 0, "target": np.ones(CLASSES)}, "selector: give either"),
        ({"target": [1, 2, 3]}, f"target: 3 weights; accepted: {CLASSES}"),
        ({"selector": EntropySelector(2, target=[1, 2]), "buffer": 0}, "target: 2 weights"),
        ({"selector": ValueSelector(2), "buffer": 0}, "selector: ValueSelector needs kept, which this strategy"),
        ({"selector": "random", "buffer": 0}, "selector: 'random' is not accepted; accepted: a selector"),
        ({"exclude": "oslo"}, "exclude: 'oslo' is not accepted; accepted: a list of client ids"),
        ({"exclude": 7}, "exclude: 7 is not accepted"),
        ({"bind_names": "true"}, "bind_names: 'true' is not accepted; accepted: True, False"),
        ({"bind_names": ["oslo"]}, r"bind_names: \['oslo'\] is not accepted"),
        ({"bind_names": {"oslo": "5"}}, "bind_names: .* is not accepted"),
        ({"pretrained": "no"}, "pretrained: 'no' is not accepted; accepted: True or False"),
        ({"head": 3}, "head: 3 is not accepted; accepted: the name of the last layer"),
        ({"callbacks": "print"}, "callbacks: 'print' is not accepted; accepted: a list of functions"),
        ({"settings": "seed=3"}, "settings: 'seed=3' is not accepted"),
        ({"settings": {"data": {"until": object()}}}, "settings: data holds a object, by which a checkpoint"),
        ({"checkpoint_dir": ""}, "checkpoint_dir: '' is not accepted; accepted: a folder's path, or None"),
        ({"metrics_file": 3}, "metrics_file: 3 is not accepted"),
        ({"min_available_nodes": "all"}, "min_available_nodes: 'all' is out of range; accepted: whole numbers from 0"),
        ({"min_evaluate_nodes": "all"}, "min_evaluate_nodes: 'all' is out of range"),
        ({"fraction_evaluate": "0.5"}, "fraction_evaluate: '0.5' is out of range; accepted: a share of the clients"),
        ({"fraction_evaluate": float("nan")}, "fraction_evaluate: nan is out of range"),
        ({"fraction_evaluate": -1}, "fraction_evaluate: -1 is out of range"),
        ({"candidate_loss_keys": "loss"}, "candidate_loss_keys: 'loss' is not accepted; accepted: a list of metrics'"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    settings = {"cohort": 2, "buffer": 3, "num_classes": CLASSES, **options}
    with pytest.raises(InputError, match=told):
        FedEntOpt(cohort_size=settings.pop("cohort"), buffer_size=settings.pop("buffer"), **settings)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_rounds": -1}, "num_rounds: -1 is out of range; accepted: whole numbers from 0"),
        ({"num_rounds": 2.5}, "num_rounds: 2.5"),
        ({"num_rounds": "3"}, "num_rounds: '3'"),
        ({"timeout": None}, "timeout: None is not accepted; accepted: a number of seconds above 0"),
        ({"timeout": 0}, "timeout: 0"),
        ({"initial_arrays": {"w": np.zeros(3)}}, "initial_arrays: dict is not accepted; accepted: an ArrayRecord"),
        ({"train_config": {"lr": 0.1}}, "train_config: dict is not accepted; accepted: a ConfigRecord, or None"),
        ({"evaluate_config": {"lr": 0.1}}, "evaluate_config: dict is not accepted"),
        ({"timeout": float("nan")}, "timeout: nan"),
        (
            {"initial_arrays": ArrayRecord({"w": Array(np.zeros(3, dtype=np.complex64))})},
            "initial_arrays: 'w' holds values of type complex64; accepted: real numbers",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anybody_is_asked(options: dict[str, Any], told: str) -> None:
    grid = federation()
    with pytest.raises(InputError, match=told):
        strategy().start(grid, **{"initial_arrays": model(), **options})
    assert grid.asked == []


def test_a_round_in_which_nobody_can_evaluate_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """An app without an evaluation function, and Flower asks every node to evaluate unless it is told otherwise."""
    grid = federation()
    app = grid._app

    def trains_only(message: Message, context: Any) -> Message:
        return broken(message) if message.metadata.message_type == "evaluate" else app(message, context)

    grid._app = trains_only  # type: ignore[assignment]
    made = strategy(fraction_evaluate=1.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid, model(), num_rounds=2)
    told = [record.getMessage() for record in caplog.records if "evaluate" in record.getMessage()]
    assert [line.split(":")[0] for line in told] == ["round 1", "round 2"]
    assert "8 of 8 clients did not evaluate (0, 1, 2 and 5 more), the first: error 2" in told[0]
    assert told[0].endswith("with fraction_evaluate=0.0 nobody is asked to")
    assert set(made.history[0].not_evaluated) == set(range(8))


def test_a_record_does_not_hold_every_reason_where_nobody_of_many_can_evaluate() -> None:
    """The app of many has no evaluation and Flower asks for it: all fail, in every round, in every record after it."""
    grid = federation(30)
    app = grid._app

    def trains_only(message: Message, context: Any) -> Message:
        return broken(message) if message.metadata.message_type == "evaluate" else app(message, context)

    grid._app = trains_only  # type: ignore[assignment]
    result = strategy(fraction_evaluate=1.0).start(grid, model(), num_rounds=2)
    for record in result.rounds.values():
        assert list(record["not_evaluated"]) == [str(client) for client in range(20)]
        assert record["evaluations_failed"] == 30


def test_the_app_of_the_guide_runs_as_it_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    page = Path(__file__).parent.parent.parent / "docs" / "flower.md"
    server, client = [block.code for block in blocks(page) if block.is_python][:2]
    grid = federation(12)
    net = torch.nn.Linear(4, 10)
    told: dict[str, Any] = {
        "load_labels": lambda context: grid.nodes[int(context.node_config["data"])].labels,
        "arrays": ArrayRecord(net.state_dict()),
        "samples": 5,
    }
    exec(client, told)
    grid._app = told["app"]
    server = server.replace("/srv/fl/checkpoint", str(tmp_path)).replace("num_rounds=100", "num_rounds=2")
    server = server.replace("min_available_nodes=80", "min_available_nodes=12")
    run: dict[str, Any] = {"model": net}
    exec(server, run)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run["main"](grid, None)
    kinds = [kind for kind, _ in grid.asked]
    assert kinds == ["query.label_counts", "train", "train"]
    assert [line for line in caplog.messages if "did not" in line or "left out" in line] == []
    assert (tmp_path / "checkpoint.npz").is_file()
