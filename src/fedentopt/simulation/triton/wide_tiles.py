"""Tiles of wide convolutions: what one program takes of a product, and for which layers it was measured.

`CHOSEN` is the table to edit: a product that it names takes those tiles where tensor descriptors bring them, every
other one what its kernel's module works out from the shape. `python benchmarks/wide_kernels.py --tiles` times other
tiles and prints the lines to put here. Few models want small tiles, which fill a GPU, many want large ones, which
multiply faster. A model's bits do not depend on it: all tiles of a product add the same entries in the same order.
The way back through a ReLU also sums gradients over a tile's samples, in an order that may follow from the tile. Input
gradients that do this take what is here for layers with as many inputs as outputs alone, which have the same rows,
columns and warps for few and for many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST_SHARED = 227 * 1024  # bytes of shared memory of one program on a Hopper GPU
MEASURED_BATCH = 64  # samples per batch that the table's tiles were measured with; other batches lie otherwise
MANY = 32  # models from which on those for many are faster


class WideTiles(NamedTuple):
    """Rows and columns of a program's product, entries summed in a step, warps, pipeline stages."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


class LayerProduct(NamedTuple):
    """One of the products of a layer of so many inputs and outputs, on maps of so many pixels per line: "forward",
    "pooled" (forward with the pool), "input" (gradient), "step" (weight gradient with the optimiser), in "tf32" or
    "bf16"."""

    name: str
    inputs: int
    outputs: int
    width: int
    kind: str


class Chosen(NamedTuple):
    """Tiles for fewer than `MANY` models and for more; None where the product's module decides."""

    few: WideTiles | None
    many: WideTiles | None


CHOSEN: dict[LayerProduct, Chosen] = {
    LayerProduct("input", 64, 128, 16, "tf32"): Chosen(WideTiles(256, 64, 32, 4, 4), WideTiles(256, 64, 32, 4, 4)),
    LayerProduct("forward", 128, 256, 8, "tf32"): Chosen(WideTiles(128, 128, 32, 4, 4), WideTiles(128, 128, 32, 4, 4)),
    LayerProduct("input", 128, 256, 8, "tf32"): Chosen(WideTiles(128, 128, 32, 4, 4), WideTiles(128, 128, 32, 4, 4)),
    LayerProduct("forward", 256, 512, 4, "tf32"): Chosen(WideTiles(128, 128, 32, 4, 4), WideTiles(128, 256, 32, 8, 4)),
    LayerProduct("input", 256, 512, 4, "tf32"): Chosen(WideTiles(128, 128, 32, 4, 4), WideTiles(128, 256, 32, 8, 4)),
    LayerProduct("forward", 512, 512, 4, "tf32"): Chosen(WideTiles(128, 128, 32, 4, 4), None),
    LayerProduct("forward", 512, 512, 2, "tf32"): Chosen(None, WideTiles(64, 64, 32, 4, 5)),
    LayerProduct("input", 512, 512, 2, "tf32"): Chosen(None, WideTiles(64, 64, 32, 4, 5)),
    LayerProduct("step", 128, 256, 8, "tf32"): Chosen(WideTiles(64, 128, 32, 4, 3), None),
    LayerProduct("forward", 128, 256, 8, "bf16"): Chosen(WideTiles(128, 128, 64, 4, 4), WideTiles(256, 128, 64, 8, 4)),
    LayerProduct("input", 128, 256, 8, "bf16"): Chosen(WideTiles(128, 128, 64, 4, 4), WideTiles(256, 128, 64, 8, 4)),
    LayerProduct("forward", 256, 512, 4, "bf16"): Chosen(WideTiles(128, 128, 64, 4, 4), WideTiles(256, 128, 64, 8, 4)),
    LayerProduct("input", 256, 512, 4, "bf16"): Chosen(WideTiles(128, 128, 64, 4, 4), WideTiles(128, 256, 64, 8, 4)),
    LayerProduct("forward", 512, 512, 4, "bf16"): Chosen(WideTiles(128, 128, 64, 4, 4), WideTiles(256, 128, 64, 8, 4)),
    LayerProduct("step", 128, 256, 8, "bf16"): Chosen(WideTiles(64, 128, 64, 4, 3), None),
    LayerProduct("step", 256, 256, 8, "bf16"): Chosen(WideTiles(64, 128, 64, 4, 3), None),
}


def chosen(
    name: str, inputs: int, outputs: int, width: int, models: int, batch: int, dtype: torch.dtype, precision: str
) -> WideTiles | None:
    """What the table has for a product, None where its module decides."""
    if batch != MEASURED_BATCH or precision != "tf32":
        return None
    kind = "bf16" if dtype == torch.bfloat16 else "tf32"
    found = CHOSEN.get(LayerProduct(name, inputs, outputs, width, kind))
    return None if found is None else found.many if models >= MANY else found.few


def misfit(product: LayerProduct, tiles: WideTiles, batch: int = MEASURED_BATCH) -> str | None:
    """Why a layer's product cannot be cut into such tiles; None where it can."""
    itemsize = 2 if product.kind == "bf16" else 4
    summed, columns = product.inputs, product.outputs
    if product.name == "input":
        summed, columns = columns, summed
    elif product.name == "step":
        summed, columns = batch, product.inputs
        if product.outputs % tiles.rows:
            return f"{product.outputs} outputs are no multiple of {tiles.rows} rows"
    elif product.name == "pooled" and tiles.rows != 2 * batch:
        return f"a pool takes the rows of two pixels, {2 * batch}, not {tiles.rows}"
    if product.name in ("forward", "input") and (max(tiles.rows, batch) % min(tiles.rows, batch)):
        return f"{tiles.rows} rows are no whole pixels of {batch} samples, nor a part of one"
    if product.name in ("forward", "input") and product.width % max(1, tiles.rows // batch):
        return f"{tiles.rows} rows are no part of a line of {product.width} pixels"
    if columns % tiles.columns or summed % tiles.step:
        return f"{columns} columns, {summed} entries are no multiples of {tiles.columns}, {tiles.step}"
    lines = tiles.columns + tiles.rows * (2 if product.name == "pooled" else 1)
    needs = lines * tiles.step * itemsize * tiles.stages
    return f"{needs} bytes of shared memory are more than {LARGEST_SHARED}" if needs > LARGEST_SHARED else None
