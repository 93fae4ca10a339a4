"""A proxy on the loopback that ends TLS with the federation's own certificate, and keeps every byte that passes."""

from __future__ import annotations

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
            kept: list[bytes] = []
            self.sent.append(b"")
            place = len(self.sent) - 1
            threading.Thread(target=self._copy, args=(far, near, None, 0), daemon=True).start()
            self._copy(near, far, kept, place)

    def _copy(self, source: ssl.SSLSocket, sink: ssl.SSLSocket, kept: list[bytes] | None, place: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept.append(data)
                    self.sent[place] = b"".join(kept)
                sink.sendall(data)
        with suppress(OSError):
            sink.close()

    @property
    def everything(self) -> bytes:
        return b"".join(self.sent)
