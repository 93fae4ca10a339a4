"""A ledger copied, cut, flipped or rolled back at random moments while a silo serves: none is accepted that has less.

    accepted => the ledger holds every charge whose noise was drawn before the copy or the damage began

40 moments here, 1,000 with HYPOTHESIS_PROFILE=nightly. What is rolled back whole, head file and all, is not among them:
nothing on the same disk can notice that.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.ledger.release import release

from sordino.accounting.events import GaussianNoise
from sordino.errors import UserError
from sordino.ledger import journal
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item, Limit

MOMENTS = 1000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 40
ITEM = Item(GaussianNoise(4.0))
Damage = Callable[[Path, random.Random], Path]  # what is done to a folder while its silo serves; where to open it


def serve(folder: Path) -> None:
    """A silo: charge, draw, store, again and again, until it is killed or its ledger refuses."""
    drawn = os.open(folder / "drawn", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    ledger = Ledger.open(folder / "l")
    first = sum(ledger.charges("run").values())

    def make() -> bytes:
        os.write(drawn, b"x")  # the noise
        return b"message"

    for job in range(first, first + 10**6):
        release(ledger, "run", str(job), (ITEM,), make)


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    child = os.fork()
    if child == 0:
        try:
            serve(folder)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def made(folder: Path) -> Path:
    folder.mkdir()
    with Ledger.open(folder / "l", create=True) as ledger:
        ledger.limit("own", Limit(1e6, 1e-5, "record"))
        ledger.admit("run", "own", Request("record", "replace_one", ()), whole=False)
    (folder / "drawn").write_bytes(b"")
    return folder


def drawn(folder: Path) -> int:
    """Messages whose noise was drawn."""
    return (folder / "drawn").stat().st_size


def accepted(file: Path) -> int | None:
    """Charges in a ledger that opens; None if it is refused, in one sentence."""
    try:
        with Ledger.open(file, wait=5.0) as ledger:
            found = ledger.statement("own").items if "own" in ledger.names else ()
            return sum(item.count for item in found)
    except UserError as error:
        said = str(error)
        assert "\n" not in said, said
        return None


def charged_more(folder: Path, coins: random.Random) -> None:
    """Wait until the silo has sent a few more messages, and then for no time in particular."""
    enough = drawn(folder) + coins.randint(1, 4)
    for _ in range(3000):
        if drawn(folder) >= enough:
            break
        time.sleep(0.001)
    time.sleep(coins.random() * 0.01)


# ---- what is done to it ----------------------------------------------------------------------------------------------


def copied(source: Path, names: list[str]) -> Path:
    elsewhere = source / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    elsewhere.mkdir()
    for name in names:
        if (source / name).exists():
            try:
                shutil.copy(source / name, elsewhere / name)
            except FileNotFoundError:  # a journal that was there a moment ago
                continue
    return elsewhere / "l"


def database_alone(folder: Path, coins: random.Random) -> Path:
    """`cp ledger.db`."""
    return copied(folder, ["l"])


def files_in_any_order(folder: Path, coins: random.Random) -> Path:
    """`cp` of everything, one file after the other."""
    names = ["l", "l.head", "l-journal", "l-wal", "l-shm"]
    coins.shuffle(names)
    return copied(folder, names)


def cut(folder: Path, coins: random.Random) -> Path:
    file = folder / coins.choice(["l", "l", "l", "l.head", "l-wal"])
    if file.exists():
        os.truncate(file, coins.randrange(file.stat().st_size + 1))
    return folder / "l"


def flipped(folder: Path, coins: random.Random) -> Path:
    """One bit of what is not empty in a file."""
    file = folder / coins.choice([name for name in ("l", "l", "l.head", "l-wal") if (folder / name).exists()])
    data = bytearray(file.read_bytes())
    places = [k for k, byte in enumerate(data) if byte]
    if places:
        data[coins.choice(places)] ^= 1 << coins.randrange(8)
    file.write_bytes(bytes(data))
    return folder / "l"


def put_back(folder: Path, coins: random.Random) -> Path:
    """An older database over the newer one, in place or by a move; the head file stays."""
    shutil.copy(folder / "l", folder / "old")
    charged_more(folder, coins)
    if coins.random() < 0.5:
        shutil.copy(folder / "old", folder / "l")
    else:
        os.replace(folder / "old", folder / "l")
    return folder / "l"


LIVE: dict[str, Damage] = {"database alone": database_alone, "files in any order": files_in_any_order}
IN_PLACE: dict[str, Damage] = {"cut": cut, "flipped": flipped, "put back": put_back}


def moment(folder: Path, coins: random.Random, name: str) -> tuple[int, int | None]:
    """One moment of a silo that serves: charges whose noise was drawn, and those in what was accepted."""
    if name in LIVE:
        with serving(folder):
            charged_more(folder, coins)
            before = drawn(folder)
            where = LIVE[name](folder, coins)
            return before, accepted(where)
    victim = folder.with_name("victim")
    shutil.rmtree(victim, ignore_errors=True)
    shutil.copytree(folder, victim, ignore=shutil.ignore_patterns("elsewhere"))
    with serving(victim):
        charged_more(victim, coins)
        if name != "flipped":  # while it serves
            where = IN_PLACE[name](victim, coins)
            time.sleep(coins.random() * 0.01)
    if name == "flipped":  # after it was killed
        where = IN_PLACE[name](victim, coins)
    return drawn(victim), accepted(where)


def tried(tmp_path: Path, moments: int) -> tuple[list[tuple[str, int, int]], Counter[tuple[str, bool]]]:
    """Moments at which less was accepted than spent; and how many of each kind were accepted."""
    coins, names = random.Random(0), [*LIVE, *IN_PLACE]
    less: list[tuple[str, int, int]] = []
    count: Counter[tuple[str, bool]] = Counter()
    for k in range(moments):
        if k % 25 == 0:
            folder = made(tmp_path / f"{k}")
        name = names[k % len(names)]
        spent, found = moment(folder, coins, name)
        count[name, found is not None] += 1
        if found is not None and found < spent:
            less.append((name, spent, found))
    return less, count


def test_no_copy_cut_flip_or_rollback_is_accepted_with_less_than_was_spent(tmp_path: Path) -> None:
    less, count = tried(tmp_path, MOMENTS)
    print({f"{name}, {'accepted' if yes else 'refused'}": n for (name, yes), n in sorted(count.items())})
    assert not less
    assert sum(n for (_, yes), n in count.items() if yes) > 0  # a refusal of everything would prove nothing
    assert count["database alone", True] == 0


def test_without_a_head_file_an_older_ledger_would_be_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: nobody looks at the head."""
    monkeypatch.setattr(journal.Journal, "check_head", lambda self, said, where: None)
    folder = made(tmp_path / "a")
    with Ledger.open(folder / "l") as ledger:
        shutil.copy(folder / "l", folder / "old")
        ledger.charge("run", "new", (ITEM,))
    shutil.copy(folder / "old", folder / "l")
    assert accepted(folder / "l") == 0


def test_a_backup_of_a_silo_that_serves_holds_every_charge_that_was_made_before_it(tmp_path: Path) -> None:
    folder, coins = made(tmp_path / "a"), random.Random(1)
    with serving(folder):
        for k in range(8):
            charged_more(folder, coins)
            before = drawn(folder)
            with Ledger.open(folder / "l") as ledger:
                head = ledger.backup(folder / f"backup{k}")
            assert head.lines - 2 >= before
