"""What is measured of Sordino alone: `python figures.py server` prints {"value"} or {"error"}; names in MEASURES."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

NAMES = "from sordino.loop import run; from sordino.recipes import dp_fed_avg; from sordino.task import Task"
ASKED = {
    "sampler": "poisson",
    "population": 10000,
    "cohort": 100,
    "rounds": 1000,
    "noise_multiplier": 1.0,
    "delta": 1e-5,
}
QUESTION = [word for name, value in ASKED.items() for word in (f"--{name}", str(value))]
TIMES = 5


def least(command: list[str]) -> float:
    """Wall seconds of a fresh process, the least of five."""
    return min(_timed(command) for _ in range(TIMES))


def _timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def imported(code: str) -> float:
    """Seconds that an import takes beyond `import torch`, the two interleaved."""
    pairs = [(_timed(_python("import torch")), _timed(_python(f"import torch; {code}"))) for _ in range(TIMES)]
    return min(both for _, both in pairs) - min(alone for alone, _ in pairs)


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def epsilon() -> float:
    """Seconds of the calculator as a user calls it; an error if it loads torch."""
    code = f"import sys; sys.argv = ['sordino', 'epsilon', *{QUESTION!r}]\nfrom sordino.cli import main\n"
    check = "try: main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules, 'torch'"
    subprocess.run(_python(code + check), check=True, capture_output=True)
    return least(_python(code + "main()"))


def server() -> float:
    """The server's share of a W3 round of ten clients with smoothing on, the least of two rounds.

    All of a round that is not the collecting of updates: cohort, noise, smoothing, step, diagnostics.
    """
    import torch
    from federations import FEDERATIONS, Federation
    from with_sordino_fl import plan_of, task_of

    from sordino.engines.inprocess import InProcess
    from sordino.loop import run
    from sordino.parts.encoding import LaplacianSmoothing

    torch.set_num_threads(1)
    work = FEDERATIONS["w3"]
    assert isinstance(work, Federation)
    plan = replace(plan_of(replace(work, cohort=10), 2), postprocess=(LaplacianSmoothing(1.0),))
    engine = Timed(InProcess())
    rounds = [done.seconds for done in run(plan, task_of(work), engine=engine)]
    return min(1 - own / whole for own, whole in zip(engine.seconds, rounds, strict=True))


class Timed:
    """An engine, with the seconds that each of its rounds took."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.offers, self.seconds, self.leads = engine, engine.offers, list[float](), True

    def prepare(self, *given: Any) -> Any:
        worker = self.engine.prepare(*given)
        collect = worker.collect

        def timed(job: Any) -> Any:
            began = time.perf_counter()
            collected = collect(job)
            self.seconds.append(time.perf_counter() - began)
            return collected

        worker.collect = timed
        return worker


MEASURES: dict[str, Callable[[], float]] = {
    "import": partial(imported, "import sordino"),
    "names": partial(imported, NAMES),
    "epsilon": epsilon,
    "server": server,
}


def main(name: str) -> None:
    try:
        found: dict[str, Any] = {"value": round(MEASURES[name](), 4)}
    except subprocess.CalledProcessError as error:
        found = {"error": (error.stderr.decode().strip().splitlines() or ["no output"])[-1][:200]}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
