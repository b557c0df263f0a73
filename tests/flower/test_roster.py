"""The roster: clients in the order of their ids however late they come, and a buffer that fits those known."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedentopt import EntropySelector, KLSelector, RandomSelector
from fedentopt.errors import InputError
from fedentopt.flower.report import Report
from fedentopt.flower.roster import Roster
from fedentopt.selection import ClusteredSizeSelector, CycleSelector
from fedentopt.selection.measures import entropy


def report(client: int | str, epsilon: float | None = None) -> Report:
    """Four label counts, most of them of one class."""
    counts = np.ones(4)
    counts[(client if isinstance(client, int) else len(client)) % 4] = 9
    return Report(client, counts, epsilon)


def reports(*clients: int | str) -> list[Report]:
    return [report(client) for client in clients]


def known(number: int) -> list[int]:
    return list(range(number))


@pytest.mark.parametrize(
    ("clients", "room"),
    # Buffer 4, cohorts of 2: min(4, max(0, K - 2)).
    [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (7, 4), (20, 4)],
)
def test_the_buffer_holds_no_more_than_those_known_beyond_a_cohort(clients, room, caplog):
    roster = Roster(EntropySelector(2, buffer_size=4, seed=1))
    roster.take(reports(*known(clients)))
    with caplog.at_level(logging.WARNING, logger="flwr"):
        for _ in range(3):
            cohort = roster.select(known(clients))
            assert len(cohort.clients) == min(2, clients)
    assert roster.selector.buffer_size == room
    assert len(roster.selector.buffer) == room
    said = [line for line in caplog.messages if line.startswith("buffer of")]
    expected = f"buffer of {room} instead of 4: {clients} clients are known, 2 train each round"
    assert said == ([] if room == 4 else [expected]), "said once, and only where it is so"


def test_the_buffer_grows_with_the_federation_and_keeps_who_is_in_it(caplog):
    roster = Roster(EntropySelector(2, buffer_size=4, seed=1))
    rooms = []
    with caplog.at_level(logging.WARNING, logger="flwr"):
        for number in (2, 3, 3, 5, 6, 8):
            roster.take([r for r in reports(*known(number)) if r.client not in roster.selector.clients])
            cohort = roster.select(known(number))
            rooms.append(roster.selector.buffer_size)
            newest = min(2, rooms[-1])
            kept = roster.selector.buffer
            assert kept[len(kept) - newest :] == cohort.clients[2 - newest :]
    assert rooms == [0, 1, 1, 3, 4, 4]
    assert [line.split(":")[0] for line in caplog.messages if line.startswith("buffer of")] == [
        "buffer of 0 instead of 4", "buffer of 1 instead of 4", "buffer of 3 instead of 4", "buffer of 4 instead of 4"
    ]  # fmt: skip
    assert roster.buffer_size == 4


@pytest.mark.parametrize("kind", [CycleSelector, ClusteredSizeSelector, RandomSelector])
def test_only_a_want_of_clients_is_told_of(kind, caplog):
    roster = Roster(kind(4, seed=1))
    roster.take(reports(*known(6)))
    with caplog.at_level(logging.WARNING, logger="flwr"):
        sizes = [len(roster.select(known(6)).clients) for _ in range(6)]
        assert (min(sizes) < 4) == (kind is not RandomSelector), "the last of a cycle, or somebody drawn twice"
        assert caplog.messages == []
        roster.select(known(3))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("cohort of ")


def test_those_known_count_and_not_those_available():
    roster = Roster(EntropySelector(2, buffer_size=4, seed=1))
    roster.take(reports(*known(10)))
    roster.select([1, 2, 3])
    assert roster.selector.buffer_size == 4


@pytest.mark.parametrize("make", [RandomSelector, KLSelector])
def test_selectors_without_a_buffer_have_none(make):
    roster = Roster(make(2, seed=1))
    assert roster.buffer_size is None
    roster.take(reports(3, 1, 2))
    assert len(roster.select([1, 2, 3]).clients) == 2
    assert roster.state_dict()["buffer_size_now"] is None


def test_those_who_come_together_stand_in_the_order_of_their_ids_and_those_who_come_later_behind_them():
    roster = Roster(EntropySelector(2, buffer_size=2, seed=3))
    roster.take(reports("b", 4))
    roster.take(reports(2))
    roster.take(reports("a", 10))
    assert roster.selector.clients == (4, "b", 2, 10, "a")


class Remembering(RandomSelector):
    """Keeps a number per client, by the client's number, as a selector that learns may."""

    name = "remembering"

    def __init__(self, cohort_size, seed=0):
        super().__init__(cohort_size, seed)
        self.kept = np.zeros((0, 2), dtype=np.float32)
        self.registered = []

    def register(self, counts, **more):
        self.registered.append(list(counts))
        super().register(counts, **more)
        grown = np.zeros((len(self.clients), 2), dtype=np.float32)
        grown[: len(self.kept)] = self.kept
        self.kept = grown

    def arrays(self):
        return {"kept": self.kept}

    def load_arrays(self, arrays):
        self.kept = np.array(arrays["kept"])


def test_somebody_who_comes_in_between_leaves_the_history_as_it_was():
    roster = Roster(EntropySelector(2, buffer_size=3, seed=3))
    roster.take(reports(1, 3, 5, 7, 9))
    for _ in range(3):
        roster.select([1, 3, 5, 7, 9])
    buffer, rounds = roster.selector.buffer, roster.selector.round
    roster.take(reports(4))
    assert roster.selector.clients == (1, 3, 5, 7, 9, 4)
    assert (roster.selector.buffer, roster.selector.round) == (buffer, rounds)


def test_nobody_is_registered_twice_and_arrays_stay_with_their_clients():
    roster = Roster(Remembering(2))
    roster.take(reports(1, 5, 9))
    roster.selector.kept[:] = [[1, 1], [5, 5], [9, 9]]
    roster.take(reports(3))
    assert roster.selector.registered == [[1, 5, 9], [3]]
    assert roster.selector.kept[:, 0].tolist() == [1, 5, 9, 0]
    again = Roster(Remembering(2))
    again.load_state_dict(roster.state_dict(), reports(1, 5, 9, 3), roster.selector.arrays())
    assert again.selector.kept.tolist() == roster.selector.kept.tolist()
    assert again.selector.clients == roster.selector.clients


def sized(client, total):
    counts = np.array([4.0, 3.0, 2.0, 1.0]) * total / 10
    return Report(client, counts, None)


def test_a_client_that_claims_more_than_ten_times_the_median_is_taken_for_that(caplog):
    roster = Roster(EntropySelector(2, seed=1), size_cap=10.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        roster.take([sized(0, 100), sized(1, 120), sized(2, 80), Report(3, np.full(4, 2.0**53), None), sized(4, 1050)])
    # The sizes are 80, 100, 120, 1050 and 2^55: the median is 120.
    np.testing.assert_allclose(roster.selector.sizes, [100, 120, 80, 1200, 1050])
    np.testing.assert_allclose(roster.selector.counts[3], [300] * 4)  # its shares of the classes are as claimed
    assert [line for line in caplog.messages if "client 3 claims" in line] != []
    roster.take([sized(5, 60), sized(6, 60)])  # 60, 60, 80, 100, 120, 1050, 2^55
    np.testing.assert_allclose(roster.selector.sizes, [100, 120, 80, 1000, 1000, 60, 60])
    roster.forget([5, 6, 2])  # 100, 120, 1050, 2^55: nobody but the liar is over 5850
    np.testing.assert_allclose(roster.selector.sizes, [100, 120, 5850, 1050])
    assert roster.size_of(4) == 1050
    again = Roster(EntropySelector(2, seed=1), size_cap=10.0)
    left = [sized(0, 100), sized(1, 120), Report(3, np.full(4, 2.0**53), None), sized(4, 1050)]
    again.load_state_dict(roster.state_dict(), left)
    assert (again.selector.counts == roster.selector.counts).all()


def test_without_a_cap_sizes_are_as_claimed():
    roster = Roster(EntropySelector(2, seed=1), size_cap=None)
    roster.take([sized(0, 100), sized(1, 120), Report(3, np.full(4, 2.0**53), None)])
    assert roster.selector.sizes.tolist() == [100, 120, 2.0**55]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_who_claims_everything_no_longer_decides_who_is_with_it(seed):
    """Beside counts of 2^53 those of honest clients vanish: whoever joins, the cohort looks even."""
    rng = np.random.default_rng(seed)
    true = np.stack([np.bincount(rng.choice(rng.choice(10, 2, replace=False), 50), minlength=10) for _ in range(40)])

    def evenness_of_the_others(cap):
        roster = Roster(EntropySelector(8, 0, seed=1), size_cap=cap)
        claims = [Report(k, row.astype(float), None) for k, row in enumerate(true)]
        claims[7] = Report(7, np.full(10, 2.0**53), None)
        roster.take(claims)
        cohorts = [set(roster.select(list(range(40))).clients) for _ in range(20)]
        return np.mean([entropy(true[list(cohort - {7})].sum(0)) for cohort in cohorts if 7 in cohort])

    assert evenness_of_the_others(10.0) > evenness_of_the_others(None) + 0.3


def test_new_counts_of_a_known_client_take_the_place_of_the_old():
    roster = Roster(EntropySelector(1, seed=0))
    roster.take(reports(0, 1))
    roster.take([Report(0, np.array([0.0, 0.0, 7.0, 0.0]), None), report(2, epsilon=0.5)])
    assert roster.selector.clients == (0, 1, 2)
    np.testing.assert_array_equal(roster.selector.counts[0], [0, 0, 7, 0])


def test_a_roster_goes_on_where_another_stood():
    whole = Roster(EntropySelector(2, buffer_size=6, seed=3))
    whole.take(reports(*known(5)))  # the buffer is at 3 of 6
    for _ in range(4):
        whole.select(known(5))
    other = Roster(EntropySelector(2, buffer_size=6, seed=3))
    other.load_state_dict(whole.state_dict(), reports(*known(5)))
    assert other.selector.buffer == whole.selector.buffer
    assert len(other.selector.buffer) == 3
    for number in (5, 8, 9):
        for roster in (whole, other):
            roster.take([r for r in reports(*known(number)) if r.client not in roster.selector.clients])
        assert whole.select(known(number)).clients == other.select(known(number)).clients
    with pytest.raises(InputError, match="buffer_size: 5, but the checkpoint was written with 6"):
        Roster(EntropySelector(2, buffer_size=5, seed=3)).load_state_dict(whole.state_dict(), reports(*known(9)))
    with pytest.raises(InputError, match="seed: 4, but the checkpoint was written with 3"):
        Roster(EntropySelector(2, buffer_size=6, seed=4)).load_state_dict(whole.state_dict(), reports(*known(9)))
