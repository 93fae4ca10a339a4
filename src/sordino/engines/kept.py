"""What clients remember between their rounds: each its own row, never sent, kept in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sordino.parts.samplers import Cohort

IDS, ROWS = "clients.ids", "clients.rows"


class Kept:
    """Rows [clients seen, width]; one who was never there remembers zeros."""

    def __init__(self, width: int) -> None:
        self.width, self.rows = width, dict[int, Tensor]()

    def of(self, clients: Cohort, device: torch.device) -> Tensor:
        """A copy [m, width] of what these remember."""
        nothing = torch.zeros(self.width)
        return torch.stack([self.rows.get(int(client), nothing) for client in clients]).to(device)

    def put(self, clients: Cohort, rows: Tensor) -> None:
        """What these remember from now on; a row that is not finite is forgotten, as its message counts as zero."""
        for client, row in zip(clients, rows.detach().cpu(), strict=True):
            if bool(row.isfinite().all()):
                self.rows[int(client)] = row.clone()

    def state(self) -> dict[str, Tensor]:
        """For the secret part of a checkpoint."""
        if not self.rows:
            return {}
        ids = sorted(self.rows)
        return {IDS: torch.tensor(ids), ROWS: torch.stack([self.rows[client] for client in ids])}

    def load(self, secret: Mapping[str, Tensor]) -> None:
        """What `state` gave."""
        if IDS in secret:
            self.rows = {int(client): row.clone() for client, row in zip(secret[IDS], secret[ROWS], strict=True)}
