"""A proxy on the loopback that ends TLS with the federation's own certificate, and keeps every byte that passes."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = "127.0.0.1"


@dataclass
class Proxy:
    """Between a SuperNode and the SuperLink: `sent` is what left the node, in the clear."""

    home: Path
    link: int
    sent: list[bytes] = field(default_factory=list)
    _server: socket.socket = field(default_factory=socket.socket)

    def start(self) -> int:
        self._server.bind((HERE, 0))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return int(self._server.getsockname()[1])

    def stop(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        inward = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        inward.load_cert_chain(self.home / "server.crt", self.home / "server.key")
        outward = ssl.create_default_context(cafile=str(self.home / "ca.crt"))
        with suppress(OSError):
            while True:
                node, _ = self._server.accept()
                threading.Thread(target=self._pass, args=(node, inward, outward), daemon=True).start()

    def _pass(self, node: socket.socket, inward: ssl.SSLContext, outward: ssl.SSLContext) -> None:
        with suppress(OSError):
            near = inward.wrap_socket(node, server_side=True)
            far = outward.wrap_socket(socket.create_connection((HERE, self.link)), server_hostname=HERE)
            self.sent.append(b"")
            self._shuttle(near, far, len(self.sent) - 1)

    def _shuttle(self, near: ssl.SSLSocket, far: ssl.SSLSocket, place: int) -> None:
        """Both ways in one thread: a TLS socket is not for two."""
        with near, far:
            while True:
                ready = [one for one in (near, far) if one.pending()] or select.select([near, far], [], [])[0]
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is near:
                        self.sent[place] += data
                    (far if source is near else near).sendall(data)

    @property
    def everything(self) -> bytes:
        return b"".join(self.sent)
