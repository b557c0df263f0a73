"""FedEntOpt in Flower without a question for labels: a census of last layers before round 1, and nothing else."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from fedentopt.audit import travel_of
from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware, NoClientsError, strategy_from
from fedentopt.flower.checkpoint import load, save
from fedentopt.flower.head_census import TRIES
from fedentopt.selection import InferredSelector, RandomSelector
from fedentopt.selection.measures import entropy
from fedentopt.server.local_training import LocalTraining
from flower_fake_grid import CLASSES, FastClock, Node, broken, dead, silent
from flower_learners import LOCAL, learners, node_of, picked, skewed_labels, start_model

LABELS = skewed_labels(12)
COUNTS = np.stack([np.bincount(row, minlength=CLASSES) for row in LABELS])


def made(selector: InferredSelector | None = None, **options: Any) -> LabelAware:
    usual: dict[str, Any] = {"cohort_size": 4, "num_classes": CLASSES, "fraction_evaluate": 0.0, "local": LOCAL}
    usual |= {"min_available_nodes": 1, "selector": selector or InferredSelector(4, 4)}
    strategy = FedEntOpt(**{**usual, **options})
    strategy.clock = FastClock()
    return strategy


def errors(strategy: LabelAware, clients: dict[Any, int]) -> list[float]:
    """Total variation between estimates and truth, of clients by the row that is theirs."""
    shares = COUNTS / COUNTS.sum(axis=1, keepdims=True)
    return [
        float(np.abs(np.asarray(strategy.selector.estimate(client)) - shares[row]).sum() / 2)
        for client, row in clients.items()
    ]


@pytest.mark.parametrize("follows", [False, True])
def test_no_label_query_is_ever_sent_and_cohorts_are_even(follows: bool) -> None:
    grid, strategy = learners(LABELS, follows=follows), made()
    result = strategy.start(grid, start_model(), num_rounds=6)
    assert {kind for kind, _ in grid.asked} == {"train"}
    assert sorted(grid.sent("train")[0]) == sorted(grid.nodes)
    assert [len(nodes) for nodes in grid.sent("train")] == [12] + [4] * 6
    assert all(config["census"] == 1 and config["local-epochs"] == 1 for config in grid.configs[:12])
    assert not any("census" in config or "local-epochs" in config for config in grid.configs[12:])
    assert [config["server-round"] for config in grid.configs[12::4]] == [1, 2, 3, 4, 5, 6]
    assert np.mean(errors(strategy, {client: client for client in range(12)})) < 0.12
    even = np.mean([entropy(COUNTS[list(cohort)].sum(axis=0)) for cohort in picked(strategy)])
    assert even > 2.1  # of 2.32; four clients drawn at random have 1.94
    assert sorted(result.rounds) == [1, 2, 3, 4, 5, 6]


def test_nothing_of_the_census_is_averaged() -> None:
    grid = learners(LABELS)
    sent: list[Any] = []
    push = grid.push_messages

    def noting(messages: Any) -> Any:
        sent.append([message.content["arrays"]["fc.weight"].data for message in messages])
        return push(messages)

    grid.push_messages = noting  # type: ignore[method-assign]
    made().start(grid, start_model(), num_rounds=1)
    start = start_model()["fc.weight"].data
    assert len(sent) == 2  # the census and round 1 both start from the start model
    assert {data for batch in sent for data in batch} == {start}


def test_picks_depend_on_names_not_on_node_ids() -> None:
    cohorts = []
    for first, step in ((1000, 17), (2**40, -3)):
        strategy = made()
        strategy.start(learners(LABELS, first=first, step=step), start_model(), num_rounds=4)
        cohorts.append(picked(strategy))
    assert cohorts[0] == cohorts[1]
    nameless = made()
    nameless.start(learners(LABELS, named=False), start_model(), num_rounds=2)
    assert set(nameless.census.members) == {f"node-{1000 - 17 * k}" for k in range(12)}


def test_a_client_may_send_its_last_layer_alone() -> None:
    model = ArrayRecord({"conv": Array(np.zeros((3, 3), dtype=np.float32)), **start_model()})
    grid, strategy = learners(LABELS, follows=True), made()
    strategy.start(grid, model, num_rounds=2)
    assert grid.alone == 12  # type: ignore[attr-defined]
    assert len(strategy.history[-1].answered) == 4
    assert np.mean(errors(strategy, {client: client for client in range(12)})) < 0.12


# --- nodes that fail, come late, come back
def test_a_node_that_fails_is_asked_again_and_one_that_recovers_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    grid, strategy = learners(LABELS), made()
    flaky, dead, mute = (node_of(grid, client) for client in (2, 5, 8))
    asked = []

    def once(message: Message) -> Message | None:
        asked.append(message)
        grid.nodes[flaky].train = None
        return broken(message)

    grid.nodes[flaky].train, grid.nodes[dead].train, grid.nodes[mute].train = once, broken, silent
    with caplog.at_level(logging.INFO, "flwr"):
        strategy.start(grid, start_model(), num_rounds=1, timeout=50)
    sent = grid.sent("train")
    assert sorted(sent[1]) == sorted([flaky, dead])  # silent ones are not waited for twice
    assert [batch for batch in sent[2:] if batch == [dead]] == [[dead]] * (TRIES - 2)
    assert strategy.selector.estimate(2) is not None
    assert "census: 10 client(s) estimated, 2 failed" in caplog.text
    assert f"client node-{dead} did not train" in caplog.text
    assert f"client node-{mute} did not train: no answer within 50 s" in caplog.text
    assert {f"node-{dead}", f"node-{mute}"} <= set(strategy.census.members)
    assert not {f"node-{dead}", f"node-{mute}"} & set(picked(strategy)[0])  # they sit out round 1


class SlowGrid:
    """Has replies come after a while, by the clock, and looks how many nodes are asked and how many replies held."""

    def __init__(self, grid: Any, clock: FastClock, seconds: dict[int, float]) -> None:
        self.most_asked = self.most_held = 0
        held: weakref.WeakSet[Message] = weakref.WeakSet()
        due: dict[str, float] = {}
        push, pull, work = grid.push_messages, grid.pull_messages, grid._work

        def noting(message: Message) -> Message | None:
            reply = work(message)
            if reply is not None and "census" in message.content["config"]:
                held.add(reply)
            return reply

        def pushing(messages: list[Message]) -> list[str]:
            names = list(push(messages))
            due.update(
                {
                    name: clock.now() + seconds.get(message.metadata.dst_node_id, 20.0)
                    for name, message in zip(names, messages, strict=True)
                }
            )
            return names

        def pulling(names: list[str]) -> Any:
            self.most_asked = max(self.most_asked, len(names))
            self.most_held = max(self.most_held, len(held))
            return pull([name for name in names if due[name] <= clock.now()])

        grid.push_messages, grid.pull_messages, grid._work = pushing, pulling, noting


@pytest.mark.parametrize("mute", [range(0, 200, 20), range(100)])
def test_silent_nodes_cost_a_census_about_one_timeout_in_all(mute: range) -> None:
    """A wait of its own for every 64 nodes would be four of them, and where half of all say nothing no less."""
    grid, strategy = learners(skewed_labels(200), first=10_000), made()
    for client in mute:
        grid.nodes[node_of(grid, client)].train = silent
    slow = node_of(grid, 150)
    clock = strategy.clock = FastClock()
    seen = SlowGrid(grid, clock, {slow: 900.0})
    begun: list[float] = []
    grid.before_send = lambda kind: begun.append(clock.now())
    strategy.start(grid, start_model(), num_rounds=1, timeout=3600)
    assert begun[-1] < 1.3 * 3600  # round 1
    assert seen.most_asked <= 64
    assert seen.most_held <= 64
    known = {client for client in range(200) if strategy.selector.estimate(client) is not None}
    assert known >= set(range(200)) - set(mute) - {150}
    assert 150 in known or len(mute) == 100  # the slow one is awaited, unless there are too many to wait for


def test_a_census_in_which_nobody_trains_ends_the_run_with_the_reason() -> None:
    grid = learners(LABELS)
    for node in grid.nodes.values():
        node.train = broken
    with pytest.raises(NoClientsError, match=r"census: no node trained.*division by zero"):
        made().start(grid, start_model(), num_rounds=1)
    with pytest.raises(NoClientsError, match=r"census: 12 node.s. online, min_available_nodes asks for 13"):
        made(min_available_nodes=13, node_timeout=5).start(learners(LABELS), start_model(), num_rounds=1)


def test_a_late_joiner_is_estimated_when_it_first_trains() -> None:
    grid, strategy = learners(LABELS), made(InferredSelector(4, 0))
    late = node_of(grid, 3)
    grid.offline.add(late)

    def join(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            grid.offline.clear()
            grid.offline.update(node for node in list(grid.nodes)[:9] if node != late)  # so that it is picked

    strategy.start(grid, start_model(), num_rounds=3, evaluate_fn=join)
    assert late not in grid.sent("train")[0]
    assert any(f"node-{late}" in cohort for cohort in picked(strategy)[1:])
    assert errors(strategy, {f"node-{late}": 3})[0] < 0.3
    assert {kind for kind, _ in grid.asked} == {"train"}


def test_a_known_client_on_another_node_takes_its_old_place(caplog: pytest.LogCaptureFixture) -> None:
    grid, strategy = learners(LABELS), made(InferredSelector(4, 0))
    old = node_of(grid, 3)

    def restart(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            grid.nodes[77] = grid.nodes.pop(old)
            grid.offline.update(node for node in list(grid.nodes)[:8] if node != 77)

    with caplog.at_level(logging.INFO, "flwr"):
        strategy.start(grid, start_model(), num_rounds=4, evaluate_fn=restart)
    assert f"client 3 is back on node 77 (before: node {old})" in caplog.text
    assert strategy.census.node_of(3) == 77
    assert "node-77" not in strategy.census.members
    assert "node-77" not in strategy.selector.clients
    assert strategy.selector.estimate(3) is not None


def test_a_client_that_is_known_by_name_does_not_take_the_place_of_one_that_is_away() -> None:
    grid, strategy = learners(LABELS), made(InferredSelector(6, 0), cohort_size=6)
    thief, away = node_of(grid, 3), node_of(grid, 5)

    def rename(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            grid.nodes[thief].client = 5
            grid.offline.update(node for node in list(grid.nodes)[:7] if node != thief)

    strategy.start(grid, start_model(), num_rounds=4, evaluate_fn=rename)
    assert 3 in picked(strategy)[-1]
    assert [strategy.census.node_of(client) for client in (3, 5)] == [thief, away]


def test_a_client_whose_new_node_trains_in_the_round_in_which_its_old_one_dies_is_back_later() -> None:
    """Flower gives a dead node up after a minute; started again without a key, it has a new id before that."""
    grid = learners(skewed_labels(6))
    strategy = made(InferredSelector(7), cohort_size=7)
    old = node_of(grid, 2)

    def dies(message: Message) -> Message:
        grid.offline.add(old)
        return dead(message)

    def restart(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            grid.nodes[5000], grid.nodes[old].train = Node(2, grid.nodes[old].labels), dies

    records = strategy.start(grid, start_model(), num_rounds=3, evaluate_fn=restart).rounds
    assert list(records[2]["failed"]) == ["2"]
    assert "node-5000" in records[2]["answered"]
    assert strategy.census.node_of(2) == 5000
    assert "node-5000" not in strategy.selector.clients


@pytest.mark.parametrize("when", ["without a census", "late", "after a stop"])
def test_an_excluded_client_whose_name_its_first_reply_tells_is_turned_away(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = learners(LABELS)
    old = node_of(grid, 3)
    options: dict[str, Any] = {"exclude": [3], "checkpoint_dir": tmp_path}
    if when == "without a census":
        strategy, node = made(InferredSelector(4, seed=1, census_epochs=0), **options), old
    else:
        strategy, node = made(**options), 77
        twin = grid.nodes[old]
        if when == "late":
            del grid.nodes[old]
        strategy.start(grid, start_model(), num_rounds=1)
        grid.nodes.pop(old, None)  # restarted without a key: the same client on another node
        grid.nodes[node] = twin
        strategy = made(**options)
    result = strategy.start(grid, start_model(), num_rounds=8)
    asked = [number for number, nodes in enumerate(grid.sent("train")) if node in nodes]
    assert len(asked) == 1, "it trains once, since only then its name is known"
    told = {number: record["failed"][f"node-{node}"] for number, record in result.rounds.items() if record["failed"]}
    assert list(told.values()) == ["client 3 is excluded on this server"]
    assert {3, f"node-{node}"}.isdisjoint(strategy.census.members)
    assert {3, f"node-{node}"}.isdisjoint(strategy.selector.clients)
    assert f"node {node} is left out: client 3 is excluded on this server" in caplog.text


def test_a_client_that_is_excluded_after_a_stop_trains_no_more_on_the_node_it_is_known_on(tmp_path: Path) -> None:
    grid = learners(LABELS)
    made(checkpoint_dir=tmp_path).start(grid, start_model(), num_rounds=2)
    grid.asked.clear()
    again = made(checkpoint_dir=tmp_path, exclude=[3])
    again.start(grid, start_model(), num_rounds=8)
    assert not any(node_of(grid, 3) in nodes for nodes in grid.sent("train"))
    assert {3, f"node-{node_of(grid, 3)}"}.isdisjoint(again.census.members)


def test_two_nodes_under_one_name_are_known_by_their_ids(caplog: pytest.LogCaptureFixture) -> None:
    grid = learners(LABELS)
    twins = [node_of(grid, 2), node_of(grid, 3)]
    for node in twins:
        grid.nodes[node].client = 3
    strategy = made(exclude=[7])
    strategy.start(grid, start_model(), num_rounds=1)
    assert {f"node-{node}" for node in twins} <= set(strategy.census.members)
    assert 3 not in strategy.census.members
    assert 7 not in strategy.census.members
    assert caplog.text.count("a name that others have too") == 2


def test_a_node_does_not_get_in_under_the_id_of_another() -> None:
    for thief, victim in ((3, 5), (5, 3)):
        grid = learners(LABELS, named=False)
        inner, ids = grid._app, {client: node_of(grid, client) for client in (thief, victim)}

        def answer(message: Message, context: Any, inner: Any = inner, ids: Any = ids, own: int = thief) -> Message:
            reply = inner(message, context)
            if context.node_id == ids[own]:
                reply.content["client"] = ConfigRecord({"client-id": f"node-{ids[8 - own]}"})
            return reply

        grid._app = answer  # type: ignore[assignment]
        strategy = made()
        strategy.start(grid, start_model(), num_rounds=1)
        assert len(strategy.census.members) == len(LABELS)
        assert [strategy.census.node_of(f"node-{node}") for node in ids.values()] == list(ids.values())
        assert max(errors(strategy, {f"node-{node}": client for client, node in ids.items()})) < 0.2


def test_a_size_is_what_the_reply_says_within_the_cap(caplog: pytest.LogCaptureFixture) -> None:
    labels = [*LABELS[:11], np.tile(LABELS[11], 9)]
    strategy = made(size_cap=2.0)
    strategy.start(learners(labels), start_model(), num_rounds=1)
    sizes = strategy.selector.counts.sum(axis=1)
    assert sizes == pytest.approx([48.0] * 11 + [96.0])
    assert "client 11 claims 432 samples: taken for 96" in caplog.text


# --- no census
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_first_round_in_which_everybody_fails_is_a_round_without_news() -> None:
    grid = learners(LABELS)
    for node in grid.nodes.values():
        node.train = broken
    strategy = made(InferredSelector(4, census_epochs=0))
    result = strategy.start(grid, start_model(), num_rounds=1)
    assert result.rounds[1]["problem"] == "nothing to aggregate"
    assert len(result.rounds[1]["failed"]) == 4


def test_without_a_census_those_never_seen_train_first() -> None:
    grid, strategy = learners(LABELS), made(InferredSelector(4, 0, census_epochs=0))
    strategy.start(grid, start_model(), num_rounds=5)
    first = [client for cohort in picked(strategy)[:3] for client in cohort]
    assert len(set(first)) == 12
    assert all(len(nodes) == 4 for nodes in grid.sent("train"))
    assert {kind for kind, _ in grid.asked} == {"train"}
    assert not any("census" in config for config in grid.configs)


# --- stopped and continued
def test_a_stopped_run_goes_on_with_the_same_picks_and_without_another_census(tmp_path: Path) -> None:
    whole = made()
    want = whole.start(learners(LABELS), start_model(), num_rounds=6)
    cohorts, sent = [], []
    for rounds in (1, 3, 6):
        strategy, grid = made(checkpoint_dir=tmp_path), learners(LABELS)
        result = strategy.start(grid, start_model(), num_rounds=rounds)
        cohorts += picked(strategy)
        sent += [len(nodes) for nodes in grid.sent("train")]
    assert cohorts == picked(whole)
    assert sent == [12] + [4] * 6
    for name, array in want.arrays.items():
        assert array.data == result.arrays[name].data


def test_a_stop_after_the_census_does_not_lose_it(tmp_path: Path) -> None:
    strategy, grid = made(checkpoint_dir=tmp_path), learners(LABELS)

    def stop(kind: str) -> None:
        if len(grid.asked) == 2:
            raise KeyboardInterrupt

    grid.before_send = stop
    with pytest.raises(KeyboardInterrupt):
        strategy.start(grid, start_model(), num_rounds=3)
    found = load(tmp_path)
    assert found is not None
    assert found.round == 0
    again, grid = made(checkpoint_dir=tmp_path), learners(LABELS)
    again.start(grid, start_model(), num_rounds=3)
    assert [len(nodes) for nodes in grid.sent("train")] == [4, 4, 4]
    whole = made()
    whole.start(learners(LABELS), start_model(), num_rounds=3)
    assert picked(again) == picked(whole)


def test_estimates_lie_in_the_checkpoint_as_numbers_and_those_of_before_are_read(tmp_path: Path) -> None:
    whole = made()
    whole.start(learners(LABELS), start_model(), num_rounds=4)
    first = made(checkpoint_dir=tmp_path)
    first.start(learners(LABELS), start_model(), num_rounds=2)
    found = load(tmp_path)
    assert found is not None
    sums = found.arrays["selector"]["shares"]
    assert (sums.shape, sums.dtype) == ((12, CLASSES), np.float64)
    seen = found.meta["selection"]["federation"]["roster"]["selector"]["audit"]["seen"]
    assert [entry[2] for entry in seen] == [None] * 12
    for entry, row in zip(seen, sums, strict=True):  # as it was written before
        entry[2] = row.tolist()
    save(tmp_path, replace(found, arrays={**found.arrays, "selector": {}}))
    again = made(checkpoint_dir=tmp_path)
    again.start(learners(LABELS), start_model(), num_rounds=4)
    assert picked(again) == picked(whole)[2:]
    one, other = (strategy.selector for strategy in (again, whole))
    assert one.arrays()["shares"].tobytes() == other.arrays()["shares"].tobytes()


# --- what it must know
def test_a_census_that_clients_follow_is_counted_in_their_steps() -> None:
    seen: dict[Any, float] = {}

    class Noting(InferredSelector):
        def observe(self, observations: Any) -> None:
            seen.update({client: told.travel for client, told in observations.items()})
            super().observe(observations)

    for follows, config, want in (
        (False, None, 1.2),
        (True, None, 0.6),
        (False, ConfigRecord({"local-epochs": 2}), 0.6),
    ):
        strategy = made(Noting(4, 4))
        seen.clear()
        strategy.start(learners(LABELS, follows=follows), start_model(), num_rounds=1, train_config=config)
        first = next(client for client in seen if client not in picked(strategy)[0])
        assert seen[first] == pytest.approx(want)  # 48 samples in batches of 8 at 0.1, two epochs or one


def test_steps_that_nobody_can_count_are_refused() -> None:
    with pytest.raises(InputError, match="local: the sizes of clients' steps are not known"):
        made(local=None).start(learners(LABELS), start_model(), num_rounds=1)
    grid = learners(LABELS)
    inner = grid._app

    def uniform(message: Message, context: Any) -> Message:
        reply = inner(message, context)
        reply.content["metrics"] = MetricRecord({"num-examples": 1})
        return reply

    grid._app = uniform  # type: ignore[assignment]
    with pytest.raises(InputError, match="local: batch_size, but every reply says 1 sample"):
        made().start(grid, start_model(), num_rounds=1)
    strategy = made(local={"lr": 0.1, "steps": 12})
    strategy.start(grid, start_model(), num_rounds=1)
    assert np.mean(errors(strategy, {client: client for client in range(12)})) < 0.12


def test_a_cohort_that_says_one_sample_after_the_census_ends_nothing(tmp_path: Path) -> None:
    grid = learners(LABELS)
    inner = grid._app

    def later(message: Message, context: Any) -> Message:
        reply = inner(message, context)
        if "census" not in message.content["config"]:
            reply.content["metrics"] = MetricRecord({"num-examples": 1})
        return reply

    grid._app = later  # type: ignore[assignment]
    strategy = made(checkpoint_dir=tmp_path)
    strategy.start(grid, start_model(), num_rounds=2)
    assert len(picked(strategy)) == 2
    again = made(checkpoint_dir=tmp_path)  # a stop does not make it the first that is heard
    again.start(grid, start_model(), num_rounds=4)
    assert len(picked(again)) == 2


def test_from_the_run_config() -> None:
    told = {
        "selector": "inferred", "cohort-size": 4, "buffer-size": 4, "num-classes": CLASSES, "seed": 3,
        "census-epochs": 2, "census-samples": 40, "release": "random", "local-lr": 0.1, "local-batch-size": 8,
        "fraction-evaluate": 0.0, "min-available-nodes": 1,
    }  # fmt: skip
    strategy = strategy_from({f"fedentopt.{name}": value for name, value in told.items()})
    assert isinstance(strategy.selector, InferredSelector)
    selector = strategy.selector
    assert (selector.buffer_size, selector.seed, selector.release) == (4, 3, "random")
    assert (selector.census_epochs, selector.census_samples) == (2, 40)
    assert strategy.learning.heads.local == LocalTraining(lr=0.1, batch_size=8)
    strategy.clock = FastClock()
    grid = learners(LABELS)
    strategy.start(grid, start_model(), num_rounds=1)
    assert grid.configs[0]["samples"] == 40
    assert grid.configs[0]["local-epochs"] == 2


def test_evaluation_may_go_by_inferred_labels() -> None:
    grid, strategy = learners(LABELS), made(fraction_evaluate=0.4, evaluate_by="labels", min_evaluate_nodes=4)
    strategy.start(grid, start_model(), num_rounds=2)
    by_node = {number: int(node.client) for number, node in grid.nodes.items()}
    for nodes in grid.sent("evaluate"):
        assert entropy(COUNTS[[by_node[node] for node in nodes]].sum(axis=0)) > 1.9


# --- the very first that are heard
def without_travel(reply: Message) -> None:
    reply.content["metrics"] = MetricRecord({"num-examples": reply.content["metrics"]["num-examples"]})


def one_sample(reply: Message) -> None:
    reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "num-examples": 1})


@pytest.mark.parametrize(("spoil", "local"), [(without_travel, None), (one_sample, LOCAL)])
@pytest.mark.parametrize("audit", [False, True])
def test_two_hostile_clients_in_the_first_round_end_nothing(spoil: Any, local: Any, audit: bool) -> None:
    """They are all that was heard yet, and say nothing by which steps could be counted: so do others from then on."""
    grid = learners(LABELS, metrics={"train_travel": travel_of(0.1, 0.0, 12)})
    inner, hostile = grid._app, list[int]()

    def app(message: Message, context: Any) -> Message:
        reply = inner(message, context)
        if message.metadata.message_type == "train" and not reply.has_error():
            node = message.metadata.dst_node_id
            hostile.extend([node] if len(hostile) < 2 else [])
            if node in hostile:
                spoil(reply)
        return reply

    grid._app = app  # type: ignore[assignment]
    options: dict[str, Any] = {"cohort_size": 2, "local": local, "weight_cap": None}
    if audit:
        options |= {"selector": RandomSelector(2, seed=1), "audit": "warn"}
    strategy = made(**{"selector": InferredSelector(2, 0, census_epochs=0), **options})
    strategy.start(grid, start_model(), num_rounds=8)
    assert [len(entry.cohort.clients) for entry in strategy.history] == [2] * 8
    seen = strategy.watch._audit if strategy.watch is not None else strategy.selector
    heard = {client for entry in strategy.history for client in entry.answered}
    lost = {f"node-{number}" for number in hostile} | {grid.nodes[number].client for number in hostile}
    assert len(heard - lost) >= 6
    assert all(seen.times_seen(client) > 0 for client in heard - lost)


@pytest.mark.parametrize(
    ("spoil", "local", "told"),
    [
        (without_travel, None, "local: the sizes of clients' steps are not known"),
        (one_sample, LOCAL, "local: batch_size, but every reply says 1 sample"),
    ],
)
def test_an_app_that_serves_nobody_is_told_after_a_quarter_of_the_clients(spoil: Any, local: Any, told: str) -> None:
    grid = learners(LABELS)
    inner = grid._app

    def app(message: Message, context: Any) -> Message:
        reply = inner(message, context)
        if not reply.has_error():
            spoil(reply)
        return reply

    grid._app = app  # type: ignore[assignment]
    strategy = made(InferredSelector(2, 0, census_epochs=0), cohort_size=2, local=local, weight_cap=None)
    with pytest.raises(InputError, match=told):
        strategy.start(grid, start_model(), num_rounds=8)
    assert len(strategy.history) == 2  # four of twelve have been heard
