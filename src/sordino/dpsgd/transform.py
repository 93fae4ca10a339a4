"""What is done to each record between the loader and the model, as a graph: `make_private(..., transform=f)`.

f takes the inputs of a batch (the first part of (x, y), or all of a dict) and is traced on made-up records. Where its
graph keeps records apart it runs on the batch, else on every record by itself. It may draw random numbers from torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.dpsgd.batch_independence import has_records
from sordino.errors import PlanError
from sordino.graph import BY_CONSTRUCTION, TRUSTED, Grade, Traced, Tracing, UntraceableError, weakest
from sordino.graph.capture import flat
from sordino.graph.tracing import Function

Transforms = Callable[[Any], Any]


class RecordTransform:
    """A user's function of a batch's inputs, run as its graph."""

    def __init__(self, function: Transforms, own_code: bool = False) -> None:
        self.function, self.own_code = Function(function), own_code
        self.tracing, self.untraced = Tracing(self.function), ""
        self.grades: set[Grade] = set()

    @property
    def grade(self) -> tuple[Grade, str]:
        """What is proved of it, and why it is no more."""
        if self.untraced:
            return TRUSTED, f"the transform itself runs on records ({self.untraced})"
        reasons = [one.reason for one in self.tracing.known.values() if one.reason]
        return weakest(list(self.grades) or [BY_CONSTRUCTION]), "; ".join(reasons)

    def __call__(self, batch: Any, size: int) -> Any:
        """The batch with its inputs transformed; labels stay as they are."""
        if isinstance(batch, list | tuple):
            return [self._run(batch[0], size), *batch[1:]]
        return self._run(dict(batch) if isinstance(batch, Mapping) else batch, size)

    def _run(self, inputs: Any, size: int) -> Any:
        records = [has_records(x, size) for x in flat((inputs,), {})[0]]
        try:
            traced = self.tracing.of((inputs,), {}, records)
        except UntraceableError as error:
            if not self.own_code:
                raise _untraceable(str(error)) from None
            self.untraced, self.tracing.closed = str(error), True
            with torch.no_grad():
                return self.function(inputs)
        self.grades.add(traced.grade)
        with torch.no_grad():
            return self._by_graph(traced, inputs, records, size)

    def _by_graph(self, traced: Traced, inputs: Any, records: list[bool], size: int) -> Any:
        if not size:
            one = tree_map(lambda x: x.new_zeros(1, *x.shape[1:]) if has_records(x, 0) else x, inputs)
            return tree_map(lambda y: y[:0] if has_records(y, 1) else y, traced.graph(self.function, one))
        if traced.reason is None:
            return traced.graph(self.function, inputs)
        return self._each(traced, inputs, records, size)

    def _each(self, traced: Traced, inputs: Any, records: list[bool], size: int) -> Any:
        """Every record by itself."""
        leaves, form = tree_flatten(inputs)
        moving = [x for x, own in zip(leaves, records, strict=True) if own]
        answers: list[Any] = []

        def one(*items: Tensor) -> list[Tensor]:
            supply = iter(items)
            own = [next(supply)[None] if holds else x for x, holds in zip(leaves, records, strict=True)]
            found, answer = tree_flatten(traced.graph(self.function, tree_unflatten(own, form)))
            answers.append(answer)
            return found

        try:
            outputs = [y.flatten(0, 1) for y in vmap(one, randomness="different")(*moving)]
        except (RuntimeError, NotImplementedError):
            rows = [one(*(x[j] for x in moving)) for j in range(size)]
            outputs = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        return tree_unflatten(outputs, answers[-1])


def _untraceable(reason: str) -> PlanError:
    return PlanError(
        "own code",
        f"a transform that no graph can be captured of ({reason})",
        "a function of tensors that remembers nothing",
        "write it without Python branches on data, and take random numbers from torch; do it in the data set, for "
        'each record by itself; or own_code="trusted", if you vouch for it: the certificate will say so',
    )
