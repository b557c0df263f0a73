"""A reproduction: the cells asked for, what is known of them, what is still to do, and what to make of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedentopt.datasets.catalog import may_differ
from fedentopt.errors import InputError
from fedentopt.files import FOLDER_PATIENCE, file_digest, locked_folder, make_folder
from fedentopt.own_code import code_digest
from fedentopt.paper import names, provenance
from fedentopt.paper.audit_table import AUDIT_TABLES
from fedentopt.paper.blocks import audit_cells, cells_from_file, paper_cells, selector_cells
from fedentopt.paper.cells import Cell, named_tables
from fedentopt.paper.comparison import REFUSED, Comparison, compare
from fedentopt.paper.data import has_data
from fedentopt.paper.exported import export, read_exported
from fedentopt.paper.measures import OWN, TARGETS, Measured, Results
from fedentopt.paper.selector_table import SELECTOR_TABLES, SELECTORS
from fedentopt.paper.tables import write_paper_figures, write_tables
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import is_same_data
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions

if TYPE_CHECKING:
    from fedentopt.paper.ray_worker import WorkerReport
    from fedentopt.simulation.engine import RoundEvent


FAMILIES = {"selectors": SELECTOR_TABLES, "audit": AUDIT_TABLES}
"""Tables beyond the paper, by the folder that their runs and results have."""


class Listener(Protocol):
    """Whoever shows how far the runs are."""

    def say(self, line: str) -> None: ...

    def found_finished(self, runs: Sequence[RunConfig]) -> None: ...

    def round_done(self, event: RoundEvent) -> None: ...

    def worker_report(self, report: WorkerReport) -> None: ...


@dataclass(frozen=True)
class Reproduction:
    """`plan` are all cells as written down; `cells` those asked for, with the seeds and rounds asked for; `precision`
    that of runs still to do, their cells' own by default.

    What is to be committed (`export`, the results page) is of the plan, whatever this command asks for.
    """

    plan: list[Cell]
    cells: list[Cell]
    results: Results
    data_dir: Path | None = None
    precision: str | None = None
    _digests: dict[tuple[object, ...], str] = field(default_factory=dict, repr=False, compare=False)  # of own data

    def compare(self, cells: Sequence[Cell] | None = None) -> list[Comparison]:
        """Cells (those asked for) beside what is known of them."""
        wanted = self.cells if cells is None else cells
        return compare(wanted, self.results, lambda name: has_data(name, self.data_dir))

    def states(self) -> tuple[list[Comparison], list[str]]:
        """The cells asked for beside what is known of them, for a list: one whose runs are refused, as of other own
        code, keeps no other from being shown. With why, each once."""
        entries, reasons = [], []
        for cell in self.cells:
            try:
                entries += self.compare([cell])
            except InputError as error:
                entries.append(Comparison(cell, {}, None, None, REFUSED))
                reasons.append(str(error))
        return entries, list(dict.fromkeys(reasons))

    def check_sources(self, folder: Path) -> None:
        """Refuse, before anything trains, runs of the plan in `folder`, and exported ones, that other code, data or
        start weights of the user's made: tables would average them with new ones, or compare them."""
        for config in self._own_runs(baselines=True):
            seeds = sorted(self.results.seeds(config))
            now = {of: self._now(config, of) for of in OWN} if seeds else {}  # to open images for nothing takes long
            for seed in seeds:
                run = self.results.get(config, seed)  # which refuses other code
                others = [of for of in OWN if run and not _are_same(of, getattr(run, of), now[of])]
                if not others:
                    continue
                made = RunFolder(folder, dataclasses.replace(config, seed=seed))
                if made.is_finished():
                    ways_out = "bring the old data back, give another folder, or delete that one"
                    raise InputError(f"dataset: {config.dataset!r} is not what {made.path} was made from; {ways_out}")
                raise InputError(
                    f"known: the {others[0]} behind {config.method} on {config.dataset} have changed since its results "
                    f"were exported; bring the old {others[0]} back, or give a folder without these results"
                )

    def check_export(self, folder: Path, *, trains: bool) -> None:
        """Refuse a folder to export into before anything is trained for it: no folder, damaged files, or results of the
        same cells by other code, data or start weights of the user's, which would be averaged with these."""
        if not folder.exists():
            return
        known = read_exported(folder, "export")
        provenance.read(folder)
        for run, of in itertools.product(self._own_runs(), OWN):
            there, now = known.digests(run, of), self.results.digests(run, of)
            now |= {self._now(run, of)} - {""} if trains and there else set()
            if not all(_are_same(of, one, other) for one in there for other in now):
                raise InputError(
                    f"export: {folder} holds results of {run.method} on {run.dataset} by other {of} (digest "
                    f"{min(there)[:8]}, now {min(now)[:8]}); bring the old {of} back, or give another folder"
                )

    def _own_runs(self, *, baselines: bool = False) -> list[RunConfig]:
        """Runs of the plan, at seed 0, behind which something else may stand at another time; on request also those
        that they are compared with."""
        configs = (
            run
            for cell in self.plan
            for config in (cell.config, *((cell.baseline, cell.reference) if baselines else ()))
            if config is not None
            for run in cell.versions(config)
        )
        return [run for run in dict.fromkeys(configs) if run.own_code or run.weights or may_differ(run.dataset)]

    def _now(self, config: RunConfig, of: str) -> str:
        """The digest of what a run to come would be made with; empty where it is gone, or always the same."""
        from fedentopt.simulation.sweep import find_digest

        if of == "weights":
            return file_digest(config.weights)
        if of == "code":
            return code_digest(config.own_code)
        key = (config.dataset, config.fine_labels, config.image_size)
        if key not in self._digests:
            self._digests[key] = find_digest(config, self.data_dir) if may_differ(config.dataset) else ""
        return self._digests[key]

    def unfinished(self) -> list[RunConfig]:
        """Runs of the cells that are still to do, whether their data is there or not.

        All cells of a seed come before those of the next, so that who stops half-way has all cells of fewer seeds.
        """
        runs = (
            run if self.precision is None else dataclasses.replace(run, precision=self.precision)
            for cell in self.cells
            for run in cell.runs()
            if self._run(cell, dataclasses.replace(run, seed=0), run.seed) is None
        )
        return sorted(dict.fromkeys(runs), key=lambda run: run.seed)

    def _run(self, cell: Cell, config: RunConfig, seed: int) -> Measured | None:
        """What counts as finished: where a cell's own precision is asked for by name, nothing stands in for it."""
        own = self.precision == config.precision
        return self.results.get(config, seed) if own else self.results.run_of(cell, config, seed)

    def without_data(self, runs: Sequence[RunConfig]) -> dict[str, int]:
        """How many of these runs cannot start, by the data set that is not there."""
        absent = (run.dataset for run in runs if not has_data(run.dataset, self.data_dir))
        return dict(Counter(absent))

    def ready(self, runs: Sequence[RunConfig]) -> list[RunConfig]:
        """Those whose data is there; refused where none is, with what to do about it."""
        found = [run for run in runs if has_data(run.dataset, self.data_dir)]
        if runs and not found:
            from fedentopt.datasets import load

            load(runs[0].dataset, self.data_dir)  # refuses it, and says how to get it
        return found

    def run(
        self,
        runs: Sequence[RunConfig],
        options: RunOptions,
        listener: Listener,
        done: Callable[[], None],
        *,
        max_stack: int | None = None,
        ray: str | None = None,
        ray_workers: int | None = None,
    ) -> None:
        """Bring runs to their end in folders below `options.out`; `done` is called after every stack.

        `max_stack` is the most runs that train together, `ray` the address of a cluster that gets the stacks.
        """
        _need_simulator()
        provenance.made_with()  # looks at the code now: its files may change while it trains
        from fedentopt.models import PRETRAINED, check_name, check_pretrained
        from fedentopt.simulation.sweep import ELSEWHERE, form_stacks, run_sweep

        for model in dict.fromkeys(run.model for run in runs):  # before hours go into the runs that come first
            check_name(model)
        for model in dict.fromkeys(run.model for run in runs if run.weights == PRETRAINED):
            check_pretrained(model)
        data_dir = None if self.data_dir is None else str(self.data_dir)
        options = dataclasses.replace(options, data_dir=data_dir, say=listener.say, target=tuple(map(float, TARGETS)))
        if ray is not None:
            from fedentopt.paper.ray_runner import run_on_ray

            run_on_ray(
                runs,
                options,
                address=ray,
                workers=ray_workers,
                max_stack=max_stack,
                report=listener.worker_report,
                done=lambda number: done(),
            )
            return
        if ray_workers is not None:
            raise InputError(f"ray-workers: {ray_workers} only goes with --ray local")
        stacks = sorted(form_stacks(runs, max_stack), key=lambda stack: stack[0].seed)
        for number, stack in enumerate(stacks, 1):  # one by one, so that what is finished can be exported in between
            first, size = stack[0], names.counted(len(stack), "run")
            listener.say(f"stack {number} of {len(stacks)}: {first.model}, {first.dataset}, {size}")
            finished = [run for run in stack if RunFolder(options.out_dir, run).is_finished()]
            if finished:  # by another command, since this one looked
                listener.found_finished(finished)
            run_sweep(stack, options, progress=listener.round_done, afresh=ELSEWHERE)
            done()

    def write(self, folder: Path, *, figures: bool) -> list[Path]:
        """Tables and figures of every table that is touched; gives the files.

        Tables are complete, with the cells that were not asked for, unless runs are cut short: then they are a trial's.
        Where other seeds were asked for, all of their rows are of these: rows of different seeds cannot be compared.
        """
        asked = {cell.identity: cell for cell in self.cells}
        trial = any(cell.shortened for cell in self.cells)
        touched = {cell.table for cell in self.cells}
        seeds = self._other_seeds()
        rest = [cell if seeds is None else cell.with_seeds(seeds) for cell in self.plan if cell.table in touched]
        complete = [asked.get(cell.identity, cell) for cell in rest]
        entries = self.compare(self.cells if trial else complete)
        written = write_tables(folder / "tables", entries)
        if figures:
            from fedentopt.paper.figures import write_figures

            written += write_figures(folder / "figures", entries, self.results)
        return written

    def _other_seeds(self) -> tuple[int, ...] | None:
        """The seeds asked for where they are not those of the plan."""
        planned = {cell.identity: cell.seeds for cell in self.plan}
        return next((cell.seeds for cell in self.cells if cell.config and cell.seeds != planned[cell.identity]), None)

    def write_page(self, folder: Path) -> Path | None:
        """The HTML page of all runs in `folder`; None where there are none, or no Plotly to draw it with."""
        if not any(folder.glob("[!.]*/rounds.csv")) or importlib.util.find_spec("plotly") is None:
            return None
        from fedentopt.report import write_report

        write_paper_figures(folder, self.plan)
        return write_report(folder)

    def export(self, folder: Path, *sources: Path, say: Callable[[str], None] = lambda line: None) -> list[Path]:
        """All results as rows per cell and seed, tables made from nothing but them, and the logs of the folders that
        they come from; `say` is told of figures that were others there before.

        What is there is read, added to and written: of two commands that do so at once one waits for the other.
        """
        make_folder(folder)
        with locked_folder(folder, patience=FOLDER_PATIENCE, option="export"):
            written = export(folder, self.plan, self.results, say)
            alone = dataclasses.replace(self, results=read_exported(folder))
            known = {path.stem for path in folder.glob("*.csv")} | {"table5"}
            cells = [cell for cell in self.plan if cell.table in known]
            written += write_tables(folder / "tables", alone.compare(cells))
            provenance.merge(folder, [command for source in sources for command in provenance.read(source)])
        return written


def _are_same(of: str, one: str | None, other: str) -> bool:
    """Whether two digests are of the same code, data or weights, as far as they are known."""
    return not one or not other or (is_same_data(one, other) if of == "data" else one == other)


def plan_cells(file: Path | None, target: str) -> tuple[list[Cell], str]:
    """All cells among which `target` is found: the paper's, those of one of the `FAMILIES`, or of a user's file; and
    the target there."""
    if file is not None:
        return cells_from_file(file), target
    family = family_of(target)
    if family == "audit":
        return audit_cells(), target
    if family is None:
        return paper_cells(), target
    return selector_cells(), ",".join("all" if name == SELECTORS else name for name in named_tables(target))


def family_of(target: str) -> str | None:
    """Which of the `FAMILIES` the tables that a target names belong to; None for the paper's own. Refused: a mixture,
    since each has results and a page of its own."""
    named = named_tables(target)
    found = {name: next((family for family, own in FAMILIES.items() if name in own), None) for name in named}
    for name in named[1:]:
        if found[name] != found[named[0]]:
            raise InputError(
                f"table or figure: {named[0]!r} and {name!r} have results and pages of their own; accepted: a command "
                f"for each"
            )
    return found[named[0]]


def ask_for(cells: Sequence[Cell], seeds: Sequence[int] | None, rounds: int | None) -> list[Cell]:
    """Cells over other seeds and with fewer rounds, where asked for."""
    if seeds is not None:
        cells = [cell.with_seeds(seeds) for cell in cells]
    return list(cells) if rounds is None else [cell.cut(rounds) for cell in cells]


def check_precision(cells: Sequence[Cell], precision: str) -> None:
    """Refuse runs in a precision that does not count for all of these cells."""
    taken = [run.precision for cell in cells if cell.config for run in cell.versions(cell.config)]
    if not taken:
        raise InputError(f"precision: {precision!r} is for runs, and these cells need none")
    for cell in cells:
        own = [] if cell.config is None else [run.precision for run in cell.versions(cell.config)]
        if own and precision not in own:
            raise InputError(
                f"precision: runs in {precision!r} do not count for {cell.model} in {cell.table}; accepted there: "
                f"{', '.join(own)}"
            )


def find_results(results: Path | None, known: Path | None, out_dir: Path) -> Results:
    """Exported results alone (`results`), or run folders, with exported results (`known`) or without."""
    if results is not None:
        return read_exported(results)
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"out: {out_dir} is not a folder; accepted: a folder of runs, or one to be made")
    return Results(out_dir) if known is None else read_exported(known, "known").on(out_dir)


def _need_simulator() -> None:
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"training needs {' and '.join(missing)}; pip install 'fedentopt[sim]' brings what is missing")
