"""The clients a selector knows, as every framework's server keeps them."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt import EntropySelector, RandomSelector
from fedentopt.errors import InputError
from fedentopt.selection import Selector
from fedentopt.server.members import Members
from fedentopt.server.report import Report, check_epsilon


def members(selector: Selector, sizes: dict[str, float], size_cap: float | None = None) -> Members[Report]:
    """Clients with so many samples each, three quarters of them of one class."""
    made: Members[Report] = Members(selector, size_cap)
    for client, size in sizes.items():
        made.reports[client] = Report(client, np.array([0.75, 0.25]) * size, None)
        made.note_size(client, made.reports[client].counts)
    made.register(made.reports.values())
    return made


@pytest.mark.parametrize("no_limit", [None, 0])
def test_who_claims_too_much_is_taken_for_the_cap_and_back_when_it_no_longer_does(no_limit: float | None) -> None:
    sizes = {"a": 8.0, "b": 12.0, "c": 16.0, "d": 400.0}
    made = members(RandomSelector(2), sizes, size_cap=3.0)
    assert made.cap_sizes() == ["d"]  # the median is 14, three times that 42
    assert made.selector.counts.tolist() == [[6, 2], [9, 3], [12, 4], [31.5, 10.5]]
    assert (made.size_of("c"), made.size_of("d")) == (16, 42)
    assert made.cap_sizes() == [], "told once"
    made.reports["a"] = Report("a", np.array([300.0, 100.0]), None)
    made.renew([made.reports["a"]])
    made.note_size("a", made.reports["a"].counts)
    assert made.cap_sizes() == []  # 12, 16, 400, 400: the median is 208
    assert made.selector.sizes.tolist() == [400, 12, 16, 400]
    free = members(RandomSelector(2), sizes, size_cap=no_limit)
    assert free.cap_sizes() == []
    assert free.selector.sizes.tolist() == [8, 12, 16, 400]


def test_the_buffer_fits_those_known() -> None:
    made = members(EntropySelector(2, buffer_size=3), {"a": 8, "b": 8, "c": 8})
    assert (made.fit_buffer(), made.fit_buffer()) == (1, None), "K - M, said once"
    assert made.state_dict()["buffer_size"] == 3
    assert made.state_dict()["buffer_size_now"] == 1
    assert members(RandomSelector(2), {"a": 8}).fit_buffer() is None


def test_a_state_of_other_settings_is_refused_by_the_first_that_differs() -> None:
    saved = members(EntropySelector(2, buffer_size=3, seed=5), {"a": 8}).state_dict()
    here = members(EntropySelector(2, buffer_size=3, seed=6), {"a": 8})
    here.check_saved(saved, ("buffer_size",), ("cohort_size",), "state")
    with pytest.raises(InputError, match="seed: 6, but the state was written with 5; accepted: the same"):
        here.check_saved(saved, ("buffer_size",), ("cohort_size", "seed"), "state")


@pytest.mark.parametrize("bad", [0, -1.0, float("inf"), float("nan"), True, "1", [1.0]])
def test_an_epsilon_is_a_number_above_0(bad: object) -> None:
    assert check_epsilon("client 3", None) is None
    assert check_epsilon("client 3", 2) == 2.0
    with pytest.raises(InputError, match=r"client 3: epsilon .* is not a number above 0"):
        check_epsilon("client 3", bad)
