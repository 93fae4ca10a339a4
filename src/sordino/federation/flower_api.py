"""Every name of Flower that Sordino uses stands in this file, public or not.

Flower's Runtime API is not a promise to outsiders: a new release may move any of these names. `lost()` says which, and
tests/deploy/test_internals.py fails with that sentence; nothing else of the house has to be read.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from sordino import codec
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
JOINED = "SuperNode ID:"  # what a node says when it was let in
BEAT = 10.0  # seconds between the signs of life of a task: Flower gives a task up after 30


def installed() -> tuple[int, ...]:
    """flwr's version, or one sentence."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise EngineError("no flwr in this environment", WANTED, "pip install 'sordino[flower]'") from None
    version = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not LOWEST <= version < BELOW:
        raise EngineError(f"flwr {found}", WANTED, f"pip install '{WANTED}'")
    return version


def missing_names() -> list[str]:
    """Names of this file that the installed flwr does not have, as module:name."""
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
    """All of them, by their last name; one sentence if flwr is missing, of another version, or has lost one."""
    installed()
    gone = missing_names()
    if gone:
        raise EngineError(f"flwr {metadata.version('flwr')} without {', '.join(gone)}", WANTED)
    held = {name: getattr(importlib.import_module(module), name) for module, names in NAMES.items() for name in names}
    return SimpleNamespace(**held)


def pack(data: bytes) -> Any:
    """Bytes as the content of a message: one array, which Flower sends in chunks."""
    f = flower()
    array = f.Array(dtype="uint8", shape=(len(data),), stype="sordino", data=data)
    return f.RecordDict({RECORD: f.ArrayRecord({ARRAY: array})})


def node_failed(message: Any) -> bool:
    """Whether Flower says that a node or a task ended before it answered; what a silo refuses has another code."""
    return bool(message.has_error()) and message.error.code != REFUSED


def unpack(message: Any) -> bytes | None:
    """The bytes of a message; None if it carries an error, or something that is not ours."""
    try:
        return bytes(message.content[RECORD][ARRAY].data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@codec.hides_values
@dataclass(frozen=True)
class NodeTask:
    """One task of a node: what it was asked, and how to answer. The code that the run ships is neither read nor run."""

    data: bytes | None
    run: int
    message: Any
    context: Any
    client: Any

    def reply(self, data: bytes) -> None:
        """Hand the answer to the SuperNode, and say that the task is done."""
        f = flower()
        f.push_message(self.client, f.Message(pack(data), reply_to=self.message), self.context)
        f.push_task_output(self.client, self.context, f.SubStatus.COMPLETED, "")

    def refuse(self, why: str) -> None:
        """Hand over an error: a SuperNode waits for the answer to its message before it asks for the next."""
        f = flower()
        error = f.Error(code=REFUSED, reason=why)
        f.push_message(self.client, f.Message(error, reply_to=self.message), self.context)
        f.push_task_output(self.client, self.context, f.SubStatus.COMPLETED, "")

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Signs of life while the answer is computed."""
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
            done.wait(BEAT)


@codec.hides_values
@dataclass(frozen=True)
class Node:
    """The Runtime API of a SuperNode that runs with --isolation process: the tasks of this node wait there."""

    address: str
    secret: bytes | None = None  # of --superexec-auth-secret-file: keeps other users of the machine out

    def _client(self, *interceptors: Any) -> Any:
        f = flower()
        version = f.RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        return f.RuntimeHttpClient.from_server_address(self.address, True, None, [version, *interceptors])

    def poller(self) -> Callable[[], NodeTask | None]:
        """A function that takes the next task, or None where none waits; `HTTPError` where nobody answers."""
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
    """A node that is online: its number, the name that its key was registered under, and since when it is."""

    number: int
    name: str
    since: str


def nodes(grid: Any) -> list[OnlineNode]:
    """All of them."""
    return [OnlineNode(int(node.node_id), str(node.name), str(node.last_activated_at)) for node in grid.get_nodes()]


def train_message(data: bytes, node: int, group: str, ttl: float) -> Any:
    """A message to a node; the SuperLink forgets it after `ttl` seconds."""
    return flower().Message(pack(data), dst_node_id=node, message_type="train", ttl=ttl, group_id=group)


def register(address: str, ca: bytes, public: bytes, name: str) -> None:
    """What `flwr supernode register KEY.pub --name NAME` does, in this process; a known key stays known."""
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
