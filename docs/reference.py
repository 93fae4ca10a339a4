"""Writes docs/configuration.md from its template and the code: `make docs`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import sordino
from sordino.codec import Part
from sordino.data import datasets
from sordino.recipes import RECIPES, starters

HERE = Path(__file__).resolve().parent
WORDS = (  # how a Python annotation reads in a TOML reference
    (r"\b(?:\w+\.)+(?=\w)", ""),
    (r"tuple\[int, \.\.\.\]", "list of integers"),
    (r"tuple\[float, \.\.\.\]", "list of numbers"),
    (r"tuple\[Preparation, \.\.\.\]", "list of preparations"),
    (r"tuple\[int, int\]", "two integers"),
    (r"\bAverage\b", "{ growth, after }"),
    (r"\bRecordSampler\b", "record sampler"),
    (r"\bNorm\b", "1 or 2"),
    (r"Literal\[(.*?)\]", r"\1"),
    (r" \| None", ""),
    (r"\bfloat\b", "number"),
    (r"\bint\b", "integer"),
    (r"\bbool\b", "true/false"),
    (r"\bstr\b", "string"),
    (r"\bMaskSource\b", "mask source"),
    (r"\bSpec\b", "model"),
    (r"\bServerOptimizer\b", "server optimizer"),
    (r"\bPostprocess\b", "post-processing"),
    (r"\bStep\b", "encode step"),
    (r"\b(Schedule|Mechanism|Gradient|Sampler|Partitioner|Release|Strategy)\b", lambda m: m.group(1).lower()),
    (r" \| ", " or "),
    (r"'", '"'),
)
PAPERS = {
    r"[Pp]apers 000 and 004": "DP-Fed-LS and DP-LSSGD",
    r"[Pp]apers 000, 001, 004": "DP-Fed-LS and others",
    r"[Pp]apers 001, 002": "regression",
    r"[Pp]aper 000": "DP-Fed-LS",
    r"[Pp]aper 001": "private FL without a trusted server",
    r"[Pp]aper 002": "tuning local and global iterations",
    r"[Pp]aper 003": "DP-FedSAM",
    r"[Pp]aper 004": "DP-LSSGD",
}


def type_words(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    for pattern, word in WORDS:
        text = re.sub(pattern, word, text)
    return text


def value_words(value: Any) -> str:
    if isinstance(value, Part):
        return f"`{starters.toml_value(value)}`"
    if value is None:
        return "-"
    written = {bool: lambda: str(value).lower(), tuple: lambda: str(list(value)), str: lambda: f'"{value}"'}
    return f"`{written.get(type(value), lambda: value)()}`"


def default_words(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return value_words(field.default)
    return value_words(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def meaning(doc: str | None) -> str:
    text = inspect.cleandoc(doc or "").split("\n\n")[0].replace("\n", " ").strip()
    for pattern, name in PAPERS.items():
        text = re.sub(pattern, name, text)
    return text.replace("|", "\\|").replace("*", "\\*").replace("<-", "&lt;-").replace("<=", "&lt;=")


def family(cls: type[Part]) -> str:
    rows = ["| kind | keys (type, default) | meaning |", "|---|---|---|"]
    for kind, part in cls.members.items():
        keys = [f"`{f.name}` ({type_words(f.type)}, {default_words(f)})" for f in dataclasses.fields(part)]
        rows.append(f"| `{kind}` | {'<br>'.join(keys) or '-'} | {meaning(part.__doc__)} |")
    return "\n".join(rows)


def recipes() -> str:
    return "\n\n".join(recipe(name) for name in RECIPES)


def recipe(name: str) -> str:
    first = inspect.cleandoc(RECIPES[name].__doc__ or "").split("\n\n")[0].replace("\n", " ")
    rows = [f"#### `{name}`", "", f"`{first}`", "", "| key | type | default |", "|---|---|---|"]
    for p in inspect.signature(RECIPES[name]).parameters.values():
        default = "required" if p.default is p.empty else value_words(p.default)
        rows.append(f"| `{p.name}` | {type_words(p.annotation)} | {default} |")
    return "\n".join(rows)


def sets() -> str:
    rows = ["| name | data | options | licence |", "|---|---|---|---|"]
    for name, entry in datasets._SETS.items():
        parameters = inspect.signature(entry.read).parameters.values()
        options = [f"`{p.name}`" + ("" if p.default is p.empty else f" = {value_words(p.default)}") for p in parameters]
        rows.append(f"| `{name}` | {entry.description} | {', '.join(options) or '-'} | {entry.licence} |")
    return "\n".join(rows)


def main() -> None:
    for module in pkgutil.walk_packages(sordino.__path__, "sordino."):
        importlib.import_module(module.name)
    families = {cls.__name__: cls for cls in Part.__subclasses__()}
    text = (HERE / "configuration.template.md").read_text(encoding="utf-8")
    text = re.sub(r"%%family (\w+)%%", lambda m: family(families[m.group(1)]), text)
    text = text.replace("%%recipes%%", recipes()).replace("%%sets%%", sets())
    (HERE / "configuration.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
