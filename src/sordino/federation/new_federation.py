"""Folders of a new federation (`sordino federation new`): one for the server, and one per silo with policy and scripts.

    DIR/server/          fed.toml, certificates.sh, superlink.sh, superlink.service, gate.service
    DIR/silos/NAME/      fed.toml, silo.toml, policy.toml, key.sh, supernode.service, sordino.service

Nothing is downloaded. The scripts are in federation/templates. A certificate authority signs the server's certificate,
with which all traffic is encrypted; each node has a key pair on P-384, whose public key is pinned in fed.toml (`keys`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import StrictUndefined, Template

from sordino.accounting import accountant
from sordino.accounting.accountant import LARGEST_DEFAULT, few, meaning_of_delta
from sordino.accounting.composition import Participation
from sordino.config import Config, TaskSpec, load_config
from sordino.errors import ConfigError
from sordino.federation.app import silos_of
from sordino.federation.silo_service import model_hash

FIRST_NODE = 9101  # port of the first silo's SuperNode
LEAST = 0.01  # epsilon of the policy of a plan that costs less than 0.005: a limit of 0 allows no run
POLICY = "# What this silo's data may be used for, and spend in all runs together: yours to change before you start.\n"


def new_federation(folder: Path, file: Path) -> list[str]:
    """Write the folders of a federation, and return the silos' names.

    A small population for which the file sets no delta is refused.
    """
    config = load_config(file)
    names, plan, given, reads = list(silos_of(config)), config.plan, config.privacy, config.plan.local.reads
    least = plan.units if reads is None else min(reads.sizes)
    own = bool(given.deltas) or (bool(given.silos) and all(silo.delta is not None for silo in given.silos))
    if given.delta is None and not own and plan.release.kind != "no_noise" and few(least):
        fix = f"set delta under [privacy]: {meaning_of_delta(LARGEST_DEFAULT, least, plan.unit)}"
        needed = f"a delta that you choose: there is no default for few {plan.unit}s"
        raise ConfigError(f"{least} {plan.unit}s and no delta", needed, fix)
    write_federation(folder, config, file.read_text("utf-8"))
    return names


def write_federation(folder: Path, config: Config, text: str) -> None:
    """Write the folders of a federation for a configuration; `text` is the text of its TOML file."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}, which is not empty", "a new or empty folder", "choose another folder")
    for path, body in files(config, text, folder.name).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(body, "utf-8")
        place.chmod(0o755 if path.endswith(".sh") else 0o644)


def policy_text(config: Config, place: int) -> str:
    """Return the text of a silo's policy.toml, which allows only this plan, up to its cost."""
    name, plan = silos_of(config)[place], config.plan
    often = Participation(plan.rounds, plan.clients.max_participations(plan.rounds))  # the most rounds of one silo
    line = plan.cost(often).line("cohort", place)
    own, unit = config.budgets[place] if config.budgets else None, "user" if config.task.person else plan.unit
    delta = (config.deltas or (config.delta,) * len(silos_of(config)))[place]
    cost = math.inf if own is None else own.epsilon
    if own is None and all(event.protects for event, _ in line.entries):
        cost = math.ceil(100 * accountant.epsilon(line.entries, line.relation, delta).value) / 100 or LEAST
    table = {
        "dataset": name, "epsilon": cost, "delta": delta, "unit": unit, "relation": line.relation,
        "releases": [plan.release.kind], "noise": [config.privacy.noise], "plans": [plan.hash],
        "models": [model_hash(config)],
    }  # fmt: skip
    return f"{POLICY}{tomli_w.dumps(table)}"


def rendered(template: str, **values: Any) -> str:
    """Return the text of a file in federation/templates with values filled in."""
    text = resources.files("sordino.federation").joinpath("templates", template).read_text("utf-8")
    return str(Template(text, undefined=StrictUndefined, keep_trailing_newline=True).render(**values))


def files(config: Config, text: str, name: str) -> Mapping[str, str]:
    """Return the contents of the federation's files by path; the scripts expect the files in /srv/sordino."""
    assert config.federation is not None
    port = config.federation.port
    escaped = name.replace("\\", "\\\\").replace("%", "%%").replace(" ", "\\x20")  # for a systemd unit
    server = f"/srv/sordino/{escaped}/server"
    gate = f"/srv/sordino/.venv/bin/sordino federation gate {server}"
    found = {
        "server/fed.toml": text,
        "server/certificates.sh": rendered("certificates.sh", port=port + 1),
        "server/superlink.sh": rendered("superlink.sh", port=port + 1),
        "server/superlink.service": rendered(
            "unit.service", what="Flower SuperLink", command=f"{server}/superlink.sh", watched=False
        ),
        "server/gate.service": rendered("unit.service", what="Gate to the SuperLink", command=gate, watched=False),
    }
    for place, silo in enumerate(config.federation.silos):
        found |= {f"silos/{silo}/{path}": body for path, body in silo_files(config, place).items()}
        found[f"silos/{silo}/fed.toml"] = text
    return found


def silo_files(config: Config, place: int) -> dict[str, str]:
    """Return the contents of one silo's files by path; its operator completes data and limits."""
    name, node, policy = silos_of(config)[place], FIRST_NODE + place, config.plan.release.kind != "no_noise"
    own: dict[str, Any] = {"name": name, "node": f"127.0.0.1:{node}", "secret": "node.secret", "key": "node"}
    own |= {"dataset": config.task.dataset, "options": silo_options(config.task, name)}
    own |= {"group": name} if config.task.named and "files" not in config.task.options else {}
    own |= {} if policy else {"policy": ""}
    link = "/srv/sordino/supernode.sh SERVER:PORT"
    serve = "/srv/sordino/.venv/bin/sordino silo serve /srv/sordino --status 127.0.0.1:9300"
    return {
        "silo.toml": tomli_w.dumps(own),
        **({"policy.toml": policy_text(config, place)} if policy else {}),
        "key.sh": rendered("key.sh"),
        "supernode.sh": rendered("supernode.sh", node=node),
        "supernode.service": rendered("unit.service", what="Flower SuperNode", command=link, watched=False),
        "sordino.service": rendered("unit.service", what=f"Sordino silo {name}", command=serve, watched=True),
    }


def silo_options(task: TaskSpec, name: str) -> dict[str, Any]:
    """Return the data options of a silo: those of the task, without test rows, and with NAME.csv for its files."""
    options = {key: value for key, value in task.options.items() if key not in ("files", "test")}
    if "files" in task.options:
        return {"path": f"{name}.csv", **options}
    return options
