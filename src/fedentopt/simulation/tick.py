"""The figures of a tick: on their way from the device, then read and handed to the runs' recorders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fedentopt.results.records import RoundRecord
from fedentopt.simulation.evaluation import HeldOutScores, Scores
from fedentopt.simulation.planning import RoundPlan
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.traffic import traffic


@dataclass(frozen=True)
class Tick:
    """One round of several runs whose figures are still on their way, complete once `ready` has passed."""

    runs: list[RunState]
    plans: list[RoundPlan]
    chosen: list[tuple[int, ...]]
    evaluated: list[RunState]
    scores: Scores | None
    validated: list[RunState]
    held_out: HeldOutScores | None
    finite: torch.Tensor
    ready: torch.cuda.Event | None


class TickReader:
    """Reads ticks in the order in which they were queued."""

    def __init__(self, class_sizes: torch.Tensor, say: Callable[[str], None]) -> None:
        self._class_sizes, self._say = class_sizes, say
        self._clock = time.perf_counter()

    def read(self, tick: Tick) -> Iterator[tuple[RunState, RoundRecord]]:
        """Wait for a tick's figures, and record them run by run; a run that diverged is marked."""
        if tick.ready is not None:
            tick.ready.synchronize()
        now = time.perf_counter()
        seconds, self._clock = (now - self._clock) / len(tick.runs), now
        order = {id(run): i for i, run in enumerate(tick.evaluated)}
        places = {id(run): i for i, run in enumerate(tick.validated)}
        for i, (run, plan, chosen) in enumerate(zip(tick.runs, tick.plans, tick.chosen, strict=True)):
            if run.diverged_round is None and not bool(tick.finite[i]):
                run.diverged_round = plan.round
                self._say(f"{run.config.run_id}: diverged in round {plan.round}; counted as chance from there on")
            figures = None
            if tick.scores is not None and id(run) in order:
                figures = tick.scores.read(order[id(run)], self._class_sizes)
            held_out = None
            if tick.held_out is not None and id(run) in places:
                held_out = tick.held_out.read(places[id(run)])
                if plan.round == run.rounds:
                    run.hits = tick.held_out.hits[places[id(run)]].numpy()
            record = _record(run, plan, chosen, figures, held_out, seconds)
            run.records.append(record)
            run.recorder.record(record)
            yield run, record


def _record(
    run: RunState, plan: RoundPlan, chosen: tuple[int, ...],
    figures: tuple[float, float, tuple[float, ...]] | None, held_out: tuple[float, float] | None, seconds: float,
) -> RoundRecord:  # fmt: skip
    bits, covered = run.planner.cohort_measures(chosen)
    over = run.diverged_round is not None and plan.round > run.diverged_round
    up, down = (0, 0) if over else traffic(run, plan, chosen)
    accuracy, loss, per_class = figures if figures is not None else (None, None, None)
    validated: tuple[float | None, float | None] = (None, None) if held_out is None else held_out
    if run.diverged_round is not None and figures is not None:
        chance = 100.0 / run.num_classes
        accuracy, loss, per_class = chance, None, (chance,) * run.num_classes
        validated = (None, None) if held_out is None else (chance, None)
    return RoundRecord(
        round=plan.round, clients=chosen, trained=plan.trained, entropy=bits, classes_covered=covered,
        bytes_up=up, bytes_down=down, seconds=seconds, accuracy=accuracy, loss=loss, class_accuracy=per_class,
        simulated_seconds=plan.seconds + (run.census_seconds if plan.round == 1 else 0.0), asked=len(plan.asked),
        selection_seconds=plan.selection_seconds, validation_accuracy=validated[0], validation_loss=validated[1],
        **plan.knowledge,
    )  # fmt: skip
