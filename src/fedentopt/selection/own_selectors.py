"""A selector of a user's own beside the contract: what its author may write, checked before anything runs."""

from __future__ import annotations

from fedentopt.own_hooks import check_hooks
from fedentopt.selection.selector import Selector

DECLARED = (
    "needs", "cosines_suffice", "reads_label_counts", "labels_from_heads", "needs_plain_logits",
    "sizes_only", "own_weights", "smaller_cohorts", "largest", "all_pairs", "run_settings", "stream",
)  # fmt: skip
WRITTEN = (
    "for_run", "leaves_client", "check_run", "pick", "census", "estimate", "times_seen", "candidates", "observe",
    "expect", "forget_clients", "memory", "remember", "arrays", "load_arrays",
)  # fmt: skip
"""Values and methods of `Selector` that authors write; all else there is for reading, or for others to call."""


def check_own_selector(made: Selector, name: str) -> None:
    """Refuse a selector with a misspelt hook, or one that cannot be called as it is; `name` is what it goes by."""
    check_hooks("selector", name, made, Selector, (*DECLARED, *WRITTEN))
