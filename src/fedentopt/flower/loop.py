"""Flower's round loop, with a first round that need not be 1 and a checkpoint after every round.

Flower's `Strategy.start` always begins at round 1, and strategies use the round's number (FedAdam corrects its bias
with it, clients decay their learning rate), so a continued run needs a loop of its own. It speaks to strategies
through Flower's public methods only and works for wrappers around a label-aware strategy as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedentopt.errors import InputError
from fedentopt.flower import checkpoint as checkpoints
from fedentopt.flower import server_state
from fedentopt.flower.checkpoint import Checkpoint
from fedentopt.flower.exchange import exchange, replies

if TYPE_CHECKING:
    from fedentopt.flower.strategy import LabelAware

MODEL = "model"
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
) -> Result:
    """Run a label-aware strategy, or a wrapper around one (such as Flower's DP wrappers), up to round `num_rounds`.

    Arguments and result are those of Flower's `Strategy.start`. `timeout` bounds every wait for replies: a node that
    is dead or too slow is then left out of the round. With a `checkpoint_dir` whose checkpoint says that round r is
    done, the run goes on with round r + 1, the checkpoint's model and the same buffer; `evaluate_fn` is then not
    called for the start model.
    """
    layers = _layers(strategy)
    selection: LabelAware = layers[-1]  # type: ignore[assignment]
    train_config = ConfigRecord() if train_config is None else train_config
    evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
    result = Result()
    result.arrays = initial_arrays
    done = _continue(layers, initial_arrays, num_rounds, result) if selection.checkpoint_dir is not None else 0

    log.info("Starting %s: rounds %d to %d", type(strategy).__name__, done + 1, num_rounds)
    strategy.summary()
    if done == 0 and evaluate_fn is not None:
        _note(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, result.arrays), "initial global evaluation")
    begin = time.monotonic()
    selection.saves_itself = True
    try:
        for server_round in range(done + 1, num_rounds + 1):
            log.info("")
            log.info("[ROUND %s/%s]", server_round, num_rounds)
            _round(strategy, selection, grid, server_round, timeout, train_config, evaluate_config, result)
            if evaluate_fn is not None:
                metrics = evaluate_fn(server_round, result.arrays)
                _note(result.evaluate_metrics_serverapp, server_round, metrics, "global evaluation")
            if selection.checkpoint_dir is not None:
                _save(layers, server_round, initial_arrays, result)
    finally:
        selection.saves_itself = False
    log.info("")
    log.info("Strategy execution finished in %.2fs", time.monotonic() - begin)
    return result


def _round(
    strategy: Strategy,
    selection: LabelAware,
    grid: Grid,
    server_round: int,
    timeout: float,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    result: Result,
) -> None:
    answers = exchange(grid, strategy.configure_train(server_round, result.arrays, train_config, grid), timeout)
    selection.note_answers(answers)
    arrays, metrics = strategy.aggregate_train(server_round, replies(answers))
    if arrays is not None:
        result.arrays = arrays
    else:
        log.warning("round %d: nothing to aggregate, the model stays as it was", server_round)
    _note(result.train_metrics_clientapp, server_round, metrics, "training on the nodes")

    answers = exchange(grid, strategy.configure_evaluate(server_round, result.arrays, evaluate_config, grid), timeout)
    metrics = strategy.aggregate_evaluate(server_round, replies(answers))
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
        layers.append(inner)
    return layers


def _save(layers: list[Strategy], server_round: int, initial: ArrayRecord, result: Result) -> None:
    selection: LabelAware = layers[-1]  # type: ignore[assignment]
    assert selection.checkpoint_dir is not None
    arrays, documents = server_state.gather(layers)
    meta: dict[str, Any] = {
        "selection": selection.state_dict(),
        "layers": documents,
        "start": _shapes(initial),
        "metrics": {
            name: {str(number): dict(record) for number, record in getattr(result, name).items()} for name in METRICS
        },
    }
    model = {name: array.numpy() for name, array in result.arrays.items()}
    checkpoints.save(selection.checkpoint_dir, Checkpoint(server_round, {MODEL: model, **arrays}, meta))


def _shapes(arrays: ArrayRecord) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _continue(layers: list[Strategy], initial: ArrayRecord, num_rounds: int, result: Result) -> int:
    """Put the checkpoint back, if there is one; return the rounds that are done."""
    selection: LabelAware = layers[-1]  # type: ignore[assignment]
    assert selection.checkpoint_dir is not None
    checkpoints.make_folder(selection.checkpoint_dir)
    found = checkpoints.load(selection.checkpoint_dir)
    if found is None:
        return 0
    where = selection.checkpoint_dir / checkpoints.FILE
    model = found.arrays[MODEL]
    own = _shapes(initial)
    saved = {name: tuple(shape) for name, shape in found.meta["start"].items()}  # now it may differ: boosted trees grow
    if own != saved:
        odd = next(name for name in [*own, *saved] if own.get(name) != saved.get(name))
        raise InputError(f"checkpoint: {where} holds another model: {odd} is {saved.get(odd)}, not {own.get(odd)}")
    if found.round > num_rounds:
        raise InputError(f"num_rounds: {num_rounds}, but {where} is already at round {found.round}")
    server_state.restore(layers, found.arrays, found.meta["layers"])
    selection.load_state_dict(found.meta["selection"])
    result.arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in model.items()})
    for name in METRICS:
        records = found.meta["metrics"][name]
        getattr(result, name).update({int(number): MetricRecord(record) for number, record in records.items()})
    log.info("Continuing after round %d from %s", found.round, where)
    return found.round
