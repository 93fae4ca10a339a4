"""A stranger's parts: enforced where they are made, found without an import path, named on the certificate."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.commands import contents, federation, sordino, spelt_out
from tests.pages import blocks

import sordino as package
from sordino import codec
from sordino.accounting.bounds import Bound
from sordino.codec import part
from sordino.data import datasets
from sordino.errors import ConfigError
from sordino.loop import run
from sordino.parts.encoding import Clip, Public, Step
from sordino.parts.mechanisms import Mechanism
from sordino.plan import Plan
from sordino.recipes import RECIPES, add_recipe, dp_fed_avg

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clean() -> Iterator[None]:
    """What a test registers is gone after it."""
    families = [family for family in codec.Part.__subclasses__() if family.__module__.startswith("sordino.")]
    known: list[tuple[dict[str, Any], dict[str, Any]]] = [(family.members, {**family.members}) for family in families]
    known += [(held, {**held}) for held in (RECIPES, datasets._SETS, part.FILES)]
    yield
    for held, before in known:
        for name in held.keys() - before.keys():
            del held[name]
    for name in [name for name in sys.modules if re.match(r"(own_part|sordino_with_)", name)]:
        del sys.modules[name]
    codec.load_plugins.cache_clear()
    part._version.cache_clear()


# ---- what a part must be ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boundless(Step, kind="boundless of a test"):
    """Says nothing of its bound."""

    def encode(self, rows: Any, public: Public, slopes: Any = None) -> Any:
        return rows

    def decode(self, mean: Any, public: Public) -> Any:
        return mean

    def decoded_noise_std(self, std: Any, public: Public) -> Any:
        return std


def test_a_part_without_what_its_family_asks_for_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="bound"):
        Boundless()  # type: ignore[abstract]
    with pytest.raises(ConfigError, match="without bound"):
        codec.read(Step, {"kind": "boundless of a test"}, "plan.encode[0]")


@pytest.mark.usefixtures("clean")
def test_a_kind_is_given_once() -> None:
    before = Step.members["clip"]
    with pytest.raises(ConfigError, match=r"second Step of kind 'clip'.*sordino.parts.encoding.Clip has this one"):
        type("Clip", (Clip,), {"__module__": "my_pkg"}, kind="clip")
    with pytest.raises(ConfigError, match="second Step of kind 'clip'"):
        type("Clip", (Clip,), {"__module__": "sordino.parts.encoding", "encode": lambda *_: None}, kind="clip")
    assert Step.members["clip"] is before
    assert Mechanism.members["gaussian"].__name__ == "Gaussian"  # an event has the same kind: another family

    for _ in range(2):  # a cell of a notebook that is run again

        @dataclass(frozen=True, slots=True)
        class Again(Clip, kind="again of a test"):
            pass

    assert Step.members["again of a test"] is Again


@pytest.mark.usefixtures("clean")
def test_a_recipe_and_a_data_set_have_names_of_their_own() -> None:
    def dp_fed_ls(*, rounds: int) -> Plan:
        return tiny.plan(rounds=rounds)

    with pytest.raises(ConfigError, match="second recipe 'dp_fed_ls'"):
        add_recipe(dp_fed_ls)
    with pytest.raises(ConfigError, match="second data set 'loans'"):
        datasets.add_dataset("loans", lambda: None)  # type: ignore[arg-type, return-value]
    assert add_recipe(dp_fed_avg) is RECIPES["dp_fed_avg"]


def test_what_a_stranger_needs_is_public() -> None:
    needed = (
        "Part Step LocalSolver Sampler RecordSampler Release Mechanism Strategy Toeplitz Postprocess Schedule Event "
    )
    needed += "ServerOptimizer Gradient MaskSource Loss Preparation Objective Public Noised Bound AlreadyPrivate "
    for name in (needed + "SamplingLaw Distribution Relation").split():
        assert name in package.parts.__all__
        assert hasattr(package.parts, name)


def test_the_example_of_contributing_runs_as_it_stands() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "contributing", "Step": Step, "dataclass": dataclass}
    try:
        exec(textwrap.dedent("   " + block.lstrip() if block.startswith("   ") else block), namespace)
        halve = namespace["Halve"]()
        whole = tiny.plan(encode=(Clip(1.0), halve))
        assert codec.read(Plan, codec.dump(whole)) == whole
        assert halve.bound(Bound("client", finite=True)).finite
        assert len(list(run(whole, tiny.task()))) == whole.rounds
        assert [one.kind for one in codec.foreign(whole)] == ["halve"]
    finally:
        Step.members.pop("halve", None)


# ---- a file on the command line -----------------------------------------------------------------------------------

OWN = '''
from dataclasses import dataclass
from sordino.parts import Step

@dataclass(frozen=True)
class Flip(Step, kind="flip"):
    """-x."""
    def encode(self, rows, public, slopes=None): return -rows
    def decode(self, mean, public): return -mean
    def bound(self, before): return before
    def decoded_noise_std(self, std, public): return std
'''


def flipped(folder: Path) -> Path:
    """A federation with a step that only the file beside it knows."""
    (folder / "my_parts.py").write_text(OWN)
    return spelt_out(folder, ("clip_norm = 1.0 }]", 'clip_norm = 1.0 }, { kind = "flip" }]'))


@pytest.mark.usefixtures("clean")
def test_a_file_of_parts_is_named_with_its_hash_and_may_not_change_under_a_run(tmp_path: Path) -> None:
    file, own, out = flipped(tmp_path), tmp_path / "my_parts.py", tmp_path / "a"
    assert "kind 'flip'" in sordino("plan", file).sentence
    assert sordino("run", file, "--out", out, "--with", own).code == 0
    made = sordino("certify", out, "--with", own, "--json").json
    (named,) = made["foreign_parts"]
    assert (named["package"], named["family"], named["kind"]) == ("my_parts.py", "Step", "flip")
    assert named["version"].startswith("sha256:")
    assert any("the privacy statements that my_parts.py sha256:" in line for line in made["assumptions"])
    assert sordino("explain", out, "--with", own).code == 0
    own.write_text(OWN.replace("return -rows", "return -1000 * rows"))
    said = sordino("certify", out, "--with", own)
    assert said.code == 1
    assert "foreign_parts" in said.err or "assumptions" in said.err
    assert "was started with sordino" in sordino("run", file, "--out", out, "--resume", "--with", own).sentence


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def broken(:", "cannot be read"),
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("from sordino.parts import Clip\nclass C(Clip, kind='clip'): pass", "second Step"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_file_of_parts_that_fails_is_one_sentence(text: str, word: str, tmp_path: Path) -> None:
    file, own = federation(tmp_path), tmp_path / "my_parts.py"
    own.write_text(text)
    assert word in sordino("plan", file, "--with", own).sentence
    assert "nowhere.py" in sordino("plan", file, "--with", tmp_path / "nowhere.py").sentence


@pytest.mark.parametrize("kind", ["os:system", "tests.tiny:plan", "../my_parts.py", "sordino.parts.encoding.Clip"])
def test_no_import_path_is_read_from_a_file(kind: str, tmp_path: Path) -> None:
    assert "a known kind" in sordino("plan", spelt_out(tmp_path, ('kind = "clip"', f'kind = "{kind}"'))).sentence


# ---- a package ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/own_part, installed with pip into a folder of its own, without the network."""
    source, target = tmp_path_factory.mktemp("source") / "own_part", tmp_path_factory.mktemp("target")
    shutil.copytree(ROOT / "examples" / "own_part", source)
    words = "-m pip install --quiet --no-deps --no-build-isolation --no-index --disable-pip-version-check --target"
    subprocess.run([sys.executable, *words.split(), str(target), str(source)], check=True, capture_output=True)
    return target


@pytest.mark.usefixtures("clean")
def test_a_package_of_parts_runs_from_its_file_is_certified_and_audited(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = Path("examples/own_part/fed.toml"), tmp_path / "runs" / "own"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert "unknown" in sordino("run", file, "--out", out).err or "kind" in sordino("run", file, "--out", out).err
    monkeypatch.syspath_prepend(str(installed))
    codec.load_plugins.cache_clear()
    part._version.cache_clear()
    for command, _ in blocks(ROOT / "examples" / "own_part" / "README.md")[0].commands:
        assert sordino(*command.split()[1:]).code == 0, command
    made = sordino("certify", out, "--json").json
    named = {(one["family"], one["kind"]): (one["package"], one["version"]) for one in made["foreign_parts"]}
    kinds = {"Sampler": "halves", "Step": "mirror", "Postprocess": "wiener", "Architecture": "tanh", "Dataset": "rings"}
    assert named == dict.fromkeys(kinds.items(), ("own_part", "1.2.0"))
    assert any("that own_part 1.2.0 makes for its part `halves`" in line for line in made["assumptions"])
    assert made["declared_public"][0]["by"] == "the package own_part"
    assert "own_fed_avg" in sordino("recipes", "list").out
    assert 'name = "own_fed_avg"' in sordino("recipes", "show", "own_fed_avg").out


def test_the_command_line_finds_an_installed_package_by_itself(installed: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(installed)])
    told = {**os.environ, "PYTHONPATH": paths}
    file = ROOT / "examples" / "own_part" / "fed.toml"
    words = [sys.executable, "-m", "sordino", "plan", str(file)]
    found = subprocess.run(words, env=told, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert "wiener" in found.stdout
    (installed / "own_part" / "recipe.py").write_text("1 / 0\n")
    broken = subprocess.run(words, env=told, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert broken.returncode == 2
    assert "package own-part, whose parts cannot be loaded (ZeroDivisionError" in broken.stderr
    assert contents(tmp_path) == {}
