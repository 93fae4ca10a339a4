"""`sordino federation new`: a folder with a Flower app for the server, and one for every silo with its policy and keys.

    DIR/pyproject.toml, sordino_app/     the Flower app: `flwr run DIR`; it ships to nodes, where nobody runs it
    DIR/server/                          certificates.sh, superlink.sh, superlink.service
    DIR/silos/NAME/                      silo.toml, policy.toml, key.sh, supernode.service, sordino.service

`flwr new` needs the internet; this needs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from sordino.accounting import accountant
from sordino.accounting.composition import Participation
from sordino.accounting.delta import LARGEST_DEFAULT, few, meaning_of_delta
from sordino.config import Config, load_config
from sordino.errors import ConfigError
from sordino.federation.app import silos_of
from sordino.federation.flower_api import WANTED
from sordino.federation.silo_service import model_hash
from sordino.version import __version__

APP = "sordino_app"
PROJECT = """[project]
name = "sordino-federation"
version = "1.0.0"
description = "A plan of Sordino over Flower."
license = "Apache-2.0"
dependencies = ["{flwr}", "sordino=={sordino}"]

[tool.flwr.app]
publisher = "sordino"
fab-include = ["{app}/*.py", "{app}/*.toml"]

[tool.flwr.app.components]
serverapp = "{app}.server:app"
clientapp = "{app}.client:app"

[tool.flwr.app.config]
out = "runs/a"
resume = false

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
"""
SERVER = '''"""The server's side: the plan of fed.toml, run by its own loop. Success is certificate.json in `out`."""

from pathlib import Path

from sordino.federation.app import server_app

app = server_app(Path(__file__).with_name("fed.toml"))
'''
CLIENT = '''"""Nobody runs this: a silo answers by `sordino silo serve`, beside a SuperNode with --isolation process."""

from sordino.federation.app import no_client

app = no_client()
'''
CERTIFICATES = """#!/bin/sh
# A CA and the server's certificate; HOST is how silos reach the server. Send them ca.crt. For `flwr`: flwr/config.toml.
set -e
umask 077
cd "$(dirname "$0")"
HOST=${{1:?usage: certificates.sh HOST}}
case $HOST in *[!0-9.]*) SAN="DNS:$HOST" ;; *) SAN="IP:$HOST" ;; esac
EC="ec -pkeyopt ec_paramgen_curve:P-384"
openssl req -x509 -newkey $EC -nodes -days 3650 -subj "/CN=sordino CA" -keyout ca.key -out ca.crt
openssl req -newkey $EC -nodes -subj "/CN=$HOST" -keyout server.key -out server.csr
# by the last two the SuperLink reaches itself
printf 'subjectAltName=%s,DNS:localhost,IP:127.0.0.1\\n' "$SAN" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext -out server.crt
mkdir -p flwr && cat > flwr/config.toml <<END
[superlink]
default = "federation"

[superlink.federation]
address = "$HOST:{port}"
root-certificates = "$PWD/ca.crt"
END
"""
SUPERLINK = """#!/bin/sh
# The SuperLink. Its database outlives it: silos reconnect after a restart.
cd "$(dirname "$0")"
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flwr"
exec flower-superlink --host 0.0.0.0 --port {port} --database link.db --enable-supernode-auth \\
  --disable-runtime-dependency-installation --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key
"""
KEY = """#!/bin/sh
# The silo's own key pair, and a secret between its two processes. Send node.pub to the server, and nothing else.
set -e
umask 077
cd "$(dirname "$0")"
ssh-keygen -q -t ecdsa -b 384 -N "" -f node
head -c 32 /dev/urandom > node.secret
"""
SUPERNODE = """#!/bin/sh
# The node: it talks to the server, and runs nothing. ca.crt comes from the server. SERVER is its host:port.
cd "$(dirname "$0")"
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flwr"
exec flower-supernode --isolation process --host 127.0.0.1 --port {node} --superexec-auth-secret-file node.secret \\
  --superlink ${{1:?usage: supernode.sh SERVER}} --root-certificates ca.crt --auth-supernode-private-key node
"""
UNIT = """[Unit]
Description={what}
After=network-online.target
Wants=network-online.target

[Service]
User=sordino
WorkingDirectory=/srv/sordino
Environment=PATH=/srv/sordino/.venv/bin:/usr/bin:/bin
ExecStart={command}
Restart=always
RestartSec=5
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ReadWritePaths=/srv/sordino

[Install]
WantedBy=multi-user.target
"""
FIRST_NODE = 9101
LEAST = 0.01  # epsilon of a policy for a plan that costs less than any number written: a limit of 0 allows no run
POLICY = """# What this silo's data may be used for, and spend in all runs together: yours to change before you start.
"""


def new_federation(folder: Path, file: Path) -> list[str]:
    """Write the folder, and say what to do next; every mistake is found before the first byte is written."""
    config = load_config(file)
    names = list(silos_of(config))
    check_delta_is_given(config)
    write_federation(folder, config, file.read_text("utf-8"))
    return names


def check_delta_is_given(config: Config) -> None:
    """Few clients, or records of a silo, have no delta by default: whoever signs for the data chooses it."""
    given, reads = config.privacy, config.plan.local.reads
    sizes = (config.plan.units,) if reads is None else reads.sizes
    own = bool(given.deltas) or (bool(given.silos) and all(silo.delta is not None for silo in given.silos))
    if given.delta is not None or own or config.plan.release.kind == "no_noise" or not few(min(sizes)):
        return
    found = f"{min(sizes)} {config.plan.unit}s and no delta"
    fix = f"set delta under [privacy]: {meaning_of_delta(LARGEST_DEFAULT, min(sizes), config.plan.unit)}"
    raise ConfigError(found, "a delta that was chosen, where there are few of whom it speaks", fix)


def write_federation(folder: Path, config: Config, text: str) -> None:
    """The same for a configuration, and the text that it was read from."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}, which is not empty", "a new folder")
    for path, body in files(config, text, folder.name).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(body, "utf-8")
        place.chmod(0o755 if path.endswith(".sh") else 0o644)
    (folder / APP / "__init__.py").write_text('"""A plan of Sordino over Flower."""\n')


def policy_text(config: Config, place: int) -> str:
    """A policy that allows this plan and no other, with a limit that this plan uses up; for the operator to change."""
    name, plan = silos_of(config)[place], config.plan
    often = Participation(
        plan.rounds, plan.clients.max_participations(plan.rounds)
    )  # a silo that is drawn often is not refused
    line = plan.cost(often).line("cohort", place)
    own = config.budgets[place] if config.budgets else None
    delta = (config.deltas or (config.delta,) * len(silos_of(config)))[place]
    cost = math.inf if own is None else own.epsilon
    if own is None and all(event.protects for event, _ in line.entries):
        cost = math.ceil(100 * accountant.epsilon(line.entries, line.relation, delta).value) / 100 or LEAST
    table = {
        "dataset": name, "epsilon": cost, "delta": delta, "unit": plan.unit, "relation": line.relation,
        "releases": [plan.release.kind], "noise": [config.privacy.noise], "plans": [plan.hash],
        "models": [model_hash(config)],
    }  # fmt: skip
    return f"{POLICY}{tomli_w.dumps(table)}"


def files(config: Config, text: str, name: str) -> Mapping[str, str]:
    """Every file of the folder of this name, by its path; on the server the folder is in /srv/sordino."""
    assert config.federation is not None
    project = PROJECT.format(flwr=WANTED, sordino=__version__, app=APP)
    made = {"pyproject.toml": project, f"{APP}/fed.toml": text, f"{APP}/server.py": SERVER, f"{APP}/client.py": CLIENT}
    made |= {
        "server/certificates.sh": CERTIFICATES.format(port=config.federation.port),
        "server/superlink.sh": SUPERLINK.format(port=config.federation.port),
    }
    link = UNIT.format(what="Flower SuperLink", command=f"/srv/sordino/{quoted(name)}/server/superlink.sh")
    made["server/superlink.service"] = link
    for place, silo in enumerate(config.federation.silos):
        made |= {f"silos/{silo}/{path}": body for path, body in silo_files(config, place).items()}
        made[f"silos/{silo}/fed.toml"] = text
    return made


def quoted(name: str) -> str:
    """A name in the path of a program, as systemd reads it: % begins something there, and a blank ends a word."""
    return name.replace("\\", "\\\\").replace("%", "%%").replace(" ", "\\x20")


def silo_files(config: Config, place: int) -> dict[str, str]:
    """What one silo is given: it fills in its data and its limits, and starts two services."""
    assert config.federation is not None
    name, node = config.federation.silos[place], FIRST_NODE + place
    own: dict[str, Any] = {"name": name, "node": f"127.0.0.1:{node}", "secret": "node.secret"}
    own |= {"dataset": config.task.dataset, "options": dict(config.task.options)}
    if config.task.named:
        own["group"] = name
    if config.plan.release.kind == "no_noise":
        own["policy"] = ""
    sordino = UNIT.format(what=f"Sordino silo {name}", command="/srv/sordino/.venv/bin/sordino silo serve /srv/sordino")
    serve = UNIT.format(what="Flower SuperNode", command="/srv/sordino/supernode.sh SERVER:PORT")
    return {
        "silo.toml": tomli_w.dumps(own),
        **({} if own.get("policy") == "" else {"policy.toml": policy_text(config, place)}),
        "key.sh": KEY,
        "supernode.sh": SUPERNODE.format(node=node),
        "supernode.service": serve,
        "sordino.service": sordino,
    }
