"""`sordino epsilon`: the calculator of `calculator.py` as a command; needs no torch and no data."""

from __future__ import annotations

from typing import Annotated

import typer

from sordino.cli.app import JsonFlag, app, say


@app.command()
def epsilon(
    sampler: Annotated[str, typer.Option(help="poisson | fixed | full | roundrobin | shuffle")],
    population: Annotated[int, typer.Option(help="How many clients there are (shuffle: how many reports).")],
    rounds: Annotated[int, typer.Option(help="How many rounds.")] = 1,
    delta: Annotated[float | None, typer.Option(help="Default: population ** -1.1, at most 1e-3")] = None,
    cohort: Annotated[float | None, typer.Option(help="Clients per round; for poisson on average.")] = None,
    multiplier: Annotated[float | None, typer.Option(help="Noise scale / clip radius.")] = None,
    mechanism: Annotated[str, typer.Option(help="gaussian | laplace")] = "gaussian",
    epsilon0: Annotated[float | None, typer.Option(help="shuffle: epsilon of one message.")] = None,
    cap: Annotated[int | None, typer.Option(help="poisson: most clients a round keeps.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The calculator: what a sampler, a noise and a number of rounds cost."""
    from sordino.cli import calculator

    question = calculator.Question(
        sampler=sampler,
        population=population,
        cohort=cohort,
        rounds=rounds,
        multiplier=multiplier,
        delta=delta,
        mechanism=mechanism,
        epsilon0=epsilon0,
        cap=cap,
    )
    found = calculator.answer(question)
    say(as_json, found, calculator.text(found))
