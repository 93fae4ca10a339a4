"""Notice a loop that changes gradients before the step: what it changes is not what is trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

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
