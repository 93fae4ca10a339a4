"""What each rank of the test's process group does: die once, all cases, the sabotage, and then `sordino run` itself."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.engines.cases import CASES, SABOTAGE, SECURE, Case
from tests.pages import titled
from tests.tiny import seeded

from sordino.cli import main
from sordino.engines.base import Collected
from sordino.engines.distributed import Distributed, Served, join
from sordino.errors import EngineError

RANK = int(os.environ["RANK"])


def together(case: Case) -> dict[str, Any]:
    """Played by all ranks; rank 0 has the result."""
    with suppress(Served):
        return case.play(Distributed(case.each))
    return {}


def sabotaged(case: Case, name: str) -> dict[str, Any]:
    """With the loop's own check of a sum switched off: the deviation of the noise must tell by itself."""
    with SABOTAGE[name](RANK), patch.object(Collected, "check", lambda *_: None):
        return together(case)


def header() -> dict[str, Any]:
    case = CASES["central noise"]
    with suppress(Served):
        rank = Distributed().prepare(case.plan, case.task, case.streams)
        rank.close()
        return {**rank.header, "threads": torch.get_num_threads()}
    return {}


def refusal() -> str:
    """Of ranks that do not hold the same model."""
    case = CASES["central noise"]
    case.task.model.load_state_dict(seeded(case.task.model, seed=RANK + 1).state_dict())
    try:
        Distributed().prepare(case.plan, case.task, case.streams)
    except EngineError as error:
        return str(error)
    return ""


def page() -> dict[str, Any]:
    """The script of docs/distributed.md, on every rank; rank 0 alone gets to its end."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with suppress(Served), redirect_stdout(io.StringIO()):
        exec(titled("docs/distributed.md", "ranks.py").text, names)
        return {"epsilon": names["result"].certificate["epsilon"], "rounds": len(names["result"].history)}
    return {}


def everything() -> dict[str, Any]:
    return {
        "honest": {name: together(case) for name, case in CASES.items()},
        "secure": {name: together(case) for name, (case, _) in SECURE.items()},
        "sabotaged": {name: sabotaged(CASES[name], name) for name in SABOTAGE},
        "sabotaged, secure": {name: sabotaged(SECURE[name][0], name) for name in SABOTAGE},
        "header": header(),
        "refusal": refusal(),
        "page": page(),
    }


def die_once() -> None:
    """The first time torchrun starts the ranks, one of them dies when they have met."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        join(torch.device("cpu"), 60.0)
        os._exit(RANK)


if __name__ == "__main__":
    die_once()
    found = everything()
    if RANK == 0:
        torch.save(found, Path(sys.argv[1]))
    sys.argv = ["sordino", *sys.argv[2:]]
    main()
