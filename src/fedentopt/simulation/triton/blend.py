# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Weighted sums of trained models in Triton: the server step of all runs in one launch, each run by itself.

A run's clients are added one after the other, in the order in which it names them, so its model has the same bits
whatever other runs are in the stack, and a client that diverged spoils its own run alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.linear import aligned


@triton.jit
def blend_kernel(trained, starts, new, ends, places, factors, shares, own, rows, trained_row, starts_row, width, end,
                 ALIGNED: tl.constexpr, BUFFERS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    run = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < end * ALIGNED
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(ends + run), tl.load(ends + run + 1)):
        weight = tl.load(factors + i)
        if BUFFERS:
            weight = tl.where(column < width, weight, tl.load(shares + i))
        from_row = tl.load(places + i).to(tl.int64) * trained_row * ALIGNED
        total += weight * tl.load(trained + from_row + column, mask=inside, other=0.0)
    at = tl.load(rows + run).to(tl.int64) * starts_row * ALIGNED + column
    kept = tl.load(own + run)
    if kept != 0:
        total += tl.where(column < width, kept * tl.load(starts + at, mask=inside, other=0.0), 0.0)
    tl.store(new + at, total, mask=inside)


def blend_rows(
    trained: Tensor, starts: Tensor, new: Tensor, *, ends: Tensor, places: Tensor, factors: Tensor, shares: Tensor,
    own: Tensor, rows: Tensor, width: int, end: int, block: int = 1024, warps: int = 4,
) -> None:  # fmt: skip
    """Row rows[r] of `new` up to column `end`: own[r] * its row of `starts` + sum of factors[i] * trained[places[i]].

    i runs from ends[r] to ends[r + 1], in that order. From column `width` on, `shares` are the factors and own is 0.
    """
    lengths = [trained.stride(0), starts.stride(0), end]
    factor = 4 if all(aligned(length)[1] == 4 for length in lengths) else 1
    trained_row, starts_row, columns = (length // factor for length in lengths)
    blend_kernel[(triton.cdiv(end, block), len(rows))](
        trained, starts, new, ends, places, factors, shares, own, rows, trained_row, starts_row, width, columns,
        ALIGNED=factor, BUFFERS=end > width, BLOCK=block, num_warps=warps,
    )  # fmt: skip
