"""A model that records itself: every training pass over a batch of the private loader leaves per-record gradients.

Only `model.forward` is replaced, and the layers only while it runs: copies and pickles of the model are ordinary.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from sordino.errors import DataError, PlanError
from sordino.optim.guard import Guard
from sordino.optim.loader import Handed, Turn
from sordino.optim.reduction import Seen
from sordino.per_record import Recorder
from sordino.per_record.record import _note, _recorded
from sordino.per_record.sites import Site, sites
from sordino.per_record.tape import UnrecordableError

ARRANGEMENTS = ((True, False), (False, False), (False, True))  # (channels last, whole): from the fastest on


class Gate:
    """The model's `forward`; in a copy of the model, and in its pickle, the model's own again."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.recording.guard.inside += 1
        try:
            return self.recording.run(args, kwargs)
        finally:
            self.recording.guard.inside -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model, own = self.recording.model, self.recording.own
        if own is not None:
            return own
        return types.MethodType(type(model).forward, memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return getattr, (self.recording.model, "forward")


class Recording(Recorder):
    """A Recorder whose model stays usable: evaluation, copies and passes over other data run as they always did."""

    def __init__(self, model: nn.Module, turn: Turn) -> None:
        super().__init__(model)
        self.turn = turn
        self.choices: dict[bool, list[Site]] = {False: self.sites, True: sites(model, whole=True)}
        self.parts = list(model.modules())
        self.own = vars(model).get("forward")
        self.plain: Callable[..., Any] = model.forward
        self.current: Handed | None = None
        self.backwards = 0
        self.stray: int | None = None  # records of a training pass that the loader did not hand out
        self.watching = True  # while the loss is still to be recognised
        self.seen: Seen | None = None
        self.tape.anchor.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        model.forward = Gate(self)
        self.guard = Guard(model, self.named.values())

    def restore(self) -> None:
        """Leave the model as it was."""
        self.forget()
        self.guard.leave()
        del self.model.forward
        if self.own is not None:
            self.model.forward = self.own

    def _count(self, anchor: Tensor) -> None:
        """One backward pass went through the model."""
        anchor.grad = None
        self.backwards += 1

    def forget(self) -> None:
        """All that was recorded."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.backwards, self.stray, self.current, self.seen = [], 0, None, None, None
        self.clear()

    def zero(self) -> None:
        """What backward passes left; a forward pass whose backward is still to come stays."""
        self.tape.calls = [call for call in self.tape.calls if call.slope is None]
        self.outside.clear()
        self.backwards, self.stray = 0, None

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are trained now: some may have been frozen since the start."""
        return [(name, p) for name, p in self.named.items() if p.requires_grad]

    def run(self, args: Any, kwargs: Any) -> Any:
        """The model's output; recorded if it is a training pass over what the loader handed out."""
        handed = self.turn.handed
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        size = self._size(args, kwargs)
        if handed is None or size != handed.size:
            self.stray = size
            return self.plain(*args, **kwargs)
        self._refuse_new_parts()
        self.guard.begin()
        if handed is not self.current:
            self.forget()
            self.current, self.handles = handed, [_note(p, self.outside, name) for name, p in self._trained()]
        if not self.trusted:
            self._arrange(args, kwargs, size)
        self.tape.begin(size)
        output = self._pass(args, kwargs)
        if self.watching:
            self.seen = Seen.of(output, handed) or self.seen
        return output

    def _refuse_new_parts(self) -> None:
        """A layer that came later was not looked at: it may mix records."""
        now = list(self.model.modules())
        if len(now) != len(self.parts) or any(a is not b for a, b in zip(now, self.parts, strict=True)):
            found = "a model whose layers were changed after make_private"
            raise PlanError("loop", found, "the layers it began with", "call make_private again, for a new bill")

    def _size(self, args: Any, kwargs: Any) -> int:
        """Records of a batch; refused if they are elsewhere than the model."""
        first = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()), None)
        home = next(iter(self.named.values())).device
        if first is not None and first.device != home:
            found = f"a batch on {first.device} and a model on {home}"
            raise DataError(found, "both on one device", f"move the batch: x.to('{home}')")
        return 0 if first is None else len(first)

    def _pass(self, args: Any, kwargs: Any) -> Any:
        """One forward pass by the rules of the sites."""
        for site in self.sites:
            if site.module is self.model:
                return site.rule(self.tape, self.model, site.axis, *args, **kwargs)
        before = [vars(site.module).get("forward") for site in self.sites]
        for site in self.sites:
            site.module.forward = _recorded(self.tape, site)
        try:
            return self.plain(*args, **kwargs)
        finally:
            for site, own in zip(self.sites, before, strict=True):
                del site.module.forward
                if own is not None:
                    site.module.forward = own

    def _arrange(self, args: Any, kwargs: Any, size: int) -> None:
        """Choose how the model is run by trying it on this batch: a record must touch its own slices alone."""
        failure: Exception | None = None
        for channels_last, whole in ARRANGEMENTS:
            self.tape.channels_last, self.sites = channels_last, self.choices[whole]
            try:
                self._try(args, kwargs, size)
            except UnrecordableError as error:
                failure = error
                continue
            except RuntimeError as error:
                if not channels_last or "view" not in str(error):
                    raise
                continue
            if whole:
                self._refuse_mixing(args, kwargs, size)
            return
        assert failure is not None
        raise failure

    def _try(self, args: Any, kwargs: Any, size: int) -> None:
        self.tape.begin(size)
        kept, self.tape.calls = self.tape.calls, []
        try:
            with torch.random.fork_rng(devices=[]):
                leaves = [y for y in tree_flatten(self._pass(args, kwargs))[0] if _has_records(y, size)]
            if size > 1:
                if not leaves:
                    found = "a model whose output has no slice per record"
                    raise PlanError("per-record", found, "outputs, of which the loop computes the loss")
                self._check_first(torch.stack([y[0].sum() for y in leaves]).sum())
                self.trusted = all(bool(y.isfinite().all()) for y in leaves)
        finally:
            self.tape.calls = kept
            self.outside.clear()

    def _check_first(self, first: Tensor) -> None:
        """The first record's output, differentiated, must reach its own slices, and no parameter past the layers."""
        wanted = [self.tape.anchor, *(p for _, p in self._trained())]
        slopes = torch.autograd.grad(first, wanted, allow_unused=True)
        if any(slope is not None for slope in slopes[1:]):
            raise UnrecordableError("a parameter used outside the layer that owns it")
        if any(call.leaks(self.tape.batch) for call in self.tape.calls):
            raise UnrecordableError("layers whose gradient for one record touches other records")

    @torch.no_grad()
    def _refuse_mixing(self, args: Any, kwargs: Any, size: int) -> None:
        """Run whole, records are kept apart by force: say so if the model meant to mix them."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        alone = tree_map(lambda x: x[:1] if _has_records(x, size, grad=False) else x, (args, kwargs))
        pair = [tree_flatten(self.plain(*a, **k))[0] for a, k in ((args, kwargs), alone)]
        for module in training:
            module.training = True
        together = [(y[:1], z) for y, z in zip(*pair, strict=True) if _has_records(y, size, grad=False)]
        if size > 1 and not all(torch.allclose(y, z, rtol=1e-3, atol=1e-4, equal_nan=True) for y, z in together):
            raise PlanError(
                "mixing",
                "a model whose output for one record depends on the other records of the batch",
                "layers that keep the records of a batch apart",
                "normalise within a record, as nn.GroupNorm and nn.LayerNorm do",
            )


def _has_records(item: Any, size: int, grad: bool = True) -> bool:
    """Whether the first axis of a tensor may be the records'."""
    return isinstance(item, Tensor) and item.dim() > 0 and len(item) == size and (item.requires_grad or not grad)
