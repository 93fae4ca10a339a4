"""Earlier runs behind a module's weights, so that further training reports what all of them cost together.

A trained module carries its runs in an attribute, which deepcopy and pickle keep and state_dict does not show. Within
one process every released tensor is identified by its hash, so weights that went through a state_dict, or into a larger
model, are recognised too. model.safetensors has the runs in its metadata, and certificate.json beside it exactly.
Nothing here is private: hashes are of released weights; the hash of the data has a key (`DataMark`). Called by
`training`, `dpsgd` and `initial_weights`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from sordino import codec
from sordino.certificate.facts import EarlierRun
from sordino.errors import DataError, UserError

_ROWS = 4096  # of long tables so many rows are read, evenly spaced from one that the key chooses
ATTRIBUTE = "sordino_runs"  # of a module
FILE_KEY = "sordino_runs"  # of a safetensors file's metadata
IN_PROCESS, IN_FILE, BESIDE = "this process", "the weights' file, as planned", "certificate.json beside the weights"
SMALLEST = 4  # numbers of a tensor that is known again by its hash
Runs = tuple[EarlierRun, ...]  # the oldest first; the last has made the weights


def keyed_hash(key: str, *tensors: Tensor) -> str:
    """HMAC of types, shapes and all bytes of tensors."""
    found = hmac.new(bytes.fromhex(key), digestmod=hashlib.sha256)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        blocks = torch.split(tensor.detach().cpu(), 65536) if tensor.dim() else (tensor,)
        for block in blocks if tensor.numel() else ():
            found.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def sampled_hash(key: str, x: Tensor, y: Tensor) -> str:
    """HMAC of a short table, or of the length and evenly spaced rows of a long one."""
    if len(x) <= _ROWS:
        return keyed_hash(key, x, y)
    start = int.from_bytes(hmac.digest(bytes.fromhex(key), b"rows", "sha256"), "little") % len(x)
    rows = torch.from_numpy((start + np.arange(_ROWS) * len(x) // _ROWS) % len(x))
    return keyed_hash(key, torch.tensor(len(x)), x[rows], y[rows])


@dataclass(frozen=True)
class DataMark:
    """Keyed hash that identifies the records of a run; `sampled`: of some rows of a long table."""

    key: str
    digest: str
    sampled: bool = True

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> DataMark:
        key = secrets.token_hex(32)
        return cls(key, sampled_hash(key, x, y))

    def matches(self, records: Sequence[Tensor]) -> bool:
        """Whether x and y are the hashed records."""
        if len(records) != 2:
            return False
        x, y = records
        return self.digest == (sampled_hash if self.sampled else keyed_hash)(self.key, x, y)


@dataclass(frozen=True)
class Lineage:
    """Lineage of a trained module: its runs, and the metadata text of its file."""

    runs: Runs
    note: str = ""


_TENSORS: dict[str, tuple[str, ...]] = {}  # sha256 of a released tensor -> ids of the runs of this process that made it
_RUNS: dict[str, Runs] = {}  # a run of this process, and those before it
_CURRENT: dict[str, Callable[[], EarlierRun | None]] = {}  # the cost of a loop so far; None before its first step
_DATA: dict[str, DataMark] = {}  # by what the data of a run are known again


def tensor_hashes(model: nn.Module) -> dict[str, str]:
    """sha256 of every tensor that is large enough to be identified by it."""
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wide = {name: held for name, held in every.items() if held.is_floating_point() and held.numel() >= SMALLEST}
    hashes = {name: hashlib.sha256(f"{held.dtype} {list(held.shape)} ".encode()) for name, held in wide.items()}
    for name, held in wide.items():
        hashes[name].update(held.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return {name: found.hexdigest() for name, found in hashes.items()}


# ---- the runs behind a module ---------------------------------------------------------------------------------------


def runs_of_model(model: nn.Module, records: Sequence[Tensor] = (), others: Runs = ()) -> Runs:
    """All runs behind a module's weights, each once; `records` are the data that it is trained on now."""
    found: dict[str, EarlierRun] = {}
    carried = [held for part in model.modules() if isinstance(held := vars(part).get(ATTRIBUTE), Lineage)]
    known = [*others, *(run for held in carried for run in held.runs)]
    made_here = _recognised(model, {run.run for run in known})
    for run in (*(run for run in known if not made_here or run.known_from != IN_FILE), *made_here):
        now = _CURRENT.get(run.run, lambda run=run: run)()
        if now is not None:
            mark = _DATA.get(now.run)
            same_data = mark is not None and bool(records) and mark.matches(records)
            found.setdefault(now.run, replace(now, same_data=same_data))
    return tuple(found.values())


def _recognised(model: nn.Module, known: set[str]) -> list[EarlierRun]:
    """Runs of this process that made a tensor of the model, except tensors of the runs in `known`."""
    made = [_TENSORS[held] for held in tensor_hashes(model).values() if held in _TENSORS] if _TENSORS else []
    new = dict.fromkeys(runs[0] for runs in made if not known & set(runs))
    return [run for name in new for run in _RUNS[name]]


# ---- registration -------------------------------------------------------------------------------------------------


def attach_lineage(model: nn.Module, runs: Runs, note: str = "") -> None:
    """Attach its runs to a module."""
    setattr(model, ATTRIBUTE, Lineage(runs, note))


def lineage_note(planned: EarlierRun, before: Runs) -> str:
    """The runs of a module as text, equal for equal runs of one plan, so that their files are equal."""
    return codec.to_json({"runs": [*before, planned]})


def file_metadata(model: nn.Module) -> dict[str, str]:
    """The metadata of a trained module's file."""
    held = vars(model).get(ATTRIBUTE)
    return {FILE_KEY: held.note} if isinstance(held, Lineage) and held.note else {}


def register_run(model: nn.Module, first: Mapping[str, str], runs: Runs, records: Sequence[Tensor] = ()) -> None:
    """Register the tensors that a run has trained; `first` are the hashes that it began with."""
    name = runs[-1].run
    _RUNS[name] = runs
    made = [held for key, held in tensor_hashes(model).items() if held != first.get(key)]
    _TENSORS.update((held, (*(run for run in _TENSORS.get(held, ()) if run != name), name)) for held in made)
    if len(records) == 2 and name not in _DATA:
        _DATA[name] = DataMark.of(*records)


def register_loop(run: str, cost: Callable[[], EarlierRun | None]) -> None:
    """Register a DP-SGD loop that is still running; its cost is computed when it is needed."""
    _CURRENT[run] = cost


def tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    """x and y of a TensorDataset or a Subset of one; empty for data sets that compute their records."""
    rows: Tensor | None = None
    if type(dataset) is Subset:
        rows, dataset = torch.as_tensor(list(dataset.indices), dtype=torch.int64), dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
        return ()
    return tuple(held if rows is None else held[rows] for held in dataset.tensors)


# ---- files ----------------------------------------------------------------------------------------------------------


def runs_of_file(path: Path, data: bytes) -> Runs:
    """Runs in the metadata of a safetensors file; the last one from the certificate beside it, if there is one."""
    named, exact = _noted(path.name, data), _beside(path.parent, hashlib.sha256(data).hexdigest())
    return named if exact is None else (*named[:-1], exact)


def _noted(name: str, data: bytes) -> Runs:
    try:
        size = int.from_bytes(data[:8], "little")
        text = json.loads(data[8 : 8 + size]).get("__metadata__", {}).get(FILE_KEY)
        if text is None:
            return ()
        found: Runs = codec.read(tuple[EarlierRun, ...], json.loads(text)["runs"], "runs")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as error:
        what = f"{name} with a note of earlier runs that cannot be read ({str(error)[:100]})"
        raise DataError(what, "the file as a run wrote it", "bring back an unchanged copy") from None
    return found


def _beside(folder: Path, sha256: str) -> EarlierRun | None:
    """The run whose folder holds the file, if that run made it; its data are identified by their keyed hash."""
    try:
        made: dict[str, Any] = json.loads((folder / "certificate.json").read_bytes())
        if made["model_sha256"] != sha256:
            return None
        found = EarlierRun.of_certificate(made, str(made["run"]["id"]), BESIDE)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, UserError):
        return None
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads((folder / "checkpoint" / "data.json").read_bytes())
        mark = DataMark(str(kept["key"]), str(kept["parts"]["the clients' records"]), sampled=False)
        _DATA.setdefault(found.run, mark)
    return found
