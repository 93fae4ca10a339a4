"""Sordino: differentially private federated learning, with a certificate that is true of what ran.

Names are loaded when first used, so that `import sordino` and the calculator do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sordino.version import __version__

if TYPE_CHECKING:
    from sordino import optim as optim
    from sordino import recipes as recipes
    from sordino.codec import Part as Part
    from sordino.data.datasets import add_dataset as add_dataset
    from sordino.data.metrics import Metric as Metric
    from sordino.data.metrics import add_metric as add_metric
    from sordino.data.partition import Partitioner as Partitioner
    from sordino.data.records import Dataset as Dataset
    from sordino.data.stopping import EarlyStopping as EarlyStopping
    from sordino.data.task import Records as Records
    from sordino.data.task import Task as Task
    from sordino.engines.distributed import Distributed as Distributed
    from sordino.engines.inprocess import InProcess as InProcess
    from sordino.errors import ConfigError as ConfigError
    from sordino.errors import PlanError as PlanError
    from sordino.models import Spec as Spec
    from sordino.models import add_model as add_model
    from sordino.parts.accelerated import Accelerated as Accelerated
    from sordino.parts.accelerated import Stage as Stage
    from sordino.parts.accelerated import Stages as Stages
    from sordino.parts.bands import Banded as Banded
    from sordino.parts.bands import BandedSquareRoot as BandedSquareRoot
    from sordino.parts.bounds import Bound as Bound
    from sordino.parts.bounds import Spent as Spent
    from sordino.parts.correlated import CorrelatedNoise as CorrelatedNoise
    from sordino.parts.denoise import JamesStein as JamesStein
    from sordino.parts.denoise import SoftThreshold as SoftThreshold
    from sordino.parts.denoise import SparsifyMean as SparsifyMean
    from sordino.parts.encode import Adaptive as Adaptive
    from sordino.parts.encode import Clip as Clip
    from sordino.parts.encode import Public as Public
    from sordino.parts.encode import Spread as Spread
    from sordino.parts.encode import Step as Step
    from sordino.parts.events import Event as Event
    from sordino.parts.events import Relation as Relation
    from sordino.parts.gradients import Blur as Blur
    from sordino.parts.gradients import Bounded as Bounded
    from sordino.parts.gradients import Gradient as Gradient
    from sordino.parts.gradients import Moreau as Moreau
    from sordino.parts.gradients import Plain as Plain
    from sordino.parts.gradients import Proximal as Proximal
    from sordino.parts.gradients import Sam as Sam
    from sordino.parts.local import LocalSgd as LocalSgd
    from sordino.parts.local import LocalSolver as LocalSolver
    from sordino.parts.local import Work as Work
    from sordino.parts.losses import Loss as Loss
    from sordino.parts.losses import Quantile as Quantile
    from sordino.parts.losses import add_loss as add_loss
    from sordino.parts.mechanisms import Gaussian as Gaussian
    from sordino.parts.mechanisms import Laplace as Laplace
    from sordino.parts.mechanisms import Mechanism as Mechanism
    from sordino.parts.postprocess import LaplacianSmoothing as LaplacianSmoothing
    from sordino.parts.postprocess import Noised as Noised
    from sordino.parts.postprocess import Postprocess as Postprocess
    from sordino.parts.preparation import Histogram as Histogram
    from sordino.parts.records import AllRecords as AllRecords
    from sordino.parts.records import FixedRecords as FixedRecords
    from sordino.parts.records import OnePass as OnePass
    from sordino.parts.records import PoissonRecords as PoissonRecords
    from sordino.parts.records import RecordSampler as RecordSampler
    from sordino.parts.records import RecordsInTurn as RecordsInTurn
    from sordino.parts.records import ShuffledRecords as ShuffledRecords
    from sordino.parts.release import Release as Release
    from sordino.parts.releases import CentralNoise as CentralNoise
    from sordino.parts.releases import Forward as Forward
    from sordino.parts.releases import LocalNoise as LocalNoise
    from sordino.parts.releases import NoiseShares as NoiseShares
    from sordino.parts.releases import NoNoise as NoNoise
    from sordino.parts.releases import ShuffledNoise as ShuffledNoise
    from sordino.parts.samplers import Everyone as Everyone
    from sordino.parts.samplers import FixedSize as FixedSize
    from sordino.parts.samplers import Poisson as Poisson
    from sordino.parts.samplers import RoundRobin as RoundRobin
    from sordino.parts.samplers import Sampler as Sampler
    from sordino.parts.schedules import Constant as Constant
    from sordino.parts.schedules import Decay as Decay
    from sordino.parts.schedules import InverseTime as InverseTime
    from sordino.parts.schedules import Linear as Linear
    from sordino.parts.schedules import PerStep as PerStep
    from sordino.parts.schedules import Piecewise as Piecewise
    from sordino.parts.schedules import Scaled as Scaled
    from sordino.parts.schedules import Schedule as Schedule
    from sordino.parts.schedules import Travelled as Travelled
    from sordino.parts.server import Adagrad as Adagrad
    from sordino.parts.server import Adam as Adam
    from sordino.parts.server import Average as Average
    from sordino.parts.server import ServerOptimizer as ServerOptimizer
    from sordino.parts.server import Sgd as Sgd
    from sordino.parts.server import TorchOptimizer as TorchOptimizer
    from sordino.parts.server import Yogi as Yogi
    from sordino.parts.sparsify import MaskSource as MaskSource
    from sordino.parts.sparsify import PublicDataMask as PublicDataMask
    from sordino.parts.sparsify import PublicMask as PublicMask
    from sordino.parts.sparsify import RandomMask as RandomMask
    from sordino.parts.sparsify import ReleasedMask as ReleasedMask
    from sordino.parts.sparsify import SparsifyUpdate as SparsifyUpdate
    from sordino.parts.strategies import BufferedToeplitz as BufferedToeplitz
    from sordino.parts.strategies import Identity as Identity
    from sordino.parts.strategies import Strategy as Strategy
    from sordino.parts.strategies import Tree as Tree
    from sordino.parts.turns import Separated as Separated
    from sordino.parts.turns import Turns as Turns
    from sordino.plan import Plan as Plan
    from sordino.privacy.calibrated import calibrated as calibrated
    from sordino.recipes import add_recipe as add_recipe
    from sordino.rng import Seeded as Seeded
    from sordino.training import Result as Result
    from sordino.training import train as train

_HOME = {
    "Seeded": "rng",
    "SoftThreshold": "parts.denoise",
    "JamesStein": "parts.denoise",
    "SparsifyMean": "parts.denoise",
    "SparsifyUpdate": "parts.sparsify",
    "PublicMask": "parts.sparsify",
    "Blur": "parts.gradients",
    "Sam": "parts.gradients",
    "Adaptive": "parts.encode",
    "Piecewise": "parts.schedules",
    "Linear": "parts.schedules",
    "InverseTime": "parts.schedules",
    "PerStep": "parts.schedules",
    "Travelled": "parts.schedules",
    "ShuffledNoise": "parts.releases",
    "CorrelatedNoise": "parts.correlated",
    "Strategy": "parts.strategies",
    "Identity": "parts.strategies",
    "BandedSquareRoot": "parts.bands",
    "Banded": "parts.bands",
    "BufferedToeplitz": "parts.strategies",
    "Tree": "parts.strategies",
    "Separated": "parts.turns",
    "Turns": "parts.turns",
    "LocalNoise": "parts.releases",
    "NoiseShares": "parts.releases",
    "AllRecords": "parts.records",
    "FixedRecords": "parts.records",
    "OnePass": "parts.records",
    "PoissonRecords": "parts.records",
    "ShuffledRecords": "parts.records",
    "RecordsInTurn": "parts.records",
    "Moreau": "parts.gradients",
    "PublicDataMask": "parts.sparsify",
    "RandomMask": "parts.sparsify",
    "ReleasedMask": "parts.sparsify",
    "Average": "parts.server",
    "Accelerated": "parts.accelerated",
    "Constant": "parts.schedules",
    "Scaled": "parts.schedules",
    "Stage": "parts.accelerated",
    "Stages": "parts.accelerated",
    "Plain": "parts.gradients",
    "Bounded": "parts.gradients",
    "Forward": "parts.releases",
    "optim": "optim",
    "recipes": "recipes",
    "Records": "data.task",
    "Task": "data.task",
    "InProcess": "engines.inprocess",
    "Distributed": "engines.distributed",
    "Clip": "parts.encode",
    "LocalSgd": "parts.local",
    "Loss": "parts.losses",
    "Quantile": "parts.losses",
    "LaplacianSmoothing": "parts.postprocess",
    "Everyone": "parts.samplers",
    "FixedSize": "parts.samplers",
    "Poisson": "parts.samplers",
    "RoundRobin": "parts.samplers",
    "Decay": "parts.schedules",
    "Adam": "parts.server",
    "Sgd": "parts.server",
    "TorchOptimizer": "parts.server",
    "Yogi": "parts.server",
    "Adagrad": "parts.server",
    "Proximal": "parts.gradients",
    "Plan": "plan",
    "Gaussian": "parts.mechanisms",
    "Laplace": "parts.mechanisms",
    "Histogram": "parts.preparation",
    "CentralNoise": "parts.releases",
    "NoNoise": "parts.releases",
    "Result": "training",
    "calibrated": "privacy.calibrated",
    "train": "training",
    "Bound": "parts.bounds",
    "Spent": "parts.bounds",
    "Event": "parts.events",
    "Relation": "parts.events",
    "Mechanism": "parts.mechanisms",
    "Release": "parts.release",
    "Step": "parts.encode",
    "Public": "parts.encode",
    "Spread": "parts.encode",
    "Postprocess": "parts.postprocess",
    "Noised": "parts.postprocess",
    "Sampler": "parts.samplers",
    "RecordSampler": "parts.records",
    "Schedule": "parts.schedules",
    "ServerOptimizer": "parts.server",
    "LocalSolver": "parts.local",
    "Work": "parts.local",
    "Gradient": "parts.gradients",
    "MaskSource": "parts.sparsify",
    "Spec": "models",
    "Dataset": "data.records",
    "Partitioner": "data.partition",
    "Part": "codec",
    "PlanError": "errors",
    "ConfigError": "errors",
    "add_recipe": "recipes",
    "add_dataset": "data.datasets",
    "add_metric": "data.metrics",
    "add_model": "models",
    "add_loss": "parts.losses",
    "EarlyStopping": "data.stopping",
    "Metric": "data.metrics",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sordino' has no attribute {name!r}")
    module = import_module(f"sordino.{_HOME[name]}")
    value = module if _HOME[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
