"""Tiles of wide convolutions: what one program takes of a product, and for which layers it was measured.

`CHOSEN` is the table to edit: a product that it names takes those tiles where tensor descriptors bring them, every
other one what its kernel's module works out from the shape. `python benchmarks/wide_kernels.py --tiles` times other
tiles and prints the lines to put here. Tiles do not depend on the number of models, so that a model's bits do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST_SHARED = 227 * 1024  # bytes of shared memory of one program on a Hopper GPU
MEASURED_BATCH = 64  # samples per batch that the table's tiles were measured with; other batches lie otherwise


class WideTiles(NamedTuple):
    """Rows and columns of a program's product, entries summed in a step, warps, pipeline stages; `specialised`, of
    `wide_descriptors` alone: further warps do nothing but bring tiles."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    specialised: bool = False


class LayerProduct(NamedTuple):
    """One of the products of a layer of so many inputs and outputs, on maps of so many pixels per line: "forward",
    "pooled" (forward with the pool), "input" (gradient), "weight" (gradient), "step" (weight gradient with the
    optimiser), in "tf32" or "bf16"."""

    name: str
    inputs: int
    outputs: int
    width: int
    kind: str


CHOSEN: dict[LayerProduct, WideTiles] = {}


def chosen(
    name: str, inputs: int, outputs: int, width: int, batch: int, dtype: torch.dtype, precision: str
) -> WideTiles | None:
    """What the table has for a product, None where its module decides."""
    if not CHOSEN or batch != MEASURED_BATCH or precision != "tf32":
        return None
    kind = "bf16" if dtype == torch.bfloat16 else "tf32"
    return CHOSEN.get(LayerProduct(name, inputs, outputs, width, kind))


def misfit(product: LayerProduct, tiles: WideTiles, batch: int = MEASURED_BATCH) -> str | None:
    """Why a layer's product cannot be cut into such tiles; None where it can."""
    itemsize = 2 if product.kind == "bf16" else 4
    if tiles.specialised and product.name not in ("forward", "input"):
        return f"warps that only bring tiles are for forward and input products, not for {product.name}"
    summed, columns = product.inputs, product.outputs
    if product.name == "input":
        summed, columns = columns, summed
    elif product.name in ("weight", "step"):
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
    if tiles.specialised:  # the result passes through shared memory while the next tiles arrive
        needs += tiles.rows * tiles.columns * itemsize
    return f"{needs} bytes of shared memory are more than {LARGEST_SHARED}" if needs > LARGEST_SHARED else None
