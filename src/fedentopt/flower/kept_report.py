"""A noisy label report, drawn once and kept, so that asking again teaches nothing.

A report that is drawn anew at every question loses its privacy: the mean of n answers has noise n^(-1/2) as
large, and by sequential composition n answers cost n times epsilon. A node therefore keeps its report in its state
(for the run) and in a file of its owner's (across runs). What is kept is the noisy report, its epsilon, and a
salted, deliberately slow hash (scrypt) of the true counts, which tells whether the data are still the same without
the true counts being stored beside the noisy ones.

The file is JSON, written aside and renamed (where the path is a link: beside what it points to), readable by its
owner only, and locked while it is read and written, since Flower may answer two runs at once in two processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import aside, lock_file

FORMAT = "fedentopt label reports"


@dataclass(frozen=True)
class KeptReport:
    """One draw of noisy counts: what was drawn, at which epsilon, from which (hashed) true counts."""

    counts: tuple[float, ...]
    epsilon: float
    salt: str
    fingerprint: str
    drawn: str
    draws: int
    epsilon_spent: float

    @classmethod
    def of(cls, noisy: np.ndarray, epsilon: float, true_counts: np.ndarray, before: KeptReport | None) -> KeptReport:
        """A fresh draw. `before` is the report it replaces, whose cost is carried on."""
        salt = secrets.token_hex(16)
        return cls(
            counts=tuple(float(value) for value in noisy),
            epsilon=epsilon,
            salt=salt,
            fingerprint=_fingerprint(true_counts, salt),
            drawn=datetime.now(UTC).isoformat(timespec="seconds"),
            draws=1 + (before.draws if before else 0),
            epsilon_spent=epsilon + (before.epsilon_spent if before else 0.0),
        )

    def describes(self, true_counts: np.ndarray) -> bool:
        """Whether the data still have the counts this report was drawn from."""
        return hmac.compare_digest(self.fingerprint, _fingerprint(true_counts, self.salt))

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; floats survive the round trip bit for bit."""
        return {**asdict(self), "counts": list(self.counts)}

    @classmethod
    def from_dict(cls, fields: Any) -> KeptReport:
        """The reverse; anything that does not look like a report is refused."""
        try:
            report = cls(
                counts=tuple(float(value) for value in fields["counts"]),
                epsilon=float(fields["epsilon"]),
                salt=str(fields["salt"]),
                fingerprint=str(fields["fingerprint"]),
                drawn=str(fields["drawn"]),
                draws=int(fields["draws"]),
                epsilon_spent=float(fields["epsilon_spent"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"kept label report: not readable ({error!r})") from error
        if not (report.counts and all(map(math.isfinite, report.counts)) and report.epsilon > 0):
            raise InputError("kept label report: counts must be finite numbers and epsilon above 0")
        return report


def _fingerprint(true_counts: np.ndarray, salt: str) -> str:
    text = json.dumps([int(count) for count in true_counts]).encode()
    return hashlib.scrypt(text, salt=bytes.fromhex(salt), n=2**14, r=8, p=1).hex()


class ReportFile:
    """The owner's file of kept reports, one a client, held under a lock between `open_report_file` and its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reports = self._read()

    def get(self, client: str) -> KeptReport | None:
        """The report kept for this client."""
        return KeptReport.from_dict(self._reports[client]) if client in self._reports else None

    def put(self, client: str, report: KeptReport) -> None:
        """Keep a report; on disk before this returns, so that no answer leaves that would be drawn again."""
        self._reports[client] = report.to_dict()
        with aside(self.path, private=True) as part:
            part.write_text(json.dumps({"format": FORMAT, "version": 1, "reports": self._reports}, indent=1))

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise InputError(f"label-report-file: {self.path} is not JSON ({error})") from error
        reports = content.get("reports") if isinstance(content, dict) and content.get("format") == FORMAT else None
        if not isinstance(reports, dict):
            raise InputError(f"label-report-file: {self.path} is not a file of kept label reports")
        return reports


@contextlib.contextmanager
def open_report_file(path: Path) -> Iterator[ReportFile]:
    """Open the owner's file, alone until the end of the block; it need not exist, its folder must.

    A link is followed first, so that the file it points to is written and locked, not the link replaced. What exists
    and is not a regular file is refused.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):  # still a link: it leads back to itself
        raise InputError(f"label-report-file: {path} is not a regular file; accepted: a file of kept reports, or none")
    if not path.parent.is_dir():
        raise InputError(f"label-report-file: there is no folder {path.parent}")
    lock = path.with_name(path.name + ".lock")
    with lock_file(lock, _unlockable, _unlockable, patience=math.inf, among_threads=True, mode=0o600):
        yield ReportFile(path)


def _unlockable(error: object) -> InputError:
    return InputError(f"label-report-file: cannot be locked ({error})")
