"""Flower's round loop, with a first round that need not be 1, replies that are looked at, and checkpoints.

Flower's `Strategy.start` always begins at round 1, and strategies use the round's number (FedAdam corrects its bias
with it, clients decay their learning rate), so a continued run needs a loop of its own. It speaks to strategies
through Flower's public methods only and works for wrappers around a label-aware strategy as well.

No client stops it: a reply that cannot be averaged is its sender's failure; where averaging itself fails, or gives a
model or a server's memory that is not finite, the round is void and everything stays as it was before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import FedAvgM, Strategy

from fedentopt.errors import InputError
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.flower import identity, server_state
from fedentopt.flower.checkpoint import Checkpoint
from fedentopt.flower.exchange import Answer, exchange, replies
from fedentopt.flower.head_census import HeadCensus
from fedentopt.flower.hiding import check_wrappers
from fedentopt.flower.kept_records import packed, unpacked
from fedentopt.flower.options import check_whole, is_number
from fedentopt.flower.progress import SelectionResult, joined, measured
from fedentopt.flower.register_files import RegisterFiles
from fedentopt.flower.replies import is_finite_model
from fedentopt.server.report import printable

if TYPE_CHECKING:
    from fedentopt.flower.strategy import LabelAware

MODEL, SELECTOR, WATCH = "model", "selector", "watch"
METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")

log = logging.getLogger("flwr")


def start(
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
) -> SelectionResult:
    """Run a label-aware strategy, or a wrapper around one (such as Flower's DP wrappers), up to round `num_rounds`.

    Arguments and result are those of Flower's `Strategy.start`; the result has a record of each round in `rounds`
    besides. `timeout` bounds every wait for replies: a node that is dead or too slow is then left out of the round.
    With a `checkpoint_dir` whose checkpoint says that round r is done, the run goes on with round r + 1, the
    checkpoint's model and the same buffer; `evaluate_fn` is then not called for the start model.
    """
    layers = _layers(strategy)
    if not isinstance(initial_arrays, ArrayRecord):
        raise InputError(
            f"initial_arrays: {type(initial_arrays).__name__} is not accepted; accepted: an ArrayRecord, as in "
            "ArrayRecord(model.state_dict())"
        )
    for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
        if not isinstance(config, ConfigRecord | None):
            raise InputError(f"{name}: {type(config).__name__} is not accepted; accepted: a ConfigRecord, or None")
    check_whole("num_rounds", num_rounds, 0)
    if not is_number(timeout) or not timeout > 0:
        raise InputError(f"timeout: {timeout!r} is not accepted; accepted: a number of seconds above 0")
    run = _Run(
        layers,
        grid,
        timeout,
        ConfigRecord() if train_config is None else train_config,
        ConfigRecord() if evaluate_config is None else evaluate_config,
        initial_arrays,
    )
    with checkpoints.in_use(run.selection.checkpoint_dir):
        return run.up_to(num_rounds, evaluate_fn)


@dataclass
class _Run:
    """A run in progress."""

    layers: list[Strategy]
    grid: Grid
    timeout: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    initial: ArrayRecord

    def __post_init__(self) -> None:
        self.strategy = self.layers[0]
        self.selection: LabelAware = self.layers[-1]  # type: ignore[assignment]
        self.result = SelectionResult()
        self.result.arrays = self.initial
        self.kept: dict[str, Any] = {}  # the records of rounds as a checkpoint holds them
        # Before the first round: strategies write the round's number into them.
        self.configs = {
            name: identity.describe({n: v for n, v in config.items() if n != "server-round"})
            for name, config in (("train_config", self.train_config), ("evaluate_config", self.evaluate_config))
        }
        # What a wrapper was made with; a clipping norm that adapts is its memory, not a setting.
        self.configs["wrappers"] = {
            f"{type(layer).__name__}.{name}": value
            for layer in self.layers[:-1]
            for name, value in vars(layer).items()
            if isinstance(value, bool | int | float | str) and name not in server_state.KNOWN
        }
        self.files: RegisterFiles | None = None
        self.before: list[dict[str, str]] = []
        self.forgotten: list[str] | None = None
        self._accounted = any(getattr(layer, "accountant", None) is not None for layer in self.layers)
        if self.selection.replacements and self._accounted:
            raise InputError(
                "replacements: not with privacy accounting, which knows the cohort it was told; accepted: 0"
            )
        if self.selection.learning.reads_labels:
            check_wrappers(self.layers[:-1], self.selection.learning.reader)

    def up_to(
        self, num_rounds: int, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None
    ) -> SelectionResult:
        """Run the rounds that are left."""
        selection, result = self.selection, self.result
        for name, array in self.initial.items():
            if np.dtype(array.dtype).kind not in "biuf":
                raise InputError(f"initial_arrays: {name!r} holds values of type {array.dtype}; accepted: real numbers")
        selection.learning.begin(self.initial)
        if not is_finite_model(self.initial):
            raise InputError("initial_arrays: not all numbers are finite; accepted: a model that can be trained")
        done = self._continue(num_rounds) if selection.checkpoint_dir is not None else 0
        selection.progress.begin(result.rounds)
        selection.round_timeout = self.timeout
        selection.feedback.evaluate_config = self.evaluate_config
        log.info("Starting %s: rounds %d to %d", type(self.strategy).__name__, done + 1, num_rounds)
        self.strategy.summary()
        if done == 0 and evaluate_fn is not None:
            metrics = measured(evaluate_fn(0, result.arrays))
            _note(result.evaluate_metrics_serverapp, 0, metrics, "initial global evaluation")
        begin = selection.clock.now()
        self.before = server_state.attributes(self.layers, selection.own_attributes)
        selection.saves_itself = True
        try:
            if done == 0 and num_rounds > 0:
                self._take_census()
            for server_round in range(done + 1, num_rounds + 1):
                log.info("")
                log.info("[ROUND %s/%s]", server_round, num_rounds)
                self._round(server_round, evaluate_fn)
        finally:
            selection.saves_itself = False
        log.info("")
        log.info("Strategy execution finished in %.2fs", selection.clock.now() - begin)
        for line in ("", "Final results:", "", *(f"\t{line}" for line in str(result).splitlines())):
            log.info("%s", line)
        return result

    def _take_census(self) -> None:
        """A census before round 1, where the selector reads labels from last layers alone and wants one."""
        selection = self.selection
        if not selection.roster.nobody_reports:
            return
        census = HeadCensus(self.strategy, selection, self.grid, self.initial, self.train_config, self.timeout)
        if census.take() and selection.checkpoint_dir is not None:
            self._write(0)

    def _round(self, server_round: int, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None) -> None:
        selection, result = self.selection, self.result
        begin = selection.clock.now()
        answers = self._train(server_round)
        self._aggregate(server_round, answers)
        if selection.checkpoint_dir is not None and self._accounted:
            # A model that has been shown was released: trained again after a stop, it would be accounted for once.
            self._note_round(server_round, begin)
            self._write(server_round, evaluated=False)
        self._evaluate(server_round)
        if evaluate_fn is not None:
            metrics = measured(evaluate_fn(server_round, result.arrays))
            _note(result.evaluate_metrics_serverapp, server_round, metrics, "global evaluation")
        self._note_round(server_round, begin)
        if selection.checkpoint_dir is not None:
            self._write(server_round)
        selection.progress.tell(result.rounds[server_round])

    def _note_round(self, server_round: int, begin: float) -> None:
        """Write a round's record, as far as it is known."""
        last = self.selection.history[-1]
        last.seconds = self.selection.clock.now() - begin
        record = last.record()
        for name, kept in zip(("train", "evaluate", "server"), METRICS, strict=True):
            record[name] = dict(getattr(self.result, kept).get(server_round, {}))
        self.result.rounds[server_round] = record
        self.kept[str(server_round)] = packed(self.result.rounds, server_round)

    def _train(self, server_round: int) -> list[Answer]:
        """Train the cohort and, where wanted, stand-ins for those that failed; the answers that count."""
        selection, sent = self.selection, self.result.arrays
        told = ConfigRecord(dict(self.train_config))
        messages = self.strategy.configure_train(server_round, sent, self.train_config, self.grid)
        answers = selection.judge_training(exchange(self.grid, messages, self.timeout, selection.clock), sent)
        failed = [client for client, answer in selection.by_client(answers) if answer.failure is not None]
        wanted = min(len(failed), selection.replacements)
        stand_ins = selection.draw_stand_ins(wanted, self.grid, failed) if wanted else []
        if stand_ins:
            log.info("round %d: %s failed, asking %s in their place", server_round, failed, stand_ins)
            selection.standing_in = [selection.census.node_of(client) for client in stand_ins]
            try:  # with what the strategy found before: one that halves the learning rate does so once in a round
                messages = self.strategy.configure_train(server_round, sent, told, self.grid)
            finally:
                selection.standing_in = None
            more = exchange(self.grid, messages, self.timeout, selection.clock)
            answers = selection.judge_training([*answers, *more], sent)
        selection.learning.welcome_back(answers, self.grid)
        selection.note_answers(answers, stand_ins)
        selection.learning.learn(answers, sent, selection.history[-1])
        selection.learning.drop_excluded(answers)
        # For each that stood in, one that failed is not shown to Flower: a DP wrapper would void the round for it.
        good = sum(answer.failure is None for answer in answers[len(answers) - len(stand_ins) :]) if stand_ins else 0
        shown = []
        for answer in answers:
            if answer.failure is not None and good:
                good -= 1
                continue
            shown.append(answer)
        return shown

    def _aggregate(self, server_round: int, answers: Sequence[Answer]) -> None:
        selection, result = self.selection, self.result
        last = selection.history[-1]
        vectors = server_state.server_vectors(self.layers)
        sent = result.arrays
        arrays: ArrayRecord | None = None
        metrics: MetricRecord | None = None
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # looked at below
                arrays, metrics = self.strategy.aggregate_train(server_round, replies(answers))
        except PrivacyBudgetExhausted:
            raise
        except Exception as error:  # what is left after the replies were looked at must not end a run of days either
            last.problem = f"aggregation failed: {printable(repr(error))}"
        else:
            if arrays is None:
                last.problem = "nothing to aggregate"
            elif not is_finite_model(arrays) or not server_state.are_finite(server_state.server_vectors(self.layers)):
                last.problem = "the aggregated model is not finite"
        if last.problem is None and arrays is not None:
            result.arrays = arrays
            selection.learning.has_trained = True
        else:
            server_state.put_back(self.layers, vectors)
            self._go_on_from(sent)
            metrics = None if last.problem != "nothing to aggregate" else metrics
            log.error("round %d: %s, the model stays as it was", server_round, last.problem)
        _note(result.train_metrics_clientapp, server_round, joined(metrics, last), "training on the nodes")

    def _go_on_from(self, arrays: ArrayRecord) -> None:
        """FedAvgM keeps the model it made last, and would go on from that instead."""
        for layer in self.layers:
            if isinstance(layer, FedAvgM):
                layer.current_arrays = arrays

    def _evaluate(self, server_round: int) -> None:
        selection, result = self.selection, self.result
        messages = self.strategy.configure_evaluate(server_round, result.arrays, self.evaluate_config, self.grid)
        answers = selection.judge_evaluation(exchange(self.grid, messages, self.timeout, selection.clock))
        metrics = None
        try:
            metrics = self.strategy.aggregate_evaluate(server_round, replies(answers))
        except Exception:
            log.exception("round %d: the evaluations of the nodes could not be combined", server_round)
        _note(result.evaluate_metrics_clientapp, server_round, metrics, "evaluation on the nodes")

    # --- checkpoints
    def _write(self, server_round: int, *, evaluated: bool = True) -> None:
        try:
            self._save(server_round, evaluated)
        except OSError as error:  # going on would train rounds that a stop undoes
            written = evaluated and self._accounted  # before its evaluation
            then = f"to go on after round {server_round - (not written)}" if server_round else "from the beginning"
            raise InputError(
                f"checkpoint: round {server_round} cannot be written to {self.selection.checkpoint_dir}: "
                f"{error.strerror or error}; mend that and start again, {then}"
            ) from error

    def _save(self, server_round: int, evaluated: bool) -> None:
        selection, result = self.selection, self.result
        assert selection.checkpoint_dir is not None
        assert self.files is not None
        forgotten = self.forgotten
        if forgotten is None and server_round:
            forgotten = server_state.forgotten(self.layers, self.before, selection.own_attributes)
            self.forgotten = forgotten if evaluated else None  # evaluation may change more of it
            if self.forgotten:  # said once, after the first round of this process
                log.warning(
                    "checkpoint: does not hold %s, which changes from round to round; this run cannot be continued "
                    "unless the strategy gives it by memory() and takes it by remember()",
                    ", ".join(self.forgotten),
                )
        parts = self.files.save(selection.census.members, selection.census.changed)
        arrays, documents = server_state.gather(self.layers)
        meta: dict[str, Any] = {
            "selection": selection.state_dict(),
            "clients": parts,
            "layers": documents,
            "forgotten": forgotten or [],
            "start": _shapes(self.initial),
            "configs": self.configs,
            "told": [server_state.write_config(config) for config in (self.train_config, self.evaluate_config)],
            "rounds": self.kept,
            "metrics": {
                name: {str(number): dict(record) for number, record in getattr(result, name).items()}
                for name in METRICS
            },
        }
        model = {name: array.numpy() for name, array in result.arrays.items()}
        groups = {MODEL: model, SELECTOR: dict(selection.selector.arrays()), **arrays}
        if selection.watch is not None:
            groups[WATCH] = selection.watch.arrays()
        checkpoints.save(selection.checkpoint_dir, Checkpoint(server_round, groups, meta))
        selection.census.changed.clear()
        self.files.committed()

    def _continue(self, num_rounds: int) -> int:
        """Put the checkpoint back, if there is one; return the rounds that are done."""
        selection, result = self.selection, self.result
        assert selection.checkpoint_dir is not None
        self.files = RegisterFiles(selection.checkpoint_dir)
        found = checkpoints.load(selection.checkpoint_dir)
        if found is None:
            if selection.history:  # buffer, moments and what was learnt would be those of rounds that do not count
                raise InputError(
                    f"checkpoint_dir: {selection.checkpoint_dir} holds no checkpoint, and this strategy has begun a "
                    "run before; accepted: one that is made anew"
                )
            return 0
        where = selection.checkpoint_dir / checkpoints.FILE
        own = _shapes(self.initial)
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
        selection.check_settings(found.meta["selection"])
        for name, config in self.configs.items():
            identity.check_same(config, found.meta["configs"][name], "" if name == "wrappers" else f"{name}: ")
        server_state.restore(self.layers, found.arrays, found.meta["layers"])
        for config, saved in zip((self.train_config, self.evaluate_config), found.meta.get("told", ()), strict=False):
            server_state.read_config(config, saved)  # none in checkpoints of versions that did not keep them
        selection.census.restore(self.files.load(found.meta["clients"], selection.census.num_classes))
        selection.load_state_dict(found.meta["selection"], found.arrays.get(SELECTOR), found.arrays.get(WATCH))
        model = found.arrays[MODEL]
        result.arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in model.items()})
        self._go_on_from(result.arrays)  # where the same object made a model after the checkpoint
        result.rounds = unpacked({int(number): record for number, record in found.meta["rounds"].items()})
        self.kept = {str(number): packed(result.rounds, number) for number in result.rounds}
        for name in METRICS:
            records = found.meta["metrics"][name]
            getattr(result, name).update({int(number): MetricRecord(record) for number, record in records.items()})
        log.info("Continuing after round %d from %s", found.round, where)
        return found.round


def _note(kept: dict[int, MetricRecord], server_round: int, metrics: MetricRecord | None, what: str) -> None:
    if metrics is not None:
        kept[server_round] = metrics
        log.info("\t└──> %s: %s", what, dict(metrics))


def _layers(strategy: Strategy) -> list[Strategy]:
    """The strategy and what it wraps, outermost first, down to the label-aware one."""
    from fedentopt.flower.strategy import LabelAware

    layers = [strategy]
    while not isinstance(layers[-1], LabelAware):
        inner = getattr(layers[-1], "strategy", None)
        if not isinstance(inner, Strategy):
            raise InputError(f"strategy: {type(strategy).__name__} neither is nor wraps a LabelAware strategy")
        if type(layers[-1]).start is not Strategy.start:
            raise InputError(
                f"strategy: {type(layers[-1]).__name__} has a start() of its own, which this one would pass over; "
                "accepted: wrappers that leave the round loop to Flower"
            )
        layers.append(inner)
    return layers


def _shapes(arrays: ArrayRecord) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}
