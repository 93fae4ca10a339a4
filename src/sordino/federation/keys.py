"""Keys and certificates of a federation on one machine; across machines every party makes its own (docs/deploy.md).

A CA signs the server's certificate, under which all traffic is encrypted; every node has a key pair on P-384, whose
public half is registered under its silo's name.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any

from sordino.errors import ConfigError
from sordino.federation.flower_api import flower

DAYS = 30


def write_private(path: Path, data: bytes) -> Path:
    """Write a file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    return path


def _key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    data: bytes = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return data


def write_node_key(path: Path) -> Path:
    """A node's key pair, as `ssh-keygen -t ecdsa -b 384` writes it, in path and path.pub; an existing key is kept."""
    from cryptography.hazmat.primitives import serialization as form

    if not path.exists():
        key = _key()
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        write_private(path.with_name(path.name + ".pub"), public + b"\n")
        write_private(path, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    return path


def _signed(subject: str, key: Any, issuer: str, by: Any, *, ca: bool) -> bytes:
    """A certificate of `subject` for the loopback, signed with the key `by` of `issuer`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.x509.oid import NameOID

    name, signer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer))
    now = datetime.datetime.now(datetime.UTC)
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(signer, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
    )
    data: bytes = made.sign(by, hashes.SHA256()).public_bytes(form.Encoding.PEM)
    return data


def write_certificates(folder: Path) -> Path:
    """ca.crt, server.crt and server.key for a server on the loopback; the CA's own key is not kept."""
    if not (folder / "server.crt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        authority, server = _key(), _key()
        write_private(folder / "ca.crt", _signed("sordino", authority, "sordino", authority, ca=True))
        write_private(folder / "server.key", _pem(server))
        write_private(folder / "server.crt", _signed("localhost", server, "sordino", authority, ca=False))
    return folder


def read_public_key(path: Path) -> bytes:
    """The public half of a node's key in the form that Flower registers."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        held = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}, which is no readable public key ({error})", "NAME.pub of ssh-keygen") from None
    data: bytes = flower().public_key_to_bytes(held)
    return data
