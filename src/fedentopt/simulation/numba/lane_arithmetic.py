"""Arithmetic on `lanes.Lanes`, for numba kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedentopt.simulation.numba.lanes import Lanes, address, generated, ir, spread_scalar, types

cgutils: Any = import_module("numba.core.cgutils")


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, in one instruction where the machine has it."""
    kind = ir.FunctionType(c.type, [c.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{c.type.count}f32")
    return builder.call(function, [a, b, c])


def _spreader(kind: str, width: int) -> Any:
    lanes = Lanes(kind, width)
    scalar = types.float32 if kind == "float" else types.int32

    @generated
    def spread(context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return spread_scalar(builder, args[0], lanes.vector)

        return lanes(scalar), generate

    return spread


spread8, spread16 = _spreader("float", 8), _spreader("float", 16)  # spread8(value): the value in all lanes
spread_int8, spread_int16 = _spreader("int", 8), _spreader("int", 16)


@generated
def add(context: Any, a: Any, b: Any) -> Any:
    """a + b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(*args) if signature.return_type.kind == "int" else builder.fadd(*args)

    return a(a, a), generate


@generated
def multiply(context: Any, a: Any, b: Any) -> Any:
    """a * b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return a(a, a), generate


@generated
def multiply_add(context: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a * b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _multiply_add(builder, args[1], args[2], args[0])

    return total(total, total, total), generate


@generated
def multiply_add_one(context: Any, total: Any, array: Any, offset: Any, b: Any) -> Any:
    """total + array[offset] * b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scalar = builder.load(address(context, builder, signature.args[1], args[1], args[2]))
        return _multiply_add(builder, spread_scalar(builder, scalar, args[0].type), args[3], args[0])

    return total(total, array, types.intp, total), generate


@generated
def sum_lanes(context: Any, value: Any) -> Any:
    """Sum of all lanes, in pairs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = args[0].type
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), vector])
        name = f"llvm.vector.reduce.fadd.v{vector.count}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [ir.Constant(ir.FloatType(), -0.0), args[0]], fastmath=("reassoc",))

    return types.float32(value), generate


@generated
def ramp8(context: Any, step: Any) -> Any:
    """0, step, 2 step, ..., 7 step as whole numbers."""
    lanes = Lanes("int", 8)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.mul(spread_scalar(builder, args[0], lanes.vector), ir.Constant(lanes.vector, list(range(8))))

    return lanes(types.int32), generate


@generated
def beats(context: Any, challenger: Any, best: Any) -> Any:
    """Mask of challenger > best, or challenger not a number: a maximum in this order keeps what is not a number."""
    mask = Lanes("mask", challenger.width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        greater = builder.fcmp_ordered(">", args[0], args[1])
        return builder.or_(greater, builder.fcmp_unordered("uno", args[0], args[0]))

    return mask(challenger, challenger), generate


@generated
def select(context: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask holds, else b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return a(mask, a, a), generate


@generated
def rectify(context: Any, value: Any) -> Any:
    """ReLU: zero where value <= 0; what is not a number stays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(args[0].type, [0.0] * args[0].type.count)
        return builder.select(builder.fcmp_ordered("<=", args[0], zero), zero, args[0])

    return value(value), generate


@generated
def rectify_gradient(context: Any, value: Any, gradient: Any) -> Any:
    """The gradient before ReLU: zero where ReLU's value <= 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(args[0].type, [0.0] * args[0].type.count)
        return builder.select(builder.fcmp_ordered("<=", args[0], zero), zero, args[1])

    return value(value, value), generate


@generated
def clamp(context: Any, value: Any) -> Any:
    """Into 0..1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero, one = (ir.Constant(args[0].type, [limit] * args[0].type.count) for limit in (0.0, 1.0))
        raised = builder.select(builder.fcmp_ordered("<", args[0], zero), zero, args[0])
        return builder.select(builder.fcmp_ordered(">", raised, one), one, raised)

    return value(value), generate
