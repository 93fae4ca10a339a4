"""A ledger that is locked, damaged, newer, not one at all: one sentence each, and nothing charged."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.commands import sordino
from tests.ledger.release import release

from sordino.accounting.events import GaussianNoise
from sordino.errors import BudgetError, StorageError, UserError
from sordino.ledger import journal
from sordino.ledger.journal import MARK
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item, Limit, Statement

ITEM = Item(GaussianNoise(4.0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        ledger.limit("heart", Limit(8.0, 1e-5, "record"))
        ledger.admit("a", "heart", Request("record", "replace_one", ()), whole=False)
        for t in range(3):
            release(ledger, "a", f"{t}", (ITEM,), lambda t=t: b"message %d" % t)  # type: ignore[misc]
    return tmp_path / "l"


def spent(file: Path) -> Statement:
    with Ledger.open(file) as ledger:
        return ledger.statement("heart")


def changed(file: Path, *statements: str) -> None:
    database = sqlite3.connect(file)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def sentence(file: Path) -> str:
    """What every command says of this file, in one line."""
    return sordino("ledger", "show", file).sentence


def test_a_ledger_that_another_holds_is_given_up_after_a_while_and_nothing_is_charged(file: Path) -> None:
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with Ledger.open(file, wait=0.1) as ledger:
        with pytest.raises(StorageError, match=r"which other processes have locked for 0\.1 seconds"):
            ledger.charge("a", "more", (ITEM,))
        holder.execute("ROLLBACK")
        ledger.charge("a", "more", (ITEM,))
        assert ledger.charges("a") == {"0": 1, "1": 1, "2": 1, "more": 1}
    holder.close()


def test_a_newer_format_is_named(file: Path) -> None:
    changed(file, "PRAGMA user_version=7")
    assert "of format 7; needed format 2" in sentence(file)


def test_what_is_not_a_ledger_is_left_as_it_was(tmp_path: Path) -> None:
    texts = {"text": b"not a database, but long enough to have a header " * 40, "short": b"x", "empty": b""}
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
        assert "which is not a ledger" in sentence(tmp_path / name)
        words = ("--epsilon", 1, "--delta", 1e-5, "--unit", "record")
        assert "which is not a ledger" in sordino("ledger", "limit", tmp_path / name, "x", *words).sentence
        assert (tmp_path / name).read_bytes() == data
    database = sqlite3.connect(tmp_path / "other.db")
    database.execute("CREATE TABLE mine (x)")
    database.close()
    assert "which is not a ledger" in sentence(tmp_path / "other.db")
    assert "which is not a file" in sentence(tmp_path)
    assert "which does not exist" in sentence(tmp_path / "none")


@pytest.mark.parametrize(
    "statement",
    [
        """UPDATE entries SET body = replace(body, '"noise_multiplier":4.0', '"noise_multiplier":9.0') WHERE id = 4""",
        "DELETE FROM entries WHERE id = 5",
        "DELETE FROM entries WHERE id = 3",
        "DELETE FROM head",
        "DROP TABLE entries",
        "UPDATE entries SET id = 50 WHERE id = 5",
        "UPDATE entries SET body = x'00ff' WHERE id = 2",
    ],
)
def test_a_line_that_was_changed_or_taken_out_is_missed(file: Path, statement: str) -> None:
    changed(file, statement)
    assert "which is damaged" in sentence(file)


def test_a_stored_message_that_was_changed_is_not_sent(file: Path) -> None:
    changed(file, "UPDATE messages SET body = x'00' WHERE job = '1'")
    with Ledger.open(file) as ledger:
        for ask in (lambda: ledger.replay("1"), lambda: ledger.charge("a", "1", (ITEM,))):
            with pytest.raises(StorageError, match="a stored message does not match its checksum"):
                ask()
        assert ledger.replay("0") == b"message 0"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_is_one_sentence(file: Path) -> None:
    file.chmod(0o400)
    file.parent.chmod(0o500)
    try:
        with pytest.raises(StorageError), Ledger.open(file) as ledger:
            ledger.charge("a", "more", (ITEM,))
    finally:
        file.parent.chmod(0o700)


def test_a_ledger_that_turns_read_only_charges_nothing(file: Path) -> None:
    with Ledger.open(file) as ledger:
        ledger.journal._database.execute("PRAGMA query_only=1")
        with pytest.raises(StorageError, match="cannot be written"):
            ledger.charge("a", "more", (ITEM,))
    assert spent(file).charges == 3


def test_an_unknown_data_set_is_one_sentence(file: Path) -> None:
    assert "did you mean 'heart'" in sordino("ledger", "show", file, "hart").sentence
    assert "did you mean 'heart'" in sordino("ledger", "history", file, "hart").sentence


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epsilon", "0", "--delta", "0.1", "--unit", "record"), "epsilon above 0"),
        (("--epsilon", "1", "--delta", "1", "--unit", "record"), "delta in"),
        (("--epsilon", "nan", "--delta", "0.1", "--unit", "record"), "epsilon above 0"),
        (("--epsilon", "1", "--delta", "0.1", "--unit", "records"), "did you mean 'record'"),
        (("--epsilon", "1", "--delta", "0.1", "--unit", "record", "--relation", "x"), "one of"),
        (("--epsilon", "1", "--delta", "0.1", "--unit", "client"), "one record, replace_one"),
    ],
)
def test_a_limit_that_is_none_is_one_sentence(file: Path, words: tuple[str, ...], said: str) -> None:
    before = spent(file)
    assert said in sordino("ledger", "limit", file, "heart", *words).sentence
    assert spent(file) == before


def test_a_ledger_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed just before it has its name: nothing is there; of two who make it the second finds the first's."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", stop)
        with pytest.raises(KeyboardInterrupt):
            Ledger.open(tmp_path / "l", create=True)
    assert list(tmp_path.iterdir()) == []
    with Ledger.open(tmp_path / "l", create=True) as one:
        one.limit("heart", Limit(8.0, 1e-5, "record"))
        journal.make(tmp_path / "l")
    assert spent(tmp_path / "l").runs == 0


def test_the_file_is_its_owners_alone_and_synced_at_every_commit(file: Path) -> None:
    assert file.stat().st_mode & 0o077 == 0
    with Ledger.open(file) as ledger:
        ask = ledger.journal._database.execute
        found = [ask(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "application_id")]
    assert found == ["delete", 3, MARK]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    with Ledger.open(folder / "l", create=True) as ledger:
        ledger.limit("heart", Limit(8.0, 1e-5, "record"))
        ledger.admit("a", "heart", Request("record", "replace_one", ()), whole=False)
        for t in range(3):
            release(ledger, "a", f"{t}", (ITEM,), lambda: b"message")
    return folder, (folder / "l").read_bytes()


FLIPS = st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_tables_whose_names_are_damaged_are_one_sentence(whole: tuple[Path, bytes]) -> None:
    folder, data = whole
    begin = data.index(b"CREATE TABLE")
    for place in range(begin, begin + 200):
        for left in folder.glob("y*"):
            left.unlink()
        shutil.copy(folder / "l.head", folder / "y.head")
        (folder / "y").write_bytes(data[:place] + bytes([data[place] ^ 128]) + data[place + 1 :])
        try:
            assert spent(folder / "y").items == (Item(ITEM.event, 3),)
        except UserError as error:
            said = str(error)
            assert "\n" not in said, said


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(0)),
)
def test_whatever_bytes_are_damaged_nothing_spent_is_forgotten(
    whole: tuple[Path, bytes], flips: list[tuple[int, int]], cut: int | None
) -> None:
    """One sentence, or all that was spent is there and the next charge adds to it."""
    folder, data = whole
    damaged = bytearray(data)
    for place, bits in flips:
        damaged[place % len(data)] ^= bits
    for left in folder.glob("x*"):
        left.unlink()
    shutil.copy(folder / "l.head", folder / "x.head")
    (folder / "x").write_bytes(bytes(damaged) if cut is None else bytes(damaged[: cut % len(data)]))
    try:
        with Ledger.open(folder / "x", wait=0.1) as ledger:
            assert ledger.statement("heart").items == (Item(ITEM.event, 3),)
            ledger.charge("a", "new", (ITEM,))
            assert ledger.statement("heart").items == (Item(ITEM.event, 4),)
    except (UserError, BudgetError) as error:
        said = str(error)
        assert "\n" not in said, said
