"""Gate of a server, `sordino federation gate DIR`: a proxy for silos that forwards Flower's Fleet API and nothing else.

Flower's APIs Fleet (nodes), Control (start runs, register and remove nodes) and Runtime (take a run's task) share the
SuperLink's port, and flwr 1.41 and 1.42 authenticate only callers of Fleet. So the SuperLink listens on the loopback
interface only, and this process, whose port is the only one that silos reach, forwards

    POST /v1/fleet/WORD      any other request is answered with 404 and never reaches the SuperLink

A request is parsed and then written anew, so that one connection cannot carry a second request past this check.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from sordino.errors import EngineError
from sordino.federation.flower_api import flower

PASSED = re.compile(rb"/v1/fleet/[a-z-]{1,40}")
HOP_BY_HOP = {
    b"connection", b"host", b"keep-alive", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def passed(scope: dict[str, Any]) -> bool:
    """Return whether a request is forwarded: POST to a path of the Fleet API, without a query."""
    path, query = bytes(scope["raw_path"]), scope["query_string"]
    return scope["method"] == "POST" and not query and PASSED.fullmatch(path) is not None


def forwarded(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to forward: all except those that belong to one connection."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


def gate(link: str, trust: ssl.SSLContext) -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """Return the ASGI application that forwards requests to the SuperLink at `link`."""
    f = flower()
    client = f.AsyncClient(base_url=f"https://{link}", verify=trust, timeout=60.0, trust_env=False)

    async def body_of(receive: Receive) -> AsyncIterator[bytes]:
        more = True
        while more:
            event = await receive()
            more = event["type"] == "http.request" and event.get("more_body", False)
            yield event.get("body", b"")

    async def refuse(send: Send, status: int) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    async def serve(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not passed(scope):
            if scope["type"] == "http":
                await refuse(send, 404)
            return
        path, own = scope["raw_path"].decode("ascii"), forwarded(scope["headers"])
        request = client.build_request("POST", path, headers=own, content=body_of(receive))
        try:
            response = await client.send(request, stream=True)
        except f.HTTPError:
            return await refuse(send, 503)  # nodes ask again
        try:
            own = forwarded(response.headers.raw)
            await send({"type": "http.response.start", "status": response.status_code, "headers": own})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            await response.aclose()

    return serve


def serve_gate(folder: Path, host: str, port: int, link: str) -> None:
    """Serve the gate until the process is stopped; `folder` has ca.crt, server.crt and server.key."""
    pair = {"ssl_certfile": str(folder / "server.crt"), "ssl_keyfile": str(folder / "server.key")}
    try:
        trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        flower().run(
            gate(link, trust), host=host, port=port, lifespan="off", log_level="warning", access_log=False, **pair
        )
    except OSError as error:
        found = f"certificates in {folder} that cannot be read ({error})"
        raise EngineError(found, "ca.crt, server.crt and server.key", "write them with certificates.sh") from None
