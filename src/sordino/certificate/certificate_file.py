"""Certificates as files: written in one way, read strictly, compared field by field, signed with Ed25519.

Runs, sweeps and `certify` call it; `sordino run --sign` and `certify --key` use the signatures of certificate.json.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.codec import durable_files
from sordino.errors import CertificateError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem"
_SHOW = "openssl pkey -in key.pem -pubout -out public.pem"


def schema() -> dict[str, Any]:
    """The JSON Schema of a certificate, of whatever ran."""
    file = resources.files("sordino.certificate").joinpath("certificate.schema.json")
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def text_of(made: dict[str, Any]) -> str:
    """A certificate as it is written."""
    return json.dumps(made, indent=2) + "\n"


def parse(text: str | bytes, name: str = "certificate.json") -> Any:
    """What a text says, if no name stands twice in it: of two equal ones a reader may take either."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [word for word, _ in pairs]
        twice = next((word for word in names if names.count(word) > 1), None)
        if twice is not None:
            raise CertificateError(twice, f"{twice} stands twice in {name}")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def compare_text(stored: Any, text: str, computed: dict[str, Any], name: str = "certificate.json") -> None:
    """Values first; then numbers as they are spelt, since two spellings of 17 digits can be one float."""
    compare(stored, computed)
    spelt, needed = (json.loads(one, parse_float=str, parse_int=str) for one in (text, text_of(computed)))
    compare(spelt, needed)
    if text != text_of(computed):
        raise CertificateError(name, f"{name} is not written as this program writes it")


def compare(stored: Any, computed: Any, field: str = "") -> None:
    """Raise `CertificateError` at the first field where the stored certificate differs from the computed one."""
    name = field or "certificate.json"
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        for key in [*computed, *(key for key in stored if key not in computed)]:
            inner = f"{field}.{key}" if field else str(key)
            if key not in stored or key not in computed:
                raise CertificateError(inner, f"{inner} is {'missing' if key in computed else 'not ours'}")
            compare(stored[key], computed[key], inner)
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for i, (one, other) in enumerate(zip(stored, computed, strict=True)):
            compare(one, other, f"{field}[{i}]")
    elif type(stored) is not type(computed) or stored != computed:
        raise CertificateError(name, f"{name} says {stored!r}, but what ran gives {computed!r}")


# ---- signatures -----------------------------------------------------------------------------------------------------


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


def check_signature(target: Path, key: Ed25519PublicKey) -> None:
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
