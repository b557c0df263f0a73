"""Records of rounds on disk, where the reasons of thousands of suspects are not written once per round.

A record says why each of today's suspects is one. Most of it stands in the record before in the same words, so

* a checkpoint, which holds the records of all rounds and is written after each, keeps what changed (`packed`), and
  gives back the records as they were (`unpacked`);
* a line of the metrics file repeats the reasons of at most `MOST_REPEATED` suspects. Where there are more it has those
  that are new or have changed, and names the other clients in `suspicions_as_before`: their reasons stand in the last
  line above that has them (`line`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedentopt.flower.report import id_order

MOST_REPEATED = 100
CHANGES = "changes"

Record = Mapping[str, Any]


def packed(records: Mapping[int, Record], number: int) -> dict[str, Any]:
    """The record of a round as a checkpoint keeps it: of the suspects what changed since the round before.

    Of `suspects` those that have come or gone, of `suspicions` the new ones, with None for those that are gone.
    """
    record, before = records[number], records.get(number - 1, {})
    suspects, reasons = record.get("suspects", []), record.get("suspicions", {})
    named, known = before.get("suspects", []), before.get("suspicions", {})
    turned = {*suspects} ^ {*named}
    told = {client: why for client, why in reasons.items() if known.get(client) != why}
    gone = {client: None for client in known if client not in reasons}
    changes = {
        "suspects": [client for client in [*suspects, *named] if client in turned],
        "suspicions": told | gone,
    }
    return {**record, "suspects": None, "suspicions": None, CHANGES: changes}


def unpacked(kept: Mapping[int, Record]) -> dict[int, dict[str, Any]]:
    """Records by their rounds as they were before `packed`; those of earlier versions are whole."""
    found: dict[int, dict[str, Any]] = {}
    for number in sorted(kept):
        record, before = dict(kept[number]), found.get(number - 1, {})
        changes = record.pop(CHANGES, None)
        if changes is not None:
            suspects = sorted({*before.get("suspects", [])} ^ {*changes["suspects"]}, key=id_order)
            reasons = {**before.get("suspicions", {}), **changes["suspicions"]}
            told = {name: reasons.get(name) for name in map(str, suspects)}
            record["suspects"] = suspects
            record["suspicions"] = {name: why for name, why in told.items() if why is not None}
        found[number] = record
    return found


def line(record: Record, before: Record) -> dict[str, Any]:
    """A record as the metrics file has it, below the one before."""
    reasons, known = record.get("suspicions", {}), before.get("suspicions", {})
    same = [client for client, why in reasons.items() if known.get(client) == why]
    if len(reasons) <= MOST_REPEATED or not same:
        return dict(record)
    new = {client: why for client, why in reasons.items() if known.get(client) != why}
    return {**record, "suspicions": new, "suspicions_as_before": same}
