"""Promises of the large sets: read from files of their own format, served over HTTP, checked, and never run."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.io import savemat

from sordino.data import images, shakespeare, tabular
from sordino.data.datasets import load
from sordino.data.files import Source
from sordino.errors import DataError

Served = Callable[[Source, bytes], Source]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The same source with its address, and its sum where it has one, replaced by those of a local file."""
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def serve(source: Source, content: bytes) -> Source:
            name = Path(source.path).name
            (folder / name).write_bytes(content)
            kind = source.digest.partition(":")[0]
            digest = f"{kind}:{hashlib.new(kind, content).hexdigest()}" if kind else ""
            return Source(source.path, digest, f"http://127.0.0.1:{server.server_port}/{name}")

        yield serve
        server.shutdown()
        thread.join()


# ---- SVHN ------------------------------------------------------------------------------------------------------------


def _mat(count: int, seed: int) -> tuple[bytes, NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8), rng.integers(1, 11, (count, 1), dtype=np.uint8)
    y[0] = 10  # the digit zero
    out = io.BytesIO()
    savemat(out, {"X": x, "y": y}, do_compression=True)
    return out.getvalue(), x, y


@pytest.mark.parametrize("extra", [False, True])
def test_svhn_is_read_from_its_downloads(served: Served, extra: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: _mat(count, i) for i, (name, count) in enumerate({"train": 6, "test": 3, "extra": 9}.items())}
    sources = {name: served(images.SVHN[name], made[name][0]) for name in made}
    monkeypatch.setattr(images, "SVHN", sources)
    data = load("svhn", extra=extra)
    assert (data.x.shape, data.test_x.shape) == ((15 if extra else 6, 3, 32, 32), (3, 3, 32, 32))
    assert data.y[0] == 0
    assert data.y[1:6].tolist() == (made["train"][2][1:, 0] % 10).tolist()
    pixel = made["train"][1][5, 7, 2, 4]  # row 5, column 7, blue, fifth image
    assert data.x[4, 2, 5, 7] * 255 == pytest.approx(float(pixel))


def test_a_file_that_is_no_mat_is_one_sentence(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SVHN", {name: served(one, b"<html>no</html>") for name, one in images.SVHN.items()})
    with pytest.raises(DataError, match="SVHN file that cannot be read"):
        load("svhn")


# ---- CIFAR-100 -------------------------------------------------------------------------------------------------------


def _tar(members: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, value in members.items():
            packed = pickle.dumps(value, protocol=3)
            entry = tarfile.TarInfo(name)
            entry.size = len(packed)
            tar.addfile(entry, io.BytesIO(packed))
    return out.getvalue()


def _hundred(count: int) -> dict[bytes, Any]:
    pixels = np.arange(count * 3072, dtype=np.int64).reshape(count, 3072).astype(np.uint8)
    fine = [i % 100 for i in range(count)]
    return {b"data": pixels, b"fine_labels": fine, b"coarse_labels": [label % 20 for label in fine]}


@pytest.mark.parametrize(("coarse", "classes"), [(False, 100), (True, 20)])
def test_cifar100_is_read_from_its_archive(
    served: Served, coarse: bool, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = _tar({"cifar-100-python/train": _hundred(120), "cifar-100-python/test": _hundred(30)})
    monkeypatch.setattr(images, "CIFAR100", served(images.CIFAR100, packed))
    data = load("cifar100", coarse=coarse)
    assert (data.x.shape, data.test_x.shape, data.classes) == ((120, 3, 32, 32), (30, 3, 32, 32), classes)
    assert data.y[:120].tolist() == [i % 100 % classes for i in range(120)]


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_an_archive_runs_no_code_and_writes_no_file(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = {"../../out": _hundred(1), "cifar-100-python/train": {b"data": _Evil()}, "cifar-100-python/test": _hundred(1)}
    monkeypatch.setattr(images, "CIFAR100", served(images.CIFAR100, _tar(bad)))
    with pytest.raises(DataError, match="arrays only"):
        load("cifar100")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path.parent.parent / "out").exists()


@pytest.mark.parametrize("packed", [b"", b"no archive", _tar({"else": 1})])
def test_another_archive_is_one_sentence(served: Served, packed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "CIFAR100", served(images.CIFAR100, packed))
    with pytest.raises(DataError, match="CIFAR") as caught:
        load("cifar100")
    assert "\n" not in str(caught.value)


# ---- EMNIST ----------------------------------------------------------------------------------------------------------


def _idx(values: NDArray[np.uint8]) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    return gzip.compress(head + values.tobytes())


def _emnist(split: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as held:
        for part, count in (("train", len(labels)), ("test", 2)):
            held.writestr(f"gzip/emnist-{split}-{part}-images-idx3-ubyte.gz", _idx(images[:count]))
            held.writestr(f"gzip/emnist-{split}-{part}-labels-idx1-ubyte.gz", _idx(labels[:count]))
    return out.getvalue()


@pytest.mark.parametrize(("split", "first", "classes"), [("balanced", 0, 47), ("letters", 1, 26), ("byclass", 0, 62)])
def test_emnist_is_read_from_its_archive_upright(
    served: Served, split: str, first: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    packed = _emnist(split, pixels, np.arange(first, first + 5, dtype=np.uint8))
    monkeypatch.setattr(images, "EMNIST", served(images.EMNIST, packed))
    data = load("emnist", split=split)
    assert (data.x.shape, data.test_x.shape, data.classes) == ((5, 1, 28, 28), (2, 1, 28, 28), classes)
    assert data.y.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(np.rint(data.x[3, 0] * 255), pixels[3].T)


def test_a_split_that_is_none_is_named(served: Served) -> None:
    with pytest.raises(DataError, match="split = 'capitals'"):
        load("emnist", split="capitals")


def test_a_wrong_sum_is_refused_before_anything_is_parsed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    one = served(images.EMNIST, b"something else")
    monkeypatch.setattr(images, "EMNIST", Source(one.path, images.EMNIST.digest, one.url))
    with pytest.raises(DataError, match="58c8d27c78d21e728a6bc7b3cc06412e"):
        load("emnist")


# ---- LEAF ------------------------------------------------------------------------------------------------------------


def _leaf(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    for part, count in (("train", 4), ("test", 1)):
        (folder / part).mkdir(parents=True)
        users = [f"f{i:04}_0{i}" for i in range(3)]
        data = {u: {"x": [[i / 255] * 784] * count, "y": [i + k for k in range(count)]} for i, u in enumerate(users)}
        held = {"users": users[::-1], "num_samples": [count] * 3, "user_data": data}
        change(held)
        (folder / part / "all_data_0_niid.json").write_text(json.dumps(held))
    return folder


def test_femnist_is_read_as_leaf_writes_it(tmp_path: Path) -> None:
    data = load("femnist_leaf", path=str(_leaf(tmp_path / "leaf")), writers=2)
    assert (data.x.shape, data.test_x.shape, data.classes) == ((8, 1, 28, 28), (2, 1, 28, 28), 62)
    assert data.groups is not None
    assert data.groups.tolist() == [0] * 4 + [1] * 4  # writers by name, whatever their order in the file
    assert data.y.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert np.rint(data.x[4:] * 255).max() == 1


@pytest.mark.usefixtures("served")
def test_leafs_folder_below_the_cache_stands_in_for_the_packed_subset(tmp_path: Path) -> None:
    _leaf(tmp_path / "cache" / shakespeare.FOLDER)
    with pytest.raises(DataError, match="0 writers with at least 100 training images"):
        load("femnist")
    assert len(load("femnist_leaf").y) == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.pop("users"),
        lambda held: held["user_data"]["f0001_01"]["y"].append(1),
        lambda held: held["user_data"]["f0001_01"].update(y=[99] * len(held["user_data"]["f0001_01"]["y"])),
        lambda held: held["user_data"]["f0001_01"]["x"][0].__setitem__(0, 255.0),
        lambda held: held["user_data"]["f0001_01"]["x"][0].pop(),
    ],
    ids=["keys", "lengths", "labels", "range", "pixels"],
)
def test_other_json_is_one_sentence(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(DataError, match="cannot be read") as caught:
        load("femnist_leaf", path=str(_leaf(tmp_path / "leaf", change)))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("served")
def test_without_leafs_files_the_way_to_them_is_said() -> None:
    with pytest.raises(DataError, match="no LEAF FEMNIST") as caught:
        load("femnist_leaf")
    assert "preprocess.sh" in caught.value.fix


# ---- Shakespeare and the loans ---------------------------------------------------------------------------------------

PLAY = """the first line is left out
THE SONNETS

by William Shakespeare


A MIDSUMMER NIGHT'S DREAM

by William Shakespeare

  BOTTOM. Line one that goes on for some while, and then for some while longer,
    line two  with two blanks in it, again long enough to make up some eighty
    and three.
  Puck. One.
  QUINCE. Two lines,
    no more, and they are of a length that would do if only there were three of them here.

THE COMEDY OF ERRORS

by William Shakespeare

ACT I. SCENE 1
EGEON. Proceed, Solinus, to procure my fall, And by the doom of death end woes and all.
Merchant of Syracuse, plead no more;
I am not partial to infringe our laws.
<<a notice>>
nobody says this
DUKE. Hm.
"""


def test_roles_follow_the_rule() -> None:
    found = shakespeare.roles_of(PLAY)
    assert list(found) == ["A_MIDSUMMER_NIGHT_S_DREAM_BOTTOM", "THE_COMEDY_OF_ERRORS_EGEON"]
    assert "line two with two blanks in it" in found["A_MIDSUMMER_NIGHT_S_DREAM_BOTTOM"]
    assert found["A_MIDSUMMER_NIGHT_S_DREAM_BOTTOM"].endswith("and three. ")
    assert "nobody says" not in found["THE_COMEDY_OF_ERRORS_EGEON"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_shakespeare_is_read_from_gutenbergs_archive(
    served: Served, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as held:
        held.writestr("100.txt", PLAY.replace("\n", ending))
    monkeypatch.setattr(shakespeare, "TEXT_SUM", hashlib.sha256(PLAY.encode()).hexdigest())
    monkeypatch.setattr(shakespeare, "PLAYS", served(shakespeare.PLAYS, out.getvalue()))
    data = load("shakespeare", roles=2, per_role=5, least=20)
    assert data.x.shape[1] == 80
    assert data.groups is not None
    assert set(data.groups.tolist()) == {0, 1}


def test_another_text_of_shakespeare_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as held:
        held.writestr("100.txt", PLAY)
    for content in (out.getvalue(), b"<html>moved</html>"):
        monkeypatch.setattr(shakespeare, "PLAYS", served(shakespeare.PLAYS, content))
        with pytest.raises(DataError, match=r"1994|100\.txt") as caught:
            load("shakespeare")
        assert "load again" in caught.value.fix


def test_the_archive_and_the_packed_roles_are_the_same_roles(real_data: Path) -> None:
    """Every one of LEAF's 1,130 roles, to the last character."""
    raw = real_data / "shakespeare" / "gutenberg_etext100_1994.txt.gz"
    if not raw.is_file():
        pytest.skip("no text of Shakespeare in the data folder")
    found = shakespeare.roles_of(shakespeare.verified_text(gzip.decompress(raw.read_bytes())))
    lines = gzip.decompress((real_data / "shakespeare" / "roles.jsonl.gz").read_bytes()).splitlines()
    assert found == {role["role"]: role["text"] for role in map(json.loads, lines)}


def test_loans_with_other_numbers_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = list(tabular.LOANS_COLUMNS)
    row = ",".join(["1"] * (len(columns) + 1))
    content = "\n".join([",".join([*columns, "interest_rate"]), *[row] * 10]) + "\n"
    monkeypatch.setattr(tabular, "LOANS", served(tabular.LOANS, content.encode()))
    with pytest.raises(DataError, match="whose numbers have sha256") as caught:
        load("loans")
    known = str(caught.value).partition("have sha256 ")[2][:64]
    monkeypatch.setattr(tabular, "LOANS_SUM", known)
    assert len(load("loans").y) == 8
    monkeypatch.setattr(tabular, "LOANS", served(tabular.LOANS, b"<html>\n"))
    Path(os.environ["SORDINO_CACHE"], tabular.LOANS.path).unlink()
    with pytest.raises(DataError, match="no column loan_amount"):
        load("loans")
