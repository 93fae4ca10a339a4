"""Configurations with something wrong in them: every recipe's file, whole and written out, mutated."""

from __future__ import annotations

import copy
import math
import tomllib
from collections.abc import Iterator
from random import Random
from typing import Any

import tomli_w
from tests.codec.test_codec import EXAMPLES

from sordino import codec
from sordino.config import parse
from sordino.recipes import RECIPES, starters

Table = dict[str, Any]
Path = tuple[str | int, ...]
SHORTER = {"rounds": 2, "epochs": 1}  # so that what is accepted can be run


def bases() -> dict[str, str]:
    """The starter file of every recipe, and the same with its plan written out."""
    made: dict[str, str] = {}
    for name in RECIPES:
        table = tomllib.loads(starters.example(name))
        table["recipe"] |= {key: value for key, value in SHORTER.items() if key in table["recipe"]}
        table["recipe"]["rounds"] = 2
        made[name] = tomli_w.dumps(table)
        made[f"{name} as a plan"] = codec.to_toml(parse(table))
    return made


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in a table but the whole."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in entries:
        yield (*at, name)
        yield from paths(item, (*at, name))


def _holder(table: Table, path: Path) -> Any:
    holder: Any = table
    for name in path[:-1]:
        holder = holder[name]
    return holder


PARTS = [{"kind": kind, **keys} for family in EXAMPLES.values() for kind, keys in family.items()]
WHOLE = [0, 1, -1, 2, 3, 7, 10**6, 10**9, 10**12, 2**63 - 1, -(2**63)]
REAL = [0.0, -0.0, 0.5, 1.5, 1e-9, 1e-320, 1e-160, 1e160, 1e308, -1e308, math.inf, -math.inf, math.nan]
ODD: list[Any] = [True, "", "x", "poisson", "secure", [], [[]], {}, [1, 2], [0.5, "a"], {"kind": []}, {"kind": "x"}]
KEYS = ["kind", "lr", "sizes", "clip_norm", "epsilon", "noise", "client_epsilon", "zzz"]
MARKS = [*"[]{}=\"'.9e-\n#", "\u00e4", "\x00", "1e999", "0x1", "= 2026-01-01"]


def value(coins: Random, old: Any = None) -> Any:
    """For the place of `old`: mostly a number of its own type that is far off; else what seldom belongs there."""
    if isinstance(old, int | float) and coins.random() < 0.8:
        near = [old * 2, old + 1, old / 2, old * coins.uniform(0, 3)]
        return coins.choice([*map(type(old), near), *(WHOLE if type(old) is int else REAL)])
    pool: list[Any] = coins.choice([WHOLE, REAL, ODD, PARTS, PARTS])
    return copy.deepcopy(coins.choice(pool))


def mutated(base: str, coins: Random) -> str:
    """The base with one to three mistakes: in its values, or in its text."""
    return _text(base, coins) if coins.random() < 0.2 else _table(base, coins)


def _table(base: str, coins: Random) -> str:
    """Values replaced, left out, moved or added."""
    table = tomllib.loads(base)
    for _ in range(coins.choice([1, 1, 2, 3])):
        places = list(paths(table))
        if not places:
            break
        path, other, way = coins.choice(places), coins.choice(places), coins.randrange(10)
        holder = _holder(table, path)
        if way == 0:
            del holder[path[-1]]
        elif way == 1 and isinstance(holder, dict):
            holder[coins.choice(KEYS)] = value(coins)
        else:
            holder[path[-1]] = (
                copy.deepcopy(_holder(table, other)[other[-1]]) if way == 2 else value(coins, holder[path[-1]])
            )
    return tomli_w.dumps(table)


def _text(base: str, coins: Random) -> str:
    """Text cut out, doubled or overwritten."""
    for _ in range(coins.choice([1, 2, 3])):
        start, size = coins.randint(0, len(base)), coins.randint(0, 40)
        put = coins.choice(["", base[start : start + size] * 3, coins.choice(MARKS), coins.choice(MARKS)])
        base = base[:start] + put + base[start + size :]
    return base
