"""Notice a loop that changes gradients before the step: what it changes is not what is trained on.

The doors of a model: what leaves through `state_dict` is looked at first, what enters by `load_state_dict` is known.

Copies and pickles of the model are ordinary: the doors are not taken along."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.dpsgd.state_guard import Steady

_LOG = logging.getLogger("sordino")
_SAID = (
    "The gradients were changed between backward() and step() (torch.nn.utils.clip_grad_norm_ or the like). That has "
    "no effect: a private step clips every record's gradient to clip= of make_private, and sets .grad itself, noised. "
    "Remove the call; to clip tighter, lower clip=."
)


class GradientWatch:
    """Says once that .grad was changed between a backward pass and the step, where a change is lost.

    During a private loop .grad holds nothing of the batch: gradients are recorded record by record, and step()
    replaces .grad by the noised mean. So in place of None the smallest trained parameter is given a .grad of zeros,
    whose version counter tells of any change in place (clip_grad_norm_ multiplies whatever the norm is), and whose
    identity tells of a replacement. A change of other parameters' gradients alone goes unnoticed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.watched = min(parameters, key=lambda p: p.numel(), default=None)
        self.zeros: Tensor | None = None  # the .grad that was put in place of None
        self.seen: tuple[Tensor, int] | None = None  # the .grad after the backward pass, and its version
        self.warned = False

    def begin(self) -> None:
        """A backward pass is done: remember .grad as it is now."""
        if self.watched is None or not self.watched.requires_grad:
            return
        if self.watched.grad is None:
            self.zeros = self.watched.grad = torch.zeros_like(self.watched)
        self.seen = self.watched.grad, self.watched.grad._version

    def end(self) -> None:
        """The step is about to begin: warn if .grad is another one, and take the zeros away."""
        seen, self.seen = self.seen, None
        if seen is None or self.watched is None:
            return
        now = self.watched.grad
        changed = now is not None and (now is not seen[0] or now._version != seen[1])
        if changed and not self.warned:
            self.warned = True
            _LOG.warning(_SAID)
        if now is self.zeros:
            self.watched.grad = None
        self.zeros = None


_DOING = "without a step of the private optimizer"
_FIX = (
    "remove it, or freeze it in eval mode; what the first pass builds, build before make_private; "
    "change weights in the step of the optimizer that you pass in, or by model.load_state_dict"
)


class Door:
    """A method of the model with something done before or after it."""

    def __init__(self, model: nn.Module, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.model, self.name, self.before, self.after = model, name, before, after
        self.plain: Callable[..., Any] = getattr(model, name)
        setattr(model, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.before()
        found = self.plain(*args, **kwargs)
        self.after()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(getattr(type(self.model), self.name), memo.get(id(self.model), self.model))

    def __reduce__(self) -> Any:
        return getattr, (self.model, self.name)


class Guard:
    """Between two of our steps a model stays as it is: parameters, buffers, and all that its attributes hold."""

    def __init__(self, model: nn.Module, stepped: Iterable[Tensor]) -> None:
        self.state, self.stepped = Steady(model, doing=_DOING, fix=_FIX), list(stepped)
        self.inside = 0  # passes under way: nothing that they load is taken for the owner's
        names = [name for name in ("state_dict", "load_state_dict") if name not in vars(model)]
        self.leaving: Callable[[], None] = _nothing  # told whenever weights leave by state_dict
        acts = {"state_dict": (self._leave, _nothing), "load_state_dict": (_nothing, self.accept)}
        self.doors = [Door(model, name, *acts[name]) for name in names]

    def look(self, full: bool = True) -> None:
        """Refuse a model that changed without a step of ours."""
        if self.doors:
            self.state.check(full)

    def _leave(self) -> None:
        self.look()
        self.leaving()

    def accept(self) -> None:
        """The owner loaded a checkpoint."""
        if not self.inside:
            self.state.note()

    def begin(self) -> bool:
        """A pass begins: a schedule may have set numbers since the last. Whether it has."""
        return self.state.note_values()

    def moved(self) -> None:
        """We stepped."""
        self.state.note_tensors(self.stepped)

    def leave(self) -> None:
        """A last look, and the model is its owner's."""
        self.look()
        for door in self.doors:
            delattr(door.model, door.name)
        self.doors = []


def _nothing() -> None:
    """Nothing to do."""
