"""What a run's server believed, in a few figures: means over the rounds, and what it knew in the last one."""

from __future__ import annotations

from collections.abc import Sequence

from fedentopt.results.records import RoundRecord
from fedentopt.results.statistics import mean

LAST_KNOWN = ("estimate_error", "suspects", "honest_suspects", "suspicion_auc", "first_auc", "third_auc")
TRUST = ("believed_entropy", "liars_chosen", *LAST_KNOWN)


def trust(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Those of `TRUST` that the rounds have: the mean entropy believed, all choices of liars, and what was known last.
    Empty for a run without reason to doubt reports."""
    found: dict[str, float] = {}
    believed = mean([r.believed_entropy for r in records if r.believed_entropy is not None])
    if believed is not None:
        found["believed_entropy"] = believed
    chosen = [r.liars_chosen for r in records if r.liars_chosen is not None]
    if chosen:
        found["liars_chosen"] = sum(chosen)
    for name in LAST_KNOWN:
        known = [value for r in records if (value := getattr(r, name)) is not None]
        if known:
            found[name] = known[-1]
    return found
