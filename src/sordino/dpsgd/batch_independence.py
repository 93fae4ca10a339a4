"""A record alone and in company: what a model says of a record may not depend on the other records of the batch.

Some records are run once in the whole batch and once by themselves, with the coins standing still. Compared are

    values    f(batch)[some]                    and   f(batch[some])
    slopes    sum_{j in some} r_j g_j           the same sum, from the pass over all and from the pass over some

`r` and the slopes at the outputs are random and public. Where a model agrees, the sum with a record and the sum without
it differ by that record's own clipped gradient, so by at most the clip norm.

When to look whether a model keeps records apart: at the start, at random passes, and before a certificate.

At the start parameters are shaken too (on a copy), so that mixing behind a weight of zero shows at once. Later passes
are chosen by coins that the model does not see, so often that those looks cost half a percent of the work.
A model that is made of torch's own layers in a row needs no second look (`apart`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino import codec
from sordino.dpsgd.mixing_layers import kept_apart
from sordino.dpsgd.pieces import HALF, sums_in
from sordino.dpsgd.state_guard import still
from sordino.dpsgd.tape import Tape, UnrecordableError
from sordino.errors import PlanError
from sordino.layout import copied
from sordino.rng import Secure, Seeded

SOME = 8  # records that are run by themselves
FEW = 16  # records that are company enough for a look at a copy of the model
ROUNDING, COARSE = 1e-5, 3e-3  # of values: above the first, ask in float64 too; above the second, float32 is enough
SAME = 1e-6  # of values of one question asked twice: equal, but for a library that adds up in another order
TURNED = 0.05  # of sums of gradients: a kink or a tie may fall on either side


@dataclass(frozen=True)
class Gap:
    """How far a pass in company is from a pass alone, relative to its size."""

    values: float
    slopes: float = 0.0
    random: bool = False  # whether the pass asked for coins


@dataclass(frozen=True)
class Company:
    """`forward(inputs)` answers for `size` records: every tensor of that length in `inputs` has one slice for each.

    With a `tape` that the pass is recorded on, gradients are compared too; `during` is entered for each pass.
    `whole` are places among the inputs of tensors that are as long by coincidence, and known to be no records.
    """

    forward: Callable[[Any], Any]
    inputs: Any
    size: int
    tape: Tape | None = None
    during: Callable[[], AbstractContextManager[object]] = nullcontext
    slopes: bool = True  # whether gradients are compared, where there is a tape
    random: bool = True  # whether coins have to stand still
    whole: frozenset[int] = frozenset()

    def gap(self, some: Tensor, coins: np.random.Generator) -> Gap:
        """The distance for `some` records; the smaller one where some inputs seem to be no records."""
        readings = [frozenset[int](), self.whole] if self.whole else [self.whole]
        return min((self._gap(some, coins, whole) for whole in readings), key=lambda gap: gap.values)

    def steady(self) -> bool:
        """Whether the same pass gives the same answer twice; coins from elsewhere than torch do not stand still."""
        everyone, weights = torch.arange(self.size), torch.zeros(self.size)
        first, second = (self._answer(self.inputs, self.size, everyone, weights, 0).outputs for _ in range(2))
        return distance(first, second) <= ROUNDING

    def few(self, some: Tensor) -> Company:
        """A smaller company."""
        return replace(self, inputs=taken(self.inputs, self.size, some, self.whole), size=len(some))

    def _gap(self, some: Tensor, coins: np.random.Generator, whole: frozenset[int]) -> Gap:
        weights = torch.from_numpy(coins.normal(size=len(some)))
        seed = int(coins.integers(2**32))
        together = self._answer(self.inputs, self.size, some, weights, seed)
        chosen = torch.arange(len(some))
        own = taken(self.inputs, self.size, some, whole)
        try:
            alone = self._answer(own, len(some), chosen, weights, seed, together.slopes)
        except UnrecordableError:
            raise
        except (RuntimeError, ValueError, IndexError):  # it runs in company only
            return Gap(float("inf"))
        return Gap(distance(together.outputs, alone.outputs), _turned(together.total, alone.total), together.met)

    def _answer(
        self,
        inputs: Any,
        size: int,
        some: Tensor,
        weights: Tensor,
        seed: int,
        slopes: list[Tensor] | None = None,
    ) -> _Answer:
        with self.during(), _aside(self.tape, size), still(self.random):
            before = torch.get_rng_state()
            leaves = [y for y in tree_flatten(self.forward(inputs))[0] if has_records(y, size) and _real(y)]
            kept = [y.detach()[some].clone() for y in leaves]
            met = not torch.equal(before, torch.get_rng_state())
            if self.tape is None or not self.slopes or not any(y.requires_grad for y in leaves):
                return _Answer(kept, {}, [], met)
            slopes = _slopes(leaves, seed) if slopes is None else slopes
            moving = [(y * s).sum() for y, s in zip(leaves, slopes, strict=True) if y.requires_grad]
            torch.autograd.grad(torch.stack(moving).sum(), self.tape.anchor, allow_unused=True)
            with torch.autocast("cpu", enabled=False):
                pieces = self.tape.pieces().items()
                total = {p: piece.at(some).weighted(weights.to(sums_in(p))).clone() for p, piece in pieces}
            return _Answer(kept, total, [s[some] for s in slopes], met)


@codec.hides_values
@dataclass(frozen=True)
class _Answer:
    outputs: list[Tensor]
    total: dict[nn.Parameter, Tensor]
    slopes: list[Tensor]  # at the outputs of `some`
    met: bool  # whether the pass asked for coins


@contextmanager
def _aside(tape: Tape | None, size: int) -> Iterator[None]:
    """What the tape holds is put aside, and put back."""
    if tape is None:
        yield
        return
    calls, batch, tape.calls = tape.calls, tape.batch, []
    tape.begin(size)
    try:
        yield
    finally:
        tape.calls = calls
        tape.begin(batch)


def _slopes(leaves: list[Tensor], seed: int) -> list[Tensor]:
    """Public, and not by torch's generator: its coins stand still."""
    rng = Seeded(seed).at(0, "slopes")
    return [torch.as_tensor(rng.normal(size=tuple(y.shape))).to(y.dtype) for y in leaves]


def has_records(item: Any, size: int) -> bool:
    """Whether the first axis of a tensor may be the records'."""
    return isinstance(item, Tensor) and item.dim() > 0 and len(item) == size


def _real(item: Tensor) -> bool:
    return item.is_floating_point()


def taken(inputs: Any, size: int, some: Tensor, whole: Collection[int] = ()) -> Any:
    """The inputs of some records; what stands at the places `whole` is no record's, and is left as it is."""
    leaves, form = tree_flatten(inputs)
    own = [has_records(x, size) and i not in whole for i, x in enumerate(leaves)]
    return tree_unflatten([x[some] if cut else x for x, cut in zip(leaves, own, strict=True)], form)


def constants(before: Sequence[Any], now: Any, size: int) -> frozenset[int]:
    """Places of tensors that are as long as the batch and no records of it: a batch of other records had the same."""
    leaves = tree_flatten(now)[0]
    long = [i for i, x in enumerate(leaves) if has_records(x, size)]
    if len(before) != len(leaves) or not long or _equal(before[long[0]], leaves[long[0]]):
        return frozenset()
    return frozenset(i for i in long[1:] if _equal(before[i], leaves[i]))


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)


def distance(together: list[Tensor], alone: list[Tensor]) -> float:
    """The largest difference over the largest value; infinite where the answers have other shapes or are not finite."""
    if len(together) != len(alone) or any(a.shape != b.shape for a, b in zip(together, alone, strict=True)):
        return float("inf")
    gaps = [0.0]
    for a, b in zip(together, alone, strict=True):
        finite = a.isfinite() & b.isfinite()
        if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return float("inf")
        a, b = a[finite].double(), b[finite].double()
        gaps.append(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if len(a) else 0.0)
    return max(gaps)


def _turned(together: dict[nn.Parameter, Tensor], alone: dict[nn.Parameter, Tensor]) -> float:
    """|sum - sum| over the larger of the two."""
    parameters = together.keys() | alone.keys()
    pairs = [(together.get(p), alone.get(p)) for p in parameters]
    difference, size = 0.0, 0.0
    for a, b in pairs:
        a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)  # type: ignore[arg-type]
        difference += float((a - b).double().square().sum())
        size += float(torch.maximum(a.double().square().sum(), b.double().square().sum()))
    return 0.0 if size == 0 or not np.isfinite(size) else float((difference / size) ** 0.5)


def subset(size: int, coins: np.random.Generator, count: int) -> Tensor:
    """So many of the records of a batch, chosen at random."""
    return torch.from_numpy(np.sort(coins.choice(size, count, replace=False)))


@contextmanager
def shaken(model: nn.Module, coins: np.random.Generator) -> Iterator[None]:
    """Public noise on every trained parameter, so that nothing hides behind a weight of zero; then as before."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.data for p in parameters]  # put back as they are: a graph that somebody holds stays whole
    for p in parameters:
        scale = 0.05 + 0.5 * float(p.data.std(correction=0)) if p.numel() else 0.0
        p.data = p.data + torch.as_tensor(coins.normal(size=tuple(p.shape)) * scale).to(p.dtype)
    try:
        yield
    finally:
        for p, kept in zip(parameters, before, strict=True):
            p.data = kept


def precise(model: nn.Module) -> nn.Module | None:
    """A copy in float64; None where there cannot be one."""
    try:
        return copied(model).double()
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return None


def refused() -> PlanError:
    return PlanError(
        "mixing",
        "a model whose output for one record depends on the other records of the batch",
        "layers and losses that keep the records of a batch apart",
        "normalise within a record, as nn.GroupNorm and nn.LayerNorm do, and compare no record with another in forward",
    )


WORK = 0.005  # of the records of a run are run once more
WHOLE = 0.25  # of the looks have the whole batch for company, and compare gradients too

HALVED = 0.1  # the same as COARSE, of models in half precision

Forward = Callable[[Any], Any]


class Lookout:
    """Looks at one model; `of(model)` is the pass over (inputs) of that model or of a copy of it."""

    def __init__(self, model: nn.Module, of: Callable[[nn.Module], Forward], coins: np.random.Generator | None) -> None:
        self.model, self.of = model, of
        self.coins = Secure().at(0, "mixing") if coins is None else coins
        self.looks = 0
        self.random = False  # whether a pass has asked torch for coins

    def wants(self, size: int, expected: float) -> bool:
        """A coin for this pass; `expected` is the public size of a batch."""
        due = self.coins.random() < WORK / (WHOLE + (1 - WHOLE) * min(1.0, FEW / expected) + min(1.0, SOME / expected))
        return due and size > 1

    def needed(self) -> bool:
        """Whether the model could mix records at a later pass: not if it is made of layers that never do."""
        return not kept_apart(self.model)

    def start(self, company: Company) -> None:
        """The first batch as it is, then a few records with shaken parameters."""
        self.compare(company, min(SOME, company.size - 1))
        self._shaken(self._few(company))

    def again(self, company: Company) -> None:
        """A later batch; any disagreement is a refusal now, for steps have been taken."""
        company = company if self.coins.random() < WHOLE else replace(self._few(company), slopes=False)
        try:
            self.compare(company, int(self.coins.integers(1, min(SOME, company.size - 1) + 1)))
        except UnrecordableError:
            raise refused() from None

    def _few(self, company: Company) -> Company:
        if company.size <= FEW:
            return company
        return company.few(subset(company.size, self.coins, FEW))

    def compare(self, company: Company, count: int) -> None:
        """Refuse values that depend on the company; `UnrecordableError` where only the rules of the layers fail."""
        some = subset(company.size, self.coins, count)
        gap = replace(company, random=self.random).gap(some, self.coins)
        if gap.random and not self.random:
            self.random = True
            gap = replace(company, random=True).gap(some, self.coins)
        self.looks += 1
        if gap.values > ROUNDING and self._confirmed(company, some, gap.values):
            if not replace(company, random=self.random).steady():
                raise UnrecordableError("a model with coins that are not torch's")
            raise refused()
        if gap.slopes > TURNED:
            raise UnrecordableError("layers whose gradient for one record touches other records")

    def _confirmed(self, company: Company, some: torch.Tensor, found: float) -> bool:
        """What float32 may have rounded is asked again in float64."""
        half = torch.is_autocast_enabled("cpu") or any(p.dtype in HALF for p in self.model.parameters())
        if found > (HALVED if half else COARSE):
            return True
        exact = self._exact(company, precise(self.model), some)
        return exact is not None and exact > ROUNDING

    def _exact(self, company: Company, twin: nn.Module | None, some: torch.Tensor) -> float | None:
        """The distance of values in a copy in float64; None where it does not run."""
        if twin is None:
            return None
        inputs = tree_map(_double, company.inputs)
        try:
            twins = replace(company, forward=self.of(twin), inputs=inputs, tape=None, during=nullcontext)
            return replace(twins, random=self.random).gap(some, self.coins).values
        except (RuntimeError, ValueError, NotImplementedError):
            return None

    def _shaken(self, few: Company) -> None:
        """Refuse what shows with shaken parameters: in float32, and in a copy in float64 where that may be rounding."""
        some = subset(few.size, self.coins, (few.size + 1) // 2)
        with shaken(self.model, self.coins):
            found = self._plainly(few, some)
            if found is not None and found <= ROUNDING:
                return
            exact = self._exact(few, precise(self.model), some)
        if (found is not None and found > COARSE) if exact is None else (exact > ROUNDING):
            raise refused()

    def _plainly(self, few: Company, some: torch.Tensor) -> float | None:
        """The distance of values by the model's own layers; 0 if coins from elsewhere move it, None if it won't run."""
        plain = replace(few, forward=self.of(self.model), tape=None, during=nullcontext, random=self.random)
        try:
            found = plain.gap(some, self.coins).values
            return found if found <= ROUNDING or plain.steady() else 0.0
        except (RuntimeError, ValueError, NotImplementedError):
            return None


def _double(item: Any) -> Any:
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
