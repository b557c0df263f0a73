"""A run's folder: what the engine hands a run's recorder, kept on disk (`reading` reads it back).

    DIR/<run id>/  run.json              settings, versions, hardware, data set, digests of own code and weights
                   rounds.csv            one row per round
                   label_counts.csv      true label counts, one row per client
                   reported_counts.csv   what the server saw instead, where noise was added
                   checkpoint.safetensors  while the run is unfinished: model, state and all rounds so far
                   vectors-*.f32         beside it: what the method remembers of single clients
                   model.safetensors     the final model
                   client_accuracy.csv   its accuracy per client, where asked for
                   clients.csv           what the server knows of each client, where it doubts reports
                   summary.json          written last: its presence says that the run is finished

Every file is written aside and renamed. Numbers read back equal, so a run that was stopped and continued leaves
the same `rounds.csv` as one that went straight through, apart from its `seconds`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import LOCK_NAME, locked_folder, make_folder, read_json, write_json, write_text
from fedentopt.results.checked_files import read_about, read_summary
from fedentopt.results.checkpoint import load_checkpoint, save_checkpoint, save_tensors
from fedentopt.results.clients import CLIENTS, clients_csv
from fedentopt.results.environment import environment
from fedentopt.results.label_counts import CLIENT_ACCURACY, COUNTS, REPORTED, client_accuracy_csv, counts_csv
from fedentopt.results.reading import MODEL, ROUNDS, RUN, SUMMARY, is_same_data
from fedentopt.results.records import Checkpoint, Outcome, RoundRecord, RunIdentity, RunStart
from fedentopt.results.rounds import rounds_csv
from fedentopt.results.summary import summarise_outcome
from fedentopt.results.vector_files import VectorFiles

CHECKPOINT = "checkpoint.safetensors"


def about_run(config: RunIdentity, start: RunStart, command: str) -> dict[str, Any]:
    """The content of `run.json`: settings, versions, hardware, data set, digests, the command that repeats the run."""
    return {
        "config": config.to_dict(),
        "method": config.method,
        "run_id": config.run_id,
        **environment(),
        "device": start.device,
        "trainer": start.trainer,
        **({"command": command} if command else {}),
        "started": _now(),
        "dataset": {
            "name": config.dataset,
            "classes": list(start.class_names),
            "train": start.train_samples,
            "test": start.test_samples,
            **({"digest": start.data_digest} if start.data_digest else {}),
        },
        **({"code": {"digest": start.code_digest}} if start.code_digest else {}),
        **({"weights": {"digest": start.weights_digest}} if start.weights_digest else {}),
    }


class RunFolder:
    """Recorder of one run in `out_dir/<run id>/`.

    With `resume` a checkpoint of the same settings is continued; without, the run starts afresh and what an
    earlier one left stays until the new one has its first rounds to put in its place. `command` is what a person types
    to make this run again, for `run.json`.
    """

    def __init__(
        self,
        out_dir: Path,
        config: RunIdentity,
        *,
        resume: bool = True,
        targets: Iterable[float] = (),
        command: str = "",
    ) -> None:
        self.config = config
        self.path = _folder_of(Path(out_dir), config) if resume else Path(out_dir) / config.run_id
        self._resume = resume
        self._targets = tuple(targets)
        self._command = command
        self._records: list[RoundRecord] = []
        self._vectors = VectorFiles(self.path)
        self._resumed_round = 0
        self._start: RunStart | None = None  # known, not yet written
        self._client_names: tuple[str, ...] = ()

    def is_finished(self) -> bool:
        """Whether the folder holds this run complete; one with another run in it, or a summary that cannot be used, is
        an `InputError`."""
        try:
            if not (self.path / SUMMARY).exists():
                return False
        except OSError as error:  # a name too long, a folder that may not be entered
            raise InputError(f"out: {self.path} cannot be used: {error.strerror or error}") from error
        if not _is_run(self.path, self.config):
            raise InputError(
                f"{self.path / RUN}: holds a run with other settings; move the folder away or give another one"
            )
        return bool(read_summary(self.path / SUMMARY))

    def is_of(self, digest: str) -> bool:
        """Whether the run in the folder was made of data with this digest, as far as it is known."""
        noted = self._noted("dataset")
        return not noted or not digest or is_same_data(noted, digest)

    def is_of_code(self, digest: str) -> bool:
        """Whether the run in the folder was made with own code of this digest, as far as it is known."""
        noted = self._noted("code")
        return not noted or not digest or noted == digest

    def check_code(self, digest: str, ways_out: str) -> None:
        """Refuse own code of another digest than that of the run in the folder; `ways_out` is what a person can do."""
        if not self.is_of_code(digest):
            raise InputError(
                f"code: the code behind {self.config.method} has changed since {self.path} was made "
                f"(digest {self._noted('code')[:8]}, now {digest[:8]}); {ways_out}"
            )

    def check_weights(self, digest: str, ways_out: str) -> None:
        """Refuse a file of start weights of another digest than that of the run in the folder, as `check_code` does."""
        noted = self._noted("weights")
        if noted and digest and noted != digest:
            raise InputError(f"weights: the file is not the one that {self.path} was made from; {ways_out}")

    def _noted(self, what: str) -> str:
        """The digest in `run.json` of the `dataset`, the own `code` or the `weights`; empty where it has none."""
        about = read_about(self.path / RUN) if (self.path / RUN).exists() else {}
        return str(about.get(what, {}).get("digest", ""))

    def can_resume(self) -> bool:
        """Whether the folder holds a checkpoint that `resume` would try to continue from."""
        return self._resume and (self.path / CHECKPOINT).exists()

    def rounds_kept(self) -> int:
        """How many rounds a checkpoint in the folder has, by the table beside it; 0 where there is none to tell."""
        if not self.can_resume():
            return 0
        try:
            return max(0, (self.path / ROUNDS).read_text(encoding="utf-8").count("\n") - 1)
        except (OSError, UnicodeDecodeError):
            return 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder, which is created if need be and removed if it stays empty."""
        make_folder(self.path)
        try:
            with locked_folder(self.path):
                yield
        finally:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # refuses unless empty

    def clear_lock(self) -> None:
        """Remove the lock file that a killed process left behind. A finished run, which nobody takes the lock of again,
        would keep it; one that somebody holds stays, and so does one in a folder that may only be read."""
        if os.path.lexists(self.path / LOCK_NAME):
            with contextlib.suppress(InputError), locked_folder(self.path):
                pass

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        """The last checkpoint and the records up to it, or None to start at round 1."""
        if not self.can_resume():
            return None
        checkpoint, records = load_checkpoint(self.path / CHECKPOINT, self.config, self._vectors)
        self._records = list(records)
        self._resumed_round = checkpoint.round
        return checkpoint, records

    def start(self, start: RunStart) -> None:
        """Note what is fixed before round 1; after `resume`, refuse data or code other than those of the first part."""
        make_folder(self.path)
        self._start, self._client_names = start, start.client_names
        if self._resumed_round:
            self._check_same_data(start)
            ways_out = "bring the old {} back, give another folder, or start the run again with --no-resume"
            self.check_code(start.code_digest, ways_out.format("code"))
            self.check_weights(start.weights_digest, ways_out.format("file"))
            self._write_resumed(start)
            self._start = None
        elif not ((self.path / SUMMARY).exists() or (self.path / CHECKPOINT).exists()):
            self._write_start()

    def record(self, record: RoundRecord) -> None:
        """Keep one round; it reaches the disk with the next checkpoint."""
        self._records.append(record)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint, which is the moment from which the run continues, then the readable table."""
        self._write_start()
        records = [record for record in list(self._records) if record.round <= checkpoint.round]
        save_checkpoint(self.path / CHECKPOINT, self.config, checkpoint, records, self._vectors)
        # Not waited for: the checkpoint holds the same rounds, so a power cut loses nothing.
        write_text(self.path / ROUNDS, rounds_csv(records, self._client_names), durable=False)
        if checkpoint.clients is not None:
            write_text(self.path / CLIENTS, clients_csv(checkpoint.clients, self._client_names), durable=False)

    def finish(self, outcome: Outcome) -> None:
        """Write the results; `summary.json` comes last and makes the run a finished one."""
        self._write_start()
        run_id = self.config.run_id
        save_tensors(self.path / MODEL, outcome.model, {"run_id": run_id, "model": self.config.model})
        write_text(self.path / ROUNDS, rounds_csv(outcome.records, self._client_names))
        if outcome.client_accuracy is not None:
            write_text(self.path / CLIENT_ACCURACY, client_accuracy_csv(outcome.client_accuracy, self._client_names))
        if outcome.client_records is not None:
            write_text(self.path / CLIENTS, clients_csv(outcome.client_records, self._client_names))
        write_json(self.path / SUMMARY, summarise_outcome(outcome, self._targets))
        (self.path / CHECKPOINT).unlink(missing_ok=True)
        self._vectors.remove()

    def _write_start(self) -> None:
        """Write what `start` brought, once; an older finished run stops being one before anything is replaced."""
        start, self._start = self._start, None
        if start is None:
            return
        # A checkpoint that is not continued goes too: beside the new notes it would pass for one of the new data.
        for name in (SUMMARY, CHECKPOINT, MODEL, ROUNDS, REPORTED, CLIENT_ACCURACY, CLIENTS):
            (self.path / name).unlink(missing_ok=True)
        self._vectors.remove()
        write_json(self.path / RUN, about_run(self.config, start, self._command))
        write_text(self.path / COUNTS, self._counts(start, start.label_counts))
        if start.reported_counts is not None:
            write_text(self.path / REPORTED, self._counts(start, start.reported_counts))

    @staticmethod
    def _counts(start: RunStart, counts: np.ndarray) -> str:
        return counts_csv(counts, start.class_names, start.client_names)

    def _check_same_data(self, start: RunStart) -> None:
        path = self.path / COUNTS
        same = not path.exists() or path.read_bytes() == self._counts(start, start.label_counts).encode()
        if not same or not self.is_of(start.data_digest):
            raise InputError(
                f"dataset: {self.config.dataset!r} is not what {path} was made from; "
                f"bring the old data back, or start the run again with --no-resume"
            )

    def _write_resumed(self, start: RunStart) -> None:
        """Add to `run.json` where the run was continued: another machine or version may have done it."""
        path = self.path / RUN
        about = read_json(path)
        again = {"round": self._resumed_round + 1, "started": _now(), **environment()}
        again |= {"device": start.device, "trainer": start.trainer}
        write_json(path, about | {"resumed": [*about.get("resumed", []), again]})


def _folder_of(out_dir: Path, config: RunIdentity) -> Path:
    """The run's folder, or the one it has from a version that named runs by their partition as it was typed."""
    path, words = out_dir / config.run_id, config.run_id.split("_")
    if len(words) != 6 or not os.path.isdir(out_dir) or os.path.lexists(path):
        return path
    alike = _names_alike(out_dir, os.stat(out_dir).st_mtime_ns).get((*words[:2], *words[3:5]), ())
    for name in alike:
        with contextlib.suppress(InputError):  # what cannot be read there is not this run
            if name.split("_")[2] != words[2] and _is_run(out_dir / name, config):
                return out_dir / name
    return path


@functools.lru_cache(maxsize=1)  # a sweep asks for hundreds of runs in a folder of thousands
def _names_alike(out_dir: Path, changed: int) -> dict[tuple[str, ...], list[str]]:
    """Names of runs by all that they say but the partition and the digest; `changed`: when one was last added."""
    found: dict[tuple[str, ...], list[str]] = {}
    with contextlib.suppress(OSError):  # a folder that may not be read: whoever uses it says so
        for name in sorted(os.listdir(out_dir)):
            words = name.split("_")
            if len(words) == 6:
                found.setdefault((*words[:2], *words[3:5]), []).append(name)
    return found


def _is_run(folder: Path, config: RunIdentity) -> bool:
    """Whether a folder's `run.json` has these settings."""
    return bool(read_about(folder / RUN)["config"] == json.loads(json.dumps(config.to_dict())))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
