"""A running llama-server: one that is started here and ends with this process, or one that is there already."""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from specbisect import stage
from specbisect.engines.server import reading, reaper
from specbisect.engines.server.client import Client, Disconnected
from specbisect.engines.server.log import Log, reason
from specbisect.errors import BadInput, EngineFault

HOST = "127.0.0.1"
READY_S = float(os.environ.get("SPECBISECT_SERVER_READY_S", "600"))
"""How long a server may take to load its model."""
ANSWER_S = float(os.environ.get("SPECBISECT_SERVER_ANSWER_S", "1800"))
"""How long one completion may take."""
LOG_LAG_S = 2.0
"""How long the log of a request may lag behind its answer."""

_LISTENING = re.compile(r"listening on https?://[^\s:]+:(\d+)")
OVERRIDES = re.compile(r"^(LLAMA_ARG_|LLAMA_API_KEY|AIP_)")
"""Environment variables that llama-server would take settings from; they are kept from it."""

_SIGNALS = 128  # an exit code above it names a signal
_POLL_S = 0.02
_DYING_S = 10.0


class Server:
    """A llama-server started with `command`, on a loopback port that the kernel chose, with a key of its own.

    Raises `EngineFault` with stage ``load`` when it dies, or is not ready within `READY_S`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        stage.report("load")
        self.log = Log()
        self.startup = ""
        key = secrets.token_hex(16)
        keep = {k: v for k, v in os.environ.items() if not OVERRIDES.match(k)}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, *command, "--host", HOST, "--port", "0"],
            stdin=subprocess.PIPE,
            stdout=self.log.fileno,
            stderr=subprocess.STDOUT,
            # by environment: command lines can be read by every user; and no configuration file of this user
            env=keep | {"LLAMA_API_KEY": key, "XDG_CONFIG_HOME": os.devnull},
            start_new_session=True,
        )
        self.shown = " ".join(Path(word).name if "/" in word else word for word in command)
        try:
            self.client = self._ready(key)
            self.about = self.client.about()
        except BaseException:
            self.close()
            raise
        self.startup = self.log.text()

    def _ready(self, key: str) -> Client:
        deadline = time.monotonic() + READY_S
        client = None
        while time.monotonic() < deadline:
            if client is None and (port := _LISTENING.search(self.log.text())):
                client = Client(f"http://{HOST}:{port[1]}", key, seconds=ANSWER_S, loopback=True)
            try:
                if client is not None and client.healthy():
                    return client
            except EngineFault as fault:
                raise EngineFault(
                    "load", f"{self.ended() or fault.reason}; {self.last_words()}"
                ) from None
            if ended := self.ended():
                raise EngineFault("load", f"{ended}; {self.last_words()}")
            time.sleep(_POLL_S)
        raise EngineFault(
            "load", f"llama-server was not ready within {READY_S:g} s; {self.last_words()}"
        )

    def attend(self) -> None:
        """Begin to listen: what the log said so far is about earlier requests."""
        self.log.clear()

    def heard(self, slot: int) -> str:
        """The log since `attend`, once it has all of the request that `slot` has answered."""
        return self.log.wait_for(lambda text: reading.finished(text, slot), LOG_LAG_S)

    def ended(self) -> str:
        """How the server ended, empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        if code > _SIGNALS:
            return f"llama-server was ended by signal {code - _SIGNALS}"
        return f"llama-server exited with code {code}"

    def last_words(self) -> str:
        """What the log says about a failure, as a clause."""
        return f"it last printed: {reason(self.log.text() or self.startup)}"

    def explain(self, fault: EngineFault) -> EngineFault:
        """`fault` with what became of the server, and its last words."""
        what = fault.reason
        if isinstance(fault, Disconnected):
            with suppress(subprocess.TimeoutExpired):  # connections close a moment before the end
                self._process.wait(_DYING_S)
            what = self.ended() or what
        return EngineFault(fault.stage, f"{what}; {self.last_words()}")

    def close(self) -> None:
        """End the server and wait until it is gone. Idempotent."""
        if client := getattr(self, "client", None):
            client.close()
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(reaper.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self.log.close()


class External:
    """A llama-server that somebody else started, at `url`. It has no log here, and no settings that can be checked.

    Raises `BadInput` when no llama-server answers there.
    """

    startup = ""
    shown = "(a server that was already running)"

    def __init__(self, url: str, key: str) -> None:
        stage.report("load")
        self.client = Client(url, key, seconds=ANSWER_S, loopback=False)
        try:
            if not self.client.healthy():
                raise BadInput(f"the llama-server at {url} is still loading its model; wait for it")
            self.about = self.client.about()
        except EngineFault as fault:
            self.client.close()
            raise BadInput(f"{url} is no llama-server that can be used: {fault.reason}") from None

    def attend(self) -> None:
        """There is no log to listen to."""

    def heard(self, slot: int) -> str:
        """Nothing."""
        return ""

    def ended(self) -> str:
        """Whether it runs is for others to see to."""
        return ""

    def explain(self, fault: EngineFault) -> EngineFault:
        """All that is known is what it answered."""
        return fault

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self.client.close()
