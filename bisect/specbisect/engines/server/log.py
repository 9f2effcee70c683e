"""What a llama-server prints: kept without a name on disk, read back whatever bytes are in it."""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable

_FATAL = re.compile(
    r"\b(?:error|failed|couldn't|abort|assert|invalid|exception|unable)\b", re.IGNORECASE
)
_STAMP = re.compile(r"^(?:\d+\.\d\d\.\d{3}\.\d{3} )?(?:[IWED] )?")
_DIRECTORIES = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+")
_POLL_S = 0.005
_RECENT = 50


class Log:
    """The output of one server, both streams; `fileno` is what it writes to.

    Bytes that are no UTF-8 (a token may end inside a character) are replaced.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.fileno = self._file.fileno()
        # so that the server, which holds it open, goes on at the beginning after `clear`
        mode = fcntl.fcntl(self.fileno, fcntl.F_GETFL)
        fcntl.fcntl(self.fileno, fcntl.F_SETFL, mode | os.O_APPEND)

    def text(self) -> str:
        """Everything since the last `clear`, without time stamps and level letters."""
        size = os.fstat(self.fileno).st_size
        raw = os.pread(self.fileno, size, 0).decode("utf-8", "replace")
        return "\n".join(_STAMP.sub("", line) for line in raw.splitlines())

    def clear(self) -> None:
        """Forget what was printed. Only between requests: lines still on their way would lose their beginning."""
        os.ftruncate(self.fileno, 0)

    def wait_for(self, found: Callable[[str], bool], seconds: float) -> str:
        """The text as soon as `found` holds of it, or after `seconds`; the server prints from a thread of its own."""
        deadline = time.monotonic() + seconds
        while not found(text := self.text()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return text

    def close(self) -> None:
        """Free the file."""
        self._file.close()


def reason(text: str) -> str:
    """The one line of `text` that says best why a server failed: its last complaint, else its last line.

    Files are named without their directories, which are nobody's business in a report.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    complaints = [line for line in lines[-_RECENT:] if _FATAL.search(line)]
    line = " ".join((complaints or lines or ("nothing",))[-1].split())
    return _DIRECTORIES.sub("", line)
