"""A second CUDA stream for work whose result is needed only later: it fills what the current stream leaves idle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """Runs work beside the current stream of a tensor's device; on the CPU, in order like everything else.

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
