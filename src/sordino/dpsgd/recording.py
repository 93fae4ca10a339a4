"""A model that records itself: every training pass over a batch of the private loader leaves per-record gradients.

What runs is the graph of the model (`passes`), captured on made-up records: the user's own forward sees no record that
is trained on, unless it has no graph and its owner vouches for it. Only `model.forward` is replaced, and the layers
only while it runs: copies and pickles of the model are ordinary.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from sordino.dpsgd import Recorder
from sordino.dpsgd.batch_checks import Inputs
from sordino.dpsgd.batch_independence import Company, Lookout, constants, has_records
from sordino.dpsgd.clipped_sum import _note, _recorded
from sordino.dpsgd.graph_pass import GraphPass
from sordino.dpsgd.guards import GradientWatch, Guard
from sordino.dpsgd.loader import Handed, Turn
from sordino.dpsgd.passes import Passes, no_output, refuse_labels
from sordino.dpsgd.record_loss import in_float, is_half
from sordino.dpsgd.reduction import Check, Seen
from sordino.dpsgd.rule_table import Site, sites
from sordino.dpsgd.tape import UnrecordableError
from sordino.errors import DataError, PlanError
from sordino.graph import TRUSTED, Grade, UntraceableError
from sordino.graph.capture import flat

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
    """A Recorder whose model stays usable: evaluation, copies and passes over other data run as they always did.

    `own_code` says that its owner vouches for code without a graph. Of such code, `coins` choose the passes in which a
    record alone is compared with the record in company; `expected` is the public size of what is computed at once.
    """

    def __init__(
        self,
        model: nn.Module,
        turn: Turn,
        coins: np.random.Generator | None = None,
        expected: float = 64.0,
        own_code: bool = False,
    ) -> None:
        super().__init__(model)
        self.turn, self.expected, self.own_code = turn, expected, own_code
        self.passes, self.given_inputs = Passes(model), Inputs(own_code)
        self.way: GraphPass | None = None  # how the graph of the last training pass is run
        self.flattened: tuple[list[Any], Any] = [], None  # the arguments of the last training pass
        self.untraced = ""  # why the model's own forward ran on the records of a training pass
        self.lookout = Lookout(model, self._passing, coins)
        self.within: Callable[[Any, Any], Any] | None = None  # what the gate leads to while a pass is looked at
        self.last: tuple[Company, bool] | None = None  # the last pass that nobody looked at, and its mode
        self.inputs: list[Any] = []  # of this batch, and of the one before that had its step
        self.before: list[Any] = []
        self.mixed: PlanError | None = None
        self.choices: dict[bool, list[Site]] = {False: self.sites, True: sites(model, whole=True)}
        self.parts = list(model.modules())
        self.own = vars(model).get("forward")
        self.plain: Callable[..., Any] = model.forward
        self.current: Handed | None = None
        self.backwards = 0
        self.stray: int | None = None  # records of a training pass that the loader did not hand out
        self.mean = True  # whether the loss is a mean over the records
        self.undone: bool | None = None  # whether the mean is undone already, where the output is in half precision
        self.check: Check | None = None  # recognises the loss of the loop, where make_private was given none
        self.seen: list[Seen] = []  # of the passes over this batch
        self.given: list[Tensor] = []  # what the model gave for this batch
        self.tape.anchor.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        model.forward = Gate(self)
        self.guard = Guard(model, self.named.values())
        self.gradients = GradientWatch(self.named.values())

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
        self.gradients.begin()

    def stepped(self) -> None:
        """The batch is summed: what the next has in common with it is no record of either."""
        self.before, self.inputs = self.inputs or self.before, []
        self.forget()

    def forget(self) -> None:
        """All that was recorded."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.backwards, self.stray, self.current, self.seen = [], 0, None, None, []
        self.undone = None
        self.given = []
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
        if self.within is not None:
            return self.within(args, kwargs)
        handed = self.turn.handed
        if not torch.is_grad_enabled():
            return self._evaluated(args, kwargs)
        size = self._size(args, kwargs)
        if handed is None or size != handed.size:
            self.stray = size
            return self._evaluated(args, kwargs)
        self._refuse_new_parts()
        refuse_labels(kwargs)
        if self.guard.begin():
            self.refuse_stale()
        if handed is not self.current:
            self.forget()
            self.current, self.handles = handed, [_note(p, self.outside, name) for name, p in self._trained()]
        self._prepare(args, kwargs, handed)
        self.tape.begin(size)
        output = self._in_float(self._pass(args, kwargs) if size else self._of_nobody(args, kwargs), size)
        live = [y for y in tree_flatten(output)[0] if _trains(y, size)]
        self.given += live
        if self.check is not None:
            self.seen += Seen.of(output, live, handed, self.check)
        return output

    def _evaluated(self, args: Any, kwargs: Any) -> Any:
        """A pass that trains nothing: by its graph too, or by the model's own forward, after which none is captured."""
        try:
            with self._not_noted():
                graph = self.passes.evaluated(args, kwargs)
        except UntraceableError:
            self.passes.close()
            return self.plain(*args, **kwargs)
        return graph(self.model, *args, **kwargs)

    @contextmanager
    def _not_noted(self) -> Iterator[None]:
        """Gradients of made-up records are no use of a parameter."""
        kept = set(self.outside)
        try:
            yield
        finally:
            self.outside.clear()
            self.outside.update(kept)

    def prepare(self, tables: Sequence[Tensor]) -> None:
        """Capture model(x) for records of this shape, before a loop gets its first batch."""
        self.passes.prepare(tables)
        try:
            self.guard.look()
        except PlanError as error:  # forward writes: said at the first pass, as of every other kind of arguments
            self.mixed = error
            self.guard.accept()

    def refuse_stale(self) -> None:
        """A forward that its owner changed since its graph was captured: the graph would go on as it was."""
        if self.untraced or not self.passes.samples:
            return
        with self._not_noted():
            if not self.passes.is_stale():
                return
        if not self.own_code:
            raise stale("forward of the model")
        self.passes.capture_again()

    def _prepare(self, args: Any, kwargs: Any, handed: Handed) -> None:
        """Find how this pass is run, before it sees its records."""
        if self.mixed is not None:
            raise self.mixed
        leaves, form = self.flattened = flat(args, kwargs)
        records = self.given_inputs.records(leaves, handed.given, handed.size)
        try:
            with self._not_noted():
                self.way = self.passes.trained(args, kwargs, records, (leaves, form))
        except UntraceableError as error:
            if not self.own_code:
                raise untraceable(str(error)) from None
            self.way, self.untraced = None, str(error)
            self.passes.close()
        if self.way is None and handed.size:
            self._keep_apart(args, kwargs, handed.size)
            self.inputs = tree_flatten((args, kwargs))[0]

    def _in_float(self, output: Any, size: int) -> Any:
        """Half precision is widened for the loss, and the mean undone before it is rounded again."""
        half = is_half(output)
        if self.undone not in (None, half):
            found = "passes over one batch in half and in full precision"
            raise PlanError("loop", found, "one of them", "keep all passes of a step inside autocast, or none")
        self.undone = half
        return in_float(output, float(size or 1) if self.mean else 1.0) if half else output

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
        """One forward pass: the graph, or the model's own forward by the rules of the sites."""
        if self.way is not None:
            return self.way(self.tape, self.model, args, kwargs, self.flattened[0] or None)
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

    def _of_nobody(self, args: Any, kwargs: Any) -> Any:
        """An empty batch; where the model fails on it, its answer to a made-up record without that record."""
        self.flattened = [], None
        try:
            return self._pass(args, kwargs)
        except (RuntimeError, ValueError, IndexError, UnrecordableError):
            self.tape.clear()
        kept, self.sites = self.sites, self.choices[True]
        self.tape.begin(1)
        try:
            made = tree_map(lambda x: x.new_zeros(1, *x.shape[1:]) if has_records(x, 0) else x, (args, kwargs))
            return tree_map(lambda y: y[:0] if has_records(y, 1) else y, self._pass(*made))
        finally:
            self.sites = kept
            self.tape.begin(0)  # what is recorded is nobody's, and summed up nowhere

    def _keep_apart(self, args: Any, kwargs: Any, size: int) -> None:
        """The first batch decides how the model is run; of the others, some that coins choose are looked at again."""
        if self.mixed is not None:
            raise self.mixed
        chosen = self.lookout.wants(size, self.expected)
        if not self.trusted:
            self._arrange(args, kwargs, size)
        elif self.may_mix:
            self.last = (self._company((args, kwargs), size), self.model.training) if size > 1 else self.last
            if chosen:
                self._look()

    @property
    def may_mix(self) -> bool:
        """Whether a later pass could mix records: not record by record, nor in layers that never do."""
        return self.sites is not self.choices[True] and self.lookout.needed()

    def _look(self) -> None:
        """A record alone against the record in company, in the last pass."""
        if self.last is None:
            return
        (company, training), self.last = self.last, None
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(training) if training != self.model.training else None
        try:
            self.lookout.again(company)
        except PlanError as error:
            self.mixed = error
            raise
        finally:
            for module, mode in modes:
                module.training = mode

    def vouch(self) -> tuple[str, int]:
        """What a certificate may say of the records: how they were kept apart, up to the last pass, and the looks."""
        if not self.untraced:
            return HOW[self.passes.grade], 0
        if self.mixed is None and isinstance(vars(self.model).get("forward"), Gate) and self.may_mix:
            self._look()
        if self.mixed is not None:
            raise self.mixed
        how = "looked at in passes chosen by secret coins" if self.may_mix else "by the layers, or run one by one"
        return how, self.lookout.looks

    def grade(self) -> tuple[Grade, str]:
        """What is proved of the model and of what reached it, and why it is no more."""
        if self.untraced:
            return TRUSTED, f"the model's own forward runs on records ({self.untraced})"
        if self.passes.changed:
            return TRUSTED, self.passes.changed
        if self.given_inputs.changed:
            return TRUSTED, f"the loop changes batches itself ({self.given_inputs.changed})"
        return self.passes.grade, "; ".join(self.passes.reasons)

    def _company(self, inputs: Any, size: int, recorded: bool = True) -> Company:
        run = self._pass if recorded else lambda args, kwargs: self.plain(*args, **kwargs)
        same = constants(self.before, inputs, size)
        return Company(self._led(run), inputs, size, self.tape if recorded else None, whole=same)

    def _passing(self, model: nn.Module) -> Callable[[Any], Any]:
        """The pass of the model itself, or of a copy, as if nobody recorded it."""
        if model is self.model:
            return self._led(lambda args, kwargs: self.plain(*args, **kwargs))
        return lambda inputs: model(*inputs[0], **inputs[1])

    def _led(self, run: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        """`run` behind the model's gate, with the hooks that stand before it."""

        def forward(inputs: Any) -> Any:
            self.within = run
            try:
                return self.model(*inputs[0], **inputs[1])
            finally:
                self.within = None

        return forward

    def _arrange(self, args: Any, kwargs: Any, size: int) -> None:
        """Choose how the model is run by trying it on this batch: a record must touch its own slices alone."""
        failure: Exception | None = None
        for channels_last, whole in ARRANGEMENTS:
            self.tape.channels_last, self.sites = channels_last, self.choices[whole]
            try:
                finite = self._try(args, kwargs, size)
                if size > 1:
                    self.lookout.start(self._company((args, kwargs), size, recorded=not whole))
                self.trusted = finite and size > 1
            except UnrecordableError as error:
                failure = error
                continue
            except RuntimeError as error:
                if not channels_last or "view" not in str(error):
                    raise
                continue
            return
        assert failure is not None
        raise failure

    def _try(self, args: Any, kwargs: Any, size: int) -> bool:
        """Whether all of the output is finite."""
        self.tape.begin(size)
        kept, self.tape.calls = self.tape.calls, []
        try:
            with torch.random.fork_rng(devices=[]):
                leaves = [y for y in tree_flatten(self._pass(args, kwargs))[0] if _trains(y, size)]
            if size > 1:
                if not leaves:
                    raise no_output()
                for own in (0, size - 1):
                    self._check_own(own, torch.stack([y[own].sum() for y in leaves]).sum())
            return all(bool(y.isfinite().all()) for y in leaves)
        finally:
            self.tape.calls = kept
            self.outside.clear()

    def _check_own(self, own: int, figure: Tensor) -> None:
        """A figure of one record's output must reach that record's slices alone, and no parameter past the layers."""
        wanted = [self.tape.anchor, *(p for _, p in self._trained())]
        slopes = torch.autograd.grad(figure, wanted, allow_unused=True, retain_graph=True)
        if any(slope is not None for slope in slopes[1:]):
            raise UnrecordableError("a parameter used outside the layer that owns it")
        leaks = any(call.leaks(self.tape.batch, own) for call in self.tape.calls)
        for call in self.tape.calls:
            call.slope = None
        if leaks:
            raise UnrecordableError("layers whose gradient for one record touches other records")


HOW: dict[Grade, str] = {
    "by construction": "by the operations of the model's graph, whatever the records hold",
    "per record (vmap)": "the model's graph is run for each record by itself",
}


def stale(what: str) -> PlanError:
    return PlanError(
        "own code",
        f"a {what} that answers made-up records otherwise than when its graph was captured",
        "code that stays as it was: numbers that a loop sets may come from records, and the graph does not see them",
        'give a schedule to the optimizer, not to the model or the loss; or own_code="trusted", if you vouch for it',
    )


def untraceable(reason: str) -> PlanError:
    return PlanError(
        "own code",
        f"a forward that no graph can be captured of ({reason})",
        "code whose steps do not depend on records, or on anything that it remembers",
        'write it without Python branches on data and without state outside the module; or own_code="trusted" in '
        "make_private, if you vouch that it keeps the records of a batch apart: the certificate will say so",
    )


def _trains(item: Any, size: int) -> bool:
    """Whether a tensor has a slice for each record, with a gradient."""
    return has_records(item, size) and item.requires_grad
