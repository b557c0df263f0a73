"""Small arrays on their way between host and device, queued so that the host never waits."""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`. For CUDA it passes through page-locked memory: only from there is a copy truly queued."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; from CUDA it is only queued, so synchronise before reading it."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
