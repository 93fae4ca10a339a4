"""Damaged folders: whatever is changed by hand, by a disk or by another run's files is refused, or changes no word.

`SORDINO_NIGHTLY=1` tries every case, a few thousand; else a sample of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.commands import federation, lines, sordino, spelt_out

from sordino import loop as loop
from sordino.errors import SordinoError

SHARES = (
    ('release = { kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }', ""),
    ("[run]", 'release = { kind = "noise_shares", noise_multiplier = 2.0, at_least = 5 }\n\n[run]'),
)
NIGHTLY = bool(os.environ.get("SORDINO_NIGHTLY"))
PLACES = 16 if NIGHTLY else 3  # where a bit is flipped in each file
EVERY = 1 if NIGHTLY else 5
COUNTED: dict[str, int] = {}


class Killed(BaseException):
    pass


def killed(file: Path, out: Path, after: int) -> Path:
    """A run that dies in the round after `after`: charged, and without its noise."""
    real, seen = loop.advanced, []

    def dies(*args: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) > after:
            raise Killed
        return real(*args, **options)

    with patch("sordino.loop.advanced", dies), pytest.raises(Killed):
        sordino("run", file, "--out", out)
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A configuration whose cohort is unseen, and one whose cohort is written down."""
    central, shares = (tmp_path_factory.mktemp(name) for name in ("central", "shares"))
    return {"central": federation(central), "shares": spelt_out(shares, *SHARES)}


@pytest.fixture(scope="module")
def runs(files: dict[str, Path]) -> dict[tuple[str, str], Path]:
    """Of both: one finished, one killed in its third round, and a stranger of the same configuration of each."""
    found: dict[tuple[str, str], Path] = {}
    for kind, file in files.items():
        for name in ("finished", "finished-stranger"):
            out = file.parent / name
            assert sordino("run", file, "--out", out).code == 0
            found[kind, name] = out
        for name in ("stopped", "stopped-stranger"):
            found[kind, name] = killed(file, file.parent / name, 2)
    return found


# ---- edits by hand, named in the issue of the red team ------------------------------------------------------------


def edited(out: Path, found: str, instead: str, name: str = "plan.toml") -> Path:
    text = (out / name).read_text()
    assert found in text
    (out / name).write_text(text.replace(found, instead, 1))
    return out


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("noise_multiplier = 2.0", "noise_multiplier = 5.0"),
        ('noise = "simulation"', 'noise = "secure"'),
        ("seed = 3", "seed = 4"),
        ("rate = 0.5", "rate = 0.1"),
        ("rounds = 4", "rounds = 3"),
        ("clip_norm = 1.0", "clip_norm = 2.0"),
    ],
)
def test_a_plan_that_was_edited_after_a_kill_is_not_continued(
    found: str, instead: str, runs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """Killed after 2 of 4 rounds, noise multiplier 2 to 5 by hand: a certificate of all rounds as if with 5."""
    out = edited(Path(shutil.copytree(runs["central", "stopped"], tmp_path / "a")), found, instead)
    charged = lines(out / "charges.jsonl")
    said = sordino("run", out / "plan.toml", "--out", out, "--resume")
    assert said.code == 1
    assert said.err.startswith("sordino: plan.toml ")
    assert not (out / "certificate.json").exists()
    assert lines(out / "charges.jsonl") == charged


@pytest.mark.parametrize("command", [("certify",), ("explain",), ("audit",), ("audit", "--mechanism")])
@pytest.mark.parametrize(
    ("name", "found", "instead"),
    [
        ("plan.toml", "noise_multiplier = 2.0", "noise_multiplier = 5.0"),
        ("charges.jsonl", '{"round": 2', '{"round": 1'),
        ("history.jsonl", '"accuracy"', '"Accuracy"'),
        ("certificate.json", '"rounds_charged": 4', '"rounds_charged": 3'),
    ],
)
def test_certify_explain_and_audit_refuse_an_edited_run(
    command: tuple[str, ...], name: str, found: str, instead: str, runs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    out = edited(Path(shutil.copytree(runs["central", "finished"], tmp_path / "a")), found, instead, name)
    said = sordino(command[0], out, *command[1:])
    assert (said.code, said.out) == (1, "")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("command", ["certify", "explain", "audit"])
def test_an_unfinished_run_is_a_sentence(command: str, runs: dict[tuple[str, str], Path]) -> None:
    assert "--resume" in sordino(command, runs["central", "stopped"]).sentence


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_charge_that_was_taken_away_is_missed_though_the_checkpoint_is_older(
    kept: int, runs: dict[tuple[str, str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    """Rounds 1 to 3 are charged, the checkpoint is of round 2: without the third line its rerun would be free."""
    out = Path(shutil.copytree(runs["central", "stopped"], tmp_path / "a"))
    every = (out / "charges.jsonl").read_text().splitlines(keepends=True)
    assert len(every) == 3
    (out / "charges.jsonl").write_text("".join(every[:kept]))
    said = sordino("run", files["central"], "--out", out, "--resume")
    assert said.code == 1
    assert "charges.jsonl" in said.err


def test_a_checkpoint_that_is_put_back_is_noticed(files: dict[str, Path], tmp_path: Path) -> None:
    """A state of an earlier round of the same run: rounds after it were charged and saved."""
    out = killed(files["central"], tmp_path / "a", 1)
    old = (out / "checkpoint" / "state.safetensors").read_bytes()
    assert sordino("run", files["central"], "--out", out, "--resume").code == 0
    (out / "certificate.json").unlink()
    (out / "checkpoint" / "state.safetensors").write_bytes(old)
    said = sordino("run", files["central"], "--out", out, "--resume")
    assert said.code == 1
    assert "later rounds were charged" in said.err


def test_a_torn_checkpoint_gives_way_to_the_one_before_and_its_round_is_billed_again(
    runs: dict[tuple[str, str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(runs["central", "stopped"], tmp_path / "a"))
    state = out / "checkpoint" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-7])
    found = sordino("run", files["central"], "--out", out, "--resume", "--json").json
    assert "continues from the checkpoint before it, after round 1" in found["notes"][0]
    assert [line["round"] for line in lines(out / "charges.jsonl")] == [1, 2, 3, 2, 3, 4]
    assert found["certificate"]["counts"]["rounds_accounted"] == 6
    honest = runs["central", "finished"] / "model.safetensors"
    assert (out / "model.safetensors").read_bytes() == honest.read_bytes()


def relinked(out: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Charges changed by one who knows how the chain is made, and makes it anew, second note and all."""
    every = lines(out / "charges.jsonl")
    change(every)
    head, heads, text = every[0]["before"], [], ""
    for line in every:
        text += json.dumps({**line, "before": head}) + "\n"
        head = hashlib.sha256(text.splitlines()[-1].encode()).hexdigest()
        heads.append(head + "\n")
    (out / "charges.jsonl").write_text(text)
    (out / "checkpoint" / "charged").write_text("".join(heads))


@pytest.mark.parametrize("number", [0, -5, 5, 10**30, 1.0, True, "1", None])
def test_a_round_out_of_range_is_refused_even_in_a_chain_made_anew(
    number: Any, runs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(runs["shares", "finished"], tmp_path / "a"))
    relinked(out, lambda every: every[1].update(round=number))
    said = sordino("certify", out)
    assert said.code == 1
    assert "charges.jsonl line 2" in said.err


@pytest.mark.parametrize("cohort", [[60], [-1], [0, 0], [1e9], [10**30], None, "all", {}])
def test_a_cohort_that_cannot_be_is_refused_even_in_a_chain_made_anew(
    cohort: Any, runs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(runs["shares", "finished"], tmp_path / "a"))
    relinked(out, lambda every: every[1].update(cohort=cohort))
    assert "charges.jsonl line 2" in sordino("certify", out).err


# ---- every file, every kind of damage -------------------------------------------------------------------------------


def damages(data: bytes, other: bytes, rng: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """What may become of a file; None: it is gone."""
    yield "gone", None
    yield "swapped", other
    yield "empty", b""
    yield "zeroed", bytes(len(data))
    yield "random", rng.randbytes(len(data))
    yield "twice", data + data
    for cut in {0, 1, len(data) // 3, len(data) // 2, len(data) - 1} | {rng.randrange(len(data)) for _ in range(4)}:
        yield f"cut at {cut}", data[:cut]
    for _ in range(PLACES):
        place, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        yield f"bit {place}", data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
    yield from _lines(data, other)
    yield from _numbers(data, rng)


def _lines(data: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    every, strange = data.splitlines(keepends=True), other.splitlines(keepends=True)
    for i, line in enumerate(every[:12]):
        yield f"without line {i}", b"".join(every[:i] + every[i + 1 :])
        yield f"line {i} twice", b"".join([*every[: i + 1], line, *every[i + 1 :]])
        yield f"line {i} of a stranger", b"".join([*every[:i], strange[i % len(strange)], *every[i + 1 :]])
        yield f"line {i} moved", b"".join([*every[:i], *every[i + 1 :], line])
    yield "reversed", b"".join(reversed(every))


def _numbers(data: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Numbers that cannot be, where there is text with digits."""
    digits = [i for i, byte in enumerate(data) if 48 <= byte < 58 and (i == 0 or not 48 <= data[i - 1] < 58)]
    if b"\0" in data or not digits:
        return
    for number in (b"0", b"-5", b"1e9", b"1e30", b"1e400", b"NaN", b"9" * 5000, b"[" * 9000):
        place = rng.choice(digits)
        end = next((i for i in range(place, len(data)) if not 48 <= data[i] < 58), len(data))
        yield f"{number[:6]!r} at {place}", data[:place] + number + data[end:]


NAMES = [f"{name}.json" for name in ("run", "certificate", "checkpoint/data")]
NAMES += [f"{name}.jsonl" for name in ("charges", "history", "engine")]
NAMES += [f"{name}.safetensors" for name in ("model", "checkpoint/state", "checkpoint/before")]
NAMES += ["plan.toml", "checkpoint/charged"]


def cases(out: Path, stranger: Path) -> list[tuple[str, str, bytes | None]]:
    """(file, damage, bytes) of a folder, in an order of their own, without those that change nothing."""
    rng, found = random.Random(13), []
    for name in NAMES:
        if (out / name).is_file() and (data := (out / name).read_bytes()):
            other = (stranger / name).read_bytes() or b"\n"
            found += [(name, what, spoilt) for what, spoilt in damages(data, other, rng) if spoilt != data]
    rng.shuffle(found)
    return found[::EVERY]


def spoil(out: Path, name: str, data: bytes | None) -> None:
    (out / name).unlink()
    if data is not None:
        (out / name).write_bytes(data)


def silent(error: Exception, what: str) -> None:
    assert isinstance(error, SordinoError), f"{what}: {error!r}"
    assert len(str(error)) < 1000, what


@pytest.mark.parametrize("kind", ["central", "shares"])
def test_no_damage_to_a_finished_run_is_certified(kind: str, runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Refused, or the very certificate of the run: the damage was to nothing that it speaks of."""
    from sordino.runs.folder import RunFolder

    out, kept = tmp_path / "a", runs[kind, "finished"]
    honest = json.loads((kept / "certificate.json").read_text())
    accepted = []
    shutil.copytree(kept, out)
    tried = cases(kept, runs[kind, "finished-stranger"])
    for name, what, data in tried:
        spoil(out, name, data)
        try:
            assert RunFolder.open(out).certify() == honest, f"{name} {what}"
            accepted.append((name, what))
        except SordinoError as error:
            silent(error, f"{name} {what}")
        (out / name).write_bytes((kept / name).read_bytes())
    COUNTED[f"{kind} finished"] = len(tried)
    assert RunFolder.open(out).certify() == honest
    assert set(accepted) <= {("checkpoint/before.safetensors", "gone")}  # a finished run does not need it


@pytest.mark.parametrize("kind", ["central", "shares"])
def test_no_damage_to_a_killed_run_is_continued_to_a_smaller_bill(
    kind: str, runs: dict[tuple[str, str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    """Refused; or continued to the same model, with every charge in the cost and a larger epsilon, never a smaller."""
    from sordino.config import load_config
    from sordino.runs.execution import execute
    from sordino.runs.folder import RunFolder

    kept, config = runs[kind, "stopped"], load_config(files[kind])
    honest = execute(config, Path(shutil.copytree(kept, tmp_path / "honest")), resume=True)
    model, accounted = honest.certificate["model_sha256"], honest.certificate["counts"]["rounds_charged"]
    tried = cases(kept, runs[kind, "stopped-stranger"])
    for i, (name, what, data) in enumerate(tried):
        out = Path(shutil.copytree(kept, tmp_path / str(i)))
        spoil(out, name, data)
        try:
            found = execute(config, out, resume=True)
        except SordinoError as error:
            silent(error, f"{name} {what}")
        else:
            made = found.certificate
            assert made["model_sha256"] == model, f"{name} {what}"
            assert made["counts"]["rounds_charged"] >= accounted, f"{name} {what}"
            assert made["epsilon"] >= honest.certificate["epsilon"], f"{name} {what}"
            assert RunFolder.open(out).certify() == made, f"{name} {what}"
        shutil.rmtree(out)
    COUNTED[f"{kind} stopped"] = len(tried)
