"""What a selector asks of a client beside training, and whose idea the selector is; both from its declarations."""

from __future__ import annotations

from dataclasses import dataclass

from fedentopt.selection import SELECTORS as REGISTRY

RANDOM, OURS = "random", "fedentopt"
MADE_HERE = ("fedentopt-swap", "cycle", "clustered-label", "inferred")
"""Selectors that nobody else has published; FedEntOpt is the paper's."""


@dataclass(frozen=True)
class Ask:
    """What a selector asks of a client beside training: how much of a burden it is (a place in `KINDS`), in words, in
    bytes."""

    burden: int
    words: str
    size: str


KINDS = (
    "nothing", "its size, once", "its label counts, once", "a loss, each time it trains", "a loss, on request",
    "its own update, in the clear",
)  # fmt: skip
"""What is asked, from little to much: the last forbids secure aggregation, which hides who sent what."""
IN_SHORT = ("nothing", "size", "label counts", "loss", "loss, asked", "update")
"""The same for columns that have to be narrow."""


def ask(method: str) -> Ask:
    """What the selector of that name asks for, from its declarations."""
    cls = REGISTRY.get(method)
    sizes, counts = bool(getattr(cls, "sizes_only", False)), cls.reads_label_counts
    told: list[tuple[str, str]] = []
    if counts:
        told.append(("its number of samples, once", "4") if sizes else ("its label counts, once", "4 C"))
    burden = 0 if not counts else 1 if sizes else 2
    for need, level, words, size in (
        ("loss", 3, "its training loss (mean and root mean square), each time it trains", "8 per training"),
        ("candidate_loss", 4, "the loss of the current model, whenever asked", "4 and a model, per question"),
        ("head", 5, "the change of its last layer, in the clear", "in its model"),
        ("update", 5, "its whole update, in the clear", "in its model"),
    ):
        if need in cls.needs:
            burden = max(burden, level)
            told.append((words, size))
    if cls(1).census() is not None:
        words = "its number of samples and the change of its last bias in a census, once, before round 1"
        told.append((words, "4 + 4 C and a model, once"))
    if "seconds" in cls.needs:
        told.append(("how long it trained", "seen by the server"))
    words = "; ".join(text for text, _ in told) or "nothing"
    return Ask(burden, words, "; ".join(size for _, size in told) or "0")
