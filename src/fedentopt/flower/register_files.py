"""The register of clients on disk: what changed in a round is written in that round, and nothing else.

Ten thousand clients with a thousand classes are 80 MB, which a checkpoint after every round must not write again. The
register lies in parts: each holds the clients let in or changed since the part before, and the names of those that are
gone. Reading the parts in order gives the register in the order in which clients were let in. When there are many
parts, most of what they hold is outdated, or one is missing, one new part takes their place. A checkpoint names its
parts; a part that neither of the two checkpoints names is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import aside
from fedentopt.flower.census import Member
from fedentopt.flower.report import ClientId, Report, normal_id
from fedentopt.labels import validate_report
from fedentopt.server.state_files import read_archive, write_archive

FORMAT, VERSION = "fedentopt flower clients", 1
MOST_PARTS = 16
PATTERN = "clients-*.npz"


class RegisterFiles:
    """The parts in a folder, as the checkpoints there name them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[str] = []
        self._rows = 0
        self._named_before: list[str] = []

    def save(self, members: Mapping[ClientId, Member], changed: Mapping[ClientId, bool]) -> list[str]:
        """Write what changed; returns the names of the parts that make up the register now.

        `changed` says of a client whether it has left meanwhile: one that came back since stands last.
        """
        fresh = [client for client in changed if client in members]
        gone = [client for client, left in changed.items() if left]
        lost = not all((self.folder / part).is_file() for part in self.parts)  # whoever tidies up removes old files
        if self.parts and not fresh and not gone and not lost:
            return list(self.parts)
        outdated = self._rows + len(fresh) > 2 * len(members) + 100
        if not self.parts or len(self.parts) >= MOST_PARTS or outdated or lost:
            self.parts, self._rows, fresh, gone = [], 0, list(members), []
        self.folder.mkdir(parents=True, exist_ok=True)
        taken = {*(path.name for path in self.folder.glob(PATTERN)), *self._named_before}
        number = 1 + max((int(Path(part).stem.split("-")[1]) for part in taken), default=0)
        name = f"clients-{number:06d}.npz"
        order = {client: place for place, client in enumerate(members)}
        fresh.sort(key=order.__getitem__)  # newcomers in the order they were let in
        self._write(self.folder / name, [members[client] for client in fresh], gone)
        self.parts.append(name)
        self._rows += len(fresh)
        return list(self.parts)

    def committed(self) -> None:
        """A checkpoint that names the present parts is on disk: remove what it and the one before do not need."""
        needed = {*self.parts, *self._named_before}
        for path in self.folder.glob(PATTERN):
            if path.name not in needed:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._named_before = list(self.parts)

    def load(self, parts: Sequence[str], num_classes: int) -> dict[ClientId, Member]:
        """The register that these parts make up; one that is missing or damaged is refused."""
        members: dict[ClientId, Member] = {}
        self._rows = 0
        for name in parts:
            path = self.folder / name
            try:
                header, arrays = read_archive(path, FORMAT, VERSION)
                for client in header["gone"]:
                    members.pop(normal_id(client), None)
                for entry, counts in zip(header["clients"], arrays["counts"], strict=True):
                    node, release, fields = entry
                    client = normal_id(fields.pop("client"))
                    checked = validate_report(client, counts, num_classes, noisy=fields["epsilon"] is not None)
                    members[client] = Member(int(node), Report(client=client, counts=checked, **fields), release)
            except Exception as error:
                raise InputError(f"checkpoint: {path} cannot be read ({error}); remove the folder to start") from error
            self._rows += len(header["clients"])
        self.parts, self._named_before = list(parts), list(parts)
        return members

    @staticmethod
    def _write(path: Path, members: Sequence[Member], gone: Sequence[ClientId]) -> None:
        counts = np.stack([m.report.counts for m in members]) if members else np.zeros((0, 1))
        whole = np.abs(counts).max(initial=0.0) < 2.0**31 and (counts == np.rint(counts)).all()
        if whole and not np.signbit(counts[counts == 0]).any():
            counts = counts.astype(np.int32)  # as nearly all are, in half the bytes
        entries = [[m.node_id, m.release, _fields(m.report)] for m in members]
        with aside(path, private=True) as part:
            write_archive(part, FORMAT, VERSION, {"clients": entries, "gone": list(gone)}, {"counts": counts})


def _fields(report: Report) -> dict[str, Any]:
    """Everything in a report but the counts."""
    return {field.name: getattr(report, field.name) for field in dataclasses.fields(report) if field.name != "counts"}
