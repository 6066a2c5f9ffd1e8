"""Headless Chromium, driven over a pipe with the DevTools protocol."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self.process, self.write, self.read = process, write, read
        self.waiting, self.count, self.session = b"", 0, ""
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its answer. Network requests reported in between are recorded."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            got = self.receive()
            if got.get("id") == self.count:
                assert "error" not in got, got
                return got["result"]

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            assert select.select([self.read], [], [], 60)[0], "the browser does not answer"
            data = os.read(self.read, 1 << 20)
            assert data, "the browser has exited"
            self.waiting += data
        line, _, self.waiting = self.waiting.partition(b"\0")
        got = json.loads(line)
        if got.get("method") == "Network.requestWillBeSent":
            self.requests.append(got["params"]["request"]["url"])
        return got

    def open(self, page: Path, width: int, dark: bool = False, height: int = 800) -> None:
        self.requests = []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )  # fmt: skip
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        for _ in range(500):
            if self.evaluate("document.readyState + location.href").startswith("completefile"):
                return
            time.sleep(0.01)
        raise AssertionError("the page did not load")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))


@contextmanager
def started() -> Iterator[Browser]:
    program = find_chromium()
    assert program
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def connect() -> None:  # the browser reads from 3 and writes to 4
        os.setsid()
        high = [os.dup2(to_read, 103), os.dup2(from_write, 104)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=connect, close_fds=False,
        )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        browser = Browser(process, to_write, from_read)
        try:
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            browser.call("Page.enable")
            browser.call("Network.enable")
            yield browser
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(to_write)
            os.close(from_read)
