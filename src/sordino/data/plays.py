"""Shakespeare's plays as roles: who says what, by LEAF's rule, from Project Gutenberg's text of 1994.

A play begins at a line "by William Shakespeare", its title stands two to seven lines above. Two blanks, a name and a
full stop begin a speech, four blanks continue it; The Comedy of Errors is printed without them. A role is a client if
it has three lines or more and more than 80 characters. Sonnets, contents and what comes after the plays are left out.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Iterator

from sordino.errors import DataError

AUTHOR, LAST, FEWEST = "by William Shakespeare", 124_195, 3  # LAST: the line on which the plays end
TEXT_SUM = "c5601d266987ac885ca96522b1b4e439feb7eca39f0fe1111f7342b63b6468f3"  # sha256, lines ended by "\n"
FIX = "delete shakespeare/1994-01-100.zip in the cache and load again"
MOST = 1 << 26  # bytes of the text inside the archive
_ERRORS = "THE COMEDY OF ERRORS"
_SPEECH, _MORE = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")
_BARE_SPEECH, _BARE_MORE = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)")
Play = dict[str, list[str]]  # what each role says, line by line


def text_of(archive: bytes) -> str:
    """The text in Gutenberg's archive: read in memory, nothing is unpacked to a path of the archive's choice."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as held:
            info = next(one for one in held.infolist() if one.filename.rpartition("/")[2].lower() == "100.txt")
            if info.file_size > MOST:
                raise DataError(f"{info.file_size:,} bytes of 100.txt", f"at most {MOST:,}")
            return checked(held.read(info))
    except (zipfile.BadZipFile, StopIteration, NotImplementedError, RuntimeError, EOFError) as error:
        raise DataError(f"an archive without 100.txt ({error})", "Gutenberg's 1994-01-100.zip", FIX) from None


def checked(content: bytes) -> str:
    """The text, if it is the one that LEAF reads; how its lines end does not matter."""
    plain = content.replace(b"\r\n", b"\n")
    found = hashlib.sha256(plain).hexdigest()
    if found != TEXT_SUM:
        raise DataError(f"a text of Shakespeare with sha256 {found}", f"that of 1994, sha256 {TEXT_SUM}", FIX)
    return plain.decode("latin-1")


def roles_of(text: str) -> dict[str, str]:
    """What every role says, as one line of text, by the role's name in LEAF's spelling, in order."""
    found = {}
    for title, play in _plays(text.splitlines()[1:]):
        for role, said in play.items() if len(play) > 1 else ():
            whole = re.sub(r"  +", " ", " ".join(said) + " ")
            if len(said) >= FEWEST and len(whole) > 80:
                found[re.sub(r"\W", "_", f"{title}_{role}")] = whole
    return dict(sorted(found.items()))


def _plays(lines: list[str]) -> Iterator[tuple[str, Play]]:
    """Title and roles, play by play; the first author's line is that of the sonnets."""
    begins = [i for i, line in enumerate(lines) if AUTHOR in line and i <= LAST][1:]
    for begin, end in zip(begins, [*begins[1:], LAST + 1], strict=True):
        title = next((above.strip() for above in reversed(lines[begin - 7 : begin - 1]) if above.strip()), "")
        yield title, _speeches(lines[begin + 1 : end], bare=title == _ERRORS)


def _speeches(lines: list[str], bare: bool) -> Play:
    play: Play = {}
    speech, more = (_BARE_SPEECH, _BARE_MORE) if bare else (_SPEECH, _MORE)
    who: str | None = None
    for line in lines:
        begun = speech.match(line)
        if begun:
            who = None if bare and begun[1].upper().startswith("ACT ") else begun[1].upper()
        goes_on = begun or more.match(line)
        if bare and not begun and goes_on and goes_on[1].startswith("<"):
            who = None
        if who and goes_on:
            play.setdefault(who, []).append(begun[2] if begun else goes_on[1])
    return play
