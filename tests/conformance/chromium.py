"""A headless Chromium on the end of two pipes: opens a page, evaluates expressions, sends real input events.

Speaks the DevTools protocol: JSON messages with a zero byte behind each. Nothing but the browser is needed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0
# Becomes the browser, with the pipes as 3 and 4, where it expects them. (They may be 3 and 4 the other way round.)
START = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The browser's path, None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Chromium:
    """One browser with one page. Use as a context manager; `requests` lists the addresses that the page asked for."""

    def __init__(self, program: str, folder: Path, width: int = 1280, height: int = 900) -> None:
        command_end, self._commands = os.pipe()
        self._answers, answer_end = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(command_end), str(answer_end), program, *flags], start_new_session=True,
            pass_fds=(command_end, answer_end), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_end)
        os.close(answer_end)
        self._buffer, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        self.requests: list[str] = []

    def __enter__(self) -> Chromium:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _stop(self) -> None:
        # The session that was started for it, helpers of the browser included.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    # -- the protocol -----------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            read = os.read(self._answers, 1 << 16)
            assert read, "Chromium has gone"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(line)
        if answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(answer["params"]["request"]["url"])
        return answer

    # -- what tests do ----------------------------------------------------------------------------------------

    def open(self, path: Path) -> None:
        """Load a file and wait until it has."""
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self._events):
            self._events.append(self._next())

    def value(self, expression: str) -> Any:
        """What an expression of the page's script evaluates to, or its promise gives; an exception fails the test."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def exceptions(self) -> list[dict[str, Any]]:
        """Uncaught exceptions since the page was opened."""
        return [e for e in self._events if e.get("method") == "Runtime.exceptionThrown"]

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of the first element that matches, scrolled into view."""
        script = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        x, y = self.value(script)
        return x, y

    def mouse(self, kind: str, x: float, y: float, pressed: bool = False) -> None:
        """kind: mouseMoved, mousePressed or mouseReleased. pressed: the left button is down meanwhile."""
        button = "left" if pressed or kind != "mouseMoved" else "none"
        self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(pressed),
            clickCount=int(kind != "mouseMoved"),
        )  # fmt: skip

    def key(self, name: str) -> None:
        """Press and release a key, by its name in the protocol."""
        code = {"ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36}[name]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
