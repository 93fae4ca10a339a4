"""Signatures of certificates: Ed25519 over certificate.json. `sordino run --sign` and `certify --key` call it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.codec import durable_files
from sordino.errors import CertificateError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem"
_SHOW = "openssl pkey -in key.pem -pubout -out public.pem"


def private_key(file: Path) -> Ed25519PrivateKey:
    """A key to sign with, as PEM without a password."""
    _check_installed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    found = _loaded(file, lambda data: load_pem_private_key(data, password=None))
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigError(f"{file}, which holds no private Ed25519 key without a password", "such a key as PEM", _MAKE)
    return found


def public_key(file: Path) -> Ed25519PublicKey:
    """A key to check with, as PEM."""
    _check_installed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    found = _loaded(file, load_pem_public_key)
    if not isinstance(found, Ed25519PublicKey):
        raise ConfigError(f"{file}, which holds no public Ed25519 key", "such a key as PEM", _SHOW)
    return found


def _check_installed() -> None:
    if find_spec("cryptography") is None:
        raise ConfigError("no library for signatures", "cryptography", "pip install 'sordino[sign]'")


def _loaded(file: Path, load: Callable[[bytes], object]) -> object:
    """What a PEM file holds; None where its reader gives up."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}, which cannot be read ({error.strerror})", "a key as PEM", _MAKE) from None
    try:
        return load(data)
    except Exception:  # ValueError, TypeError (a password), UnsupportedAlgorithm, whatever the library adds
        return None


def sign(target: Path, key: Ed25519PrivateKey) -> None:
    """certificate.sig, of the bytes of certificate.json in a folder; of a file NAME.json, NAME.sig beside it."""
    file = _signed(target)
    durable_files.write(file.with_suffix(".sig"), base64.b64encode(key.sign(durable_files.read(file))) + b"\n")


def check(target: Path, key: Ed25519PublicKey) -> None:
    """`CertificateError` unless the owner of the key has signed this very certificate."""
    from cryptography.exceptions import InvalidSignature

    file = _signed(target)
    name = file.with_suffix(".sig").name
    try:
        key.verify(base64.b64decode(durable_files.read(file.with_suffix(".sig"))), durable_files.read(file))
    except (InvalidSignature, ValueError):
        raise CertificateError(name, f"{name} is not this key's signature of {file.name}") from None


def _signed(target: Path) -> Path:
    return target / "certificate.json" if target.is_dir() else target
