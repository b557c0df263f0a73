"""Selectors that are told what is no number: it counts as not told, whoever passed it on."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.selection import SELECTORS, Head, Observation


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["rpow-d", "oort", "hics-fl", "divfl", "clustered-update"])
def test_what_is_not_finite_is_left_out(name: str, bad: float) -> None:
    def told(value: float) -> Observation:
        rows = np.array([[value, 1.0], [2.0, -1.0]], np.float32)
        return Observation(5, value, value, Head(rows, rows[0]), rows.ravel(), abs(value))

    made = []
    for last in (Observation(5), told(bad)):
        selector = SELECTORS.get(name)(2, seed=1)
        selector.register(np.arange(1, 11).reshape(5, 2))
        selector.select()
        selector.observe({k: told(0.5 + k) for k in range(4)} | {4: last})
        made.append(selector)
    silent, loud = made
    state = loud.state_dict()
    assert json.loads(json.dumps(state, allow_nan=False)) == silent.state_dict()
    again = SELECTORS.get(name)(2, seed=1)
    again.register(np.arange(1, 11).reshape(5, 2))
    again.load_state_dict(state)
    if loud.arrays():
        again.load_arrays(loud.arrays())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert silent.select().clients == loud.select().clients == again.select().clients


@pytest.mark.parametrize(
    ("name", "power", "bias"),
    [
        ("divfl", 126, True), ("hics-fl", 126, True), ("hics-fl", 126, False), ("clustered-update", 126, True),
        ("clustered-update", 1000, True), ("clustered-update", -1000, True),
    ],
)  # fmt: skip
def test_huge_changes_are_compared_as_small_ones_are(name: str, power: int, bias: bool) -> None:
    """Updates that are a power of two larger pick the same clients, and nothing overflows."""

    def cohorts(scale: float) -> list[tuple[Any, ...]]:
        rng = np.random.default_rng(3)
        kinds = rng.normal(size=(3, 4, 8))
        selector = SELECTORS.get(name)(3, seed=1)
        selector.register(rng.integers(1, 9, (12, 4)))
        picked = []
        for _ in range(8):
            cohort = selector.select()
            picked.append(cohort.clients)
            told = {}
            for client in cohort.clients:
                rows = np.float32(kinds[client % 3] + 0.1 * rng.normal(size=(4, 8))).astype(np.float64) * scale
                rows = rows if abs(power) > 126 else rows.astype(np.float32)
                told[client] = Observation(5, head=Head(rows, rows[:, 0] if bias else None), update=rows.ravel())
            selector.observe(told)
        return picked

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert cohorts(2.0**power) == cohorts(1.0)


@pytest.mark.parametrize("name", ["hics-fl", "divfl"])
def test_a_change_per_step_size_beyond_single_precision_is_left_out_quietly(name: str) -> None:
    selector = SELECTORS.get(name)(2, seed=1)
    selector.register(np.arange(1, 11).reshape(5, 2))
    heads = {k: Head(np.full((2, 2), 0.5 + k, np.float32), np.array([k, 1.0], np.float32)) for k in range(4)}
    heads[4] = Head(np.full((2, 2), 1e38, np.float32), np.array([1e38, 1.0], np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        selector.observe({client: Observation(5, head=head, travel=0.01) for client, head in heads.items()})
    assert selector.memory()["vectors"] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["hics-fl", "divfl"])
def test_what_single_precision_cannot_hold_is_left_out_too(name: str) -> None:
    selector = SELECTORS.get(name)(2, seed=1)
    selector.register(np.arange(1, 11).reshape(5, 2))
    heads = {k: Head(np.full((2, 2), 0.5 + k), np.array([k, 1.0])) for k in range(4)}
    heads[4] = Head(np.full((2, 2), 1e39), np.array([1e39, 1.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        selector.observe({client: Observation(5, head=head) for client, head in heads.items()})
        assert selector.memory()["vectors"] == [0, 1, 2, 3]
        assert 4 in selector.select().clients, "not known yet"
        assert len(selector.select([0, 1, 2, 3]).clients) == 2


@pytest.mark.parametrize("name", ["hics-fl", "divfl", "clustered-update"])
def test_clients_of_another_model_are_named(name: str) -> None:
    def told(classes: int) -> Observation:
        head = Head(np.ones((classes, 2), np.float32), np.ones(classes, np.float32))
        return Observation(5, head=head, update=np.ones(classes, np.float32))

    selector = SELECTORS.get(name)(2, seed=1)
    selector.register({"a": [1, 2], "b": [2, 1]})
    with pytest.raises(InputError, match=r"observe: \d+ numbers of client 'b'; accepted: \d+, as of others"):
        selector.observe({"a": told(2), "b": told(3)})


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({"a": 1.0, "b": "high"}, "losses: client 'b': 'high'; accepted: a number"),
        ({"a": [1.0, 2.0]}, "losses: client 'a'"),
        ([1.0, 2.0], "losses: [1.0, 2.0]; accepted: what the candidates answered, by client"),
    ],
)
def test_losses_that_are_none_are_refused_and_the_round_does_not_count(losses: Any, words: str) -> None:
    selector = SELECTORS.get("pow-d")(1)
    selector.register({"a": [1, 2], "b": [2, 1]})
    with pytest.raises(InputError, match=re.escape(words)):
        selector.select(losses=losses)
    assert selector.round == 0
