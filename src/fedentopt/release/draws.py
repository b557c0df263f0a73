"""Noisy label counts, drawn once per release and kept, so that asking again teaches nothing.

An answer that is drawn anew at every question loses its privacy: the mean of n answers has noise n^(-1/2) as large,
and by sequential composition n answers cost n times epsilon. An answer that is refused or drawn anew *when the data
have changed* tells, without noise, that they have. So the first answer of a release is the only one, whatever the data
are by then; the labels are not even read again. New data are the owner's to announce, by a new release number, and all
releases together stay within the owner's total: they are sequentially composed, epsilon_1 + epsilon_2 + ...

Kept are the noisy counts, their epsilon and what was spent: nothing that is computed from the true counts in any other
way, no hash of them either, since small counts can be found by trying. The report file is JSON, written aside and
renamed, for its owner alone, with file and folder synced to the disk before the answer leaves, and locked while it is
used, since two runs may ask at once. A second copy, the ledger, lies in another folder under a name made of the
file's path; either restores the other, so who deletes the report file gets the old answer and not a new draw.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.files import aside, lock_file
from fedentopt.privacy import check_sensitivity, discrete_laplace
from fedentopt.release.owner import EPSILON, FILE, LEDGER, RELEASE, TOTAL, OwnerSettings, default_ledger

FORMAT = "fedentopt label reports"
VERSION = 2

log = logging.getLogger("fedentopt.release")


@dataclass(frozen=True)
class Draw:
    """One draw of noisy counts. `spent` is the epsilon it stands for, which for files of version 1 covers redraws."""

    release: int
    counts: tuple[int, ...] | tuple[float, ...]
    epsilon: float
    samples_per_person: int | None
    spent: float
    drawn: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; numbers survive the round trip bit for bit."""
        return {**asdict(self), "counts": list(self.counts)}

    @classmethod
    def from_dict(cls, fields: Any) -> Draw:
        """The reverse; anything that does not look like a draw is refused."""
        try:
            counts = fields["counts"]
            whole = all(isinstance(value, int) and not isinstance(value, bool) for value in counts)
            persons = fields.get("samples_per_person")
            draw = cls(
                release=int(fields["release"]),
                counts=tuple(counts) if whole else tuple(float(value) for value in counts),
                epsilon=float(fields["epsilon"]),
                samples_per_person=None if persons is None else int(persons),
                spent=float(fields["spent"]),
                drawn=str(fields["drawn"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"kept label report: not readable ({error!r})") from error
        sane = draw.counts and all(map(math.isfinite, draw.counts)) and draw.release >= 1
        if not (sane and 0 < draw.epsilon < math.inf and draw.epsilon <= draw.spent < math.inf):
            raise InputError("kept label report: counts must be finite, release 1 or more, 0 < epsilon <= spent")
        return draw


def draw_counts(counts: ArrayLike, owner: OwnerSettings, samples_per_person: int | None = None) -> Draw:
    """One draw at the owner's epsilon, kept nowhere: for simulated clients. A real one uses `release_counts`.

    With `samples_per_person` the counts must be those of clipped persons (`privacy.clip_persons`).
    """
    if owner.epsilon is None:
        raise InputError(f"{EPSILON}: true counts are not drawn")
    if samples_per_person is not None:
        samples_per_person = check_sensitivity(samples_per_person, "samples_per_person")
    noisy = discrete_laplace(counts, owner.epsilon, sensitivity=samples_per_person or 1)
    return Draw(
        release=owner.release,
        counts=tuple(noisy.ravel().tolist()),
        epsilon=owner.epsilon,
        samples_per_person=samples_per_person,
        spent=owner.epsilon,
        drawn=datetime.now(UTC).isoformat(timespec="microseconds"),
    )


def release_counts(
    counts: ArrayLike | Callable[[], ArrayLike],
    owner: OwnerSettings,
    *,
    name: str = "",
    samples_per_person: int | None = None,
) -> Draw:
    """The one answer of the owner's release: the kept draw, or the first one, kept before this returns.

    `counts` (or what gives them, called only if there is a draw to make) are the client's true counts, of clipped
    persons where `samples_per_person` is given. `name` tells clients apart that share a file. Refused: no file, a file
    or ledger that cannot be used or is none, and a release that the owner's total does not cover.
    """
    if owner.epsilon is None:
        raise InputError(f"{EPSILON}: true counts are not drawn")
    if owner.file is None:
        raise InputError(f"{FILE}: not set; with noise it is needed, since without it every run would draw anew")
    if not isinstance(name, str):  # as a key of JSON it would come back as text, and its answer be drawn anew
        raise InputError(f"name: {name!r} is not accepted; accepted: text")
    with _alone(owner.file) as path:
        ledger = _ledger_of(path, owner)
        in_file, in_ledger = _read(path, FILE), _read(ledger, LEDGER) if ledger else {}
        draws = list(dict.fromkeys([*in_file.get(name, ()), *in_ledger.get(name, ())]))
        answer = next((draw for draw in draws if draw.release == owner.release), None)
        if answer is None:
            _afford(draws, owner)
            values = counts() if callable(counts) else counts
            if np.ndim(values) != 1 or np.size(values) == 0:
                raise InputError(f"counts: of shape {np.shape(values)}; accepted: one count per class")
            answer = draw_counts(values, owner, samples_per_person)
            draws.append(answer)
            log.warning(
                "drew label report of release %d at epsilon %g; spent so far: %g",
                answer.release,
                answer.epsilon,
                math.fsum(draw.spent for draw in draws),
            )
        elif answer.epsilon != owner.epsilon or answer.samples_per_person != samples_per_person:
            log.warning(
                "release %d was drawn at epsilon %g and is kept; another one needs another %s",
                answer.release,
                answer.epsilon,
                RELEASE,
            )
        if ledger and in_ledger.get(name) != draws:  # first: what is spent must be on record, whatever happens next
            _write_ledger(ledger, path, {**in_ledger, name: draws}, required=owner.ledger is not None)
        if in_file.get(name) != draws or _outdated(path):
            _write(path, {**in_file, name: draws})
    return answer


def _afford(draws: Sequence[Draw], owner: OwnerSettings) -> None:
    """Refuse a draw that the owner's total does not cover; decimals add up as they were written, 0.1 thrice to 0.3."""
    assert owner.epsilon is not None
    spent = sum((_decimal(draw.spent) for draw in draws), Fraction(0))
    total = _decimal(owner.epsilon if owner.total is None else owner.total)
    if spent + _decimal(owner.epsilon) > total:
        raise InputError(
            f"{TOTAL}: release {owner.release} at epsilon {owner.epsilon:g} would bring what was spent from "
            f"{float(spent):g} to more than {float(total):g}; the owner may raise {TOTAL} or lower {RELEASE}"
        )


def _decimal(value: float) -> Fraction:
    return Fraction(repr(float(value)))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Hold the owner's file, there already or not; its folder must be. A link is followed, and not replaced."""
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):  # still a link: it leads back to itself
        raise InputError(f"{FILE}: {path} is not a regular file; accepted: a file of kept reports, or none")
    if not path.parent.is_dir():
        raise InputError(f"{FILE}: there is no folder {path.parent}")
    lock = path.with_name(path.name + ".lock")
    with lock_file(lock, _unlockable, _unlockable, patience=math.inf, inherited=True, mode=0o600, must=True):
        yield path


def _unlockable(error: object) -> InputError:
    return InputError(f"{FILE}: cannot be locked ({error})")


def _ledger_of(path: Path, owner: OwnerSettings) -> Path | None:
    """The file of the second copy; None where the default folder cannot be had. A folder of the owner's must be."""
    folder = owner.ledger or default_ledger()
    try:
        if folder is None:
            raise OSError("this user has no home folder")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32] + ".json"
        return Path(os.path.realpath(folder)) / name
    except OSError as error:
        _without_ledger(error, required=owner.ledger is not None)
        return None


def _without_ledger(error: Exception, *, required: bool) -> None:
    if required:
        raise InputError(f"{LEDGER}: cannot be written to ({error})") from error
    log.warning("no second copy of what was spent can be kept (%s): deleting the report file resets the budget", error)


def _read(path: Path, what: str) -> dict[str, list[Draw]]:
    """Draws by client, oldest first; nothing where there is no file. Version 1 is read as release 1."""
    content = _content(path, what)
    if content is None:
        return {}
    try:
        if content["version"] == 1:
            return {name: [_of_version_1(report)] for name, report in content["reports"].items()}
        if content["version"] == VERSION:
            return {name: [Draw.from_dict(draw) for draw in draws] for name, draws in content["clients"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{what}: {path} is damaged ({error!r})") from error
    raise InputError(f"{what}: {path} is of version {content['version']!r}; accepted: 1, {VERSION}")


def _content(path: Path, what: str) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{what}: {path} cannot be read ({error})") from error
    except ValueError as error:
        raise InputError(f"{what}: {path} is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{what}: {path} is not a file of kept label reports")
    return content


def _outdated(path: Path) -> bool:
    """Whether the file is of version 1, which holds a hash of the true counts; it is rewritten without."""
    content = _content(path, FILE)
    return content is not None and content.get("version") == 1


def _of_version_1(fields: Any) -> Draw:
    return Draw.from_dict({**fields, "release": 1, "spent": fields["epsilon_spent"], "samples_per_person": None})


def _write(path: Path, clients: dict[str, list[Draw]], **more: str) -> None:
    """On disk, file and folder, before this returns: no answer leaves that a power cut would have drawn again."""
    text = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            **more,
            "clients": {name: [draw.to_dict() for draw in draws] for name, draws in clients.items()},
        },
        indent=1,
    )
    try:
        with aside(path, private=True) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{FILE}: {path} cannot be written ({error})") from error


def _write_ledger(ledger: Path, path: Path, clients: dict[str, list[Draw]], *, required: bool) -> None:
    try:
        _write(ledger, clients, file=str(path))
    except InputError as error:
        _without_ledger(error, required=required)
