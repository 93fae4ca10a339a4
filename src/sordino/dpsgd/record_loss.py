"""Models in half precision, and autocast: the loop's loss in float32, and the mean undone before anything is rounded.

A mean over b records hands each of them 1 / b. Rounded to eight bits on its way into the model, that is another number
for every b: one record more would change what all the others add, by up to b / 512 clips. So the model's answer is
handed over in float32, and what comes back is multiplied by b there; past the door nothing knows how many came.

The sure way to a loss that keeps records apart: one value per record, computed from that record's output alone.

    loss = 1 / b * sum_j f(output_j, target_j)

f is traced on made-up outputs and targets before it sees a record's. Where its graph keeps records apart it runs on the
batch, else on every record by itself (vmap, or a loop where vmap cannot). What enters the model in the backward pass is
the gradient of that graph, whatever else the loop adds to it: an addition is found, and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.data.named_fields import is_causal
from sordino.dpsgd.batch_independence import SAME, distance, has_records, taken
from sordino.dpsgd.pieces import HALF
from sordino.dpsgd.state_guard import still
from sordino.errors import DataError, PlanError
from sordino.graph import TRUSTED, Grade, Traced, Tracing, UntraceableError, weakest
from sordino.graph.capture import RECORDS, differs, flat, made_up
from sordino.graph.tracing import Function
from sordino.parts.losses import keeps_apart, loss_of
from sordino.rng import global_coins, standing_at


class _Door(torch.autograd.Function):
    """(float32 copies of the outputs), whose backward runs the model's own with slopes times `scale`.

    The two graphs are apart, so a loss that reaches into the model past the door is a second backward pass: refused.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, scale: float, inner: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.inner, ctx.scale = inner, scale
        ctx.set_materialize_grads(False)
        return tuple(y.detach().float() if y.dtype in HALF else y.detach().clone() for y in inner)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor, None, None]:
        pairs = [(y, (s * ctx.scale).to(y.dtype)) for y, s in zip(ctx.inner, slopes, strict=True) if s is not None]
        torch.autograd.backward([y for y, _ in pairs], [s for _, s in pairs], retain_graph=True)
        return torch.zeros(()), None, None


def is_half(output: Any) -> bool:
    """Whether a part of what a model answers, that is trained on, is in half precision."""
    return any(y.dtype in HALF for y in tree_flatten(output)[0] if _live(y))


def in_float(output: Any, scale: float) -> Any:
    """The same in float32; its gradients come back times `scale`."""
    leaves, form = tree_flatten(output)
    inner = [y for y in leaves if _live(y)]
    anchor = torch.zeros((), requires_grad=True)
    supply = iter(_Door.apply(anchor, scale, inner))  # type: ignore[no-untyped-call]
    return tree_unflatten([next(supply) if _live(y) else y for y in leaves], form)


def _live(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad


_OWN = 'reduction="none", then a sum or a mean over the entries of each record'
PerRecord = Callable[..., Tensor]  # (output, *targets) -> one value per record [b]


def named_loss(kind: str, model: nn.Module) -> tuple[PerRecord, bool]:
    """A loss by its kind, of what a model answers or of its logits; a causal model's tokens have the next for label.

    And whether it is one of Sordino's own, each of whose values is one record's.
    """
    own = loss_of(kind)
    shift = own.targets == "token" and is_causal(model)

    def each(output: Any, labels: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return own(logits[:, :-1], labels[:, 1:]) if shift else own(logits, labels)

    return each, keeps_apart(own)


class RecordLoss:
    """A user's loss, record by record; `slopes` are those that a backward pass through it alone leaves at `outputs`."""

    def __init__(self, loss: PerRecord, own_code: bool = False, known: bool = False) -> None:
        """`known`: a loss of Sordino's own, which needs no graph."""
        self.loss, self.own_code, self.known = loss, own_code, known
        self.function = Function(loss)
        self.tracing, self.checked = Tracing(self.function), list[Traced]()
        self.samples: list[tuple[Traced, list[Any], Any]] = []  # made-up arguments of each graph
        self.untraced = ""  # why the loss itself runs on records
        self.compared = False  # with what the loss says of a whole batch, where it has no graph
        self.coins = global_coins()
        self.slopes: list[tuple[Tensor, Tensor]] = []  # (what arrived, what was due)

    def __call__(
        self, output: Any, targets: tuple[Any, ...], known: list[Tensor], size: int, records: list[bool]
    ) -> Tensor:
        """The mean over the batch; `known` is what the model gave for it, `records` which targets are the records'."""
        self._refuse_others(output, known)
        leaves = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if not size:
            return torch.stack([x.sum() for x in leaves]).sum() * 0
        values = self._values(output, targets, size, records)
        mean = values.mean()
        due = torch.autograd.grad(mean, leaves, retain_graph=True, allow_unused=True)
        self.slopes = []
        for leaf, slope in zip(leaves, due, strict=True):
            self._expect(leaf, torch.zeros_like(leaf) if slope is None else slope.detach())
        return mean

    def is_stale(self) -> bool:
        """Whether the function answers made-up records otherwise than its graphs."""
        return any(differs(one.graph, self.function, made, form) is not None for one, made, form in self.samples)

    def capture_again(self) -> None:
        """Its owner changed it, and vouches for what it is now."""
        self.untraced = "it was changed while it trained"
        self.tracing.graphs.clear()
        self.tracing.known.clear()
        self.samples, self.checked = [], []

    @property
    def grade(self) -> tuple[Grade, str]:
        """What is proved of the loss, and why it is no more."""
        if self.untraced:
            return TRUSTED, f"the loss itself runs on records ({self.untraced})"
        return weakest([one.grade for one in self.checked]), "; ".join(one.reason for one in self.checked if one.reason)

    def _values(self, output: Any, targets: tuple[Any, ...], size: int, own: list[bool]) -> Tensor:
        """One value per record."""
        if self.known:
            values = self.loss(output, *targets)
            _refuse_shape(values, size)
            return values
        args = (output, *targets)
        records = [*(has_records(x, size) for x in tree_flatten(output)[0]), *own]
        try:
            traced = self.tracing.of(args, {}, records)
        except UntraceableError as error:
            if not self.own_code:
                raise _untraceable(str(error)) from None
            self.untraced, self.tracing.closed = str(error), True
            return self._looked_at(output, targets, size)
        self._check(traced, args, records)
        if traced.reason is None:
            found: Tensor = traced.graph(self.function, *args)
            return found
        return self._each(lambda *one: traced.graph(self.function, *one), output, targets, size)

    @torch.no_grad()
    def _check(self, traced: Traced, args: tuple[Any, ...], records: list[bool]) -> None:
        """Once for each graph, on made-up records: one value for each, and the same alone as in company."""
        if any(one is traced for one in self.checked):
            return
        inputs, form = flat(args, {})
        (made, _) = tree_unflatten(made_up(inputs, records, RECORDS), form)
        with still():
            together = traced.graph(self.function, *made)
            _refuse_shape(together, RECORDS)
            if traced.reason is not None:
                apart = self._each(lambda *one: traced.graph(self.function, *one), made[0], made[1:], RECORDS)
                _refuse_company(together, apart, traced.alone)
        self.checked.append(traced)
        self.samples.append((traced, made_up(inputs, records, RECORDS), form))

    def _looked_at(self, output: Any, targets: tuple[Any, ...], size: int) -> Tensor:
        """The user's own function, record by record, with looks at what it remembers."""
        one = taken(tree_map(_kept, (output, targets)), size, torch.zeros(1, dtype=torch.int64))
        before = self._said(*one)
        values = self._each(self.loss, output, targets, size)
        self._refuse_memory(before, self._said(*one))
        self._compare(output, targets, values)
        return values

    def _expect(self, leaf: Tensor, due: Tensor) -> None:
        arrived = torch.zeros_like(leaf, requires_grad=False)
        self.slopes.append((arrived, due))

        def add(slope: Tensor) -> Tensor:
            arrived.add_(slope.detach())
            return due

        leaf.register_hook(add)  # type: ignore[no-untyped-call]

    def _refuse_others(self, output: Any, known: list[Tensor]) -> None:
        theirs = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if not theirs or any(all(x is not y for y in known) for x in theirs):
            found = "optimizer.loss of something else than what model(x) gave for this batch"
            raise PlanError("loop", found, "the output as it came", "change it inside the loss, record by record")

    def _each(self, loss: PerRecord, output: Any, targets: tuple[Any, ...], size: int) -> Tensor:
        leaves, form = tree_flatten((output, targets))
        mapped = [has_records(x, size) for x in leaves]
        moving = [x for x, m in zip(leaves, mapped, strict=True) if m]

        def one(*items: Tensor) -> Tensor:
            supply = iter(items)
            own = [next(supply)[None] if m else x for x, m in zip(leaves, mapped, strict=True)]
            out, rest = tree_unflatten(own, form)
            return _single(loss(out, *rest))

        try:
            values: Tensor = vmap(one, randomness="different")(*moving)
        except (RuntimeError, NotImplementedError):
            values = torch.stack([one(*(x[j] for x in moving)) for j in range(size)])
        return values

    @torch.no_grad()
    def _compare(self, output: Any, targets: tuple[Any, ...], values: Tensor) -> None:
        """Once: a loss that says something else of the whole batch meant to compare records."""
        if self.compared or len(values) < 2:
            return
        with still():
            apart = self._each(self.loss, output, targets, len(values)).detach()
            _refuse_company(self.loss(output, *targets).detach(), apart)
        self.compared = True

    @torch.no_grad()
    def _said(self, output: Any, targets: tuple[Any, ...]) -> Tensor:
        """The loss of one record, with coins that stand still."""
        with still(), standing_at(self.coins):
            return self.loss(output, *targets).detach().clone()

    def _refuse_memory(self, before: Tensor, after: Tensor) -> None:
        """A batch may not change what the loss says of a record; its owner may, between batches, as a schedule does."""
        if not distance([before], [after]) <= SAME:
            raise PlanError(
                "reduction",
                "a loss that says something else of a record after a batch than before it",
                "a function of one record's output and target, which remembers nothing: no noise is added there",
                "keep what is counted or averaged out of the loss, and take random numbers from torch",
            )

    def verify(self) -> None:
        """Refuse a backward pass that came by another way than this loss alone."""
        slopes, self.slopes = self.slopes, []
        if not slopes or any(not torch.allclose(a, b, rtol=1e-3, atol=1e-12, equal_nan=True) for a, b in slopes):
            raise PlanError(
                "loop",
                "a backward pass that is not that of optimizer.loss(output, target) alone",
                "the loss that make_private was given",
                "call optimizer.loss(model(x), y).backward(), and put every term into that loss",
            )


def _refuse_shape(values: Any, size: int) -> None:
    if not isinstance(values, Tensor) or values.shape != (size,):
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise DataError(f"a loss of shape {shape} for {size} records", "one value per record", _OWN)


def _refuse_company(together: Tensor, apart: Tensor, alike: bool = True) -> None:
    """What a loss says of records together must be what it says of each alone."""
    _refuse_shape(together, len(apart))
    if not alike or not torch.allclose(together, apart, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise PlanError(
            "reduction",
            "a loss whose value for one record depends on the other records of the batch",
            "a function of one record's output and target",
            "divide by a constant, or by what the record itself has, never by a count of the batch",
        )


def _untraceable(reason: str) -> PlanError:
    return PlanError(
        "own code",
        f"a loss that no graph can be captured of ({reason})",
        "a function of one record's output and target, which remembers nothing: no noise is added there",
        'write it without Python branches on data and without state; or own_code="trusted" in make_private, if you '
        "vouch for it: the certificate will say so",
    )


def _kept(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


def _single(value: Tensor) -> Tensor:
    if value.shape != (1,):
        found = f"a loss of shape {list(value.shape)} for 1 record"
        raise DataError(found, "one value per record", _OWN)
    return value[0]
