"""Client vectors on disk: what changed is written, everything is found again, nothing outdated piles up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedentopt.errors import InputError
from fedentopt.results.records import ClientRow
from fedentopt.results.vector_files import MOST_FILES, VectorFiles

WIDTHS = {"c": 5, "models": 8}


def row(vector: str, client: int, value: float) -> ClientRow:
    return ClientRow(vector, client, torch.full((WIDTHS[vector],), value))


def found(folder: Path, index: list) -> dict[tuple[str, int], list[float]]:
    """What a process that starts now reads; the index passes through a checkpoint's JSON."""
    return {(r.vector, r.client): r.values.tolist() for r in VectorFiles(folder).open(json.loads(json.dumps(index)))}


@pytest.mark.parametrize(("clients", "changing"), [(6, 6), (12, 4), (90, 1), (40, 17)])
def test_every_newest_row_is_found_and_files_stay_few_and_small(tmp_path: Path, clients: int, changing: int) -> None:
    rng, files = np.random.default_rng(clients), VectorFiles(tmp_path)
    expected: dict[tuple[str, int], list[float]] = {}
    written = 0
    for number in range(60):
        rows = [row(v, int(k), float(rng.normal())) for v in WIDTHS for k in rng.permutation(clients)[:changing]]
        before = {path.name for path in tmp_path.iterdir()}
        index = files.write(rows)
        assert before <= {path.name for path in tmp_path.iterdir()}  # what the last checkpoint names is all there
        files.clean()  # the checkpoint that names them is on disk
        expected |= {(r.vector, r.client): r.values.tolist() for r in rows}
        assert found(tmp_path, index) == expected
        assert {path.name for path in tmp_path.iterdir()} == {about["file"] for about in index}
        assert len(index) <= MOST_FILES
        current = 4 * sum(len(values) for values in expected.values())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * current
        written += (tmp_path / max(about["file"] for about in index)).stat().st_size
        if number == 30:  # a process that goes on does as the first one would have done
            files = VectorFiles(tmp_path)
            list(files.open(json.loads(json.dumps(index))))
    assert written <= 2.5 * 60 * changing * 4 * sum(WIDTHS.values())  # taking over old rows costs no more than new ones
    assert found(tmp_path, files.write([])) == expected  # nothing new, nothing written
    assert {path.name for path in tmp_path.iterdir()} == {about["file"] for about in index}
    files.remove()
    assert not list(tmp_path.iterdir())


def test_only_files_of_its_own_are_removed_and_those_left_behind_too(tmp_path: Path) -> None:
    for name in ("vectors-000007.f32", "vectors-000009.f32.part", "vectors-mine.f32", "checkpoint.safetensors"):
        (tmp_path / name).write_bytes(b"1234")
    files = VectorFiles(tmp_path)
    index = files.write([row("c", 3, 1.5)])
    assert [about["file"] for about in index] == ["vectors-000010.f32"]
    files.clean()
    assert {path.name for path in tmp_path.iterdir()} == {
        "vectors-000010.f32", "vectors-mine.f32", "checkpoint.safetensors"
    }  # fmt: skip
    assert np.fromfile(tmp_path / "vectors-000010.f32", "<f4").tolist() == [1.5] * 5


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_file_is_refused_by_name_and_kept(tmp_path: Path, damage: str) -> None:
    files = VectorFiles(tmp_path)
    index = files.write([row("c", 0, 1.0), row("models", 0, 2.0)])
    path = tmp_path / index[0]["file"]
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InputError, match=rf"{path.name}: cannot be read \(.*--no-resume"):
        found(tmp_path, index)
    assert path.exists() == (damage != "missing")
