"""Kernels in Gluon, run as Python on the CPU: what `triton.hopper` and its kernels use of the language, no more.

Triton's interpreter does not know Gluon. Here a block is a tensor, and so is shared memory, which holds NaN until
something is written to it. What a GPU does beside the program is done early or late, as a seed decides:

- a copy is on its way from when it is asked for until somebody waits for its barrier; its place holds NaN until then;
- a product of tensor cores reads its operands when it is begun, or not before it is waited for;
- warps of several partitions go on in any order, and stop at barriers alone.

So a place that is read before its data came, or given away while a product still reads it, ends in NaN, in other
numbers or in an AssertionError; so do waiting for what never comes, giving memory back while copies are on their way,
and addresses beside a tensor. Threads of one warp group are together everywhere; looked at is only that a `barrier`
stands between what they load from shared memory and the next copy to it, and a fence between initialising a barrier and
a copy that it counts. Layouts are not looked at.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


class Kind:
    """The type of an entry."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, dtype.itemsize * 8


KINDS = {dtype: Kind(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64)}


class Block(Tensor):
    """What a program holds in registers."""

    def to(self, kind: Kind) -> Block:  # type: ignore[override]
        return block(self.as_subclass(Tensor).to(kind.dtype))

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def __iadd__(self, other: Any) -> Block:  # type: ignore[override]
        return self + other  # another name for what was there before keeps it


def block(x: Any) -> Block:
    return torch.as_tensor(x).as_subclass(Block)


class Pointer:
    """Into a tensor's storage, from its first entry on."""

    def __init__(self, storage: Tensor, offset: Any = 0) -> None:
        self.storage, self.offset = storage, offset

    @classmethod
    def to_tensor(cls, x: Tensor) -> Pointer:
        length = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        return cls(x.as_strided((length,), (1,)))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.storage, self.offset + offset)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=KINDS[self.storage.dtype])

    def places(self) -> Tensor:
        at = torch.as_tensor(self.offset).as_subclass(Tensor).long()
        assert int(at.min()) >= 0, "an address below its tensor"
        assert int(at.max()) < len(self.storage), "an address beyond its tensor"
        return at


class Descriptor:
    """A tensor that the copy engine brings boxes of; what lies outside comes as zeros."""

    layout = None

    def __init__(self, source: Tensor, *shape: int) -> None:
        assert source.stride(-1) == 1
        assert source.data_ptr() % 16 == 0
        assert not any(stride * source.itemsize % 16 for stride in source.stride()[:-1])
        self.source, self.block_shape, self.dtype = source, list(shape), KINDS[source.dtype]
        self.block_type = SimpleNamespace(shape=list(shape), nbytes=math.prod(shape) * source.itemsize)

    def box(self, first: Sequence[Any]) -> Tensor:
        found = torch.zeros(self.block_shape, dtype=self.source.dtype)
        inside, here = [], []
        for at, length, size in zip(map(int, first), self.block_shape, self.source.shape, strict=True):
            start, end = max(at, 0), min(at + length, size)
            if end <= start:
                return found
            inside.append(slice(start, end))
            here.append(slice(start - at, end - at))
        found[tuple(here)] = self.source[tuple(inside)]
        return found


class Shared:
    """A piece of shared memory."""

    def __init__(self, machine: Machine, memory: Tensor) -> None:
        self._machine, self.memory = machine, memory

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.memory)
        return Shared(self._machine, self.memory[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self._machine, self.memory.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self._machine, self.memory.permute(*order))

    def load(self, layout: object) -> Block:
        self._machine.loaded(self.memory)
        return block(self.read())

    def read(self) -> Tensor:
        assert not self._machine.coming(self.memory), "shared memory is read while a copy to it is on its way"
        return self.memory.clone()

    def _keep_alive(self) -> None:
        assert not self._machine.coming(self.memory), "shared memory is given back while a copy to it is on its way"
        self.memory.fill_(math.nan)


class Barrier:
    """Counts arrivals and bytes of one phase after another."""

    def __init__(self) -> None:
        self.count, self.arrived, self.bytes, self.phases = 0, 0, 0, 0
        self.fenced = False
        self.copies: list[Copy] = []

    def arrive(self, count: int, size: int = 0) -> None:
        assert self.count > 0, "a barrier that was not initialised"
        self.arrived += count
        self.bytes += size
        assert self.arrived <= self.count, "more arrivals than a phase has"
        self.settle()

    def settle(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.arrived, self.phases = 0, self.phases + 1

    def has_passed(self, parity: int) -> bool:
        return self.phases % 2 != parity


class Barriers:
    def __init__(self, shape: Sequence[int]) -> None:
        self._all = [Barrier() for _ in range(shape[0])]

    def index(self, i: Any) -> Barrier:
        return self._all[int(i)]

    def _keep_alive(self) -> None:
        assert not any(one.copies for one in self._all), "barriers are given back while copies to them are on their way"


class Copy:
    """One that the copy engine was asked for."""

    def __init__(self, source: Descriptor, first: Sequence[Any], barrier: Barrier, to: Tensor) -> None:
        self._source, self._first, self._barrier, self.to = source, [int(at) for at in first], barrier, to
        barrier.copies.append(self)

    def deliver(self) -> None:
        self.to.copy_(self._source.box(self._first))
        self._barrier.copies.remove(self)
        self._barrier.bytes -= self._source.block_type.nbytes
        assert self._barrier.bytes >= 0, "more bytes came than were expected"
        self._barrier.settle()


class Accumulator:
    """Sums in registers that products are still being added to."""

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("sums are used before all products are waited for")


class Partition:
    """Warps that run the same function."""

    def __init__(self) -> None:
        self.products: list[tuple[Accumulator, Shared, Shared]] = []
        self.loaded: list[Tensor] = []  # since its last `barrier`

    def finish(self, left: int) -> None:
        while len(self.products) > left:
            total, a, b = self.products.pop(0)
            total.sums = (total.sums.double() + as_operand(a.read()) @ as_operand(b.read())).float()


def as_operand(x: Tensor) -> Tensor:
    """As tensor cores read it: of single precision the upper 19 bits."""
    if x.dtype == torch.float32:
        x = (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return x.double()


class Machine:
    """One multiprocessor, which runs one program after the other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.deeds = 0  # that may let somebody who waits go on
        self._barriers: list[Barriers] = []
        self._here = threading.local()
        self._turns: Turns | None = None
        self.grid: tuple[int, ...] = ()
        self.program: tuple[int, ...] = ()

    def launch(self, kernel: Callable[..., None], grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        self.grid = grid
        programs = list(itertools.product(*map(range, grid)))
        self._random.shuffle(programs)
        for self.program in programs:
            self._barriers, self._here.partition = [], Partition()
            kernel(**arguments)
            assert not self._here.partition.products, "the program ends before its products"
            for barriers in self._barriers:
                barriers._keep_alive()

    def coming(self, memory: Tensor) -> bool:
        """Whether a copy to any of this memory is on its way."""
        return any(meet(copy.to, memory) for barrier in self._each_barrier() for copy in barrier.copies)

    def loaded(self, memory: Tensor) -> None:
        self._here.partition.loaded.append(memory)

    def _each_barrier(self) -> list[Barrier]:
        return [one for barriers in self._barriers for one in barriers._all]

    # What kernels call.

    def allocate(self, kind: Kind, shape: Sequence[int], layout: object) -> Any:
        if layout == "barriers":
            self._barriers.append(Barriers(shape))
            return self._barriers[-1]
        return Shared(self, torch.full(list(shape), math.nan, dtype=kind.dtype))

    def bring(self, source: Descriptor, first: Sequence[Any], barrier: Barrier, to: Shared, pred: Any = True) -> None:
        if not pred:
            return
        assert list(to.memory.shape) == source.block_shape
        assert not self.coming(to.memory), "two copies to one place are on their way"
        assert barrier.fenced, "the copy engine may not see the barrier yet"
        for memory in self._here.partition.loaded:
            assert not meet(memory, to.memory), "other warps may not have loaded what a copy replaces"
        self.deeds += 1
        to.memory.fill_(math.nan)
        copy = Copy(source, first, barrier, to.memory)
        if self._random.random() < 0.3:
            copy.deliver()

    def expect(self, barrier: Barrier, size: int, pred: Any = True) -> None:
        if pred:
            self.deeds += 1
            barrier.arrive(1, size)

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            self.deeds += 1
            barrier.arrive(count)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count, barrier.fenced = count, False

    def fence(self) -> None:
        for barrier in self._each_barrier():
            barrier.fenced = True

    def barrier(self) -> None:
        self._here.partition.loaded.clear()

    def invalidate(self, barrier: Barrier) -> None:
        assert not barrier.copies, "a barrier is given up while copies are on their way"
        barrier.count = 0

    def wait(self, barrier: Barrier, parity: Any) -> None:
        if self._turns is not None and self._random.random() < 0.3:
            self._turns.pass_on(waiting=False)
        while True:
            for copy in list(barrier.copies):
                self.deeds += 1
                copy.deliver()
            if barrier.has_passed(int(parity)):
                return
            assert self._turns is not None, "the program waits for what never comes"
            self._turns.pass_on(waiting=True)

    def multiply(self, a: Shared, b: Shared, total: Any, *, is_async: bool) -> Accumulator:
        assert is_async
        for operand in (a, b):
            operand.read()
        made = total if isinstance(total, Accumulator) else Accumulator(total.as_subclass(Tensor))
        partition: Partition = self._here.partition
        partition.products.append((made, a, b))
        if self._random.random() < 0.3:
            partition.finish(0)
        return made

    def finish(self, left: int, deps: Sequence[Any]) -> list[Any]:
        self._here.partition.finish(left)
        return [one if left or isinstance(one, Block) else block(one.sums) for one in deps]

    def specialize(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
        self._turns = Turns(self._random, lambda: self.deeds)

        def run(part: Callable[..., None], given: tuple[Any, ...]) -> None:
            self._here.partition = Partition()
            part(*given)
            assert not self._here.partition.products, "the partition ends before its products"

        try:
            self._turns.run([lambda part=part, given=given: run(part, given) for part, given in parts])
        finally:
            self._turns = None


def reach(memory: Tensor) -> tuple[int, int]:
    """Addresses of the first and the last entry."""
    last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
    return memory.data_ptr(), memory.data_ptr() + last * memory.itemsize


def meet(one: Tensor, other: Tensor) -> bool:
    """Whether two pieces of memory have a place in common."""
    (first, last), (start, end) = reach(one), reach(other)
    return start <= last and first <= end


class Turns:
    """Functions that take turns, each in a thread, of which one runs at a time."""

    def __init__(self, choose: random.Random, deeds: Callable[[], int]) -> None:
        self._random, self._deeds = choose, deeds
        self._back = threading.Semaphore(0)
        self._here = threading.local()
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        going = [SimpleNamespace(turn=threading.Semaphore(0), done=False, waiting=False) for _ in functions]
        threads = [
            threading.Thread(target=self._run, args=(one, function), daemon=True)
            for one, function in zip(going, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        while left := [one for one in going if not one.done]:
            if all(one.waiting for one in left):  # and nothing was done since each of them looked
                self._failure = self._failure or AssertionError("all partitions wait for each other")
            one, before = self._random.choice([one for one in left if not one.waiting] or left), self._deeds()
            one.turn.release()
            self._back.acquire()
            if self._deeds() > before:
                for other in going:
                    other.waiting = False
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, one: Any, function: Callable[[], None]) -> None:
        self._here.one = one
        one.turn.acquire()
        try:
            if self._failure is None:
                function()
        except BaseException as failure:  # the first is raised where the partitions began
            self._failure = self._failure or failure
        one.done = True
        self._back.release()

    def pass_on(self, *, waiting: bool) -> None:
        """Let another go on; `waiting` says that this one cannot until something is done."""
        one = self._here.one
        one.waiting = waiting
        self._back.release()
        one.turn.acquire()
        if self._failure is not None:
            raise self._failure


class Kernel:
    """A function in Gluon, to be called by another one or launched."""

    def __init__(self, machine: Machine, function: Callable[..., Any]) -> None:
        self._machine, self._function = machine, function

    def changed(self, function: Callable[..., Any]) -> Kernel:
        return Kernel(self._machine, function)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._function(*given, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        parameters = inspect.signature(self._function).parameters

        def launch(*given: Any, **named: Any) -> None:
            arguments = dict(zip(parameters, given, strict=False)) | named
            arguments.pop("num_warps")
            pointers = {name: Pointer.to_tensor(x) for name, x in arguments.items() if isinstance(x, Tensor)}
            self._machine.launch(self._function, grid, arguments | pointers)

        return launch


def load(pointer: Pointer) -> Block:
    return block(pointer.storage[pointer.places()])


def store(pointer: Pointer, value: Block) -> None:
    places, kept = pointer.places(), value.as_subclass(Tensor)
    assert kept.dtype == pointer.storage.dtype
    assert places.shape == kept.shape
    pointer.storage[places] = kept


def language(machine: Machine) -> Any:
    """What kernels take from `gluon.language`."""

    def no_layout(*_: object) -> None:
        return None

    return SimpleNamespace(
        **{str(kind.dtype).removeprefix("torch."): kind for kind in KINDS.values()},
        constexpr=None, BlockedLayout=no_layout, SliceLayout=no_layout, NVMMADistributedLayout=no_layout,
        static_range=range,
        program_id=lambda axis: block(machine.program[axis]),
        num_programs=lambda axis: machine.grid[axis],
        cdiv=lambda a, b: -(-a // b),
        load=load, store=store,
        arange=lambda start, end, layout=None: block(torch.arange(start, end)),
        zeros=lambda shape, kind, layout=None: block(torch.zeros(shape, dtype=kind.dtype)),
        maximum=lambda a, b: torch.maximum(block(a), block(b)),
        minimum=lambda a, b: torch.minimum(block(a), block(b)),
        where=lambda condition, a, b: torch.where(block(condition), a, b),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        split=lambda x: x.unbind(-1),
        sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, layout: x,
        allocate_shared_memory=machine.allocate,
        warp_specialize=machine.specialize,
    )  # fmt: skip


def run_on_cpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Have a module's kernels run here for the rest of the test."""
    from triton.experimental.gluon import GluonJITFunction

    machine = Machine(seed)
    for name, value in list(vars(module).items()):
        if isinstance(value, GluonJITFunction):
            monkeypatch.setattr(module, name, Kernel(machine, value.fn))
    barriers = SimpleNamespace(
        init=machine.init, expect=machine.expect, arrive=machine.arrive, wait=machine.wait,
        invalidate=machine.invalidate, MBarrierLayout=lambda: "barriers",
    )  # fmt: skip
    taken = {
        "gl": language(machine), "mbarrier": barriers, "bring": machine.bring, "described": Descriptor,
        "warpgroup_mma": machine.multiply, "warpgroup_mma_wait": machine.finish, "barrier": machine.barrier,
        "fence_async_shared": machine.fence,
    }  # fmt: skip
    for name, value in taken.items():
        monkeypatch.setattr(module, name, value)
