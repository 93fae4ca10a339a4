"""`sordino explain`: the certificate in plain sentences."""

from __future__ import annotations

from sordino.cli.app import JsonFlag, Own, RunPath, app, bring, say


@app.command()
def explain(folder: RunPath, own: Own = None, as_json: JsonFlag = False) -> None:
    """The certificate in plain sentences: what is protected, against whom, how strongly, what is assumed."""
    bring(own)
    from sordino.report import explain as explaining
    from sordino.runs.folder import RunFolder

    opened = RunFolder.open(folder)
    certificate = opened.certify()
    found = explaining.explain(certificate, explaining.ceilings(opened.config().plan, opened.facts()))
    say(as_json, found, explaining.page(found))
