"""Steps captured once and replayed: one CUDA graph for every batch size that comes back often enough.

BatchNorm must not see padding, so the last batch of an epoch runs at its real size. Launched kernel by kernel such a
step keeps the host busy for longer than a whole replayed one takes on the GPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

Step = Callable[[int], None]  # one training step on that many samples of a batch

PATIENCE = 4  # steps of a partial size that run uncaptured first: capturing one takes about as long as they do
MOST_GRAPHS = 64  # captured sizes at most, so that neither large batches nor odd clients fill the memory with graphs


class StepGraphs:
    """Runs steps on one stream, from graphs where there is one. Without a stream (CPU) all of them run as they are.

    The graphs share one pool of memory. That is sound because they follow each other on one stream and none leaves
    anything behind in the pool that another reads. `state` is what a step changes outside it.
    """

    def __init__(self, batch: int, state: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        self.batch, self.state, self.stream = batch, state, stream
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._launched: Counter[int] = Counter()
        self._pool = torch.cuda.graph_pool_handle() if stream is not None else None

    def run(self, step: Step, size: int) -> None:
        """One step on `size` samples: `step` itself, or a replay of what it did when it was captured."""
        graph = self._graphs.get(size)
        if graph is None and self._pays(size):
            graph = self._graphs[size] = self._capture(step, size)
        if graph is not None:
            graph.replay()
            return
        self._launched[size] += 1
        with self._tuning(size):
            step(size)

    def _pays(self, size: int) -> bool:
        if self.stream is None:
            return False
        return size == self.batch or (self._launched[size] >= PATIENCE and len(self._graphs) < MOST_GRAPHS)

    def _capture(self, step: Step, size: int) -> torch.cuda.CUDAGraph:
        if not self._launched[size]:
            self._warm_up(step, size)
        graph = torch.cuda.CUDAGraph()
        with self._tuning(size), torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            step(size)
        return graph

    def _warm_up(self, step: Step, size: int) -> None:
        """A step for the sake of what libraries prepare in their first. What it changes is put back."""
        saved = [tensor.clone() for tensor in self.state]
        step(size)
        torch.cuda.synchronize()
        for tensor, value in zip(self.state, saved, strict=True):
            tensor.copy_(value)

    @contextlib.contextmanager
    def _tuning(self, size: int) -> Iterator[None]:
        """Inside, at a partial size, cuDNN chooses algorithms by rule: timing them takes seconds for every new one."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before and size == self.batch
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before
