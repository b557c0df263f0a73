"""Cohort and buffer sizes as `fedentopt select` takes them: numbers of clients or per cents of all of them."""

from __future__ import annotations

from fedentopt.errors import InputError
from fedentopt.simulation.config import amount

_SWEEP_COHORTS = "5%,10%,20%,40%"
_SWEEP_BUFFERS = "0%,25%,50%,75%"


def cohort_size(text: str | None, clients: int) -> int:
    """Clients a round; 10 % where nothing is said, but at least one."""
    if text is None:
        return max(clients // 10, 1)
    size = amount(text, clients, "--cohort")
    if not 1 <= size <= clients:
        raise InputError(f"--cohort: {text!r} gives {size} of {clients} clients; accepted: 1 to {clients}")
    return size


def buffer_size(text: str | None, cohort: int, clients: int) -> int:
    """Clients kept out; half of all where nothing is said, or fewer where cohorts leave fewer."""
    most = clients - cohort
    if text is None:
        return min(clients // 2, most)
    size = amount(text, clients, "--buffer")
    if size > most:
        raise InputError(
            f"--buffer: {text!r} gives {size} clients; accepted: at most {most}, with {clients} clients and "
            f"cohorts of {cohort}"
        )
    return size


def size_rule(text: str | None) -> str | None:
    """What a size follows as clients come and go: "default", or the per cent given; None for a number, which stays."""
    if text is None:
        return "default"
    raw = text.strip()
    return f"{float(raw[:-1])}%" if raw.endswith("%") else None


def sweep_sizes(cohorts: str | None, buffers: str | None, clients: int) -> list[tuple[int, int]]:
    """All pairs of the sizes listed, smallest first, leaving out buffers that a cohort has no room for."""
    sizes = sorted({amount(text, clients, "--cohort") for text in (cohorts or _SWEEP_COHORTS).split(",")})
    kept_out = sorted({amount(text, clients, "--buffer") for text in (buffers or _SWEEP_BUFFERS).split(",")})
    if cohorts is not None:
        for text in cohorts.split(","):
            cohort_size(text, clients)
    pairs = [(m, q) for m in sizes for q in kept_out if m > 0 and m + q <= clients]
    if not pairs:
        raise InputError(
            f"--sweep: no buffer of {buffers or _SWEEP_BUFFERS} leaves room for a cohort of "
            f"{cohorts or _SWEEP_COHORTS} among {clients} clients; accepted: together at most {clients}"
        )
    return pairs
