"""`fedentopt select`: cohorts for anyone's label counts; needs neither torch nor Flower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedentopt.cli.console import flush_out, note, print_json, progress
from fedentopt.cli.select_show import show_sweep, show_trial, sweep_json, trial_json
from fedentopt.cli.select_state import (
    buffer_size,
    cohort_size,
    continue_from,
    histories,
    read_state,
    size_rule,
    sweep_sizes,
    write_state,
)
from fedentopt.errors import InputError
from fedentopt.files import locked_state
from fedentopt.privacy import check_epsilon, laplace_noise
from fedentopt.selection import SELECTORS, EntropySelector, RandomSelector, Selector
from fedentopt.selection.feedback import LEAVES
from fedentopt.selection.noise import keyed_laplace
from fedentopt.selection.trial import (
    SweepRow,
    Trial,
    classes_held,
    counts_only,
    has_buffer,
    make_selector,
    takes_target,
    try_rounds,
)
from fedentopt.selection.trial import sweep as try_settings
from fedentopt.settings import settings_of
from fedentopt.tables import CountsFile, read_available, read_counts, read_target

_NOISE_BY_ROW = 0x4E5A  # states written before noise was keyed by client go on with these draws

COUNTS_HELP = (
    "CSV file of label counts (or .xlsx, .parquet): client,CLASS,... with one row per client, or client,class,count."
)
DROP_HELP = "Leave out this column, such as a total; may be repeated. `none`: no column or row is a total."


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("select")(select)


def select(
    counts: Annotated[Path, typer.Argument(help=COUNTS_HELP)],
    cohort: Annotated[
        str | None, typer.Option(help="Clients per round, M: a number, or a per cent of all. Default: 10%.")
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
    selector: Annotated[
        str, typer.Option(help="fedentopt, random, kl or another that needs label counts only.")
    ] = "fedentopt",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the selector; may be repeated."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="A trial of privacy: add Laplace noise of scale 1/epsilon to the counts first.")
    ] = None,
    noisy: Annotated[
        bool, typer.Option("--noisy", help="The file holds noisy counts: those below 0 are read as 0.")
    ] = False,
    target: Annotated[
        Path | None, typer.Option(help="CSV file class,weight: the label distribution to aim for, if not uniform.")
    ] = None,
    available: Annotated[
        Path | None, typer.Option(help="File of the clients that are there, one per line; others are not chosen.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help=DROP_HELP)] = None,
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
    """Select balanced cohorts, round after round, from a table of how many samples of each class every client holds."""
    chosen_class = _selector_class(selector)
    own = selector_settings(chosen_class, set_ or ())
    _check_options(chosen_class, epsilon, noisy, target, state, sweep)
    table = read_counts(counts, noisy, drop or ())
    for line in table.notes:
        note(line)
    prior = None if target is None else read_target(target, table.classes)
    here = None if available is None else read_available(available, table)
    clients = len(table.clients)
    about: dict[str, Any] = {"classes": list(table.classes), "selector": selector, "cohort": None, "buffer": None}
    about |= {"epsilon": epsilon, "noisy": noisy, "target": None if prior is None else prior.tolist()}
    if own:
        about["settings"] = own
    said = {"file": str(counts), "rounds": rounds, "clients": clients, "left_out": list(table.left_out)}
    said["available"] = None if here is None else len(here)
    if sweep:
        pairs = sweep_sizes(cohort, buffer, clients)
        swept = _sweep(table, pairs, rounds, seed or 0, epsilon, noisy, prior, here)
        if json:
            sizes = [list(pair) for pair in pairs]
            settings = {**_without_sizes(about), **said, "seed": seed or 0, "sizes": sizes}
            print_json(sweep_json(swept, settings, table))
        else:
            show_sweep(swept, table, rounds, ranked=prior is not None)
        return

    size = about["cohort"] = cohort_size(cohort, clients)
    about["rules"] = {"cohort": size_rule(cohort)}
    if has_buffer(chosen_class):
        about["buffer"] = buffer_size(buffer, size, clients)
        about["rules"]["buffer"] = size_rule(buffer)
        if here is not None and len(here) <= size:
            note(f"--available: of the {len(here)} there a cohort of {size} takes all, whatever the buffer")
        elif here is not None and len(here) - about["buffer"] < size:
            note(
                f"--available: a buffer of {about['buffer']} can leave fewer than a cohort of {size} of the "
                f"{len(here)} clients that are there; --buffer {len(here) - size} or less leaves a choice"
            )
    elif buffer is not None:
        note(f"--buffer: {selector} selection has none, so {buffer} is not used")
    with locked_state(state):
        before = None if state is None else read_state(state)
        seed = about["seed"] = _seed(seed, before, state)
        chosen = make_selector(
            chosen_class, cohort_size=size, clients=clients, seed=seed, buffer=about["buffer"], target=prior,
            settings=own,
        )  # fmt: skip
        if state is not None and chosen.arrays():
            raise InputError(f"--state: {selector} remembers more than fits it; accepted: without --state")
        reported = _reported(table, epsilon, seed, about, before)
        known = table.counts if reported is None else reported
        chosen.register(known, noisy=noisy or reported is not None, ids=table.clients)
        if state is not None and before is not None:
            continue_from(state, before, chosen, about)
        start = chosen.round
        with progress("selecting", rounds) as bar:
            true_counts = None if reported is None else table.counts
            one_more = partial(bar, advance=1)
            trial = try_rounds(chosen, rounds, true_counts, one_more, lambda number: here, keep_limits=json)
        baseline = None
        if chosen_class is not RandomSelector:
            baseline = _baseline(table, size, seed, start, rounds, noisy, here, prior)
        past = histories(state, before, start)
        held = classes_held(table.counts)
        past["chosen"].add(trial, held, table.clients)
        if baseline is not None:
            past["random"].add(baseline, held, table.clients)
        with write_state(state, chosen, about, past):
            if json:
                settings = {key: value for key, value in about.items() if key not in ("rules", "noise")} | said
                print_json(trial_json(trial, settings, past, table, baseline))
            else:
                show_trial(trial, table, about, past, baseline)
            flush_out()


def selector_settings(cls: type[Selector], words: Sequence[str]) -> dict[str, Any]:
    """Settings given as NAME=VALUE, in the types the selector declares; `buffer` has an option of its own."""
    declared = {name: one for name, one in settings_of(cls).items() if name != "buffer"}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"--set: {word!r} cannot be read; accepted: NAME=VALUE")
        if name.strip() not in declared:
            raise InputError(
                f"--set: {name.strip()!r} is no setting of {cls.name}; accepted: {', '.join(declared) or 'none'}"
            )
        if name.strip() in found:
            raise InputError(f"--set: {word!r} gives {name.strip()} more than once; accepted: each setting once")
        one = declared[name.strip()]
        found[name.strip()] = one.check(one.from_word(value.strip()))
    return found


def _selector_class(name: str) -> type[Selector]:
    known = {cls.name: cls for cls in counts_only()}
    if name in known:
        return known[name]
    accepted = ", ".join(known)
    if name in SELECTORS:
        needs = SELECTORS.get(name).needs
        told = "; ".join(words for need, words in LEAVES.items() if need in needs and words)
        raise InputError(
            f"--selector: {name} has to know of a client what only training tells ({told}), and here are label counts "
            f"alone; it works in the simulator (`fedentopt run --selector {name}`) and in Flower's strategy; accepted "
            f"here: {accepted}"
        )
    raise InputError(f"--selector: {name!r} is unknown; accepted: {accepted}")


def _check_options(
    cls: type[Selector], epsilon: float | None, noisy: bool, target: Path | None, state: Path | None, sweep: bool
) -> None:
    if epsilon is not None:
        check_epsilon(epsilon)
    if epsilon is not None and noisy:
        raise InputError(
            "--epsilon: adds noise to true counts, but --noisy says the file holds noisy ones; accepted: one"
        )
    if target is not None and not takes_target(cls):
        those = " or ".join(one.name for one in counts_only() if takes_target(one))
        raise InputError(f"--target: {cls.name} selection does not aim for any; accepted: --selector {those}")
    if sweep and state is not None:
        raise InputError("--sweep: starts every setting afresh; accepted: without --state")
    if sweep and cls is not EntropySelector:
        raise InputError(f"--sweep: compares FedEntOpt's sizes, not {cls.name}'s; accepted: --selector fedentopt")


def _sweep(
    table: CountsFile,
    pairs: Sequence[tuple[int, int]],
    rounds: int,
    seed: int,
    epsilon: float | None,
    noisy: bool,
    target: np.ndarray | None,
    available: Sequence[str] | None,
) -> list[SweepRow]:
    """FedEntOpt with every pair of sizes, and random selection with every size of a cohort."""
    reported = None if epsilon is None else keyed_laplace(table.counts, epsilon, table.clients, seed)
    tried: list[tuple[int, int | None]] = [*pairs, *((size, None) for size in dict.fromkeys(m for m, _ in pairs))]
    with progress("selecting", len(tried) * rounds) as bar:
        return try_settings(
            table.counts, tried, rounds, seed, ids=table.clients, reported=reported, noisy=noisy, target=target,
            available=available, progress=partial(bar, advance=1),
        )  # fmt: skip


def _baseline(
    table: CountsFile,
    size: int,
    seed: int,
    start: int,
    rounds: int,
    noisy: bool,
    available: Sequence[str] | None,
    target: np.ndarray | None,
) -> Trial:
    """Random selection in the same rounds, of the same size and seed."""
    random = RandomSelector(size, seed=seed)
    random.register(table.counts, noisy=noisy, ids=table.clients)
    random.load_state_dict(random.state_dict() | {"round": start})
    return try_rounds(random, rounds, available=lambda number: available, target=target)


def _reported(
    table: CountsFile, epsilon: float | None, seed: int, about: dict[str, Any], before: Mapping[str, Any] | None
) -> np.ndarray | None:
    """What clients would report with noise, or None without: the same for the same seed, call after call."""
    if epsilon is None:
        return None
    if before is not None and before["about"].get("epsilon") is not None and "noise" not in before["about"]:
        return laplace_noise(table.counts, epsilon, np.random.default_rng([seed, _NOISE_BY_ROW]))
    about["noise"] = "by client"
    return keyed_laplace(table.counts, epsilon, table.clients, seed)


def _without_sizes(about: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in about.items() if key not in ("cohort", "buffer")}


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
