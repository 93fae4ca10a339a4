"""Public weights, named on the certificate by a hash: those a run begins with, and those it freezes. Called by `task`.

    init      a safetensors file of the model's first weights
    frozen    parameters without requires_grad, as the base under adapters; only the others are sent, noised and stored

What either was trained on is not protected by the run: it is public by the owner's declaration.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sordino.certificate.facts import FROZEN, Declared, EarlierRun
from sordino.data.lineage import runs_of_file
from sordino.errors import DataError

FIX = "save them with safetensors.torch.save_file(model.state_dict(), path)"


@dataclass(frozen=True)
class InitialWeights:
    """File of a model's initial weights; what they were trained on, only its owner knows."""

    file: str
    sha256: str
    numbers: int
    earlier: tuple[EarlierRun, ...] = ()  # runs that the file, or its folder, says that it comes from


@dataclass(frozen=True)
class Frozen:
    """Frozen parameters of a model: how many numbers, and the sha256 of their names and values."""

    sha256: str
    numbers: int


def frozen(model: nn.Module) -> Frozen | None:
    """The frozen parameters of a model; None where all are trained."""
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    if not fixed:
        return None
    found = hashlib.sha256()
    for name, tensor in sorted(fixed.items()):
        found.update(f"{name} {_kind(tensor)} {list(tensor.shape)}\n".encode())
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Frozen(found.hexdigest(), sum(tensor.numel() for tensor in fixed.values()))


def declared_frozen(model: nn.Module) -> tuple[Declared, ...]:
    """Entry of a certificate for frozen parameters, which are public by the user's declaration."""
    found = frozen(model)
    return () if found is None else (Declared(found.numbers, FROZEN, "the user: not trained", found.sha256),)


def load_initial(model: nn.Module, path: str | Path) -> tuple[nn.Module, InitialWeights]:
    """A copy of the model with the weights of a file, whose names, shapes and types must be the model's."""
    file, name = Path(path).expanduser(), Path(path).name
    try:
        data = file.read_bytes()
    except OSError as error:
        words = f"init = {str(file)!r}, which cannot be read ({error.strerror})"
        raise DataError(words, "a safetensors file") from None
    try:
        found = safetensors.torch.load(data)
    except (SafetensorError, json.JSONDecodeError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(f"{name}, which is no safetensors file ({error})", "the weights of a model", FIX) from None
    started = copy.deepcopy(model)
    own = started.state_dict()
    _check_names(found, own, name)
    for key, tensor in found.items():
        _check_tensor(tensor, own[key], f"{key!r} of {name}")
    started.load_state_dict({key: tensor.to(own[key].device) for key, tensor in found.items()})
    numbers = sum(tensor.numel() for tensor in found.values())
    return started, InitialWeights(name, hashlib.sha256(data).hexdigest(), numbers, runs_of_file(file, data))


def _check_names(found: Mapping[str, Tensor], own: Mapping[str, Tensor], file: str) -> None:
    missing = next((key for key in own if key not in found), None)
    if missing is not None:
        held = ", ".join(sorted(found)[:4]) or "nothing"
        raise DataError(f"{file} without {missing!r} (it holds {held})", "a tensor for every one of the model's", FIX)
    extra = next((key for key in found if key not in own), None)
    if extra is not None:
        raise DataError(f"{extra!r} in {file}, which the model has not", "the model's tensors and no other", FIX)


def _check_tensor(tensor: Tensor, own: Tensor, where: str) -> None:
    if tensor.shape != own.shape:
        raise DataError(f"{where} of shape {list(tensor.shape)}", f"that of the model, {list(own.shape)}")
    if tensor.dtype != own.dtype:
        raise DataError(f"{where} in {_kind(tensor)}", f"{_kind(own)}, as the model has it", "convert it before saving")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise DataError(f"NaN or infinity in {where}", "finite weights")


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
