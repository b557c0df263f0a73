"""Oort: exploration by size, exploitation by hand, the penalty for slow clients, the pacer."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.selection import CohortWarning, Observation, OortSelector
from fedentopt.selection.draws import draw_by_weight


def seen(loss: float, samples: int = 10, seconds: float = 1.0) -> Observation:
    return Observation(samples, loss=loss, loss_rms=loss, seconds=seconds)


def made(sizes: dict[Any, int], size: int, **settings: Any) -> OortSelector:
    selector = OortSelector(size, **settings)
    selector.register({client: [n, 0] for client, n in sizes.items()})
    return selector


def test_exploration_looks_at_the_largest() -> None:
    """Nobody has trained: of the 2 M largest, M are drawn by size."""
    sizes = {f"c{i}": 100 - i for i in range(50)}
    selector = made(sizes, 3, window=2.0)
    drawn = [set(selector.select().clients) for _ in range(40)]
    assert set.union(*drawn) == {f"c{i}" for i in range(6)}
    assert len({frozenset(cohort) for cohort in drawn}) > 5


def test_scores_and_cut_off_by_hand() -> None:
    # Everybody has trained, so all seats exploit. U = 10 times the loss: 10, 20, 40, 80 in rounds 1 to 4, t = 5. With
    # least = 9.99 and reach = 70.01 the scores are (U - 9.99) / 70.01 + sqrt(0.1 ln 5 / L).
    selector = made(dict.fromkeys("abcd", 10), 1, cut_off=1.0, threshold=100.0, clip=1.0)
    for r, (client, loss) in enumerate(zip("abcd", (1.0, 2.0, 4.0, 8.0), strict=True), 1):
        selector._round = r
        selector.observe({client: seen(loss)})
    utility, last = np.array([10.0, 20, 40, 80]), np.array([1.0, 2, 3, 4])
    expected = (utility - 9.99) / 70.01 + np.sqrt(0.1 * math.log(5) / last)
    np.testing.assert_allclose(selector._scores(utility, last, 5), expected)
    # scores .40, .43, .66, 1.20: with all of the second best score as cut-off, only d and c can be drawn
    assert expected.argsort().tolist() == [0, 1, 2, 3]
    drawn = []
    for _ in range(40):
        drawn.append(selector.select().clients[0])
        selector._round = 4
        selector.seed += 1
    assert set(drawn) == {"c", "d"}
    # clipped at the lower of two: both the same
    clipped = made(dict.fromkeys("ab", 10), 1, clip=0.0)
    np.testing.assert_allclose(clipped._scores(np.array([10.0, 80]), np.array([1.0, 1]), 1), [0.01 / 70.01] * 2)


def test_a_cut_off_above_the_score_itself_is_refused() -> None:
    # Nobody but the best could be drawn by score, and most seats would be drawn uniformly.
    with pytest.raises(InputError, match=r"cut_off: 1\.1 is out of range; accepted: at least 0 and at most 1"):
        made({"a": 1}, 1, cut_off=1.1)


def test_slow_clients_are_penalised_once_their_seconds_are_known() -> None:
    selector = made(dict.fromkeys("abcd", 10), 2, threshold=50.0)
    assert selector._penalties(50.0).tolist() == [1, 1, 1, 1], "nothing known"
    selector.observe({"a": seen(1, seconds=2.0), "b": seen(1, seconds=8.0), "c": seen(1, seconds=4.0)})
    # of 2, 4, 8 the quantile at place int(3 * 0.5) = 1 is 4: b gets (4 / 8)^2; d is not known
    assert selector._penalties(50.0).tolist() == [1, 0.25, 1, 1]
    assert selector._penalties(0.0).tolist() == [1, 1 / 16, 1 / 4, 1]
    assert selector._penalties(100.0).tolist() == [1, 1, 1, 1]
    cubed = made(dict.fromkeys("ab", 10), 1, penalty=3.0)
    cubed.observe({"a": seen(1, seconds=1.0), "b": seen(1, seconds=2.0)})
    assert cubed._penalties(10.0).tolist() == [1, 0.125]


def test_seats_that_explore() -> None:
    """eps = 0.9 * 0.95^t: of 10 seats floor(10 (1 - 0.855)) = 1 exploits in round 1, none has trained though."""
    selector = made(dict.fromkeys(range(100), 10), 10)
    told: set[Any] = set()
    for t in range(1, 13):
        eps = max(0.9 * 0.95**t, 0.2)
        cohort = set(selector.select().clients)
        exploit = min(math.floor(10 * (1 - eps) + 1e-9), len(told)) if len(told) < 100 else 10
        assert len(cohort & told) == exploit, t
        selector.observe({client: seen(1.0) for client in cohort})
        told |= cohort
    everybody = made(dict.fromkeys(range(6), 10), 3)
    everybody.observe({i: seen(1.0 + i) for i in range(6)})
    everybody.select()
    assert len(everybody._exploited) == 3, "nobody is left to explore"
    everybody.register({"late": [5, 5]})
    rounds = [everybody.select().clients for _ in range(3)]
    assert any("late" in cohort for cohort in rounds), "exploration goes on"


def test_the_pacer() -> None:
    def threshold_after(losses: list[float]) -> float:
        """One client, one seat, a loss per round; the windows are two rounds."""
        selector = made({"a": 10, "b": 10}, 1, pace=2, threshold=50.0, explore=0.0, explore_least=0.0)
        selector.observe({"a": seen(1.0), "b": seen(1.0)})
        for loss in losses:
            cohort = selector.select().clients
            selector.observe({client: seen(loss) for client in cohort})
        return selector._preferred

    # At t = 4 the history holds rounds 0 to 3 (round 0: nothing): (0, U1) and (U2, U3).
    assert threshold_after([1.0, 1.0, 1.0]) == 50.0, "no decision before round 4"
    assert threshold_after([2.0, 1.0, 1.0, 1.0]) == 55.0, "(0 + 20) and (10 + 10): flat"
    assert threshold_after([1.0, 1.0, 1.0, 1.0]) == 50.0, "(0 + 10) and (10 + 10): neither"
    assert threshold_after([1.0, 4.0, 4.0, 1.0]) == 45.0, "(0 + 10) and (40 + 40): a jump"
    # who dropped out adds nothing
    selector = made({"a": 10, "b": 10}, 1, pace=2, explore=0.0, explore_least=0.0)
    selector.observe({"a": seen(1.0), "b": seen(1.0)})
    selector.select()
    selector.select()
    assert selector._history == [0.0, 0.0]


def reference(selector: OortSelector, sizes: Any, told: Any, here: list[int], t: int, preferred: float) -> list[int]:
    """The definition in loops; `told` has (utility, round, seconds) by client."""
    rng, size = selector.rng(), min(selector.cohort_size, len(here))
    tried, fresh = [k for k in here if k in told], [k for k in here if k not in told]
    seconds = sorted(s for _, _, s in told.values())
    limit = (
        seconds[min(int(len(seconds) * preferred / 100), len(seconds) - 1)] if seconds and preferred < 100 else np.inf
    )
    eps = max(0.9 * 0.95**t, 0.2) if fresh else 0.0
    exploit = min(math.floor(size * (1 - eps) + 1e-9), len(tried))
    scores = {}
    if tried:
        utilities = sorted(told[k][0] for k in tried)
        clip = utilities[min(int(len(tried) * 0.98), len(tried) - 1)]
        least = utilities[0] * 0.999
        for k in tried:
            u, last, s = told[k]
            score = (min(u, clip) - least) / max(utilities[-1] - least, 1e-4) + math.sqrt(0.1 * math.log(t) / last)
            scores[k] = score * (limit / max(s, 1e-4)) ** 2 if s > limit else score
    picked: list[int] = []
    if exploit:
        ranked = sorted(tried, key=lambda k: -scores[k])
        cut = 0.7 * scores[ranked[min(exploit, len(ranked) - 1)]]
        near = [k for k in ranked if scores[k] >= cut]
        picked += [near[i] for i in draw_by_weight(rng, np.array([scores[k] for k in near]), exploit)]
    explore = min(len(fresh), size - len(picked))
    largest = sorted(fresh, key=lambda k: -sizes[k])[: max(explore, 5 * explore)]
    picked += [largest[i] for i in draw_by_weight(rng, np.array([sizes[k] for k in largest], dtype=float), explore)]
    others = [i for i, k in enumerate(here) if k not in picked]
    return picked + [here[i] for i in rng.permutation(others)[: size - len(picked)]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_picks_are_those_of_the_definition(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 12))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=clients, max_size=clients))
    selector = made(dict(enumerate(sizes)), data.draw(st.integers(1, 5)), seed=data.draw(st.integers(0, 9)))
    told: dict[int, tuple[float, int, float]] = {}
    for t in range(1, 7):
        here = sorted(data.draw(st.lists(st.integers(0, clients - 1), min_size=1, unique=True)))
        expected = reference(selector, sizes, told, here, t, 10.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CohortWarning)
            found = list(selector.select(here).clients)
        assert found == expected
        trained = data.draw(st.lists(st.sampled_from(found), unique=True))
        for k in trained:
            loss, seconds = data.draw(st.floats(0.0, 5.0)), data.draw(st.floats(0.0, 9.0))
            selector.observe({k: seen(loss, sizes[k], seconds)})
            told[k] = (sizes[k] * loss, t, seconds)


def test_who_leaves_is_forgotten_and_bad_states_are_refused() -> None:
    selector = made(dict.fromkeys("abc", 10), 3)
    selector.select()
    selector.observe({"a": seen(1.0), "b": seen(2.0), "stranger": seen(3.0)})
    selector.select()
    selector.observe({"a": Observation(10)})  # no loss came back
    selector.remove(["a"])
    memory = selector.memory()
    assert memory["utility"] == [["b", 20.0]]
    assert memory["seconds"] == [["b", 1.0]]
    assert "a" not in memory["exploited"]
    state = selector.state_dict()
    for change in ({"history": [None]}, {"preferred": "x"}, {"utility": [["b", -1.0]]}, {"last_round": [["b", 0]]},
                   {"heard": [["b"]]}, {"exploited": 3}, {"history": 2}):  # fmt: skip
        with pytest.raises(InputError, match=r"state: .*accepted: "):
            selector.load_state_dict({**state, **change})
        assert selector.state_dict() == state


def test_a_mean_loss_stands_for_one_that_is_not_told() -> None:
    """Most apps know their mean loss alone: a client that tells it has trained, and counts by it."""
    selector = made(dict.fromkeys("abcd", 10), 2)
    selector.observe({"a": Observation(10, loss=3.0), "b": Observation(20, loss=1.0, loss_rms=2.0)})
    assert dict(selector.memory()["utility"]) == {"a": 30.0, "b": 40.0}
    selector.observe({"c": Observation(10, loss=1.0, loss_rms=math.inf), "d": Observation(10)})
    assert dict(selector.memory()["utility"]) == {"a": 30.0, "b": 40.0}


def test_figures_below_zero_leave_a_state_that_can_be_continued() -> None:
    """A loss of one's own may be negative, and clocks are set back."""
    selector = made(dict.fromkeys("abc", 10), 2)
    selector.select()
    selector.observe({"a": seen(-3.0, seconds=-1.0), "b": seen(1.0, seconds=2.0)})
    other = made(dict.fromkeys("abc", 10), 2)
    other.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert dict(other.memory()["utility"]) == {"a": 0.0, "b": 10.0}
    assert dict(other.memory()["seconds"]) == {"b": 2.0}
    assert other.select().clients == selector.select().clients


def test_zero_losses_and_equal_clients() -> None:
    selector = made(dict.fromkeys("abcd", 5), 2)
    selector.observe({client: seen(0.0) for client in "abcd"})
    assert len({frozenset(selector.select().clients) for _ in range(40)}) > 3


def test_a_loss_that_ran_away_leaves_scores_finite() -> None:
    selector = OortSelector(2, seed=0)
    selector.register(np.full((6, 3), 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            cohort = selector.select()
            loss = {client: 1e308 if client == 0 else 1.0 for client in cohort.clients}
            selector.observe({k: Observation(30, loss[k], loss[k], seconds=1.0) for k in cohort.clients})
    json.loads(json.dumps(selector.state_dict(), allow_nan=False))
