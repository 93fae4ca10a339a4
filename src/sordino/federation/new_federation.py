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
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from sordino.accounting import accountant
from sordino.accounting.accountant import LARGEST_DEFAULT, few, meaning_of_delta
from sordino.accounting.composition import Participation
from sordino.config import Config, load_config
from sordino.errors import ConfigError
from sordino.federation.app import silos_of
from sordino.federation.flower_api import WANTED, flower
from sordino.federation.silo_service import model_hash
from sordino.version import __version__

APP = "sordino_app"
FIRST_NODE = 9101
LEAST = 0.01  # epsilon of the policy of a plan that costs less than 0.005: a limit of 0 allows no run
POLICY = """# What this silo's data may be used for, and spend in all runs together: yours to change before you start.
"""


def new_federation(folder: Path, file: Path) -> list[str]:
    """Write the folder and return the silos' names; every mistake is found before the first byte is written."""
    config = load_config(file)
    names = list(silos_of(config))
    check_delta_is_given(config)
    write_federation(folder, config, file.read_text("utf-8"))
    return names


def check_delta_is_given(config: Config) -> None:
    """Refuse a plan of few clients, or few records of a silo, without a chosen delta."""
    given, reads = config.privacy, config.plan.local.reads
    sizes = (config.plan.units,) if reads is None else reads.sizes
    own = bool(given.deltas) or (bool(given.silos) and all(silo.delta is not None for silo in given.silos))
    if given.delta is not None or own or config.plan.release.kind == "no_noise" or not few(min(sizes)):
        return
    found = f"{min(sizes)} {config.plan.unit}s and no delta"
    fix = f"set delta under [privacy]: {meaning_of_delta(LARGEST_DEFAULT, min(sizes), config.plan.unit)}"
    raise ConfigError(found, "a delta chosen for so few", fix)


def write_federation(folder: Path, config: Config, text: str) -> None:
    """Write the folder of a configuration; `text` is what it was read from."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}, which is not empty", "a new folder")
    for path, body in files(config, text, folder.name).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(body, "utf-8")
        place.chmod(0o755 if path.endswith(".sh") else 0o644)
    (folder / APP / "__init__.py").write_text('"""A plan of Sordino over Flower."""\n')


def policy_text(config: Config, place: int) -> str:
    """A silo's policy.toml: this plan alone, with a limit that it uses up; the operator may change it."""
    name, plan = silos_of(config)[place], config.plan
    often = Participation(
        plan.rounds, plan.clients.max_participations(plan.rounds)
    )  # the most rounds that one silo can be in
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
    """A file of federation/templates with its values filled in."""
    environment = Environment(
        loader=PackageLoader("sordino.federation"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template(template).render(**values)


def files(config: Config, text: str, name: str) -> Mapping[str, str]:
    """Contents of the folder by path; on the server the folder lies in /srv/sordino."""
    assert config.federation is not None
    port, command = config.federation.port, f"/srv/sordino/{quoted(name)}/server/superlink.sh"
    made = {
        "pyproject.toml": rendered("pyproject.toml.jinja", flwr=WANTED, sordino=__version__, app=APP),
        f"{APP}/fed.toml": text,
        f"{APP}/server.py": rendered("server.py.jinja"),
        f"{APP}/client.py": rendered("client.py.jinja"),
        "server/certificates.sh": rendered("certificates.sh", port=port),
        "server/superlink.sh": rendered("superlink.sh", port=port),
        "server/superlink.service": rendered("unit.service", what="Flower SuperLink", command=command),
    }
    for place, silo in enumerate(config.federation.silos):
        made |= {f"silos/{silo}/{path}": body for path, body in silo_files(config, place).items()}
        made[f"silos/{silo}/fed.toml"] = text
    return made


def quoted(name: str) -> str:
    """A name escaped for a systemd unit, where % and blanks have a meaning."""
    return name.replace("\\", "\\\\").replace("%", "%%").replace(" ", "\\x20")


def silo_files(config: Config, place: int) -> dict[str, str]:
    """Files of one silo, by path: its operator fills in data and limits, and starts two services."""
    assert config.federation is not None
    name, node = config.federation.silos[place], FIRST_NODE + place
    own: dict[str, Any] = {"name": name, "node": f"127.0.0.1:{node}", "secret": "node.secret"}
    own |= {"dataset": config.task.dataset, "options": dict(config.task.options)}
    if config.task.named:
        own["group"] = name
    if config.plan.release.kind == "no_noise":
        own["policy"] = ""
    serve = "/srv/sordino/.venv/bin/sordino silo serve /srv/sordino"
    return {
        "silo.toml": tomli_w.dumps(own),
        **({} if own.get("policy") == "" else {"policy.toml": policy_text(config, place)}),
        "key.sh": rendered("key.sh"),
        "supernode.sh": rendered("supernode.sh", node=node),
        "supernode.service": rendered(
            "unit.service", what="Flower SuperNode", command="/srv/sordino/supernode.sh SERVER:PORT"
        ),
        "sordino.service": rendered("unit.service", what=f"Sordino silo {name}", command=serve),
    }


DAYS = 30


def write_private(path: Path, data: bytes) -> Path:
    """Write a file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    return path


def _key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    data: bytes = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return data


def write_node_key(path: Path) -> Path:
    """A node's key pair, as `ssh-keygen -t ecdsa -b 384` writes it, in path and path.pub; an existing key is kept."""
    from cryptography.hazmat.primitives import serialization as form

    if not path.exists():
        key = _key()
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        write_private(path.with_name(path.name + ".pub"), public + b"\n")
        write_private(path, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    return path


def _signed(subject: str, key: Any, issuer: str, by: Any, *, ca: bool) -> bytes:
    """A certificate of `subject` for the loopback, signed with the key `by` of `issuer`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.x509.oid import NameOID

    name, signer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer))
    now = datetime.datetime.now(datetime.UTC)
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(signer, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
    )
    data: bytes = made.sign(by, hashes.SHA256()).public_bytes(form.Encoding.PEM)
    return data


def write_certificates(folder: Path) -> Path:
    """ca.crt, server.crt and server.key for a server on the loopback; the CA's own key is not kept."""
    if not (folder / "server.crt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        authority, server = _key(), _key()
        write_private(folder / "ca.crt", _signed("sordino", authority, "sordino", authority, ca=True))
        write_private(folder / "server.key", _pem(server))
        write_private(folder / "server.crt", _signed("localhost", server, "sordino", authority, ca=False))
    return folder


def read_public_key(path: Path) -> bytes:
    """The public half of a node's key in the form that Flower registers."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        held = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}, which is no readable public key ({error})", "NAME.pub of ssh-keygen") from None
    data: bytes = flower().public_key_to_bytes(held)
    return data
