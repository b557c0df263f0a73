"""What the times of other tiles say: the fastest of every product, with few models and with many.

    python benchmarks/wide_choice.py results/engine/wide_tiles_h200.json

Reads what `wide_kernels.py --tiles --out` has written; no GPU is needed. The last lines printed are a table for
`simulation/triton/wide_tiles.py`; `wide_kernels.py --chosen` times whole steps with it first, because these times are
of one product after the other, and a step that keeps two of them running at once may gain less.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from wide_tiles import KINDS, LAYERS, cases

from fedentopt.simulation.triton.wide import convolution_tiles
from fedentopt.simulation.triton.wide_tiles import MANY, MEASURED_BATCH, Chosen, LayerProduct, WideTiles, misfit

WORTH = 0.98  # of the usual time, from which on tiles are worth a line in the table
Table = dict[LayerProduct, Chosen]


class Found(NamedTuple):
    """Microseconds of a product by its tiles, None for the default ones."""

    times: dict[WideTiles | None, float]

    @property
    def usual(self) -> float:
        return self.times[None]

    @property
    def tiles(self) -> WideTiles | None:
        """The fastest."""
        return min(self.times, key=lambda tiles: self.times[tiles])

    def ratio(self, tiles: WideTiles | None) -> float:
        return self.times[tiles] / self.usual

    def change(self, tiles: WideTiles | None) -> str:
        """What these tiles change, in per cent of the usual time."""
        return f"{100 * (self.ratio(tiles) - 1):+.1f} %" if tiles in self.times else "not timed"


class Choice:
    """The times of a sweep (`wide_tiles.time_jobs`), by product of the table's and number of models."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.models = sorted({row["models"] for row in rows})
        self.layers: dict[LayerProduct, list[int]] = {}
        for case in (case for kind in KINDS for case in cases(kind)):
            self.layers.setdefault(case.product, []).append(case.layer)
        every = {(product, n): best_of(rows, product, self.names(product), n)
                 for product in self.layers for n in self.models}  # fmt: skip
        self.found = {key: found for key, found in every.items() if found is not None}

    def names(self, product: LayerProduct) -> tuple[str, ...]:
        return tuple(LAYERS[i].name for i in self.layers[product])

    def timed(self, product: LayerProduct) -> dict[int, Found]:
        return {n: self.found[product, n] for n in self.models if (product, n) in self.found}

    def table(self) -> Table:
        """The fastest tiles with few models and with many, where they are worth a line."""
        found: Table = {}
        for product in self.layers:
            if product.name == "weight":  # its kernel has tiles of its own
                continue
            worth = Chosen(None, None)
            for n, of in self.timed(product).items():
                if of.ratio(of.tiles) <= WORTH:
                    worth = worth._replace(**{"many" if n >= MANY else "few": of.tiles})
            if any(worth) and not (self.masked(product) and differ(product, worth)):
                found[product] = worth
        return found

    def masked(self, product: LayerProduct) -> bool:
        """Whether one of its layers goes back through a ReLU, with sums over a tile's samples."""
        return any(case.masked for kind in KINDS for case in cases(kind) if case.product == product)

    def total(self, kind: str, n: int, table: Table) -> float:
        """Microseconds of all products of a step, one after the other; tiles that were not timed count as usual."""
        mine = {product: of for (product, m), of in self.found.items() if m == n and product.kind == kind}
        return sum(of.times.get(tiles_of(table, product, n), of.usual) for product, of in mine.items())


def differ(product: LayerProduct, both: Chosen) -> bool:
    """Whether tiles for few models and for many differ in more than their stages, the default ones where there are
    none."""
    dtype = torch.bfloat16 if product.kind == "bf16" else torch.float32
    usual = convolution_tiles(product.outputs, product.inputs, MEASURED_BATCH, product.width, dtype, "tf32")
    return len({(tiles or usual)._replace(stages=0) for tiles in both}) > 1


def tiles_of(table: Table, product: LayerProduct, n: int) -> WideTiles | None:
    """What a table has for a product of n models."""
    found = table.get(product, Chosen(None, None))
    return found.many if n >= MANY else found.few


def best_of(rows: list[dict[str, Any]], product: LayerProduct, layers: tuple[str, ...], n: int) -> Found | None:
    """Of layers that share their tiles; tiles that were not timed for all of them do not count."""
    every: dict[WideTiles | None, dict[str, float]] = {}
    for row in rows:
        if (row["kind"], row["product"], row["models"]) == (product.kind, product.name, n) and row["layer"] in layers:
            times = every.setdefault(row["tiles"] and WideTiles(*row["tiles"][:5]), {})
            times[row["layer"]] = min(row["microseconds"], times.get(row["layer"], float("inf")))
    whole = {tiles: sum(times.values()) for tiles, times in every.items() if len(times) == len(layers)}
    return Found(whole) if None in whole else None


def read(path: Path) -> Choice:
    """The choice that a sweep's file leads to; tiles that today's code refuses are an error."""
    choice = Choice(json.loads(path.read_text())["tiles"])
    for product, both in choice.table().items():
        for tiles in both:
            if tiles is not None and (why := misfit(product, tiles)) is not None:
                raise ValueError(f"{path}: {product}, {tiles}: {why}")
    return choice


def report(choice: Choice, batch: int) -> list[str]:
    """What was found, line by line, and last the lines for the table."""
    lines, table = [], choice.table()
    for kind in KINDS:
        for n in reversed(choice.models):
            for product, places in choice.layers.items():
                if product.kind != kind or (product, n) not in choice.found:
                    continue
                of, names = choice.found[product, n], ", ".join(choice.names(product))
                rate = n * batch * sum(LAYERS[i].flops() for i in places) / of.usual / 1e6
                lines.append(f"{kind} {n:4d} {names:12s} {product.name:8s} {of.usual:8.0f} us {rate:4.0f} TFLOP/s, "
                             f"best {min(of.times.values()):8.0f} us ({of.change(of.tiles)})")  # fmt: skip
                if of.tiles is not None:
                    others = (f", with {m} models {other.change(of.tiles)}"
                              for m, other in choice.timed(product).items() if m != n)  # fmt: skip
                    lines[-1] += f" {tuple(of.tiles)}{''.join(others)}"
            usual, ours = (choice.total(kind, n, of) for of in ({}, table))
            if usual:
                lines.append(f"{kind} {n:4d} all products {usual:.0f} us, with the table below {ours:.0f} us")
    return [*lines, "CHOSEN = {", *(line_of(*entry) for entry in table.items()), "}"]


def line_of(product: LayerProduct, both: Chosen) -> str:
    """A product's line in the table."""
    name, *shape, kind = product
    key = f'LayerProduct("{name}", {", ".join(map(str, shape))}, "{kind}")'
    few, many = (f"WideTiles({', '.join(map(str, tiles))})" if tiles else "None" for tiles in both)
    return f"    {key}: Chosen({few}, {many}),"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="JSON file of `wide_kernels.py --tiles`")
    path = parser.parse_args().sweep
    print("\n".join(report(read(path), json.loads(path.read_text())["batch"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
