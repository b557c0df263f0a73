"""Where single clients' updates are hidden, labels are not read from them.

Flower's wrappers for differential privacy promise that a client shows in what leaves the server through noise alone.
Picks and log lines that come from single updates would tell what that noise covers, also where the wrapper clips on the
server and the updates are there to be read. Where clients clip, their changes do not fit their steps besides.

A wrapper of one's own that hides updates (by masks that cancel in the sum, for instance) says so by an attribute
`hides_updates = True`. Flower's SecAgg and SecAgg+ workflows belong to its older programming interface, in which no
strategy of this package runs.

What a server cannot see is what a ClientApp's mods do: `LocalDpMod` adds noise to the last layer as to all others, and
clipping mods shrink its change. Estimates are then drawn to noise or to even, and reports are suspected wrongly or not
at all: audit and `inferred` are not for such apps.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from fedentopt.errors import InputError

PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def check_wrappers(wrappers: Sequence[Strategy], reader: str) -> None:
    """Refuse to read labels from updates that one of these wrappers is there to hide."""
    for wrapper in wrappers:
        if isinstance(wrapper, PRIVATE) or getattr(wrapper, "hides_updates", False):
            raise InputError(
                f"{reader}: reads labels from single clients' updates, which {type(wrapper).__name__} is there to "
                "hide; accepted: no such wrapper, or no audit and a selector that learns nothing from updates"
            )
