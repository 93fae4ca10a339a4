"""Commands that help to write a configuration file: `sordino schema`, `recipes`, `examples`; they read no data."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import sysconfig
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from sordino import codec
from sordino.cli.console import JsonFlag, Own, app, load_own_parts, output
from sordino.codec import Part
from sordino.errors import ConfigError

Schema = dict[str, Any]
_SCALARS: dict[Any, Schema] = {
    bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"},
}  # fmt: skip


@app.command()
def schema(own: Own = None, as_json: JsonFlag = True) -> None:
    """Print the JSON Schema of a configuration file, for editors."""
    load_own_parts(own)
    from sordino.config import Config

    output(True, json_schema(Config), "")


def json_schema(declared: Any) -> Schema:
    """Return the JSON Schema of a type; each dataclass and each family of parts is defined once, under $defs."""
    defs: dict[str, Schema] = {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema(declared, defs), "$defs": defs}


def _schema(declared: Any, defs: dict[str, Schema]) -> Schema:
    origin, args = get_origin(declared), get_args(declared)
    if declared in _SCALARS:
        return _SCALARS[declared]
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(option, defs) for option in args if option is not NoneType]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0], defs)}
    if isinstance(declared, type) and (issubclass(declared, Part) or dataclasses.is_dataclass(declared)):
        name = declared.__name__
        if name not in defs:
            defs[name] = {}
            defs[name] = _definition(declared, defs)
        return {"$ref": f"#/$defs/{name}"}
    return {"type": "object"} if origin is dict else {}


def _definition(cls: Any, defs: dict[str, Schema]) -> Schema:
    if issubclass(cls, Part) and not cls.kind:
        members = [cls.members[kind] for kind in sorted(cls.members)]
        alone = [member.kind for member in members if not _required(member)]  # may be written as a bare name
        return {"oneOf": [*([{"enum": alone}] if alone else []), *(_schema(member, defs) for member in members)]}
    hints, fields = get_type_hints(cls), [field for field in dataclasses.fields(cls) if field.init]
    kind = {"kind": {"const": cls.kind}} if issubclass(cls, Part) else {}
    return {
        "type": "object",
        "description": (cls.__doc__ or "").strip().partition("\n")[0],
        "properties": {**kind, **{field.name: _schema(hints[field.name], defs) for field in fields}},
        "required": [*kind, *_required(cls)],
        "additionalProperties": False,
    }


def _required(cls: Any) -> list[str]:
    missing, fields = dataclasses.MISSING, dataclasses.fields(cls)
    return [f.name for f in fields if f.init and f.default is missing and f.default_factory is missing]


recipes_app = typer.Typer(no_args_is_help=True, help="Algorithms that are ready to use.", rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def recipes_list(own: Own = None, as_json: JsonFlag = False) -> None:
    """Print the name of every recipe with one sentence."""
    others = bool(own) or codec.plugins_installed()
    if others:
        load_own_parts(own)
    found = recipes(others)
    wide = max(len(entry["name"]) for entry in found)
    output(as_json, {"recipes": found}, "\n".join(f"{entry['name']:<{wide}}  {entry['summary']}" for entry in found))


@recipes_app.command("show")
def recipes_show(name: str, own: Own = None, as_json: JsonFlag = False) -> None:
    """Print the arguments of one recipe, and a file to start from."""
    load_own_parts(own)
    from sordino.recipes import RECIPES, starters

    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r}", "the name of a recipe", codec.nearest(name, list(RECIPES)))
    arguments = {}
    for one in inspect.signature(RECIPES[name]).parameters.values():
        declared = one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)
        plain = re.sub(r"\b(?:\w+\.)+", "", declared)  # without the modules
        arguments[one.name] = {"type": plain, "required": one.default is one.empty}
    example, equation = starters.example(name), inspect.getdoc(RECIPES[name])
    output(as_json, {"name": name, "equation": equation, "arguments": arguments, "example": example}, example)


SENTENCES = {  # one sentence on each recipe, without importing torch
    "dp_fed_avg": "DP-FedAvg (McMahan et al. 2018): clip each client's update, add noise to the sum.",
    "dp_fed_ls": "Paper 000, DP-Fed-LS: DP-FedAvg with Laplacian smoothing of the noised mean.",
    "dp_fed_sam": "Paper 003, DP-FedSAM: DP-FedAvg with sharpness-aware local steps.",
    "dp_fed_sam_top_k": "Paper 003, DP-FedSAM-top_k in three sound forms: a share of the coordinates is kept.",
    "fed_smp": "Fed-SMP (Hu et al. 2022): one public mask a round for all clients, random or by public data.",
    "blur": "BLUR (Cheng et al. 2022): local models are projected onto the clip ball; LUS adds a client's own top-k.",
    "best": "Sordino's defaults: noise calibrated to an epsilon, a large server step, and a mean of the last models.",
    "head": "Sordino's defaults for public features: a linear head, all clients in every round, calibrated noise.",
    "dp_ftrl": "DP-FTRL (Kairouz et al. 2021): noise correlated across rounds by tree aggregation.",
    "band_mf": "BandMF (Choquette-Choo et al. 2023): noise correlated across rounds by an optimised banded matrix.",
    "scaffold": "SCAFFOLD (Karimireddy et al. 2020): control and update in one clipped, noised message.",
    "noisy_minibatch_sgd": "Paper 001: silos clip per record and add noise to their own gradient (ISRL-DP).",
    "accelerated_minibatch_sgd": "Paper 001: accelerated noisy minibatch SGD, in one pass or in stages.",
    "noisy_local_sgd": "Paper 001, its baseline: noise in every local step of a silo.",
    "client_side_fed_avg": "Paper 002: every client adds Laplace or Gaussian noise to its own update.",
    "silo": "Sordino's defaults for silos: momentum, a decreasing step size, noise calibrated to each silo's epsilon.",
    "dp_sgd": "DP-SGD (Abadi et al. 2016): one holder of all data, gradients clipped record by record.",
    "dp_ls_sgd": "Paper 004, DP-LSSGD: DP-SGD with Laplacian smoothing of the noised gradient.",
    "dp_adam": "DP-Adam: Adam on the noised gradient of DP-SGD.",
    "dp_ls_adam": "Paper 004, DP-LSAdam: Adam on the noised and smoothed gradient of DP-LSSGD.",
}


def recipes(others: bool = True) -> list[dict[str, str]]:
    """Return every recipe's name with one sentence; `others` includes recipes of other packages."""
    if not others:
        return [{"name": name, "summary": sentence} for name, sentence in SENTENCES.items()]
    from sordino.recipes import RECIPES

    first = {name: (inspect.getdoc(made) or "no docstring").splitlines()[0] for name, made in RECIPES.items()}
    return [{"name": name, "summary": SENTENCES.get(name, line)} for name, line in first.items()]


@app.command()
def examples(
    to: Annotated[Path | None, typer.Option(help="A new folder to copy them into.")] = None, as_json: JsonFlag = False
) -> None:
    """List the examples, or copy them with --to."""
    installed = Path(sysconfig.get_path("data")) / "share" / "sordino" / "examples"  # of a wheel; else of a checkout
    places = (installed, Path(__file__).parents[3] / "examples")
    home = next((place for place in places if (place / "demo.py").is_file()), None)
    if home is None:
        needed, fix = f"the examples in {installed}", "install sordino from its wheel"
        raise ConfigError("an installation without examples", needed, fix)
    suffixes = (".py", ".toml", ".md", ".ipynb")
    files = [file.relative_to(home) for file in home.rglob("*") if file.is_file() and file.suffix in suffixes]
    hidden = re.compile(r"(^|/)(\.|__)[^/]*/|\.egg-info/")  # folders
    names = sorted(str(file) for file in files if not hidden.search(file.as_posix()))
    if to is not None:
        if to.exists():
            raise ConfigError(f"--to {to}, which exists", "a new folder", "choose another --to")
        for name in names:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(home / name, to / name)
    output(as_json, {"examples": names, "to": None if to is None else str(to)}, "\n".join(names))
