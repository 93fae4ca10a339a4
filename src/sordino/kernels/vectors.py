"""Eight float32 numbers in one register, for kernels whose sums must stay there.

load(a, i)         a[i : i + 8]          spread(a, i)        a[i], eight times        zeros()    0, eight times
store(a, i, v)     a[i : i + 8] = v      muladd(s, a, b)     s + a b, rounded once where the machine can
above(a, b, x, y)  x where a > b or a is not a number, else y
equal(a, b, x)     x where a = b, else 0  plus(a, b)         a + b

No bounds are checked: `a` is a flat, contiguous array that the caller has measured. numba keeps the code of a kernel
until the kernel's own file changes: after a change here, touch the files that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, models, register_model

WIDE = 8


class Eight(types.Type):
    """The type, as numba knows it."""

    def __init__(self) -> None:
        super().__init__(name="Eight")


eight = Eight()
_VECTOR = ir.VectorType(ir.FloatType(), WIDE)
_NONE = ir.Constant(_VECTOR, ir.Undefined)
_INT = ir.IntType(32)
_FUSED = ("contract",)


@register_model(Eight)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)  # type: ignore[no-untyped-call]


def _instruction(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of compiled code, from its signature and the instructions that it is."""
    made: Callable[..., Any] = intrinsic(make)
    return made


def _flat(array: Any) -> bool:
    return isinstance(array, types.Array) and (array.dtype, array.ndim, array.layout) == (types.float32, 1, "C")


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """To the entry arguments[1] of the array arguments[0]."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


def _eight_from(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.bitcast(_pointer(context, builder, signature, arguments), _VECTOR.as_pointer())


@_instruction
def zeros(typing: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(_VECTOR, [0.0] * WIDE)

    return eight(), make


@_instruction
def load(typing: Any, array: Any, index: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_eight_from(context, builder, signature, arguments), align=4)

    return (eight(array, types.intp), make) if _flat(array) else None


@_instruction
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _eight_from(context, builder, signature, arguments), align=4)
        return context.get_dummy_value()

    return (types.void(array, types.intp, eight), make) if _flat(array) else None


@_instruction
def spread(typing: Any, array: Any, index: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(_pointer(context, builder, signature, arguments))
        first = builder.insert_element(_NONE, number, ir.Constant(_INT, 0))
        return builder.shuffle_vector(first, _NONE, ir.Constant(ir.VectorType(_INT, WIDE), [0] * WIDE))

    return (eight(array, types.intp), make) if _flat(array) else None


@_instruction
def muladd(typing: Any, total: Any, first: Any, second: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        product = builder.fmul(arguments[1], arguments[2], flags=_FUSED)
        return builder.fadd(arguments[0], product, flags=_FUSED)

    return eight(eight, eight, eight), make


@_instruction
def plus(typing: Any, first: Any, second: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return eight(eight, eight), make


@_instruction
def above(typing: Any, first: Any, second: Any, yes: Any, no: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, x, y = arguments
        more = builder.or_(builder.fcmp_ordered(">", a, b), builder.fcmp_unordered("uno", a, a))
        return builder.select(more, x, y)

    return eight(eight, eight, eight, eight), make


@_instruction
def equal(typing: Any, first: Any, second: Any, value: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, x = arguments
        return builder.select(builder.fcmp_ordered("==", a, b), x, ir.Constant(_VECTOR, [0.0] * WIDE))

    return eight(eight, eight, eight), make
