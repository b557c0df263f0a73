"""Flower's round loop, with a first round that need not be 1, replies that are looked at, and checkpoints
(`run_checkpoint`).

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
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import Strategy

from fedentopt.errors import InputError
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.flower import server_state
from fedentopt.flower.exchange import Answer, exchange, replies
from fedentopt.flower.head_census import HeadCensus
from fedentopt.flower.hiding import check_wrappers
from fedentopt.flower.options import check_whole, is_number
from fedentopt.flower.progress import SelectionResult, joined, measured
from fedentopt.flower.replies import is_finite_model
from fedentopt.flower.run_checkpoint import METRICS, RunCheckpoint
from fedentopt.server.report import printable

if TYPE_CHECKING:
    from fedentopt.flower.strategy import LabelAware

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
        self.checkpoint = RunCheckpoint(self.layers, self.initial, self.train_config, self.evaluate_config)
        if self.selection.replacements and self.checkpoint.accounted:
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
        done = self.checkpoint.resume(result, num_rounds)
        selection.progress.begin(result.rounds)
        selection.round_timeout = self.timeout
        selection.feedback.evaluate_config = self.evaluate_config
        log.info("Starting %s: rounds %d to %d", type(self.strategy).__name__, done + 1, num_rounds)
        self.strategy.summary()
        if done == 0 and evaluate_fn is not None:
            metrics = measured(evaluate_fn(0, result.arrays))
            _note(result.evaluate_metrics_serverapp, 0, metrics, "initial global evaluation")
        begin = selection.clock.now()
        self.checkpoint.begin()
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
        if census.take():
            self.checkpoint.write(self.result, 0)

    def _round(self, server_round: int, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None) -> None:
        selection, result = self.selection, self.result
        begin = selection.clock.now()
        answers = self._train(server_round)
        self._aggregate(server_round, answers)
        if self.checkpoint.accounted:
            # A model that has been shown was released: trained again after a stop, it would be accounted for once.
            self._note_round(server_round, begin)
            self.checkpoint.write(result, server_round, evaluated=False)
        self._evaluate(server_round)
        if evaluate_fn is not None:
            metrics = measured(evaluate_fn(server_round, result.arrays))
            _note(result.evaluate_metrics_serverapp, server_round, metrics, "global evaluation")
        self._note_round(server_round, begin)
        self.checkpoint.write(result, server_round)
        selection.progress.tell(result.rounds[server_round])

    def _note_round(self, server_round: int, begin: float) -> None:
        """Write a round's record, as far as it is known."""
        last = self.selection.history[-1]
        last.seconds = self.selection.clock.now() - begin
        record = last.record()
        for name, kept in zip(("train", "evaluate", "server"), METRICS, strict=True):
            record[name] = dict(getattr(self.result, kept).get(server_round, {}))
        self.result.rounds[server_round] = record

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
            server_state.go_on_from(self.layers, sent)
            metrics = None if last.problem != "nothing to aggregate" else metrics
            log.error("round %d: %s, the model stays as it was", server_round, last.problem)
        _note(result.train_metrics_clientapp, server_round, joined(metrics, last), "training on the nodes")

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
