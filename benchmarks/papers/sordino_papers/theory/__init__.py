"""What the theorems of papers 001 and 002 prescribe: rounds, batch, server, and the risk they promise for it.

    convex, strongly_convex, non_smooth, one_pass, accelerated, multi_stage, shuffled    paper 001
    unequal_minibatch, unequal_accelerated, unequal_non_smooth: silos of their own kind  paper 001
    lower_bound: what no algorithm of a class can beat                                   paper 001
    local_steps, Upload, best_rounds                                                     paper 002
    require_convex, heterogeneity                                                        of a task at hand
    convergence: how far DP-Fed-LS and DP-LSSGD are from the optimum                     papers 000 and 004
    sharpness: what is claimed of DP-FedSAM, and refuted                                 paper 003

A side condition that fails is a `SideConditionError`. The noise of a prescription is the theorem's, which is loose:
take rounds, batch and server from here, and calibrate the noise with the accountant. None of it feeds a certificate.
"""

from sordino_papers.theory.iterations import GROWTH, Mechanism, Upload, best_rounds, local_steps
from sordino_papers.theory.lower_bounds import LowerBound, Rounds, lower_bound
from sordino_papers.theory.prescriptions import (
    Federation,
    Prescription,
    accelerated,
    convex,
    multi_stage,
    non_smooth,
    one_pass,
    shuffled,
    strongly_convex,
)
from sordino_papers.theory.tasks import heterogeneity, require_convex
from sordino_papers.theory.unequal import (
    Silo,
    Unequal,
    UnequalPrescription,
    unequal_accelerated,
    unequal_minibatch,
    unequal_non_smooth,
)

__all__ = [
    "GROWTH",
    "Federation",
    "LowerBound",
    "Mechanism",
    "Prescription",
    "Rounds",
    "Silo",
    "Unequal",
    "UnequalPrescription",
    "Upload",
    "accelerated",
    "best_rounds",
    "convex",
    "heterogeneity",
    "local_steps",
    "lower_bound",
    "multi_stage",
    "non_smooth",
    "one_pass",
    "require_convex",
    "shuffled",
    "strongly_convex",
    "unequal_accelerated",
    "unequal_minibatch",
    "unequal_non_smooth",
]
