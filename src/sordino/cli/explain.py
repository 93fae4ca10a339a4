"""`sordino explain`: the certificate in plain sentences."""

from __future__ import annotations

from sordino.cli.app import Certified, JsonFlag, Own, app, bring, say


@app.command()
def explain(target: Certified, own: Own = None, as_json: JsonFlag = False) -> None:
    """The certificate in plain sentences: what is protected, against whom, how strongly, what is assumed."""
    bring(own)
    from sordino.cli.certify import certified
    from sordino.report import explain as explaining

    found = certified(target)
    said = explaining.explain(found.certificate, explaining.ceilings(found.plan, found.facts))
    say(as_json, said, explaining.page(said))
