"""All imports from Flower (flwr), and a transport over Flower. Called by the other modules of federation/.

`FlowerTransport` sends jobs to silos through a Flower SuperLink and receives their replies, for `engines.remote`.

Flower's Runtime API is not a stable interface: a release may move any of these names. `missing_names()` lists them, and
tests/deploy/test_internals.py fails with that list.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

from sordino import codec
from sordino.engines.messages import Job
from sordino.errors import EngineError

LOWEST, BELOW = (1, 41), (1, 43)
WANTED = "flwr>=1.41,<1.43"
NAMES = {
    "flwr.app": ("Array", "ArrayRecord", "ConfigRecord", "Context", "Message", "RecordDict"),
    "flwr.app.error": ("Error",),
    "flwr.clientapp": ("ClientApp",),
    "flwr.serverapp": ("ServerApp",),
    "flwr.serverapp.strategy": ("Strategy",),
    "flwr.common.constant": ("SubStatus",),
    "flwr.common.secure_aggregation.crypto.shamir": ("combine_shares", "create_shares"),
    "flwr.common.secure_aggregation.crypto.symmetric_encryption": ("decrypt", "encrypt"),
    "flwr.supercore.primitives.asymmetric": (
        "bytes_to_private_key", "bytes_to_public_key", "generate_key_pairs", "private_key_to_bytes",
        "public_key_to_bytes",
    ),
    "flwr.proto.control_pb2": ("RegisterNodeRequest",),
    "flwr.proto.runtime_pb2": ("AcquireTaskRequest", "SendTaskHeartbeatRequest"),
    "flwr.supercore.constant": ("TaskType",),
    "flwr.supercore.control": ("ControlHttpClient",),
    "flwr.supercore.exit": ("ExitCode", "flwr_exit"),
    "flwr.supercore.interceptors": (
        "RuntimeTokenHttpInterceptor", "RuntimeVersionHttpInterceptor", "SuperExecAuthHttpInterceptor",
    ),
    "flwr.supercore.runtime": ("RuntimeHttpClient",),
    "flwr.supernode.runtime.run_clientapp": ("pull_task_input", "push_message", "push_task_output"),
    "httpx": ("HTTPError", "HTTPStatusError"),
}  # fmt: skip
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
RECORD, ARRAY = "sordino", "bytes"
REFUSED = 0  # an error of no kind that Flower knows
JOINED = "SuperNode ID:"  # a node's log line once the SuperLink has admitted it
HEARTBEAT = 10.0  # seconds between heartbeats: Flower gives a task up after 30
PULSE = 1.0  # seconds between two polls for replies
ONLINE_PULSE = 3.0  # seconds between two polls for online nodes
LEAST = 3.0  # seconds before the deadline after which nothing is sent


def installed() -> tuple[int, ...]:
    """Return the version of the installed flwr; refuse a missing or unsupported one."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise EngineError("no flwr in this environment", WANTED, "pip install 'sordino[flower]'") from None
    version = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not LOWEST <= version < BELOW:
        raise EngineError(f"flwr {found}", WANTED, f"pip install '{WANTED}'")
    return version


def missing_names() -> list[str]:
    """Return the names of `NAMES` that the installed flwr does not have, as module:name."""
    missing = []
    for module, names in NAMES.items():
        try:
            held: Any = importlib.import_module(module)
        except ImportError:
            held = None
        missing += [f"{module}:{name}" for name in names if not hasattr(held, name)]
    return missing


@cache
def flower() -> Any:
    """Return a namespace of all names in `NAMES`; refuse a missing or unsupported flwr."""
    installed()
    gone = missing_names()
    if gone:
        raise EngineError(f"flwr {metadata.version('flwr')} without {', '.join(gone)}", WANTED)
    held = {name: getattr(importlib.import_module(module), name) for module, names in NAMES.items() for name in names}
    return SimpleNamespace(**held)


def pack(data: bytes) -> Any:
    """Return a Flower message content that holds these bytes as one array."""
    f = flower()
    array = f.Array(dtype="uint8", shape=(len(data),), stype="sordino", data=data)
    return f.RecordDict({RECORD: f.ArrayRecord({ARRAY: array})})


def unpack(message: Any) -> bytes | None:
    """Return the bytes that `pack` put into a message; None for an error or any other content."""
    try:
        return bytes(message.content[RECORD][ARRAY].data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@codec.hides_values
@dataclass(frozen=True)
class NodeTask:
    """One task of a SuperNode: its bytes, and methods to answer. Code shipped with the run is never executed."""

    data: bytes | None
    message: Any
    context: Any
    client: Any

    def reply(self, data: bytes) -> None:
        """Send the answer to the SuperNode and complete the task."""
        self._complete(pack(data))

    def refuse(self, why: str) -> None:
        """Answer the task with an error; a SuperNode takes its next task only after an answer."""
        self._complete(flower().Error(code=REFUSED, reason=why))

    def _complete(self, content: Any) -> None:
        f = flower()
        f.push_message(self.client, f.Message(content, reply_to=self.message), self.context)
        f.push_task_output(self.client, self.context, f.SubStatus.COMPLETED, "")

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Send heartbeats to the SuperNode inside the context, and close the connection at its end."""
        f, done = flower(), threading.Event()

        def beat() -> None:
            while not done.is_set():
                with suppress(f.HTTPError):
                    self.client.SendTaskHeartbeat(f.SendTaskHeartbeatRequest())
                done.wait(HEARTBEAT)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.client.close()


@codec.hides_values
@dataclass(frozen=True)
class Node:
    """Client of the Runtime API of a SuperNode (--isolation process), from which tasks are taken."""

    address: str
    secret: bytes | None = None  # of --superexec-auth-secret-file: keeps other users of the machine out

    def poller(self) -> Callable[[], NodeTask | None]:
        """Return a function that takes the SuperNode's next task (or None); it raises `HTTPError` without an answer."""
        f = flower()
        version = f.RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")

        def connect(*interceptors: Any) -> Any:
            return f.RuntimeHttpClient.from_server_address(self.address, True, None, [version, *interceptors])

        signed = [] if self.secret is None else [
            f.SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=frozenset({ACQUIRE}))
        ]  # fmt: skip
        client = connect(*signed)

        def take() -> NodeTask | None:
            found = client.AcquireTask(f.AcquireTaskRequest(supported_task_types=[f.TaskType.CLIENT_APP]))
            if not (found.HasField("task") and found.token):
                return None
            own = connect(f.RuntimeTokenHttpInterceptor(found.token))
            message, context, _run, _app = f.pull_task_input(own)
            return NodeTask(unpack(message), message, context, own)

        return take


def register(address: str, ca: bytes, public: bytes, name: str) -> None:
    """Register a node's public key at the SuperLink, as `flwr supernode register` does; accept a known key."""
    f = flower()
    version = f.RuntimeVersionHttpInterceptor(component_name="flwr")
    client = f.ControlHttpClient.from_server_address(address, False, ca, [version])
    try:
        client.RegisterNode(f.RegisterNodeRequest(public_key=public, name=name))
    except f.HTTPStatusError as error:
        if "already in use" not in error.response.text:
            found = f"a node key of silo {name!r} that the SuperLink refuses ({error.response.text})"
            raise EngineError(found) from None
    finally:
        client.close()


@dataclass(frozen=True)
class FlowerTransport:
    """Transport over a Flower SuperLink; each silo is the node that is registered under the silo's name."""

    grid: Any
    silos: Sequence[str]  # in the plan's order

    offers: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str] = "flower"

    @property
    def names(self) -> Sequence[str]:
        """Names of the clients in errors."""
        return self.silos

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        """Send each silo its job, and yield the replies that arrive within the timeout."""
        yield from self.exchange({silo: job.to_bytes() for silo, job in jobs.items()}, time.time() + timeout)

    def exchange(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        """Send bytes to silos and yield their answers until `deadline` (seconds since 1970).

        A silo gets its message again after Flower reports a failed node, or after a restart of its node, which loses
        the message. A silo that refused is not asked again.
        """
        waiting, sent, last_poll = set(bodies), dict[str, tuple[int, tuple[int, str]]](), -ONLINE_PULSE
        try:
            while (waiting or sent) and time.time() < deadline:
                ttl, now = deadline - time.time(), time.monotonic()
                if ttl >= LEAST and now >= last_poll + ONLINE_PULSE:
                    last_poll = now
                    self._send(bodies, waiting, sent, ttl)
                for message in self.grid.pull_messages(list(sent)) if sent else ():
                    silo, _ = sent.pop(str(message.metadata.reply_to_message_id), (None, None))
                    data = unpack(message)
                    if silo is not None and data is not None:
                        yield silo, data
                    elif silo is not None and message.has_error() and message.error.code != REFUSED:
                        waiting.add(silo)
                time.sleep(PULSE if waiting or sent else 0.0)
        except flower().HTTPError as error:
            fix = "start the SuperLink, then continue the run with --resume"
            raise EngineError(f"a SuperLink that does not answer ({error})", "", fix) from None

    def _send(
        self, bodies: Mapping[int, bytes], waiting: set[int], sent: dict[str, tuple[int, tuple[int, str]]], ttl: float
    ) -> None:
        """Send its message to every silo that is online and has no answer yet; messages expire after `ttl` seconds."""
        f, online = flower(), self.online_nodes()
        for number, (silo, node) in list(sent.items()):
            if online.get(silo, node) != node:
                del sent[number]
                waiting.add(silo)
        asked = sorted(waiting & online.keys())
        known: dict[str, Any] = {"message_type": "train", "ttl": ttl}
        messages = [
            f.Message(pack(bodies[silo]), dst_node_id=online[silo][0], group_id=str(silo), **known) for silo in asked
        ]
        for number, silo in zip(self.grid.push_messages(messages) if messages else (), asked, strict=False):
            sent[str(number)] = silo, online[silo]
            waiting.discard(silo)

    def online_nodes(self) -> dict[int, tuple[int, str]]:
        """Return id and activation time of each online node by silo number; ignore nodes with other names."""
        found: dict[int, tuple[int, str]] = {}
        for node in self.grid.get_nodes():
            if node.name not in self.silos:
                continue
            silo = list(self.silos).index(node.name)
            if silo in found:
                fix = "remove one with: flwr supernode unregister"
                raise EngineError(f"two nodes for the silo {node.name!r}", "one node per silo", fix)
            found[silo] = int(node.node_id), str(node.last_activated_at)
        return found
