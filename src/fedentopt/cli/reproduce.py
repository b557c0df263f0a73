"""`fedentopt reproduce`: the paper's tables and figures, ours beside the printed ones."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedentopt.cli.conduct import terminated_with_care
from fedentopt.cli.console import note, print_json
from fedentopt.cli.reproduce_progress import Reporter
from fedentopt.errors import InputError
from fedentopt.files import FOLDER_PATIENCE, expand_home, locked_folder, make_folder
from fedentopt.pages import RESULTS_PAGE, check_page

if TYPE_CHECKING:
    from fedentopt.paper.reproduction import Reproduction
    from fedentopt.simulation.config import RunConfig
    from fedentopt.simulation.options import RunOptions

OUT, COMMITTED = Path("out"), Path("results")


def _filter(what: str) -> Any:
    return typer.Option(help=f"only {what}", rich_help_panel="Which cells", show_default=False)


def _instead(name: str, what: str) -> Any:
    return typer.Option(name, help=f"{what}; run nothing")


def _where(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Where and how", **more)


def _what(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="What comes out")


def reproduce(
    target: Annotated[str, typer.Argument(metavar="TABLE")] = "all",
    model: Annotated[list[str] | None, _filter("these models; several with commas between")] = None,
    dataset: Annotated[list[str] | None, _filter("these data sets; several with commas between")] = None,
    partition: Annotated[list[str] | None, _filter("these partitions; several with commas between")] = None,
    method: Annotated[list[str] | None, _filter("these methods; several with commas between")] = None,
    availability: Annotated[list[str] | None, _filter("dropout or straggling")] = None,
    participation: Annotated[list[str] | None, _filter("this per cent of clients per round")] = None,
    seeds: Annotated[str | None, _filter("these seeds, such as 0,1,2 or 0-4 (else five or three)")] = None,
    rounds: Annotated[int | None, _filter("this many rounds, for a trial: such a cell never counts as done")] = None,
    cells: Annotated[Path | None, _filter("the cells of this TOML file, instead of the paper's")] = None,
    list_cells: Annotated[bool, _instead("--list", "show every cell and its state")] = False,
    dry_run: Annotated[bool, _instead("--dry-run", "show what is to do and how long it takes")] = False,
    no_run: Annotated[bool, _instead("--no-run", "make tables and figures of what is there")] = False,
    out_dir: Annotated[Path | None, _where("folder of runs and tables (default: out/paper)", "--out")] = None,
    results: Annotated[Path | None, _where("exported results to make everything from; nothing is run")] = None,
    known: Annotated[Path | None, _where("exported results that count as finished, beside the runs in --out")] = None,
    data_dir: Annotated[Path | None, _where("data folder (default: FEDENTOPT_DATA, then the user's cache)")] = None,
    device: Annotated[str, _where("auto, cpu, cuda or cuda:N")] = "auto",
    trainer: Annotated[str, _where("auto, stacked, streams or loop")] = "auto",
    workers: Annotated[int | None, _where("CPU workers of the loop trainer, one thread each", min=1)] = None,
    precision: Annotated[str | None, _where("bf16: runs still to do in it, for cells that take it (VGG-11)")] = None,
    max_stack: Annotated[int | None, _where("most runs that train together (else all that can)", min=1)] = None,
    checkpoint_every: Annotated[int, _where("save unfinished runs every n rounds", min=1)] = 50,
    ray: Annotated[str | None, _where("address of a Ray cluster that gets the stacks; local starts one")] = None,
    ray_workers: Annotated[int | None, _where("with --ray local: CPU workers", min=1)] = None,
    samples_per_second: Annotated[float | None, _where("speed for --dry-run (default: those known)", min=1)] = None,
    export: Annotated[Path | None, _what("folder for results small enough to commit; adds to what is there")] = None,
    results_page: Annotated[Path | None, _what("Markdown file that gets all tables, figures and findings")] = None,
    page: Annotated[bool, _what("write the HTML page of all runs")] = True,
    figures: Annotated[bool, _what("draw the figures")] = True,
    as_json: Annotated[bool, _what("print one JSON document", "--json")] = False,
) -> None:  # fmt: skip
    """Run the paper cell by cell and show ours beside the printed figures.

    TABLE is table1 to table6, figure1, figure2, or all of them (all, the default); or an extra: grid-mu,
    grid-weight-decay, grid-buffer, single-class, mri-pretraining, bf16, vgg11-open, lenet5-open; or the benchmark of
    selectors (selectors), parts of it (selectors-algorithms, selectors-averaging), the grid behind it
    (selectors-tuning) and what that chose on the test split (selectors-tuned); or lying clients and the audit (liars),
    selection without label reports (inferred); or, with --cells, a table named in that file. Several have commas
    between: table3,table2.

    Runs that are finished are never run again, and a stopped command goes on where it was.
    """
    from fedentopt.paper import provenance
    from fedentopt.paper.cells import select
    from fedentopt.paper.reproduction import (
        FAMILIES,
        Reproduction,
        ask_for,
        check_precision,
        family_of,
        find_results,
        plan_cells,
    )
    from fedentopt.paper.selector_table import SELECTOR_TABLES
    from fedentopt.paper.selector_tuned import with_tuned
    from fedentopt.simulation.methods import parse_seeds
    from fedentopt.simulation.options import RunOptions

    if rounds is not None and rounds < 1:
        raise InputError(f"rounds: {rounds} is out of range; accepted: at least 1")
    if samples_per_second is not None and not math.isfinite(samples_per_second):
        raise InputError(f"samples-per-second: {samples_per_second} is no speed; accepted: a finite number, at least 1")
    if results is not None and known is not None:
        raise InputError("known: does not go with --results, from which alone everything is made")
    if export is not None and rounds is not None:
        raise InputError("export: runs cut short with --rounds are no results; leave one of the two out")
    family = (family_of(target) if cells is None else None) or "paper"
    (plan, inner), wanted = plan_cells(cells, target), None if seeds is None else parse_seeds(seeds)
    if list_cells and results is None and known is None and out_dir is None and cells is None:
        results = _committed(family)
    folder = expand_home(out_dir or OUT / family)
    found = find_results(results, known, folder)
    plan = with_tuned(plan, found, target)
    chosen = select(
        plan,
        inner,
        elsewhere=() if cells is not None or family != "paper" else [name for own in FAMILIES.values() for name in own],
        model=_words(model),
        dataset=_words(dataset),
        partition=_words(partition, r",(?=\s*[a-z])"),  # a partition may hold commas: mixed:0.01,0.5
        method=_words(method),
        availability=_words(availability),
        participation=_numbers("participation", participation),
    )
    chosen = ask_for(chosen, wanted, rounds)
    if precision is not None:
        check_precision(chosen, precision)
    request = Reproduction(plan, chosen, found, None if data_dir is None else expand_home(data_dir), precision)
    if list_cells:
        _list(request, as_json)
        return
    if dry_run:
        _dry_run(request, folder, device, samples_per_second, as_json)
        return
    sources, trains = [results or folder, *([known] if known else [])], results is None and not no_run
    if results is None:
        request.check_sources(folder)
    if export is not None:
        request.check_export(export, trains=trains)
    if results is None and page and os.path.exists(folder / RESULTS_PAGE):
        check_page(folder / RESULTS_PAGE)
    for source in sources if export is not None else [folder] if trains else []:
        provenance.read(source)  # refused before training, not when its log is added to
    if trains:
        options = RunOptions(
            out=str(folder), device=device, trainer=trainer, workers=workers, checkpoint_every=checkpoint_every
        )
        _run(request, options, export, sources, max_stack=max_stack, ray=ray, ray_workers=ray_workers)
    written: list[Path] = []
    if results is None or out_dir is not None:
        make_folder(folder)
        with locked_folder(folder, patience=FOLDER_PATIENCE):  # other commands may run other cells in the same folder
            written += request.write(folder, figures=figures)
            if results is None and page:
                written += _page(request, folder)
    if export is not None:
        written += request.export(export, *sources, say=note)
    if results_page is not None:
        from fedentopt.paper.audit_page import write_audit_page
        from fedentopt.paper.results_page import write_results_page
        from fedentopt.paper.selector_page import selector_page

        source = export or results or folder
        if family == "audit":
            written += write_audit_page(results_page, request, source)
        else:
            text = selector_page if {cell.table for cell in plan} <= set(SELECTOR_TABLES) else None
            written += write_results_page(results_page, request, source, text, own=cells is not None)
    if as_json:
        from fedentopt.paper.tables import tables

        shown = request.compare()
        said = {table.name: table.found for table in tables(shown) if table.found}
        listed = [entry.listed() for entry in shown]
        print_json({"cells": listed, "found": said, "files": [str(path) for path in written]})
        return
    from fedentopt.cli.reproduce_show import print_tables

    print_tables(request.compare(), written)


def _committed(family: str) -> Path | None:
    """For `--list` without a folder: the committed results, where this machine has no runs of its own yet."""
    if any((OUT / family).glob("*/run.json")) or not (COMMITTED / family).is_dir():
        return None
    note(f"no runs in {OUT / family} yet: these are the results in {COMMITTED / family} (--out DIR looks elsewhere)")
    return COMMITTED / family


def _list(request: Reproduction, as_json: bool) -> None:
    entries, refused = request.states()
    listed = [entry.listed() for entry in entries]
    for reason in refused:
        note(f"refused: {reason}")
    if as_json:
        print_json({"cells": listed})
        return
    from fedentopt.cli.reproduce_show import print_list

    print_list(listed)


def _dry_run(request: Reproduction, folder: Path, device: str, speed: float | None, as_json: bool) -> None:
    from fedentopt.cli.reproduce_show import print_estimate
    from fedentopt.paper.cells import distinct_runs
    from fedentopt.paper.data import train_size
    from fedentopt.paper.estimate import GIVEN, Speed, estimate, known_speeds, total
    from fedentopt.results.folder import RunFolder

    runs = request.unfinished()
    absent = request.without_data(runs)
    kind = _kind(device)
    machine, speeds = known_speeds(kind)
    given = None if speed is None else Speed(speed, GIVEN)
    kept = {run: RunFolder(folder, run).rounds_kept() for run in runs}
    begun = sum(map(bool, kept.values()))
    lines = estimate(
        runs, lambda name: train_size(name, request.data_dir), lambda name: given or speeds.get(name), kept.__getitem__
    )
    wanted = len(distinct_runs(request.cells))
    if as_json:
        count, samples, seconds = total(lines)
        sums = {"cells": len(request.cells), "wanted": wanted, "runs": count, "begun": begun}
        sizes = {"samples": samples, "seconds": seconds, "device": kind, "missing_data": absent}
        print_json({**sums, **sizes, "stacks": [vars(line) for line in lines]})
        return
    for name, count in absent.items():
        note(f"{name}: its files are not there yet, which {count} of these runs need (`fedentopt data list`)")
    print_estimate(lines, len(request.cells), wanted, begun, machine)


def _run(
    request: Reproduction,
    options: RunOptions,
    export: Path | None,
    sources: Sequence[Path],
    *,
    max_stack: int | None,
    ray: str | None,
    ray_workers: int | None,
) -> None:
    """Do what is to do; the command is logged and, where asked for, what is finished exported, after every stack and
    whatever ends it. Where that fails, training goes on."""
    from fedentopt.paper.provenance import command_line, note_command

    folder, unfinished = options.out_dir, request.unfinished()
    if not unfinished:
        note("every run of these cells is finished; nothing to do")
        return
    runs = request.ready(unfinished)
    for name, count in request.without_data(unfinished).items():
        note(f"{name}: its files are not there, {count} runs are left out (`fedentopt data list`)")
    reporter = Reporter(runs, _costs(runs, options.device))
    started, clock = time.time(), time.monotonic()

    def keep() -> None:
        if not any(cell.shortened for cell in request.cells):  # a trial is behind no result
            own = [run for run in runs if run not in reporter.others]
            note_command(folder, command_line(sys.argv[1:]), own, started, time.monotonic() - clock)
        if export is not None:
            request.export(export, *sources, say=note)

    def stack_done() -> None:
        try:
            keep()
        except InputError as error:  # a folder that another command holds, say, is no reason to stop training
            note(f"{error}; the runs are kept, and the next stack or the same command tries again")

    try:
        with terminated_with_care(), reporter.shown():
            request.run(runs, options, reporter, stack_done, max_stack=max_stack, ray=ray, ray_workers=ray_workers)
    except KeyboardInterrupt:
        note(f"stopped; what was done is saved in {folder}: the same command goes on there")
        raise typer.Exit(130) from None
    finally:
        if folder.is_dir():
            (keep if sys.exc_info()[0] is None else stack_done)()


def _costs(runs: Sequence[RunConfig], device: str) -> dict[str, float]:
    """What a round of each run costs beside those of others, where not all are of one model and data set of ours."""
    from fedentopt.datasets.catalog import ENTRIES
    from fedentopt.paper.estimate import costs, known_speeds

    if len({(run.model, run.dataset) for run in runs}) == 1:
        return {}
    _, speeds = known_speeds(_kind(device))
    return costs(runs, lambda name: ENTRIES[name].train if name in ENTRIES else None, speeds.get)


def _kind(device: str) -> str:
    return "cuda" if device.startswith("cuda") or (device == "auto" and _has_gpu()) else "cpu"


def _page(request: Reproduction, folder: Path) -> list[Path]:
    written = request.write_page(folder)
    if written is None and importlib.util.find_spec("plotly") is None:
        note("no HTML page, since Plotly is not installed (--no-page does without this line)")
    return [written] if written else []


def _words(given: Sequence[str] | None, between: str = ",") -> list[str]:
    """Values given one by one or with commas between them."""
    return [word.strip() for text in given or () for word in re.split(between, text) if word.strip()]


def _numbers(name: str, given: Sequence[str] | None) -> list[float]:
    try:
        return [float(word.removesuffix("%")) for word in _words(given)]
    except ValueError:
        text = ", ".join(given or ())
        raise InputError(f"{name}: {text!r} is not a number; accepted: per cent, such as 4 or 10") from None


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce")(reproduce)
