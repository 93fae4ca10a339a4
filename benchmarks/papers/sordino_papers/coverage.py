"""What became of every algorithm, table, figure and theorem of the five papers: a row each, nothing left out.

run: as in the paper. changed: at its size with another batch, schedule or protocol, said which. scaled: a smaller form,
said how. refused: not shipped or not run, with the reason. full scale: a command for those with a GPU and the data, not
run here. not done: nobody has done it yet.
"""

# ruff: noqa: E501  (rows of tables)

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["run", "changed", "scaled", "full scale", "refused", "not done"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Item:
    """An item of a paper; `where` names ids of `sordino papers list` and functions, `note` the scale or the reason."""

    name: str
    status: Status
    where: tuple[str, ...] = ()
    note: str = ""


def _items(status: Status, *rows: tuple[str, str, str]) -> tuple[Item, ...]:
    """Rows of one status; `theory.x` and `landscape` are modules of this package."""
    own = re.compile(r"^(theory\.|landscape$)")
    return tuple(
        Item(name, status, tuple(own.sub(r"sordino_papers.\1", one) for one in where.split()), note)
        for name, where, note in rows
    )


PAPER_000 = (
    *_items(
        "run",
        ("Algorithm 1 (DP-Fed-LS)", "sordino.recipes.dp_fed_ls", ""),
        ("Table 2 (logistic regression)", "000-table2 000-table2-tight 000-best",
         "last round, whole test set; the paper's protocol beside it. Tight: the same with PLD's noise"),
        ("Theorem 1 (noise, fixed cohorts)", "theory.central_noise.uniform_noise", "with both side conditions"),
        ("Theorem 2 (noise, Poisson)", "theory.central_noise.poisson_noise", "with both side conditions"),
        ("Theorems 3 to 6 (convergence)",
         "theory-bounds theory.convergence.strongly_convex_error theory.convergence.convex_error "
         "theory.convergence.nonconvex_error", "bound beside measurement"),
        ("Corollary 1 (rounds), Table 1 (rates)", "theory.convergence.rounds_to_reach", "as a function"),
        ("Corollary 2 (Theorem 3 at an epsilon)", "theory.convergence.private_federation", "as a function"),
        ("Proposition 1, Figure 1 (bias and variance)", "theory.smoothing.smoothing_risk 000-figure1",
         "Figure 1's signal is a test of it"),
        ("Lemmas 3, 4 (subsampling)", "theory.central_noise.subsampled_rdp", ""),
        ("Table H.7 (settings)", "000-table2",
         "the logistic row runs here; the CNN and LSTM rows are the settings of 000-table3 and 000-table4"),
        ("Figure E.8 (closed forms beside accountants)", "000-figure-e8", "T = 1000, uniform: slope and intercept"),
        ("Figure F.9 (a demonstration in two dimensions)", "000-figure-f9", "roughness of the path, 20 seeds"),
    ),
    *_items(
        "full scale",
        ("Table 3 (the paper's own size)", "000-table3", "from scratch; billed in a test, not run here"),
        ("Table 4 (the paper's own size)", "000-table4", "billed in a test, not run here"),
    ),
    *_items(
        "scaled",
        ("Table 3 (CNN on SVHN)", "000-regime 000-crossing 000-cnn 000-small", "144,554 parameters, N = 400, T = 20, both "
         "ways of sampling, every z, at the paper's noise-to-signal ratio; MNIST by writer, 55,338 weights, N = 500, T = 40, z 2.4; "
         "every z, both ways of sampling: 8,394 parameters, sigma 0 and 1"),
        ("Table 5 (order of flattening)", "000-table5", "the task of 000-small, z = 2, Poisson"),
        ("Figure 2 (spectra of updates)", "000-figure2", "the task of 000-small"),
        ("Figures 3, 4 (training curves)", "000-figures34",
         "Figure 3 as in the paper, sigma 0 and 1; Figure 4: the task of 000-small"),
        ("Figure 6, Table H.11 (large noise, several steps)", "000-figure6",
         "the task of 000-small, two steps of four"),
        ("Tables H.8, H.9 (other clips, epochs and batches)", "000-tables-h", "the task of 000-small"),
        ("Table 4 (LSTM)", "000-regime-lstm 000-figure5", "both ways of sampling, z 1 and 0.4: 100 roles, one layer of 32, T = 20"),
        ("Figure 5 (training curves of the LSTM)", "000-figure5", "100 roles, one layer of 32, T = 20"),
        ("Table H.10 (steps of the LSTM)", "000-table-h10", "the task of 000-figure5"),
        ("Figures G.10, G.11 (spectra by order and projection)", "000-figures-g", "the task of 000-small"),
        ("Table 6 (James-Stein, soft threshold)", "000-denoisers", "the task of 000-cnn"),
        ("Figure 7, Table H.12 (membership attack)", "000-figure7", "500 MNIST images, a perceptron"),
    ),
    *_items("run", ("Digits (what rounding does to a model)", "000-rounding", "not in the paper")),
)  # fmt: skip

PAPER_001 = (
    *_items(
        "run",
        ("Algorithm 1 (noisy minibatch SGD)", "sordino.recipes.noisy_minibatch_sgd", ""),
        ("Algorithm 2 (accelerated)", "sordino.recipes.accelerated_minibatch_sgd 001-rounds", ""),
        ("One pass, and stages for strongly convex losses", "001-scaling", "exponents in n, M and epsilon measured"),
        ("Theorem 2.1 (convex, strongly convex)",
         "theory.prescriptions.convex theory.prescriptions.strongly_convex", "prescription"),
        ("Theorem 2.2 (non-smooth)", "theory.prescriptions.non_smooth", "prescription"),
        ("Theorem 2.3 (one pass)", "theory.prescriptions.one_pass", "prescription"),
        ("Theorems 2.4, E.1 (accelerated, stages)",
         "theory.prescriptions.accelerated theory.prescriptions.multi_stage", "prescription"),
        ("Theorem 4.1 (shuffled)", "theory.prescriptions.shuffled theory.local_noise.shuffled_std", ""),
        ("Theorems 3.1, F.4 (lower bounds)", "theory.lower_bounds.lower_bound 001-lower-bound",
         "beside what is reached; F.4 is its privacy term"),
        ("Appendices B, E.1 (Psi, Xi, p_i: silos of their own kind)",
         "theory.unequal.unequal_minibatch theory.unequal.unequal_accelerated theory.unequal.unequal_non_smooth",
         "Theorems 2.1, 2.2, 2.4 and E.1 (both parts), complete versions"),
        ("Theorem F.2 (one shuffled round)", "theory.lower_bounds.shuffled_round", "as a function, with its condition"),
        ("v_*^2 (heterogeneity)", "theory.tasks.heterogeneity 001-figure3 001-figure4", "of every arrangement"),
    ),
    *_items(
        "changed",
        ("Figures 3, 6 (odd against even digits)", "001-figure3-h1 001-figure3",
         "H.1's batches, grids and noise, 20 splits (noisy Local SGD: five), records split before silos draw and clipped "
         "one by one; 001-figure3: components scaled to length 1, full batches"),
        ("Figures 4, 7, 8 (medical charges)", "001-figure4",
         "all records in a round (the paper K), N = 3 and 10, M = N and N/2, four epsilons of six, 20 splits"),
        ("Figure 5 (homogeneous silos)", "001-figure5", "components scaled, full batches, four epsilons, five splits"),
    ),
    *_items(
        "refused",
        ("Figures 1, 2 (a drawing, a table of rates)", "", "no number to compute"),
        ("Algorithm 3 (a counter-example)", "", "made to fail: it is no method"),
        ("Theorem F.1, Corollary F.1 (amplification in the lower bounds' proofs)", "",
         "up to constants only; billed by a tighter shuffling bound instead (docs/privacy.md)"),
        ("Theorems F.3, F.5, A.2 (others' results)", "", "cited in proofs, nothing to run"),
    ),
)  # fmt: skip

PAPER_002 = (
    *_items(
        "run",
        ("Algorithm 1 (client-side DP-FedAvg)", "sordino.recipes.client_side_fed_avg", ""),
        ("Theorem 1, Corollary 1.1 (Laplace)", "theory.local_noise.client_laplace_scale", ""),
        ("Theorem 2, Corollary 2.1 (Gaussian)",
         "theory.local_noise.client_gaussian_std theory.local_noise.sound_client_gaussian_std",
         "as published and sound: the published one lacks a factor"),
        ("Theorem 3 (bound)", "theory.local_noise.client_distance_bound 002-theorem3", "beside measurements"),
        ("Theorems 4, 5 (E by T)", "theory.iterations.local_steps", ""),
        ("Corollary 5.1 (a best T)", "theory.iterations.best_rounds", ""),
    ),
    *_items(
        "scaled",
        ("Figures 1, 3, 5, 7 (loans: k, T, E, rules for E)", "002-loans 002-loans-5000",
         "1,000 silos of 8 loans, and 5,000 of one or two; replace-one sensitivity, twice the paper's"),
        ("Figures 2, 4, 6 (FEMNIST: k, T, E)", "002-femnist 002-femnist-cnn 002-femnist-30",
         "105 writers, a perceptron of 8,350 parameters; Figure 6 at epsilon 10 to 30, and with a small form of its CNN; "
         "writers count alike, for the paper's weights N n_l / (b n) do not sum to 1"),
    ),
)  # fmt: skip

PAPER_003 = (
    *_items(
        "run",
        ("Algorithm 1 (DP-FedSAM)", "sordino.recipes.dp_fed_sam", ""),
        ("Algorithm 1 (top_k)", "sordino.recipes.dp_fed_sam_top_k", "three sound forms; as published: refused, below"),
        ("Baselines: DP-FedAvg, Fed-SMP, BLUR, BLUR+LUS",
         "sordino.recipes.dp_fed_avg sordino.recipes.fed_smp sordino.recipes.blur", ""),
        ("Theorem 1 (sensitivity), Theorem 3 (convergence)",
         "theory.sharpness.claimed_sensitivity theory.sharpness.claimed_descent",
         "as claimed, beside what is true (docs/privacy.md)"),
        ("Theorem 2 (accountant, Eq. 16 and 17)", "theory.sharpness.claimed_epsilon 003-claimed",
         "as a function: 8.51 and 10.79; it costs fixed cohorts as Poisson, our certificate does not"),
        ("Theorem 4 (epsilon of a round), Theorem 5 (generalisation)",
         "theory.sharpness.claimed_round_epsilon theory.sharpness.claimed_generalisation "
         "theory.sharpness.generalisation_gap", "as claimed, and the gap that an epsilon does bound"),
    ),
    *_items(
        "full scale",
        ("Table 1 (the paper's own size)", "003-emnist 003-cifar10 003-cifar100", "billed in a test, not run here"),
    ),
    *_items(
        "scaled",
        ("Table 1, Figure 2 (all methods), Table 4 (train and test)", "003-cifar10-regime 003-mnist-regime 003-mnist 003-tuning",
         "at the paper's ratio: four methods on CIFAR-10 at 16x16, Dirichlet 0.6, T = 60, three seeds, and three on MNIST, three splits, five seeds; all ten methods on MNIST at "
         "a tenth of the ratio, T = 100 (three of them on Dirichlet 0.3 and iid; the other seven there: not run)"),
        ("Figure 4 (norms of updates)", "003-cifar10-regime 003-mnist 003-regimes", "over rounds; means over clients and rounds"),
        ("Figures 1, 3 (loss landscapes)", "003-cifar10-regime 003-landscape landscape", "flatness over seeds; the surfaces are of 003-mnist"),
        ("Tables 2, 3, Figure 5 (epsilon, share kept, rho, K, M)", "003-ablations",
         "as 003-mnist on Dirichlet 0.6 with T = 30; C besides"),
    ),
    *_items(
        "refused",
        ("Algorithm 1 (top_k as published)", "003-protocol",
         "not shipped: it masks each client's noised update and its epsilon does not follow; run as a simulation that is NOT private"),
    ),
)  # fmt: skip

PAPER_004 = (
    *_items(
        "run",
        ("Algorithm 1 (DP-LSSGD), DP-LSAdam", "sordino.recipes.dp_ls_sgd sordino.recipes.dp_ls_adam "
         "sordino.dpsgd.make_private", ""),
        ("Theorem 2 (noise)", "theory.central_noise.lssgd_noise", "says where its condition cannot be met"),
        ("Theorems 4, 7 (utility), Table 1", "theory-bounds theory.convergence.lssgd_convex_error "
         "theory.convergence.lssgd_nonconvex_error", "bound beside measurement"),
        ("Propositions 5, 8, Tables 3, 4 (gamma, beta)",
         "theory.smoothing.smoothing_gamma theory.smoothing.smoothing_beta", "the tables are tests"),
    ),
    *_items(
        "changed",
        ("Table 2 (logistic regression)", "004-table2 004-protocol 004-protocol-50",
         "records clipped, batches of 2,000, falling step; by the paper's protocol (not private): 10 epochs of 50 (004-protocol-50 "
         "has all 50)"),
        ("Figures 1, 3 (losses)", "004-protocol", "not private; 10 epochs of 50"),
        ("Figure 4 (step sizes)", "004-protocol", "not private; four steps of six, 10 epochs of 50"),
    ),
    *_items(
        "scaled",
        ("Figures 5, 7 (CNN on MNIST)", "004-regime 004-cnn", "14x14, 10,650 parameters; at the paper's ratio 3,000 steps "
         "of 14,000, 50,000 images; 004-cnn: 120 steps, 20,000 images"),
        ("Figure 6 (CIFAR-10)", "004-cifar10", "18,000 images at 16x16, the net of 004-cnn, 2 epochs, epsilon 8"),
    ),
    *_items("full scale", ("Figure 6 (the paper's own size)", "004-cifar10-full", "billed in a test, not run here")),
    *_items("run", ("Figure 2 (a smoothed signal and picture)", "004-figure2", "its error before and after")),
)  # fmt: skip

BEYOND = _items(
    "run",
    (
        "recipes.best: tasks that chose its defaults",
        "beyond-mnist beyond-adult beyond-writers sordino.recipes.best",
        "",
    ),
    ("recipes.best: tasks that had no part in it", "beyond-cifar beyond-loans", "confirm or refute"),
    ("Correlated noise (DP-FTRL, BandMF), clients in turn", "beyond-correlated", "MNIST, five paired seeds"),
) + _items(
    "scaled",
    (
        "Coins, correlation, or both (MNIST by writer, FEMNIST)",
        "beyond-crossing beyond-crossing-again",
        "T = 100, five paired seeds; a client of FEMNIST is a tenth of a writer",
    ),
    ("The user as the unit beside groups of records (FEMNIST)", "beyond-users", "logistic, T = 60, five paired seeds"),
)

COVERAGE: dict[str, tuple[Item, ...]] = {
    "Paper 000, DP-Fed-LS": PAPER_000,
    "Paper 001, silos without a trusted server": PAPER_001,
    "Paper 002, local and global iterations": PAPER_002,
    "Paper 003, DP-FedSAM": PAPER_003,
    "Paper 004, DP-LSSGD": PAPER_004,
    "Beyond the papers": BEYOND,
}


def text(more: Mapping[str, str] | None = None) -> str:
    """The section of the page: a table per paper; `more` is what there is to say of an id beside the item's note."""
    parts = [f"### {title}\n\n{_table(items, more or {})}" for title, items in COVERAGE.items()]
    return "\n\n".join(["## What became of every item", __doc__.partition("\n\n")[2].strip(), *parts])


def _table(items: tuple[Item, ...], more: Mapping[str, str]) -> str:
    rows = [f"| {one.name} | {one.status} | {_where(one)} | {_note(one, more)} |" for one in items]
    return "\n".join(["| item | status | id or function | note |", "|---|---|---|---|", *rows])


def _where(one: Item) -> str:
    return ", ".join(f"`{name}`" for name in one.where) or "-"


def _note(one: Item, more: Mapping[str, str]) -> str:
    told = [more[name] for name in one.where if name in more]
    return "; ".join([one.note, *told] if one.note else told) or "-"
