"""Public weights of a model: files of initial weights, frozen parameters, and the earlier runs that trained them.

Further training reports the composed cost of all earlier runs. A trained module stores its runs in an attribute, which
deepcopy and pickle copy and state_dict does not contain. Within one process every released tensor is identified by its
hash, so weights that went through a state_dict, or into a larger model, are recognised too. model.safetensors has the
planned cost of its runs in its metadata; certificate.json beside the file has the actual cost. Nothing here is private:
hashes are of released weights, and the hash of the data has a secret key (`DataMark`). A run does not protect the data
that its initial or frozen weights were trained on: these weights are public by the user's declaration, and the
certificate contains their hash. Called by `task`, `training`, `dpsgd`.
"""

from __future__ import annotations

import copy
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
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from sordino import codec
from sordino.certificate.facts import FROZEN, Declared, EarlierRun
from sordino.errors import DataError, UserError

_ROWS = 4096  # rows of a long table that are hashed, evenly spaced from one that the key chooses
ATTRIBUTE = "sordino_runs"  # of a module
PUBLIC = "sordino_public"  # of a tensor of features: what public data and weights they were computed with
FILE_KEY = "sordino_runs"  # of a safetensors file's metadata
IN_PROCESS, IN_FILE, BESIDE = "this process", "the weights' file, as planned", "certificate.json beside the weights"
SMALLEST = 4  # numbers in the smallest tensor that is identified by its hash
Runs = tuple[EarlierRun, ...]  # the oldest first; the last has made the weights


def keyed_hash(key: str, *tensors: Tensor) -> str:
    """Return the HMAC-SHA256, under a hexadecimal key, of the types, shapes and bytes of tensors."""
    found = hmac.new(bytes.fromhex(key), digestmod=hashlib.sha256)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        blocks = torch.split(tensor.detach().cpu(), 65536) if tensor.dim() else (tensor,)
        for block in blocks if tensor.numel() else ():
            found.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def sampled_hash(key: str, x: Tensor, y: Tensor) -> str:
    """Return the HMAC-SHA256 of x and y; of more than 4,096 rows, only of their number and 4,096 evenly spaced rows."""
    if len(x) <= _ROWS:
        return keyed_hash(key, x, y)
    start = int.from_bytes(hmac.digest(bytes.fromhex(key), b"rows", "sha256"), "little") % len(x)
    rows = torch.from_numpy((start + np.arange(_ROWS) * len(x) // _ROWS) % len(x))
    return keyed_hash(key, torch.tensor(len(x)), x[rows], y[rows])


@dataclass(frozen=True)
class DataMark:
    """Keyed hash that identifies the records of a run: by `sampled_hash` if `sampled`, else by `keyed_hash`."""

    key: str
    digest: str
    sampled: bool = True

    def matches(self, records: Sequence[Tensor]) -> bool:
        """Return whether `records`, x and y, have this hash."""
        return len(records) == 2 and self.digest == (sampled_hash if self.sampled else keyed_hash)(self.key, *records)


def tensor_hashes(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each floating-point parameter and buffer that has at least `SMALLEST` numbers, by name."""
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wide = {name: held for name, held in every.items() if held.is_floating_point() and held.numel() >= SMALLEST}
    return {name: _sha256(f"{held.dtype} {list(held.shape)} ", held).hexdigest() for name, held in wide.items()}


def _sha256(title: str, tensor: Tensor, found: Any = None) -> Any:
    found = hashlib.sha256() if found is None else found
    found.update(title.encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found


FIX = "save them with safetensors.torch.save_file(model.state_dict(), path)"


@dataclass(frozen=True)
class InitialWeights:
    """Safetensors file of a model's initial weights; which data these were trained on is in general unknown."""

    file: str
    sha256: str
    numbers: int
    earlier: Runs = ()  # from the file's metadata, or from the certificate beside it


def declared_frozen(model: nn.Module) -> tuple[Declared, ...]:
    """Return the certificate's entry for frozen parameters: their count, and the SHA-256 of their names and values."""
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    found, count = hashlib.sha256(), sum(tensor.numel() for tensor in fixed.values())
    for name, tensor in sorted(fixed.items()):
        _sha256(f"{name} {_type_name(tensor)} {list(tensor.shape)}\n", tensor, found)
    return (Declared(count, FROZEN, "the user: not trained", found.hexdigest()),) if fixed else ()


def declared_features(records: Sequence[Tensor]) -> tuple[Declared, ...]:
    """Return the certificate's entries for the public data and weights with which `sordino.features` made `records`."""
    return tuple(one for tensor in records for one in getattr(tensor, PUBLIC, ()))


def load_initial(model: nn.Module, path: str | Path) -> tuple[nn.Module, InitialWeights]:
    """Return a copy of the model with the weights of a safetensors file, and the description of that file.

    The names, shapes and types of the file's tensors must be those of the model.
    """
    file, name = Path(path).expanduser(), Path(path).name
    try:
        data = file.read_bytes()
    except OSError as error:
        found = f"init = {str(file)!r}, which cannot be read ({error.strerror})"
        raise DataError(found, "the path of a safetensors file", "correct the path, or its permissions") from None
    try:
        weights = safetensors.torch.load(data)
    except (SafetensorError, json.JSONDecodeError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(f"{name}, which is no safetensors file ({error})", "the weights of a model", FIX) from None
    started = copy.deepcopy(model)
    own = started.state_dict()
    missing = next((key for key in own if key not in weights), None)
    if missing is not None:
        held = ", ".join(sorted(weights)[:4]) or "nothing"
        raise DataError(f"{name} without {missing!r} (it holds {held})", "a tensor for every tensor of the model", FIX)
    for key, tensor in weights.items():
        if key not in own:
            needed = "the tensors of the model and no others"
            raise DataError(f"{key!r} in {name}, which the model does not have", needed, FIX)
        _check_tensor(tensor, own[key], f"{key!r} of {name}")
    started.load_state_dict({key: tensor.to(own[key].device) for key, tensor in weights.items()})
    numbers = sum(tensor.numel() for tensor in weights.values())
    return started, InitialWeights(name, hashlib.sha256(data).hexdigest(), numbers, runs_of_file(file, data))


def _check_tensor(tensor: Tensor, own: Tensor, where: str) -> None:
    if tensor.shape != own.shape:
        found, needed = f"{where} of shape {list(tensor.shape)}", f"the shape {list(own.shape)} of the model's tensor"
        raise DataError(found, needed, "use the architecture that the weights were saved from")
    if tensor.dtype != own.dtype:
        needed = f"{_type_name(own)}, as the model has it"
        raise DataError(f"{where} in {_type_name(tensor)}", needed, "convert it before saving")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise DataError(f"NaN or infinity in {where}", "finite weights", "save weights of a model that did not diverge")


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Lineage:
    """Runs that trained a module, and the metadata text for its file."""

    runs: Runs
    note: str = ""


_TENSORS: dict[str, tuple[str, ...]] = {}  # sha256 of a released tensor -> ids of the runs of this process that made it
_RUNS: dict[str, Runs] = {}  # a run of this process, and those before it
_CURRENT: dict[str, Callable[[], EarlierRun | None]] = {}  # the cost of a loop so far; None before its first step
_DATA: dict[str, DataMark] = {}  # by run


def runs_of_model(model: nn.Module, records: Sequence[Tensor] = (), others: Runs = ()) -> Runs:
    """Return all runs that trained a module's weights, and `others`, each once; `records` are its data of today.

    A run of this process is also recognised by the hashes of the tensors that it released, unless one of the runs
    in the module's attribute released them. `same_data` of a run says whether it used `records` too.
    """
    found: dict[str, EarlierRun] = {}
    carried = [held for part in model.modules() if isinstance(held := vars(part).get(ATTRIBUTE), Lineage)]
    known = [*others, *(run for held in carried for run in held.runs)]
    named = {run.run for run in known}
    makers = [_TENSORS[held] for held in tensor_hashes(model).values() if held in _TENSORS] if _TENSORS else []
    new = dict.fromkeys(runs[0] for runs in makers if not named & set(runs))
    made_here = [run for name in new for run in _RUNS[name]]
    for run in (*(run for run in known if not made_here or run.known_from != IN_FILE), *made_here):
        now = _CURRENT.get(run.run, lambda run=run: run)()
        if now is not None:
            mark = _DATA.get(now.run)
            same_data = mark is not None and bool(records) and mark.matches(records)
            found.setdefault(now.run, replace(now, same_data=same_data))
    return tuple(found.values())


def attach_lineage(model: nn.Module, runs: Runs, note: str = "") -> None:
    """Store the runs that trained a module, and the metadata text of its file, in an attribute of the module."""
    setattr(model, ATTRIBUTE, Lineage(runs, note))


def lineage_note(planned: EarlierRun, before: Runs) -> str:
    """Return the metadata text of a module's file: JSON of the earlier runs and the planned one.

    It has no identifier that differs between two runs of one plan, so that their files are equal.
    """
    return codec.to_json({"runs": [*before, planned]})


def file_metadata(model: nn.Module) -> dict[str, str]:
    """Return the safetensors metadata of a trained module; empty for any other module."""
    held = vars(model).get(ATTRIBUTE)
    return {FILE_KEY: held.note} if isinstance(held, Lineage) and held.note else {}


def register_run(model: nn.Module, first: Mapping[str, str], runs: Runs, records: Sequence[Tensor] = ()) -> None:
    """Register the tensors that the last of `runs` has trained; `first` are the tensors' hashes before that run."""
    name = runs[-1].run
    _RUNS[name] = runs
    made = [held for key, held in tensor_hashes(model).items() if held != first.get(key)]
    _TENSORS.update((held, (*(run for run in _TENSORS.get(held, ()) if run != name), name)) for held in made)
    if len(records) == 2 and name not in _DATA:
        key = secrets.token_hex(32)
        _DATA[name] = DataMark(key, sampled_hash(key, *records))


def register_loop(run: str, cost: Callable[[], EarlierRun | None]) -> None:
    """Register a DP-SGD loop that is still running; `cost` is called when its cost so far is needed."""
    _CURRENT[run] = cost


def tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    """Return x and y of a TensorDataset or a Subset of one; empty for data sets that compute their records."""
    rows: Tensor | None = None
    if type(dataset) is Subset:
        rows, dataset = torch.as_tensor(list(dataset.indices), dtype=torch.int64), dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
        return ()
    return tuple(held if rows is None else held[rows] for held in dataset.tensors)


def runs_of_file(path: Path, data: bytes) -> Runs:
    """Return the runs in the metadata of a safetensors file; the certificate beside the file replaces the last one."""
    runs: Runs = ()
    try:
        size = int.from_bytes(data[:8], "little")
        text = json.loads(data[8 : 8 + size]).get("__metadata__", {}).get(FILE_KEY)
        if text is not None:
            runs = codec.read(tuple[EarlierRun, ...], json.loads(text)["runs"], "runs")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as error:
        what = f"{path.name} with metadata on earlier runs that cannot be read ({str(error)[:100]})"
        raise DataError(what, "the unchanged file of a run", "restore an unchanged copy") from None
    exact = _run_of_folder(path.parent, hashlib.sha256(data).hexdigest())
    return runs if exact is None else (*runs[:-1], exact)


def _run_of_folder(folder: Path, sha256: str) -> EarlierRun | None:
    try:
        made: dict[str, Any] = json.loads((folder / "certificate.json").read_bytes())
        if made["model_sha256"] != sha256:
            return None
        found = EarlierRun.of_certificate(made, str(made["run"]["id"]), BESIDE)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, UserError):
        return None
    with suppress(OSError, ValueError, TypeError, KeyError):
        held = json.loads((folder / "checkpoint" / "data.json").read_bytes())
        mark = DataMark(str(held["key"]), str(held["parts"]["the clients' records"]), sampled=False)
        _DATA.setdefault(found.run, mark)
    return found
