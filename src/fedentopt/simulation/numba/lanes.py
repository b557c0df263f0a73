"""Vectors of floats as values inside numba kernels, so that sums stay in registers: what they are, and memory.

numba's arrays live in memory, and the compiler cannot keep a small array of sums out of it; a `Lanes` is one LLVM
vector, which it maps to whatever registers the machine has (AVX-512, AVX2, NEON), split or joined as needed.
Offsets are in elements, loads and stores need no alignment, and nothing is checked: callers leave room behind.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fedentopt.simulation.numba.compiled import numba

extending: Any = import_module("numba.extending")
ir: Any = import_module("llvmlite.ir")
types: Any = numba.types

INT32 = ir.IntType(32)
BYTES16 = ir.VectorType(ir.IntType(8), 16)
ELEMENTS = {"float": ir.FloatType(), "int": INT32, "mask": ir.IntType(1)}


class Lanes(types.Type):  # type: ignore[misc]
    """`width` elements of one kind: float (32 bits), int (32 bits) or mask."""

    def __init__(self, kind: str, width: int) -> None:
        self.kind, self.width = kind, width
        self.vector = ir.VectorType(ELEMENTS[kind], width)
        super().__init__(name=f"Lanes({kind}, {width})")


@extending.register_model(Lanes)
class LanesModel(extending.models.PrimitiveModel):  # type: ignore[misc]
    """A `Lanes` value is a bare LLVM vector."""

    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, lanes.vector)


def generated(typing: Callable[..., Any]) -> Any:
    """A function for kernels, from one that takes its arguments' types to its signature and what generates its code."""
    return extending.intrinsic(typing)


def address(context: Any, builder: Any, kind: Any, array: Any, offset: Any, vector: Any = None) -> Any:
    """Pointer to element `offset` of an array, or to a vector that begins there."""
    place = builder.gep(context.make_array(kind)(context, builder, array).data, [offset])
    return place if vector is None else builder.bitcast(place, vector.as_pointer())


def spread_scalar(builder: Any, scalar: Any, vector: Any) -> Any:
    """One scalar in all lanes."""
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(INT32, 0))
    return shuffle(builder, first, empty, [0] * vector.count)


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """The lanes of a, then of b, in this order."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(order)), order))


@generated
def at(context: Any, array: Any, offset: Any) -> Any:
    """array[offset], without numba's care for offsets below zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(address(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), generate


@generated
def put(context: Any, array: Any, offset: Any, value: Any) -> Any:
    """array[offset] = value, likewise."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], address(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


def _loader(width: int) -> Any:
    lanes = Lanes("float", width)

    @generated
    def load(context: Any, array: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(address(context, builder, signature.args[0], args[0], args[1], lanes.vector), align=4)

        return lanes(array, types.intp), generate

    return load


load8, load16 = _loader(8), _loader(16)  # load8(array, offset): the elements from offset on


@generated
def load_bytes16(context: Any, array: Any, offset: Any) -> Any:
    """Sixteen uint8 elements from offset on, as floats."""
    lanes = Lanes("float", 16)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, signature.args[0], args[0], args[1], BYTES16)
        whole = builder.zext(builder.load(place, align=1), ir.VectorType(INT32, 16))
        return builder.uitofp(whole, lanes.vector)

    return lanes(array, types.intp), generate


@generated
def copy_bytes16(context: Any, target: Any, t: Any, source: Any, s: Any, mirrored: Any) -> Any:
    """target[t : t + 16] = source[s : s + 16], the last one first if mirrored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(address(context, builder, signature.args[2], args[2], args[3], BYTES16), align=1)
        turned = builder.select(args[4], shuffle(builder, value, value, list(range(15, -1, -1))), value)
        builder.store(turned, address(context, builder, signature.args[0], args[0], args[1], BYTES16), align=1)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.boolean), generate


@generated
def store(context: Any, array: Any, offset: Any, value: Any) -> Any:
    """array[offset : offset + width] = value; the array holds the lanes' kind of elements."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, signature.args[0], args[0], args[1], args[2].type)
        builder.store(args[2], place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@generated
def store_woven(context: Any, array: Any, offset: Any, a: Any, b: Any, c: Any) -> Any:
    """a[0], b[0], c[0], a[1], b[1], ... from offset on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[2].type.count
        pair = shuffle(builder, args[2], args[3], list(range(2 * width)))
        third = shuffle(builder, args[4], args[4], list(range(2 * width)))
        woven = shuffle(builder, pair, third, [part * width + i for i in range(width) for part in range(3)])
        builder.store(woven, address(context, builder, signature.args[0], args[0], args[1], woven.type), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, a, a, a), generate


@generated
def store_parted(context: Any, array: Any, evens: Any, odds: Any, value: Any) -> Any:
    """The even lanes from `evens` on, the odd ones from `odds` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for parity in (0, 1):
            part = shuffle(builder, args[3], args[3], list(range(parity, args[3].type.count, 2)))
            place = address(context, builder, signature.args[0], args[0], args[1 + parity], part.type)
            builder.store(part, place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, value), generate
