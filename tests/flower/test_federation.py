"""Who is known: names that are claimed twice or bound, counts that change, clients that stay away."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message

from fedentopt.flower import FedEntOpt, LabelAware, census
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.flower.census import Member
from fedentopt.flower.register_files import MOST_PARTS, RegisterFiles
from fedentopt.flower.report import Report
from flower_fake_grid import CLASSES, FakeGrid, FastClock, Node, broken, federation, model, says, silent, skewed


def made(**options: Any) -> LabelAware:
    settings: dict[str, Any] = {
        "cohort_size": 2, "buffer_size": 0, "num_classes": CLASSES, "seed": 5, "fraction_evaluate": 0.0,
        "min_available_nodes": 1, "node_timeout": 5.0, **options,
    }  # fmt: skip
    strategy = FedEntOpt(**settings)
    strategy.clock = FastClock()
    return strategy


def node_of(grid: FakeGrid, client: Any) -> int:
    return next(number for number, node in grid.nodes.items() if node.client == client)


def test_thousands_of_nodes_under_one_name_cost_thousands_of_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """Each refusal used to name all the others: 4,000 of them made 332 MB of text."""
    grid = federation()
    same = says(77, [1, 2, 3, 4, 5])
    for number in range(4000):
        grid.nodes[50_000 + number] = Node(77, skewed(1)[0], query=same)
    strategy = made()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy.start(grid, model(), num_rounds=2)
    assert 77 not in strategy.selector.clients
    told = [line for line in caplog.messages if "77" in line]
    assert 1 <= len(told) <= 5
    assert sum(map(len, caplog.messages)) < 5000
    assert sum(map(len, strategy.census.refusals.values())) < 4000 * 200
    assert "and 3996 more" in strategy.census.refusals[50_000]


def test_a_node_that_starts_again_and_again_is_not_remembered_under_every_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key it has a new id each time, and a reason why it was left out was kept for each for ever."""
    monkeypatch.setattr(census, "_REMEMBERED", 5)
    grid, strategy = federation(), made()
    grid.nodes[49_000] = Node(8, skewed(1)[0], query=broken)  # this one stays

    def restart(number: int, arrays: Any) -> None:
        grid.nodes.pop(50_000 + number - 1, None)
        grid.nodes[50_000 + number] = Node(77, skewed(1)[0], query=broken)

    strategy.start(grid, model(), num_rounds=20, evaluate_fn=restart)
    asked = {node for nodes in grid.sent("query") for node in nodes}
    assert {50_000 + number for number in range(20)} <= asked
    for kept in (strategy.census.refusals, strategy.census._tries, strategy.census._again):
        assert 49_000 in kept
        assert len(kept) <= 5 + 2


def test_names_may_be_bound_to_the_nodes_that_first_came_under_them(tmp_path: Path) -> None:
    grid = federation()
    strategy = made(bind_names=True, checkpoint_dir=tmp_path)
    strategy.start(grid, model(), num_rounds=1)
    old = node_of(grid, 3)
    grid.offline.add(old)
    grid.nodes[7] = Node(3, skewed(8)[3])  # another registered node, while the first is away
    again = made(bind_names=True, checkpoint_dir=tmp_path)
    again.start(grid, model(), num_rounds=3)
    assert again.census.node_of(3) == old
    assert f"client id 3 is bound to node {old}" in again.census.refusals[7]
    assert all(3 not in entry.cohort.clients for entry in again.history)
    grid.offline = {7}
    back = made(bind_names=True, checkpoint_dir=tmp_path, cohort_size=2)
    back.start(grid, model(), num_rounds=12)
    assert any(3 in entry.cohort.clients for entry in back.history)


def test_names_may_be_bound_by_the_operator() -> None:
    grid = federation()
    strategy = made(bind_names={"3": 12345, 4: node_of(grid, 4)})
    strategy.start(grid, model(), num_rounds=1)
    assert strategy.selector.clients == (0, 1, 2, 4, 5, 6, 7)
    assert "bound to node 12345" in strategy.census.refusals[node_of(grid, 3)]


def test_counts_are_asked_for_again_on_a_schedule() -> None:
    grid = federation()
    strategy = made(refresh_every=3, cohort_size=8)

    def drift(number: int, arrays: Any) -> None:
        if number == 2:
            grid.nodes[node_of(grid, 6)].labels = np.full(40, 4)

    strategy.start(grid, model(), num_rounds=7, evaluate_fn=drift)
    everybody = sorted(grid.nodes)
    assert grid.sent("query") == [everybody] * 3  # before rounds 1, 4 and 7
    assert strategy.selector.counts[6].tolist() == [0, 0, 0, 0, 40]
    assert strategy.census.members[6].report.counts.tolist() == [0, 0, 0, 0, 40]
    assert strategy.history[2].cohort.label_counts.tolist() != strategy.history[3].cohort.label_counts.tolist()


def test_a_node_that_fails_when_it_is_asked_again_keeps_its_old_counts(caplog: pytest.LogCaptureFixture) -> None:
    grid = federation()
    strategy = made(refresh_every=1, query_timeout=50)

    def break_them(number: int, arrays: Any) -> None:
        if number == 0:
            return
        grid.nodes[node_of(grid, 6)].query = broken
        grid.nodes[node_of(grid, 2)].query = silent

    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy.start(grid, model(), num_rounds=3, evaluate_fn=break_them)
    assert strategy.selector.clients == tuple(range(8))
    assert strategy.clock.now() < 5  # those known are not waited for
    assert any("keeps its old label counts: error 2" in line for line in caplog.messages)


def test_an_owner_announces_new_counts_with_a_training_reply() -> None:
    grid = federation()
    app = grid._app
    client = 6
    number = node_of(grid, client)

    def announcing(message: Message, context: Any) -> Message:
        reply = app(message, context)
        if context.node_id == number and message.metadata.message_type == "train":
            reply.content["client"] = ConfigRecord({"release": release[0]})
        return reply

    grid._app = announcing  # type: ignore[assignment]
    release = [1]
    strategy = made(cohort_size=8)

    def announce(server_round: int, arrays: Any) -> None:
        if server_round == 3:
            release[0] = 2
            grid.nodes[number].labels = np.full(40, 4)

    strategy.start(grid, model(), num_rounds=8, evaluate_fn=announce)
    assert grid.sent("query") == [sorted(grid.nodes), [number]]
    assert strategy.selector.counts[client].tolist() == [0, 0, 0, 0, 40]


def test_an_announced_release_whose_answer_is_lost_is_asked_for_again() -> None:
    grid = federation()
    app = grid._app
    number = node_of(grid, 6)
    answers: list[int] = []

    def announcing(message: Message, context: Any) -> Message:
        if context.node_id == number and message.metadata.message_type != "train":
            answers.append(1)
            if len(answers) == 2:
                return Message(Error(code=2, reason="lost"), reply_to=message)
        reply = app(message, context)
        if context.node_id == number and message.metadata.message_type == "train":
            reply.content["client"] = ConfigRecord({"release": 2})
        return reply

    grid._app = announcing  # type: ignore[assignment]
    made(cohort_size=8).start(grid, model(), num_rounds=8)
    assert len(answers) == 3  # known at first, lost, told


def test_a_node_does_not_leave_the_buffer_under_new_names(caplog: pytest.LogCaptureFixture) -> None:
    """It would train in every round, leave a name behind each time, and end the run when that one is forgotten."""
    grid = federation()
    app = grid._app
    number = node_of(grid, 6)
    names = iter(range(100, 200))
    asked: list[int] = []

    def renaming(message: Message, context: Any) -> Message:
        reply = app(message, context)
        if context.node_id == number and message.metadata.message_type == "train":
            reply.content["client"] = ConfigRecord({"release": next(names)})
        elif context.node_id == number:
            if asked:
                reply.content["client"]["client-id"] = f"n{next(names)}"
            reply.content["labels"]["label-counts"] = [20] * CLASSES
            asked.append(1)
        return reply

    grid._app = renaming  # type: ignore[assignment]
    strategy = made(cohort_size=3, buffer_size=5, forget_after=2)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy.start(grid, model(), num_rounds=12)
    assert len(asked) > 2
    assert list(strategy.census.members) == list(range(8))
    picked = [6 in entry.cohort.clients for entry in strategy.history]
    assert any(picked)
    assert not any(a and b for a, b in itertools.pairwise(picked))
    assert any("it is known as 6 and now calls itself 'n101'" in line for line in caplog.messages)


def test_clients_that_stay_away_are_forgotten_and_asked_anew(tmp_path: Path) -> None:
    grid = federation()
    away = node_of(grid, 3)
    strategy = made(forget_after=3, buffer_size=4, checkpoint_dir=tmp_path)

    def leave(number: int, arrays: Any) -> None:
        if number == 2:
            grid.offline.add(away)

    strategy.start(grid, model(), num_rounds=4, evaluate_fn=leave)
    assert 3 in strategy.selector.clients
    again = made(forget_after=3, buffer_size=4, checkpoint_dir=tmp_path)  # how long it has been away outlives a stop
    again.start(grid, model(), num_rounds=6)
    assert again.selector.clients == (0, 1, 2, 4, 5, 6, 7)
    assert 3 not in again.census.members
    third = made(forget_after=3, buffer_size=4, checkpoint_dir=tmp_path)
    assert third.start(grid, model(), num_rounds=6)
    assert third.selector.clients == again.selector.clients
    grid.offline.clear()
    third.start(grid, model(), num_rounds=7)
    assert third.selector.clients == (0, 1, 2, 4, 5, 6, 7, 3)
    assert grid.sent("query")[-1] == [away]


# --- the register on disk
def member(client: Any, value: float, node: int = 1, epsilon: float | None = None) -> Member:
    return Member(node, Report(client, np.array([value, 1.0]), epsilon))


def same(a: dict[Any, Member], b: dict[Any, Member]) -> bool:
    return list(a) == list(b) and all(
        (a[c].node_id, a[c].report.epsilon, a[c].release, a[c].report.counts.tobytes())
        == (b[c].node_id, b[c].report.epsilon, b[c].release, b[c].report.counts.tobytes())
        for c in a
    )


def test_the_register_is_read_back_as_it_was_whatever_was_written_in_between(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = RegisterFiles(tmp_path)
    members: dict[Any, Member] = {}
    for step in range(120):
        changed: dict[Any, bool] = {}
        for _ in range(int(rng.integers(0, 4))):
            client = int(rng.integers(0, 30)) if rng.random() < 0.7 else f"c{rng.integers(0, 9)}"
            if client in members and rng.random() < 0.3:
                del members[client]
                changed[client] = True
            else:
                noisy = rng.random() < 0.5
                value = float(rng.normal()) if noisy else float(rng.integers(1, 9))
                members[client] = member(client, value, step, 0.5 if noisy else None)
                changed.setdefault(client, False)
        parts = files.save(members, changed)
        files.committed()
        read = RegisterFiles(tmp_path)
        assert same(read.load(parts, 2), members), step
        assert len(parts) <= MOST_PARTS
        if step % 10 == 9:
            files = read  # a process that goes on
    assert len(list(tmp_path.glob("clients-*.npz"))) <= 2 * MOST_PARTS


def test_a_client_that_left_and_came_back_between_two_checkpoints_stands_last(tmp_path: Path) -> None:
    files = RegisterFiles(tmp_path)
    members = {c: member(c, 1.0) for c in (1, 2, 3)}
    files.save(members, dict.fromkeys(members, False))
    del members[1]
    members[1] = member(1, 4.0)
    parts = files.save(members, {1: True})
    assert list(members) == [2, 3, 1]
    assert list(RegisterFiles(tmp_path).load(parts, 2)) == list(members)


def test_a_round_without_changes_writes_no_clients(tmp_path: Path) -> None:
    strategy = made(checkpoint_dir=tmp_path)
    sizes = []

    def note(number: int, arrays: Any) -> None:
        sizes.append(sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.glob("clients-*")))

    strategy.start(federation(), model(), num_rounds=5, evaluate_fn=note)
    assert len(sizes[2]) == 1
    assert sizes[2] == sizes[-1]


def test_the_last_two_checkpoints_are_kept_and_the_older_serves_where_the_newest_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = made(checkpoint_dir=tmp_path)
    want = strategy.start(federation(), model(), num_rounds=5)
    made(checkpoint_dir=tmp_path / "b").start(federation(), model(), num_rounds=3)
    newest = tmp_path / "b" / checkpoints.FILE
    newest.write_bytes(newest.read_bytes()[:-100])
    again = made(checkpoint_dir=tmp_path / "b")
    with caplog.at_level(logging.ERROR, logger="flwr"):
        got = again.start(federation(), model(), num_rounds=5)
    assert [entry.round for entry in again.history] == [3, 4, 5]  # round 2 is done, in checkpoint-previous.npz
    assert any("going on from checkpoint-previous.npz, round 2" in line for line in caplog.messages)
    assert got.arrays["w"].numpy().tobytes() == want.arrays["w"].numpy().tobytes()


def test_a_new_client_in_a_large_register_leaves_the_parts_that_are_there(tmp_path: Path) -> None:
    files = RegisterFiles(tmp_path)
    members = {c: member(c, 1.0) for c in range(500)}
    first = files.save(members, dict.fromkeys(members, False))
    members["late"] = member("late", 2.0)
    second = files.save(members, {"late": False})
    assert second[:1] == first
    assert (tmp_path / second[1]).stat().st_size < (tmp_path / first[0]).stat().st_size / 3
