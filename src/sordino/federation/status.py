"""Status and logs of a federation's processes: a file, an HTTP endpoint and systemd's watchdog, from one set of facts.

`sordino federation run` writes OUT.status.json and OUT.log beside its run, `sordino silo serve` status.json and
silo.log in the silo's folder; only their owner reads them. `sordino federation status` prints the files. With --status
HOST:PORT the process also answers

    GET /status  JSON      GET /metrics  Prometheus text      GET /health  200, or 503 if its loop has not run lately

without authentication: bind it to the loopback, or to a network that may know who takes part.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from sordino.errors import ConfigError

LARGEST, KEPT = 5 << 20, 5  # bytes of a log file, and how many older ones stay beside it
LATE, BUSY = (
    120.0,
    3600.0,
)  # seconds without a sign of the loop, idle or training, after which a process counts as stuck
EVERY = 5.0  # seconds between two writes of an unchanged status
NAME = "status.json"


def rotating_log(file: Path) -> Callable[[str, str], None]:
    """Return a function (line, level) that appends to a log file with time and level; old files are rotated."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(file, maxBytes=LARGEST, backupCount=KEPT, encoding="utf-8", delay=True)
    form = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler.setFormatter(form)

    def log(line: str, level: str = "INFO") -> None:
        number = logging.getLevelNamesMapping()[level]
        handler.handle(logging.LogRecord("sordino", number, "", 0, line, None, None))
        handler.close()  # the next line opens it again
        file.chmod(0o600)

    return log


def notify_systemd(words: str) -> None:
    """Send a line to systemd, if it started this process with NOTIFY_SOCKET (Type=notify, WatchdogSec)."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if where:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect("\0" + where[1:] if where.startswith("@") else where)
            out.send(words.encode())


@dataclass
class StatusBoard:
    """Facts about one process, written to `file` whenever they change and, unchanged, every five seconds.

    A process calls `beat` from its loop, which tells systemd's watchdog and GET /health that the loop runs.
    """

    file: Path
    facts: dict[str, Any] = field(default_factory=dict)
    beats: float = field(default_factory=time.time)
    _written: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, **facts: Any) -> None:
        """Change some facts, and write all facts to the file."""
        with self._lock:
            self.facts.update(facts)
        self.beat(write=True)

    def beat(self, write: bool = False) -> None:
        """Record that the process's loop runs."""
        self.beats = time.time()
        notify_systemd("WATCHDOG=1")
        if write or self.beats - self._written >= EVERY:
            self._written = self.beats
            part = self.file.with_name(self.file.name + ".part")
            part.write_text(json.dumps(self.seen, indent=1) + "\n", "utf-8")
            part.chmod(0o600)
            part.replace(self.file)

    @property
    def seen(self) -> dict[str, Any]:
        """All facts, with the time of the last beat."""
        with self._lock:
            return {**self.facts, "pid": os.getpid(), "at": stamp(self.beats)}

    @property
    def healthy(self) -> bool:
        return time.time() - self.beats < (BUSY if self.facts.get("busy") else LATE)

    def serve(self, address: str) -> ThreadingHTTPServer:
        """Answer GET requests at HOST:PORT from a thread of this process."""
        board = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kinds = {
                    "/status": "application/json",
                    "/metrics": "text/plain; version=0.0.4",
                    "/health": "text/plain",
                }
                code = 404 if self.path not in kinds else 503 if self.path == "/health" and not board.healthy else 200
                bodies = {"/status": json.dumps(board.seen), "/metrics": prometheus(board.seen, board.healthy)}
                body = bodies.get(self.path, "ok\n" if code == 200 else "stuck\n" if code == 503 else "").encode()
                self.send_response(code)
                self.send_header("Content-Type", kinds.get(self.path, "text/plain"))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Do nothing, so that requests are not logged."""

        host, _, port = address.rpartition(":")
        try:
            server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            found, fix = f"--status {address}, which cannot be used ({error})", "choose another port"
            raise ConfigError(found, "HOST:PORT of this machine, with a free port", fix) from None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


def stamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, as UTC text."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


# ---- what is printed -------------------------------------------------------------------------------------------------


def prometheus(seen: Mapping[str, Any], healthy: bool) -> str:
    """Return the facts of a status in the text format of Prometheus."""
    lines = [f"sordino_healthy {int(healthy)}"]
    for name in ("round", "rounds"):
        lines += [f"sordino_{name} {seen[name]}"] if name in seen else []
    for name, there in dict(seen.get("connected", {})).items():
        lines.append(f'sordino_silo_connected{{silo="{name}"}} {int(there)}')
    for name, count in dict(seen.get("refusals", {})).items():
        lines.append(f'sordino_refusals{{silo="{name}"}} {count["count"]}')
    for name, value in dict(seen.get("metrics", {})).items():
        lines.append(f'sordino_metric{{name="{name}"}} {value}')
    for name in seen.get("awaited", {}).get("silos", ()):
        lines.append(f'sordino_silo_awaited{{silo="{name}"}} 1')
    for name in ("spent", "limit", "left"):
        value = dict(seen.get("budget") or {}).get(name)
        lines += [f'sordino_epsilon{{kind="{name}"}} {value}'] if value is not None else []
    return "".join(f"{line}\n" for line in lines)


def status_files(folder: Path) -> list[Path]:
    """Return the status files of a silo's folder, of a server's folder with its runs, or of one run; newest last."""
    beside = folder.with_name(f"{folder.name}.{NAME}")
    found = [file for file in (folder / NAME, beside, *folder.glob(f"**/*.{NAME}")) if file.is_file()]
    if not found:
        needed = "the folder of a silo, of a server, or of a run that was started"
        raise ConfigError(f"no status file in {folder}", needed, "correct the path, or start the process")
    return sorted(set(found), key=lambda file: file.stat().st_mtime)


def read_status(file: Path) -> dict[str, Any]:
    """Read one status file; `running` and `healthy` tell whether its process exists and whether its loop runs."""
    try:
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        age = time.time() - file.stat().st_mtime
        alive = Path(f"/proc/{int(found['pid'])}").exists() if Path("/proc/self").exists() else age < LATE
    except (OSError, ValueError, KeyError, TypeError) as error:
        what, fix = f"{file}, which cannot be read ({error})", "start the process again"
        raise ConfigError(what, "a status file of Sordino", fix) from None
    ended = found.get("state") in ("done", "stopped")
    here, late = alive and not ended, BUSY if found.get("busy") else LATE
    return {**found, "file": str(file), "running": here, "healthy": here and age < late}


def in_words(seen: Mapping[str, Any]) -> str:
    """Return one process's status as text."""
    return "\n".join(_lines(seen))


def _lines(seen: Mapping[str, Any]) -> Iterator[str]:
    ended = seen.get("state") in ("done", "stopped")
    state = "running" if seen["running"] else seen["state"] if ended else "not running, and it did not end by itself"
    late = "" if seen["healthy"] or not seen["running"] else "; its loop is stuck"
    whose = f", project {seen['project']!r}" if seen.get("project") else ""
    yield f"{seen.get('role', 'process')} {seen.get('name', '')}{whose}: {state}, last sign {seen['at']}{late}"
    if "rounds" in seen:
        figures = " ".join(f"{name}={value:.4f}" for name, value in dict(seen.get("metrics", {})).items())
        yield f"  round {seen.get('round', 0)} of {seen['rounds']} {figures}".rstrip()
    connected = dict(seen.get("connected", {}))
    if connected:
        away = [name for name, there in connected.items() if not there]
        here = [name for name, there in connected.items() if there]
        yield f"  connected: {', '.join(here) or 'nobody'}" + (f"; not connected: {', '.join(away)}" if away else "")
    if seen["running"] and seen.get("awaited"):
        yield f"  waiting for {', '.join(seen['awaited']['silos'])} since {seen['awaited']['since']}"
    for name, refusal in dict(seen.get("refusals", {})).items():
        yield f"  refused by {name}, {refusal['count']} times, last {refusal['at']}: {refusal['why']}"
    budget = seen.get("budget")
    if budget:
        spent = f"epsilon {budget['spent']} of {budget['limit']} spent, {budget['left']} left"
        yield f"  budget of {budget['dataset']}: {spent}"
    if seen.get("last"):
        yield f"  last: {seen['last']}"
