"""`sordino certify`: recompute the certificate from everything in a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.cli.app import JsonFlag, Own, RunPath, app, bring, say


@app.command()
def certify(
    folder: RunPath,
    key: Annotated[Path | None, typer.Option(help="Also check the signature, with this public key (PEM).")] = None,
    sign: Annotated[Path | None, typer.Option(help="Sign what was certified with this Ed25519 key (PEM).")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Recompute the certificate from everything in the folder; exit 1 on any mismatch."""
    bring(own)
    from sordino.runs import signature
    from sordino.runs.folder import RunFolder

    owner = None if key is None else signature.public_key(key)
    signer = None if sign is None else signature.private_key(sign)
    certificate = RunFolder.open(folder).certify()
    if signer is not None:
        signature.sign(folder, signer)
    if owner is not None:
        signature.check(folder, owner)
    signed = {"signed": True} if owner is not None else {}
    said = "certified, and signed with this key: " if owner is not None else "certified: "
    say(as_json, {"certified": True, **signed, **certificate}, said + guarantee(certificate))


def guarantee(made: dict[str, Any]) -> str:
    """The certificate's first line in words."""
    if made["epsilon"] is None:
        return f"no guarantee (unit {made['unit']}, relation {made['relation']})"
    return f"epsilon {made['epsilon']:.4g}, delta {made['delta']:.3g}, unit {made['unit']}, relation {made['relation']}"
