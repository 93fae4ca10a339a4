"""A model's own forward on private records, where it has no graph and its owner vouches for it (own_code="trusted").

Nothing is proved of it. It is checked as an alarm: at the first batch, in batches chosen at random, and before a
certificate (`batch_independence`). Called by `Recording` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from sordino.dpsgd.batch_independence import BatchPass, IndependenceChecks, constant_inputs, mixing_error
from sordino.dpsgd.clipped_sum import Recorder
from sordino.dpsgd.model_graphs import trained_outputs
from sordino.dpsgd.rule_table import run_by_rules, sites
from sordino.dpsgd.tape import UnrecordableError, first_length
from sordino.errors import PlanError

ARRANGEMENTS = ((True, False), (False, False), (False, True))  # (channels last, whole): from the fastest on


class TrustedForward:
    """The forward of `recorder`'s model by layer rules, or record by record where these cannot tell records apart.

    `plain` is the model's own forward, `rng` chooses the batches that are checked, and `expected` is the public size of
    what is computed at once.
    """

    def __init__(
        self, recorder: Recorder, plain: Callable[..., Any], rng: np.random.Generator | None, expected: float
    ) -> None:
        self.model, self.tape, self.plain, self.expected = recorder.model, recorder.tape, plain, expected
        self.outside = recorder.outside
        self.by_layers, self.whole = recorder.sites, sites(recorder.model, whole=True)
        self.sites = self.by_layers
        self.checks = IndependenceChecks(self.model, self._of, rng)
        self.probe: Callable[[Any, Any], Any] | None = None  # what model(x) runs while it is checked
        self.arranged = False  # whether a batch has shown that the records are kept apart
        self.last: tuple[BatchPass, bool] | None = None  # the last pass that was not checked, and its mode
        self.inputs: list[Any] = []  # of this batch, and of the one before that had its step
        self.before: list[Any] = []
        self.error: PlanError | None = None

    def run(self, args: Any, kwargs: Any) -> Any:
        """One recorded pass."""
        own = next((site for site in self.sites if site.module is self.model), None)
        if own is not None:
            return own.rule(self.tape, self.model, own.axis, *args, **kwargs)
        with run_by_rules(self.tape, self.sites):
            return self.plain(*args, **kwargs)

    def prepare(self, args: Any, kwargs: Any, size: int) -> None:
        """Let the first batch decide how the model is run, and check some of the others."""
        if self.error is not None:
            raise self.error
        due = self.checks.due(size, self.expected)
        if not self.arranged:
            self._arrange(args, kwargs, size)
        elif self.may_mix:
            self.last = (self._batch((args, kwargs), size), self.model.training) if size > 1 else self.last
            if due:
                self._check_last()
        self.inputs = tree_flatten((args, kwargs))[0]

    def stepped(self) -> None:
        """The batch had its step: what the next has in common with it is no record of either."""
        self.before, self.inputs = self.inputs or self.before, []

    @property
    def may_mix(self) -> bool:
        """Whether a later pass could mix records: not record by record, nor in layers that never do."""
        return self.sites is not self.whole and self.checks.needed()

    def evidence(self, live: bool) -> tuple[str, int]:
        """How records were kept apart up to the last pass, and the number of checks; `live`: still in its loop."""
        if self.error is None and live and self.may_mix:
            self._check_last()
        if self.error is not None:
            raise self.error
        how = "checked in passes chosen at random" if self.may_mix else "by the layers, or run one by one"
        return how, self.checks.count

    def _check_last(self) -> None:
        """Compare records alone with the same records in the last batch."""
        if self.last is None:
            return
        (batch, training), self.last = self.last, None
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(training) if training != self.model.training else None
        try:
            if self.checks.again(batch):
                args, kwargs = batch.inputs
                self._check_slices(args, kwargs, batch.size)
        except PlanError as error:
            self.error = mixing_error() if isinstance(error, UnrecordableError) else error
            raise self.error from None
        finally:
            for module, mode in modes:
                module.training = mode

    def _batch(self, inputs: Any, size: int, recorded: bool = True) -> BatchPass:
        forward = self._probed(self.run) if recorded else self._of(self.model)
        return BatchPass(forward, inputs, size, constants=constant_inputs(self.before, inputs, size))

    def _of(self, model: nn.Module) -> Callable[[Any], Any]:
        """The pass of the model itself, or of a copy, unrecorded."""
        if model is self.model:
            return self._probed(lambda args, kwargs: self.plain(*args, **kwargs))
        return lambda inputs: model(*inputs[0], **inputs[1])

    def _probed(self, run: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        """`run` in place of the model's forward, with the hooks around it; what the tape holds is put back."""

        def forward(inputs: Any) -> Any:
            tape, self.probe = self.tape, run
            calls, batch, tape.calls = tape.calls, tape.batch, []
            tape.begin(first_length(*inputs))
            try:
                return self.model(*inputs[0], **inputs[1])
            finally:
                self.probe, tape.calls = None, calls
                tape.begin(batch)

        return forward

    def _arrange(self, args: Any, kwargs: Any, size: int) -> None:
        """Choose how the model is run by trying it on this batch: a record must touch its own slices alone."""
        failure: Exception | None = None
        for channels_last, whole in ARRANGEMENTS:
            self.tape.channels_last, self.sites = channels_last, self.whole if whole else self.by_layers
            try:
                finite = self._check_slices(args, kwargs, size)
                if size > 1:
                    self.checks.start(self._batch((args, kwargs), size, recorded=not whole))
                self.arranged = finite and size > 1
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

    def _check_slices(self, args: Any, kwargs: Any, size: int) -> bool:
        """Refuse layers whose gradient for one record touches others; whether all of the output is finite."""
        self.tape.begin(size)
        kept, self.tape.calls = self.tape.calls, []
        try:
            with torch.random.fork_rng(devices=[]):
                leaves = trained_outputs(self.run(args, kwargs), size, needed=size > 1)
            rows: Sequence[int] = (0, size - 1) if size > 1 else ()
            self.tape.check_slices(leaves, rows, [p for p in self.model.parameters() if p.requires_grad])
            return all(bool(y.isfinite().all()) for y in leaves)
        finally:
            self.tape.calls = kept
            self.outside.clear()
