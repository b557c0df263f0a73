"""What the engine asks of torch and of the machine: data on the device, copies that never make the host wait, a second
stream, global switches, Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from fedentopt.datasets import Dataset


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`. For CUDA it passes through page-locked memory: only from there is a copy truly queued."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; from CUDA it is only queued, so synchronise before reading it."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def free_memory(device: torch.device) -> int | None:
    """Bytes still to be had on a CUDA device, with those that torch holds and does not use; None for the CPU, whose
    memory the system shares out."""
    if device.type != "cuda":
        return None
    gc.collect()  # what ended in reference cycles before is still held
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


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


def untuned(*, repeatable: bool = False) -> AbstractContextManager[None]:
    """Inside, cuDNN chooses algorithms by rule: timing them takes seconds for every new shape. `repeatable`: only among
    those that give the same bits from run to run."""
    return _cudnn(benchmark=False, deterministic=True) if repeatable else _cudnn(benchmark=False)


def without_cudnn() -> AbstractContextManager[None]:
    """Inside, torch convolves by itself: in double precision, at sizes that never come again, cuDNN takes longer to
    choose algorithms than to run them."""
    return _cudnn(enabled=False)


@contextlib.contextmanager
def _cudnn(**switches: bool) -> Iterator[None]:
    """cuDNN's switches of these names, put back afterwards. (Torch's own `cudnn.flags` sets all the others too.)"""
    cudnn = torch.backends.cudnn
    before = {name: getattr(cudnn, name) for name in switches}
    try:
        for name, value in switches.items():
            setattr(cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)


@dataclass(frozen=True)
class DeviceData:
    """Train and test split on one device: uint8 images (n, 1 or 3, H, W), int64 labels."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    num_classes: int

    @classmethod
    def place(cls, data: Dataset, device: torch.device) -> DeviceData:
        """Copy a data set to `device`; memory-mapped files are read once."""

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.array(array)).to(device)

        return cls(
            put(data.x_train),
            put(data.y_train.astype(np.int64)),
            put(data.x_test),
            put(data.y_test.astype(np.int64)),
            data.num_classes,
        )


FIRST = -1  # priority of a stream whose work goes before that of a `SideStream`, which has 0


class SideStream:
    """Runs work beside the current stream of a tensor's device; on the CPU, in order like everything else.

    Where the current stream has the priority `FIRST`, the work takes what that stream leaves free.
    Until `join`, the caller keeps every tensor that the work reads: given back, its memory could be written by the
    current stream while the side still reads it. That holds inside a CUDA graph's capture too, which then contains the
    fork and the join.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def fork(self, x: torch.Tensor) -> AbstractContextManager[object]:
        """What is queued inside runs after all that has been queued so far, and beside all that comes next."""
        if not x.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        return torch.cuda.stream(self._stream)

    def join(self, x: torch.Tensor) -> None:
        """What is queued from here on runs after the work beside."""
        if self._stream is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._stream)


STOPPING = "stopping after this round; a second Ctrl-C stops at once"


@contextlib.contextmanager
def interrupts(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the engine to stop after this round, of which people are told; a second one stops at once.

    A thread tells them: what was interrupted may have been writing to the same stream.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked, awake = False, threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt
        asked = True
        awake.set()

    def tell() -> None:
        awake.wait()
        if asked:
            say(STOPPING)

    teller = threading.Thread(target=tell, name="interrupt", daemon=True)
    signal.signal(signal.SIGINT, ask)
    teller.start()
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
        awake.set()
        teller.join()
