"""Experiment trackers: TensorBoard, MLflow, Weights & Biases or your own. Called by `sordino run --track`.

Metrics on public rows are sent as `public/...`, diagnostics of a simulation as `NOT PRIVATE/...`. A run with secure
noise sends no diagnostics (docs/privacy.md, rule 11). At the end the certificate's epsilons are sent.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from sordino import codec
from sordino.data.metrics import ONLY_CLASS
from sordino.errors import ConfigError, SordinoError, Stopped, shorten
from sordino.outcome import DIAGNOSTIC
from sordino.report.text_table import flatten, is_number
from sordino.rng import Mode

Figures = dict[str, float]
GROUP = "sordino.trackers"
_LOG = logging.getLogger("sordino")


class TrackerBackend(ABC):
    """Base class of adapters to a tracking library; `kind` is the adapter's name for `--track`.

    A backend is defined in a file that `sordino run --with` names, or in an installed package:

        [project.entry-points."sordino.trackers"]
        my_pkg = "my_pkg.tracking"      # a module: importing it registers the backends that it defines
    """

    members: ClassVar[dict[str, type[TrackerBackend]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            TrackerBackend.members[kind] = cls

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    def log_settings(self, values: dict[str, str]) -> None:  # noqa: B027
        """Log the settings of the run by dotted names; called once, before the first round."""

    @abstractmethod
    def log_figures(self, round_: int, values: Figures) -> None:
        """Log the metrics of one round."""

    def close(self) -> None:  # noqa: B027
        """End tracking; called when the run is over."""


class TensorBoard(TrackerBackend, kind="tensorboard"):
    """TensorBoard backend, which writes event files to the subfolder tensorboard."""

    def __init__(self, folder: Path) -> None:
        _import("tensorboard")
        self.writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log_settings(self, values: dict[str, str]) -> None:
        self.writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in values.items()))

    def log_figures(self, round_: int, values: Figures) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, round_)

    def close(self) -> None:
        self.writer.close()


class Mlflow(TrackerBackend, kind="mlflow"):
    """MLflow backend, which writes to MLFLOW_TRACKING_URI, else to an SQLite database (mlflow-skinny: files)."""

    def __init__(self, folder: Path) -> None:
        mlflow = _import("mlflow")
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
        self.mlflow.log_params({_mlflow_name(name): value[:500] for name, value in values.items()})

    def log_figures(self, round_: int, values: Figures) -> None:
        self.mlflow.log_metrics({_mlflow_name(name): value for name, value in values.items()}, step=round_)

    def close(self) -> None:
        self.mlflow.end_run()


def _mlflow_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "_-./ " else "_" for sign in name)


class Wandb(TrackerBackend, kind="wandb"):
    """Weights & Biases backend, in the mode of WANDB_MODE; by default online if WANDB_API_KEY is set, else offline."""

    def __init__(self, folder: Path) -> None:
        wandb = _import("wandb")
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
    """Callback of a run (`on_round`) that sends every round to one tracking library.

        with Tracker("tensorboard", "runs/a", noise="simulation") as tracker:
            tracker.finish(sordino.train(plan, task, on_round=tracker).certificate)

    Diagnostics are sent only if `noise` is "simulation". If the library fails (server down, disk full), one warning is
    logged, tracking ends, and the run, which is already charged, goes on.
    """

    backend: TrackerBackend | None = None  # None after the library failed

    def __init__(self, kind: str, folder: str | Path, settings: Any = None, noise: Mode = "secure") -> None:
        codec.load_plugins(GROUP)
        if kind not in TrackerBackend.members:
            names = list(TrackerBackend.members)
            raise ConfigError(f"tracker {kind!r}", f"one of {', '.join(names)}", codec.nearest(kind, names))
        self.noise, self.last, self.kind = noise, 0, kind

        def start() -> None:
            self.backend = TrackerBackend.members[kind](Path(folder))
            if settings is not None:
                self.backend.log_settings({name: str(value) for name, value in flatten(codec.dump(settings))})

        self._attempt(start)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Call the tracking library; an error of the library becomes one warning and ends tracking."""
        try:
            call()
        except (SordinoError, Stopped):  # a mistake of the user, before anything has run; a request to end
            raise
        except (Exception, SystemExit) as error:
            self.backend = None
            why = " ".join(shorten(f"{type(error).__name__}: {error}").split())
            message = "tracker %s failed after round %d (%s): it gets no more rounds; the run goes on."
            _LOG.warning(message, self.kind, self.last, why)

    def _send(self, figures: Figures) -> None:
        backend = self.backend
        if backend is not None:
            self._attempt(lambda: backend.log_figures(self.last, figures))

    def __call__(self, line: dict[str, Any]) -> None:
        """Send one line of the history: public metrics and, in a simulation only, diagnostics."""
        self.last = int(line["round"])
        public = {name: value for name, value in line.items() if name not in ("round", "void", ONLY_CLASS, DIAGNOSTIC)}
        if "accuracy" in line:  # sent with every evaluation, since a tracker shows the last value for good
            public["predicts_one_class"] = float(ONLY_CLASS in line)
        inner = line.get(DIAGNOSTIC, {}) if self.noise == "simulation" else {}
        figures = {f"public/{name}": value for name, value in public.items()}
        figures |= {f"NOT PRIVATE/{name}": value for name, value in inner.items()}
        self._send({name: float(value) for name, value in figures.items() if is_number(value)})

    def finish(self, certificate: Mapping[str, Any]) -> None:
        """Send delta and the certified epsilon of every adversary that has one."""
        found = {f"epsilon/{line['adversary']}": line["epsilon"] for line in certificate["adversaries"]}
        found["delta"] = certificate["delta"]
        self._send({name: float(value) for name, value in found.items() if value is not None})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.backend is not None:
            self._attempt(self.backend.close)


def _import(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        found = f"--track {package} without the package {package}"
        raise ConfigError(found, f"{package} installed", f"pip install 'sordino[{package}]'") from None
