"""Blocks of pages: what each is, who executes it, and the few commands that nobody does."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/own_part/README.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "template" not in page.name),
)
FENCE = re.compile(r'^( *)```([\w-]*)(?: title="([^"]+)")?\n(.*?)^\1```$', re.DOTALL | re.MULTILINE)
LANGUAGES = {
    "console": "commands behind `$ ` with what they print: tests/test_pages.py follows the page, or ELSEWHERE",
    "python": "run with its page by tests/test_pages.py, by itself by tests/test_docs.py, or ELSEWHERE",
    "toml": "read by tests/test_docs.py; with a title it is a file that the page's commands read",
    "sh": "what one machine does in docs/deploy.md and docs/operate.md: ELSEWHERE, by its title",
    "text": "nothing to execute: a figure, a formula, rows, a message",
}
ELSEWHERE = {  # blocks by page and title, commands by their first word: the test that takes them from the page
    ("docs/deploy.md", "on this machine"): "tests/deploy/test_on_one_machine.py",
    ("docs/deploy.md", "on the server"): "tests/deploy/test_across_hosts.py",
    ("docs/deploy.md", "on the server, when the keys are there"): "tests/deploy/test_across_hosts.py",
    ("docs/deploy.md", "in every silo"): "tests/deploy/test_across_hosts.py",
    ("docs/hospital-tables.md", "tables: on the server"): "tests/deploy/test_messy_hospitals.py",
    ("docs/hospital-tables.md", "tables: in every silo, at the end"): "tests/deploy/test_messy_hospitals.py",
    ("docs/operate.md", "operate: look"): "tests/federation/test_operate.py",
    ("docs/operate.md", "operate: add a hospital"): "tests/federation/test_operate.py",
    ("docs/operate.md", "operate: take a hospital out"): "tests/federation/test_operate.py",
    ("docs/operate.md", "operate: a second project"): "tests/federation/test_operate.py",
    ("docs/operate.md", "operate: rotate a silo's key"): "tests/federation/test_operate.py",
    ("docs/operate.md", "operate: back up and restore a ledger"): "tests/federation/test_operate.py",
    ("docs/operate.md", "operate: upgrade"): "tests/federation/test_operate.py",
    ("docs/operate.md", "operate: sign together"): "tests/federation/test_operate.py",
    ("docs/deploy.md", "your app"): "tests/deploy/test_private_app.py",
    ("docs/from-flower.md", "flwr"): "tests/deploy/test_internals.py",
    ("docs/dp-sgd.md", "train.py"): "tests/dpsgd/test_many_processes.py",
    ("docs/dp-sgd.md", "torchrun"): "tests/dpsgd/test_many_processes.py",
    ("docs/distributed.md", "ranks.py"): "tests/engines/as_rank.py",
    ("docs/distributed.md", "torchrun"): "tests/engines/test_distributed.py",
    ("examples/own_part/README.md", "sordino"): "tests/contracts/test_own_parts.py",
}
EXCEPTIONS = {  # commands that no test executes, and why
    "python examples/dp_lora.py --seeds 1": "two minutes; tests/engines/test_transformers.py runs its main on less",
    "torchrun --nnodes 3 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29400 -m sordino run fed.toml "
    "--out runs/many": "three machines; the line above it has two ranks of one",
    "pip install sordino-0.2.0-py3-none-any.whl": "scripts/release.py installs the wheel that it builds",
    **dict.fromkeys(
        ("make demo", "make install", "make lint", "make site", "make test", "make test-deploy"),
        "they install, or run the tests: that the target exists is looked at; .ci/run calls them",
    ),
}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, what it is, its text."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.name}:{self.line}"

    @property
    def name(self) -> str:
        return str(self.page.relative_to(ROOT))

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command of a console, as one line without its comment, and what it is said to print."""
        whole = re.sub(r"\\\n *", "", self.text)
        parts = (part.partition("\n") for part in re.split(r"^\$ ", whole, flags=re.MULTILINE)[1:])
        return [(re.sub(r"\s+# .*", "", command), shown) for command, _, shown in parts]


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """The blocks of a page, from its first to its last."""
    text = page.read_text("utf-8")
    return tuple(
        Block(page, text.count("\n", 0, match.start()) + 1, match[2], match[3] or "", textwrap.dedent(match[4]))
        for match in FENCE.finditer(text)
    )


def every(language: str) -> list[Block]:
    """All blocks of a language."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def titled(page: str, title: str) -> Block:
    """The one block of a page with this title."""
    (found,) = (block for block in blocks(ROOT / page) if block.title == title)
    return found


def followed(page: Path) -> bool:
    """Whether tests/test_pages.py follows it: some of its commands are ours, and not another test's."""
    return any(runs_here(block, command) for block in blocks(page) for command, _ in block.commands)


def runs_here(block: Block, command: str) -> bool:
    """Whether a command of a block is for tests/test_pages.py to run."""
    taken = (block.name, block.title) in ELSEWHERE or (block.name, command.split()[0]) in ELSEWHERE
    return block.language == "console" and not taken and command not in EXCEPTIONS


def machine(title: str) -> list[tuple[str, bool]]:
    """What a machine of docs/deploy.md does: scripts of one command each, after the `cd` and `export` before it.

    True: the page says of the command that it stays.
    """
    before: list[str] = []
    found = []
    for line in titled("docs/deploy.md", title).text.splitlines():
        command, _, comment = (part.strip() for part in line.partition("  #"))
        if shlex.split(command)[0] in ("cd", "export"):
            before.append(command)
        else:
            found.append(("\n".join([*before, command]), comment.startswith("stays")))
    return found


def words(command: str) -> list[str]:
    """A command as the shell takes it apart; `>` stays a word."""
    return shlex.split(command)
