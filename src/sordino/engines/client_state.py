"""State that clients keep between their rounds, by name, and figures of unreleased data; for engines and the loop.

The state never leaves a client: it is stored in the secret part of the checkpoint, and is in no message and no release.
The figures are for simulation: NOT private, and marked so wherever they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sordino.data.clients import Records
from sordino.errors import PartError
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.samplers import Cohort
from sordino.plan import Plan, State
from sordino.task import Task, evaluate

CLIENTS = "clients."  # before the names below, in `State.secret`
IDS = f"{CLIENTS}ids"
States = dict[str, Tensor]


class ClientStates:
    """The states of all clients that have taken part, in the order of the model's coordinates, on the CPU."""

    def __init__(self, local: LocalSolver) -> None:
        self.local, self.states = local, dict[int, States]()

    def of(self, clients: Cohort, start: Tensor) -> States:
        """A copy of these clients' states, [m, *shape] by name; the solver's initial values for a new client."""
        first = None
        found = []
        for client in clients.tolist():
            if client not in self.states and first is None:
                first = self.local.client_state(start)
            found.append(self.states.get(client, first or {}))
        return {name: torch.stack([one[name].to(start.device) for one in found]) for name in found[0]}

    def put(self, clients: Cohort, states: Mapping[str, Tensor], start: Tensor) -> None:
        """Keep what the solver left. A state that is not finite is dropped, as its client's message counts as zero."""
        first = self.local.client_state(start)
        shapes = {name: (len(clients), *value.shape) for name, value in first.items()}
        if {name: tuple(value.shape) for name, value in states.items()} != shapes:
            found = f"{self.local.kind!r}, whose solve left a client state {sorted(states)} of other names or shapes"
            raise PartError(found, f"{sorted(first)}, each with one row per client")
        for i, client in enumerate(clients.tolist()):
            own = {name: value[i].detach().cpu().clone() for name, value in states.items()}
            if all(bool(value.isfinite().all()) for value in own.values()):
                self.states[client] = own

    def stored(self) -> States:
        """As tensors for a checkpoint: the clients' numbers, and a table for every name."""
        if not self.states:
            return {}
        ids = sorted(self.states)
        tables = {name: torch.stack([self.states[i][name] for i in ids]) for name in self.states[ids[0]]}
        return {IDS: torch.tensor(ids), **{f"{CLIENTS}{name}": table for name, table in tables.items()}}

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """The states that `stored` gave."""
        self.states = by_client(stored)


def by_client(stored: Mapping[str, Tensor]) -> dict[int, States]:
    """Every client's state in the secret part of a run's state."""
    if IDS not in stored:
        return {}
    tables = {n.removeprefix(CLIENTS): held for n, held in stored.items() if n.startswith(CLIENTS) and n != IDS}
    return {int(client): {n: held[i].clone() for n, held in tables.items()} for i, client in enumerate(stored[IDS])}


def personal_metrics(plan: Plan, task: Task, state: State, model: Tensor, train: bool) -> dict[str, float]:
    """Figures of personal models, each on its own client's rows, averaged over clients: NOT private, for simulation.

    personal_accuracy, personal_loss, ... on the rows of `Task.client_test`; with `train`, personal_train_accuracy, ...
    on the clients' own training rows. Empty where the local solver has no `personal_model`.
    """
    sums: dict[str, list[float]] = {}
    for client, own in by_client(state.secret_state).items():
        personal = plan.local.personal_model(model, own, task.layout)
        if personal is None:
            return {}
        module = task.at(personal)
        for name, held in (("personal", task.client_test), ("personal_train", task.clients if train else None)):
            if held is not None and held.size(client):
                rows = torch.from_numpy(held.rows(client))
                own_rows = Records(held.records.x[rows], held.records.y[rows])
                found = evaluate(module, own_rows, task.program.losses)
                for figure in found.keys() & {"accuracy", "rmse", "loss"}:
                    sums.setdefault(f"{name}_{figure}", []).append(found[figure])
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}


def of_updates(norms: list[Tensor], clip_norm: float) -> dict[str, float]:
    """Of a cohort's raw update norms: level, spread, and what the clip takes away (paper 003).

    alpha_i = min(1, clip norm / ||update_i||);  alpha_bar = mean alpha_i;  alpha_tilde = mean |alpha_i - alpha_bar|
    """
    if not norms:
        return {}
    every = torch.cat(norms)
    sound = every[every.isfinite()]
    figures = {"nonfinite_updates": float(len(every) - len(sound))}
    if not len(sound):
        return figures
    low, middle, high = torch.quantile(sound, sound.new_tensor([0.1, 0.5, 0.9])).tolist()
    alpha = (clip_norm / sound.clamp(min=1e-300)).clamp(max=1.0)
    return figures | {
        "update_norm_mean": float(sound.mean()),
        "update_norm_p10": low,
        "update_norm_p50": middle,
        "update_norm_p90": high,
        "clipped_fraction": float((sound > clip_norm).double().mean()),
        "alpha_bar": float(alpha.mean()),
        "alpha_tilde": float((alpha - alpha.mean()).abs().mean()),
    }


def of_release(clean: Tensor, noised: Tensor) -> dict[str, float]:
    """Of a round's mean before and after noise: signal to noise, and how far the direction turned."""
    noise = float((noised.double() - clean).norm())
    signal, seen = float(clean.norm()), float(noised.norm())
    if not (signal and seen):
        return {}
    cosine = float(clean @ noised.double()) / (signal * seen)
    return {"cosine": cosine} | ({"signal_to_noise": signal / noise} if noise > 1e-6 * signal else {})
