"""Keys of a federation: node keys, signatures that identify silos, and TLS certificates for one machine.

Each silo has one key pair (ECDSA, P-384). Its public key is registered at the SuperLink under the silo's name, and is
pinned in `[federation] keys` of the file that server and silos share. A silo signs each reply together with the
request, and signs the public keys that it sends in a secure sum. So neither the SuperLink, nor a proxy that terminates
TLS, nor another silo can send messages in its name. Across machines each party creates its own keys (docs/deploy.md).
Called by `app`, `silo_service`, `secagg` and `cli`.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.config import FederationSpec, load_config
from sordino.errors import ConfigError, DataError
from sordino.federation.flower_api import flower

DAYS = 30  # validity of a certificate on the loopback
SIGNED = b"sordino signed 1\n"  # then two bytes with the length of the signature, the signature, the reply


# ---- signatures ------------------------------------------------------------------------------------------------------


@codec.hides_values
@dataclass(frozen=True)
class Signer:
    """Private key of a silo, and the pinned public keys of all silos by client number.

    Without pinned keys, signatures are not checked.
    """

    private: Any = None
    pinned: Mapping[int, Any] = field(default_factory=dict)

    def sign(self, data: bytes) -> bytes:
        """Return this silo's signature of `data` (ECDSA with SHA-384); empty bytes if there is no private key."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return b"" if self.private is None else bytes(self.private.sign(data, ec.ECDSA(hashes.SHA384())))

    def signed_by(self, client: int, signature: bytes, data: bytes) -> bool:
        """Return whether a client's pinned key made this signature; always true if no keys are pinned."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        if not self.pinned:
            return True
        try:
            self.pinned[client].verify(signature, data, ec.ECDSA(hashes.SHA384()))
        except (InvalidSignature, KeyError):
            return False
        return True

    def signed_answer(self, request: bytes, answer: bytes) -> bytes:
        """Return a reply with this silo's signature in front, which covers the reply and the request's SHA-256."""
        signature = self.sign(hashlib.sha256(request).digest() + answer)
        return SIGNED + len(signature).to_bytes(2, "little") + signature + answer

    def answer_of(self, client: int, request: bytes, data: bytes) -> bytes:
        """Return the reply in the bytes of `signed_answer`; refuse one that the client's pinned key did not sign."""
        start = len(SIGNED) + 2
        end = start + int.from_bytes(data[len(SIGNED) : start], "little")
        answer = data[end:]
        if not data.startswith(SIGNED) or len(data) < end:
            needed = "a reply of `sordino silo serve`"
            raise DataError("a reply without a signature", needed, "use the same version of sordino everywhere")
        if not self.signed_by(client, data[start:end], hashlib.sha256(request).digest() + answer):
            found = "a reply that the silo's pinned key did not sign"
            raise DataError(found, "a signature by the key in [federation]", "check who has that silo's key")
        return answer


def signer_of(spec: FederationSpec | None, private: Path | None = None) -> Signer:
    """Return the signer of a silo with its private key file, or of the server; `spec` has the pinned keys."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    named = [] if spec is None else [(spec.silos.index(name), text) for name, text in spec.keys.items()]
    keys = {place: load_public(text.encode()) for place, text in named}
    if private is None:
        return Signer(None, keys)
    try:
        return Signer(load_ssh_private_key(private.read_bytes(), None), keys)
    except (OSError, ValueError) as error:
        found = f"{private}, which is no readable private key ({error})"
        raise ConfigError(found, "the silo's node key", "write it with key.sh") from None


def check_pinned(spec: FederationSpec) -> None:
    """Refuse a federation with secure noise if a silo's public key is not pinned."""
    missing = [name for name in spec.silos if name not in spec.keys]
    if missing:
        fix = "run sordino federation pin fed.toml NAME.pub for each silo"
        raise ConfigError(f"no public key of {', '.join(missing)} in [federation]", "a pinned key of every silo", fix)


# ---- pinned keys in a file -------------------------------------------------------------------------------------------


def load_public(text: bytes) -> Any:
    """Parse a public key from its OpenSSH line; raise `ValueError` if it is no ECDSA key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    held = load_ssh_public_key(text)
    if not isinstance(held, ec.EllipticCurvePublicKey):
        raise ValueError("no ECDSA key")
    return held


def public_text(path: Path) -> str:
    """Return the public key of a file NAME.pub in one line, without its comment."""
    try:
        text = path.read_bytes()
        load_public(text)
    except (OSError, ValueError) as error:
        found = f"{path}, which is no readable public key ({error})"
        raise ConfigError(found, "a public key file NAME.pub of ssh-keygen", "write it with key.sh") from None
    return " ".join(text.decode().split()[:2])


def registered_form(text: str) -> bytes:
    """Return a pinned public key as the bytes that Flower registers for a node."""
    data: bytes = flower().public_key_to_bytes(load_public(text.encode()))
    return data


def fingerprint(text: str) -> str:
    """Return a public key's fingerprint, as `ssh-keygen -lf NAME.pub` prints it."""
    digest = hashlib.sha256(base64.b64decode(text.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def pin(file: Path, public: Sequence[Path]) -> dict[str, str]:
    """Write public keys NAME.pub into `[federation] keys` of a file; return the fingerprints of all pinned keys."""
    text, names = file.read_text("utf-8") if file.exists() else "", load_config(file).federation
    if names is None:
        needed = "a [federation] section with the silos' names"
        raise ConfigError(f"{file} without [federation]", needed, "add the section to the file")
    for path in public:
        if path.stem not in names.silos:
            fix = codec.nearest(path.stem, list(names.silos))
            raise ConfigError(f"{path}", "a file NAME.pub with the name of a silo", fix)
        text = re.sub(rf"(?m)^keys\.{re.escape(path.stem)} *=.*\n", "", text)
        line = f'keys.{path.stem} = "{public_text(path)}"\n'
        text = re.sub(r"(?m)^\[federation\].*\n", lambda head, line=line: head.group() + line, text, count=1)  # type: ignore[misc]
    if public:
        draft = file.with_name(f"{file.name}.new")
        draft.write_text(text, "utf-8")
        try:
            held = load_config(draft).federation
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
        names = held or names
    return {name: fingerprint(names.keys[name]) for name in names.silos if name in names.keys}


# ---- keys and certificates of a federation on one machine ------------------------------------------------------------


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _private_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def write_node_key(path: Path) -> None:
    """Write a node's key pair (ECDSA, P-384, OpenSSH format) to path and path.pub, unless `path` exists."""
    from cryptography.hazmat.primitives import serialization as form

    if not path.exists():
        key = _private_key()
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        write_private(path.with_name(path.name + ".pub"), public + b"\n")
        write_private(path, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))


def write_certificates(folder: Path) -> Path:
    """Write TLS certificates ca.crt and server.crt, and server.key, for a server on the loopback interface.

    The private key of the certificate authority is not written.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.x509.oid import NameOID

    if (folder / "server.crt").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    authority, server, now = _private_key(), _private_key(), datetime.datetime.now(datetime.UTC)
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]

    def signed(subject: str, key: Any, ca: bool) -> bytes:
        name, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, "sordino"))
        builder = (
            x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        )
        data: bytes = builder.sign(authority, hashes.SHA256()).public_bytes(form.Encoding.PEM)
        return data

    pem = server.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    write_private(folder / "ca.crt", signed("sordino", authority, ca=True))
    write_private(folder / "server.key", pem)
    write_private(folder / "server.crt", signed("localhost", server, ca=False))
    return folder
