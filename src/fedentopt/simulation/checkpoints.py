"""Checkpoints that are written while training goes on.

At a round's end the state of a run is copied, and a thread hands it to the run's recorder. What a method remembers of
single clients can be gigabytes, so of that nothing is copied at once: rows stay where they are until the thread has
room for them, and a row that a later round is about to change is copied before (`MethodMemory.before_change`). Only
clients that changed since the run's last checkpoint are read at all.

On the CPU the thread takes the rows itself. On CUDA only the engine's thread uses the device, since calls of another
would spoil a graph that is being captured: it copies rows to page-locked memory, beside the training that is queued.
One checkpoint is under way at a time. What goes wrong in the thread is raised in the engine at its next step.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fedentopt.results.records import Checkpoint, ClientRow
from fedentopt.simulation.run_state import RunState

BLOCK = 32 << 20  # floats copied at once: 128 MB, three clients of VGG-11
MOST_BLOCKS = 16  # on their way at a time; rows about to change get more
PAUSE = 0.01  # seconds between two looks at a write that is waited for


class _Abandoned(Exception):
    """The run ends without this checkpoint."""


@dataclass(eq=False)
class _Block:
    """Memory for rows on their way, and whose rows of which vector lie in it."""

    memory: torch.Tensor
    vector: str = ""
    clients: Sequence[int] = ()

    def rows(self, width: int) -> torch.Tensor:
        """(clients, width)"""
        return self.memory[: len(self.clients) * width].view(-1, width)


class CheckpointWriter:
    """Writes the checkpoints of a stack's runs; the engine calls all of it but what `ChangedRows` uses."""

    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.by_engine = device.type == "cuda"  # whose thread copies rows
        self.turn = threading.Condition()  # held by whoever copies rows, or asks what is left
        self.abandoned = False
        self._free: list[_Block] = []
        self._made = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._under_way: list[ChangedRows] = []
        self._copies: list[Callable[[], Checkpoint]] = []  # kept to be freed by the engine's thread: page-locked memory

    def save(self, runs: Iterable[RunState]) -> None:
        """Begin to write where these runs stand now; a write under way is waited for."""
        self.wait()
        jobs = []
        for run in runs:
            rows = ChangedRows(self, run)
            jobs.append((run, rows, run.checkpoint(rows)))
            run.memory.changed, run.memory.before_change = set(), rows.keep
        if self.side is not None:
            torch.cuda.current_stream().synchronize()  # the copies have arrived, and no row is being written
        self._under_way, self._copies = [rows for _, rows, _ in jobs], [finish for _, _, finish in jobs]
        self._thread = threading.Thread(target=self._write, args=(jobs,), name="checkpoint", daemon=True)
        self._thread.start()

    def proceed(self) -> None:
        """Let a write under way go on, beside the round that is queued on the device; raise what went wrong in it."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        elif self._thread is not None and self.by_engine:
            with self.turn:
                for rows in self._under_way:
                    rows.copy_some()

    def wait(self) -> None:
        """Return when nothing is under way; raise what went wrong."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(PAUSE if self.by_engine else None)
            if self.by_engine:
                with self.turn:
                    for rows in self._under_way:
                        rows.copy_some()
        self._thread, self._under_way, self._copies = None, [], []
        del self._free[0 if self.side is None else MOST_BLOCKS :]  # page-locked memory takes long to get
        self._made = len(self._free)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, *, at_once: bool) -> None:
        """The stack ends: finish what is under way, or, `at_once`, leave the checkpoint before it in its place."""
        try:
            if not at_once:
                with contextlib.suppress(Exception):  # the stack ends with an error that came first
                    self.wait()
        finally:
            with self.turn:
                self.abandoned = True
                self.turn.notify_all()
            if self._thread is not None:
                self._thread.join()

    def _write(self, jobs: list[tuple[RunState, ChangedRows, Callable[[], Checkpoint]]]) -> None:
        try:
            for run, rows, finish in jobs:
                run.recorder.save(finish())
                rows.close()  # a recorder may have no use for them
        except BaseException as error:
            self._error = error
        finally:
            for _, rows, _ in jobs:
                rows.close()

    def take_block(self, floats: int, *, more: bool) -> _Block | None:
        """Memory for so many floats; None where all is in use, unless there is to be `more`."""
        for place, block in enumerate(self._free):
            if len(block.memory) >= floats:
                return self._free.pop(place)
        if self._made >= MOST_BLOCKS and not more:
            return None
        self._made += 1
        return _Block(torch.empty(max(BLOCK, floats), pin_memory=self.side is not None))

    def give_back(self, block: _Block) -> None:
        """The block may be used again."""
        self._free.append(block)


class ChangedRows:
    """What a run's method remembers of the clients that changed, as it is now: gone through once, by the thread that
    writes. Rows that change while they wait here must be `keep`-ed first."""

    def __init__(self, writer: CheckpointWriter, run: RunState) -> None:
        self._writer, self._vectors = writer, run.memory.client_rows
        self._left = {name: sorted(run.memory.changed) for name in self._vectors}
        self._copied: deque[_Block] = deque()
        self._awaited = False  # the thread can do nothing before it gets a row from here
        reorder = any(slot.channels_last for slot in run.layout.slots)
        self._plain = run.layout.to_canonical if reorder else None

    def __iter__(self) -> Iterator[ClientRow]:
        while (block := self._next()) is not None:
            rows = block.rows(self._vectors[block.vector].shape[1])
            for client, values in zip(block.clients, rows if self._plain is None else self._plain(rows), strict=True):
                yield ClientRow(block.vector, client, values)
            with self._writer.turn:
                self._writer.give_back(block)

    def _next(self) -> _Block | None:
        turn = self._writer.turn
        with turn:
            while True:
                if self._writer.abandoned:
                    raise _Abandoned
                if self._copied:
                    return self._copied.popleft()
                waiting = next((name for name, left in self._left.items() if left), None)
                if waiting is None:
                    return None
                if self._writer.by_engine:
                    self._awaited = True
                    turn.wait()
                else:
                    self._copy(waiting, self._left[waiting], more=True)

    def keep(self, clients: Iterable[int]) -> None:
        """Copy what is left of these clients: they are about to change."""
        changing = set(clients)
        with self._writer.turn:
            for name, left in self._left.items():
                now = [client for client in left if client in changing]
                while now:
                    now = now[self._copy(name, now, more=True) :]

    def copy_some(self) -> None:
        """Copy as much as there is memory for, and at least what is waited for; the lock is held."""
        for name in self._left:
            while self._left[name] and self._copy(name, self._left[name], more=self._awaited):
                pass

    def close(self) -> None:
        """Nothing more is wanted."""
        with self._writer.turn:
            self._left = {}
            while self._copied:
                self._writer.give_back(self._copied.popleft())

    def _copy(self, name: str, clients: Sequence[int], *, more: bool) -> int:
        """Copy the first of these clients, as many as fit into one block; how many."""
        source, side = self._vectors[name], self._writer.side
        block = self._writer.take_block(source.shape[1], more=more)
        if block is None:
            return 0
        block.vector, block.clients = name, tuple(clients[: len(block.memory) // source.shape[1]])
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            for row, client in zip(block.rows(source.shape[1]), block.clients, strict=True):
                row.copy_(source[client], non_blocking=True)
        if side is not None:
            side.synchronize()
        done = set(block.clients)
        self._left[name] = [client for client in self._left[name] if client not in done]
        self._copied.append(block)
        self._awaited = False
        self._writer.turn.notify_all()
        return len(done)
