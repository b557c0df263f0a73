"""Clients that fail sit out for 1, 2, 4, ... rounds."""

from __future__ import annotations

import json

import pytest

from fedentopt.server.backoff import Backoff


def pauses_of(backoff: Backoff, outcomes: str) -> list[int]:
    """What a client sits out after each failure (x) among its tries, each made as soon as its pause is over."""
    now, pauses = 1, []
    for outcome in outcomes:
        now += 1
        if outcome == "x":
            pauses.append(backoff.failed("a", now))
            now += pauses[-1]
        else:
            backoff.answered("a")
        assert backoff.over("a", now + 1)
    return pauses


def test_pauses_double_up_to_64_rounds_and_end_with_an_answer() -> None:
    backoff = Backoff()
    rounds, pauses = 1, []
    for _ in range(9):
        pauses.append(backoff.failed("a", rounds))
        assert not backoff.over("a", rounds + pauses[-1])
        assert backoff.over("a", rounds + pauses[-1] + 1)
        rounds += pauses[-1] + 1
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    backoff.answered("a")
    assert not backoff.has_failed("a")
    assert backoff.failed("a", rounds) == 1


def test_failing_again_in_the_same_round_counts_once() -> None:
    backoff = Backoff()
    assert [backoff.failed(7, 3) for _ in range(5)] == [1] * 5
    assert backoff.state_dict() == [[7, 1, 4]]
    assert [backoff.failed(7, 5) for _ in range(5)] == [2] * 5
    assert backoff.state_dict() == [[7, 2, 7]]


def test_those_whose_pause_ends_first_come_back_where_too_few_are_left() -> None:
    backoff = Backoff()
    backoff.load_state_dict([["b", 3, 9], ["c", 1, 6]])
    assert backoff.rested(["a", "b", "c", "d"], 6, least=2) == ["a", "d"]
    assert backoff.rested(["a", "b", "c", "d"], 6, least=3) == ["a", "c", "d"]
    assert backoff.rested(["a", "b", "c", "d"], 7, least=2) == ["a", "c", "d"]
    backoff.forget(["b", "x"])
    assert backoff.rested(["a", "b", "c", "d"], 6, least=2) == ["a", "b", "d"]


def test_who_answers_and_fails_in_turn_sits_out_longer_and_longer() -> None:
    assert pauses_of(Backoff(), "x." * 14) == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64]
    assert pauses_of(Backoff(), "x.." * 10) == [1, 1, 1, 1, 2, 2, 2, 2, 4, 4]


def test_honest_clients_are_soon_what_they_were() -> None:
    assert pauses_of(Backoff(), "x..." * 20) == [1] * 20  # every fourth try fails
    assert pauses_of(Backoff(), "xxxxxxxxx.x") == [1, 2, 4, 8, 16, 32, 64, 64, 64, 1]  # one outage, however long
    often = Backoff()
    pauses_of(often, "x." * 100)
    assert pauses_of(often, "." * 21 + "x") == [1]  # 24 owed at most
    assert pauses_of(often, "." * 6) == []
    assert often.state_dict() == []


@pytest.mark.parametrize("outcomes", ["x.x.x.x", "x.x.x.x."])
def test_debts_outlive_a_stop_and_states_without_any_are_read(outcomes: str) -> None:
    before, after = Backoff(), Backoff()
    pauses_of(before, outcomes)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    assert pauses_of(after, "x.x") == pauses_of(before, "x.x")
    after.load_state_dict([["a", 3, 9]])
    assert after.failed("a", 10) == 8
    assert after.has_failed("a")


def test_what_is_owed_is_no_pause() -> None:
    backoff = Backoff()
    backoff.failed("a", 1)
    backoff.answered("a")
    assert not backoff.has_failed("a")
    assert backoff.over("a", 0)
    assert backoff.rested(["a", "b"], 1, least=0) == ["a", "b"]
    backoff.forget(["a"])
    assert backoff.state_dict() == []
