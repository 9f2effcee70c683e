"""One call in a process of its own: where llama.cpp aborts or fills the log, only that process is affected."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from pebble import ProcessExpired, ProcessPool

from specbisect.errors import EngineFault

P = ParamSpec("P")
T = TypeVar("T")

WORDS = 3
"""Lines of the library's log that go into the reason of a fault."""


def call(stage: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` in a fresh process; what it takes, returns and raises is pickled.

    Raises what the function raises; an `EngineFault` gets the last lines of the log, and so does one with `stage`
    raised when the process dies.
    """
    with (
        tempfile.NamedTemporaryFile(prefix="specbisect-", suffix=".log") as log,
        ProcessPool(
            max_workers=1,
            context=multiprocessing.get_context("spawn"),
            initializer=redirect,
            initargs=(log.name,),
        ) as pool,
    ):
        future = pool.schedule(function, args=args, kwargs=kwargs)
        try:
            return future.result()
        except ProcessExpired as died:
            reason = f"the process died of {_cause(died.exitcode)}"
            raise EngineFault(stage, reason + _last_words(log.name)) from None
        except EngineFault as fault:
            raise EngineFault(fault.stage, fault.reason + _last_words(log.name)) from None
        finally:
            # An interrupted caller does not wait for the end.
            future.cancel()  # type: ignore[no-untyped-call]  # pebble leaves it bare


def redirect(path: str) -> None:
    """Send file descriptor 2 of this process to the file at `path`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    os.close(fd)


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


def _last_words(path: str) -> str:
    lines = Path(path).read_text(errors="replace").splitlines()
    words = [line.strip() for line in lines if line.strip()][-WORDS:]
    return "; llama.cpp's last words: " + " / ".join(words) if words else ""
