"""Flower's API as far as Sordino uses it: every name of flwr, public or not, is in this file. Called by federation/.
`FlowerTransport` sends jobs to silos through a Flower SuperLink and takes their replies, for `engines.remote`.

Flower's Runtime API is not a stable interface: a release may move any of these names. `missing_names()` lists them, and
tests/deploy/test_internals.py fails with that list.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

from sordino import codec
from sordino.engines.messages import Job
from sordino.errors import EngineError

LOWEST, BELOW = (1, 41), (1, 42)
WANTED = "flwr>=1.41,<1.42"
NAMES = {
    "flwr.app": ("Array", "ArrayRecord", "ConfigRecord", "Context", "Message", "MetricRecord", "RecordDict"),
    "flwr.app.error": ("Error",),
    "flwr.clientapp": ("ClientApp",),
    "flwr.serverapp": ("Grid", "ServerApp"),
    "flwr.serverapp.strategy": ("FedAvg", "Strategy"),
    "flwr.common.constant": ("SubStatus",),
    "flwr.common.secure_aggregation.crypto.shamir": ("combine_shares", "create_shares"),
    "flwr.common.secure_aggregation.crypto.symmetric_encryption": ("decrypt", "encrypt"),
    "flwr.common.secure_aggregation.secaggplus_utils": ("pseudo_rand_gen",),
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


def installed() -> tuple[int, ...]:
    """The version of the installed flwr; others than the supported ones are refused."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise EngineError("no flwr in this environment", WANTED, "pip install 'sordino[flower]'") from None
    version = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not LOWEST <= version < BELOW:
        raise EngineError(f"flwr {found}", WANTED, f"pip install '{WANTED}'")
    return version


def missing_names() -> list[str]:
    """Names used here that the installed flwr does not have, as module:name."""
    missing = []
    for module, names in NAMES.items():
        try:
            held = importlib.import_module(module)
        except ImportError:
            missing += [f"{module}:{name}" for name in names]
            continue
        missing += [f"{module}:{name}" for name in names if not hasattr(held, name)]
    return missing


@cache
def flower() -> Any:
    """Namespace of all names in `NAMES`; refuses a missing or unsupported flwr."""
    installed()
    gone = missing_names()
    if gone:
        raise EngineError(f"flwr {metadata.version('flwr')} without {', '.join(gone)}", WANTED)
    held = {name: getattr(importlib.import_module(module), name) for module, names in NAMES.items() for name in names}
    return SimpleNamespace(**held)


def pack(data: bytes) -> Any:
    """Bytes as the content of a Flower message: one array, which Flower sends in chunks."""
    f = flower()
    array = f.Array(dtype="uint8", shape=(len(data),), stype="sordino", data=data)
    return f.RecordDict({RECORD: f.ArrayRecord({ARRAY: array})})


def node_failed(message: Any) -> bool:
    """Whether a node or task ended before it answered; a silo's refusal has another code."""
    return bool(message.has_error()) and message.error.code != REFUSED


def unpack(message: Any) -> bytes | None:
    """The bytes of a message; None if it carries an error or other content."""
    try:
        return bytes(message.content[RECORD][ARRAY].data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@codec.hides_values
@dataclass(frozen=True)
class NodeTask:
    """One task of a node: its bytes, and how to answer. The code that the run ships is neither read nor run."""

    data: bytes | None
    run: int
    message: Any
    context: Any
    client: Any

    def reply(self, data: bytes) -> None:
        """Send the answer to the SuperNode and complete the task."""
        self._complete(pack(data))

    def refuse(self, why: str) -> None:
        """Answer with an error: a SuperNode waits for an answer before it asks for the next task."""
        self._complete(flower().Error(code=REFUSED, reason=why))

    def _complete(self, content: Any) -> None:
        f = flower()
        f.push_message(self.client, f.Message(content, reply_to=self.message), self.context)
        f.push_task_output(self.client, self.context, f.SubStatus.COMPLETED, "")

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Send heartbeats while the answer is computed."""
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(done,), daemon=True)
        beat.start()
        try:
            yield
        finally:
            done.set()
            beat.join()
            self.client.close()

    def _beat(self, done: threading.Event) -> None:
        f = flower()
        while not done.is_set():
            with suppress(f.HTTPError):
                self.client.SendTaskHeartbeat(f.SendTaskHeartbeatRequest())
            done.wait(HEARTBEAT)


@codec.hides_values
@dataclass(frozen=True)
class Node:
    """Runtime API of a SuperNode with --isolation process, which holds the tasks of this node."""

    address: str
    secret: bytes | None = None  # of --superexec-auth-secret-file: keeps other users of the machine out

    def _client(self, *interceptors: Any) -> Any:
        f = flower()
        version = f.RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        return f.RuntimeHttpClient.from_server_address(self.address, True, None, [version, *interceptors])

    def poller(self) -> Callable[[], NodeTask | None]:
        """A function that acquires the next task, or returns None; `HTTPError` where the node does not answer."""
        f = flower()
        signed = [] if self.secret is None else [
            f.SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=frozenset({ACQUIRE}))
        ]  # fmt: skip
        client = self._client(*signed)

        def take() -> NodeTask | None:
            asked = f.AcquireTaskRequest(supported_task_types=[f.TaskType.CLIENT_APP])
            found = client.AcquireTask(asked)
            return self._input(found.token) if found.HasField("task") and found.token else None

        return take

    def _input(self, token: str) -> NodeTask:
        f = flower()
        client = self._client(f.RuntimeTokenHttpInterceptor(token))
        message, context, run, _app = f.pull_task_input(client)
        return NodeTask(unpack(message), int(run.run_id), message, context, client)


@dataclass(frozen=True)
class OnlineNode:
    """A node that is online: its id, the name of its registered key, and the time of its activation."""

    number: int
    name: str
    since: str


def nodes(grid: Any) -> list[OnlineNode]:
    """The nodes that are online."""
    return [OnlineNode(int(node.node_id), str(node.name), str(node.last_activated_at)) for node in grid.get_nodes()]


def train_message(data: bytes, node: int, group: str, ttl: float) -> Any:
    """A train message to a node; the SuperLink drops it after `ttl` seconds."""
    return flower().Message(pack(data), dst_node_id=node, message_type="train", ttl=ttl, group_id=group)


def register(address: str, ca: bytes, public: bytes, name: str) -> None:
    """Register a node's public key, as `flwr supernode register` does; a known key is no error."""
    f = flower()
    version = f.RuntimeVersionHttpInterceptor(component_name="flwr")
    client = f.ControlHttpClient.from_server_address(address, False, ca, [version])
    try:
        client.RegisterNode(f.RegisterNodeRequest(public_key=public, name=name))
    except f.HTTPStatusError as error:
        if "already in use" not in error.response.text:
            raise EngineError(f"a key of {name!r} that the SuperLink refuses ({error.response.text})") from None
    finally:
        client.close()


PULSE = 1.0  # seconds between two polls for replies
ONLINE_PULSE = 3.0  # seconds between two polls for online nodes
LEAST = 3.0  # seconds before the deadline after which nothing is sent


@codec.hides_values
@dataclass
class PendingMessages:
    """Messages without an answer yet. A node that was restarted has lost its message: it is sent again."""

    bodies: Mapping[int, bytes]
    waiting: set[int]
    sent: dict[str, tuple[int, OnlineNode]] = field(default_factory=dict)  # by the number of the message
    last_poll: float = -ONLINE_PULSE

    @property
    def open(self) -> bool:
        return bool(self.waiting or self.sent)

    def due(self, there: Mapping[int, OnlineNode]) -> list[int]:
        """The silos, among those online, that a message must be sent to now."""
        for number, (silo, node) in list(self.sent.items()):
            if silo in there and there[silo] != node:
                del self.sent[number]
                self.waiting.add(silo)
        return sorted(silo for silo in self.waiting if silo in there)

    def take(self, message: Any) -> tuple[int, bytes] | None:
        """Silo and bytes of an answer; where Flower reports a failed node, the silo waits for a new message."""
        silo, _ = self.sent.pop(str(message.metadata.reply_to_message_id), (None, None))
        if silo is not None and node_failed(message):
            self.waiting.add(silo)
        data = unpack(message)
        return None if silo is None or data is None else (silo, data)


@dataclass(frozen=True)
class FlowerTransport:
    """Transport over Flower: every silo is the one node registered under its name."""

    grid: Any
    silos: Sequence[str]  # in the plan's order

    offers: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str] = "flower"

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        """Send each silo its job; yield the replies that arrive within the timeout. A missing reply is no error."""
        yield from self.exchange({silo: job.to_bytes() for silo, job in jobs.items()}, time.time() + timeout)

    def exchange(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        """Send bytes to silos and yield their answers until `deadline` (seconds since 1970)."""
        pending = PendingMessages(bodies, set(bodies))
        try:
            while pending.open and time.time() < deadline:
                self._send(pending, deadline)
                for message in self.grid.pull_messages(list(pending.sent)) if pending.sent else ():
                    answer = pending.take(message)
                    if answer is not None:
                        yield answer
                time.sleep(PULSE if pending.open else 0.0)
        except flower().HTTPError as error:
            raise EngineError(f"a SuperLink that does not answer ({error})", "", "start it, and resume") from None

    def _send(self, pending: PendingMessages, deadline: float) -> None:
        ttl, now = deadline - time.time(), time.monotonic()
        if ttl < LEAST or now < pending.last_poll + ONLINE_PULSE:
            return
        there, pending.last_poll = self.nodes(), now
        asked = pending.due(there)
        messages = [train_message(pending.bodies[silo], there[silo].number, str(silo), ttl) for silo in asked]
        for number, silo in zip(self.grid.push_messages(messages) if messages else (), asked, strict=False):
            pending.sent[str(number)] = silo, there[silo]
            pending.waiting.discard(silo)

    def nodes(self) -> dict[int, OnlineNode]:
        """Online nodes by silo number; nodes under other names are ignored."""
        found: dict[int, OnlineNode] = {}
        for node in nodes(self.grid):
            if node.name not in self.silos:
                continue
            silo = list(self.silos).index(node.name)
            if silo in found:
                raise EngineError(f"two nodes for the silo {node.name!r}", "one", "flwr supernode unregister the other")
            found[silo] = node
        return found
