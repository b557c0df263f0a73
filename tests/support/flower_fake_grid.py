"""A Flower grid in memory: real ClientApps behind it, and nodes that can be told to misbehave."""

from __future__ import annotations

import random
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedentopt.flower import label_report
from fedentopt.flower.exchange import Clock

SUPERLINK = 1
CLASSES = 5
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK, 1  # Flower sets these in its processes
NODE_UNAVAILABLE = 5

# What a node does instead of its work: takes the message, returns a reply, or None for silence.
Trouble = Callable[[Message], Message | None]


def label_query(node_id: int) -> Message:
    """The server's question to one node."""
    return Message(RecordDict(), dst_node_id=node_id, message_type="query.label_counts")


def silent(message: Message) -> None:
    """No reply before the time is up."""


def broken(message: Message) -> Message:
    """The ClientApp raised."""
    return Message(Error(code=2, reason="<class 'ZeroDivisionError'>:<'division by zero'>"), reply_to=message)


def dead(message: Message) -> Message:
    """The node is gone: the SuperLink answers in its place, under its own id."""
    reply = Message(Error(code=NODE_UNAVAILABLE, reason="Node Unavailable"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK
    return reply


def says(client: Any, counts: list[Any], epsilon: Any = None) -> Trouble:
    """A report made by hand, sane or not."""

    def reply(message: Message) -> Message:
        about = ConfigRecord({"client-id": client} | ({} if epsilon is None else {"epsilon": epsilon}))
        labels = MetricRecord({"label-counts": counts})
        return Message(RecordDict({"labels": labels, "client": about}), reply_to=message)

    return reply


class FastClock(Clock):
    """Time that passes by being waited for."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "a wait that does not end"
        self.time += seconds


@dataclass
class Node:
    """A SuperNode with its own labels. `query` and `train` replace its answers where they are set."""

    client: int | str
    labels: np.ndarray
    query: Trouble | None = None
    train: Trouble | None = None
    config: dict[str, Any] = field(default_factory=lambda: {"label-epsilon": "none"})
    state: RecordDict = field(default_factory=RecordDict)


def client_app(num_classes: int, labels_of: Callable[[Context], np.ndarray]) -> ClientApp:
    """An app that reports labels and "trains": every weight moves by 1 plus the client's rank, times the round."""
    app = ClientApp()
    app.query("label_counts")(label_report(labels_of, num_classes))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        server_round = int(message.content.config_records["config"]["server-round"])
        step = (1 + int(context.node_config.get("rank", 0))) * server_round / 7
        arrays = {name: Array(array.numpy() + np.float32(step)) for name, array in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": len(labels_of(context)), "norm_bit": 1.0, "train_loss": 0.5})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 0.5})}), reply_to=message)

    return app


class FakeGrid(Grid):
    """Nodes by Flower node id. Replies come back shuffled; `asked` keeps what was sent, by type, round by round."""

    def __init__(self, nodes: dict[int, Node], num_classes: int, shuffle: int = 0) -> None:
        self.nodes = dict(nodes)
        self.offline: set[int] = set()
        self.asked: list[tuple[str, list[int]]] = []
        self.configs: list[dict[str, Any]] = []
        self.before_send: Callable[[str], None] = lambda kind: None
        self._random = random.Random(shuffle)
        self._folder = tempfile.mkdtemp(prefix="nodes")  # where noisy nodes keep their reports
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._sent = 0
        self._ready: dict[str, Message] = {}
        self._app = client_app(num_classes, lambda context: self.nodes[int(context.node_config["data"])].labels)

    def get_node_ids(self) -> Iterable[int]:
        ids = [node for node in self.nodes if node not in self.offline]
        self._random.shuffle(ids)
        return ids

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        assert isinstance(messages, list), "a deployment grid reads the messages twice"
        if not messages:
            return []
        kind = messages[0].metadata.message_type
        self.asked.append((kind, [message.metadata.dst_node_id for message in messages]))
        self.before_send(kind)
        names = []
        for message in messages:
            self._sent += 1
            names.append(f"m{self._sent}")
            message.metadata.__dict__["_message_id"] = names[-1]
            if "config" in message.content:
                self.configs.append(dict(message.content["config"]))
            reply = self._work(message)
            if reply is not None:
                self._ready[names[-1]] = reply
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [self._ready.pop(name) for name in list(message_ids) if name in self._ready]
        self._random.shuffle(replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _work(self, message: Message) -> Message | None:
        number = message.metadata.dst_node_id
        node = self.nodes[number]
        trouble = node.query if message.metadata.message_type.startswith("query") else node.train
        if trouble is not None:
            return trouble(message)
        named = {"client-id": node.client} if node.client != "" else {}
        rank = {"rank": node.client} if isinstance(node.client, int) else {}
        folder = self._folder
        own = {"data": number, "label-report-file": f"{folder}/{number}.json", "label-ledger": f"{folder}/ledger"}
        context = Context(1, number, {**named, **rank, **own, **node.config}, node.state, {})
        return self._app(message, context)

    def sent(self, kind: str) -> list[list[int]]:
        """The node ids of every batch of this type."""
        return [nodes for sent, nodes in self.asked if sent.startswith(kind)]

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros((2, 3), dtype=np.float32)), "b": Array(np.zeros(1, dtype=np.float32))})


def skewed(clients: int, seed: int = 1) -> list[np.ndarray]:
    """Labels of clients that hold about two classes each."""
    rng = np.random.default_rng(seed)
    return [rng.choice(rng.choice(CLASSES, 2, replace=False), 20 + client) for client in range(clients)]


def federation(clients: int = 8, *, shuffle: int = 0, first: int = 1000, step: int = 17) -> FakeGrid:
    """Clients 0, 1, ... on nodes whose ids run against them."""
    labels = skewed(clients)
    return FakeGrid(
        {first - step * client: Node(client, labels[client]) for client in range(clients)}, CLASSES, shuffle
    )
