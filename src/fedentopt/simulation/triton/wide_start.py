# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Wide convolutions of models that begin a round, in Triton: weights and their copies from the models they start from.

One pass for all that a first step reads. The programs of one tile of all models follow each other, so what many
clients start from comes out of the L2 cache, and memory sees little more than what is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.linear import aligned
from fedentopt.simulation.triton.wide_maps import cut
from fedentopt.simulation.triton.wide_update import Copies


@triton.jit
def start_kernel(starts, start_row, w, plain, turned, starts_model, w_model, STARTS_ALIGNED: tl.constexpr,
                 W_ALIGNED: tl.constexpr, ROWS_ALL: tl.constexpr, COLUMNS_ALL: tl.constexpr, COPY: tl.constexpr,
                 TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    model = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * COLUMNS_ALL + column[None, :]
    source = tl.load(start_row + model).to(tl.int64)
    value = tl.load(starts + source * starts_model * STARTS_ALIGNED + at)
    tl.store(w + model * w_model * W_ALIGNED + at, value)
    base = model * (ROWS_ALL * COLUMNS_ALL)
    if COPY:
        tl.store(plain + base + at, value.to(plain.dtype.element_ty))
    if TURN:
        to = column[:, None] * ROWS_ALL + row[None, :]
        tl.store(turned + base + to, tl.trans(value).to(turned.dtype.element_ty))


def start_weights(starts: Tensor, start_row: Tensor, w: Tensor, copies: Copies) -> None:
    """Write row start_row[i] of the weights `starts` (G, Co, taps, Ci) to row i of w (n, Co, taps, Ci) and of `copies`,
    which hold at least n. Where `starts` is w itself, every row is its own start."""
    co, taps, ci = w.shape[1:]
    starts_model, starts_factor = aligned(starts.stride(0))
    w_model, w_factor = aligned(w.stride(0))
    rows, columns = cut(co, 64), cut(taps * ci, 64)
    start_kernel[(len(w), co // rows, taps * ci // columns)](
        starts, start_row, w, copies.plain, copies.turned, starts_model, w_model, STARTS_ALIGNED=starts_factor,
        W_ALIGNED=w_factor, ROWS_ALL=co, COLUMNS_ALL=taps * ci, COPY=copies.plain is not None,
        TURN=copies.turned is not None, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
