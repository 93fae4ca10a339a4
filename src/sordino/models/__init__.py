"""Model architectures: the papers' nets, registered functions, and modules that a script passes."""

from __future__ import annotations

from typing import cast

from sordino.models import nets
from sordino.models.architecture import Architecture, RegisteredModel, Shape, add_model, build_seeded
from sordino.models.in_memory import InMemoryModel
from sordino.models.nets import (
    CharLstm,
    DpMnistCnn,
    EmnistCnn,
    FemnistCnn,
    Linear,
    Logistic,
    Mlp,
    ResNet18,
    SmallCnn,
    SvhnCnn,
)

ARCHITECTURES = {
    kind: cast(type[Architecture], net) for kind, net in Architecture.members.items() if net.__module__ == nets.__name__
}

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "CharLstm",
    "DpMnistCnn",
    "EmnistCnn",
    "FemnistCnn",
    "InMemoryModel",
    "Linear",
    "Logistic",
    "Mlp",
    "RegisteredModel",
    "ResNet18",
    "Shape",
    "SmallCnn",
    "SvhnCnn",
    "add_model",
    "build_seeded",
]
