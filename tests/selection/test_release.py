"""Who leaves FedEntOpt's buffer: in order, or drawn from its oldest quarter, which keeps liars from coming together."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt import EntropySelector
from fedentopt.errors import InputError
from fedentopt.simulation.config import RunConfig


def selector(release: str, table: np.ndarray, cohort: int = 10, buffer: int = 50, seed: int = 0) -> EntropySelector:
    made = EntropySelector(cohort, buffer, seed=seed, release=release)
    made.register(table)
    return made


def two_classes_each(clients: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([np.bincount(rng.choice(rng.choice(10, 2, False), 100), minlength=10) for _ in range(clients)])


def test_only_the_oldest_quarter_leaves_and_the_newest_stay() -> None:
    made = selector("random", two_classes_each(100))
    left_at = []
    for _ in range(60):
        before = made.buffer
        cohort = made.select()
        gone = set(before) - set(made.buffer)
        left_at += [before.index(client) for client in gone]
        assert made.buffer[-10:] == cohort.clients
        assert len(made.buffer) <= 50
    # Ten leave a round one after the other, each from the first quarter of what is left: none from beyond 12 + 9.
    assert max(left_at) <= 21
    assert len(set(left_at)) > 10


def test_the_draw_is_a_function_of_the_seed_and_survives_a_stop() -> None:
    table = two_classes_each(60)
    first, second = selector("random", table, buffer=30), selector("random", table, buffer=30)
    assert [first.select().clients for _ in range(9)] == [second.select().clients for _ in range(9)]
    third = selector("random", table, buffer=30)
    third.load_state_dict(first.state_dict())
    assert [third.select().clients for _ in range(9)] == [first.select().clients for _ in range(9)]
    other = selector("random", table, buffer=30, seed=1)
    assert [other.select().clients for _ in range(9)] != [second.select().clients for _ in range(9)]


@pytest.mark.parametrize("buffer", [0, 1, 3])
def test_small_buffers_are_as_they_were(buffer: int) -> None:
    table = two_classes_each(30)
    random, fifo = (selector(release, table, buffer=buffer) for release in ("random", "fifo"))
    assert [random.select().clients for _ in range(20)] == [fifo.select().clients for _ in range(20)]


def test_a_state_says_its_release_only_where_it_is_not_the_papers() -> None:
    table = two_classes_each(30)
    assert "release" not in selector("fifo", table).state_dict()
    for one, other in (("fifo", "random"), ("random", "fifo")):
        with pytest.raises(InputError, match=f"state: release is '{other}'; accepted: '{one}', as set here"):
            selector(one, table).load_state_dict(selector(other, table).state_dict())
    with pytest.raises(InputError, match="release: 'lifo' is unknown; accepted: fifo, random"):
        selector("lifo", table)


def test_a_run_keeps_its_name_at_the_default_and_gets_another_with_the_setting() -> None:
    plain = RunConfig(selector="fedentopt")
    assert "selector.release" not in plain.to_dict()
    other = RunConfig(selector="fedentopt", settings={"release": "random"})
    assert other.to_dict()["selector.release"] == "random"
    assert other.run_id != plain.run_id
    assert RunConfig.from_dict(other.to_dict()) == other


def test_liars_no_longer_come_together() -> None:
    """A tenth of the clients claim even labels. First in, first out, they are half of a cohort again and again."""
    shares = {}
    for release in ("fifo", "random"):
        half = []
        for seed in range(3):
            table = two_classes_each(100, seed).astype(float)
            liars = np.random.default_rng(seed).choice(100, 10, replace=False)
            table[liars] = 10.0
            made = selector(release, table, seed=seed)
            half += [2 * np.isin(made.select().clients, liars).sum() >= 10 for _ in range(150)]
        shares[release] = float(np.mean(half))
    assert shares["fifo"] > 0.08
    assert shares["random"] < shares["fifo"] / 2
