"""How to carry a recommendation out: the command, a few lines of Python, the same for Flower.

The command makes the cohorts of the plan's first repetition; so do the lines of Python, one `select()` per round.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from fedentopt.plan.outcome import Federation, Outcome
from fedentopt.selection import EntropySelector, RandomSelector
from fedentopt.selection.trial import has_buffer
from fedentopt.settings import settings_of


def command(source: str, chosen: Outcome, *, rounds: int, seed: int, noisy: bool, drop: Sequence[str]) -> str:
    """The `fedentopt select` that makes these cohorts."""
    choice = chosen.choice
    place = f"./{source}" if source.startswith("-") else source  # else it would be read as an option
    words = ["fedentopt", "select", place, "--cohort", str(choice.cohort)]
    if choice.selector is not EntropySelector:
        words += ["--selector", choice.selector.name]
    if choice.buffer is not None:
        words += ["--buffer", str(choice.buffer)]
    for name, value in _set(chosen).items():
        words += ["--set", f"{name}={value}"]
    words += ["--rounds", str(rounds), "--seed", str(seed)]
    if choice.epsilon is not None:
        words += ["--epsilon", _exact(choice.epsilon)]
    words += ["--noisy"] if noisy else []
    for name in drop:
        words += ["--drop", name]
    return shlex.join(words)


def python(source: str, chosen: Outcome, *, seed: int, noisy: bool, drop: Sequence[str]) -> str:
    """Lines that end with a selector, ready for `selector.select()` in every round."""
    choice = chosen.choice
    reading = [f'"{source}"' if '"' not in source and "\\" not in source else repr(source)]
    reading += ["noisy=True"] if noisy else []
    reading += [f"drop={list(drop)!r}"] if drop else []
    made, imported = _constructor(chosen, seed)
    # One line for what the package itself exports.
    start = "from fedentopt import "
    lines = [f"{imported}, read_counts"] if imported.startswith(start) else [f"{start}read_counts", imported]
    if choice.epsilon is not None:
        lines.append("from fedentopt.selection.noise import keyed_laplace")
    lines += [f"table = read_counts({', '.join(reading)})", f"selector = {made}"]
    counts, marks = "table.counts", ["noisy=True"] if noisy or choice.epsilon is not None else []
    if choice.epsilon is not None:
        counts = f"keyed_laplace(table.counts, {_exact(choice.epsilon)}, table.clients, seed={seed})"
    lines.append(f"selector.register({', '.join([counts, *marks, 'ids=table.clients'])})")
    lines.append("cohort = selector.select()  # once per round")
    return "\n".join(lines)


def flower(federation: Federation, chosen: Outcome, seed: int) -> str:
    """The strategy for Flower's ServerApp, and the app's key for the noise where there is any."""
    choice = chosen.choice
    classes = len(federation.classes)
    if choice.selector is RandomSelector:
        least = f"min_train_nodes={choice.cohort}, min_available_nodes={len(federation.clients)}"
        share = choice.cohort / len(federation.clients)
        return f"from flwr.serverapp.strategy import FedAvg\nstrategy = FedAvg(fraction_train={share:.6g}, {least})"
    if choice.selector is EntropySelector:
        sizes = f"cohort_size={choice.cohort}, buffer_size={choice.buffer}, num_classes={classes}, seed={seed}"
        text = f"from fedentopt.flower import FedEntOpt\nstrategy = FedEntOpt({sizes})"
    else:
        made, imported = _constructor(chosen, seed, clients=str(len(federation.clients)))
        text = (
            f"from fedentopt.flower import FedEntOpt\n{imported}\nselector = {made}\n"
            f"strategy = FedEntOpt(cohort_size={choice.cohort}, num_classes={classes}, selector=selector)"
        )
    said = 'label-epsilon="none"'
    if choice.epsilon is not None:  # noise is drawn once, and kept in the node's file
        said = f'label-epsilon={_exact(choice.epsilon)} label-report-file="/var/lib/fl/report.json"'
    return f"{text}\n# node config of every client: {said}"


def _constructor(chosen: Outcome, seed: int, clients: str = "len(table.clients)") -> tuple[str, str]:
    """The call that makes the selector, and the import it needs."""
    choice = chosen.choice
    if choice.selector is EntropySelector:
        made = f"EntropySelector({choice.cohort}, buffer_size={choice.buffer}, seed={seed})"
        return made, "from fedentopt import EntropySelector"
    if choice.selector is RandomSelector:
        return f"RandomSelector({choice.cohort}, seed={seed})", "from fedentopt import RandomSelector"
    settings = [f"{name}={value!r}" for name, value in _set(chosen).items()]
    settings += [f'buffer="{choice.buffer}"'] if has_buffer(choice.selector) else []
    words = ", ".join([f"cohort_size={choice.cohort}", f"clients={clients}", f"seed={seed}", *settings])
    return f'SELECTORS.get("{choice.selector.name}").for_run({words})', "from fedentopt.selection import SELECTORS"


def _set(chosen: Outcome) -> dict[str, Any]:
    """The settings that are not at their defaults."""
    declared = settings_of(chosen.choice.selector)
    return {name: value for name, value in chosen.settings.items() if value != declared[name].default}


def _exact(number: float) -> str:
    """The shortest text that is this number: another budget, however near, is other noise."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)
