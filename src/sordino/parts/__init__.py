"""Parts of an algorithm, shipped ones and the bases of your own; a `Plan` is composed of them.

Samplers, local solvers, encoding steps, releases with their mechanisms and noise strategies, postprocessing, server
optimizers. Each part states its effect and its privacy bound together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.accounting.bounds import AlreadyPrivate as AlreadyPrivate
    from sordino.accounting.bounds import Bound as Bound
    from sordino.accounting.events import Event as Event
    from sordino.accounting.events import Relation as Relation
    from sordino.codec import Part as Part
    from sordino.layout import Layout as Layout
    from sordino.parts.correlated_noise import CorrelatedNoise as CorrelatedNoise
    from sordino.parts.encoding import Adaptive as Adaptive
    from sordino.parts.encoding import Clip as Clip
    from sordino.parts.encoding import JamesStein as JamesStein
    from sordino.parts.encoding import LaplacianSmoothing as LaplacianSmoothing
    from sordino.parts.encoding import Noised as Noised
    from sordino.parts.encoding import NoiseStd as NoiseStd
    from sordino.parts.encoding import Postprocess as Postprocess
    from sordino.parts.encoding import Public as Public
    from sordino.parts.encoding import SoftThreshold as SoftThreshold
    from sordino.parts.encoding import Step as Step
    from sordino.parts.encoding import WhenNoisy as WhenNoisy
    from sordino.parts.gradients import Anchor as Anchor
    from sordino.parts.gradients import Batch as Batch
    from sordino.parts.gradients import Blur as Blur
    from sordino.parts.gradients import Bounded as Bounded
    from sordino.parts.gradients import Gradient as Gradient
    from sordino.parts.gradients import Moreau as Moreau
    from sordino.parts.gradients import Objective as Objective
    from sordino.parts.gradients import Plain as Plain
    from sordino.parts.gradients import Proximal as Proximal
    from sordino.parts.gradients import Sam as Sam
    from sordino.parts.local_solvers import LocalSgd as LocalSgd
    from sordino.parts.local_solvers import LocalSolver as LocalSolver
    from sordino.parts.local_solvers import Scaffold as Scaffold
    from sordino.parts.local_solvers import Work as Work
    from sordino.parts.losses import Loss as Loss
    from sordino.parts.losses import Quantile as Quantile
    from sordino.parts.mechanisms import Distribution as Distribution
    from sordino.parts.mechanisms import Gaussian as Gaussian
    from sordino.parts.mechanisms import Histogram as Histogram
    from sordino.parts.mechanisms import Laplace as Laplace
    from sordino.parts.mechanisms import Mechanism as Mechanism
    from sordino.parts.mechanisms import Preparation as Preparation
    from sordino.parts.record_samplers import AllRecords as AllRecords
    from sordino.parts.record_samplers import FixedRecords as FixedRecords
    from sordino.parts.record_samplers import OnePass as OnePass
    from sordino.parts.record_samplers import PoissonRecords as PoissonRecords
    from sordino.parts.record_samplers import RecordSampler as RecordSampler
    from sordino.parts.record_samplers import RecordsInTurn as RecordsInTurn
    from sordino.parts.record_samplers import SamplingLaw as SamplingLaw
    from sordino.parts.record_samplers import ShuffledRecords as ShuffledRecords
    from sordino.parts.record_solvers import BatchGradient as BatchGradient
    from sordino.parts.record_solvers import NoisyLocalSgd as NoisyLocalSgd
    from sordino.parts.releases import CentralNoise as CentralNoise
    from sordino.parts.releases import Forward as Forward
    from sordino.parts.releases import LocalNoise as LocalNoise
    from sordino.parts.releases import NoiseShares as NoiseShares
    from sordino.parts.releases import NoNoise as NoNoise
    from sordino.parts.releases import Release as Release
    from sordino.parts.releases import ShuffledNoise as ShuffledNoise
    from sordino.parts.samplers import CyclicPoisson as CyclicPoisson
    from sordino.parts.samplers import Everyone as Everyone
    from sordino.parts.samplers import FixedSize as FixedSize
    from sordino.parts.samplers import MinSeparation as MinSeparation
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
    from sordino.parts.server_optimizers import Accelerated as Accelerated
    from sordino.parts.server_optimizers import Adagrad as Adagrad
    from sordino.parts.server_optimizers import Adam as Adam
    from sordino.parts.server_optimizers import Average as Average
    from sordino.parts.server_optimizers import ServerOptimizer as ServerOptimizer
    from sordino.parts.server_optimizers import Sgd as Sgd
    from sordino.parts.server_optimizers import Stage as Stage
    from sordino.parts.server_optimizers import Stages as Stages
    from sordino.parts.server_optimizers import TorchOptimizer as TorchOptimizer
    from sordino.parts.server_optimizers import Yogi as Yogi
    from sordino.parts.sparsify import MaskSource as MaskSource
    from sordino.parts.sparsify import PublicDataMask as PublicDataMask
    from sordino.parts.sparsify import PublicMask as PublicMask
    from sordino.parts.sparsify import RandomMask as RandomMask
    from sordino.parts.sparsify import ReleasedMask as ReleasedMask
    from sordino.parts.sparsify import SparsifyMean as SparsifyMean
    from sordino.parts.sparsify import SparsifyUpdate as SparsifyUpdate
    from sordino.parts.strategies import Banded as Banded
    from sordino.parts.strategies import BandedSquareRoot as BandedSquareRoot
    from sordino.parts.strategies import BufferedToeplitz as BufferedToeplitz
    from sordino.parts.strategies import Identity as Identity
    from sordino.parts.strategies import Strategy as Strategy
    from sordino.parts.strategies import Toeplitz as Toeplitz
    from sordino.parts.strategies import Tree as Tree

__all__, __getattr__ = lazy.exports(__name__, __file__)
