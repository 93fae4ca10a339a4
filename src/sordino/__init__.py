"""Sordino: differentially private federated learning, with a certificate that is true of what ran.

`train(plan, task)` trains across clients, `make_private(model, optimizer, loader, ...)` is DP-SGD in an ordinary
PyTorch loop; `recipes` has the algorithms, `parts` what they are made of. Names are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy
from sordino.version import __version__ as __version__

if TYPE_CHECKING:
    from sordino import accounting as accounting
    from sordino import data as data
    from sordino import engines as engines
    from sordino import errors as errors
    from sordino import features as features
    from sordino import models as models
    from sordino import parts as parts
    from sordino import recipes as recipes
    from sordino.accounting.calibration import calibrate as calibrate
    from sordino.config.sections import EarlyStopping as EarlyStopping
    from sordino.data.clients import Records as Records
    from sordino.data.datasets import add_dataset as add_dataset
    from sordino.data.metrics import add_metric as add_metric
    from sordino.data.records import Dataset as Dataset
    from sordino.data.records import Dirichlet as Dirichlet
    from sordino.data.records import Iid as Iid
    from sordino.data.records import Natural as Natural
    from sordino.data.records import Shards as Shards
    from sordino.data.records import SortedTarget as SortedTarget
    from sordino.dpsgd.private_loop import make_private as make_private
    from sordino.models import add_model as add_model
    from sordino.parts.losses import add_loss as add_loss
    from sordino.parts.samplers import Everyone as Everyone
    from sordino.parts.samplers import FixedSize as FixedSize
    from sordino.parts.samplers import Poisson as Poisson
    from sordino.parts.samplers import RoundRobin as RoundRobin
    from sordino.plan import Plan as Plan
    from sordino.recipes import add_recipe as add_recipe
    from sordino.rng import Seeded as Seeded
    from sordino.task import Task as Task
    from sordino.training import Result as Result
    from sordino.training import train as train

__all__, __getattr__ = lazy.exports(__name__, __file__)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
