"""ServerApp and ClientApp of the Flower app that `sordino federation new` writes; the ClientApp refuses to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sordino.config import Config, load_config
from sordino.data.files import PARQUET, CsvFormat
from sordino.data.lineage import load_initial
from sordino.data.tables import encoded_rows
from sordino.engines.remote import Remote
from sordino.errors import ConfigError, SordinoError
from sordino.federation.flower_api import FlowerTransport, flower
from sordino.federation.secagg import SecAggEngine
from sordino.runs.execution import execute
from sordino.task import PublicSource, Task


def server_app(file: Path) -> Any:
    """Return a Flower ServerApp that runs the plan of `file`; results go to the folder `out` of Flower's run config.

    A run succeeded if `out` contains a certificate; Flower's exit codes do not show success.
    """
    f = flower()
    app = f.ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        out = Path(str(context.run_config.get("out", "runs/a")))
        out.parent.mkdir(parents=True, exist_ok=True)

        def log(line: str) -> None:  # in OUT.log beside the run's folder: Flower does not show a ServerApp's output
            with open(out.with_name(f"{out.name}.log"), "a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")

        def log_round(line: dict[str, Any]) -> None:
            figures = " ".join(f"{name}={line[name]:.4f}" for name in ("loss", "accuracy", "rmse") if name in line)
            log(f"round {line['round']}/{config.plan.rounds} {figures}")

        try:
            config = load_config(file)
            silos, spec = silos_of(config), config.federation
            assert spec is not None
            kind = SecAggEngine if "secure_sum" in config.plan.needs else Remote
            limits: dict[str, Any] = {"quorum": spec.quorum or len(silos), "tries": spec.tries, "timeout": spec.timeout}
            engine, task = kind(FlowerTransport(grid, silos), **limits), server_task(config)
            resume = bool(context.run_config.get("resume", False))
            done = execute(config, out, resume=resume, engine=engine, task=task, on_round=log_round)
        except SordinoError as error:
            sentence = f"sordino: {' '.join(str(error).split())}"
            log(sentence)
            f.flwr_exit(f.ExitCode.SERVERAPP_EXCEPTION, sentence)
        else:
            log(f"sordino: {done.path}/certificate.json")

    return app


def silos_of(config: Config) -> tuple[str, ...]:
    """Return the silo names in the order of the plan's clients; refuse a file without [federation]."""
    if config.federation is None:
        fix = 'add [federation] silos = ["...", "..."], one name per client, in the order of the plan'
        raise ConfigError("a file without [federation]", "a [federation] section with the names of the silos", fix)
    return config.federation.silos


def server_task(config: Config) -> Task:
    """Return the server's task: the model and public test rows, without any silo's records."""
    spec, encoding = config.federation, config.task.encoding
    if spec is None or not config.record[0]:
        return config.build().as_server()
    test, (shape, classes) = None, config.record
    if spec.test is not None and encoding is not None and Path(spec.test).suffix in (".csv", *PARQUET):
        given = CsvFormat(**config.task.options.get("format", {}))
        test = encoded_rows(encoding, Path(spec.test), given)
    elif spec.test is not None:
        try:
            with np.load(Path(spec.test), allow_pickle=False) as held:
                test = held["x"], held["y"]
        except (OSError, ValueError, KeyError) as error:
            found = f"{spec.test}, which cannot be read ({error})"
            raise ConfigError(found, "an .npz file of public rows x and y, or a table (.csv)") from None
    model, loss, _ = config.model_and_loss(shape, classes)
    model, init = (model, None) if config.task.init is None else load_initial(model, config.task.init)
    task = Task.server(model, len(spec.silos), test, loss, own_code=config.task.own_code)
    # [task] names the silos' private rows; what it declares of columns (ranges, categories) is public all the same
    values = config.task.source(labels=False).values
    source = PublicSource(f"rows of {Path(spec.test or '').name}", "the configuration: [federation] test", values)
    return replace(task, init=init, metrics=config.run.metrics, source=source, encoding=encoding)


def unused_client_app() -> Any:
    """Return a ClientApp that refuses to train: silos train in `sordino silo serve`, not inside Flower's ClientApp."""
    app = flower().ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        needed = "a SuperNode with --isolation process, and 'sordino silo serve' beside it"
        raise ConfigError("a node that runs the app's ClientApp", needed)

    return app
