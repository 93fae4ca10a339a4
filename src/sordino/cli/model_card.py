"""`sordino model-card`: a run as a page that Hugging Face and people read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.app import Certified, JsonFlag, Own, app, bring, say
from sordino.cli.certify import AboutFile, described, put, to_write
from sordino.cli.explain import certified_with_plan


@app.command("model-card")
def model_card(
    target: Certified,
    out: Annotated[Path, typer.Option(help="The card; Hugging Face wants it as README.md beside the model.")],
    about: AboutFile = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a model card with the certificate in it: the guarantee, whom one has to trust, and the figures."""
    bring(own)
    from sordino.report import explain as explaining
    from sordino.report.model_card import card

    known = described(about)
    certificate, plan, facts = certified_with_plan(target)
    said = explaining.explain(certificate, explaining.ceilings(plan, facts))
    put(out, card(certificate, said, known, _dataset(target)))
    say(as_json, {"card": str(out), "to_be_written": known.open}, f"model card: {out}{to_write(known.open)}")


def _dataset(target: Path) -> str:
    from sordino.runs.folder import RunFolder

    return "a loop's own" if target.is_file() else RunFolder.open(target).config().task.dataset
