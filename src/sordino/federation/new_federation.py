"""`sordino federation new`: writes a Flower app for the server, and a folder per silo with its policy and scripts.

    DIR/pyproject.toml, sordino_app/     the Flower app: `flwr run DIR`; it ships to nodes, where nobody runs it
    DIR/server/                          certificates.sh, superlink.sh, superlink.service
    DIR/silos/NAME/                      silo.toml, policy.toml, key.sh, supernode.service, sordino.service

Nothing is downloaded. The scripts are in federation/templates. Below: keys and certificates of a federation on one
machine; across machines every party makes its own (docs/deploy.md). A CA signs the server's certificate, under which
all traffic is encrypted; every node has a key pair on P-384, whose public half is registered under its silo's name.
"""

from __future__ import annotations

import datetime
import ipaddress
import math
import os
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
from sordino.federation.flower_api import WANTED, flower
from sordino.federation.silo_service import model_hash
from sordino.version import __version__

APP = "sordino_app"
FIRST_NODE = 9101  # port of the first silo's SuperNode
DAYS = 30  # validity of a certificate on the loopback
LEAST = 0.01  # epsilon of the policy of a plan that costs less than 0.005: a limit of 0 allows no run
POLICY = "# What this silo's data may be used for, and spend in all runs together: yours to change before you start.\n"


def new_federation(folder: Path, file: Path) -> list[str]:
    """Write the folder and return the silos' names; refuse a small population for which the file sets no delta."""
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
    """Write the folder for a configuration; `text` is its TOML file."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}, which is not empty", "a new or empty folder")
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


def rendered(template: str, **values: Any) -> str:
    """Return the text of a file in federation/templates with values filled in."""
    text = resources.files("sordino.federation").joinpath("templates", template).read_text("utf-8")
    return str(Template(text, undefined=StrictUndefined, keep_trailing_newline=True).render(**values))


def files(config: Config, text: str, name: str) -> Mapping[str, str]:
    """Return the contents of the federation's files by path; the scripts expect the folder at /srv/sordino."""
    assert config.federation is not None
    port = config.federation.port
    escaped = name.replace("\\", "\\\\").replace("%", "%%").replace(" ", "\\x20")  # for a systemd unit
    command = f"/srv/sordino/{escaped}/server/superlink.sh"
    found = {
        "pyproject.toml": rendered("pyproject.toml.jinja", flwr=WANTED, sordino=__version__, app=APP),
        f"{APP}/__init__.py": '"""A plan of Sordino over Flower."""\n',
        f"{APP}/fed.toml": text,
        f"{APP}/server.py": rendered("server.py.jinja"),
        f"{APP}/client.py": rendered("client.py.jinja"),
        "server/certificates.sh": rendered("certificates.sh", port=port),
        "server/superlink.sh": rendered("superlink.sh", port=port),
        "server/superlink.service": rendered("unit.service", what="Flower SuperLink", command=command),
    }
    for place, silo in enumerate(config.federation.silos):
        found |= {f"silos/{silo}/{path}": body for path, body in silo_files(config, place).items()}
        found[f"silos/{silo}/fed.toml"] = text
    return found


def silo_files(config: Config, place: int) -> dict[str, str]:
    """Return the contents of one silo's files by path; the silo's operator fills in data and limits."""
    name, node, policy = silos_of(config)[place], FIRST_NODE + place, config.plan.release.kind != "no_noise"
    own: dict[str, Any] = {"name": name, "node": f"127.0.0.1:{node}", "secret": "node.secret"}
    own |= {"dataset": config.task.dataset, "options": silo_options(config.task, name)}
    own |= {"group": name} if config.task.named and "files" not in config.task.options else {}
    own |= {} if policy else {"policy": ""}
    link = "/srv/sordino/supernode.sh SERVER:PORT"
    serve = "/srv/sordino/.venv/bin/sordino silo serve /srv/sordino"
    return {
        "silo.toml": tomli_w.dumps(own),
        **({"policy.toml": policy_text(config, place)} if policy else {}),
        "key.sh": rendered("key.sh"),
        "supernode.sh": rendered("supernode.sh", node=node),
        "supernode.service": rendered("unit.service", what="Flower SuperNode", command=link),
        "sordino.service": rendered("unit.service", what=f"Sordino silo {name}", command=serve),
    }


def silo_options(task: TaskSpec, name: str) -> dict[str, Any]:
    """Return the options of a silo's own data: of a file for every silo its own, beside silo.toml; no test rows."""
    options = {key: value for key, value in task.options.items() if key not in ("files", "test")}
    if "files" in task.options:
        return {"path": f"{name}.csv", **options}
    return options


# ---- keys and certificates of a federation on one machine ------------------------------------------------------------


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _private_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def write_node_key(path: Path) -> None:
    """Write a node's key pair (ECDSA, P-384, OpenSSH format) to path and path.pub, unless `path` exists."""
    from cryptography.hazmat.primitives import serialization as form

    if not path.exists():
        key = _private_key()
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        write_private(path.with_name(path.name + ".pub"), public + b"\n")
        write_private(path, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))


def write_certificates(folder: Path) -> Path:
    """Write ca.crt, server.crt and server.key for a server on the loopback; the CA's private key is not written."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.x509.oid import NameOID

    if (folder / "server.crt").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    authority, server, now = _private_key(), _private_key(), datetime.datetime.now(datetime.UTC)
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]

    def signed(subject: str, key: Any, ca: bool) -> bytes:
        name, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, "sordino"))
        builder = (
            x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        )
        data: bytes = builder.sign(authority, hashes.SHA256()).public_bytes(form.Encoding.PEM)
        return data

    pem = server.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    write_private(folder / "ca.crt", signed("sordino", authority, ca=True))
    write_private(folder / "server.key", pem)
    write_private(folder / "server.crt", signed("localhost", server, ca=False))
    return folder


def read_public_key(path: Path) -> bytes:
    """Return a node's public key in the format that Flower registers."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        held = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        found = f"{path}, which is no readable public key ({error})"
        raise ConfigError(found, "a public key file NAME.pub written by ssh-keygen") from None
    data: bytes = flower().public_key_to_bytes(held)
    return data
