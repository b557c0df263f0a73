"""Nodes that answer at random: 10,000 replies to questions for labels, training and evaluation, and no run stops.

What is sent is made from the same pieces as honest replies, so that many are wrong in one place only: a record too few
or too many, other names, values of any type and size, arrays of any shape, type and content.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    QFedAvg,
    Strategy,
)

from fedentopt.flower import FedEntOpt, LabelAware, start
from fedentopt.flower import checkpoint as checkpoints
from flower_fake_grid import CLASSES, FakeGrid, FastClock, Node, dead, model, skewed

COHORT = 40
START = model()
HONEST, FUZZED = 8, 40


class Fuzz:
    """Replies from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.sent = 0

    def __call__(self, message: Message) -> Message | None:
        self.sent += 1
        kind = self.random.random()
        if kind < 0.03:
            return None
        if kind < 0.06:
            return dead(message)
        if kind < 0.1:
            code, reason = self.random.choice([0, 2, 700, -1]), self.random.choice(["", "\x1b[2J", "a\nb" * 999, "no"])
            return Message(Error(code=code, reason=reason), reply_to=message)
        content = RecordDict()
        pieces = [self.metrics, self.arrays, self.config]
        for make in self.random.sample(pieces, self.random.randint(0, 3)) if kind < 0.2 else pieces:
            for _ in range(self.random.choice([1, 1, 1, 1, 1, 1, 2, 0])):
                name, record = make(message)
                content[name] = record
        return Message(content, reply_to=message)

    def name(self, *usual: str) -> str:
        return self.random.choice([*usual * 6, "", "x", "num-examples", "client", "\n"])

    def number(self) -> Any:
        return self.random.choice(
            [
                0,
                1,
                7,
                -1,
                2**53,
                2**63,
                10**400,
                0.0,
                0.5,
                -0.5,
                1e-320,
                1e308,
                float("nan"),
                float("inf"),
                -float("inf"),
            ]
        )

    def metrics(self, message: Message) -> tuple[str, MetricRecord]:
        if message.metadata.message_type.startswith("query"):
            counts = [self.random.choice([0, 1, 50]) for _ in range(self.random.choice([CLASSES] * 5 + [0, 1, 1000]))]
            if counts and self.random.random() < 0.5:
                value = self.number()
                counts = [type(value)(count) for count in counts]
                counts[self.random.randrange(len(counts))] = value
            told = {self.name("label-counts"): counts if self.random.random() < 0.9 else self.number()}
            return self.name("labels"), MetricRecord(told)
        record: dict[str, Any] = {"num-examples": 20, "norm_bit": 1.0, "train_loss": 0.5}
        if message.metadata.message_type == "evaluate":
            record = {"num-examples": 1, "loss": 0.5}
        for _ in range(self.random.choice([0, 1, 1, 2])):
            key = self.random.choice([*record, "extra"])
            wanted = self.random.random()
            if wanted < 0.2:
                record.pop(key, None)
            elif wanted < 0.4:
                value = self.number()
                record[key] = [value] * self.random.choice([0, 1, 3])
            else:
                record[key] = self.number()
        return self.name("metrics"), MetricRecord(record)

    def arrays(self, message: Message) -> tuple[str, ArrayRecord]:
        told = message.content.array_records.get("arrays", START)
        record = {name: told[name] for name in told}
        if self.random.random() < 0.6:
            name = self.random.choice([*record, "extra"])
            record[name] = self.array()
        if self.random.random() < 0.1:
            record.pop(self.random.choice(list(record)), None)
        return self.name("arrays"), ArrayRecord(record)

    def array(self) -> Array:
        shape = self.random.choice([(2, 3), (1,), (), (0,), (3, 2), (2, 3, 1)])
        dtype = self.random.choice([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64, "U3", "M8[s]"])
        values = self.random.choice([0, 1, 7]) + np.zeros(shape)
        with np.errstate(all="ignore"):
            array = Array(np.asarray(values.astype(dtype)))
        if np.dtype(dtype).kind == "f":
            fill = self.random.choice([0.0, 1.0, 3e38, -3e38, np.nan, np.inf, 1e-40])
            with np.errstate(all="ignore"):
                array = Array(np.full(shape, fill).astype(dtype))
        damage = self.random.random()
        if damage < 0.1:
            array.__dict__["data"] = self.rng.bytes(self.random.randint(0, 200))
        elif damage < 0.2:
            data = bytearray(array.data)
            data[self.random.randrange(len(data))] ^= self.random.randint(1, 255)
            array.__dict__["data"] = bytes(data)
        elif damage < 0.25:
            array.__dict__["stype"] = self.random.choice(["", "pickle", "torch.Tensor"])
        return array

    def config(self, message: Message) -> tuple[str, ConfigRecord]:
        told: dict[str, Any] = {
            "client-id": self.random.choice([0, 1, 3, 99, -5, 2**70, "", "a" * 500, "\x00", "oslo", True])
        }
        if self.random.random() < 0.4:
            told["epsilon"] = self.random.choice([1.0, 0.0, -1.0, True, "x", float("nan"), [1.0], b"1"])
        if self.random.random() < 0.3:
            told["release"] = self.random.choice([1, 2, -1, 2**70, "x", 0.5, True])
        return self.name("client"), ConfigRecord(told)


class EntAdam(LabelAware, FedAdam):
    pass


class EntAvgM(LabelAware, FedAvgM):
    pass


class EntMedian(LabelAware, FedMedian):
    pass


class EntTrimmed(LabelAware, FedTrimmedAvg):
    pass


class EntQ(LabelAware, QFedAvg):
    pass


class EntKrum(LabelAware, Krum):
    pass


class EntBulyan(LabelAware, Bulyan):
    pass


def build(name: str, **more: Any) -> Strategy:
    common: dict[str, Any] = {
        "cohort_size": COHORT, "buffer_size": 2, "num_classes": CLASSES, "seed": 3, "min_available_nodes": 1,
        "fraction_evaluate": 0.5, "min_evaluate_nodes": 1, "query_pause": 1.0, "query_timeout": 20.0, "replacements": 1,
        **more,
    }  # fmt: skip
    inner = {
        "FedAdam": EntAdam,
        "FedAvgM": lambda **o: EntAvgM(server_momentum=0.9, **o),
        "FedMedian": EntMedian,
        "FedTrimmedAvg": EntTrimmed,
        "QFedAvg": lambda **o: EntQ(client_learning_rate=0.1, **o),
        "Krum": EntKrum,
        "Bulyan": EntBulyan,
    }.get(name, FedEntOpt)(**common)
    inner.clock = FastClock()
    if name == "server-side DP":
        return DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 0.5, COHORT)
    if name == "client-side DP":
        return DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.0, COHORT, clipped_count_stddev=0.0)
    return inner


STRATEGIES = [
    "FedAvg", "FedAdam", "FedAvgM", "FedMedian", "FedTrimmedAvg", "QFedAvg", "Krum", "Bulyan", "server-side DP",
    "client-side DP",
]  # fmt: skip
ROUNDS = 28


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_reply_stops_a_run(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A thousand replies for each of ten strategies; the model stays finite, and a stopped run goes on."""
    caplog.set_level(logging.CRITICAL, logger="flwr")  # tens of thousands of lines
    fuzz = Fuzz(STRATEGIES.index(name))
    labels = skewed(HONEST + FUZZED)
    grid = FakeGrid({1000 - 7 * k: Node(k, labels[k]) for k in range(HONEST + FUZZED)}, CLASSES)
    for node in list(grid.nodes.values())[HONEST:]:
        node.train = fuzz  # evaluation too
        if node.client % 2:
            node.query = fuzz
    stop = ROUNDS // 2
    for rounds in (stop, ROUNDS):
        strategy = build(name, checkpoint_dir=tmp_path)
        done = start(strategy, grid, model(), num_rounds=rounds, timeout=30, evaluate_fn=pause(strategy))
    assert len(done.rounds) == ROUNDS
    assert fuzz.sent >= 1000
    assert all(np.isfinite(array).all() for array in done.arrays.to_numpy_ndarrays())
    kept = checkpoints.load(tmp_path)
    assert kept is not None
    assert all(np.isfinite(array).all() for group in kept.arrays.values() for array in group.values())
    honest = {str(client) for client in range(HONEST)} - {"0", "1", "3"}  # names that others claim too
    assert not any(client in honest for record in done.rounds.values() for client in record["failed"])
    assert sum(bool(record["failed"]) for record in done.rounds.values()) > ROUNDS / 10
    if "DP" not in name:  # there, one failure voids a round
        assert sum(record["problem"] is None for record in done.rounds.values()) > ROUNDS / 2
        assert np.abs(done.arrays["w"].numpy()).max() > 0


def pause(strategy: Strategy) -> Any:
    """Let time pass after each round, so that questions are asked again."""
    clock = getattr(strategy, "strategy", strategy).clock
    return lambda *_: clock.sleep(20)
