"""How the kernels multiply."""

from __future__ import annotations

from typing import NamedTuple


class Products(NamedTuple):
    """Operands of matrix products in bf16 or fp32, and how tensor cores take fp32: "tf32", or "tf32x3" for fp32's
    accuracy."""

    bf16: bool
    precision: str
