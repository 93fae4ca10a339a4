"""A run on disk: plan.toml, public.json, engine.jsonl, charges.jsonl, history.jsonl, checkpoint/, model.safetensors and
certificate.json.

Order within a round: the charge is on disk before noise is drawn; history, then the checkpoint, after the step. So a
killed run continues from its last checkpoint, and whatever was charged stays charged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from safetensors import safe_open

from sordino import codec
from sordino.config import Config, load_config
from sordino.errors import CertificateError, ConfigError, UserError
from sordino.parts.samplers import Cohort
from sordino.plan import State
from sordino.privacy.certificate import Declared, Facts, certificate, compare
from sordino.rng import Seeded
from sordino.training import counted

_NO_COINS = Seeded(0).at(0, "none")  # a public sampler draws none


@dataclass(frozen=True)
class RunFolder:
    """One run's files; also the place where its rounds are charged."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: Config, public: tuple[Declared, ...] = ()) -> RunFolder:
        """A new folder, with the rows of the data that are declared public; an existing one is never touched."""
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"{path}, which exists", "a new folder", "choose another --out, or add --resume"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}, which cannot be made ({error.strerror})", "a folder to write to") from None
        folder = cls(path)
        (path / "checkpoint").mkdir()
        folder._write("public.json", json.dumps([asdict(one) for one in public]).encode())
        folder._write("plan.toml", codec.to_toml(config).encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that a run has made."""
        if not (path / "plan.toml").is_file():
            raise ConfigError(f"no plan.toml in {path}", "the folder of a run", "give the --out of 'sordino run'")
        return cls(path)

    def config(self) -> Config:
        """The configuration that the run was started with."""
        return load_config(self.path / "plan.toml")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time runs in this folder; the lock dies with its process."""
        with open(self.path / "checkpoint" / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"{self.path}, in which a run is going on", "a folder at rest", "wait for it"
                ) from None
            yield

    # ---- written while running --------------------------------------------------------------------------------------

    def charge(self, t: int, cohort: Cohort | None) -> None:
        """One release, written down before any of its noise exists; who took part only where that is seen anyway."""
        line: dict[str, Any] = {"round": t + 1}
        if cohort is not None:
            line["cohort"] = cohort.tolist()
        with open(self.path / "charges.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def announce(self, rounds: int, header: dict[str, str | int]) -> None:
        """How the rounds from here on are computed: one line each time the run is started or continued."""
        with open(self.path / "engine.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"after_round": rounds, **header}) + "\n")

    def record(self, entry: dict[str, Any]) -> None:
        """One line of history, flushed."""
        with open(self.path / "history.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self, state: State) -> None:
        """The checkpoint: replaced in one move, so it is whole or the one before."""
        named = {f"memory.{name}": tensor for name, tensor in state.memory.items()}
        named |= {f"learnt.{name}": tensor for name, tensor in state.learnt.items()}
        whole = {name: tensor.contiguous() for name, tensor in named.items()}
        data = safetensors.torch.save(whole, metadata={"t": str(state.t)})
        self._write("checkpoint/state.safetensors", data)

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.path / f"{name}.partial"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)

    def finish(self, model: bytes) -> dict[str, Any]:
        """Model and certificate, from what this folder says happened."""
        self._write("model.safetensors", model)
        made = self.certificate()
        self._write("certificate.json", _text(made).encode())
        return made

    # ---- read back --------------------------------------------------------------------------------------------------

    def state(self) -> State | None:
        """The last checkpoint, or None before the first round was done."""
        file = self.path / "checkpoint" / "state.safetensors"
        if not file.is_file():
            return None
        with safe_open(file, framework="pt") as stored:
            named = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            t = int(stored.metadata()["t"])
        parts = [
            {n.partition(".")[2]: v for n, v in named.items() if n.startswith(side)} for side in ("memory.", "learnt.")
        ]
        return State(t, *parts)

    def rewind(self, rounds: int) -> None:
        """Drop history of rounds after the checkpoint: they will be run, and written, again."""
        kept = [line for line in self._lines("history.jsonl") if line["round"] <= rounds]
        self._write("history.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._mend("charges.jsonl")

    def _mend(self, name: str) -> None:
        """Drop a last line cut short by a kill, so that the next one starts on its own; its round drew no noise."""
        file = self.path / name
        data = file.read_bytes() if file.is_file() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self._write(name, whole)

    def public(self) -> tuple[Declared, ...]:
        """Which rows were declared public when the run was started, and by whom."""
        try:
            return tuple(Declared(**one) for one in json.loads((self.path / "public.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CertificateError("public.json", f"public.json cannot be read ({error})") from None

    def history(self) -> list[dict[str, Any]]:
        """One entry per round."""
        return self._lines("history.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of a jsonl file; a line cut short by a kill is dropped."""
        try:
            text = (self.path / name).read_text(encoding="utf-8")
            lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise CertificateError(name, f"{name} holds a line that is not JSON ({error})") from None
        if not all(isinstance(line, dict) and isinstance(line.get("round"), int) for line in lines):
            raise CertificateError(name, f"{name} holds a line without a round")
        return lines

    def rounds(self) -> list[int]:
        """Which rounds were charged, counted from 0; one that was run again stands twice."""
        return [int(line["round"]) - 1 for line in self._lines("charges.jsonl")]

    def cohorts(self) -> list[Cohort]:
        """Who took part in each charged round, where that is seen by design or public anyway; else nothing."""
        clients = self.config().plan.clients
        if not clients.random:
            return [clients.draw(t, _NO_COINS) for t in self.rounds()]
        found = [line["cohort"] for line in self._lines("charges.jsonl") if "cohort" in line]
        if not all(isinstance(cohort, list) and all(type(i) is int and i >= 0 for i in cohort) for cohort in found):
            raise CertificateError("charges.jsonl", "charges.jsonl holds a cohort that is not a list of clients")
        return [np.asarray(cohort, dtype=np.int64) for cohort in found]

    def facts(self) -> Facts:
        """What a certificate needs beside the plan."""
        config = self.config()
        known = Facts(config.delta, config.privacy.noise, 0, None, self._model_sum(), codec.digest(config))
        return counted(config.plan, self.rounds(), self.cohorts(), replace(known, **config.facts, public=self.public()))

    def _model_sum(self) -> str:
        file = self.path / "model.safetensors"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    def certificate(self) -> dict[str, Any]:
        """Computed from the plan, the charges and the model in this folder."""
        made: dict[str, Any] = json.loads(json.dumps(certificate(self.config().plan, self.facts())))
        return made

    def certify(self) -> dict[str, Any]:
        """The stored certificate, if it is what this folder gives; else `CertificateError` names the field."""
        file = self.path / "certificate.json"
        if not file.is_file():
            raise ConfigError(
                f"no certificate.json in {self.path}", "a finished run", "finish it: sordino run --resume"
            )
        try:
            computed = self.certificate()
        except UserError as error:
            raise CertificateError("plan.toml", f"plan.toml is not what ran: {error}") from None
        try:
            _compare_text(file.read_text(encoding="utf-8"), computed)
        except ValueError as error:
            raise CertificateError("certificate.json", f"certificate.json is not JSON ({error})") from None
        return computed


def _text(made: dict[str, Any]) -> str:
    return json.dumps(made, indent=2) + "\n"


def _compare_text(stored: str, computed: dict[str, Any]) -> None:
    """Values first; then numbers as they are spelt, since two spellings of 17 digits can be one float."""
    compare(json.loads(stored, object_pairs_hook=_once), computed)
    spelt, needed = (json.loads(text, parse_float=str, parse_int=str) for text in (stored, _text(computed)))
    compare(spelt, needed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: of two equal ones a reader may take either."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CertificateError(twice, f"{twice} stands twice in certificate.json")
    return dict(pairs)
