"""How the page of each paper begins: its idea, the recipe in code, the figure of its headline, its errata."""

# ruff: noqa: E501  (rows of tables)

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Introduction:
    """`idea` in five sentences, `code` that builds the recipe, `figure` (the id of a study), `errata` one line each."""

    idea: str
    code: str
    figure: str
    caption: str
    errata: tuple[str, ...]

    @property
    def text(self) -> str:
        """As the page shows it."""
        wrong = "\n".join(f"- {one}" for one in self.errata)
        drawn = f"![{self.caption}](../figures/{self.figure}.png)\n\n{self.caption}"
        code = f"```python\n{self.code.strip()}\n```"
        return f"## The idea\n\n{self.idea}\n\n{code}\n\n{drawn}\n\n## Errata\n\n{wrong}\n\nProofs and commands: [errata](../errata.md)."


INTRODUCTIONS = {
    "000": Introduction(
        "Clients train locally, and the server adds Gaussian noise to the sum of their clipped updates. The sum, "
        "flattened tensor by tensor, is a smooth signal, and the noise is not. So the server applies the inverse of "
        "A = I + sigma L, L the Laplacian of a cycle, to what it has noised: post-processing, which costs no privacy. "
        "The variance falls to the share d_sigma / d and a bias comes in, so it pays where noise dominates: here "
        "in the CNN task of 000-regime it loses up to a ratio z sqrt(d) / S of 15 and wins from 38 on, with the crossing near 18. Closed forms say how much noise uniform and Poisson cohorts need.",
        """
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.samplers import Poisson
from sordino.recipes import dp_fed_ls

plan = dp_fed_ls(
    rounds=30, clients=Poisson(500, 0.05), lr=0.1, clip_norm=0.4, noise_multiplier=1.135, epochs=5, batch=10,
    denoiser=LaplacianSmoothing(1.0),  # without it a round is smoothed only where z sqrt(d) / S is above 18
)
""",
        "000-crossing",
        "When smoothing pays: accuracy of sigma 1 less that of none, by the ratio (the paper's Table 3: 33 to 44).",
        (
            "The epsilons of Tables 3 and 4 under uniform sampling use the sensitivity C where Theorem 1 needs 2C: "
            "4.05 is published, at least 4.60 is true.",
            "Theorem 1 asks for about 2.4 times the noise that the same cohorts need.",
            "Reported accuracies are of the first 1,010 test images at the best round on validation images.",
        ),
    ),
    "001": Introduction(
        "Silos trust nobody, so every message is private on its own: record-level privacy of each silo's reports "
        "(ISRL-DP). Each available silo sends the mean gradient of K records, every record clipped, plus noise. The "
        "server averages the silos, steps, and returns a weighted mean of iterates; an accelerated form and a one-pass "
        "form reach the optimal rates. Where silos differ, one private gradient a round beats many local steps. The "
        "lower bounds say that nothing in a wide class does better.",
        """
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.samplers import Everyone
from sordino.recipes import noisy_minibatch_sgd

plan = noisy_minibatch_sgd(
    rounds=35, clients=Everyone(25), records=FixedRecords(362, (1238,)), lr=1.0, clip_norm=10.9, noise_multiplier=2.28
)
""",
        "001-figure3-h1",
        "Figures 3 and 6 in the setting of H.1: test error by epsilon, 25 silos of one pair of digits each.",
        (
            "The noise of Appendix H depends on what L is: with L = 2 max ||x|| as written and batches of K, epsilon "
            "12 is truly 7.6; with L taken for the Lipschitz constant it is 12.9 (all records) or 23.2 (batches of K).",
            "The authors' code draws a silo's data with replacement before splitting: train and test overlap.",
            "It clips the minibatch mean, which bounds no record.",
        ),
    ),
    "002": Introduction(
        "Clients take turns, run E full-batch gradient steps, clip each gradient, and add noise to what they upload. "
        "The privacy budget is split over the uploads of a client, so more rounds mean more noise in each. With T = E "
        "T_g iterations in all, Laplace noise therefore has a best T, and a best E that grows as epsilon falls. "
        "Theorem 3 bounds the distance to the optimum, and its minimum is E ~ T^(2/3) for Laplace and T^(1/2) for "
        "Gaussian noise. The paper tunes both numbers on loans and on FEMNIST.",
        """
from sordino.parts.mechanisms import Laplace
from sordino.recipes.client_level import client_side_fed_avg

plan = client_side_fed_avg(
    rounds=10, population=1000, cohort=100, lr=0.05, steps=12, clip_norm=1.0, mechanism=Laplace(10.0)
)
""",
        "002-loans",
        "Figures 1, 3, 5, 7: loss by iteration, by T, by E, and under rules for E (loans, 1,000 silos).",
        (
            "Replacing a client's data moves its upload by 2 eta E zeta, not eta E zeta: epsilon 1, 3, 5 are 2, 6, 10.",
            "Theorem 3 and Corollary 2.1 (Gaussian) have a spurious factor 2: 72.0 for 51.1.",
            "The weights N n_l / (b n) do not sum to 1 over a cohort; clients count alike here.",
        ),
    ),
    "003": Introduction(
        "Clipping and noise push a federated model into sharp minima, where they hurt most. DP-FedSAM lets clients take "
        "sharpness-aware steps: the gradient at w + rho g / ||g|| in the place of g. Updates become smaller and more "
        "alike, so the clip cuts less and the noise moves the loss less. The whole update is clipped to C and noised by "
        "shares under secure aggregation. DP-FedSAM-top_k keeps a share of the coordinates of each noised update.",
        """
from sordino.parts.samplers import Poisson
from sordino.recipes import dp_fed_sam

plan = dp_fed_sam(
    rounds=200, clients=Poisson(500, 0.1), lr=0.1, clip_norm=0.2, noise_multiplier=0.95, epochs=30, batch=32, rho=0.5
)
""",
        "003-cifar10-regime",
        "Test accuracy by round on CIFAR-10 at the paper's noise-to-signal ratio, every method with a search of its own.",
        (
            "top_k as published masks each client's noised update by itself: its epsilon does not follow (at least "
            "39.6 on five coordinates). The sound forms are shipped.",
            "Cohorts of exactly 50 are billed as Poisson: Eq. 16 gives 8.51 and 10.79, what ran has 43.2 and 57.8. "
            'The paper prints no epsilon ("8.57 / 10.83" stands in no paper).',
            "The authors' code clips each tensor to C: sensitivity C sqrt(tensors).",
        ),
    ),
    "004": Introduction(
        "DP-SGD adds Gaussian noise to the mean gradient of a batch, and the noise has energy in every frequency. "
        "DP-LSSGD multiplies the noised gradient by (I + sigma L)^-1, L the Laplacian of a cycle, before the step. That "
        "is post-processing and keeps epsilon; DP-LSAdam feeds the smoothed gradient to Adam. The variance of the step "
        "falls by beta(sigma), so training stays stable for longer under large noise. In the paper smoothing starts "
        "slower, and is ahead late.",
        """
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.record_samplers import PoissonRecords
from sordino.recipes import dp_ls_sgd

plan = dp_ls_sgd(
    rounds=3000, records=PoissonRecords(164, (50_000,)), lr=0.15, clip_norm=1.0, noise_multiplier=10.0,
    denoiser=LaplacianSmoothing(1.0),
)
""",
        "004-regime",
        "The MNIST CNN at z = 10 and the paper's step: slower first, ahead late (validation accuracy). At its own best step, a third of the paper's, DP-SGD stays ahead.",
        (
            "Theorem 2 has no admissible mu below epsilon 4.126, and the paper uses it at .1 to .3.",
            "The code clips the mean gradient per tensor, which bounds no record: no epsilon follows.",
            "The noise of Table 2 was computed for ten epochs, and the paper trains for fifty.",
        ),
    ),
}
