"""Torch's global switches for the time of a simulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_settings(device: torch.device, precision: str) -> Iterator[None]:
    """Torch's global switches for the time of a simulation, put back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.get_num_threads())
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32-exact"
    cudnn.benchmark = device.type == "cuda"
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before[:3]
        torch.set_num_threads(before[3])
