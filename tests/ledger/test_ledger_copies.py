"""Copies of a ledger and of run folders: what is older than what was charged is refused, or pays again."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.commands import ROUNDS, federation, sordino
from tests.ledger.release import release

from sordino.accounting import accountant
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.config import Config, load_config
from sordino.errors import BudgetError, ConfigError, StorageError
from sordino.ledger import journal
from sordino.ledger.journal import SLOT, Head, HeadFile
from sordino.ledger.ledger import Ledger, Request, restore
from sordino.ledger.totals import Item, Limit
from sordino.runs import admission, execution, rounds
from sordino.runs.folder import RunFolder

ITEM = Item(GaussianNoise(4.0))
EVENT, DELTA = PoissonSampled(0.5, GaussianNoise(2.0)), 1e-4
KNOWN = ("--delta", DELTA, "--unit", "client", "--relation", "add_remove")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        ledger.limit("heart", Limit(8.0, 1e-5, "record"))
        ledger.admit("a", "heart", Request("record", "replace_one", ()), whole=False)
        charged(ledger, 0, 3)
    return tmp_path / "l"


def charged(ledger: Ledger, first: int, count: int) -> None:
    for job in range(first, first + count):
        release(ledger, "a", str(job), (ITEM,), lambda: b"message")


def spent(file: Path) -> int:
    with Ledger.open(file) as ledger:
        return sum(item.count for item in ledger.statement("heart").items)


# ---- the file of a ledger --------------------------------------------------------------------------------------------


def test_a_copy_of_the_database_of_a_live_silo_holds_every_charge_or_is_refused(file: Path) -> None:
    """`cp ledger.db` while a silo has it open: nothing is in a log beside it, and without its head file it is none."""
    with Ledger.open(file) as silo:
        charged(silo, 3, 5)
        assert sorted(path.name for path in file.parent.iterdir()) == ["l", "l.head"]
        shutil.copy(file, file.parent / "copy")
        assert "without" in sordino("ledger", "show", file.parent / "copy").sentence
        shutil.copy(file.parent / "l.head", file.parent / "copy.head")
        assert spent(file.parent / "copy") == 8


def test_a_run_that_was_refused_is_not_admitted_by_a_copy_of_a_live_ledger(tmp_path: Path) -> None:
    """The data set has spent its limit, a silo has the ledger open, and `cp ledger.db` is named in the run's file."""
    config = paying(tmp_path, ROUNDS)
    execution.execute(config, tmp_path / "a")
    file = tmp_path / "fed.toml"
    with Ledger.open(tmp_path / "l"):
        assert "would have spent" in sordino("run", file, "--out", tmp_path / "b").err
        shutil.copy(tmp_path / "l", tmp_path / "copy")
        file.write_text(file.read_text().replace(f'"{tmp_path / "l"}"', f'"{tmp_path / "copy"}"'))
        words = ("--epsilon", 100, *KNOWN)
        for refused in (
            ("run", file, "--out", tmp_path / "b"),
            ("ledger", "limit", tmp_path / "copy", "digits", *words),
        ):
            assert "without its head file" in sordino(*refused).sentence
    assert not (tmp_path / "b").exists()


def test_an_older_copy_that_is_put_back_is_refused(file: Path) -> None:
    shutil.copy(file, file.parent / "old")
    with Ledger.open(file) as silo:
        charged(silo, 3, 1)
    shutil.copy(file.parent / "old", file)
    said = sordino("ledger", "show", file).sentence
    assert "older than l.head beside it: it has 5 of 6 lines" in said
    assert "sordino ledger restore" in said


def test_a_ledger_that_went_another_way_is_refused(file: Path) -> None:
    """Two copies that were both charged: neither fits the other's head file."""
    for name in ("b", "b.head"):
        shutil.copy(file.parent / name.replace("b", "l"), file.parent / name)
    for name, job in (("l", 3), ("b", 7)):
        with Ledger.open(file.parent / name) as ledger:
            charged(ledger, job, 1)
    shutil.copy(file.parent / "b", file)
    with pytest.raises(StorageError, match="other lines than were written"):
        Ledger.open(file)


def test_a_ledger_that_is_gone_is_not_made_anew_beside_its_head_file(file: Path) -> None:
    file.unlink()
    words = ("--epsilon", 8, "--delta", 1e-5, "--unit", "record")
    assert "with 5 lines" in sordino("ledger", "limit", file, "heart", *words).sentence
    assert not file.exists()


def test_a_head_file_that_is_gone_or_damaged_is_refused(file: Path) -> None:
    beside = HeadFile.of(file).path
    said = beside.read_bytes()
    for bad in (b"", said[:40], b"x" * len(said)):
        beside.write_bytes(bad)
        assert "which is damaged" in sordino("ledger", "show", file).sentence
    beside.unlink()
    assert "without its head file" in sordino("ledger", "show", file).sentence


def test_one_torn_slot_of_the_head_file_leaves_the_other(file: Path) -> None:
    """The newest slot torn: the charge that it was written for has not returned, so no noise of it was drawn."""
    beside = HeadFile.of(file)
    data = bytearray(beside.path.read_bytes())
    newest = max((0, 1), key=lambda k: (Head.of_bytes(bytes(data[k * SLOT : (k + 1) * SLOT])) or Head()).lines)
    data[newest * SLOT : newest * SLOT + 100] = bytes(100)
    beside.path.write_bytes(bytes(data))
    assert beside.read() == Head(4, beside.read().digest)  # type: ignore[union-attr]
    assert spent(file) == 3
    with Ledger.open(file) as ledger:
        charged(ledger, 3, 1)
    assert beside.read().lines == 6  # type: ignore[union-attr]


def test_a_head_file_never_goes_back(tmp_path: Path) -> None:
    """Of two processes that have committed lines 5 and 6, the slower one writes 5 after 6."""
    beside = HeadFile.of(tmp_path / "l")
    beside.create(Head(), 0o600)
    for lines in (3, 6, 5, 6, 2):
        beside.advance(Head(lines, f"{lines:064x}"))
    assert beside.read() == Head(6, f"{6:064x}")


@pytest.mark.parametrize("when", ["before the commit", "after the commit", "after the head file"])
def test_a_kill_at_any_step_of_a_charge_leaves_a_ledger_that_opens(file: Path, when: str) -> None:
    """And a database from before the charge is accepted only where no noise of it was drawn."""
    shutil.copy(file, file.parent / "before")
    child = os.fork()
    if child == 0:
        ledger = Ledger.open(file)
        die: Callable[..., Any] = lambda *_: os._exit(9)  # noqa: E731
        if when == "after the commit":
            HeadFile.advance = die  # type: ignore[method-assign]
        if when == "before the commit":
            journal.Journal.append = die  # type: ignore[method-assign]
        ledger.charge("a", "new", (ITEM,))
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert spent(file) == (3 if when == "before the commit" else 4)
    shutil.copy(file.parent / "before", file)
    if when == "after the head file":
        with pytest.raises(StorageError, match="older than"):
            Ledger.open(file)
    else:
        assert spent(file) == 3


def test_a_file_that_was_exchanged_under_a_silo_is_not_charged(file: Path) -> None:
    with Ledger.open(file) as silo:
        shutil.copy(file, file.parent / "copy")
        os.replace(file.parent / "copy", file)
        with pytest.raises(StorageError, match="replaced by another file since it was opened"):
            silo.charge("a", "new", (ITEM,))


def test_a_ledger_of_another_format_is_refused_and_left_as_it_is(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute(f"PRAGMA user_version={journal.FORMAT - 1}")
    before = file.read_bytes()
    assert f"of format {journal.FORMAT - 1}" in sordino("ledger", "show", file).sentence
    assert file.read_bytes() == before


# ---- backup and restore ----------------------------------------------------------------------------------------------


def test_a_backup_of_a_live_ledger_is_whole_and_not_charged(file: Path) -> None:
    with Ledger.open(file) as silo:
        charged(silo, 3, 2)
        said = sordino("ledger", "backup", file, file.parent / "b", "--json").json
        assert said["lines"] == silo.statement("heart").lines == 7
        assert said["sha256"] == silo.statement("heart").digest
        charged(silo, 5, 1)  # the ledger goes on
    assert "which is a backup" in sordino("ledger", "show", file.parent / "b").sentence
    assert "which exists" in sordino("ledger", "backup", file, file.parent / "b").sentence
    shutil.copy(file.parent / "b", file)
    assert "which is a backup" in sordino("ledger", "show", file).sentence
    assert not list(file.parent.glob("*.partial*")) + list(file.parent.glob(".*"))


def test_a_backup_that_lacks_nothing_is_restored_as_it_was(file: Path) -> None:
    sordino("ledger", "backup", file, file.parent / "b")
    assert "which is not damaged" in sordino("ledger", "restore", file.parent / "b", file).sentence
    file.unlink()
    assert sordino("ledger", "restore", file.parent / "b", file, "--json").json["lines_lost"] == 0
    assert spent(file) == 3
    with Ledger.open(file) as ledger:
        assert ledger.replay("1") == b"message"
        charged(ledger, 3, 1)


@pytest.mark.parametrize("known", [True, False])
def test_after_a_restore_that_lost_charges_nothing_is_charged_before_the_limit_is_lowered(
    file: Path, known: bool
) -> None:
    with Ledger.open(file) as ledger:
        ledger.backup(file.parent / "b")
        charged(ledger, 3, 2)
    file.unlink()
    if not known:
        HeadFile.of(file).path.unlink()
    said = sordino("ledger", "restore", file.parent / "b", file)
    assert ("lost: 2 lines" if known else "an unknown number of") in said.out
    assert "lower the limit" in sordino("ledger", "show", file).out
    assert "restored from a backup" in sordino("ledger", "history", file, "heart").out
    with Ledger.open(file) as ledger:
        for refused in (
            lambda: ledger.charge("a", "new", (ITEM,)),
            lambda: ledger.admit("b", "heart", Request("record", "replace_one", (ITEM,)), whole=True),
            lambda: ledger.limit("heart", Limit(8.0, 1e-5, "record")),
            lambda: ledger.limit("heart", Limit(9.0, 1e-5, "record")),
            lambda: ledger.limit("heart", Limit(7.0, 1e-4, "record")),
        ):
            with pytest.raises(ConfigError, match="a limit below epsilon 8"):
                refused()
        ledger.limit("heart", Limit(6.0, 1e-5, "record"))
        charged(ledger, 5, 1)
    assert spent(file) == 4


def test_a_copy_without_its_head_file_is_taken_by_restore_alone(file: Path) -> None:
    shutil.copy(file, file.parent / "copy")
    assert restore(file.parent / "copy", file.parent / "copy") is None
    assert "lower the limit" in sordino("ledger", "show", file.parent / "copy").out


def test_what_is_not_a_backup_is_not_restored(file: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"no ledger, but long enough to be looked at " * 60)
    for source in (tmp_path / "text", tmp_path / "none", tmp_path):
        assert sordino("ledger", "restore", source, tmp_path / "new").sentence
    shutil.copy(file, tmp_path / "cut")
    with closing(sqlite3.connect(tmp_path / "cut")) as database:
        database.execute("DELETE FROM entries WHERE id = 5")
        database.commit()
    assert "not a whole ledger" in sordino("ledger", "restore", tmp_path / "cut", tmp_path / "new").sentence
    assert not (tmp_path / "new").exists()


# ---- copies of a run's folder ----------------------------------------------------------------------------------------


def paying(folder: Path, room: int) -> Config:
    """A run of four rounds that pays from a ledger with room for so many."""
    limit = accountant.epsilon(((EVENT, room),), "add_remove", DELTA).value * 1.001
    assert sordino("ledger", "limit", folder / "l", "digits", "--epsilon", limit, *KNOWN).code == 0
    spec = f'[privacy]\nledger = "{folder / "l"}"\ndataset = "digits"\n[run]'
    return load_config(federation(folder, ("[run]", spec)))


def stopped_after(config: Config, out: Path, number: int, monkeypatch: pytest.MonkeyPatch, *, resume: bool) -> None:
    """The run, stopped when round `number` is in its checkpoint."""
    keep = rounds.keep_round

    def stop(*words: Any) -> Any:
        line = keep(*words)
        if line["round"] == number:
            raise KeyboardInterrupt
        return line

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "keep_round", stop)
        with pytest.raises(KeyboardInterrupt):
            execution.execute(config, out, resume=resume)


def releases(folder: Path) -> int:
    found = sordino("ledger", "show", folder / "l", "digits", "--json").json["datasets"][0]
    return sum(int(item["count"]) for item in found["events"])


def test_copies_of_a_run_s_folder_pay_for_what_each_of_them_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after round 1, copied twice, all three resumed: 4 + 3 + 3 releases, and the ledger has all of them."""
    config = paying(tmp_path, ROUNDS + 2 * (ROUNDS - 1))
    stopped_after(config, tmp_path / "a", 1, monkeypatch, resume=False)
    for copy in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / copy)
    total = ROUNDS
    for copy in ("a", "b", "c"):
        done = execution.execute(config, tmp_path / copy, resume=True)
        assert releases(tmp_path) == total
        assert RunFolder.open(tmp_path / copy).certify()["ledger"]["events"][0]["count"] == total
        assert (len(done.notes) == 1) == (copy != "a")
        total += ROUNDS - 1


def test_a_copy_that_the_ledger_cannot_pay_for_is_refused_before_its_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = paying(tmp_path, ROUNDS + 1)
    stopped_after(config, tmp_path / "a", 1, monkeypatch, resume=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    execution.execute(config, tmp_path / "a", resume=True)
    with pytest.raises(BudgetError, match="would have spent"):
        execution.execute(config, tmp_path / "b", resume=True)
    assert len((tmp_path / "b" / "charges.jsonl").read_text().splitlines()) == 1
    assert releases(tmp_path) == ROUNDS


def test_a_folder_that_is_put_back_pays_for_the_rounds_that_it_forgot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied after round 1, stopped after round 3, put back: rounds 2 and 3 are released a second time."""
    config = paying(tmp_path, 20)
    stopped_after(config, tmp_path / "a", 1, monkeypatch, resume=False)
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    stopped_after(config, tmp_path / "a", 3, monkeypatch, resume=True)
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "old", tmp_path / "a")
    execution.execute(config, tmp_path / "a", resume=True)
    assert releases(tmp_path) == ROUNDS + 2


def test_two_copies_that_run_at_once_cannot_both_release_what_one_has_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are admitted before either has released: the second to release is stopped, resumed it pays."""
    config = paying(tmp_path, 20)
    stopped_after(config, tmp_path / "a", 1, monkeypatch, resume=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    keep = rounds.keep_round
    ran: list[int] = []

    def meanwhile(*words: Any) -> Any:
        if not ran:
            ran.append(1)
            execution.execute(config, tmp_path / "b", resume=True)
        return keep(*words)

    monkeypatch.setattr(rounds, "keep_round", meanwhile)
    with pytest.raises(ConfigError, match="another copy of the run's folder has released rounds meanwhile"):
        execution.execute(config, tmp_path / "a", resume=True)
    released = [json.loads(line)["round"] for line in (tmp_path / "a" / "history.jsonl").read_text().splitlines()]
    assert released == [1, 2]  # its round 2 was noted before the other began; round 3 was not released
    assert releases(tmp_path) == ROUNDS + 1  # rounds 1 to 4, and round 2 from both
    execution.execute(config, tmp_path / "a", resume=True)
    assert releases(tmp_path) == ROUNDS + 1 + 2  # and rounds 3 and 4 from both


def test_a_ledger_that_is_older_than_a_run_s_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Database and head file rolled back together: the folder of a run has seen more."""
    config = paying(tmp_path, 20)
    stopped_after(config, tmp_path / "a", 1, monkeypatch, resume=False)
    for name in ("l", "l.head"):
        shutil.copy(tmp_path / name, tmp_path / f"old.{name}")
    stopped_after(config, tmp_path / "a", 3, monkeypatch, resume=True)
    for name in ("l", "l.head"):
        shutil.copy(tmp_path / f"old.{name}", tmp_path / name)
    with pytest.raises(StorageError, match="which lacks 2 releases that the run"):
        execution.execute(config, tmp_path / "a", resume=True)


def test_a_run_that_began_before_releases_were_noted_goes_on_and_pays_for_what_it_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = paying(tmp_path, 20)
    with monkeypatch.context() as patch:  # as the version before admitted it
        patch.setattr(admission.Admission, "note", lambda self, number, head: None)
        admit = Ledger.admit
        patch.setattr(Ledger, "admit", lambda self, *words, chain="", **more: admit(self, *words, **more))
        stopped_after(config, tmp_path / "a", 2, monkeypatch, resume=False)
    stopped_after(config, tmp_path / "a", 3, monkeypatch, resume=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for copy in ("a", "b"):
        execution.execute(config, tmp_path / copy, resume=True)
    assert releases(tmp_path) == ROUNDS + 1


def test_a_kill_between_chain_and_ledger_pays_for_one_round_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = paying(tmp_path, 20)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "note_release", die)
        with pytest.raises(KeyboardInterrupt):
            execution.execute(config, tmp_path / "a")
    made = execution.execute(config, tmp_path / "a", resume=True).certificate
    assert made["counts"]["rounds_accounted"] == releases(tmp_path) == ROUNDS + 1
