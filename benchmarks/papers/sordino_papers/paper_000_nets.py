"""Paper 000 (DP-Fed-LS): scaled forms of Tables 3 and 6: a CNN by writer, other denoisers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sordino.accounting.accountant import largest_delta
from sordino.config import TaskSpec
from sordino.data.records import Natural
from sordino.models import SmallCnn
from sordino.parts.encoding import JamesStein, LaplacianSmoothing, Postprocess, SoftThreshold
from sordino.parts.samplers import Poisson
from sordino.parts.schedules import Decay
from sordino.recipes import dp_fed_ls
from sordino.task import Task
from sordino_papers.cells import Cell, Job, Results, Row, Table
from sordino_papers.claims import beats

# ---- scaled Tables 3 and 6: a CNN on MNIST by writer -------------------------------------------------------


def writers_cnn(seed: int, clients: int = 500) -> Task:
    """MNIST by its real writers, a CNN of 55,000 parameters; test writers are other people."""
    spec = TaskSpec(dataset="mnist_writers", partition=Natural(clients), model=SmallCnn())
    return spec.build(clients, seed)


def cnn_job(noise_multiplier: float, denoiser: Postprocess, seed: int) -> Job:
    """Scaled: N = 500, rate 0.05, T = 40, E = 2; the paper has N = 2000, T = 200, E = 10, 3.4M parameters."""
    plan = dp_fed_ls(
        rounds=40,
        clients=Poisson(500, 0.05),
        lr=Decay(0.1, 0.99),
        clip_norm=0.6,
        noise_multiplier=noise_multiplier,
        denoiser=denoiser,
        epochs=2,
        batch=16,
        weight_decay=4e-5,
    )
    return Job(plan, writers_cnn(seed), largest_delta(500))


def _cnn_cell(name: str, noise_multiplier: float, label: str, denoiser: Postprocess) -> Cell:
    return Cell(f"000-{name}-z{noise_multiplier:g}-{label.replace(' ', '')}", f"{label}, z = {noise_multiplier:g}",
                partial(cnn_job, noise_multiplier, denoiser))  # fmt: skip


def _cnn() -> Table:
    cells = tuple(_cnn_cell("cnn", 2.4, f"sigma {s:g}", LaplacianSmoothing(s)) for s in (0.0, 0.5, 1.0))
    about = "Scaled Table 3: Poisson, N = 500 writers, T = 40, 55,338 parameters, z = 2.4; every z is in 000-small."
    return Table("000-cnn", "CNN on MNIST by writer (scaled)", cells, about, SCALED, cnn_claims)


SCALED = "by hand, on which data is not recorded; one setting for all rows"


def cnn_claims(results: Results) -> Iterator[Row]:
    """Every sigma against none at the larger noise."""
    for s in (0.5, 1.0):
        text = f"000: CNN by writer, z = 2.4: smoothing (sigma {s:g}) beats none"
        yield beats(results, text, f"000-cnn-z2.4-sigma{s:g}", "000-cnn-z2.4-sigma0", SCALED)


def _denoisers() -> Table:
    others: dict[str, Postprocess] = {
        "james_stein": JamesStein(),
        "james_stein_plain": JamesStein(positive=False),
        "soft_threshold": SoftThreshold(),
    }
    cells = tuple(_cnn_cell("denoisers", 2.4, label, denoiser) for label, denoiser in others.items())
    about = "The task of 000-cnn at z = 2.4 with another post-processing in the place of smoothing."
    return Table("000-denoisers", "Denoisers compared (scaled Table 6)", cells, about, SCALED, denoiser_claims)


def denoiser_claims(results: Results) -> Iterator[Row]:
    """Smoothing against each of the others."""
    for kind in ("james_stein", "james_stein_plain", "soft_threshold"):
        text = f"000: smoothing (sigma 1) beats {kind} by more than 5 points"
        yield beats(results, text, "000-cnn-z2.4-sigma1", f"000-denoisers-z2.4-{kind}", SCALED, margin=5.0)


TABLES = (_cnn(), _denoisers())

__all__ = ["TABLES"]
