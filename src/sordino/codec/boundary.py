"""Wrappers around methods of third-party parts, which check results and name the part in errors. `Part` calls them.

A family declares for each method what a call must return (`returns`). The methods of a third-party class are wrapped
once, when the class is defined; Sordino's own parts are not wrapped. An exception keeps its type inside a run (an
engine may try another path), and becomes a `PartError` with the part's name at the end of the run.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from sordino.errors import PartError, SordinoError

Method = TypeVar("Method", bound=Callable[..., Any])
Check = Callable[..., str]  # (what was returned, the part, *arguments) -> what is needed instead; "" if it will do
_CHECK, _WRAPPED, _NAMED = "__returns__", "__from_elsewhere__", "__part__"


def returns(check: Check) -> Callable[[Method], Method]:
    """Return a decorator for methods of a family, by which results of third-party parts are checked."""

    def decorate(method: Method) -> Method:
        setattr(method, _CHECK, check)
        return method

    return decorate


def wrap(cls: type, origin: Callable[[], str]) -> None:
    """Wrap the methods of a third-party part: results are checked, and errors name the part (`origin`)."""
    for name, member in list(vars(cls).items()):
        method = member.fget if isinstance(member, property) else member
        # The inherited definition of a method, preferably one with a check of its result; else None
        found = [vars(base)[name] for base in cls.__mro__[1:] if name in vars(base) and not name.startswith("_")]
        methods = [one.fget if isinstance(one, property) else one for one in found]
        known = next((one for one in methods if hasattr(one, _CHECK)), methods[0] if methods else None)
        if not isinstance(method, FunctionType) or hasattr(method, _WRAPPED) or not (known or name == "__post_init__"):
            continue
        wrapped = _wrapped(method, name, getattr(known, _CHECK, None), origin)
        setattr(cls, name, property(wrapped) if isinstance(member, property) else wrapped)


def _wrapped(method: FunctionType, name: str, check: Check | None, origin: Callable[[], str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(part: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = method(part, *args, **kwargs)
        except (Exception, SystemExit) as error:
            if not _ours(error) and not hasattr(error, _NAMED):  # a part inside this one may have named it already
                setattr(error, _NAMED, PartError(f"{origin()}, whose {name} raised {type(error).__name__}: {error}"))
                error.add_note(f"raised in {name} of {origin()}")
            raise
        needed = "" if check is None else check(found, part, *args, **kwargs)
        if needed:
            raise PartError(f"{origin()}, whose {name} returned {described(found)}", needed)
        return found

    setattr(call, _WRAPPED, True)
    return call


def _ours(error: BaseException) -> bool:
    return isinstance(error, SordinoError) or type(error).__module__.startswith("sordino.")


def failure(error: BaseException) -> PartError | None:
    """Return the `PartError` of an exception that a third-party part, or sys.exit in user code, raised; else None."""
    named: PartError | None = getattr(error, _NAMED, None)
    if named is None and isinstance(error, SystemExit) and not _ours(error):
        return PartError(f"code of a model, a metric or a callback that ended the process (SystemExit: {error})")
    return named


def described(found: Any) -> str:
    """Return the type and shape of a value as text, since its content may be private."""
    if hasattr(found, "shape") and hasattr(found, "dtype"):
        return f"{type(found).__name__} of {tuple(found.shape)} {found.dtype}"
    return "None" if found is None else f"a {type(found).__name__}"


def array(
    found: Any, shape: tuple[int | None, ...], kind: str, low: float = float("-inf"), high: float = float("inf")
) -> str:
    """Return "" if `found` is a numpy array of this shape (None: any length), else a text of what is required.

    Kind "f" requires finite float64, kind "i" whole numbers in [low, high).
    """
    import numpy as np

    what = "finite float64" if kind == "f" else f"whole numbers from {low} to {high - 1}"
    fits = isinstance(found, np.ndarray) and found.ndim == len(shape)
    fits = fits and all(want in (None, have) for have, want in zip(found.shape, shape, strict=True))
    if fits and kind == "f":
        fits = found.dtype == np.float64 and bool(np.isfinite(found).all())
    elif fits:
        fits = found.dtype.kind in "iu" and (found.size == 0 or (found.min() >= low and found.max() < high))
    return "" if fits else f"a numpy array of shape {shape} of {what}"


def tensor(found: Any, shape: tuple[int, ...], like: Any, *, finite: bool = False) -> str:
    """Return "" if `found` is a floating-point tensor of this shape on the device of `like`, else what is required."""
    import torch

    fits = isinstance(found, torch.Tensor) and tuple(found.shape) == shape
    fits = fits and found.is_floating_point() and found.device == like.device
    if fits and finite:
        fits = bool(torch.isfinite(found).all())
    words = f"a {'finite ' if finite else ''}floating tensor of shape {shape} on {like.device}"
    return "" if fits else words


def number(found: Any, low: float, *, above: bool = False) -> str:
    """Return "" if `found` is a finite number of at least `low` (above `low` if `above`), else what is required."""
    real = isinstance(found, numbers.Real) and not isinstance(found, bool)
    sound = real and math.isfinite(float(found)) and float(found) >= low
    words = f"a finite number {'above' if above else 'of at least'} {low:g}"
    return "" if sound and not (above and found == low) else words


def of_type(*types: type) -> Check:
    """Return a check that requires an instance of one of these classes."""
    words = " or ".join(one.__name__ for one in types)
    return lambda found, *_, **__: "" if isinstance(found, types) else f"a value of {words}"


def tensors(found: Any, like: dict[str, Any] | None = None) -> str:
    """Return "" if `found` is a dict of tensors, with the names, shapes and dtypes of `like`, else what is required."""
    import torch

    if not (isinstance(found, dict) and all(isinstance(one, torch.Tensor) for one in found.values())):
        return "a dict of tensors"
    shapes = {name: (tuple(one.shape), one.dtype) for name, one in found.items()}
    same = like is None or shapes == {name: (tuple(one.shape), one.dtype) for name, one in like.items()}
    return "" if same else f"a dict of tensors of the same names, shapes and dtypes as before: {', '.join(like or {})}"


def numbers_by_name(found: Any) -> str:
    """Return "" if `found` is a dict of numbers by name, else what is required."""
    sound = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    return "" if sound and all(isinstance(one, float | int) for one in found.values()) else "a dict of numbers by name"
