"""Errors, sorted by whose fault they are.

Only `cli` turns them into text and exit codes. Any other exception is a defect of specbisect itself.
"""

import difflib
from collections.abc import Iterable


class SpecbisectError(Exception):
    """Base of everything specbisect raises on purpose; `exit_code` is what the command exits with."""

    exit_code = 3


class BadInput(SpecbisectError):
    """A file, flag or model given by the user is wrong; the message is one line that says how to mend it."""

    exit_code = 2


class EngineFault(SpecbisectError):
    """llama.cpp, or a process around it, failed: a decode error, a crash, a time-out, no memory.

    `stage` says what was being done: ``load``, ``context``, ``prompt``, ``draft``, ``verify``, ``rollback``…
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[type["EngineFault"], tuple[str, str]]:
        return type(self), (self.stage, self.reason)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The mend of a misspelt name, for the end of a message: the nearest of `known`, else all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.55)
    return f"; did you mean {' or '.join(near)}?" if near else f"; choose one of {', '.join(known)}"
