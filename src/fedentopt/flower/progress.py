"""What an operator sees of a run while it goes: one record per round, in Flower's `Result`, in a file, by callbacks.

A record says who was picked, how even their labels are, what privacy their reports had, who failed and why, and the
metrics of the round. It is written to the file (JSON, a line per round, see `kept_records`) and handed to the callbacks
as soon as the round is over; a callback that fails is logged and does not stop the run.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from fedentopt.errors import InputError
from fedentopt.files import aside
from fedentopt.flower.kept_records import line
from fedentopt.flower.report import ClientId
from fedentopt.selection import Cohort
from fedentopt.server.report import printable

log = logging.getLogger("flwr")

Callback = Callable[[Mapping[str, Any]], None]
Combine = Callable[[list[RecordDict], str], MetricRecord]
PREFIX = "selection-"
MOST_REASONS = 20  # why a client did not evaluate: where the app cannot, all have one in every round


@dataclass
class RoundSelection:
    """A round's cohort, and what became of it: clients that answered, why others did not, who stood in for them.

    `suspects` are the known clients that claim more samples than `size_cap` allows, and those whose label report does
    not fit what their training shows, where that is audited; of these, `suspicions` says why. `not_evaluated` holds the
    first few of `evaluations_failed`: where nobody can evaluate, the reasons of all in every record would fill disks.
    """

    round: int
    cohort: Cohort
    answered: tuple[ClientId, ...] = ()
    failed: dict[ClientId, str] = field(default_factory=dict)
    stood_in: tuple[ClientId, ...] = ()
    not_evaluated: dict[ClientId, str] = field(default_factory=dict)
    evaluations_failed: int = 0
    suspects: tuple[ClientId, ...] = ()
    suspicions: dict[ClientId, str] = field(default_factory=dict)
    epsilon: float | None = None
    online: int = 0
    known: int = 0
    seconds: float = 0.0
    problem: str | None = None

    def note_evaluation(self, failed: Mapping[ClientId, str]) -> None:
        """These clients did not evaluate, and why."""
        self.evaluations_failed = len(failed)
        self.not_evaluated = dict(islice(failed.items(), MOST_REASONS))

    def record(self) -> dict[str, Any]:
        """The round as JSON can hold it."""
        return {
            "round": self.round,
            "cohort": list(self.cohort.clients),
            "entropy": self.cohort.entropy,
            "classes_covered": self.cohort.classes_covered,
            "divergence": self.cohort.divergence,
            "label_epsilon": self.epsilon,
            "answered": list(self.answered),
            "failed": {str(client): reason for client, reason in self.failed.items()},
            "stood_in": list(self.stood_in),
            "not_evaluated": {str(client): reason for client, reason in self.not_evaluated.items()},
            "evaluations_failed": self.evaluations_failed,
            "suspects": list(self.suspects),
            "suspicions": {str(client): why for client, why in self.suspicions.items()},
            "online": self.online,
            "known": self.known,
            "seconds": round(self.seconds, 3),
            "problem": self.problem,
        }

    def metrics(self) -> dict[str, int | float]:
        """The round in numbers, as Flower's MetricRecord can hold it."""
        numbers: dict[str, int | float] = {
            "clients": len(self.cohort.clients),
            "entropy": float(self.cohort.entropy),
            "classes-covered": self.cohort.classes_covered,
            "answered": len(self.answered),
            "failures": len(self.failed),
            "suspects": len(self.suspects),
        }
        if self.epsilon is not None:
            numbers["label-epsilon"] = self.epsilon
        return {PREFIX + name: value for name, value in numbers.items()}


@dataclass(repr=False)  # Flower's is a summary; the one made here would print the model
class SelectionResult(Result):
    """Flower's `Result`, with a record per round by its number: who was picked, who failed and why."""

    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)


class Progress:
    """Where records of rounds go."""

    def __init__(self, file: Path | None = None, callbacks: Sequence[Callback] = ()) -> None:
        self.file = file
        self.callbacks = tuple(callbacks)
        self._before: Mapping[str, Any] = {}  # the record of the file's last line

    def begin(self, done: Mapping[int, Mapping[str, Any]]) -> None:
        """Try the file before a round is spent, and leave in it the rounds that are done; what is there and
        holds no rounds is refused."""
        if self.file is None:
            return
        self._before = {}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _check_rounds(self.file)
            place = Path(os.path.realpath(self.file))  # a link keeps pointing where it did
            with tempfile.TemporaryFile(dir=place.parent):
                pass
            with aside(place) as part:
                part.write_text("".join(self._line(record) for _, record in sorted(done.items())), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"metrics_file: {self.file}: {error.strerror or error}; accepted: a file in a folder that can be "
                "written to"
            ) from error

    def tell(self, record: Mapping[str, Any]) -> None:
        """A round is over."""
        if self.file is not None:
            try:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(self._line(record))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                self._before = {}  # no line to point to
                log.error("metrics_file: %s: %s; the run goes on", self.file, error.strerror or error)
        for callback in self.callbacks:
            try:
                callback(copy.deepcopy(record))  # what it writes there must not end up in the checkpoint
            except Exception:
                log.exception("callback %s failed; the run goes on", getattr(callback, "__name__", callback))

    def _line(self, record: Mapping[str, Any]) -> str:
        short, self._before = line(record, self._before), record
        return json.dumps(_plain(short), ensure_ascii=False, allow_nan=False) + "\n"


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, as curves are drawn of them: `entropy`, `train/loss`, `server/accuracy`."""
    found = {
        name: float(record[name])
        for name in ("entropy", "classes_covered", "label_epsilon", "online", "known", "seconds")
        if record.get(name) is not None
    }
    found |= {name: float(len(record[name])) for name in ("answered", "failed", "suspects")}
    for group in ("train", "evaluate", "server"):
        for name, value in (record.get(group) or {}).items():
            if isinstance(value, int | float) and not name.startswith(PREFIX):
                found[f"{group}/{name}"] = float(value)
    return found


def to_tensorboard(folder: str | Path) -> Callback:
    """A callback that writes the numbers of each round as TensorBoard's curves (needs tensorboard and torch)."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(f"to_tensorboard: {error}; install it with: pip install tensorboard torch") from error
    writer = SummaryWriter(str(folder))

    def tensorboard(record: Mapping[str, Any]) -> None:
        for name, value in numbers_of(record).items():
            writer.add_scalar(name, value, record["round"])
        writer.flush()

    return tensorboard


def to_wandb(**options: Any) -> Callback:
    """A callback that logs the numbers of each round to Weights & Biases; options are those of `wandb.init`."""
    try:
        import wandb  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise InputError(f"to_wandb: {error}; install it with: pip install wandb") from error
    run = wandb.init(**options)

    def weights_and_biases(record: Mapping[str, Any]) -> None:
        run.log(numbers_of(record), step=record["round"])

    return weights_and_biases


def guarded(name: str, combine: Combine) -> Combine:
    """A function of the app's that combines replies' metrics, of which a failure costs the metrics and no more.

    Flower calls it after it has averaged the model, which would be lost with them.
    """

    def combined(records: list[RecordDict], weighted_by: str) -> MetricRecord:
        try:
            return MetricRecord(dict(combine(records, weighted_by)))
        except Exception as error:
            log.error("%s failed: %s; this round is without its metrics", name, printable(repr(error)))
            return MetricRecord()

    return combined


def measured(metrics: object) -> MetricRecord | None:
    """What an app's `evaluate_fn` returned, as it can be kept; refused where it cannot."""
    if metrics is None:
        return None
    try:
        return MetricRecord(dict(metrics))  # type: ignore[call-overload]
    except Exception as error:
        raise InputError(
            f"evaluate_fn: gave {metrics!r}; accepted: a MetricRecord (numbers of Python's own), or None"
        ) from error


def joined(metrics: MetricRecord | None, entry: RoundSelection) -> MetricRecord:
    """The round's training metrics with the selection's own beside them."""
    return MetricRecord({**(dict(metrics) if metrics is not None else {}), **entry.metrics()})


def _check_rounds(path: Path) -> None:
    """Refuse a file, there already, that does not begin with a round: it is about to be written anew."""
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise InputError(f"metrics_file: {path} is not a regular file; accepted: a file of rounds, or a new one")
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        first = file.readline()
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or "round" not in record:
        raise InputError(f"metrics_file: {path} is there and holds no rounds of a run; accepted: another file")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
