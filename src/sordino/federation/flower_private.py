"""Differential privacy for an existing Flower app: a strategy and a client mod that clip, add noise and certify.

    client.py   app = ClientApp(mods=[private_mod])
    server.py   strategy = Private(plan)        strategy.start(grid, arrays, num_rounds=plan.rounds)
                strategy.save_certificate("certificate.json")

The app's own training is unchanged. The client mod applies the plan's encode steps to the update, and the strategy
applies the plan's release and server optimizer to the sum. Metrics and example counts never leave a client, and nodes
are not asked to evaluate. The privacy unit is the client; the plan's local solver does not run, and the guarantee does
not depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.accountant import check_deltas, default_delta
from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts
from sordino.engines.base import Collected
from sordino.engines.messages import read_plan
from sordino.errors import DataError, EngineError, PlanError
from sordino.federation.flower_api import flower
from sordino.layout import Layout
from sordino.loop import Tally, advanced
from sordino.outcome import facts_of_charges
from sordino.parts.clipping import row_norms
from sordino.parts.encoding import Public, finite_rows
from sordino.parts.releases import own_message
from sordino.parts.samplers import Cohort
from sordino.plan import Plan, State
from sordino.rng import Secure, Streams
from sordino.version import versions

if TYPE_CHECKING:
    Base: Any = object
else:
    try:
        Base = flower().Strategy
    except EngineError:
        Base = object  # Private() refuses with the reason

OURS, ROW = "sordino", "row"
OWN = "the update is the app's own: the plan's local solver did not run, and the clip bounds whatever came"


def float_arrays(record: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the floating-point arrays of a Flower ArrayRecord; only these are aggregated."""
    held = {name: array.numpy() for name, array in record.items()}
    return {name: array for name, array in held.items() if np.issubdtype(array.dtype, np.floating)}


def flatten(record: Any) -> Tensor:
    """Return the floating-point arrays of a Flower ArrayRecord as one vector, [d] float32."""
    held = (np.ascontiguousarray(array) for array in float_arrays(record).values())
    parts = [torch.from_numpy(array).reshape(-1).float() for array in held]
    if not parts:
        found, needed = "a model without floating-point arrays", "a model with at least one floating-point array"
        raise DataError(found, needed, "check the arrays that the strategy is started with")
    return torch.cat(parts)


def unflatten(record: Any, vector: Tensor) -> Any:
    """Return a copy of the ArrayRecord whose floating-point arrays have the numbers of a vector [d]."""
    f, start, arrays = flower(), 0, dict(record.items())
    for name, old in float_arrays(record).items():
        new = vector[start : start + old.size].numpy().astype(old.dtype).reshape(old.shape)
        arrays[name], start = f.Array(new), start + old.size
    return f.ArrayRecord(arrays)


def layout_of(record: Any) -> Layout:
    """Return the layout of the vector of `flatten`: name, shape and position of each array."""
    arrays = float_arrays(record).items()
    return Layout.of_shapes((name, torch.Size(array.shape), True) for name, array in arrays)


def flatten_model(content: Any) -> Tensor:
    """Return the model in a message's only ArrayRecord as a vector."""
    found = list(content.array_records.values())
    if len(found) != 1:
        needed = "exactly one ArrayRecord, with the model"
        raise DataError(f"a message with {len(found)} array records", needed, "put the model into one ArrayRecord")
    return flatten(found[0])


def private_mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """Flower mod that replaces a client's reply by its clipped and encoded update, with the plan's local noise."""
    f = flower()
    if OURS not in message.content.config_records:
        needed = "the strategy sordino.federation.Private on the server"
        raise EngineError("a message without Sordino's plan", needed, "use this strategy, or remove the mod")
    asked = message.content.config_records.pop(OURS)
    plan, start, client = read_plan(str(asked["plan"])), flatten_model(message.content), int(asked["client"])
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    update = (start - flatten_model(reply.content))[None, :]
    state = {name: float(value) for name, value in json.loads(str(asked["state"])).items()}
    public = Public(t=int(asked["t"]), clip_norm=float(asked["clip_norm"]), size=len(start), state=state)
    rows = finite_rows(update, row_norms(update))
    for step in plan.encode:
        rows = step.encode(rows, public)
    rng = Secure().at(public.t, "client noise", client)
    row = own_message(plan.release, rows[0], client, public.t, rng, secure=True).float()
    reply.content = f.RecordDict({OURS: f.ArrayRecord({ROW: f.Array(row.numpy())})})
    return reply


class Private(Base):  # type: ignore[misc]
    """Flower strategy that runs a client-level plan on the updates of a Flower app's own training."""

    def __init__(self, plan: Plan, *, delta: float | None = None, allow_large_delta: bool = False) -> None:
        flower()
        check_plan(plan)
        self.plan, self.delta = plan, default_delta(plan.units) if delta is None else delta
        check_deltas(plan, self.delta, (), allow_large_delta)
        self.streams: Streams = Secure()
        self.tally = Tally()
        self.state: State | None = None
        self._asked: tuple[Any, Public, Cohort, dict[int, int]] | None = None

    def summary(self) -> None:
        """Print the plan's release and number of rounds; Flower calls this before round 1."""
        print(f"sordino: {self.plan.release.kind}, {self.plan.rounds} rounds, unit client", flush=True)

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """Draw the round's clients among the nodes, and return their messages with the model and the plan."""
        f, plan, t = flower(), self.plan, server_round - 1
        if t >= plan.rounds:
            found = f"round {server_round} of a plan for {plan.rounds} rounds"
            raise PlanError("rounds", found, f"at most {plan.rounds} rounds", "pass num_rounds=plan.rounds")
        self.state = self.state or State.initial(plan, flatten(arrays))
        public = plan.public(t, len(flatten(arrays)), self.state.public_state)
        nodes = sorted(grid.get_node_ids())
        if len(nodes) != plan.clients.population:
            found = f"{len(nodes)} nodes and a plan for {plan.clients.population} clients"
            fix = "wait until all nodes are online, or change the plan's population"
            raise DataError(found, "as many nodes as the plan has clients", fix)
        cohort = plan.clients.draw(t, self.streams.at(t, "cohort"))
        asked = {nodes[int(client)]: int(client) for client in cohort}
        self._asked = (arrays, public, cohort, asked)
        if plan.release.local:
            self._charge(t, cohort)
        fields = {"plan": codec.to_json(plan), "t": t, "clip_norm": public.clip_norm}
        fields["state"] = json.dumps(dict(public.state))
        messages = []
        for node, client in asked.items():
            own = f.ConfigRecord({**fields, "client": client})
            content = f.RecordDict({"arrays": arrays, "config": config, OURS: own})
            messages.append(f.Message(content, dst_node_id=node, message_type="train"))
        return messages

    def _charge(self, t: int, cohort: Cohort) -> None:
        self.tally.charge(t, cohort if {"cohort", "messages"} & self.plan.release.sees else None)

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, None]:
        """Sum the clients' updates, charge the round, add the server's noise, decode, and take a server optimizer step.

        An update of another length, or with NaN or infinity, is dropped.
        """
        assert self._asked is not None
        assert self.state is not None
        arrays, public, cohort, asked = self._asked
        length, rows = self.plan.length(public.size), dict[int, Tensor]()
        for reply in replies:
            records = {} if reply.has_error() else dict(reply.content.array_records.items())
            node = int(reply.metadata.src_node_id)
            if OURS in records and ROW in records[OURS] and node in asked:
                row = torch.from_numpy(records[OURS][ROW].numpy().copy()).float()
                if row.shape == (length,) and bool(row.isfinite().all()):
                    rows[asked[node]] = row
        came = np.asarray(sorted(rows), dtype=np.int64)
        total = torch.stack([rows[client] for client in sorted(rows)]).double().sum(0) if rows else torch.zeros(length)
        collected = Collected(total.double(), len(rows), noised=True, deployed=True, reported=came)
        if not self.plan.release.local:
            self._charge(server_round - 1, cohort)
        self.state, _ = advanced(self.plan, layout_of(arrays), self.streams, self.state, public, collected, cohort)
        return unflatten(arrays, self.plan.server.query(self.state.memory)), None

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """Return no messages, since a node's evaluation would be a release without noise; use `evaluate_fn` instead."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> None:
        """Do nothing, since `configure_evaluate` asks no node to evaluate."""

    @property
    def certificate(self) -> dict[str, Any]:
        """Certificate of the rounds run so far."""
        known = Facts(self.delta, self.streams.mode, 0, environment=(versions(),))
        facts = facts_of_charges(self.plan, self.tally.rounds, self.tally.cohorts, known)
        found = certificate(self.plan, facts)
        return {**found, "assumptions": [*found["assumptions"], OWN]}

    def save_certificate(self, path: str | Path) -> None:
        """Write the certificate as a JSON file."""
        Path(path).write_text(json.dumps(self.certificate, indent=2) + "\n")


def check_plan(plan: Plan) -> None:
    """Refuse a plan whose guarantee needs more than clipping the updates of a Flower app."""
    if plan.unit != "client":
        needed = "unit client, since a Flower app's own training has no bound per record"
        raise PlanError("bound", f"a plan for unit {plan.unit!r}", needed, "use a client-level recipe")
    if plan.needs or plan.mask is not None or any(step.needs_slopes for step in plan.encode):
        needs = ", ".join(sorted(plan.needs)) or "a mask or gradients of its own"
        needed = "central_noise or local_noise after encode steps such as clip"
        raise EngineError(f"a plan that needs {needs}", needed, "change the release or the encode steps")
    if plan.clients.pass_rounds > 1:
        found = f"sampler {plan.clients.kind!r}, where nodes and network see who is asked in which round"
        raise PlanError("sampling", found, "cohorts that nobody sees", "sample with poisson")
    if plan.clip is None:
        needed = "a clip norm, since an app's updates are unbounded"
        raise PlanError("clip", "a plan without a Clip step", needed, "add Clip(...) to encode")
