"""A headless Chromium, driven over a pair of pipes by the DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60  # for any one answer, on a busy machine


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a running browser.

    Attributes:
      requests: the addresses of all that the page asked for, data: left out.
      complaints: what stands on the console, what was thrown, and what the browser refused.
    """

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (answer := self._read()).get("id") != self._number:
            self._notice(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], end - time.monotonic())
            assert ready, f"chromium did not answer within {SECONDS} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "chromium ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Page.loadEventFired":
            self._loaded = True
        elif event["method"] == "Network.requestWillBeSent":
            if not params["request"]["url"].startswith("data:"):
                self.requests.append(params["request"]["url"])
        elif event["method"] == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(params["args"]))
        elif event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif event["method"] == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Opens a file at a width in CSS pixels, and waits until it is loaded."""
        self.requests, self.complaints, self._loaded = [], [], False
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._notice(self._read())
        # One more frame, and all that is logged or asked for by then.
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Saves the whole page, down to its end, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Starts the browser, with a profile of its own in a folder, and ends it."""
    command = [
        str(find_chromium()),
        "--headless=new",
        "--remote-debugging-pipe",  # commands on descriptor 3, answers on 4
        f"--user-data-dir={folder}",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # A shell moves the descriptors: a child's numbers cannot be chosen otherwise without a hook
    # that runs between fork and exec, unsafe beside threads.
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(ours_out, ours_in)
        page.attach()
        yield page
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_out)
        os.close(ours_in)
