"""What the benchmark of tiles concludes from its times, and that the stored ones lead to what the documents say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STORED = ROOT / "results" / "engine" / "wide_tiles_h200.json"
if not STORED.is_file() or not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks/ and results/ are not part of this copy", allow_module_level=True)

USUAL, SMALL, LARGE = None, [128, 128, 32, 4, 4, False], [128, 256, 32, 8, 4, False]


@pytest.fixture
def wide_choice(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("wide_choice")


def rows(layer: str, product: str, times: list[tuple[int, list[Any] | None, float]]) -> list[dict[str, Any]]:
    same = {"kind": "tf32", "layer": layer, "product": product, "off": 0.0}
    return [{**same, "models": n, "tiles": tiles, "microseconds": us} for n, tiles, us in times]


def test_a_table_for_few_models_and_for_many(wide_choice: ModuleType) -> None:
    """Small tiles win with 10 models and lose with 100; large ones win with 100 and hardly with 10."""
    found = rows("conv5", "forward", [
        (10, USUAL, 120.0), (10, USUAL, 100.0), (10, SMALL, 90.0), (10, LARGE, 99.0),
        (100, USUAL, 1000.0), (100, SMALL, 1100.0), (100, LARGE, 950.0),
    ])  # fmt: skip
    found += rows("conv7", "step", [(10, USUAL, 50.0), (10, SMALL, 40.0), (100, USUAL, 500.0), (100, SMALL, 495.0)])
    # Without times of conv8, which takes the same tiles, those of conv7 say nothing.
    choice = wide_choice.Choice(found)
    assert choice.models == [10, 100]
    product = wide_choice.LayerProduct("forward", 256, 512, 4, "tf32")
    small, large = (wide_choice.WideTiles(*tiles[:5]) for tiles in (SMALL, LARGE))
    assert choice.table() == {product: (small, large)}
    assert [choice.total("tf32", n, of) for n in (10, 100) for of in ({}, choice.table())] == [100, 90, 1000, 950]
    shared = rows("conv8", "step", [(10, USUAL, 50.0), (10, SMALL, 45.0), (100, USUAL, 500.0), (100, SMALL, 495.0)])
    choice = wide_choice.Choice(found + shared)
    step = wide_choice.LayerProduct("step", 512, 512, 2, "tf32")
    assert choice.table() == {product: (small, large), step: (small, None)}  # one per cent is not worth a line
    assert choice.found[step, 10].times == {None: 100.0, small: 85.0}
    lines = wide_choice.report(choice, 64)
    assert "tf32  100 all products 2000 us, with the table below 1950 us" in lines
    key, tiles = 'LayerProduct("forward", 256, 512, 4, "tf32")', "WideTiles(128, 128, 32, 4, 4)"
    assert f"    {key}: Chosen({tiles}, WideTiles(128, 256, 32, 8, 4))," in lines
    assert f'    LayerProduct("step", 512, 512, 2, "tf32"): Chosen({tiles}, None),' in lines


def test_the_stored_times(wide_choice: ModuleType) -> None:
    choice = wide_choice.read(STORED)
    found = {(kind, n): [round(choice.total(kind, n, of)) for of in ({}, choice.table())]
             for kind in ("tf32", "bf16") for n in (10, 100)}  # fmt: skip
    assert found == {
        ("tf32", 10): [2693, 2572], ("tf32", 100): [22393, 21655], ("bf16", 10): [1646, 1573],
        ("bf16", 100): [13811, 13189],
    }  # fmt: skip


def test_tiles_that_the_code_refuses(wide_choice: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    times = [(n, tiles, us) for n in (10, 100) for tiles, us in ((None, 100.0), ([96, 128, 32, 4, 4, False], 50.0))]
    path.write_text(json.dumps({"batch": 64, "tiles": rows("conv5", "forward", times)}))
    with pytest.raises(ValueError, match="96 rows are no whole pixels"):
        wide_choice.read(path)
