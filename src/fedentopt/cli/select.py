"""`fedentopt select`: cohorts for anyone's label counts; needs neither torch nor Flower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedentopt.cli.console import err, note, print_json
from fedentopt.cli.counts_file import CountsFile, read_counts, read_target
from fedentopt.cli.select_show import show_sweep, show_trial, sweep_json, trial_json
from fedentopt.cli.select_state import (
    buffer_size,
    cohort_size,
    continue_from,
    read_state,
    size_rule,
    sweep_sizes,
    write_state,
)
from fedentopt.errors import InputError
from fedentopt.files import locked_state
from fedentopt.privacy import check_epsilon, laplace_noise
from fedentopt.selection import SELECTORS, EntropySelector, Selector
from fedentopt.selection.trial import sweep as try_settings
from fedentopt.selection.trial import try_rounds

_NOISE = 0x4E5A  # keeps these draws apart from others made with the same seed


COUNTS_ONLY = tuple(sorted((cls.name for cls in SELECTORS if not cls.needs), key=lambda name: name != "fedentopt"))
"""Selectors that need label counts and nothing of a training run."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("select")(select)


def select(
    counts: Annotated[Path, typer.Argument(help="CSV file of label counts: client,<class>,..., one row a client.")],
    cohort: Annotated[
        str | None, typer.Option(help="Clients a round, M: a number, or a per cent of all. Default: 10%.")
    ] = None,
    buffer: Annotated[
        str | None,
        typer.Option(
            help="FedEntOpt's buffer, Q: how many recent clients are kept out, a number or a per cent of all, at most "
            "all but one cohort. Default: 50%, or fewer where cohorts leave fewer."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to select.")] = 100,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of everything drawn. Default: that of --state, else 0.")
    ] = None,
    selector: Annotated[str, typer.Option(help="fedentopt, random or kl.")] = "fedentopt",
    epsilon: Annotated[
        float | None, typer.Option(help="A trial of privacy: add Laplace noise of scale 1/epsilon to the counts first.")
    ] = None,
    noisy: Annotated[
        bool, typer.Option("--noisy", help="The file holds noisy counts: those below 0 are read as 0.")
    ] = False,
    target: Annotated[
        Path | None, typer.Option(help="CSV file class,weight: the label distribution to aim for, if not uniform.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Go on from this file where it exists, and leave the new state in it.")
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="Compare sizes instead; --cohort and --buffer may then be lists such as 5,10,20%."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Select balanced cohorts, round after round, from the CSV file COUNTS: header client,CLASS,CLASS,..., one row a
    client with how many samples of each class it holds.
    """
    _check_options(selector, epsilon, noisy, target, state, sweep)
    table = read_counts(counts, noisy)
    prior = None if target is None else read_target(target, table.classes)
    clients = len(table.clients)
    if sweep:
        pairs = sweep_sizes(cohort, buffer, clients)
        reported = _reported(table, epsilon, seed or 0)
        with _progress(len(pairs) * rounds) as advance:
            rows = try_settings(
                table.counts, pairs, rounds, seed or 0, reported=reported, noisy=noisy, target=prior, progress=advance
            )
        if json:
            print_json(sweep_json(rows))
        else:
            show_sweep(rows, table, rounds)
        return

    size = cohort_size(cohort, clients)
    about: dict[str, Any] = {"classes": list(table.classes), "selector": selector, "cohort": size, "buffer": None}
    about |= {"epsilon": epsilon, "noisy": noisy, "target": None if prior is None else prior.tolist()}
    about["rules"] = {"cohort": size_rule(cohort)}
    if selector == "fedentopt":
        about["buffer"] = buffer_size(buffer, size, clients)
        about["rules"]["buffer"] = size_rule(buffer)
    elif buffer is not None:
        note(f"--buffer: {selector} selection has none, so {buffer} is not used")
    with locked_state(state):
        before = None if state is None else read_state(state)
        seed = about["seed"] = _seed(seed, before, state)
        chosen = _selector(selector, size, about["buffer"], seed, prior)
        reported = _reported(table, epsilon, seed)
        known = table.counts if reported is None else reported
        chosen.register(known, noisy=noisy or reported is not None, ids=table.clients)
        if state is not None and before is not None:
            continue_from(state, before, chosen, about)
        with _progress(rounds) as advance:
            trial = try_rounds(chosen, rounds, None if reported is None else table.counts, advance)
        if state is not None:
            write_state(state, chosen, about)
    if json:
        print_json(trial_json(trial))
    else:
        show_trial(trial, table, about, seed)


def _check_options(
    selector: str, epsilon: float | None, noisy: bool, target: Path | None, state: Path | None, sweep: bool
) -> None:
    if selector not in COUNTS_ONLY:
        raise InputError(f"--selector: {selector!r} is unknown; accepted: {', '.join(COUNTS_ONLY)}")
    if epsilon is not None:
        check_epsilon(epsilon)
    if epsilon is not None and noisy:
        raise InputError(
            "--epsilon: adds noise to true counts, but --noisy says the file holds noisy ones; accepted: one"
        )
    if target is not None and selector != "fedentopt":
        raise InputError(f"--target: {selector} selection does not aim for any; accepted: --selector fedentopt")
    if sweep and state is not None:
        raise InputError("--sweep: starts every setting afresh; accepted: without --state")
    if sweep and selector != "fedentopt":
        raise InputError(f"--sweep: {selector} selection has no buffer to compare; accepted: --selector fedentopt")


def _selector(name: str, size: int, buffer: int | None, seed: int, target: np.ndarray | None) -> Selector:
    if name == EntropySelector.name:
        return EntropySelector(size, buffer_size=buffer or 0, seed=seed, target=target)
    return SELECTORS.get(name)(size, seed=seed)


def _reported(table: CountsFile, epsilon: float | None, seed: int) -> np.ndarray | None:
    """What clients would report with noise, or None without: the same for the same seed, call after call."""
    if epsilon is None:
        return None
    return laplace_noise(table.counts, epsilon, np.random.default_rng([seed, _NOISE]))


def _seed(given: int | None, before: dict[str, Any] | None, path: Path | None) -> int:
    """The seed given, else that of the state, else 0; two that differ are refused."""
    if before is None:
        return given or 0
    # The selector keeps it, and the file notes it beside; older states have one of the two, or neither.
    noted = [source["seed"] for source in (before["state"], before["about"]) if source.get("seed") is not None]
    for kept in noted:
        if isinstance(kept, bool) or not isinstance(kept, int) or kept < 0:
            raise InputError(f"{path}: seed is {kept!r}; accepted: a whole number, at least 0")
    if not noted:
        return given or 0
    kept = int(noted[0])
    if given not in (None, kept):
        raise InputError(f"{path}: the state is of seed {kept}; accepted: --seed {kept}, or none")
    return kept


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on standard error and only for people."""
    from rich.progress import Progress

    console = err()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("selecting", total=steps)
        yield lambda: bar.advance(task)
