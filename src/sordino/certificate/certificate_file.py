"""Certificate files: canonical text, strict parsing, comparison field by field, and Ed25519 signatures.

Called by runs, sweeps and `certify`; `sordino run --sign` and `certify --key` use the signatures.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.codec import durable_files
from sordino.errors import CertificateError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MAKE = "create one: openssl genpkey -algorithm ed25519 -out key.pem"
_SHOW = "create it: openssl pkey -in key.pem -pubout -out public.pem"
_RESTORE = "; fix: restore the unchanged file"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a certificate."""
    file = resources.files("sordino.certificate").joinpath("certificate.schema.json")
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def text_of(made: dict[str, Any]) -> str:
    """Return the canonical JSON text of a certificate."""
    return json.dumps(made, indent=2) + "\n"


def parse(text: str | bytes, name: str = "certificate.json") -> Any:
    """Parse the JSON of a certificate; refuse a key that occurs twice in one object, since readers differ on it."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [word for word, _ in pairs]
        twice = next((word for word in names if names.count(word) > 1), None)
        if twice is not None:
            raise CertificateError(twice, f"the key {twice!r} occurs twice in {name}{_RESTORE}")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def compare_text(stored: Any, text: str, computed: dict[str, Any], name: str = "certificate.json") -> None:
    """Raise `CertificateError` unless the text of the stored certificate equals that of the computed one."""
    compare(stored, computed)
    compare(*(json.loads(one, parse_float=str, parse_int=str) for one in (text, text_of(computed))))
    if text != text_of(computed):
        raise CertificateError(name, f"{name} is not in the canonical format of Sordino's certificates{_RESTORE}")


def compare(stored: Any, computed: Any, field: str = "") -> None:
    """Raise `CertificateError` at the first field where the stored certificate differs from the computed one."""
    name = field or "certificate.json"
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        for key in [*computed, *(key for key in stored if key not in computed)]:
            inner = f"{field}.{key}" if field else str(key)
            if key not in stored or key not in computed:
                what = "missing" if key in computed else "not a field of this certificate"
                raise CertificateError(inner, f"{inner} is {what}{_RESTORE}")
            compare(stored[key], computed[key], inner)
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for i, (one, other) in enumerate(zip(stored, computed, strict=True)):
            compare(one, other, f"{field}[{i}]")
    elif type(stored) is not type(computed) or stored != computed:
        raise CertificateError(name, f"{name} is {stored!r}, but the run's files give {computed!r}{_RESTORE}")


# ---- signatures -----------------------------------------------------------------------------------------------------


def private_key(file: Path) -> Ed25519PrivateKey:
    """Read a private Ed25519 key from a PEM file without a password."""
    data = _read_key(file)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with suppress(Exception):  # ValueError, TypeError (a password), UnsupportedAlgorithm, whatever the library adds
        found = load_pem_private_key(data, password=None)
        if isinstance(found, Ed25519PrivateKey):
            return found
    needed = "a private Ed25519 key in PEM format without a password"
    raise ConfigError(f"{file}, which is no private Ed25519 key", needed, _MAKE)


def public_key(file: Path) -> Ed25519PublicKey:
    """Read a public Ed25519 key from a PEM file."""
    data = _read_key(file)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    with suppress(Exception):
        found = load_pem_public_key(data)
        if isinstance(found, Ed25519PublicKey):
            return found
    raise ConfigError(f"{file}, which is no public Ed25519 key", "a public Ed25519 key in PEM format", _SHOW)


def _read_key(file: Path) -> bytes:
    if find_spec("cryptography") is None:
        fix = "install it: pip install 'sordino[sign]'"
        raise ConfigError("no library for signatures", "the package cryptography", fix)
    try:
        return file.read_bytes()
    except OSError as error:
        found = f"{file}, which cannot be read ({error.strerror})"
        raise ConfigError(found, "a key file in PEM format", _MAKE) from None


def sign(target: Path, key: Ed25519PrivateKey) -> None:
    """Add a signature to certificate.sig beside certificate.json in a folder, or to NAME.sig beside a file NAME.json.

    The file has one line for each signer: the signature and the public key, both in base64. Lines with signatures of
    an earlier content of the certificate are dropped.
    """
    file = _signed(target)
    data, public, path = durable_files.read(file), key.public_key(), file.with_suffix(".sig")
    line = f"{_base64(key.sign(data))} {_base64(public.public_bytes_raw())}"
    others = [one for one in _lines(path) if one.split()[1:] != line.split()[1:] and _own_key_signs(one, data)]
    durable_files.write(path, "".join(f"{one}\n" for one in (*others, line)).encode())


def check_signature(target: Path, key: Ed25519PublicKey) -> int:
    """Return the number of signatures of a certificate; refuse it if none of them was made with this key."""
    file = _signed(target)
    path, data = file.with_suffix(".sig"), durable_files.read(file)
    lines = durable_files.read(path).decode("utf-8", "replace").splitlines()
    if not any(_signs(line.split(), data, key) for line in lines):
        what = "this key's signature" if len(lines) < 2 else f"a signature of this key, among its {len(lines)},"
        fix = "pass the signer's public key, or restore both files"
        raise CertificateError(path.name, f"{path.name} is not {what} of {file.name}; fix: {fix}")
    return len(lines)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _lines(path: Path) -> list[str]:
    return durable_files.read(path).decode("utf-8", "replace").splitlines() if path.exists() else []


def _signs(words: list[str], data: bytes, key: Ed25519PublicKey) -> bool:
    """Return whether the first word is this key's signature of `data`."""
    from cryptography.exceptions import InvalidSignature

    with suppress(InvalidSignature, ValueError):
        key.verify(base64.b64decode(words[0] if words else ""), data)
        return True
    return False


def _own_key_signs(line: str, data: bytes) -> bool:
    """Return whether a line's signature of `data` is by the key that the line names; lines without one are dropped."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    with suppress(ValueError):
        words = line.split()
        return len(words) == 2 and _signs(words, data, Ed25519PublicKey.from_public_bytes(base64.b64decode(words[1])))
    return False


def _signed(target: Path) -> Path:
    return target / "certificate.json" if target.is_dir() else target
