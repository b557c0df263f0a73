"""FedEntOpt: picks computed by hand, the buffer, who is away, targets, state."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fedentopt import CohortWarning, EntropySelector
from fedentopt.errors import InputError

# Six clients, three classes. From a first client with only class 0, entropies of the sum are
#   a + b = (4, 4, 0): 1 bit        a + c = (4, 0, 2): 0.9183     a + d = (4, 2, 2): 1.5 bits
#   a + e = (8, 0, 0): 0 bits       a + f = (4, 4, 0): 1 bit, a tie with b
HAND = {"a": [4, 0, 0], "b": [0, 4, 0], "c": [0, 0, 2], "d": [0, 2, 2], "e": [4, 0, 0], "f": [0, 4, 0]}


def starting_with(first: str | int, size: int, counts, **options) -> EntropySelector:
    """A selector whose next round starts with the client `first` (by trying seeds)."""
    for seed in range(1000):
        selector = EntropySelector(size, seed=seed, **options)
        selector.register(counts)
        if selector.select().clients[0] == first:
            again = EntropySelector(size, seed=seed, **options)
            again.register(counts)
            return again
    raise AssertionError(f"no seed starts with {first!r}")


def test_picks_by_hand() -> None:
    # a; then d (1.5 bits, the highest); then from (4, 2, 2): b gives (4, 6, 2), c gives (4, 2, 4) with
    # 1.5219 bits, e gives (8, 2, 2), f as b with 1.4591: c wins; then from (4, 2, 4): b and f tie with
    # (4, 6, 4), 1.5567 bits, and the one registered first wins.
    cohort = starting_with("a", 4, HAND).select()
    assert cohort.clients == ("a", "d", "c", "b")
    assert cohort.label_counts.tolist() == [4, 6, 4]
    assert cohort.label_counts.dtype == np.int64
    assert cohort.entropy == pytest.approx(1.5566567074628228, abs=1e-12)
    assert cohort.classes_covered == 3
    assert cohort.released == ()
    assert cohort.sample_limits is None
    assert cohort.divergence is None


def test_ties_go_to_the_client_registered_first() -> None:
    reordered = {name: HAND[name] for name in "afbe"}
    assert starting_with("a", 2, reordered).select().clients == ("a", "f")
    assert starting_with("a", 2, {name: HAND[name] for name in "abfe"}).select().clients == ("a", "b")


def test_differences_below_a_billionth_of_a_bit_are_ties() -> None:
    # Added to (1, 0), the counts (0, 1 + d) fall d**2 / (8 ln 2) bits short of (0, 1): 1.8e-13 for d = 1e-6,
    # a tie; 1.8e-7 for d = 1e-3, none.
    close = {"a": [1.0, 0.0], "b": [0.0, 1 + 1e-6], "c": [0.0, 1.0]}
    assert starting_with("a", 2, close).select().clients == ("a", "b")
    apart = {"a": [1.0, 0.0], "b": [0.0, 1 + 1e-3], "c": [0.0, 1.0]}
    assert starting_with("a", 2, apart).select().clients == ("a", "c")


def test_first_client_is_uniform_over_those_outside_the_buffer() -> None:
    firsts = []
    for seed in range(1200):
        selector = EntropySelector(1, buffer_size=2, seed=seed)
        selector.register(np.eye(6, dtype=int))
        selector.load_state_dict({**selector.state_dict(), "buffer": [1, 4], "round": 7})
        firsts.append(selector.select().clients[0])
    times = np.bincount(firsts, minlength=6)
    assert times[[1, 4]].tolist() == [0, 0]
    assert np.abs(times[[0, 2, 3, 5]] - 300).max() < 75  # five standard deviations


def test_a_chosen_client_enters_the_buffer_at_once_and_pushes_the_oldest_out() -> None:
    # K = 4, M = 2, Q = 2, one class each: after the first round both picks are kept out; in the second round
    # the first pick pushes the older of them out, which may then be picked in the same round.
    selector = EntropySelector(2, buffer_size=2, seed=0)
    selector.register(np.array([[9, 0, 0], [0, 9, 0], [0, 9, 0], [0, 0, 9]]))
    first = selector.select().clients
    assert selector.buffer == first
    second = selector.select().clients
    assert second[0] not in first
    assert selector.buffer == second
    seen_again = 0
    for _ in range(20):
        before = selector.buffer
        cohort = selector.select().clients
        assert cohort[0] not in before
        assert cohort[1] != before[1]
        seen_again += cohort[1] == before[0]
    assert seen_again > 0


def test_no_buffer_still_never_picks_a_client_twice_in_a_round() -> None:
    selector = EntropySelector(6, buffer_size=0, seed=3)
    selector.register(HAND)
    for _ in range(5):
        assert sorted(selector.select().clients) == list("abcdef")
        assert selector.buffer == ()
    small = EntropySelector(5, buffer_size=1, seed=3)
    small.register(HAND)
    for _ in range(20):
        assert len(set(small.select().clients)) == 5


def test_largest_buffer() -> None:
    selector = EntropySelector(2, buffer_size=4, seed=0)
    selector.register(HAND)
    rounds = [selector.select().clients for _ in range(3)]
    assert sorted(sum(rounds, ())) == list("abcdef")  # nobody again before everybody was picked


def test_buffer_above_k_minus_m_is_refused() -> None:
    selector = EntropySelector(2, buffer_size=5)
    selector.register(HAND)
    with pytest.raises(InputError, match=r"buffer_size: 5; accepted: at most 4, with 6 clients and cohorts of 2"):
        selector.select()
    selector.register({"g": [1, 1, 1]})  # a seventh client makes room
    assert len(selector.select().clients) == 2


def test_no_buffer_fits_where_cohorts_ask_for_more_than_there_are() -> None:
    selector = EntropySelector(3, buffer_size=1)
    assert selector.state_dict()["most_clients"] == 0
    selector.register({"a": [1, 2], "b": [2, 1]})
    with pytest.raises(InputError, match="buffer_size: 1; accepted: at most 0, with 2 clients and cohorts of 3"):
        selector.select()


def test_clients_away_release_the_oldest_available_and_keep_their_own_place() -> None:
    selector = EntropySelector(2, buffer_size=4, seed=0)
    selector.register(HAND)
    selector.load_state_dict({**selector.state_dict(), "buffer": ["a", "b", "c", "d"]})
    # e and f are away; a as well. Oldest available first: b, then c.
    cohort = selector.select(available=["d", "c", "b"])
    assert cohort.clients == ("b", "c")
    assert cohort.released == ("b", "c")
    assert selector.buffer == ("a", "d", "b", "c")


def test_nobody_is_released_while_a_pick_is_possible() -> None:
    selector = EntropySelector(2, buffer_size=4, seed=0)
    selector.register(HAND)
    selector.load_state_dict({**selector.state_dict(), "buffer": ["a", "b", "c", "d"]})
    cohort = selector.select(available=["a", "b", "e"])
    # e first. It pushes a out of the full buffer: not an early release.
    assert cohort.clients == ("e", "a")
    assert cohort.released == ()
    assert selector.buffer == ("c", "d", "e", "a")


def test_fewer_available_than_asked_for_warns_and_none_is_refused() -> None:
    selector = EntropySelector(4, buffer_size=2, seed=0)
    selector.register(HAND)
    with pytest.warns(CohortWarning, match="cohort of 2 instead of 4"):
        assert sorted(selector.select(available=["f", "b", "b"]).clients) == ["b", "f"]
    state = selector.state_dict()
    with pytest.raises(InputError, match="available: nobody of 6 registered clients"):
        selector.select(available=[])
    with pytest.raises(InputError, match="available: client 'z': not registered"):
        selector.select(available=["a", "z"])
    with pytest.raises(InputError, match="available: client 0: not registered"):
        selector.select(available=[0])
    assert selector.state_dict() == state  # a refused round does not count
    with pytest.raises(InputError, match="no client is registered"):
        EntropySelector(1).select()


def test_more_asked_for_than_registered_warns() -> None:
    selector = EntropySelector(9)
    selector.register(HAND)
    with pytest.warns(CohortWarning, match="cohort of 6 instead of 9"):
        assert len(selector.select().clients) == 6


def test_clients_join_change_and_leave_between_rounds() -> None:
    selector = EntropySelector(2, buffer_size=2, seed=5)
    selector.register({"a": [5, 0, 0], "b": [5, 0, 0], "c": [5, 0, 0], "d": [5, 0, 0]})
    first = selector.select()
    assert first.entropy == 0
    selector.register({"late": [0, 5, 5]})
    second = selector.select()
    assert "late" in second.clients
    assert second.entropy == pytest.approx(math.log2(3))
    selector.update({"late": [5, 0, 0]})
    for _ in range(4):
        assert selector.select().entropy == 0
    gone = selector.buffer[0]
    selector.remove([gone])
    assert gone not in selector.buffer
    assert gone not in selector.clients
    for _ in range(10):
        assert gone not in selector.select().clients


def test_departures_below_q_plus_m_count_as_away() -> None:
    selector = EntropySelector(2, buffer_size=4, seed=0)
    selector.register(HAND)
    for _ in range(3):
        selector.select()
    selector.remove(["a", "b"])
    for _ in range(10):
        cohort = selector.select()
        assert len(set(cohort.clients)) == 2
        assert set(cohort.clients) <= set("cdef")
    restored = EntropySelector(2, buffer_size=4)
    restored.register({name: HAND[name] for name in "cdef"})
    restored.load_state_dict(selector.state_dict())
    assert restored.select().clients == selector.select().clients


def test_a_client_that_returns_is_registered_last() -> None:
    selector = EntropySelector(2, seed=0)
    selector.register(HAND)
    selector.remove(["b"])
    selector.register({"b": HAND["b"]})
    assert selector.clients == ("a", "c", "d", "e", "f", "b")


def test_noisy_counts_are_clamped_and_may_be_empty() -> None:
    selector = EntropySelector(3, seed=0)
    selector.register({"a": [-3.0, 2.5], "b": [-1.0, -1.0], "c": [4.0, -0.5]}, noisy=True)
    cohort = selector.select()
    assert cohort.label_counts.tolist() == [4.0, 2.5]
    assert cohort.label_counts.dtype == np.float64
    nothing = EntropySelector(2, seed=0)
    nothing.register(-np.ones((3, 2)), noisy=True)
    empty = nothing.select()
    assert empty.entropy == 0
    assert empty.classes_covered == 0
    # From nothing, adding nothing has entropy 0, and so does a single class: the lowest number wins.
    assert 0 in empty.clients


@pytest.mark.parametrize("away", [False, True])
def test_state_continues_identically_in_the_middle(away: bool) -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(50, rng.dirichlet(np.full(5, 0.2)), size=40)
    present = [None if not away else sorted(rng.choice(40, 25, replace=False).tolist()) for _ in range(12)]
    whole = EntropySelector(6, buffer_size=20, seed=11)
    whole.register(counts)
    expected = [whole.select(here).clients for here in present]
    for stop in (0, 1, 5, 11):
        first = EntropySelector(6, buffer_size=20, seed=11)
        first.register(counts)
        begun = [first.select(here).clients for here in present[:stop]]
        state = json.loads(json.dumps(first.state_dict()))
        second = EntropySelector(6, buffer_size=20, seed=99)  # the state brings its seed
        second.register(counts)
        second.load_state_dict(state)
        assert begun + [second.select(here).clients for here in present[stop:]] == expected
        assert second.state_dict() == whole.state_dict()


def test_state_may_come_before_the_clients() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (12, 4)) + 1
    whole = EntropySelector(2, buffer_size=6, seed=5)
    whole.register(counts)
    for _ in range(5):
        whole.select()
    state = json.loads(json.dumps(whole.state_dict()))
    late = whole.buffer[-1]
    there = [client for client in range(12) if client != late]
    restarted, some = EntropySelector(2, buffer_size=6), EntropySelector(2, buffer_size=6)
    for selector in (restarted, some):
        selector.load_state_dict(state)
    restarted.register(counts)
    some.register(counts[there], ids=there)  # one is not back yet: it is away, and keeps its place in the buffer
    assert some.select().clients == restarted.select(available=there).clients == whole.select(available=there).clients
    assert late in some.buffer
    assert some.buffer == restarted.buffer == whole.buffer
    assert [restarted.select().clients for _ in range(5)] == [whole.select().clients for _ in range(5)]


def test_a_buffered_client_that_never_comes_keeps_nobody_else_out() -> None:
    before = EntropySelector(1, buffer_size=3)
    before.register({name: [1, 1] for name in ("v", "w", "x", "y", "z")})
    for _ in range(3):
        before.select()
    selector = EntropySelector(1, buffer_size=3)
    selector.load_state_dict(before.state_dict())
    selector.register({"a": [3, 0], "b": [0, 2], "c": [1, 1]})
    assert selector.select().released == ()


def test_state_is_small_and_without_counts() -> None:
    selector = EntropySelector(2, buffer_size=3, seed=4, target=[1, 2, 1])
    selector.register(HAND)
    selector.select()
    state = selector.state_dict()
    assert state == {
        "selector": "fedentopt",
        "cohort_size": 2,
        "round": 1,
        "seed": 4,
        "buffer_size": 3,
        "target": [0.25, 0.5, 0.25],
        "buffer": list(selector.buffer),
        "most_clients": 6,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector": "random"}, "selector is 'random'; accepted: 'fedentopt'"),
        ({"cohort_size": 3}, "cohort_size is 3; accepted: 2"),
        ({"buffer_size": 1}, "buffer_size is 1; accepted: 3"),
        ({"target": [0.5, 0.25, 0.25]}, "target is"),
        ({"round": -1}, "round: -1"),
        ({"round": 1.5}, "round: 1.5"),
        ({"seed": None}, "seed: None"),
        ({"seed": -1}, "seed: -1"),
        ({"most_clients": -1}, "most_clients: -1"),
        ({"buffer": ["a", "a"]}, "buffer is .*; accepted: a list of client ids, each once"),
        ({"buffer": list("abcd")}, "buffer holds 4 clients; accepted: at most 3"),
        ({"buffer": ["nobody"]}, "buffer: client 'nobody': not registered"),
        ({"buffer": "abc"}, "buffer is 'abc'"),
        ({"buffer": [1.5]}, "buffer is .1.5.; accepted: a list of client ids"),
        ({"buffer": None}, "buffer is None"),
        ({"most_clients": "6"}, "most_clients: '6'"),
        ({"extra": 1}, "'extra' is unknown"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    selector = EntropySelector(2, buffer_size=3)
    selector.register(HAND)
    selector.select()
    before = selector.state_dict()
    with pytest.raises(InputError, match="state: .*" + message):
        selector.load_state_dict({**before, **change})
    assert selector.state_dict() == before
    for key in before:
        with pytest.raises(InputError, match=f"state: '{key}' is missing"):
            selector.load_state_dict({k: v for k, v in before.items() if k != key})
    with pytest.raises(InputError, match="state: list"):
        selector.load_state_dict([])  # type: ignore[arg-type]


def test_target_is_met_as_closely_as_possible() -> None:
    # From a = (4, 0, 0), towards (2/3, 1/3, 0): a + b = (1/2, 1/2, 0) has KL 0.0850, a + g = (4, 2, 0) has 0.
    counts = {"a": HAND["a"], "b": HAND["b"], "g": [0, 2, 0], "d": HAND["d"]}
    cohort = starting_with("a", 2, counts, target=[2, 1, 0]).select()
    assert cohort.clients == ("a", "g")
    assert cohort.divergence == pytest.approx(0, abs=1e-12)
    farther = starting_with("a", 2, {k: counts[k] for k in "abd"}, target=[2, 1, 0]).select()
    assert farther.clients == ("a", "b")
    assert farther.divergence == pytest.approx(0.5 * math.log2(0.75) + 0.5 * math.log2(1.5), abs=1e-12)


def test_classes_outside_the_target_are_avoided_while_possible() -> None:
    counts = {"a": [1, 0, 0], "b": [9, 9, 1], "c": [1, 0, 0], "d": [8, 8, 4]}
    cohort = starting_with("a", 4, counts, target=[1, 1, 0]).select()
    assert cohort.clients == ("a", "c", "b", "d")
    assert cohort.divergence == pytest.approx(1000 * 5 / 41, rel=1e-2)


def test_empty_reports_do_not_count_as_close_to_a_target() -> None:
    # From a first client that reports nothing, another that reports nothing comes nowhere near the target.
    counts = {"a": [-1.0, 0.0], "b": [0.0, -1.0], "c": [9.0, 1.0], "d": [5.0, 5.0]}
    for seed in range(20):
        selector = EntropySelector(2, seed=seed, target=[1, 1.5])
        selector.register(counts, noisy=True)
        first, second = selector.select().clients
        if first in "ab":
            assert second == "d"
    nothing = EntropySelector(2, target=[1, 3])
    nothing.register(-np.ones((3, 2)), noisy=True)
    assert nothing.select().divergence == pytest.approx(2)  # as of a cohort with nothing but the rarer class


@pytest.mark.parametrize("target", [[1, 1, 1], [0.2, 0.2, 0.2], np.full(3, 1 / 3)])
def test_uniform_target_gives_the_picks_of_entropy(target) -> None:
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 4, (30, 3)) + np.eye(3, dtype=int)[rng.integers(0, 3, 30)]
    plain, aimed = EntropySelector(7, buffer_size=9, seed=1), EntropySelector(7, buffer_size=9, seed=1, target=target)
    plain.register(counts)
    aimed.register(counts)
    for _ in range(20):
        a, b = plain.select(), aimed.select()
        assert a.clients == b.clients
        assert b.divergence == pytest.approx(math.log2(3) - a.entropy, abs=1e-9)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([0, 0, 0], "all weights are 0"),
        ([1, -1, 1], "the weight of class 1 is -1.0"),
        ([1, float("nan")], "the weight of class 1 is nan"),
        ([[1, 2]], "one weight a class"),
        ([], "one weight a class"),
        (["x"], "one weight a class"),
        (5, "one weight a class"),
    ],
)
def test_bad_targets_are_refused(target, message: str) -> None:
    with pytest.raises(InputError, match=f"target: .*{message}"):
        EntropySelector(2, target=target)


def test_target_of_the_wrong_length_is_refused() -> None:
    selector = EntropySelector(2, target=[1, 2])
    with pytest.raises(InputError, match="counts: 3 classes; accepted: 2"):
        selector.register(np.ones((4, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohort_size": 0}, "cohort_size: 0"),
        ({"cohort_size": 2.0}, "cohort_size: 2.0"),
        ({"cohort_size": True}, "cohort_size: True"),
        ({"cohort_size": 1, "buffer_size": -1}, "buffer_size: -1"),
        ({"cohort_size": 1, "seed": -1}, "seed: -1"),
        ({"cohort_size": 1, "seed": "0"}, "seed: '0'"),
    ],
)
def test_bad_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EntropySelector(**options)


def test_a_target_whose_sum_overflows_is_a_target_all_the_same() -> None:
    assert EntropySelector(2, target=[1e308, 1e308, 0]).target.tolist() == [0.5, 0.5, 0.0]
    with pytest.raises(InputError, match=r"target: .*; accepted: one weight a class"):
        EntropySelector(2, target=[[1, 2], [3]])
