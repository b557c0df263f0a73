"""Clients that fail sit out for 1, 2, 4, ... rounds."""

from __future__ import annotations

from fedentopt.server.backoff import Backoff


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
