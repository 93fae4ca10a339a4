"""All imports from Flower (flwr), and a transport over Flower. Called by the other modules of federation/.

`FlowerTransport` sends jobs to silos through a Flower SuperLink and receives their replies, for `engines.remote`.
`Link` is the server process's client of the SuperLink: it starts a run and takes its task. `Node` is a silo's client of
its SuperNode. Neither executes code that a Flower run contains.

Flower's Runtime API is not a stable interface: a new version may move any of these names. `missing_names()` lists those
that are missing, and tests/deploy/test_internals.py fails with that list.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

from sordino import codec
from sordino.engines.messages import Job
from sordino.errors import DataError, EngineError

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
    "flwr.common.serde": ("run_from_proto",),
    "flwr.proto.control_pb2": ("RegisterNodeRequest", "StartRunRequest", "StopRunRequest"),
    "flwr.proto.fab_pb2": ("Fab",),
    "flwr.proto.runtime_pb2": ("AcquireTaskRequest", "PullTaskInputRequest", "SendTaskHeartbeatRequest"),
    "flwr.supercore.constant": ("TaskType",),
    "flwr.supercore.control": ("ControlHttpClient",),
    "flwr.supercore.interceptors": (
        "RuntimeTokenHttpInterceptor", "RuntimeVersionHttpInterceptor", "SuperExecAuthHttpInterceptor",
    ),
    "flwr.supercore.run": ("RunNotRunningException",),
    "flwr.supercore.runtime": ("RuntimeHttpClient",),
    "flwr.supercore.task_identity": ("TaskIdentity",),
    "flwr.superlink.grid": ("HttpGrid",),
    "flwr.supernode.runtime.run_clientapp": ("pull_task_input", "push_message", "push_task_output"),
    "httpx": ("AsyncClient", "HTTPError", "HTTPStatusError"),
    "uvicorn": ("run",),
}  # fmt: skip
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
APP = """[project]
name = "sordino-federation"
version = "1.0.0"
[tool.flwr.app]
publisher = "sordino"
[tool.flwr.app.components]
serverapp = "none:app"
clientapp = "none:app"
"""  # Flower starts no run without an app; no process of a federation executes one
RECORD, ARRAY = "sordino", "bytes"
REFUSED = 0  # an error of no kind that Flower knows
JOINED = "SuperNode ID:"  # a node's log line once the SuperLink has admitted it
HEARTBEAT = 10.0  # seconds between heartbeats: Flower gives a task up after 30
PULSE = 1.0  # seconds between two polls for replies
ONLINE_PULSE = 3.0  # seconds between two polls for online nodes
PATIENCE = 60.0  # seconds for which a SuperLink that does not answer is asked again
AWAITED = 10.0  # seconds after which the log names the silos that have not answered
LEAST = 3.0  # seconds before the deadline after which nothing is sent


def installed() -> tuple[int, ...]:
    """Return the version of the installed flwr; refuse a missing or unsupported one."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        fix = "run pip install 'sordino[flower]'"
        raise EngineError("no package flwr in this environment", WANTED, fix) from None
    version = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not LOWEST <= version < BELOW:
        raise EngineError(f"flwr {found}", WANTED, f"run pip install '{WANTED}'")
    return version


def missing_names() -> list[str]:
    """Return the entries of `NAMES` that the installed flwr does not have, as module:name."""
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
        found = f"flwr {metadata.version('flwr')} without {', '.join(gone)}"
        raise EngineError(found, WANTED, f"run pip install '{WANTED}'")
    held = {name: getattr(importlib.import_module(module), name) for module, names in NAMES.items() for name in names}
    return SimpleNamespace(**held)


def pack(data: bytes) -> Any:
    """Return the content of a Flower message with these bytes as one array."""
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
    """Task of a SuperNode, with its bytes and the methods to answer it; the run's app code is never executed."""

    data: bytes | None
    message: Any
    context: Any
    client: Any

    def reply(self, data: bytes) -> None:
        """Send the reply to the SuperNode and complete the task."""
        self._complete(pack(data))

    def refuse(self, why: str) -> None:
        """Reply to the task with an error; a SuperNode gives its next task only after a reply."""
        self._complete(flower().Error(code=REFUSED, reason=why))

    def _complete(self, content: Any) -> None:
        f = flower()
        f.push_message(self.client, f.Message(content, reply_to=self.message), self.context)
        f.push_task_output(self.client, self.context, f.SubStatus.COMPLETED, "")

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Send heartbeats of this task inside the context, and close the connection at its end."""
        try:
            with heartbeats(self.client):
                yield
        finally:
            self.client.close()


@contextmanager
def heartbeats(client: Any) -> Iterator[None]:
    """Send heartbeats of a task inside the context."""
    f, done = flower(), threading.Event()

    def beat() -> None:
        while not done.is_set():
            with suppress(f.HTTPError, f.RunNotRunningException):
                client.SendTaskHeartbeat(f.SendTaskHeartbeatRequest())
            done.wait(HEARTBEAT)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(HEARTBEAT)


@codec.hides_values
@dataclass(frozen=True)
class Node:
    """Client of a SuperNode's Runtime API (with --isolation process), which gives tasks."""

    address: str
    secret: bytes | None = None  # of --superexec-auth-secret-file: keeps other users of the machine out

    def poller(self) -> Callable[[], NodeTask | None]:
        """Return a function that takes the SuperNode's next task, if any; it raises `HTTPError` without a response."""
        f = flower()

        def connect(*interceptors: Any) -> Any:
            return runtime_client(self.address, None, "flwr-clientapp", *interceptors)

        client = connect(*signed_requests(self.secret))

        def take() -> NodeTask | None:
            found = client.AcquireTask(f.AcquireTaskRequest(supported_task_types=[f.TaskType.CLIENT_APP]))
            if not (found.HasField("task") and found.token):
                return None
            own = connect(f.RuntimeTokenHttpInterceptor(found.token))
            message, context, _run, _app = f.pull_task_input(own)
            return NodeTask(unpack(message), message, context, own)

        return take


def runtime_client(address: str, ca: bytes | None, component: str, *interceptors: Any) -> Any:
    """Return an HTTP client of Flower's Runtime API, with TLS if `ca`, a CA's certificate, is given."""
    f = flower()
    version = f.RuntimeVersionHttpInterceptor(component_name=component)
    return f.RuntimeHttpClient.from_server_address(address, ca is None, ca, [version, *interceptors])


def signed_requests(secret: bytes | None) -> list[Any]:
    """Return the interceptor that authenticates requests for tasks by a shared secret; empty without a secret."""
    own = frozenset({ACQUIRE})
    known: dict[str, Any] = {"master_secret": secret, "protected_methods": own}
    return [] if secret is None else [flower().SuperExecAuthHttpInterceptor(**known)]


def app_bundle() -> bytes:
    """Return the app of a run in Flower's format, a zip file, without any code."""
    with io.BytesIO() as data:
        with zipfile.ZipFile(data, "w") as bundle:
            bundle.writestr(zipfile.ZipInfo("pyproject.toml"), APP)
        return data.getvalue()


@codec.hides_values
@dataclass(frozen=True)
class Link:
    """Client of a SuperLink's Control and Runtime APIs, which only processes on the SuperLink's machine can reach.

    The SuperLink runs with --isolation process, so that only processes with `secret` can take the tasks of its runs.
    """

    address: str
    ca: bytes
    secret: bytes

    @contextmanager
    def control(self) -> Iterator[Any]:
        """Yield a client of the Control API; raise `EngineError` if the SuperLink does not respond, or refuses."""
        f = flower()
        version = f.RuntimeVersionHttpInterceptor(component_name="flwr")
        client = f.ControlHttpClient.from_server_address(self.address, False, self.ca, [version])
        try:
            yield client
        except f.HTTPStatusError as error:
            found = f"a request that the SuperLink refuses ({error.response.text})"
            raise EngineError(found, "a request that it accepts", "see the SuperLink's log") from None
        except f.HTTPError as error:
            found = f"a SuperLink at {self.address} that does not answer ({error})"
            raise EngineError(found, "a SuperLink that runs", "start it with superlink.sh") from None
        finally:
            client.close()

    def register(self, public: bytes, name: str) -> None:
        """Register a node's public key, as `flwr supernode register` does, unless it is registered already."""
        f = flower()
        with self.control() as client:
            try:
                client.RegisterNode(f.RegisterNodeRequest(public_key=public, name=name))
            except f.HTTPStatusError as error:
                if "already in use" not in error.response.text:
                    raise

    def stop_run(self, run: int) -> None:
        """Stop a run; do nothing if it is finished or unknown."""
        with suppress(EngineError), self.control() as client:
            client.StopRun(flower().StopRunRequest(run_id=run))

    def start_run(self) -> int:
        """Start a run, whose app has no code, and return its number."""
        f, data = flower(), app_bundle()
        with self.control() as client:
            bundle = f.Fab(hash_str=hashlib.sha256(data).hexdigest(), content=data)
            return int(client.StartRun(f.StartRunRequest(fab=bundle)).run_id)

    def take(self, run: int) -> str:
        """Take the task of a run and return its token; any other run that has a task is stopped."""
        f, until = flower(), time.monotonic() + PATIENCE
        client = runtime_client(self.address, self.ca, "flwr-serverapp", *signed_requests(self.secret))
        try:
            while time.monotonic() < until:
                found = client.AcquireTask(f.AcquireTaskRequest(supported_task_types=[f.TaskType.SERVER_APP]))
                if found.HasField("task") and found.task.run_id == run:
                    return str(found.token)
                if found.HasField("task"):
                    self.stop_run(found.task.run_id)
                else:
                    time.sleep(0.1)
        except f.HTTPError as error:
            found, fix = f"a SuperLink that gives no task ({error})", "copy link.secret from the SuperLink's folder"
            raise EngineError(found, "the secret with which the SuperLink was started", fix) from None
        finally:
            client.close()
        needed, fix = "a SuperLink with --isolation process", "start it with superlink.sh"
        raise EngineError("no task of this run from the SuperLink", needed, fix)

    @contextmanager
    def grid(self, token: str) -> Iterator[Any]:
        """Yield the grid of a run's task, which sends and receives messages; the task ends with the context."""
        f, status = flower(), flower().SubStatus.FAILED
        grid = f.HttpGrid(self.address, False, self.ca, token=token)
        grid._retry_invoker.max_time = PATIENCE
        client = grid._runtime_client
        try:
            given = client.PullTaskInput(f.PullTaskInputRequest())
            known = f.TaskIdentity
            known.task_id, known.run_id, known.node_id = given.task_id, given.run.run_id, given.context.node_id
            grid.set_run(f.run_from_proto(given.run))
            with heartbeats(client):
                yield grid
            status = f.SubStatus.COMPLETED
        finally:
            grid._retry_invoker.max_tries = 1
            with suppress(f.HTTPError, f.RunNotRunningException):
                f.push_task_output(client, None, status, "")
            grid.close()


@codec.hides_values
@dataclass(frozen=True)
class FlowerTransport:
    """Transport over a Flower SuperLink, in which each silo is the node registered under the silo's name.

    If keys are pinned, a silo's node must have the pinned key, and its replies must be signed by this key.
    """

    grid: Any
    silos: Sequence[str]  # in the plan's order
    nodes: Mapping[int, bytes] = field(default_factory=dict)  # by silo number: its node's public key
    answer_of: Callable[[int, bytes, bytes], bytes] = lambda silo, request, data: data  # checks and strips a signature
    log: Callable[[str], None] = lambda line: None
    watch: Callable[[Collection[int], Sequence[int], float], None] = lambda online, unanswered, since: None
    log_refusals: Callable[[Mapping[int, str]], None] = lambda why: None

    offers: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str] = "flower"

    @property
    def names(self) -> Sequence[str]:
        """Names of the silos, for error messages."""
        return self.silos

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        """Send each silo its job, and yield the replies that arrive within the timeout."""
        yield from self.exchange({silo: job.to_bytes() for silo, job in jobs.items()}, time.time() + timeout)

    def exchange(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        """Send bytes to silos and yield (silo, reply) until `deadline` (seconds since 1970).

        A silo gets its message again after Flower reports a failed node, or after a restart of its node, which loses
        the message. A silo that refused is not asked again.
        """
        f, pending = flower(), Pending(set(bodies))
        try:
            while (pending.waiting or pending.sent) and time.time() < deadline:
                ttl, now = deadline - time.time(), time.monotonic()
                if ttl >= LEAST and now >= pending.last_poll + ONLINE_PULSE:
                    pending.last_poll = now
                    self._send(bodies, pending, ttl)
                    self._log_awaited(pending)
                for message in self.grid.pull_messages(list(pending.sent)) if pending.sent else ():
                    silo, _ = pending.sent.pop(str(message.metadata.reply_to_message_id), (None, None))
                    data = unpack(message)
                    if silo is not None and data is not None:
                        yield silo, self._checked(silo, bodies[silo], data)
                    elif silo is not None and message.has_error() and message.error.code != REFUSED:
                        pending.waiting.add(silo)
                time.sleep(PULSE if pending.waiting or pending.sent else 0.0)
        except (f.HTTPError, f.RunNotRunningException) as error:
            fix = "start the SuperLink, then continue the run with --resume"
            raise EngineError(f"a SuperLink that does not answer ({error})", "a running SuperLink", fix) from None

    def _checked(self, silo: int, request: bytes, data: bytes) -> bytes:
        try:
            return self.answer_of(silo, request, data)
        except DataError as error:
            raise EngineError(f"an answer in the name of silo {self.silos[silo]!r} that is refused: {error}") from None

    def _send(self, bodies: Mapping[int, bytes], pending: Pending, ttl: float) -> None:
        """Send each online silo without a reply its message, which expires after `ttl` seconds."""
        f, online = flower(), self.online_nodes()
        self.watch(online, pending.unanswered, pending.began)
        for number, (silo, node) in list(pending.sent.items()):
            if online.get(silo, node) != node:
                del pending.sent[number]
                pending.waiting.add(silo)
        asked = sorted(pending.waiting & online.keys())
        known: dict[str, Any] = {"message_type": "train", "ttl": ttl}
        messages = [
            f.Message(pack(bodies[silo]), dst_node_id=online[silo][0], group_id=str(silo), **known) for silo in asked
        ]
        for number, silo in zip(self.grid.push_messages(messages) if messages else (), asked, strict=False):
            pending.sent[str(number)] = silo, online[silo]
            pending.waiting.discard(silo)

    def _log_awaited(self, pending: Pending) -> None:
        """Log which silos have not replied, and since when, unless the last line was the same."""
        asked = {silo for silo, _ in pending.sent.values()}
        names = [f"{self.silos[silo]}{'' if silo in asked else ' (not connected)'}" for silo in pending.unanswered]
        if time.time() - pending.began >= AWAITED and names and names != pending.logged:
            pending.logged = names
            self.log(f"awaited since {time.strftime('%H:%M:%SZ', time.gmtime(pending.began))}: {', '.join(names)}")

    def online_nodes(self) -> dict[int, tuple[int, str]]:
        """Return id and activation time of each silo's online node; nodes with other names or keys are ignored."""
        found: dict[int, tuple[int, str]] = {}
        for node in self.grid.get_nodes():
            if node.name not in self.silos:
                continue
            silo = list(self.silos).index(node.name)
            if self.nodes and self.nodes.get(silo) != node.public_key:
                continue
            if silo in found:
                fix = "remove one with: flwr supernode unregister"
                raise EngineError(f"two nodes for the silo {node.name!r}", "one node per silo", fix)
            found[silo] = int(node.node_id), str(node.last_activated_at)
        return found


@dataclass
class Pending:
    """Messages of one exchange without a reply: silos whose message is not sent (`waiting`), and `sent` messages."""

    waiting: set[int]
    sent: dict[str, tuple[int, tuple[int, str]]] = field(default_factory=dict)
    last_poll: float = -ONLINE_PULSE
    began: float = field(default_factory=lambda: time.time())
    logged: list[str] = field(default_factory=list)

    @property
    def unanswered(self) -> list[int]:
        return sorted(self.waiting | {silo for silo, _ in self.sent.values()})
