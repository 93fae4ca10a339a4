"""Model architectures: the papers' nets, functions registered by `add_model`, and modules that a script passes."""

from __future__ import annotations

from typing import cast

# fmt: off
# isort: off
from sordino.models import nets as nets
from sordino.models.nets import Architecture as Architecture, CharLstm as CharLstm, DpMnistCnn as DpMnistCnn
from sordino.models.nets import EmnistCnn as EmnistCnn, FemnistCnn as FemnistCnn, InMemoryModel as InMemoryModel
from sordino.models.nets import Linear as Linear, Logistic as Logistic, Mlp as Mlp
from sordino.models.nets import RegisteredModel as RegisteredModel, ResNet18 as ResNet18, Shape as Shape
from sordino.models.nets import SmallCnn as SmallCnn, SvhnCnn as SvhnCnn, add_model as add_model
from sordino.models.nets import build_seeded as build_seeded
# fmt: on

ARCHITECTURES = {
    kind: cast(type[Architecture], net)
    for kind, net in Architecture.members.items()
    if net.__module__ == nets.__name__ and net not in (RegisteredModel, InMemoryModel)
}
