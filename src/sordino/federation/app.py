"""ServerApp and ClientApp of the Flower app that `sordino federation new` writes; the ClientApp refuses to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sordino.config import Config, load_config
from sordino.engines.remote import Remote
from sordino.errors import ConfigError, SordinoError
from sordino.federation.flower_api import FlowerTransport, flower
from sordino.federation.secagg_server import SecAggEngine
from sordino.federation.silo_worker import server_task
from sordino.runs.execution import Executed, execute


def server_app(file: Path) -> Any:
    """A ServerApp that runs the plan of `file` into the folder `out` of the run's config."""
    f = flower()
    app = f.ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        out = Path(str(context.run_config.get("out", "runs/a")))
        try:
            config = load_config(file)
            done = run_plan(
                config, FlowerTransport(grid, silos_of(config)), out, bool(context.run_config.get("resume", False))
            )
        except SordinoError as error:
            sentence = f"sordino: {' '.join(str(error).split())}"
            log_line(out, sentence)
            f.flwr_exit(f.ExitCode.SERVERAPP_EXCEPTION, sentence)
        else:
            log_line(out, f"sordino: {done.path}/certificate.json")

    return app


def log_line(out: Path, line: str) -> None:
    """Append a line to OUT.log beside the run's folder; Flower does not show what a ServerApp prints."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(f"{out.name}.log"), "a", encoding="utf-8") as log:
        log.write(f"{line}\n")


def run_plan(config: Config, transport: FlowerTransport, out: Path, resume: bool = False) -> Executed:
    """Run the plan. Success is the certificate in `out`; the exit codes of Flower's commands do not tell."""
    assert config.federation is not None
    spec = config.federation
    kind = SecAggEngine if "secure_sum" in config.plan.needs else Remote
    engine = kind(transport, quorum=spec.quorum or len(spec.silos), tries=spec.tries, timeout=spec.timeout)

    def log_round(line: dict[str, Any]) -> None:
        figures = " ".join(f"{name}={line[name]:.4f}" for name in ("loss", "accuracy", "rmse") if name in line)
        log_line(out, f"round {line['round']}/{config.plan.rounds} {figures}")

    task = server_task(config)
    return execute(config, out, resume=resume, engine=engine, task=task, on_round=log_round)


def silos_of(config: Config) -> tuple[str, ...]:
    """The names of the silos, in the plan's order."""
    if config.federation is None:
        fix = 'add [federation] silos = ["...", "..."], one name per client, in the order of the plan'
        raise ConfigError("a file without [federation]", "the names of the silos", fix)
    return config.federation.silos


def unused_client_app() -> Any:
    """A ClientApp that refuses: a node that runs it has no silo process beside it."""
    app = flower().ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        raise ConfigError("a node that runs the code of a run", "--isolation process beside 'sordino silo serve'")

    return app
