"""Drive headless Chromium by its DevTools protocol over a pipe.

Messages are JSON, each ended by a NUL byte.

https://chromedevtools.github.io/devtools-protocol documents the methods. Only the browser has to be installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The browser reads from 3 and writes to 4.
_LAUNCH = """
import os, sys
for given, wanted, free in ((sys.argv[1], 3, 100), (sys.argv[2], 4, 101)):
    os.dup2(int(given), free)
for wanted, free in ((3, 100), (4, 101)):
    os.dup2(free, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""
LONGEST_WAIT = 300
"""Seconds without a message after which the browser counts as hung. Slow cores need a minute to audit a long page."""
_KEYS = {
    "Tab": 9,
    "Enter": 13,
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Home": 36,
    "End": 35,
    "Escape": 27,
}


def find_browser() -> str | None:
    """Find the browser of this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


requires_browser = pytest.mark.skipif(
    find_browser() is None and "GITHUB_ACTIONS" not in os.environ,
    reason="no Chromium here: the page was not tried in one",
)
"""Skips a test where there is no browser. GitHub's machines have one, so the test fails there without."""


class Tab:
    """A page of the browser; errors on it are collected in `errors`."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._buffer, self._number = to, back, b"", 0
        self.session = ""
        self.errors: list[str] = []

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, script: bool = True, fragment: str = ""
    ) -> None:
        """Open a file, and wait until it is drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url="about:blank")
        self._wait_for("Page.loadEventFired")
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        self._wait_for("Page.loadEventFired")
        self.call("Page.captureScreenshot", format="jpeg", quality=1)  # waits for a frame

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, that of a promise once it is resolved."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            sent = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key], **sent)

    def type(self, text: str) -> None:
        """Insert text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": given}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read_message()
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _wait_for(self, event: str) -> None:
        while self._read_message().get("method") != event:
            pass

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], LONGEST_WAIT)
            part = os.read(self._back, 1 << 20) if ready else b""
            if not part:
                raise AssertionError("the browser does not answer")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = dict(json.loads(line))
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(str(message["params"]["entry"]))
        if message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] == "error":
            self.errors.append(str(message["params"]["args"]))
        return message


@contextlib.contextmanager
def open_tab(folder: Path) -> Iterator[Tab]:
    """Open a tab of a browser with a profile of its own in `folder`.

    The browser ends with the block.
    """
    browser = find_browser()
    assert browser is not None, "no Chromium or Chrome: install one (apt install chromium)"
    (to_read, to), (back, to_write) = os.pipe(), os.pipe()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
    command = [sys.executable, "-c", _LAUNCH, str(to_read), str(to_write), browser, *options]
    quiet = subprocess.DEVNULL
    running = subprocess.Popen(
        [*command, f"--user-data-dir={folder}"], pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet
    )
    os.close(to_read)
    os.close(to_write)
    try:
        tab = Tab(to, back)
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        yield tab
        tab.session = ""
        with contextlib.suppress(AssertionError, OSError):
            tab.call("Browser.close")
    finally:
        os.close(to)
        os.close(back)
        try:
            running.wait(timeout=10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
