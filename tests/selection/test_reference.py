"""The selector against Algorithm 1 written down naively, with every scoring path forced in turn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt import CohortWarning, EntropySelector
from fedentopt.selection import columns, scorer, screen


def entropy_bits(counts: list[float]) -> float:
    total = sum(counts)
    shares = [x / total for x in counts if x / total > 0] if total else []
    return -sum(p * math.log2(p) for p in shares)


def divergence_bits(counts: list[float], target: list[float]) -> float:
    total = sum(counts)
    shares = [(x / total, q / sum(target)) for x, q in zip(counts, target, strict=True) if x] if total else []
    return sum(p * (math.log2(p) - (math.log2(q) if q else -1000.0)) for p, q in shares)


class Reference:
    """Algorithm 1 over plain lists; the random first client is taken from the cohort under test."""

    def __init__(self, counts, size: int, buffer_size: int, target=None) -> None:
        self.counts = [[max(float(x), 0.0) for x in row] for row in counts]
        self.size, self.buffer_size, self.target = size, buffer_size, target
        self.buffer: list[int] = []

    def score(self, labels: list[float]) -> float:
        return entropy_bits(labels) if self.target is None else -divergence_bits(labels, self.target)

    def select(self, available: list[int], first: int) -> tuple[list[int], list[int]]:
        gathered = [0.0] * len(self.counts[0])
        picked: list[int] = []
        released: list[int] = []
        while len(picked) < min(self.size, len(available)):
            open_ = [k for k in sorted(available) if k not in picked and k not in self.buffer]
            if not open_:
                oldest = next(k for k in self.buffer if k in available and k not in picked)
                self.buffer.remove(oldest)
                released.append(oldest)
                open_ = [oldest]
            if not picked:
                assert first in open_
                choice = first
            else:
                scores = {k: self.score([a + b for a, b in zip(gathered, self.counts[k], strict=True)]) for k in open_}
                choice = min(k for k in open_ if scores[k] >= max(scores.values()) - 1e-9)
            self.buffer.append(choice)
            while len(self.buffer) > self.buffer_size:
                self.buffer.pop(0)
            gathered = [a + b for a, b in zip(gathered, self.counts[choice], strict=True)]
            picked.append(choice)
        return picked, released


@contextmanager
def path(name: str, chunk: int = 3) -> Iterator[None]:
    """Force one way of scoring: `exact`, `columns` or `screen` (always narrowed down), both in small chunks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CohortWarning)
        if name == "exact":
            yield
            return
        with mock.patch.object(scorer, "FEW_CELLS", 0), mock.patch.object(columns, "_CHUNK", chunk):
            if name == "columns":
                yield
                return
            with (
                mock.patch.object(columns, "_MANY", 0),
                mock.patch.object(screen, "_CHUNK", chunk),
                mock.patch.object(screen, "_FEW", 1),
            ):
                yield


PATHS = ("exact", "columns", "screen")

whole_counts = st.integers(0, 6)
noisy_counts = st.one_of(
    st.just(0.0),
    st.floats(-3, 8, allow_subnormal=False),
    st.floats(0, 1e-6, allow_subnormal=False),
    st.integers(0, 5).map(float),
)


@st.composite
def problems(draw, cells, at_least_one: bool):
    clients = draw(st.integers(1, 9))
    classes = draw(st.integers(1, 5))
    row = st.lists(cells, min_size=classes, max_size=classes)
    if at_least_one:
        row = row.filter(any)
    rows = draw(st.lists(row, min_size=clients, max_size=clients))
    if clients > 2 and draw(st.booleans()):  # ties: several clients with the same counts
        rows[1] = rows[-1] = rows[0]
    size = draw(st.integers(1, clients))
    return rows, size, draw(st.integers(0, clients - size)), draw(st.integers(0, 3))


def check(rows, size, buffer_size, seed, noisy, availability, target=None) -> None:
    for name in PATHS:
        with path(name):
            selector = EntropySelector(size, buffer_size=buffer_size, seed=seed, target=target)
            selector.register(np.array(rows), noisy=noisy)
            reference = Reference(rows, size, buffer_size, target)
            for available in availability:
                everyone = list(range(len(rows)))
                cohort = selector.select(available)
                picked, released = reference.select(everyone if available is None else available, cohort.clients[0])
                assert list(cohort.clients) == picked, name
                assert list(cohort.released) == released, name
                assert list(selector.buffer) == reference.buffer, name
                labels = np.sum([reference.counts[k] for k in picked], axis=0)
                np.testing.assert_allclose(cohort.label_counts, labels, rtol=1e-12)
                assert cohort.entropy == pytest.approx(entropy_bits(labels.tolist()), abs=1e-12)
                assert cohort.classes_covered == np.count_nonzero(labels)


@settings(deadline=None, max_examples=150)
@given(problems(whole_counts, at_least_one=True))
def test_whole_counts(problem) -> None:
    check(*problem, noisy=False, availability=[None] * 4)


@settings(deadline=None, max_examples=150)
@given(problems(noisy_counts, at_least_one=False))
def test_noisy_counts(problem) -> None:
    check(*problem, noisy=True, availability=[None] * 3)


@settings(deadline=None, max_examples=150)
@given(problems(whole_counts, at_least_one=True), st.data())
def test_clients_that_come_and_go(problem, data) -> None:
    everyone = list(range(len(problem[0])))
    subsets = st.lists(st.sampled_from(everyone), min_size=1, unique=True)
    check(*problem, noisy=False, availability=data.draw(st.lists(subsets, min_size=1, max_size=5)))


@settings(deadline=None, max_examples=150)
@given(problems(whole_counts, at_least_one=True), st.data())
def test_target(problem, data) -> None:
    weights = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=5, max_size=5).filter(lambda w: any(w))
    classes = len(problem[0][0])
    target = data.draw(weights.map(lambda w: w[:classes]).filter(any))
    check(*problem, noisy=False, availability=[None] * 3, target=target)


@pytest.mark.parametrize("name", ["columns", "screen"])
@pytest.mark.parametrize(
    "kind", ["skewed", "two classes", "many ties", "noisy", "large", "tiny and huge", "sparse", "target"]
)
def test_paths_agree_on_larger_tables(kind: str, name: str) -> None:
    """Long cohorts over hundreds of clients, where sums are updated many times over."""
    rng = np.random.default_rng(len(kind))
    clients, classes = 400, 8
    counts: np.ndarray = rng.multinomial(40, rng.dirichlet(np.full(classes, 0.3)), size=clients)
    if kind == "skewed":
        counts = np.stack(
            [rng.multinomial(rng.integers(5, 3000), rng.dirichlet([0.1] * classes)) for _ in range(clients)]
        )
    elif kind == "two classes":
        counts = np.eye(classes, dtype=int)[rng.integers(0, classes, (clients, 2))].sum(axis=1) * 50
    elif kind == "many ties":
        counts = np.eye(classes, dtype=int)[rng.integers(0, classes, clients)]
    elif kind == "noisy":
        counts = counts + rng.laplace(0, 2, counts.shape)
    elif kind == "large":
        counts = rng.integers(0, 2**40, (clients, classes))
    elif kind == "tiny and huge":
        counts = 10.0 ** rng.uniform(-12, 12, (clients, classes))
    elif kind == "sparse":
        counts = np.zeros((clients, 60), dtype=int)
        for row in counts:
            row[rng.choice(60, 3, replace=False)] = rng.integers(1, 9, 3)
    target = rng.dirichlet(np.ones(classes)) if kind == "target" else None
    cohorts = []
    for way in ("exact", name):
        with path(way, chunk=64), mock.patch.object(scorer, "FEW_CELLS", 0 if way == name else 1 << 30):
            selector = EntropySelector(150, buffer_size=130, seed=1, target=target)
            selector.register(counts, noisy=kind == "noisy")
            cohorts.append([selector.select().clients for _ in range(2)])
    assert cohorts[0] == cohorts[1]
