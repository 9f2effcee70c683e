"""Headless Chromium over its debugging pipe: load a page, look at it, listen to what it says."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
SPOKEN = (3, 4)
PATIENCE_S = 60.0


def find() -> str | None:
    """The browser's program; None when there is none on this machine."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `console` collects what pages and the browser complain about, `requests` every address asked for."""

    def __init__(self, program: str, profile: Path) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[str] = []
        self._number = 0
        self._received = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
        self._log = (profile.parent / "chromium.log").open("wb")

        def connect() -> None:
            """The browser speaks on these two descriptors; copies first, as ours may have the same numbers."""
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
            for end, number in zip(ends, SPOKEN, strict=True):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [program, *flags],
            pass_fds=SPOKEN,
            preexec_fn=connect,  # noqa: PLW1509 (it calls the kernel only)
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        with ExitStack() as opening:
            opening.callback(self.close)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session: str | None = None
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            opening.pop_all()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session := getattr(self, "_session", None):
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        wanted = self._number
        self._read_until(lambda: wanted in self._answers, method)
        answer = self._answers.pop(wanted)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read_until(self, arrived: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not arrived():
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer {what}")
            if not (read := os.read(self._in, 1 << 16)):
                raise RuntimeError(f"Chromium ended during {what}")
            *messages, self._received = (self._received + read).split(b"\0")
            for message in messages:
                self._receive(json.loads(message))

    def _receive(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        params = message.get("params", {})
        self._events.append(message["method"])
        match message["method"]:
            case "Runtime.consoleAPICalled":
                self.console.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def show(self, url: str, width: int, *, dark: bool = False) -> None:
        """Load a page into a window of that width, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=url)
        self._read_until(lambda: "Page.loadEventFired" in self._events, url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser."""
        for end in (self._out, self._in):
            os.close(end)
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
