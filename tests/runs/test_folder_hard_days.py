"""Full disks, folders that are gone or may not be written, little memory; other data, other versions; who may read."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tests.commands import arrays, contents, federation, lines, sordino
from tests.runs.test_folder import run

from sordino.codec import durable_files
from sordino.runs.writer import Fingerprint, RunWriter
from sordino.version import versions

SAFE = "charged rounds stay charged"


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    return federation(tmp_path)


def honest(fed: Path) -> bytes:
    """The model of a run on a good day."""
    return (run(fed, "honest") / "model.safetensors").read_bytes()


def resumed(fed: Path, name: str = "a") -> Path:
    """The run goes on, certified, with nothing half written."""
    out = run(fed, name, "--resume")
    assert sordino("certify", out).code == 0
    assert not [name for name in contents(out) if name.endswith(".partial")]
    return out


class Failing:
    """`os`, of which one call fails from a given time on."""

    def __init__(self, call: str, number: int, reason: int, half: bool = False) -> None:
        self.call, self.left, self.reason, self.half = call, number, reason, half

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self.call else getattr(os, name)

    def _fail(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            return getattr(os, self.call)(*args, **options)
        if self.half and self.left == -1:
            return os.write(args[0], bytes(args[1])[:5])  # so much still fits
        raise OSError(self.reason, os.strerror(self.reason))


@pytest.mark.parametrize("after", [3, 4, 5, 6, 7, 8, 20, 21])
def test_a_full_disk_is_a_sentence_loses_nothing_and_leaves_no_half_file(after: int, fed: Path) -> None:
    out = fed.parent / "a"
    with patch.object(durable_files, "os", Failing("write", after, errno.ENOSPC, half=True)):
        said = sordino("run", fed, "--out", out, "--json").sentence
    assert "no space left to write" in said
    assert "--resume" in said
    assert SAFE in said
    assert not [name for name in contents(out) if name.endswith(".partial")]
    for name in ("charges.jsonl", "history.jsonl", "engine.jsonl", "checkpoint/charged"):
        assert (out / name).read_bytes()[-1:] in (b"", b"\n")
    assert (resumed(fed) / "model.safetensors").read_bytes() == honest(fed)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_is_full_from_the_start_leaves_no_folder(after: int, fed: Path) -> None:
    before = contents(fed.parent)
    with patch.object(durable_files, "os", Failing("write", after, errno.ENOSPC)):
        said = sordino("run", fed, "--out", fed.parent / "a", "--json").sentence
    assert "nothing was charged" in said
    assert contents(fed.parent) == before
    assert sorted(path.name for path in fed.parent.iterdir()) == ["data.npz", "fed.toml"]


def test_a_file_that_may_not_grow_is_a_sentence(fed: Path) -> None:
    """The limit of the operating system, for real."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        said = sordino("run", fed, "--out", fed.parent / "a", "--json").sentence
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "no space left to write" in said
    resumed(fed)


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_may_not_be_written_is_a_sentence(reason: int, fed: Path) -> None:
    out, real = run(fed, "a"), os.open
    (out / "certificate.json").unlink()

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(out)):
            raise OSError(reason, os.strerror(reason))
        return real(path, flags, *args, **options)

    with patch.object(os, "open", refusing):
        said = sordino("run", fed, "--out", out, "--resume").sentence
    assert "cannot be written" in said
    assert SAFE in said
    resumed(fed)


def during(round_: int, what: Callable[[Path], None]) -> Any:
    """Something happens to the folder after the checkpoint of a round."""
    save = RunWriter.save

    def then(self: RunWriter, state: Any) -> None:
        save(self, state)
        if state.t == round_:
            what(self.path)

    return patch.object(RunWriter, "save", then)


@pytest.mark.parametrize("gone", [".", "checkpoint", "charges.jsonl", "history.jsonl", "checkpoint/charged"])
def test_what_is_deleted_under_a_run_is_a_sentence(gone: str, fed: Path) -> None:
    def delete(out: Path) -> None:
        path = out / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    with during(2, delete):
        said = sordino("run", fed, "--out", fed.parent / "a", "--json").sentence
    assert "was removed during the run" in said
    assert "another --out" in said
    if gone != ".":
        again = sordino("run", fed, "--out", fed.parent / "a", "--resume")
        assert again.code == 1  # it does not go on as if nothing had been charged
        assert again.err.count("\n") == 1


def test_a_checkpoint_that_is_deleted_under_a_run_is_written_again(fed: Path) -> None:
    with during(2, lambda out: (out / "checkpoint" / "state.safetensors").unlink()):
        assert sordino("run", fed, "--out", fed.parent / "a").code == 0
    assert sordino("certify", fed.parent / "a").code == 0


def test_charges_that_somebody_else_writes_stop_the_run(fed: Path) -> None:
    def more(out: Path) -> None:
        with open(out / "charges.jsonl", "a") as file:
            file.write("{}\n")

    with during(2, more):
        said = sordino("run", fed, "--out", fed.parent / "a")
    assert said.code == 1
    assert "something else changed it" in said.err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nmore"),
    ],
)
def test_memory_that_runs_out_is_a_sentence(error: Exception, fed: Path) -> None:
    seen: list[int] = []

    def full(*args: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) == 3:
            raise error
        return real(*args, **options)

    from sordino import loop as loop

    real = loop.advanced
    with patch("sordino.loop.advanced", full):
        said = sordino("run", fed, "--out", fed.parent / "a", "--json").sentence
    assert "no memory left" in said
    assert SAFE in said
    assert (resumed(fed) / "model.safetensors").read_bytes() == honest(fed)


# ---- what was there when it was started ---------------------------------------------------------------------------


@pytest.fixture
def begun(fed: Path) -> Path:
    """A run that ended after two of its four rounds."""

    def ends(_: Path) -> None:
        raise KeyboardInterrupt

    with during(2, ends):
        assert sordino("run", fed, "--out", fed.parent / "a").code == 130
    return fed.parent / "a"


@pytest.mark.parametrize(
    ("key", "said"), [("x", "the clients' records"), ("y", "the clients' records"), ("test_x", "the test records")]
)
def test_other_data_do_not_continue_a_run_and_are_named(key: str, said: str, fed: Path, begun: Path) -> None:
    other = arrays()
    other[key] = other[key].copy()
    other[key][5] = 1 - np.minimum(other[key][5], 1)
    np.savez(fed.parent / "data.npz", **other)
    before = contents(begun)
    sentence = sordino("run", fed, "--out", begun, "--resume").sentence
    assert "other data" in sentence
    assert said in sentence
    assert contents(begun) == before
    np.savez(fed.parent / "data.npz", **arrays())
    resumed(fed)


def test_the_fingerprint_says_nothing_without_its_key_and_is_in_nothing_that_is_released(fed: Path) -> None:
    one, two = run(fed, "one"), run(fed, "two")
    marks = [Fingerprint.of_bytes((out / "checkpoint" / "data.json").read_bytes()) for out in (one, two)]
    assert marks[0].parts.keys() == marks[1].parts.keys()
    assert all(marks[0].parts[name] != marks[1].parts[name] for name in marks[0].parts if name != "the public records")
    released = [data for name, data in contents(one).items() if not name.startswith("checkpoint/")]
    for secret in (marks[0].key, *marks[0].parts.values()):
        assert secret == "none" or not any(secret.encode() in data for data in released)


def test_another_version_of_ours_does_not_continue_a_run(
    fed: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = versions()
    monkeypatch.setattr("sordino.runs.writer.__version__", "9.9.9")
    sentence = sordino("run", fed, "--out", begun, "--resume").sentence
    assert "sordino 9.9.9, but" in sentence
    assert now["sordino"] in sentence


def test_another_version_of_torch_is_said_and_named_on_the_certificate(
    fed: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = versions()
    for module in ("execution", "writer"):
        monkeypatch.setattr(f"sordino.runs.{module}.versions", lambda: {**now, "torch": "9.9.9"})
    found = sordino("run", fed, "--out", begun, "--resume", "--json").json
    assert f"torch from {now['torch']} to 9.9.9" in found["notes"][0]
    assert [ran["torch"] for ran in found["certificate"]["environment"]] == [now["torch"], "9.9.9"]
    assert sordino("certify", begun).code == 0


# ---- who may read, and who signed ---------------------------------------------------------------------------------


def test_what_is_not_released_is_readable_by_its_owner_only(fed: Path) -> None:
    before = os.umask(0o022)
    try:
        out = run(fed, "a")
    finally:
        os.umask(before)
    modes = {str(path.relative_to(out)): path.stat().st_mode & 0o777 for path in out.rglob("*")}
    private = {name for name in modes if name.startswith("checkpoint")} | {"history.jsonl", "engine.jsonl"}
    assert modes["checkpoint"] == 0o700
    assert {modes[name] for name in private - {"checkpoint"}} == {0o600}
    assert {modes[name] for name in modes.keys() - private} == {0o644}


def test_a_copy_without_the_private_part_certifies_and_cannot_be_continued(fed: Path) -> None:
    out = run(fed, "a")
    shutil.rmtree(out / "checkpoint")
    assert sordino("certify", out).code == 0
    assert sordino("explain", out).code == 0
    again = sordino("run", fed, "--out", out, "--resume")
    assert again.code == 1
    assert "checkpoint/ is missing" in again.err


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    """A new pair, as `openssl` would write it."""
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    secret, public = folder / f"{name}.pem", folder / f"{name}.pub"
    secret.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo))
    return secret, public


def test_a_signature_binds_the_certificate_to_the_owner_of_a_key(fed: Path) -> None:
    (mine, public), (_, other) = keys(fed.parent, "mine"), keys(fed.parent, "other")
    out = run(fed, "a", "--sign", mine)
    assert sordino("certify", out, "--key", public, "--json").json["signed"] is True
    said = sordino("certify", out, "--key", other)
    assert (said.code, said.out) == (1, "")
    what, fix = "certificate.sig is not this key's signature of certificate.json", "pass the signer's public key"
    assert said.err == f"sordino: {what}; fix: {fix}, or restore both files\n"


def test_a_run_that_was_forged_so_that_it_certifies_does_not_have_the_signature(fed: Path) -> None:
    mine, public = keys(fed.parent, "mine")
    out, forged = run(fed, "a", "--sign", mine), run(fed, "forged")
    shutil.copy(out / "certificate.sig", forged / "certificate.sig")
    assert sordino("certify", forged).code == 0
    assert sordino("certify", forged, "--key", public).code == 1
    (out / "certificate.sig").unlink()
    assert "certificate.sig is missing" in sordino("certify", out, "--key", public).err
    assert sordino("certify", out, "--sign", mine, "--key", public).code == 0


def test_several_signatures_on_one_certificate_each_checked_by_its_key(fed: Path) -> None:
    (mine, public), (second, theirs), (_, other) = (keys(fed.parent, name) for name in ("mine", "second", "other"))
    out = run(fed, "a", "--sign", mine)
    for _ in range(2):  # a second time it adds nothing
        assert sordino("certify", out, "--sign", second).code == 0
    lines = (out / "certificate.sig").read_text().splitlines()
    assert len(lines) == 2
    assert sordino("certify", out, "--key", public, "--key", theirs, "--json").json["signed"] is True
    assert "signed with 1 of 2 keys checked" in sordino("certify", out, "--key", theirs).out
    said = sordino("certify", out, "--key", public, "--key", other)
    assert said.code == 1
    assert "not a signature of this key, among its 2" in said.err
    (out / "certificate.sig").write_text("".join(f"{line}\n" for line in ("?", "AAAA BBBB", *lines)))
    assert sordino("certify", out, "--sign", mine).code == 0
    assert (out / "certificate.sig").read_text().splitlines() == lines[1:] + lines[:1]  # the damaged ones are dropped


def test_a_signature_is_verified_by_plain_openssl(fed: Path) -> None:
    mine, public = keys(fed.parent, "mine")
    out = run(fed, "a", "--sign", mine)
    shell = "cut -d' ' -f1 certificate.sig | sed -n 1p | base64 -d > one.sig && "
    shell += f"openssl pkeyutl -verify -pubin -inkey {public} -rawin -in certificate.json -sigfile one.sig"
    assert (
        "Verified Successfully"
        in subprocess.run(shell, shell=True, cwd=out, check=True, capture_output=True, text=True).stdout
    )
    (out / "certificate.json").write_bytes((out / "certificate.json").read_bytes() + b" ")
    assert subprocess.run(shell, shell=True, cwd=out, check=False, capture_output=True).returncode != 0


def test_a_certificate_alone_is_said_to_be_consistent_and_what_was_not_examined(fed: Path) -> None:
    mine, public = keys(fed.parent, "mine")
    out, alone = run(fed, "a", "--sign", mine), fed.parent / "alone"
    alone.mkdir()
    for name in ("certificate.json", "certificate.sig"):
        shutil.copy(out / name, alone / name)
    said = sordino("certify", alone / "certificate.json", "--key", public)
    assert said.code == 0
    assert said.out.startswith("consistent, and signed with this key: epsilon")
    assert "not examined: whether these events are those of the run" in said.out
    assert sordino("certify", alone / "certificate.json", "--json").json["certified"] is False
    assert "the run's folder" in sordino("certify", alone / "certificate.json", "--sign", mine).sentence
    made = json.loads((alone / "certificate.json").read_text())
    made["adversaries"][0]["epsilon"] = made["epsilon"] = made["epsilon"] / 2
    (alone / "certificate.json").write_text(json.dumps(made))
    said = sordino("certify", alone / "certificate.json")
    assert (said.code, "but its events give" in said.err) == (1, True)
    del made["noise"]
    (alone / "certificate.json").write_text(json.dumps(made))
    assert "noise is missing" in sordino("certify", alone / "certificate.json").err


def test_a_key_that_is_none_is_the_users_mistake(fed: Path) -> None:
    mine, public = keys(fed.parent, "mine")
    for wrong in (public, fed, fed.parent / "nowhere.pem", fed.parent):
        assert "key" in sordino("run", fed, "--out", fed.parent / "a", "--sign", wrong).sentence
    assert not (fed.parent / "a").exists()
    out = run(fed, "a")
    assert "public Ed25519 key" in sordino("certify", out, "--key", mine).sentence
    assert lines(out / "charges.jsonl")
