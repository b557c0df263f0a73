# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""One SGD step of all rows of the parameter buffer in one Triton kernel: momentum, decay, proximal term, correction."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sgd_kernel(w, v, g, row_length, size, lr, momentum, weight_decay, mu, start, start_row, start_length, steps, step,
               correction, correction_row, correction_mode, correction_length, ALIGNED: tl.constexpr,
               CORRECTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(1)
    if tl.load(steps + row) > tl.load(step):
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size * ALIGNED
        at = row.to(tl.int64) * row_length * ALIGNED + column
        old = tl.load(w + at, mask=inside, other=0.0)
        d = tl.load(g + at, mask=inside, other=0.0) + tl.load(weight_decay + row) * old
        pull = tl.load(mu + row)
        if pull != 0:
            origin = start + tl.load(start_row + row).to(tl.int64) * start_length * ALIGNED
            d += pull * (old - tl.load(origin + column, mask=inside, other=0.0))
        late = tl.zeros((BLOCK,), tl.float32)
        if CORRECTED:
            from_row = tl.load(correction_row + row).to(tl.int64)
            mode = tl.load(correction_mode + row)
            if (from_row >= 0) & (mode > 0):
                c = tl.load(correction + from_row * correction_length * ALIGNED + column, mask=inside, other=0.0)
                if mode == 1:
                    d += c
                else:
                    late = c
        new = tl.load(momentum + row) * tl.load(v + at, mask=inside, other=0.0) + d
        tl.store(v + at, new, mask=inside)
        tl.store(w + at, old - tl.load(lr + row) * (new + late), mask=inside)


def sgd_update(
    w: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    n: int,
    lr: Tensor,
    momentum: Tensor,
    weight_decay: Tensor,
    mu: Tensor,
    start: Tensor,
    start_row: Tensor,
    steps: Tensor,
    step: Tensor,
    correction: Tensor | None = None,
    correction_row: Tensor | None = None,
    correction_mode: Tensor | None = None,
    block: int = 1024,
    warps: int = 4,
) -> None:
    """See `interface.Kernels.sgd_update`."""
    lengths = [w.shape[1], w.stride(0), start.stride(0), 0 if correction is None else correction.stride(0)]
    # Lengths as multiples of 16 bytes where they are, so that the compiler may load four floats at once.
    factor = 4 if all(length % 4 == 0 for length in lengths) else 1
    size, w_row, start_length, correction_length = (length // factor for length in lengths)
    sgd_kernel[(triton.cdiv(w.shape[1], block), n)](
        w, v, g, w_row, size, lr, momentum, weight_decay, mu, start, start_row, start_length, steps, step, correction,
        correction_row, correction_mode, correction_length, ALIGNED=factor, CORRECTED=correction is not None,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
