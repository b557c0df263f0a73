"""Records of rounds on disk: what a checkpoint and the lines of a file leave out can be told from what they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from fedentopt.flower.kept_records import MOST_REPEATED, line, packed, unpacked
from fedentopt.flower.report import id_order

IDS = st.one_of(st.integers(0, 5), st.sampled_from(["oslo", "node-7", "changes", "None"]))
ROUNDS = st.lists(st.dictionaries(IDS, st.sampled_from(["", "a", "b"])), max_size=8)


def records_of(rounds: list[dict[Any, str]]) -> dict[int, dict[str, Any]]:
    """Suspects with their reasons; no reason where it is empty, as for those that claim too many samples."""
    return {
        number: {
            "round": number,
            "suspects": sorted(told, key=id_order),
            "suspicions": {str(client): told[client] for client in sorted(told, key=id_order) if told[client]},
            "online": 3,
        }
        for number, told in enumerate(rounds, start=1)
    }


@given(ROUNDS)
def test_a_checkpoint_gives_back_every_record_as_it_was(rounds: list[dict[Any, str]]) -> None:
    records = records_of(rounds)
    kept = json.loads(json.dumps([packed(records, number) for number in records]))
    again = unpacked(dict(enumerate(kept, start=1)))
    assert json.dumps(again) == json.dumps(records)  # in the same order, too
    assert json.dumps(unpacked(records)) == json.dumps(records)  # whole, as earlier versions wrote them


@given(ROUNDS, st.integers(0, 3))
def test_the_lines_of_a_file_tell_every_reason(rounds: list[dict[Any, str]], most: int) -> None:
    told: dict[str, str] = {}
    before: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedentopt.flower.kept_records.MOST_REPEATED", most)
        for record in records_of(rounds).values():
            written = line(record, before)
            told |= written["suspicions"]
            names = [*written["suspicions"], *written.get("suspicions_as_before", [])]
            assert {name: told[name] for name in names} == record["suspicions"]
            assert "suspicions_as_before" not in written or len(record["suspicions"]) > most
            before = record


def test_up_to_100_reasons_are_in_every_line() -> None:
    assert MOST_REPEATED == 100  # as the guide says
    for many in (100, 101):
        first, second = records_of([dict.fromkeys(range(many), "why")] * 2).values()
        assert line(first, {}) == first
        assert (line(second, first) == second) == (many == 100)
