"""State of a private loop in a checkpoint: charged steps, plan and noise state, typed and with a checksum.

    checksum = sha256( every field of the record but the checksum, tensors by their bytes )

The checksum finds damage and careless edits: a count set to 0, a dropped key, a number of another type, another plan.
It has no key, so whoever wants to can compute it anew: what shows then that steps were taken is this process, where it
took them, and the ledger, where the loop has one (`account`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sordino import codec
from sordino.certificate.earlier_runs import EarlierRun
from sordino.dpsgd.settings import Settings, first_difference
from sordino.errors import ConfigError, PlanError, brief_repr
from sordino.parts.releases import Release

ALL = np.zeros(1, dtype=np.int64)  # the one holder of the data


class NoiseState:
    """The release of a loop with its state. Secret: whoever holds it can take the noise off later steps.

    One step, one draw: where the count of charged steps and that of draws differ (a step that failed half-way, a
    checkpoint of another time), the noise of a step would not be that of the certificate, and no step is taken.
    """

    def __init__(self, release: Release, length: int) -> None:
        self.release, self.drawn = release, 0
        self.held: dict[str, Tensor] = release.init(length)

    def noised(self, total: Tensor, t: int, rng: Callable[[str], np.random.Generator]) -> Tensor:
        """The total of step t with its noise."""
        if self.release.correlated and self.drawn != t:
            found = f"step {t + 1} where noise was drawn for {self.drawn}"
            needed = "the noise of every step that was charged"
            raise PlanError("correlated noise", found, needed, "load the last checkpoint into a new run")
        self.drawn = t + 1
        noised, self.held = self.release.noised(total, ALL, rng, self.held)
        return noised

    def state(self) -> dict[str, Any]:
        """For a checkpoint; later steps do not write into it."""
        if not self.release.correlated:
            return {}
        return {"secret": {"drawn": self.drawn, **{name: held.clone() for name, held in self.held.items()}}}

    def check(self, kept: dict[str, Any], steps: int) -> None:
        """Refuse a checkpoint whose noise is not that of the steps that will be certified."""
        if not self.release.correlated:
            return
        if _kinds(kept) != _kinds(self.held) or kept.get("drawn") != steps:
            found = f"noise of {kept.get('drawn', 'no')} steps in a checkpoint, and {steps} steps that were charged"
            fix = "load the newest checkpoint into a new run: correlated noise cannot go back to an older one"
            raise ConfigError(found, "the noise of all of them", fix)

    def load(self, kept: dict[str, Any]) -> None:
        """Go on from the noise state of a checkpoint that was checked."""
        if self.release.correlated:
            self.drawn = int(kept["drawn"])
            self.held = {name: held.clone() for name, held in kept.items() if name != "drawn"}


def _kinds(held: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Names, parameters and dtype of each; how many vectors there are may change from step to step."""
    return {
        name: (part.shape[-1] if part.dim() else 0, str(part.dtype)) for name, part in held.items() if name != "drawn"
    }


FORMAT = 2
MOST_STEPS = 2**31  # that one process can have charged
_NEEDED = "the record that optimizer.state_dict() returned, unchanged"
_FIX = "load an unchanged copy of the checkpoint, or start a new run: what was charged stays charged"
_FIELDS = ("format", "run", "settings", "taken", "checksum")
_EARLIER = tuple[EarlierRun, ...]
_OPTIONAL = ("dataset", "earlier", "secret", "order")


@codec.hides_values
@dataclass(frozen=True)
class LoopRecord:
    """The checked record: the id of the run, and the steps that each process charged, by that process's name."""

    run: str
    taken: dict[str, int]
    dataset: str = ""  # that a ledger charges the loop to
    earlier: tuple[EarlierRun, ...] = ()  # runs that the first weights come from
    secret: dict[str, Any] = field(default_factory=dict)  # state of correlated noise
    order: dict[str, str] = field(default_factory=dict)  # of the data set's rows, under correlated noise


def write_record(settings: Settings, run: str, taken: Mapping[str, int], **others: Any) -> dict[str, Any]:
    """The record as plain data, with its checksum."""
    table = {"format": FORMAT, "run": run, "settings": codec.dump(settings), "taken": dict(taken), **others}
    return {**table, "checksum": checksum(table)}


def checksum(table: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of everything in a record but its checksum."""
    held = {name: _canonical(item) for name, item in table.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _canonical(item: Any) -> Any:
    """Plain data; a tensor by type, shape and the hash of its bytes."""
    if isinstance(item, Tensor):
        data = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return ["tensor", str(item.dtype), list(item.shape), hashlib.sha256(data.data).hexdigest()]
    if isinstance(item, Mapping):
        if not all(type(name) is str for name in item):
            raise TypeError("a name that is no text")
        return {name: _canonical(inner) for name, inner in item.items()}
    if isinstance(item, list | tuple):
        return [_canonical(inner) for inner in item]
    if item is None or type(item) in (str, int, float, bool):
        return item
    raise TypeError(f"a value of type {type(item).__name__}")


def read_record(state: Any, settings: Settings) -> LoopRecord:
    """The record of a checkpoint of the same settings, every field checked; else one sentence (`ConfigError`)."""
    if not isinstance(state, Mapping) or "taken" not in state:
        found = "a state without the steps that were charged"
        raise ConfigError(found, "one that a private optimizer saved", "start a new run")
    if "checksum" not in state:
        _refuse("without a checksum: it was edited, or an earlier version saved it")
    try:
        whole = checksum(state)
    except (TypeError, ValueError, RecursionError, RuntimeError, NotImplementedError) as error:
        _refuse(f"that cannot be read ({str(error)[:100]})")
    if state["checksum"] != whole:
        _refuse("whose checksum is not that of its content: it was damaged or edited")
    odd = [name for name in state if name not in (*_FIELDS, *_OPTIONAL)]
    odd += [name for name in _FIELDS if name not in state]
    if odd:
        _refuse(f"with or without {brief_repr(odd[0])}, which is not as this version writes it")
    if type(state["format"]) is not int or state["format"] != FORMAT:
        _refuse(f"of format {brief_repr(state['format'])}, where this version writes {FORMAT}")
    if not _is_name(state["run"]):
        _refuse(f"of the run {brief_repr(state['run'])}, which is no id of a run")
    other = first_difference(settings, state["settings"])
    if other:
        raise ConfigError(f"a checkpoint with {other}", "the settings it was saved with", "make_private with those")
    dataset = state.get("dataset", "")
    if not isinstance(dataset, str):
        _refuse(f"of the data set {brief_repr(dataset)}, which is no name")
    earlier: tuple[EarlierRun, ...] = codec.read(_EARLIER, state.get("earlier", []), "earlier")
    secret, order = _secret(state.get("secret", {})), _order(state.get("order", {}))
    return LoopRecord(state["run"], _counts(state["taken"]), dataset, earlier, secret, order)


def _counts(taken: Any) -> dict[str, int]:
    """By process; a count is a whole number from 0."""
    if not isinstance(taken, Mapping):
        _refuse(f"with taken = {brief_repr(taken)}, which is no table of counts")
    for name, count in taken.items():
        if not _is_name(name) or type(count) is not int or not 0 <= count <= MOST_STEPS:
            _refuse(f"with {brief_repr(count)} steps of the process {brief_repr(name)}, which is no count of steps")
    return dict(taken)


def _secret(held: Any) -> dict[str, Any]:
    """How many steps the noise was drawn for, and vectors by name."""
    if not isinstance(held, Mapping):
        _refuse(f"with a noise state that is {brief_repr(type(held).__name__)}")
    for name, part in held.items():
        if (type(part) is not int) if name == "drawn" else not isinstance(part, Tensor):
            _refuse(f"with {brief_repr(name)} of type {type(part).__name__} in the noise state")
    return dict(held)


def _order(held: Any) -> dict[str, str]:
    texts = isinstance(held, Mapping) and (not held or set(held) == {"key", "mark"})
    if not texts or not all(isinstance(text, str) and re.fullmatch("[0-9a-f]*", text) for text in held.values()):
        _refuse("with a mark of the data set's order that is none")
    if held and len(held["key"]) != 32:
        _refuse("with a mark of the data set's order that has no key")
    return dict(held)


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text) is not None


def _refuse(what: str) -> NoReturn:
    raise ConfigError(f"a checkpoint with a record of charged steps {what}", _NEEDED, _FIX)
