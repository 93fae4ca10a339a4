"""Private optimizer of `make_private`: it wraps any torch optimizer, which then receives only noised gradients."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from sordino.accounting.accountant import check_delta
from sordino.accounting.composition import Participation
from sordino.certificate.build import certificate, line_entry
from sordino.certificate.facts import Facts, Loop, OwnCode
from sordino.data import lineage
from sordino.data.lineage import declared_frozen
from sordino.dpsgd import account as accounts
from sordino.dpsgd.clipped_sum import ClipGroup
from sordino.dpsgd.loader import InputCheck, PendingBatch
from sordino.dpsgd.own_code import LossCheck, RecordLoss, stale_code
from sordino.dpsgd.processes import Shards, allow_wrapping, weights_digest
from sordino.dpsgd.recording import Recording, clip_margin
from sordino.dpsgd.settings import ALL, NoiseState, read_record
from sordino.dpsgd.standardise import Standardiser
from sordino.dpsgd.state_guard import DeviceChecks
from sordino.errors import ConfigError, PlanError
from sordino.graph import TRUSTED, Grade, weakest
from sordino.layout import Layout
from sordino.parts.clipping import SLACK
from sordino.parts.encoding import Noised
from sordino.parts.releases import on_grid
from sordino.rng import Streams

_LOG = logging.getLogger("sordino")
_KNOWN = "{found}; in every step the gradient at the model's output is that of this loss; any other stops the run"
_EACH = "optimizer.loss: one value per record, computed from that record's output alone"
_PROVED = "every operation of the graph of the model, and of the loss, leaves the records of a batch apart"
_LOADED = "iterate over the loader that make_private returned, and call backward() and step() once for each batch"


class PrivateOptimizer(Optimizer):
    """Optimizer whose step() sets noised gradients, and then takes a step of the inner optimizer:

    p.grad = A^-1 (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / batch

    The sum is over the records j of the private loader's batch; g_j is a record's gradient over all trained parameters,
    C the clip norm, z the noise multiplier, and A the Laplacian smoothing (by default none). If groups of parameters
    have their own clip norms, C is the root of the sum of their squares. A step without a batch, or one that cannot be
    clipped record by record, raises an error and changes nothing. Guarantee: each step is one release of
    PoissonSampled(rate, Gaussian(z)), add or remove one record, charged before its noise is drawn; the inner optimizer
    is post-processing. Under correlated noise all steps are one Gaussian release, replace one.
    """

    inner: Optimizer

    def __init__(
        self,
        inner: Optimizer,
        recording: Recording,
        account: accounts.Account,
        pending: PendingBatch,
        streams: Streams,
        own: RecordLoss | None = None,
    ) -> None:
        self.__setstate__({"inner": inner})  # sets up a torch optimizer without parameter groups of its own
        self.recording, self.account, self.pending, self.streams = recording, account, pending, streams
        self.layout, recording.mean = _layout(recording.named), account.settings.reduction == "mean"
        self.adaptive, self.clip_norm = account.settings.adaptive, account.settings.clip_norm  # of the next step
        length = account.settings.plan.length(self.layout.size)
        self.noise_state = NoiseState(account.settings.plan.release, length)
        device = next(iter(recording.named.values())).device
        self.total = torch.zeros(length, dtype=torch.float64, device=device)  # message of this batch
        self.check = LossCheck(account.settings.reduction, account.settings.records.count)
        kinds = {p.dtype for p in recording.named.values()}
        self.margin = clip_margin(
            account.settings.reduction,
            recording.expected,
            double=kinds == {torch.float64},
            rounding=1.0 if self.adaptive is None else self.adaptive.rounding,
        )
        self.clip_shares = account.settings.clip_shares(recording.names())
        self.own, recording.loss_check = own, self.check if own is None else None
        self.targets = InputCheck(recording.own_code)
        self.compared = 0  # the loop over the loader in which the loss was last compared with its graph
        self.batch_code: Callable[[], list[tuple[Grade, str]]] = list  # grades of the code that makes batches
        self.not_finite = 0  # records of all ranks that counted as zero so far: not private
        self.lost = 0  # records of this rank in this batch that counted as zero
        self.shards = Shards(recording.model)  # none, unless make_private has gathered the model
        self.joined = -1  # the loop over the loader in which the weights of all ranks were last compared
        self.found: list[Any] = []  # facts on the loss and on own code, for the certificate, as last sent to the ranks
        self.others: list[Any] = []  # the same facts of every rank
        self.idle = 0  # number of parameters that the loss did not depend on, once it was logged
        self.in_pieces = False  # whether max_physical_batch_size is set
        self.released = False  # True while the inner optimizer may step
        self.guard = inner.register_step_pre_hook(self._refuse_direct_step)
        self.scaler: Standardiser | None = None
        self.records: tuple[Tensor, ...] = ()  # tensors of the data set, if it has tensors
        self.first, recording.guard.on_export = lineage.tensor_hashes(recording.model), self._remember

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse torch.amp.GradScaler, which reads this attribute and would skip steps depending on gradients."""
        fix = "call loss.backward() and optimizer.step(); gradients are clipped in float32, so nothing underflows"
        raise _loop("a GradScaler, which skips steps depending on their gradients", "training without GradScaler", fix)

    @property
    def steps(self) -> int:
        """Number of noised steps that were charged so far."""
        return self.account.steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the clipped gradients of a piece of the batch; after the last piece, add noise and update the model."""
        if closure is not None and self.in_pieces:  # Lightning would count pieces as batches of an epoch
            found, fix = "step(closure) with max_physical_batch_size", "in Lightning leave max_physical_batch_size out"
            raise _loop(found, "loss.backward() and step() after each piece of a batch", fix)
        with torch.enable_grad():
            loss = None if closure is None else closure()  # Lightning runs the backward pass in the closure
        self.recording.warning.end()
        self._check_loop()
        checks = DeviceChecks()
        self.recording.guard.check(os.urandom(1)[0] < 32, checks)  # large tensors in one step of eight, at random
        settings = self.account.settings
        size = 0 if self.pending.piece is None else self.pending.piece.size
        if self.own is None:  # refuse a loss that is not a sum of terms of one record each
            self.check.check(self.recording.gradients, size)
        elif size:
            self.own.verify(checks)
        checks.read()
        scale = float(size) if settings.reduction == "mean" and not self.recording.mean_undone else 1.0
        aim = self.clip_norm * (1.0 - self.margin)
        groups = [ClipGroup(aim * share, names) for share, names in self.clip_shares]
        total, norms, lost = self.recording.clipped_sum(groups, scale or 1.0)
        self._report(lost)
        self._report_idle()
        self._add(total, norms)
        return loss

    def loss(self, output: Any, *targets: Any) -> Tensor:
        """Return the batch mean of make_private's `loss`; the loop calls backward() on the result."""
        piece = self.pending.piece
        if self.own is None or piece is None:
            found = "optimizer.loss without a loss or without a batch"
            fix = "pass loss= to make_private, and call optimizer.loss for batches of its loader"
            raise _loop(found, "make_private(..., loss=...), and a batch of the private loader", fix)
        self._refuse_stale_loss()
        records = self.targets.records(tree_flatten(targets)[0], piece.tensors, piece.size)
        return self.own(output, targets, self.recording.outputs, piece.size, records)

    def _refuse_stale_loss(self, always: bool = False) -> None:
        """Refuse, once per epoch, a loss function that was changed after its graph was captured."""
        if self.own is None or (self.compared == self.pending.loops and not always):
            return
        self.compared = self.pending.loops
        if self.own.tracing.is_stale():
            if not self.recording.own_code:
                raise stale_code("loss")
            self.own.capture_again()

    def _report(self, lost: int) -> None:
        """Log once how many records count as zero because their gradient is not finite; an error would reveal them."""
        if lost and not self.not_finite:
            _LOG.warning(
                "%d records of this batch have NaN or infinity in their gradient and count as zero; further ones are "
                "counted in optimizer.not_finite. Lower lr, or look for NaN in the data. The count is not private: do "
                "not publish it.",
                lost,
            )
        self.not_finite += lost
        self.lost = lost if self.pending.summed == 0 else self.lost + lost

    def _report_idle(self) -> None:
        idle = self.recording.idle
        if idle and not self.idle and self.pending.piece is not None and self.pending.piece.size:
            self.idle = len(idle)
            _LOG.warning(
                "The loss does not depend on %d of %d trained tensors (first: %s): they get noise alone. Freeze "
                "them with requires_grad_(False) before make_private.", len(idle), len(self.recording.named), idle[0],
            )  # fmt: skip

    def _add(self, total: dict[str, Tensor], norms: Tensor) -> None:
        """Add the clipped sum of one piece to the batch's message; release the message after the last piece."""
        if self.pending.summed == 0:
            self.total.zero_()
        flat = torch.cat([total[slot.name].reshape(-1) for slot in self.layout.slots])
        size, unit = len(flat), 1.0 if self.adaptive is None else self.adaptive.update_norm
        self.total[:size].add_(flat.double(), alpha=unit / self.clip_norm)
        if self.adaptive is not None:
            inside = self.adaptive.bits(norms[0], self.clip_norm).sum()
            self.total[size] += inside * self.adaptive.share * (1.0 - SLACK) * (1.0 - self.margin)
        if self.pending.take().last:
            self._release()

    def _release(self) -> None:
        """Charge the step, add noise, set the noised gradients, and run the inner optimizer."""
        self._sum_over_ranks()
        views = self.layout.views(self._noised(self.account.charge()))
        noised: dict[Tensor, Tensor] = {p: views[n] for n, p in self.recording.named.items() if p.requires_grad}
        for parameter in self._parameters():
            own = noised.get(self.shards.of(parameter))
            parameter.grad = None if own is None else self.shards.part(parameter, own.to(parameter.dtype))
        self.released = True
        try:
            with self.shards.stepping():
                self.inner.step()
        finally:
            self.released = False
            self.recording.guard.stepped_on()

    def _sum_over_ranks(self) -> None:
        """Sum the messages of all ranks, which must be at the same step, and exchange facts for the certificate."""
        ranks = self.account.ranks
        if ranks.size == 1:
            return
        found = [self.check.found, self._grades()]
        every = ranks.numbers(self.steps, self.joined != self.pending.loops, found != self.found, self.lost)
        if any(steps != self.steps for steps, *_ in every):
            taken = " and ".join(str(steps) for steps, *_ in every)
            fix = "load the same checkpoint on all ranks"
            raise _loop(f"ranks that have taken {taken} steps", "the same number of steps on all ranks", fix)
        self.not_finite += sum(lost for *_, lost in every) - self.lost
        if any(first for _, first, *_ in every):
            ranks.compare({"weights": weights_digest(self.recording.model)})
            self.joined = self.pending.loops
        if any(changed for _, _, changed, _ in every):
            self.found, self.others = found, ranks.gather(found)
        ranks.add(self.total)

    def _noised(self, t: int) -> Tensor:
        """Return the noised mean gradient: the plan's release, decoding and post-processing of the message.

        It is A^-1 (message + N(0, z^2)) * C / batch. An adaptive clip norm C of the next step is computed from the last
        coordinate of the noised message.
        """
        plan = self.account.settings.plan
        public = plan.public(t, public_state={"clip_norm": torch.tensor(self.clip_norm, dtype=torch.float64)})
        noised = self.noise_state.noised(self.total, t, lambda _: self.streams.at(t, "noise"))
        self.total.zero_()
        std = plan.release.noise_std(ALL, t)
        if self.streams.mode == "secure":
            noised = on_grid(noised, std)
        if self.adaptive is not None:
            self.clip_norm = self.adaptive.next(noised[-1:] / self.account.settings.records.count, self.clip_norm)
            noised = noised[:-1]
        own = next(iter(self.recording.named.values())).dtype
        mean = plan.decode(noised, public).to(torch.promote_types(own, torch.float32))
        return plan.refine(mean, Noised(self.layout, std * plan.local.unit(public), t, plan.signal_norm(public)))

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _check_loop(self) -> None:
        """Refuse a step that the certificate would not cover, before anything is changed."""
        recording, piece = self.recording, self.pending.piece
        recorded = set(recording.named.values())
        if any(p.requires_grad and self.shards.of(p) not in recorded for p in self._parameters()):
            found = "a parameter that was added or unfrozen after make_private"
            fix = "call make_private again (a new certificate)"
            raise _loop(found, "the parameters that make_private was called with", fix)
        if piece is None:
            where = "outside the private loader" if recording.other_records is not None else "without a new batch"
            raise _loop(f"a step {where}", "one step for each batch of the private loader", _LOADED)
        if recording.outside:
            found = f"parameter '{min(recording.outside)}' used in the loss directly, not through model(x)"
            fix = "use weight_decay for a penalty on the weights; call the whole model, once per batch"
            raise _loop(found, "gradients that come from model(x) alone", fix)
        if recording.backwards > 1:
            found = f"{recording.backwards} backward passes before a step"
            fix = "add the losses, then call backward() once; to accumulate gradients over smaller passes, "
            fix += "use make_private(..., max_physical_batch_size=n), and call step() after each piece"
            raise _loop(found, "one backward pass per step", fix)
        if recording.backwards != 1 and recording.other_records is not None:
            found = f"a training pass over {recording.other_records} records, but the loader returned {piece.size}"
            raise _loop(found, "model(x) with the x of the private loader", "pass the whole batch unchanged")
        if recording.backwards != 1:
            raise _loop("a step without a backward pass", "loss.backward() before step()", _LOADED)
        if piece.index != self.pending.summed:
            found = f"piece {piece.index + 1} of a batch whose earlier pieces had no step"
            raise _loop(found, "a step for each piece", _LOADED)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients since the last step(); the sum of earlier pieces of the batch is not discarded."""
        self.recording.zero()
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        found, fix = "parameters added to a private optimizer", "add them before make_private"
        raise _loop(found, "the parameters that make_private was called with", fix)

    def _refuse_direct_step(self, inner: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.released:
            found, fix = "a step of the unwrapped optimizer", "call step() of the optimizer that make_private returned"
            raise _loop(found, "a step of the private optimizer", fix)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and the count of charged steps; an unfinished batch is not included.

        Under correlated noise the result contains the noise state, which must not be published.
        """
        self.recording.guard.check()
        others = {} if self.pending.order is None else self.pending.order.state()
        others |= {} if self.scaler is None else self.scaler.state()
        others |= {} if self.adaptive is None else {"clip_norm": self.clip_norm}
        return {**self.inner.state_dict(), "sordino": self.account.state(**self.noise_state.state(), **others)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a run from a checkpoint of the same settings; refuse a changed count of charged steps."""
        stored = state_dict.get("sordino") if isinstance(state_dict, dict) else None
        record = read_record(stored, self.account.settings)
        self.noise_state.check(record.secret, sum(self.account.join(record).values()))
        if self.pending.order is not None:
            self.pending.order.check_state(record.order)
        if self.scaler is not None:
            self.scaler.check(record.moments)
        try:
            self.inner.load_state_dict({name: part for name, part in state_dict.items() if name != "sordino"})
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            found = f"a state_dict that {type(self.inner).__name__} does not accept ({type(error).__name__}: {error})"
            needed = "a state_dict of the same optimizer class"
            raise ConfigError(found, needed, "load an unchanged checkpoint") from None
        self.account.accept(record)
        if self.scaler is not None:
            self.scaler.load(record.moments)
        self.noise_state.load(record.secret)
        self.clip_norm = self.clip_norm if record.clip_norm is None else record.clip_norm
        self.pending.reset()
        self.recording.forget()

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return epsilon at `delta` (default: the certificate's) of all planned steps, or of all taken if more."""
        settings, delta = self.account.settings, self.account.settings.delta if delta is None else delta
        check_delta(delta, settings.records.size(0), override=True)
        steps = max(settings.steps, self.steps)
        cost = settings.plan.cost(Participation(steps, steps, prepared=self.account.prepared))
        found: float = line_entry(cost.line("models"), delta)["epsilon"]
        return found

    def certificate(self) -> dict[str, Any]:
        """Return the loop's certificate, for all planned steps, or for all steps taken if these are more."""
        return certificate(self.account.settings.plan, self._facts())

    def save_certificate(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Write certificate, plan and step counts to a file, which `sordino certify` can check."""
        return accounts.save_certificate(Path(path), self.account.settings.plan, self._facts())

    def _facts(self) -> Facts:
        """Check the model, and return the loop's facts for its certificate."""
        if self.pending.piece is not None:
            found = "a call of certificate() between a batch and its step"
            raise _loop(found, "a step for each batch that was drawn", "call step() first, then certificate()")
        self.recording.guard.check()
        self._remember()
        self.recording.refuse_stale()
        self._refuse_stale_loss(always=True)
        how, checks = self.recording.evidence()
        recognised = [found for found, _ in self.others if found != LossCheck.DECLARED]  # a rank may have had no record
        check = _KNOWN.format(found=[*recognised, self.check.found][0]) if self.own is None else _EACH
        settings = self.account.settings
        facts = self.account.facts(Loop(settings.reduction, check, how, checks, settings.users))
        public = (*declared_frozen(self.recording.model), *lineage.declared_features(self.records))
        return replace(facts, public=public, own_code=self._own_code())

    def _own_code(self) -> OwnCode | None:
        """Return the weakest grade (`sordino.graph`) of all code that ran on records; None before the first step."""
        if not self.steps:
            return None
        found = [*self._grades(), *((grade, why) for _, grades in self.others for grade, why in grades)]
        grade = weakest([one for one, _ in found])
        why = "; ".join(dict.fromkeys(reason for one, reason in found if one == grade and reason))
        given = [*self.recording.inputs.public.values(), *self.targets.public.values()]  # inputs that are no records
        count = sum(isinstance(item, Tensor) for item in given)  # they might have been computed from records
        others = f"; {count} further inputs, the same in every step, are taken for public" if count else ""
        return OwnCode(grade, (why or _PROVED) + others)

    def _grades(self) -> list[tuple[Grade, str]]:
        """Return the grades (`sordino.graph`) of all code that ran on this rank's records, each with its reason."""
        found = [self.recording.grade(), *([] if self.own is None else [self.own.grade]), *self.batch_code()]
        if self.targets.changed:
            found.append((TRUSTED, f"the loop changes targets itself ({self.targets.changed})"))
        return found

    def _remember(self) -> None:
        """Register this loop's privacy cost, so that a later run that starts from its weights can state it."""
        cost = self.account.cost()
        if cost is not None:
            lineage.register_run(self.recording.model, self.first, (*self.account.earlier, cost), self.records)

    def detach(self) -> nn.Module:
        """Return the model as an ordinary module; further training needs a new optimizer."""
        self._remember()
        self.recording.restore()
        allow_wrapping(self.recording.model)
        return self.recording.model


def _loop(found: str, needed: str, fix: str) -> PlanError:
    return PlanError("loop", found, needed, fix)


def _layout(named: dict[str, nn.Parameter]) -> Layout:
    if not named:
        found, needed = "an optimizer without a trainable parameter of the model", "at least one trained parameter"
        raise ConfigError(found, needed, "pass model.parameters() to the optimizer, and freeze only some of them")
    return Layout.of_shapes((name, parameter.shape, True) for name, parameter in named.items())
