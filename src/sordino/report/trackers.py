"""Rounds in a tracker that a team already has: TensorBoard, MLflow or Weights & Biases, through their own libraries.

Figures on public rows stand under `public/`. Diagnostics of a simulation stand under `NOT PRIVATE/`; a run for release
sends none (PRIVACY rule 11), whatever the tracker. At the end the certificate's epsilons are written beside them.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar

from sordino import codec
from sordino.data.metrics import ONLY_CLASS
from sordino.errors import ConfigError, SordinoError, Stopped, shorten
from sordino.outcome import DIAGNOSTIC
from sordino.report.text_table import flat, is_number
from sordino.rng import Mode

Figures = dict[str, float]
GROUP = "sordino.trackers"
_LOG = logging.getLogger("sordino")


class TrackerBackend(ABC):
    """One tracking library: settings once, figures after every round, the end. `kind` is its name for `--track`.

        [project.entry-points."sordino.trackers"]
        my_pkg = "my_pkg.tracking"      # a module: importing it registers the backends that it defines

    A file that `sordino run --with` names may define one too. It is made with the folder of the run.
    """

    members: ClassVar[dict[str, type[TrackerBackend]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            TrackerBackend.members[kind] = cls

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    def log_settings(self, values: dict[str, str]) -> None:  # noqa: B027
        """The settings of the run, by dotted names."""

    @abstractmethod
    def log_figures(self, round_: int, values: Figures) -> None:
        """The figures of one round."""

    def close(self) -> None:  # noqa: B027
        """The end of the run."""


class TensorBoard(TrackerBackend, kind="tensorboard"):
    """Event files below a folder."""

    def __init__(self, folder: Path) -> None:
        _needed("tensorboard", "tensorboard")
        self.writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log_settings(self, values: dict[str, str]) -> None:
        self.writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in values.items()))

    def log_figures(self, round_: int, values: Figures) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, round_)

    def close(self) -> None:
        self.writer.close()


class Mlflow(TrackerBackend, kind="mlflow"):
    """The store that MLFLOW_TRACKING_URI names, else one in the folder: a database, or files for the skinny MLflow."""

    def __init__(self, folder: Path) -> None:
        mlflow = _needed("mlflow", "mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            folder.mkdir(parents=True, exist_ok=True)
            store = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
            if find_spec("sqlalchemy") is None or find_spec("alembic") is None:
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
                store = (folder.resolve() / "mlflow").as_uri()
            mlflow.set_tracking_uri(store)
        mlflow.set_experiment("sordino")
        self.mlflow, self.run = mlflow, mlflow.start_run(run_name=folder.stem)

    def log_settings(self, values: dict[str, str]) -> None:
        self.mlflow.log_params({_mlflow(name): value[:500] for name, value in values.items()})

    def log_figures(self, round_: int, values: Figures) -> None:
        self.mlflow.log_metrics({_mlflow(name): value for name, value in values.items()}, step=round_)

    def close(self) -> None:
        self.mlflow.end_run()


class Wandb(TrackerBackend, kind="wandb"):
    """Weights & Biases: as WANDB_MODE says; else online where WANDB_API_KEY is set, and a folder where it is not."""

    def __init__(self, folder: Path) -> None:
        wandb = _needed("wandb", "wandb")
        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        where = str(folder / "wandb")
        self.run = wandb.init(project="sordino", name=folder.stem, dir=where, mode=mode, settings={"silent": True})

    def log_settings(self, values: dict[str, str]) -> None:
        self.run.config.update(values)

    def log_figures(self, round_: int, values: Figures) -> None:
        self.run.log(values, step=round_)

    def close(self) -> None:
        self.run.finish()


class Tracker:
    """`on_round` of a run, and its end:

    with Tracker("tensorboard", "runs/a", noise="simulation") as seen:
        seen.finish(sordino.train(plan, task, on_round=seen).certificate)

    Diagnostics are sent only by one who is told that the noise is simulated. A tracker that fails (its server is gone,
    its folder is full) says so in one warning and tracks no more: the run, which is charged already, goes on.
    """

    backend: TrackerBackend | None = None  # None: the library failed

    def __init__(self, kind: str, folder: str | Path, settings: Any = None, noise: Mode = "secure") -> None:
        codec.load_plugins(GROUP)
        if kind not in TrackerBackend.members:
            raise ConfigError(f"tracker {kind!r}", "a known tracker", codec.nearest(kind, list(TrackerBackend.members)))
        self.noise, self.last, self.kind = noise, 0, kind

        def start() -> None:
            self.backend = TrackerBackend.members[kind](Path(folder))
            if settings is not None:
                self.backend.log_settings({name: str(value) for name, value in flat(codec.dump(settings))})

        self._attempt(start)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Call the library; whatever it raises is one warning, and the end of the tracking."""
        try:
            call()
        except (SordinoError, Stopped):  # a mistake of the user's, before anything has run; a request to end
            raise
        except (Exception, SystemExit) as error:
            self.backend = None
            why = " ".join(shorten(f"{type(error).__name__}: {error}").split())
            _LOG.warning("tracker %s failed after round %d (%s): it gets no more rounds; the run goes on.",
                         self.kind, self.last, why)  # fmt: skip

    def _send(self, figures: Figures) -> None:
        backend = self.backend
        if backend is not None:
            self._attempt(lambda: backend.log_figures(self.last, figures))

    def __call__(self, line: dict[str, Any]) -> None:
        """One round: public figures, and, of a simulation only, diagnostics under their name."""
        self.last = int(line["round"])
        kept = {name: value for name, value in line.items() if name not in ("round", "void", ONLY_CLASS, DIAGNOSTIC)}
        if "accuracy" in line:  # a flag of every evaluation: of a class number a tracker would keep the last for good
            kept["predicts_one_class"] = float(ONLY_CLASS in line)
        shown = {f"public/{name}": value for name, value in kept.items()}
        inner = line.get(DIAGNOSTIC, {}) if self.noise == "simulation" else {}
        shown |= {f"NOT PRIVATE/{name}": value for name, value in inner.items()}
        self._send({name: float(value) for name, value in shown.items() if is_number(value)})

    def finish(self, certificate: Mapping[str, Any]) -> None:
        """The certificate's epsilons; an adversary to whom nothing is promised has none."""
        found = {f"epsilon/{line['adversary']}": line["epsilon"] for line in certificate["adversaries"]}
        told = {name: float(value) for name, value in found.items() if value is not None}
        self._send({**told, "delta": float(certificate["delta"])})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.backend is not None:
            self._attempt(self.backend.close)


def _mlflow(name: str) -> str:
    """MLflow takes letters, digits, _ - . / and spaces."""
    return "".join(sign if sign.isalnum() or sign in "_-./ " else "_" for sign in name)


def _needed(module: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        found = f"--track {extra} without the package {extra}"
        raise ConfigError(found, f"{extra} installed", f"pip install 'sordino[{extra}]'") from None
