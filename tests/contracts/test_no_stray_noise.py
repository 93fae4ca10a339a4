"""Promise: noise is drawn in parts/mechanisms.py and nowhere else; coins only where they are listed here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sordino

SRC = Path(sordino.__file__).parent

# Ways to draw a number: numpy generators, torch functions, in-place fills, the standard library.
DRAWS = frozenset(
    re.findall(
        r"\w+",
        """
    standard_normal normal normal_ lognormal log_normal_ multivariate_normal laplace logistic gumbel vonmises
    standard_exponential exponential exponential_ standard_cauchy cauchy_ standard_t standard_gamma chisquare
    randn randn_like rand rand_like randint randint_like randrange randbytes randperm rvs uniform uniform_ random_sample
    bernoulli bernoulli_ multinomial geometric_ random_ gauss normalvariate gammavariate expovariate triangular
    rayleigh weibull pareto wald zipf hypergeometric negative_binomial noncentral_chisquare trunc_normal_
    kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_ sparse_ orthogonal_ rsample sample_n
    integers choice permutation permuted binomial dirichlet randbits token_bytes
    """,
    )
)
WORDS = frozenset(
    {"random", "shuffle", "power", "beta", "gamma", "choices", "bytes", "poisson", "geometric"}
)  # only as a call
MODULES = frozenset({"random", "secrets"})  # of the standard library

# The only other files that may draw, and what: coins, never noise.
ALLOWED: dict[str, frozenset[str]] = {
    "rng.py": frozenset({"np.random.Generator", "np.random.Philox", "secrets", "randbits"})  # makes the generators
    | frozenset({"random", "np.random.get_state", "np.random.set_state"}),  # puts others' back to where they stood
    "parts/mechanisms.py": frozenset({"standard_normal", "laplace", "integers", "random"}),  # the noise
    "accounting/events.py": frozenset({"laplace"}),  # no draw: the Renyi divergence of that name
    "parts/samplers.py": frozenset({"binomial", "choice", "integers", "permutation", "random"}),  # who takes part
    "accounting/renyi.py": frozenset({"poisson", "random"}),  # how often a private run is tried
    "parts/record_samplers.py": frozenset(
        {"binomial", "choice", "integers", "permutation", "random"}
    ),  # a silo's batch
    "parts/local_solvers.py": frozenset({"permuted"}),  # the order of a client's own records
    "parts/sparsify.py": frozenset({"permutation"}),  # a public mask, known to all
    "engines/inprocess.py": frozenset({"integers"}),  # a seed for dropout
    # which records are compared and when; public weights; torch's random operations, made constant
    "dpsgd/batch_independence.py": frozenset({"choice", "integers", "normal", "random"})
    | frozenset({"bernoulli", "bernoulli_", "randint", "randperm"}),
    "dpsgd/loader.py": frozenset({"bytes"}),  # the key of a pass, from which its batches are drawn
    "graph/captured.py": frozenset({"randn", "randint"}),  # made-up records, on which a module is captured
    "runs/writer.py": frozenset({"secrets"}),  # the name of a run, and the key of its data's fingerprint
    "runs/rounds.py": frozenset({"secrets"}),  # the name of a run in memory
    "federation/local_federation.py": frozenset({"secrets", "token_bytes"}),  # keys of a loopback's nodes
    "federation/secagg.py": frozenset({"secrets", "token_bytes"}),  # the seed of a mask, and the id of a session
    "config/sections.py": frozenset({"permutation"}),  # which public rows choose, and which report
    "data/lineage.py": frozenset({"secrets"}),  # the key of a fingerprint
    "data/records.py": frozenset({"permutation", "choice", "dirichlet"}),  # who holds what, in a simulation
}
FREE = ("audit/", "tuning/")  # attacks, experiments and made-up data to tune on: none of it is released


def offenders(source: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Every draw in `source` that is not allowed, as "line: name"."""
    found = [(node, name) for node in ast.walk(ast.parse(source)) for name in _draws(node)]
    return [f"{getattr(node, 'lineno', 0)}: {name}" for node, name in found if name not in allowed]


def _draws(node: ast.AST) -> list[str]:
    """The draws that this one node names."""
    match node:
        case ast.Attribute(value=ast.Attribute(value=ast.Name("np" | "numpy"), attr="random"), attr=name):
            return [f"np.random.{name}"]
        case ast.Attribute(attr=name) if name in DRAWS:
            return [name]
        case ast.Call(func=ast.Attribute(attr=name)) if name in WORDS:
            return [name]
        case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(str() as name), *_]) if name in DRAWS:
            return [name]
        case ast.Import(names=names):
            return [alias.name for alias in names if alias.name in MODULES or alias.name == "numpy.random"]
        case ast.ImportFrom(module=str() as module, names=names):
            if module in MODULES or module in ("numpy.random", "torch.distributions"):
                return [f"{module}.{alias.name}" for alias in names]
            return [alias.name for alias in names if alias.name in DRAWS]
    return []


def _permitted(path: Path) -> frozenset[str]:
    """What a file may draw; the type of a generator may be named anywhere."""
    return ALLOWED.get(path.relative_to(SRC).as_posix(), frozenset()) | {"np.random.Generator"}


def _files() -> list[Path]:
    return [path for path in sorted(SRC.rglob("*.py")) if not path.relative_to(SRC).as_posix().startswith(FREE)]


@pytest.mark.parametrize("path", _files(), ids=lambda path: path.relative_to(SRC).as_posix())
def test_no_noise_is_drawn_outside_mechanisms(path: Path) -> None:
    assert offenders(path.read_text(), _permitted(path)) == []


def test_a_generator_is_made_in_one_file_only() -> None:
    makers = [
        path.relative_to(SRC).as_posix()
        for path in _files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and any(name.startswith("np.random.") for name in _draws(node.func))
    ]
    assert set(makers) == {"rng.py"}


def test_every_entry_of_the_list_is_needed() -> None:
    """An allowance that nobody uses is a hole."""
    for name, allowed in ((name, allowed) for name, allowed in ALLOWED.items() if (SRC / name).exists()):
        used = {found.split(": ")[1] for found in offenders((SRC / name).read_text())}
        assert allowed <= used, f"{name} no longer draws {sorted(allowed - used)}"


@pytest.mark.parametrize(
    "sabotage",
    [
        "def step(rows, rng):\n    return rows + rng.standard_normal(rows.shape)",
        "total = total + torch.randn_like(total) * 0.1",
        "total = torch.normal(0.0, 1.0, size=(3,))",
        "total.normal_(0.0, 1.0)",
        "mean += np.random.laplace(size=3)",
        "rng = np.random.default_rng(0)",
        "rng = numpy.random.RandomState(3)",
        "import random\nx = random.gauss(0, 1)",
        "from random import gauss",
        "from numpy.random import default_rng",
        "from torch import randn",
        "from torch import randn as fine\nx = fine(3)",
        "draw = rng.laplace\nx = draw(3)",
        "x = getattr(rng, 'standard_normal')(3)",
        "x = rng.random(5)",
        "rng.shuffle(rows)",
        "x = scipy.stats.norm.rvs(size=4)",
        "from torch.distributions import Normal",
        "x = torch.empty(3).exponential_()",
        "x = torch.nn.init.trunc_normal_(w)",
    ],
)
def test_sabotage_is_caught(sabotage: str) -> None:
    assert offenders(sabotage, frozenset({"np.random.Generator"}))


@pytest.mark.parametrize(
    "innocent",
    [
        "def draw(self, rng: np.random.Generator) -> Tensor: ...",
        "if plan.clients.random:\n    pass",
        "with torch.random.fork_rng():\n    torch.manual_seed(3)",
        'kind = "laplace"',
        "class Laplace: ...",
    ],
)
def test_innocent_lines_are_not_accused(innocent: str) -> None:
    assert offenders(innocent, frozenset({"np.random.Generator"})) == []


def test_sabotage_of_a_real_file_is_caught() -> None:
    path = SRC / "parts" / "server_optimizers.py"
    source = path.read_text()
    assert "at(self.lr, t) * slope" in source
    poisoned = source.replace("at(self.lr, t) * slope", "at(self.lr, t) * (slope + torch.randn_like(slope))")
    assert offenders(poisoned, _permitted(path))
