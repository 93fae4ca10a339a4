"""A user's own functions on records, run as graphs: `loss=` and `transform=` of make_private.

    loss = 1 / b * sum_j f(output_j, target_j)            inputs_j = f(inputs_j) for each record of a batch

f is captured on synthetic records before it sees a private one. Where its graph keeps records apart it runs on the
batch, else on every record by itself. It may draw random numbers from torch. What enters the model in the backward pass
is the gradient of the loss's graph, whatever else the loop adds to it: an addition is found, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.data.clients import is_causal
from sordino.dpsgd.batch_independence import SAME, frozen_rng, has_records, relative_distance
from sordino.dpsgd.rule_table import each_record
from sordino.errors import DataError, PlanError
from sordino.graph import TRUSTED, Grade, Traced, Tracing, UntraceableError, weakest
from sordino.graph.capture import RECORDS, Function
from sordino.graph.captured import flat, synthetic_batch
from sordino.parts.losses import keeps_apart, loss_of
from sordino.rng import global_coins, standing_at

Transforms = Callable[[Any], Any]
PerRecord = Callable[..., Tensor]  # (output, *targets) -> one value per record [b]
_OWN = 'reduction="none", then a sum or a mean over the entries of each record'


def untraceable(what: str, reason: str, needed: str, *ways: str) -> PlanError:
    """The refusal of code without a graph."""
    vouch = 'own_code="trusted" in make_private, if you vouch that it keeps the records of a batch apart: the '
    found = f"a {what} that no graph can be captured of ({reason})"
    return PlanError("own code", found, needed, "; ".join((*ways, f"or {vouch}certificate will say so")))


def stale_code(what: str) -> PlanError:
    """The refusal of code that its owner changed while it trains."""
    return PlanError(
        "own code",
        f"a {what} that answers synthetic records otherwise than when its graph was captured",
        "code that stays as it was: numbers that a loop sets may come from records, and the graph does not see them",
        'give a schedule to the optimizer, not to the model or the loss; or own_code="trusted", if you vouch for it',
    )


class TracedFunction:
    """A user's function of tensors with its graphs; `own_code`: its owner vouches for it where it has none."""

    name = "function"
    needed = "a function of tensors that remembers nothing: no noise is added there"
    ways: tuple[str, ...] = ()

    def __init__(self, function: Callable[..., Any], own_code: bool) -> None:
        self.function, self.own_code = Function(function), own_code
        self.tracing = Tracing(self.function)
        self.untraced = ""  # why the function itself runs on records
        self.used: list[Traced] = []

    @property
    def grade(self) -> tuple[Grade, str]:
        """What is proved of it, and why it is no more."""
        if self.untraced:
            return TRUSTED, f"the {self.name} itself runs on records ({self.untraced})"
        return weakest([one.grade for one in self.used]), "; ".join(one.reason for one in self.used if one.reason)

    def traced(self, args: tuple[Any, ...], records: Sequence[bool]) -> Traced | None:
        """The graph for these arguments; None where there is none, and its owner vouches for the function."""
        try:
            return self.tracing.of(args, {}, records)
        except UntraceableError as error:
            if not self.own_code:
                raise untraceable(self.name, str(error), self.needed, *self.ways) from None
            self.untraced, self.tracing.closed = str(error), True
            return None


def _for_each(function: Callable[..., Any], args: tuple[Any, ...], records: Sequence[bool]) -> Any:
    """function(*args) for each record by itself; each sees a batch of one."""
    leaves, form = tree_flatten(args)

    def one(*items: Any) -> Any:
        own = [x[None] if holds else x for x, holds in zip(items, records, strict=True)]
        return function(*tree_unflatten(own, form))

    return each_record(one, leaves, [0 if holds else None for holds in records])


class RecordTransform(TracedFunction):
    """`transform=` of make_private: applied to the inputs of every batch (x of (x, y), or all of a dict)."""

    name = "transform"
    ways = (
        "write it without Python branches on data, and take random numbers from torch",
        "do it in the data set, for each record by itself",
    )

    def __call__(self, batch: Any, size: int) -> Any:
        """The batch with its inputs transformed; labels stay as they are."""
        if isinstance(batch, list | tuple):
            return [self._run(batch[0], size), *batch[1:]]
        return self._run(dict(batch) if isinstance(batch, Mapping) else batch, size)

    @torch.no_grad()
    def _run(self, inputs: Any, size: int) -> Any:
        records = [has_records(x, size) for x in flat((inputs,), {})[0]]
        traced = self.traced((inputs,), records)
        if traced is None:
            return self.function(inputs)
        self.used += [traced] if traced not in self.used else []
        if not size:
            one = tree_map(lambda x: x.new_zeros(1, *x.shape[1:]) if has_records(x, 0) else x, inputs)
            return tree_map(lambda y: y[:0] if has_records(y, 1) else y, traced.graph(self.function, one))
        if traced.reason is None:
            return traced.graph(self.function, inputs)
        return _for_each(lambda own: traced.graph(self.function, own), (inputs,), records)


def named_loss(kind: str, model: nn.Module) -> tuple[PerRecord, bool]:
    """A loss of Sordino by its kind, of a model's output or of its logits; a causal model's labels are the next tokens.

    And whether each of its values is known to be one record's.
    """
    own = loss_of(kind)
    shift = own.targets == "token" and is_causal(model)

    def each(output: Any, labels: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return own(logits[:, :-1], labels[:, 1:]) if shift else own(logits, labels)

    return each, keeps_apart(own)


class RecordLoss(TracedFunction):
    """`loss=` of make_private: a function (output, *targets) -> one value per record."""

    name = "loss"
    needed = "a function of one record's output and target, which remembers nothing: no noise is added there"
    ways = ("write it without Python branches on data and without state",)

    def __init__(self, loss: PerRecord, own_code: bool = False, known: bool = False) -> None:
        """`known`: a loss of Sordino's own, which needs no graph."""
        super().__init__(loss, own_code)
        self.loss, self.known = loss, known
        self.compared = False  # with its value for a whole batch, where it has no graph
        self.rng_state = global_coins()
        self.slopes: list[tuple[Tensor, Tensor]] = []  # at each output: what arrived, and what is due

    def __call__(
        self, output: Any, targets: tuple[Any, ...], outputs: list[Tensor], size: int, records: list[bool]
    ) -> Tensor:
        """The mean over the batch; `outputs` are the model's for it, `records` says which targets are the records'."""
        leaves = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if not leaves or any(all(x is not y for y in outputs) for x in leaves):
            found = "optimizer.loss of something else than what model(x) gave for this batch"
            raise PlanError("loop", found, "the output as it came", "change it inside the loss, record by record")
        if not size:
            return torch.stack([x.sum() for x in leaves]).sum() * 0
        mean = self._values((output, *targets), size, records).mean()
        due = torch.autograd.grad(mean, leaves, retain_graph=True, allow_unused=True)
        self.slopes = []
        for leaf, slope in zip(leaves, due, strict=True):
            self._expect(leaf, torch.zeros_like(leaf) if slope is None else slope.detach())
        return mean

    def capture_again(self) -> None:
        """Take in what its owner changed and vouches for."""
        self.untraced, self.used = "it was changed while it trained", []
        self.tracing.forget()

    def _values(self, args: tuple[Any, ...], size: int, own: list[bool]) -> Tensor:
        if self.known:
            return _checked_shape(self.loss(*args), size)
        records = [*(has_records(x, size) for x in tree_flatten(args[0])[0]), *own]
        traced = self.traced(args, records)
        if traced is None:
            return self._run_trusted(args, size)
        if traced not in self.used:
            self._check(traced, args, records)
            self.used.append(traced)
        found: Tensor = traced.graph(self.function, *args) if traced.reason is None else self._each(traced, args, size)
        return found

    def _each(self, traced: Traced | None, args: tuple[Any, ...], size: int) -> Tensor:
        def one(*single: Any) -> Tensor:
            return _checked_shape(self.loss(*single) if traced is None else traced.graph(self.function, *single), 1)

        found: Tensor = _for_each(one, args, [has_records(x, size) for x in tree_flatten(args)[0]])
        return found

    @torch.no_grad()
    def _check(self, traced: Traced, args: tuple[Any, ...], records: list[bool]) -> None:
        """Once for each graph, on synthetic records: one value for each, and the same alone as in a batch."""
        inputs, form = flat(args, {})
        (made, _) = tree_unflatten(synthetic_batch(inputs, records, RECORDS), form)
        with frozen_rng():
            together = _checked_shape(traced.graph(self.function, *made), RECORDS)
            if traced.reason is not None:
                _refuse_mixing(together, self._each(traced, made, RECORDS), traced.alone)

    def _run_trusted(self, args: tuple[Any, ...], size: int) -> Tensor:
        """The user's own function record by record: an alarm if a batch changes its value for a record, or mixes."""
        detached = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
        first = tree_map(lambda x: x[:1] if has_records(x, size) else x, detached)
        before = self._value_of(first)
        values = self._each(None, args, size)
        if not relative_distance([before], [self._value_of(first)]) <= SAME:
            found = "a loss that says something else of a record after a batch than before it"
            fix = "keep what is counted or averaged out of the loss, and take random numbers from torch"
            raise PlanError("reduction", found, self.needed, fix)
        if not self.compared and size > 1:
            with torch.no_grad(), frozen_rng():
                alone = self._each(None, args, size).detach()
                _refuse_mixing(_checked_shape(self.loss(*args), size).detach(), alone)
            self.compared = True
        return values

    @torch.no_grad()
    def _value_of(self, record: tuple[Any, ...]) -> Tensor:
        """The loss of one record, with frozen random numbers."""
        with frozen_rng(), standing_at(self.rng_state):
            return self.loss(*record).detach().clone()

    def _expect(self, leaf: Tensor, due: Tensor) -> None:
        arrived = torch.zeros_like(leaf, requires_grad=False)
        self.slopes.append((arrived, due))

        def add(slope: Tensor) -> Tensor:
            arrived.add_(slope.detach())
            return due

        leaf.register_hook(add)  # type: ignore[no-untyped-call]

    def verify(self) -> None:
        """Refuse a backward pass that came by another way than this loss alone."""
        slopes, self.slopes = self.slopes, []
        if not slopes or any(not torch.allclose(a, b, rtol=1e-3, atol=1e-12, equal_nan=True) for a, b in slopes):
            found = "a backward pass that is not that of optimizer.loss(output, target) alone"
            fix = "call optimizer.loss(model(x), y).backward(), and put every term into that loss"
            raise PlanError("loop", found, "the loss that make_private was given", fix)


def _checked_shape(values: Any, size: int) -> Tensor:
    if isinstance(values, Tensor) and values.shape == (size,):
        return values
    shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
    raise DataError(f"a loss of shape {shape} for {size} record{'s' * (size > 1)}", "one value per record", _OWN)


def _refuse_mixing(together: Tensor, alone: Tensor, alike: bool = True) -> None:
    """The loss of records together must be that of each alone."""
    if not alike or not torch.allclose(together, alone, rtol=1e-3, atol=1e-5, equal_nan=True):
        found = "a loss whose value for one record depends on the other records of the batch"
        fix = "divide by a constant, or by what the record itself has, never by a count of the batch"
        raise PlanError("reduction", found, "a function of one record's output and target", fix)
