"""A real browser that tests drive without a driver: Chromium, asked over a pair of pipes.

Source: Chrome DevTools Protocol over `--remote-debugging-pipe`: JSON messages that end in a NUL byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium here: a browser is needed to see the page as one does"
)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60


class Browser:
    """One window of a running browser.

    Args:
        to_browser: File descriptor that commands go into.
        from_browser: File descriptor that answers come out of.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._rest = b""
        self._session = ""
        self.said: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.said.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser doesn't answer"
            block = os.read(self._from, 1 << 20)
            assert block, "the browser ended"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\0")
        content: dict[str, Any] = json.loads(line)
        return content

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; the page's own policy doesn't bind the one who looks."""
        done = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true of a page that has loaded."""
        deadline = time.monotonic() + SECONDS
        while not self.value(f"document.readyState === 'complete' && Boolean({expression})"):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Open a page and wait for it, even where the page before it has the same address."""
        self.value("window.pageBefore = true")
        self.ask("Page.navigate", url=url)
        self.wait_for(f"!window.pageBefore && location.href.startsWith({json.dumps(url)})")

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def drop(self, path: Path, selector: str) -> None:
        """Drop a file from outside onto an element."""
        box = self.value(f"JSON.stringify(document.querySelector({json.dumps(selector)}).getBoundingClientRect())")
        place = json.loads(box)
        x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.ask("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def screenshot(self, path: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Save what a window of a size shows."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{command_out} 4>&{answer_in}', "bash", CHROMIUM, *QUIET,
         f"--user-data-dir={profile}"],
        pass_fds=(command_out, answer_in), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(command_out)
    os.close(answer_in)
    try:
        browser = Browser(command_in, answer_out)
        yield browser
        browser._session = ""
        browser.ask("Browser.close")
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(command_in)
        os.close(answer_out)
