"""`sordino explain`: the certificate in plain sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.cli.app import Certified, JsonFlag, Own, app, bring, say

if TYPE_CHECKING:
    from sordino.plan import Plan
    from sordino.privacy.facts import Facts


@app.command()
def explain(target: Certified, own: Own = None, as_json: JsonFlag = False) -> None:
    """The certificate in plain sentences: what is protected, against whom, how strongly, what is assumed."""
    bring(own)
    from sordino.report import explain as explaining
    from sordino.tuning import shown

    if shown.is_sweep(target):
        whole = shown.explained(target)
        return say(as_json, whole, shown.page(whole))
    certificate, plan, facts = certified_with_plan(target)
    said = explaining.explain(certificate, explaining.ceilings(plan, facts))
    return say(as_json, said, explaining.page(said))


def certified_with_plan(target: Path) -> tuple[dict[str, Any], Plan, Facts]:
    """The certificate, if it is what the rest of the folder or of the file gives; and what it follows from."""
    from sordino.optim import saved
    from sordino.runs.folder import RunFolder

    if target.is_file():
        found = saved.certify(target)
        return found.certificate, found.plan, found.facts
    folder = RunFolder.open(target)
    made, held = folder.certify(), folder.contents()
    return made, held.config.plan, folder.facts(held)
