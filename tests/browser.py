"""A real browser: Debian's Chromium, headless, driven over WebDriver by nothing but the standard library."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One window."""

    def __init__(self, port: int, profile: str) -> None:
        self.address = f"http://127.0.0.1:{port}"
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        asked = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        self.session = ""
        self.session = f"/session/{self.call('/session', capabilities={'alwaysMatch': asked})['sessionId']}"

    def call(self, path: str, /, method: str = "POST", **values: Any) -> Any:
        """One command of the protocol."""
        body = json.dumps(values).encode() if method == "POST" else None
        request = Request(self.address + self.session + path, body, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def tool(self, command: str, **values: Any) -> Any:
        """One command of the browser's own tools."""
        return self.call("/goog/cdp/execute", cmd=command, params=values)

    def open(self, page: Path, *, width: int, dark: bool = False, media: str = "screen") -> None:
        """A file, in a window so wide, for a reader who prefers so."""
        self.tool("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tool("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("/url", url=page.as_uri())

    def ask(self, script: str, *values: Any) -> Any:
        """What a script returns."""
        return self.call("/execute/sync", script=script, args=list(values))

    def press(self, key: str) -> None:
        """A key, down and up."""
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.call("/actions", actions=[{"type": "key", "id": "keyboard", "actions": keys}])

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was noted since the last time."""
        found: list[dict[str, Any]] = self.call("/se/log", type=kind)
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for since the last time."""
        notes = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [note["params"]["request"]["url"] for note in notes if note["method"] == "Network.requestWillBeSent"]

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        found = self.tool("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile; the test is skipped, visibly, where there is none."""
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("no chromium with its chromedriver on this machine")
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        subprocess.Popen([driver, "--port=0"], **quiet) as own,  # type: ignore[call-overload]
    ):
        try:
            port = next(int(m[1]) for line in own.stdout if (m := re.search(r"successfully on port (\d+)", line)))
            window = Browser(port, profile)
            yield window
            window.call("", method="DELETE")
        finally:
            own.terminate()
