"""Model architectures: the papers' nets, functions registered by `add_model`, and modules that a script passes."""

from __future__ import annotations

from typing import cast

from sordino.models import nets as nets
from sordino.models.nets import Architecture as Architecture
from sordino.models.nets import CharLstm as CharLstm
from sordino.models.nets import DpMnistCnn as DpMnistCnn
from sordino.models.nets import EmnistCnn as EmnistCnn
from sordino.models.nets import FemnistCnn as FemnistCnn
from sordino.models.nets import InMemoryModel as InMemoryModel
from sordino.models.nets import Linear as Linear
from sordino.models.nets import Logistic as Logistic
from sordino.models.nets import Mlp as Mlp
from sordino.models.nets import RegisteredModel as RegisteredModel
from sordino.models.nets import ResNet18 as ResNet18
from sordino.models.nets import Shape as Shape
from sordino.models.nets import SmallCnn as SmallCnn
from sordino.models.nets import SvhnCnn as SvhnCnn
from sordino.models.nets import add_model as add_model
from sordino.models.nets import build_seeded as build_seeded

ARCHITECTURES = {
    kind: cast(type[Architecture], net)
    for kind, net in Architecture.members.items()
    if net.__module__ == nets.__name__ and net not in (RegisteredModel, InMemoryModel)
}
