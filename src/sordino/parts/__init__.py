"""Parts of an algorithm: samplers, local solvers, encoding steps, releases, mechanisms, strategies, server optimizers.

A `Plan` is composed of parts. Each part states its effect and its privacy bound. User-defined parts subclass the base
classes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

# fmt: off
# isort: off
if TYPE_CHECKING:
    from sordino.accounting.bounds import AlreadyPrivate as AlreadyPrivate, Bound as Bound
    from sordino.accounting.events import Event as Event, Relation as Relation
    from sordino.codec import Part as Part
    from sordino.layout import Layout as Layout
    from sordino.parts.correlated_noise import CorrelatedNoise as CorrelatedNoise
    from sordino.parts.encoding import Adaptive as Adaptive, Clip as Clip, JamesStein as JamesStein
    from sordino.parts.encoding import LaplacianSmoothing as LaplacianSmoothing, NoiseStd as NoiseStd
    from sordino.parts.encoding import Noised as Noised, Postprocess as Postprocess, Public as Public
    from sordino.parts.encoding import SoftThreshold as SoftThreshold, Step as Step, WhenNoisy as WhenNoisy
    from sordino.parts.gradients import Anchor as Anchor, Batch as Batch, Blur as Blur, Bounded as Bounded
    from sordino.parts.gradients import Gradient as Gradient, Moreau as Moreau, Objective as Objective
    from sordino.parts.gradients import Plain as Plain, Proximal as Proximal, Sam as Sam
    from sordino.parts.local_solvers import LocalSgd as LocalSgd, LocalSolver as LocalSolver, Scaffold as Scaffold
    from sordino.parts.local_solvers import Work as Work
    from sordino.parts.losses import Loss as Loss, Quantile as Quantile
    from sordino.parts.mechanisms import Distribution as Distribution, Gaussian as Gaussian, Histogram as Histogram
    from sordino.parts.mechanisms import Laplace as Laplace, Mechanism as Mechanism, Moment as Moment
    from sordino.parts.mechanisms import Preparation as Preparation
    from sordino.parts.record_samplers import AllocatedRecords as AllocatedRecords, AllRecords as AllRecords
    from sordino.parts.record_samplers import FixedRecords as FixedRecords
    from sordino.parts.record_samplers import OnePass as OnePass, PoissonRecords as PoissonRecords
    from sordino.parts.record_samplers import RecordSampler as RecordSampler, RecordsInTurn as RecordsInTurn
    from sordino.parts.record_samplers import SamplingLaw as SamplingLaw, ShuffledRecords as ShuffledRecords
    from sordino.parts.record_solvers import BatchGradient as BatchGradient, NoisyLocalSgd as NoisyLocalSgd
    from sordino.parts.releases import CentralNoise as CentralNoise, Forward as Forward, LocalNoise as LocalNoise
    from sordino.parts.releases import NoNoise as NoNoise, NoiseShares as NoiseShares, Release as Release
    from sordino.parts.releases import ShuffledNoise as ShuffledNoise
    from sordino.parts.samplers import CyclicPoisson as CyclicPoisson, Everyone as Everyone, FixedSize as FixedSize
    from sordino.parts.samplers import MinSeparation as MinSeparation, Poisson as Poisson, RoundRobin as RoundRobin
    from sordino.parts.samplers import KeptBins as KeptBins
    from sordino.parts.samplers import RandomAllocation as RandomAllocation, Sampler as Sampler
    from sordino.parts.schedules import Constant as Constant, Decay as Decay, InverseTime as InverseTime
    from sordino.parts.schedules import Linear as Linear, PerStep as PerStep, Piecewise as Piecewise
    from sordino.parts.schedules import Scaled as Scaled, Schedule as Schedule, Travelled as Travelled
    from sordino.parts.server_optimizers import Accelerated as Accelerated, Adagrad as Adagrad, Adam as Adam
    from sordino.parts.server_optimizers import Average as Average, ServerOptimizer as ServerOptimizer, Sgd as Sgd
    from sordino.parts.server_optimizers import Stage as Stage, Stages as Stages, TorchOptimizer as TorchOptimizer
    from sordino.parts.server_optimizers import Yogi as Yogi
    from sordino.parts.sparsify import MaskSource as MaskSource, PublicDataMask as PublicDataMask
    from sordino.parts.sparsify import PublicMask as PublicMask, RandomMask as RandomMask
    from sordino.parts.sparsify import ReleasedMask as ReleasedMask, SparsifyMean as SparsifyMean
    from sordino.parts.sparsify import SparsifyUpdate as SparsifyUpdate
    from sordino.parts.strategies import Banded as Banded, BandedSquareRoot as BandedSquareRoot
    from sordino.parts.strategies import BufferedToeplitz as BufferedToeplitz, Identity as Identity
    from sordino.parts.strategies import Strategy as Strategy, Toeplitz as Toeplitz, Tree as Tree
# fmt: on

__all__, __getattr__ = lazy.exports(__name__, __file__)
