"""What a checkpoint holds of a run, written after each round, and how a run goes on from it.

Everything that decides about the rounds to come: the model, the register of clients, the selector and the audit, what
strategies remember and have written into what nodes are told (`server_state`); the records and metrics so far; and what
makes the run the run it is (`identity`), so that it is continued as that one or not at all. Where it lies on disk and
in which form is `checkpoint` and `register_files`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedentopt.errors import InputError
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.flower import identity, server_state
from fedentopt.flower.checkpoint import Checkpoint
from fedentopt.flower.kept_records import packed, unpacked
from fedentopt.flower.progress import SelectionResult
from fedentopt.flower.register_files import RegisterFiles

if TYPE_CHECKING:
    from fedentopt.flower.strategy import LabelAware

MODEL, SELECTOR, WATCH = "model", "selector", "watch"
TOLD = ("train_config", "evaluate_config")
METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")

log = logging.getLogger("flwr")


class RunCheckpoint:
    """The checkpoint of a run. Made before its first round; does nothing where the strategy has no `checkpoint_dir`.

    layers            the strategy and what it wraps, outermost first
    start             the model that the run began with
    train_config, evaluate_config   what nodes are told; strategies may change it from round to round
    """

    def __init__(
        self, layers: Sequence[Strategy], start: ArrayRecord, train_config: ConfigRecord, evaluate_config: ConfigRecord
    ) -> None:
        self.layers, self.start = layers, start
        self.selection: LabelAware = layers[-1]  # type: ignore[assignment]
        self.told = (train_config, evaluate_config)
        # As they are before the first round: strategies write the round's number into them.
        self._configs = {
            name: identity.describe({n: v for n, v in config.items() if n != server_state.ROUND})
            for name, config in zip(TOLD, self.told, strict=True)
        }
        # What a wrapper was made with; a clipping norm that adapts is its memory, not a setting.
        self._configs["wrappers"] = {
            f"{type(layer).__name__}.{name}": value
            for layer in layers[:-1]
            for name, value in vars(layer).items()
            if isinstance(value, bool | int | float | str) and name not in server_state.KNOWN
        }
        self.accounted = any(getattr(layer, "accountant", None) is not None for layer in layers)
        """Whether Flower accounts for the privacy that the run spends."""
        self._folder = self.selection.checkpoint_dir
        self._files = None if self._folder is None else RegisterFiles(self._folder)
        self._rounds: dict[str, Any] = {}  # their records, as they are kept
        self._before: list[dict[str, str]] = []
        self._forgotten: list[str] | None = None

    def begin(self) -> None:
        """The first round of this process is about to begin: what changes from here on and is not kept is noticed."""
        self._before = server_state.attributes(self.layers, self.selection.own_attributes)

    def write(self, result: SelectionResult, server_round: int, *, evaluated: bool = True) -> None:
        """Write what stands after a round, or with `evaluated` False after its training."""
        if self._folder is None:
            return
        if server_round:
            self._rounds[str(server_round)] = packed(result.rounds, server_round)
        try:
            self._save(result, server_round, evaluated)
        except OSError as error:  # going on would train rounds that a stop undoes
            written = evaluated and self.accounted  # before its evaluation
            then = f"to go on after round {server_round - (not written)}" if server_round else "from the beginning"
            raise InputError(
                f"checkpoint: round {server_round} cannot be written to {self._folder}: "
                f"{error.strerror or error}; mend that and start again, {then}"
            ) from error

    def _save(self, result: SelectionResult, server_round: int, evaluated: bool) -> None:
        selection = self.selection
        assert self._folder is not None
        assert self._files is not None
        forgotten = self._forgotten
        if forgotten is None and server_round:
            forgotten = server_state.forgotten(self.layers, self._before, selection.own_attributes)
            self._forgotten = forgotten if evaluated else None  # evaluation may change more of it
            if self._forgotten:  # said once, after the first round of this process
                log.warning(
                    "checkpoint: does not hold %s, which changes from round to round; this run cannot be continued "
                    "unless the strategy gives it by memory() and takes it by remember()",
                    ", ".join(self._forgotten),
                )
        parts = self._files.save(selection.census.members, selection.census.changed)
        arrays, documents = server_state.gather(self.layers)
        meta: dict[str, Any] = {
            "selection": selection.state_dict(),
            "clients": parts,
            "layers": documents,
            "forgotten": forgotten or [],
            "start": _shapes(self.start),
            "configs": self._configs,
            "told": [server_state.write_config(config) for config in self.told],
            "rounds": self._rounds,
            "metrics": {
                name: {str(number): dict(record) for number, record in getattr(result, name).items()}
                for name in METRICS
            },
        }
        model = {name: array.numpy() for name, array in result.arrays.items()}
        groups = {MODEL: model, SELECTOR: dict(selection.selector.arrays()), **arrays}
        if selection.watch is not None:
            groups[WATCH] = selection.watch.arrays()
        checkpoints.save(self._folder, Checkpoint(server_round, groups, meta))
        selection.census.changed.clear()
        self._files.committed()

    def resume(self, result: SelectionResult, num_rounds: int) -> int:
        """Put the checkpoint back, if there is one, and into the result what it holds; return the rounds done.

        One of another model or other settings is refused, and so is one that is further than `num_rounds`.
        """
        if self._folder is None or self._files is None:
            return 0
        selection = self.selection
        found = checkpoints.load(self._folder)
        if found is None:
            if selection.history:  # buffer, moments and what was learnt would be those of rounds that do not count
                raise InputError(
                    f"checkpoint_dir: {self._folder} holds no checkpoint, and this strategy has begun a "
                    "run before; accepted: one that is made anew"
                )
            return 0
        self._check(found, num_rounds)
        server_state.restore(self.layers, found.arrays, found.meta["layers"])
        for config, saved in zip(self.told, found.meta.get("told", ()), strict=False):
            server_state.read_config(config, saved)  # none in checkpoints of versions that did not keep them
        selection.census.restore(self._files.load(found.meta["clients"], selection.census.num_classes))
        selection.load_state_dict(found.meta["selection"], found.arrays.get(SELECTOR), found.arrays.get(WATCH))
        model = found.arrays[MODEL]
        result.arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in model.items()})
        server_state.go_on_from(self.layers, result.arrays)  # where the same object made a model after the checkpoint
        result.rounds = unpacked({int(number): record for number, record in found.meta["rounds"].items()})
        self._rounds = {str(number): packed(result.rounds, number) for number in result.rounds}
        for name in METRICS:
            records = found.meta["metrics"][name]
            getattr(result, name).update({int(number): MetricRecord(record) for number, record in records.items()})
        log.info("Continuing after round %d from %s", found.round, self._folder / checkpoints.FILE)
        return found.round

    def _check(self, found: Checkpoint, num_rounds: int) -> None:
        assert self._folder is not None
        where = self._folder / checkpoints.FILE
        own = _shapes(self.start)
        # Compared with the start model: by now it may differ, since boosted trees grow.
        saved = {name: tuple(shape) for name, shape in found.meta["start"].items()}
        if own != saved:
            odd = next(name for name in [*own, *saved] if own.get(name) != saved.get(name))
            raise InputError(f"checkpoint: {where} holds another model: {odd} is {saved.get(odd)}, not {own.get(odd)}")
        if found.round > num_rounds:
            raise InputError(
                f"num_rounds: {num_rounds}, but {where} is already at round {found.round}; accepted: at least that many"
            )
        if found.meta["forgotten"]:
            raise InputError(
                f"checkpoint: {where} does not hold {', '.join(found.meta['forgotten'])}, which changed from round to "
                "round; accepted: a strategy that gives it by memory() and takes it by remember()"
            )
        self.selection.check_settings(found.meta["selection"])
        written = dict(zip(TOLD, found.meta.get("told", ()), strict=False))
        given = {name: server_state.write_config(config) for name, config in zip(TOLD, self.told, strict=True)}
        for name, config in self._configs.items():
            saved = found.meta["configs"][name]
            if name not in written or given[name] != written[name]:  # not the one that strategies have written into
                identity.check_same(config, saved, "" if name == "wrappers" else f"{name}: ")
            self._configs[name] = saved


def _shapes(arrays: ArrayRecord) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}
