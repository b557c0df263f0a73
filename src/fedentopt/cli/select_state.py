"""The sizes and the state file of `fedentopt select`.

Cohort and buffer are numbers of clients or per cents of all of them; the file says where a sequence of rounds stood,
and what it was a sequence of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedentopt.cli.console import note
from fedentopt.errors import InputError
from fedentopt.files import written_aside
from fedentopt.selection import Selector
from fedentopt.selection.measures import selection_entropy
from fedentopt.selection.trial import Trial
from fedentopt.settings import amount

_SWEEP_COHORTS = "5%,10%,20%,40%"
_SWEEP_BUFFERS = "0%,25%,50%,75%"


def cohort_size(text: str | None, clients: int) -> int:
    """Clients per round; 10 % where nothing is said, but at least one."""
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
    least = 1 if cohorts is None else 0  # 5 % of two clients is nobody, which is not what the default means
    sizes = sorted({max(amount(text, clients, "--cohort"), least) for text in (cohorts or _SWEEP_COHORTS).split(",")})
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


_FORMAT = "fedentopt select 1"
SIZES = ("cohort", "buffer")  # these may be rules, and then follow the number of clients
NOTED = ("seed", "rules", "noise", "settings")  # kept in the file, and compared by those who use them


def read_state(path: Path) -> dict[str, Any] | None:
    """What the file holds, or None where there is no such file yet; anything but a state file is refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; accepted: a file written by --state, or one that does not exist") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, or JSON nested deeper than any state
        raise InputError(f"{path}: {error}; accepted: a file written by --state") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InputError(f"{path}: not a state of fedentopt select; accepted: a file written by --state")
    if not isinstance(content.get("state"), dict) or not isinstance(content.get("about"), dict):
        raise InputError(f"{path}: 'state' or 'about' is missing; accepted: a file written by --state")
    return content


def continue_from(path: Path, content: Mapping[str, Any], selector: Selector, about: Mapping[str, Any]) -> None:
    """Put the selector where the state stood; refused unless everything the state is about is the same now.

    Clients may have joined or left meanwhile. Those that left are forgotten, in the buffer with a note, unless none of
    the clients is known to the state: then it is of another federation. A size by the same rule as before, the default
    or the same per cent, follows the number of clients, with a note.
    """
    state = dict(content["state"])
    gone = _who_left(path, content, selector)
    for key, value in about.items():
        kept = content["about"].get(key)
        if key in NOTED or kept == value:
            continue
        if key not in SIZES:
            raise InputError(f"{path}: the state is of {key} {_short(kept)}; accepted: {_short(value)}, as given now")
        if not _same_rule(content["about"], about, key):
            way_on = f"; --{key} {kept} goes on with it" if isinstance(kept, int) else ""
            raise InputError(
                f"{path}: the state is of {key} {_short(kept)}; accepted: {_short(value)}, as given now{way_on}"
            )
        note(f"{path}: {key} of {value}, no longer {kept}: there are {len(selector.clients)} clients now")
        state[f"{key}_size"] = value
    if isinstance(state.get("buffer"), list):
        state["buffer"] = _still_kept_out(path, content, selector, state["buffer"])
        if content["about"].get("buffer") != about["buffer"]:  # one that has shrunk lets go of the oldest
            state["buffer"] = state["buffer"][max(len(state["buffer"]) - about["buffer"], 0) :]
    try:
        selector.load_state_dict(state)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    selector.forget_clients(gone)


class _NotPrinted(Exception):
    """An error of standard output, which the file that is being written must not take for its own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def write_state(
    path: Path | None, selector: Selector, about: Mapping[str, Any], past: Mapping[str, History]
) -> Iterator[None]:
    """Write the state aside, and put it in the place of the file, whole, once the block has printed the cohorts.

    A state that moved on without its cohorts having been seen would lose them: no later call gives them again. If they
    are printed and the file then cannot be put in place, the call fails, and the next one gives the same cohorts. So a
    disk without room for the state is found before anything is printed, and an output that nobody reads, or that has
    no room, leaves the file as it was. The lock of the state is held meanwhile, also while a pager shows the cohorts.
    """
    if path is None:
        yield
        return
    content: dict[str, Any] = {"format": _FORMAT, "about": dict(about), "state": selector.state_dict()}
    content["history"] = {name: asdict(history) for name, history in past.items() if history.rounds}
    content["clients"] = list(selector.clients)  # tells clients that left from a file of others
    try:
        with written_aside(path) as file:
            file.write((json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())
            file.flush()
            try:
                yield
            except OSError as error:
                raise _NotPrinted(error) from error
    except _NotPrinted as stopped:
        raise stopped.error from None


@dataclass
class History:
    """What a sequence of rounds came to, over all calls that share a state: `first` is its first round.

    `times` says how often each client was selected; those that left stay in it and count again if they come back.
    """

    first: int = 1
    rounds: int = 0
    entropy: float = 0.0
    worst: float = math.inf
    covered: int = 0
    divergence: float | None = None
    worst_divergence: float | None = None
    times: dict[str, int] = field(default_factory=dict)

    def add(self, trial: Trial, held: int, clients: Sequence[str]) -> None:
        """Count these rounds in; `held` classes are held by anybody."""
        for result in trial.rounds:
            self.rounds += 1
            self.entropy += result.entropy
            self.worst = min(self.worst, result.entropy)
            self.covered += result.classes_covered >= held
            if result.divergence is not None:
                self.divergence = (self.divergence or 0.0) + result.divergence
                self.worst_divergence = max(self.worst_divergence or 0.0, result.divergence)
        for client, times in zip(clients, trial.times, strict=True):
            if times:
                self.times[client] = self.times.get(client, 0) + times

    def figures(self, clients: Sequence[str]) -> dict[str, Any]:
        """Means over all rounds so far; participation is that of the clients there are now."""
        times = [self.times.get(client, 0) for client in clients]
        divergence = None if self.divergence is None else self.divergence / self.rounds
        found = {
            "first_round": self.first,
            "last_round": self.first + self.rounds - 1,
            "mean_entropy": self.entropy / self.rounds,
            "worst_entropy": self.worst,
            "coverage": self.covered / self.rounds,
            "mean_divergence": divergence,
            "worst_divergence": self.worst_divergence,
            "selection_entropy": selection_entropy(times),
            "never_selected": times.count(0),
        }
        return {key: value for key, value in found.items() if value is not None}


def histories(path: Path | None, content: Mapping[str, Any] | None, start: int) -> dict[str, History]:
    """What the rounds before came to, of the selector and of random selection beside it.

    States that are older than this know nothing of their past: the count then begins with the next round.
    """
    kept = (content or {}).get("history", {})
    return {name: _history(path, name, kept, start) for name in ("chosen", "random")}


def _history(path: Path | None, name: str, kept: object, start: int) -> History:
    entry = kept.get(name) if isinstance(kept, Mapping) else None
    if entry is None:
        return History(first=start + 1)
    try:
        history = History(**entry)
        sound = all(
            isinstance(n, int) and 0 < n < 2**53 for n in (history.first, history.rounds, *history.times.values())
        )
        sound &= history.first + history.rounds == start + 1
        sound &= all(math.isfinite(value) for value in (history.entropy, history.worst, history.covered))
        sound &= all(v is None or math.isfinite(v) for v in (history.divergence, history.worst_divergence))
        sound &= (history.divergence is None) == (history.worst_divergence is None)
    except (TypeError, AttributeError) as error:
        raise InputError(f"{path}: history: {error}; accepted: a file written by --state") from error
    if not sound:
        raise InputError(f"{path}: history of {name}: does not fit the state; accepted: a file written by --state")
    return history


def _same_rule(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Whether the size follows the number of clients, and does so as before; states may be older than the rules."""
    rule = now["rules"].get(key)
    kept = before.get("rules")
    return rule is not None and isinstance(kept, Mapping) and kept.get(key) == rule


def _who_left(path: Path, content: Mapping[str, Any], selector: Selector) -> set[str]:
    """Clients that the state knows and the counts do not; refused where that is all of them.

    States of before say nothing, unless clients were in a buffer; nobody is then known to have left.
    """
    known = content.get("clients")
    listed = [client for client in known if isinstance(client, str)] if isinstance(known, list) else []
    gone = set(listed).difference(client for client in selector.clients if isinstance(client, str))
    if listed and len(gone) == len(set(listed)):
        raise InputError(f"{path}: the state is of clients {_short(listed)}; accepted: counts of some of them")
    return gone


def _still_kept_out(
    path: Path, content: Mapping[str, Any], selector: Selector, buffer: Sequence[object]
) -> list[object]:
    """The buffer without clients that left; as it is, to be refused, where the state knows none of those here."""
    here = set(selector.clients)
    still = [client for client in buffer if not isinstance(client, str) or client in here]
    known = content.get("clients")
    others = isinstance(known, list) and any(isinstance(client, str) and client in here for client in known)
    if len(still) == len(buffer) or not (still or others):
        return list(buffer)
    note(f"{path}: clients in the buffer that are not in the counts any more: {len(buffer) - len(still)}")
    return still


def _short(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 6:
        return f"{[*value[:3]]!r} and {len(value) - 3} more"
    return "none" if value is None else repr(value)
