"""What selectors that learn from training are told in Flower, and where it comes from.

need            source
loss            metrics of the training reply: `train_loss` (plain cross-entropy, mean over the samples of all local
                steps) and, for selectors that use it, `train_loss_rms` (root mean square of the samples' losses)
head, update    the reply's arrays minus those that were sent (which arrays are the last layer's: `heads`)
seconds         metric `train_seconds` of the training reply, else the time from sending to the reply
candidate_loss  metric `loss`, else `eval_loss`, of the reply to an evaluation message that goes to the candidates with
                the global model before they are chosen; its config has, besides what all evaluations are told,
                `purpose = "candidate-loss"` and, where the selector wants few samples, `samples`

A client whose reply lacks a figure, or has one that is not finite, is left out of what the selector learns. Where not a
single reply of enough clients has it (`replies.enough_to_tell`), the app does not serve the selector, and the run ends
with one sentence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedentopt.errors import InputError
from fedentopt.flower.exchange import Answer
from fedentopt.flower.heads import Heads, change_of
from fedentopt.flower.replies import arrays_of, enough_to_tell, metrics_of
from fedentopt.flower.report import ClientId
from fedentopt.selection import Candidates, Observation, Selector
from fedentopt.server.report import printable

log = logging.getLogger("flwr")

SERVED = frozenset({"loss", "head", "update", "seconds", "candidate_loss"})
PURPOSE = "candidate-loss"


@dataclass
class Feedback:
    """Reads from replies what a selector needs; last layers by `heads`."""

    selector: Selector
    heads: Heads
    weight_key: str
    loss_key: str = "train_loss"
    loss_rms_key: str = "train_loss_rms"
    seconds_key: str = "train_seconds"
    candidate_loss_keys: Sequence[str] = ("loss", "eval_loss")
    seen: set[str] = field(default_factory=set)
    """Needs that some reply has served."""
    lacking: dict[str, set[ClientId]] = field(default_factory=dict)
    """Clients whose replies did not serve a need, by need."""
    parameters: Sequence[str] = ()
    """Names of the arrays that an update is made of: the floating-point ones of the start model."""
    evaluate_config: Mapping[str, Any] = field(default_factory=dict)
    """What evaluations are told; the app's function that answers candidates' questions reads it, too."""

    def __post_init__(self) -> None:
        self.needs = frozenset(getattr(self.selector, "needs", ()))
        missing = ", ".join(sorted(self.needs - SERVED))
        if missing:
            raise InputError(
                f"selector: {type(self.selector).__name__} needs {missing}, which this strategy does not ask of its "
                f"clients; accepted: selectors that need label counts and {', '.join(sorted(SERVED))}"
            )

    # --- before selection
    def questions(
        self, wanted: Candidates, nodes: Sequence[int], arrays: ArrayRecord, round: int, keys: tuple[str, str]
    ) -> list[Message]:
        """Evaluation messages to the candidates' nodes; `keys` name the records of arrays and config."""
        told = ConfigRecord({**self.evaluate_config, "server-round": round, "purpose": PURPOSE})
        if wanted.samples is not None:
            told["samples"] = wanted.samples
        record = RecordDict({keys[0]: arrays, keys[1]: told})
        return [Message(record, node, MessageType.EVALUATE) for node in nodes]

    def losses(self, answers: Iterable[tuple[ClientId, Answer]]) -> dict[ClientId, float]:
        """What the candidates answered: those with a finite loss."""
        found: dict[ClientId, float] = {}
        others: set[str] = set()
        told = list(answers)
        for client, answer in told:
            if answer.failure is not None or answer.reply is None:
                continue
            metrics = metrics_of(answer.reply.content)
            others |= set(metrics)
            value = next((metrics[key] for key in self.candidate_loss_keys if key in metrics), None)
            if isinstance(value, int | float) and math.isfinite(value):
                found[client] = float(value)
        asked = {client for client, answer in told if answer.failure is None and answer.reply is not None}
        wanted = " or ".join(map(repr, self.candidate_loss_keys))
        self._served("candidate_loss", bool(found), asked - found.keys(), others, wanted)
        return found

    # --- after training
    def observe(
        self,
        answers: Iterable[tuple[ClientId, Answer]],
        sent: ArrayRecord,
        labelled: Mapping[ClientId, Observation] | None = None,
    ) -> None:
        """Tell the selector about the clients that trained.

        One that takes last layers for labels is told of those in `labelled` (`Heads.labelled`), as they are there.
        """
        if not self.needs - {"candidate_loss"}:
            return
        observations: dict[ClientId, Observation] = {}
        others: set[str] = set()
        came: set[ClientId] = set()
        for client, answer in answers:
            if answer.failure is not None or answer.reply is None:
                continue
            came.add(client)
            others |= set(metrics_of(answer.reply.content))
            seen = self._observation(answer, sent)
            if seen is not None and labelled is not None:
                known = labelled.get(client)
                seen = (
                    None
                    if known is None
                    else replace(
                        seen, samples=known.samples, head=known.head, travel=known.travel, untrained=known.untrained
                    )
                )
            if seen is not None:
                observations[client] = seen
        if came and "loss" in self.needs:
            self._served("loss", bool(observations), came - observations.keys(), others, repr(self.loss_key))
        self.selector.observe(observations)

    def _observation(self, answer: Answer, sent: ArrayRecord) -> Observation | None:
        assert answer.reply is not None
        content = answer.reply.content
        metrics = metrics_of(content)
        loss = rms = seconds = None
        if "loss" in self.needs:
            loss, rms = _number(metrics, self.loss_key), _number(metrics, self.loss_rms_key)
            if loss is None:
                return None
        if "seconds" in self.needs:
            seconds = _number(metrics, self.seconds_key)
            seconds = answer.seconds if seconds is None or seconds < 0 else seconds
        weight = metrics[self.weight_key]
        assert isinstance(weight, int | float)
        head = update = travel = None
        if self.needs & {"head", "update"}:
            arrays = arrays_of(content)
            if "head" in self.needs:
                head, travel = self.heads.change(answer, sent), self.heads.known_travel(answer, weight)
            if "update" in self.needs:
                update = _update(arrays, sent, self.parameters)
        return Observation(
            max(1, round(weight)), loss=loss, loss_rms=rms, head=head, update=update, seconds=seconds, travel=travel
        )

    def _served(self, need: str, found: bool, lacking: set[ClientId], others: Iterable[str], wanted: str) -> None:
        """Note whether a need was served. Never served by anybody of enough clients, it is the app's mistake; of fewer,
        a warning says so once, since a short run may end before enough are heard."""
        first = not self.lacking.get(need)
        self.lacking.setdefault(need, set()).update(lacking)
        if found:
            self.seen.add(need)
        elif need not in self.seen and others:
            kind, enough = type(self.selector).__name__, enough_to_tell(len(self.selector.clients))
            told = f"but no reply has the metric {wanted}; the replies have {printable(', '.join(sorted(others)))}"
            if len(self.lacking[need]) >= enough:
                raise InputError(f"selector: {kind} needs {need}, {told}")
            if first:
                log.warning(
                    "selector: %s needs %s, %s (the run ends once %d clients lack it)", kind, need, told, enough
                )


def parameters_of(start: ArrayRecord) -> list[str]:
    """Names of the floating-point arrays of a start model; averaging makes floats of counters too, later on."""
    return [name for name, array in start.items() if np.dtype(array.dtype).kind == "f"]


def _update(arrays: ArrayRecord, sent: ArrayRecord, names: Sequence[str]) -> np.ndarray:
    changes = [change_of(arrays, sent, name).ravel() for name in names]
    return np.concatenate(changes) if changes else np.zeros(0, dtype=np.float32)


def _number(metrics: Mapping[str, object], key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
