"""`sordino certify`: recompute a certificate from everything in a run's folder, or from a loop's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.cli.app import Certified, JsonFlag, Own, app, bring, say


@app.command()
def certify(
    target: Certified,
    key: Annotated[Path | None, typer.Option(help="Also check the signature, with this public key (PEM).")] = None,
    sign: Annotated[Path | None, typer.Option(help="Sign what was certified with this Ed25519 key (PEM).")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Recompute the certificate from everything in the folder, or from the loop's file; exit 1 on any mismatch."""
    bring(own)
    from sordino.runs import signature

    owner = None if key is None else signature.public_key(key)
    signer = None if sign is None else signature.private_key(sign)
    certificate = certified(target)
    if signer is not None:
        signature.sign(target, signer)
    if owner is not None:
        signature.check(target, owner)
    signed = {"signed": True} if owner is not None else {}
    said = "certified, and signed with this key: " if owner is not None else "certified: "
    limits = {} if certificate["loop"] is None else {"proved": LOOP}
    told = "; ".join([said + guarantee(certificate), *limits.values()])
    say(as_json, {"certified": True, **limits, **signed, **certificate}, told)


LOOP = "this follows from the plan and the counts in the file; a loop keeps no chain of charges that would show more"


def certified(target: Path) -> dict[str, Any]:
    """The certificate of a run's folder or of a loop's file, if it is what the rest of it gives."""
    if target.is_file():
        from sordino.optim import saved

        return saved.certify(target).certificate
    from sordino.runs.folder import RunFolder

    return RunFolder.open(target).certify()


def guarantee(made: dict[str, Any]) -> str:
    """The certificate's first line in words."""
    if made["epsilon"] is None:
        return f"no guarantee (unit {made['unit']}, relation {made['relation']})"
    return f"epsilon {made['epsilon']:.4g}, delta {made['delta']:.3g}, unit {made['unit']}, relation {made['relation']}"
