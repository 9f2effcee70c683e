"""One call in a process of its own: where llama.cpp aborts or fills the log, only that process is affected."""

from collections.abc import Callable
from typing import TypeVar

from specbisect.errors import EngineFault
from specbisect.trace import Failure
from specbisect.workers import Workers

T = TypeVar("T")

WORDS = 3
"""Lines of the library's log that go into the reason of a fault."""


def call(function: Callable[..., T], *args: object) -> T:
    """``function(*args)`` in a fresh process; `function` must be picklable by name.

    Raises the `BadInput` it raises; `EngineFault`, with the last lines of the log, for everything else that keeps it
    from an answer. The function says by `stage.report` what it is doing.
    """
    with Workers(1) as workers:
        result = workers.submit(function, *args).result()
    if isinstance(result, Failure):
        words = [line.strip() for line in result.log if line.strip()][-WORDS:]
        said = f"; llama.cpp's last words: {' / '.join(words)}" if words else ""
        raise EngineFault(result.stage, result.reason + said)
    return result
