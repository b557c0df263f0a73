"""Power-of-choice: candidates by size, the largest losses by hand, what happens to those who do not answer."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.selection import CPowDSelector, Observation, PowDSelector, RPowDSelector, Selector

COUNTS = {"a": [4, 1], "b": [0, 4], "c": [2, 0], "d": [10, 2], "e": [4, 0], "f": [0, 1]}


def made(cls: type[Selector], size: int = 2, **settings: Any) -> Any:
    selector = cls(size, **settings)
    selector.register(COUNTS)
    return selector


def test_the_largest_losses_by_hand() -> None:
    selector = made(PowDSelector, d=6)
    assert set(selector.candidates().ids) == set(COUNTS), "d = K asks everybody"
    losses = {"a": 0.3, "b": 2.0, "c": 0.1, "d": 0.9, "e": 2.0, "f": 0.2}
    cohort = selector.select(losses=losses)
    assert cohort.clients == ("b", "e"), "a tie: registered first"
    assert cohort.weights == (0.5, 0.5)
    assert selector.select(losses=losses | {"f": 9.0}).clients == ("f", "b")


def test_who_does_not_answer_trains_only_for_want_of_others() -> None:
    selector = made(PowDSelector, 3, d=4)
    asked = selector.candidates().ids
    one, two, *silent = asked
    cohort = selector.select(losses={one: 0.5, two: 1.5})
    assert cohort.clients == (two, one, silent[0])
    selector = made(PowDSelector, 3, d=4)
    assert selector.select().clients == asked[:3], "nobody could answer: as drawn"
    # one that answered has left since
    selector = made(PowDSelector, 2, d=4)
    one, two, three, _ = selector.candidates().ids
    here = [client for client in COUNTS if client != one]
    assert selector.select(here, losses={one: 9.0, two: 1.0, three: 2.0}).clients == (three, two)


def test_a_batch_and_defaults() -> None:
    assert made(PowDSelector).candidates().samples is None
    assert made(CPowDSelector).candidates().samples == 64
    assert made(CPowDSelector, batch=5).candidates(["a", "b"]).samples == 5
    assert len(made(PowDSelector).candidates().ids) == 4, "d = 2 M"
    assert len(made(PowDSelector, 4).candidates().ids) == 6, "or all there are"
    assert made(PowDSelector).candidates() == made(CPowDSelector).candidates().__class__(
        made(PowDSelector).candidates().ids, None
    )
    assert made(PowDSelector).needs == made(CPowDSelector).needs == {"candidate_loss"}
    assert made(RPowDSelector).needs == {"loss"}
    assert made(RPowDSelector).candidates() is None


def test_candidates_are_drawn_by_size() -> None:
    """The first of them: p_k = n_k / 28."""
    selector = made(PowDSelector, 1, d=2)
    firsts: Counter[Any] = Counter()
    for _ in range(3000):
        firsts[selector.candidates().ids[0]] += 1
        selector._round += 1
    for client, counts in COUNTS.items():
        assert firsts[client] / 3000 == pytest.approx(sum(counts) / 28, abs=0.03)


@pytest.mark.parametrize("cls", [PowDSelector, CPowDSelector, RPowDSelector])
def test_d_is_between_cohort_and_clients(cls: type[Selector]) -> None:
    with pytest.raises(InputError, match="d: 2 is out of range; accepted: at least 3, the cohort's size"):
        cls(3, d=2)
    for d in (2, 11):
        with pytest.raises(InputError, match=f"d: {d} is out of range; accepted: 3 to 10, cohort to clients"):
            cls.check_run(cohort_size=3, clients=10, d=d)
    cls.check_run(cohort_size=3, clients=10, d=10)
    cls.check_run(cohort_size=3, clients=10, d=None)


def test_the_recent_losses_by_hand() -> None:
    selector = made(RPowDSelector, 2, d=6)
    seen: list[Any] = []
    for _ in range(3):  # nobody has trained: as drawn, everybody once
        cohort = selector.select()
        assert cohort.weights == (0.5, 0.5)
        seen += cohort.clients
        selector.observe({client: Observation(1, loss=float(ord(str(client)))) for client in cohort.clients})
    assert sorted(seen) == list("abcdef")
    assert selector.select().clients == ("f", "e")
    selector.observe({"f": Observation(1, loss=0.5)})  # e dropped out, and keeps its loss
    assert selector.select().clients == ("e", "d")
    selector.register({"g": [1, 1]})
    assert "g" in selector.select(["a", "e", "g"]).clients
    selector.remove(["e"])
    selector.register({"e": [4, 0]})
    assert set(selector.select(["a", "b", "e", "g"]).clients) == {"e", "g"}, "whoever comes back is new"
    selector.observe({"stranger": Observation(1, loss=99.0)})
    assert "stranger" not in dict(selector.memory()["losses"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_picks_are_those_of_the_definition(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 12))
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=clients, max_size=clients))
    size = data.draw(st.integers(1, 4))
    d = data.draw(st.one_of(st.none(), st.integers(size, 9)))
    selector = PowDSelector(size, seed=data.draw(st.integers(0, 50)), d=d)
    selector.register(np.array(sizes, dtype=np.float64)[:, None], noisy=True)
    here = sorted(data.draw(st.lists(st.integers(0, clients - 1), min_size=1, unique=True)))
    # arrival times of a race, the definition of the draw
    race = selector.rng().exponential(size=len(here))
    scale = max(sizes[k] for k in here)
    times = [(r / (sizes[k] / scale) if sizes[k] else np.inf, r, k) for r, k in zip(race, here, strict=True)]
    asked = [k for _, _, k in sorted(times)][: d or 2 * size]
    assert selector.candidates(here).ids == tuple(asked)
    values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.5]), min_size=len(asked), max_size=len(asked)))
    expected = [k for _, k in sorted((-value, k) for value, k in zip(values, asked, strict=True))][:size]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cohort = selector.select(here, losses=dict(zip(asked, values, strict=True)))
    assert list(cohort.clients) == expected
    assert cohort.weights == (1 / len(expected),) * len(expected)
