"""Which net: the papers', one of the user's own by name, or one that a script holds."""

from __future__ import annotations

from typing import cast

from sordino.models import nets
from sordino.models.in_memory import Given
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
from sordino.models.spec import Own, Shape, Spec, add_model, build_seeded

SPECS = {kind: cast(type[Spec], net) for kind, net in Spec.members.items() if net.__module__ == nets.__name__}

__all__ = [
    "SPECS",
    "CharLstm",
    "DpMnistCnn",
    "EmnistCnn",
    "FemnistCnn",
    "Given",
    "Linear",
    "Logistic",
    "Mlp",
    "Own",
    "ResNet18",
    "Shape",
    "SmallCnn",
    "Spec",
    "SvhnCnn",
    "add_model",
    "build_seeded",
]
