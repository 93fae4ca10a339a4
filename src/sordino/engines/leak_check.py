"""Check that nothing of a client stays behind in model or loss code; called by engines/inprocess.py every round.

`dpsgd.state_guard` compares what a module holds. Memory may be elsewhere: in a loss, a class, a closure, a list of the
script. If it changes an answer, it carries one client's data into the next one's message past clip and noise. So a copy
of the model at its first weights answers for a made-up record twice a round, before anything of the round is released.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sordino.dpsgd.batch_independence import SAME, frozen_rng, relative_distance
from sordino.errors import PlanError
from sordino.layout import Layout, copied
from sordino.rng import global_coins, standing_at
from sordino.task import Task

MACHINES = 1e-3  # relative: the same pass on another machine, or with another version of torch
_FIX = (
    "keep what is counted, averaged or scheduled out of model and loss (a graph stays as it was captured), and take "
    "random numbers from torch"
)


class LeakCheck:
    """Model and loss of a task as they were before the first client."""

    def __init__(self, task: Task) -> None:
        self.model, self.losses, self.coins = _copied(task.model).train(), task.losses, global_coins()
        self.trusted = task.program.trusted
        self.buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # they begin anew for every client
        x, y = task.clients.records.x, task.clients.records.y
        self.x = torch.ones((2, *x.shape[1:]), dtype=x.dtype, device=task.device)  # nobody's records
        self.y = torch.zeros((2, *y.shape[1:]), dtype=y.dtype, device=task.device)
        self.said: list[Tensor] = []

    def at(self, vector: Tensor) -> list[Tensor]:
        """What is said with these weights."""
        Layout.of(self.model).load(self.model, vector)
        return self._answer()

    def before(self) -> None:
        """Before the clients of a round. A schedule may have changed trusted code; a graph is as it was captured."""
        if self.trusted or not self.said:
            self.said = self._answer()
        else:
            self._check()

    def after(self) -> None:
        """After them: what trusted code says may not have changed."""
        if self.trusted:
            self._check()

    def _check(self) -> None:
        """Refuse an answer that is not what it was; a graph goes on where the code it was captured of fails."""
        now = self._answer()
        if self.said and (now or self.trusted) and not relative_distance(self.said, now) <= SAME:
            found = "a model or a loss that says something else of a made-up record than before"
            needed = "one that remembers nothing of the records it saw: the next client would be told, without noise"
            raise PlanError("state", found, needed, _FIX)

    def _answer(self) -> list[Tensor]:
        """Scores and loss of the made-up records; nothing where it cannot be asked, or cannot be asked any more."""
        for buffer, first in self.buffers:
            buffer.data.copy_(first)
        try:
            with frozen_rng(), standing_at(self.coins), torch.no_grad():
                scores = self.model(self.x)
                return [scores.clone(), self.losses(scores, self.y).clone()]
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return []


def model_answers(task: Task) -> tuple[float, ...]:
    """What module and loss say of made-up records at public weights: by it those of a script are known again."""
    said = LeakCheck(task).at(torch.linspace(-0.1, 0.1, task.layout.size, device=task.device))
    return tuple(value for part in said for value in part.double().flatten()[:16].tolist())


def same_answers(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether it is what was said before, on whatever machine; who said nothing then is not asked now."""
    return not one or relative_distance([torch.tensor(one)], [torch.tensor(other)]) <= MACHINES


def _copied(model: nn.Module) -> nn.Module:
    """A copy that shares what is frozen: it may be large, and whoever changes it is refused anyway."""
    return copied(model, [p for p in model.parameters() if not p.requires_grad])


def leak_check_of(task: Task) -> LeakCheck | None:
    """None where there is nobody to ask: torch's layers and Sordino's losses are no code of the user's own."""
    return None if task.program.plain and task.program.plain_loss else LeakCheck(task)
