"""Settings of other libraries, read from numbers, TOML and JSON files, and Python files that are parsed, never run.

A call is known by its name and its library's import in the same file. Only literal arguments are read (numbers, words,
their arithmetic, and names that the file binds once to one of these); what is not literal is listed as not examined.
"""

from __future__ import annotations

import ast
import json
import operator
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.errors import ConfigError, brief_repr

Value = float | int | str | bool
LIBRARIES = ("opacus", "flower", "pfl", "jax_privacy", "fl4health", "nvflare", "plain")
_LARGEST = 10_000_000  # bytes of a file
KEYS: dict[str, type | tuple[type, ...]] = {  # of a settings file and of --set, with their types
    **dict.fromkeys(("clients", "sampled", "rounds", "records", "steps", "min_separation", "parameters"), int),
    **dict.fromkeys(("batch_size", "accumulation"), int),
    **dict.fromkeys(("noise_multiplier", "delta", "epsilon", "clip_norm", "sensitivity", "epochs"), (int, float)),
    **dict.fromkeys(("rate", "client_rate", "noise_scale", "fraction", "noise_var"), (int, float)),
    **dict.fromkeys(("epsilon_release", "target_quantile", "clip_norm_lr"), (int, float)),
    **dict.fromkeys(("sampling", "accountant", "call", "relation"), str),
    **dict.fromkeys(("accounted", "poisson"), bool),
}


@dataclass(frozen=True)
class Settings:
    """Privacy settings of one run, as a library names them: values by key, and arguments that are not literal."""

    library: str
    call: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    where: str = ""
    unread: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def filled(self, values: Mapping[str, Value]) -> Settings:
        """Return the settings with values for keys that they lack."""
        return replace(self, values={**values, **self.values})


@dataclass(frozen=True)
class Known:
    """A constructor of a library: its parameters in order, the keys they become, and values of absent arguments."""

    library: str
    module: str
    parameters: tuple[str, ...]
    keys: Mapping[str, str]
    call: str = ""  # the protocol that `library_prices` knows; empty: the call only completes others of its library
    absent: Mapping[str, Value] = field(default_factory=dict)


def _flower_wrapper(call: str, *more: str, **absent: Value) -> Known:
    keys = {
        "noise_multiplier": "noise_multiplier", "clipping_norm": "clip_norm", "num_sampled_clients": "sampled",
        "accountant": "accounted", "target_clipped_quantile": "target_quantile", "clip_norm_lr": "clip_norm_lr",
    }  # fmt: skip
    return Known("flower", "flwr", ("strategy", "noise_multiplier", *more), keys, call, absent)


_FIXED = _flower_wrapper("fixed_clipping", "clipping_norm", "num_sampled_clients", accounted=False)
_ADAPTIVE = _flower_wrapper(
    "adaptive_clipping", "num_sampled_clients", "initial_clipping_norm", "target_clipped_quantile", "clip_norm_lr",
    target_quantile=0.5, clip_norm_lr=0.2,
)  # fmt: skip
_OPACUS = {
    "noise_multiplier": "noise_multiplier", "max_grad_norm": "clip_norm", "poisson_sampling": "poisson",
    "target_epsilon": "epsilon", "target_delta": "delta", "epochs": "epochs",
}  # fmt: skip
_PFL = Known(
    "pfl", "pfl", ("num_compositions", "sampling_probability", "mechanism", "epsilon", "delta", "noise_parameter"),
    {
        "num_compositions": "rounds", "sampling_probability": "rate", "epsilon": "epsilon", "delta": "delta",
        "noise_parameter": "noise_multiplier", "noise_scale": "noise_scale",
    }, "accountant",
)  # fmt: skip
_SVT = {name: name for name in ("fraction", "epsilon", "noise_var", "epsilon_release")}
CALLS: dict[str, Known] = {
    "DifferentialPrivacyServerSideFixedClipping": _FIXED,
    "DifferentialPrivacyClientSideFixedClipping": _FIXED,
    "DifferentialPrivacyServerSideAdaptiveClipping": _ADAPTIVE,
    "DifferentialPrivacyClientSideAdaptiveClipping": _ADAPTIVE,
    "LocalDpMod": Known(
        "flower", "flwr", ("clipping_norm", "sensitivity", "epsilon", "delta"),
        {"clipping_norm": "clip_norm", "sensitivity": "sensitivity", "epsilon": "epsilon", "delta": "delta"}, "local",
    ),
    "PrivacyConfig": Known(
        "flower", "flwr",
        ("target_delta", "population_size", "neighboring_relation", "sampling_method", "max_epsilon"),
        {"target_delta": "delta", "population_size": "clients", "sampling_method": "sampling"},
    ),
    "GaussianPrivacyEvent": Known(
        "flower", "flwr", ("noise_multiplier", "sample_size", "population_size"),
        {"noise_multiplier": "noise_multiplier", "sample_size": "sampled", "population_size": "clients"}, "accountant",
    ),
    "make_private": Known("opacus", "opacus", (), _OPACUS, "dp_sgd", {"poisson": True}),
    "make_private_with_epsilon": Known("opacus", "opacus", (), _OPACUS, "dp_sgd", {"poisson": True}),
    "PrivacyEngine": Known("opacus", "opacus", (), {"accountant": "accountant"}),
    "DataLoader": Known("opacus", "opacus", ("dataset", "batch_size"), {"batch_size": "batch_size"}),
    **dict.fromkeys(("PLDPrivacyAccountant", "PRVPrivacyAccountant", "RDPPrivacyAccountant"), _PFL),
    "GaussianMechanism.construct_single_iteration": Known(
        "pfl", "pfl", ("clipping_bound", "epsilon", "delta"), {"epsilon": "epsilon", "delta": "delta"},
        "single_iteration",
    ),
    "BandedMatrixFactorizationMechanism": Known(
        "pfl", "pfl", ("clipping_bound", "num_iterations", "min_separation"),
        {"num_iterations": "rounds", "min_separation": "min_separation"}, "banded",
    ),
    "DPKerasConfig": Known(
        "jax_privacy", "jax_privacy",
        ("epsilon", "delta", "clipping_norm", "batch_size", "gradient_accumulation_steps", "train_steps", "train_size",
         "poisson_sampling_in_fit", "noise_multiplier"),
        {
            "epsilon": "epsilon", "delta": "delta", "batch_size": "batch_size", "train_steps": "steps",
            "gradient_accumulation_steps": "accumulation", "train_size": "records",
            "poisson_sampling_in_fit": "poisson", "noise_multiplier": "noise_multiplier",
        }, "keras", {"poisson": False},
    ),
    "DpParams": Known(
        "jax_privacy", "jax_privacy", (),
        {
            "noise_multipliers": "noise_multiplier", "num_samples": "records", "delta": "delta",
            "batch_size": "batch_size", "sampling_method": "sampling",
        }, "dp_sgd", {"sampling": "poisson"},
    ),
    "FlInstanceLevelAccountant": Known(
        "fl4health", "fl4health",
        ("client_sampling_rate", "noise_multiplier", "epochs_per_round", "client_batch_sizes", "client_dataset_sizes"),
        {
            "client_sampling_rate": "client_rate", "noise_multiplier": "noise_multiplier", "epochs_per_round": "epochs",
            "client_batch_sizes": "batch_size", "client_dataset_sizes": "records",
        }, "records",
    ),
    "FlClientLevelAccountantFixedSamplingNoReplacement": Known(
        "fl4health", "fl4health", ("n_total_clients", "n_clients_sampled", "noise_multiplier"),
        {"n_total_clients": "clients", "n_clients_sampled": "sampled", "noise_multiplier": "noise_multiplier"},
        "without_replacement",
    ),
    "SVTPrivacy": Known(
        "nvflare", "nvflare", ("fraction", "epsilon", "noise_var"), _SVT, "svt",
        {"fraction": 0.1, "epsilon": 0.1, "noise_var": 0.1},
    ),
    "PercentilePrivacy": Known("nvflare", "nvflare", (), {}, "percentile"),
}  # fmt: skip
_FLIP = {"dp-clipping-norm": "clip_norm", "dp-sensitivity": "sensitivity", "dp-epsilon": "epsilon", "dp-delta": "delta"}
_FLIP_DEFAULTS: dict[str, Value] = {"clip_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5}


def stated(library: str, values: Mapping[str, Any], where: str = "") -> Settings:
    """Return settings given as numbers; unknown libraries, keys and types are errors."""
    if library not in LIBRARIES:
        needed = f"one of {', '.join(LIBRARIES)}"
        raise ConfigError(f"the library {brief_repr(library)}", needed, codec.nearest(library, list(LIBRARIES)))
    for key, value in values.items():
        if key not in KEYS:
            known = ", ".join(sorted(KEYS))
            raise ConfigError(f"the key {brief_repr(key)}", f"one of {known}", codec.nearest(key, list(KEYS)))
        wanted = KEYS[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"{key} = {brief_repr(value)}", f"a value of type {_type_name(wanted)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(key, value)
    call = str(values.get("call", ""))
    return Settings(library, call, {key: value for key, value in values.items() if key != "call"}, where)


def _type_name(wanted: type | tuple[type, ...]) -> str:
    return "number" if isinstance(wanted, tuple) else {"int": "whole number"}.get(wanted.__name__, wanted.__name__)


def _check_number(key: str, value: float) -> None:
    below = 1.0 if key in ("delta", "rate", "client_rate", "fraction") else 1e15
    if not 0 <= value <= below or (value == 0 and key not in ("noise_multiplier", "sensitivity", "delta")):
        raise ConfigError(f"{key} = {value}", f"a number above 0, at most {below:g}")


def read_file(file: Path) -> list[Settings]:
    """Return the settings in a TOML, JSON or Python file; an empty list if it has no known call."""
    if not file.is_file():
        raise ConfigError(f"no file {file}", "a Python, TOML or JSON file, or numbers", "add --library and numbers")
    if file.stat().st_size > _LARGEST:
        raise ConfigError(f"{file}, of {file.stat().st_size:,} bytes", f"a file of at most {_LARGEST:,} bytes")
    try:
        content = file.read_text("utf-8")
        if file.suffix == ".py":
            return _from_python(ast.parse(content), file.name)
        table = json.loads(content) if file.suffix == ".json" else tomllib.loads(content)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        kind = {".py": "Python", ".json": "JSON"}.get(file.suffix, "TOML")
        raise ConfigError(f"{file}, which is no {kind} ({type(error).__name__}: {error})", f"a {kind} file") from None
    return _from_table(table, file.name)


def _from_table(table: Any, where: str) -> list[Settings]:
    """Return the settings of a table with `library`, of a FLIP app (`dp-*` keys), or of NVFlare's filters."""
    if isinstance(table, dict) and isinstance(table.get("library"), str):
        return [stated(table["library"], {key: v for key, v in table.items() if key != "library"}, where)]
    found = []
    for each in _tables(table):
        if any(key in each for key in _FLIP):
            values = {_FLIP[key]: value for key, value in each.items() if key in _FLIP and _is_number(value)}
            rounds = each.get("num-server-rounds")
            more: dict[str, Value] = {"rounds": rounds} if isinstance(rounds, int) and rounds > 0 else {}
            found.append(Settings("flower", "local", {**_FLIP_DEFAULTS, **values, **more}, where))
        name = str(each.get("path", each.get("name", ""))).rpartition(".")[2]
        if name in CALLS and CALLS[name].library == "nvflare":
            known, given = CALLS[name], each.get("args")
            own = given if isinstance(given, dict) else {}
            read = {key: own[name] for name, key in known.keys.items() if _is_number(own.get(name))}
            found.append(Settings("nvflare", known.call, {**known.absent, **read}, where))
    return found


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tables(each)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- Python files ----------------------------------------------------------------------------------------------------


class _NotLiteral(Exception):  # noqa: N818  (raised and caught in this file)
    """Raised for an expression that is not a literal."""


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _literal(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """Return the value of a literal, of arithmetic of literals, of a constant's name, or the member of an enum."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand, names)
        case ast.BinOp(op=ast.Pow()):
            base, power = _number(node.left, names), _number(node.right, names)
            if base <= 0 or abs(power) > 30:
                raise _NotLiteral
            return float(base) ** power
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](_number(node.left, names), _number(node.right, names))
        case ast.Name() if node.id in names:
            return _literal(names[node.id], {key: each for key, each in names.items() if key != node.id})
        case ast.Attribute(value=ast.Name() | ast.Attribute()) if node.attr.isupper():
            return node.attr.lower()
        case ast.List(elts=[only]) | ast.Tuple(elts=[only]):
            return _literal(only, names)
    raise _NotLiteral


def _number(node: ast.expr, names: Mapping[str, ast.expr]) -> float | int:
    found = _literal(node, names)
    if not _is_number(found) or abs(found) > 1e30:
        raise _NotLiteral
    return float(found) if isinstance(found, float) else int(found)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return names that the file binds exactly once, on its top level."""
    bound = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    made = [line for line in tree.body if isinstance(line, ast.Assign) and len(line.targets) == 1]
    pairs = [(line.targets[0].id, line.value) for line in made if isinstance(line.targets[0], ast.Name)]
    return {name: value for name, value in pairs if bound.count(name) == 1}


def _imported(tree: ast.Module) -> set[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return {name.split(".")[0] for name in names}


def _called(node: ast.Call) -> Known | None:
    """Return the known constructor of a call: by its last name, or by `Class.method`."""
    match node.func:
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
            return CALLS.get(f"{owner}.{name}") or CALLS.get(name)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return CALLS.get(name)
    return None


def _from_python(tree: ast.Module, where: str) -> list[Settings]:
    """Return every known call of a library that the file imports; calls without a protocol complete the others."""
    imported, names = _imported(tree), _constants(tree)
    found: list[Settings] = []
    shared: dict[str, dict[str, set[Value]]] = {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda each: (each.lineno, each.col_offset)):
        known = _called(node)
        if known is None or known.module not in imported:
            continue
        one = _arguments(node, known, names, where)
        if known.call:
            found.append(one)
        else:
            for key, value in one.values.items():
                shared.setdefault(known.library, {}).setdefault(key, set()).add(value)
    return [
        one.filled({key: next(iter(found)) for key, found in shared.get(one.library, {}).items() if len(found) == 1})
        for one in found
    ]


def _arguments(node: ast.Call, known: Known, names: Mapping[str, ast.expr], where: str) -> Settings:
    given: dict[str, ast.expr] = dict(zip(known.parameters, node.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    star = any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
    values: dict[str, Value] = {}
    unread = ["**" if star else ""]
    for name, key in known.keys.items():
        if name not in given:
            continue
        if key == "accounted":  # an object: whether there is one
            values[key] = not (isinstance(given[name], ast.Constant) and given[name].value is None)  # type: ignore[attr-defined]
            continue
        try:
            value = _literal(given[name], names)
            checked = None if value is None else stated(known.library, {key: value})
            values |= {} if checked is None else checked.values
        except (_NotLiteral, ConfigError, ArithmeticError, RecursionError):
            unread.append(name)
    absent = {key: value for key, value in known.absent.items() if key not in _keys_given(known, given) and not star}
    return Settings(
        known.library, known.call, {**absent, **values}, f"{where}:{node.lineno}", tuple(filter(None, unread))
    )


def _keys_given(known: Known, given: Mapping[str, ast.expr]) -> set[str]:
    return {key for name, key in known.keys.items() if name in given}
