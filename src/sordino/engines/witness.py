"""The same question before clients train and after: what is said of a made-up record tells whether anybody remembers.

`per_record.steady` compares what a module holds. Memory may be elsewhere: in a loss, a class, a closure, a list of the
script. Wherever it is, it carries one client's data into the next one's message past clip and noise, if it changes an
answer. So a copy of the model at its first weights is asked twice a round, before anything of the round is released.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.data.task import Task
from sordino.errors import PlanError
from sordino.layout import copied
from sordino.parts.losses import keeps_apart
from sordino.per_record.apart import kept_apart
from sordino.per_record.company import SAME, distance
from sordino.per_record.still import still
from sordino.rng import global_coins, standing_at

_FIX = "keep what is counted or averaged out of model and loss, and take random numbers from torch"


class Witness:
    """Model and loss of a task as they were before the first client."""

    def __init__(self, task: Task) -> None:
        self.model, self.losses, self.coins = copied(task.model).train(), task.losses, global_coins()
        self.buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # they begin anew for every client
        x, y = task.clients.records.x, task.clients.records.y
        self.x = torch.ones((2, *x.shape[1:]), dtype=x.dtype, device=task.device)  # nobody's records
        self.y = torch.zeros((2, *y.shape[1:]), dtype=y.dtype, device=task.device)
        self.said: list[Tensor] = []

    def ask(self) -> None:
        """Before the clients of a round: a schedule may have changed the loss since the last."""
        self.said = self._answer()

    def check(self) -> None:
        """After them: refuse an answer that is not what it was."""
        if self.said and not distance(self.said, self._answer()) <= SAME:
            found = "a model or a loss that says something else of a made-up record than before"
            needed = "one that remembers nothing of the records it saw: the next client would be told, without noise"
            raise PlanError("state", found, needed, _FIX)

    def _answer(self) -> list[Tensor]:
        """Scores and loss of the made-up records; nothing where it cannot be asked, or cannot be asked any more."""
        for buffer, first in self.buffers:
            buffer.data.copy_(first)
        try:
            with still(), standing_at(self.coins), torch.no_grad():
                scores = self.model(self.x)
                return [scores.clone(), self.losses(scores, self.y).clone()]
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return []


def witness(task: Task) -> Witness | None:
    """None where there is nobody to ask: torch's own layers in a row and losses written here remember nothing."""
    return None if keeps_apart(task.losses) and kept_apart(task.model) else Witness(task)
