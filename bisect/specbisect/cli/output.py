"""How commands speak: what was asked for goes to standard output, everything else to standard error."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

PIPED = 80
"""Columns of a table that is not for a terminal."""


def emit(document: Any) -> None:
    """Print a JSON document. Numbers that JSON does not have become null."""
    from pydantic_core import to_json

    click.echo(to_json(document, indent=1, inf_nan_mode="null"))


def note(text: str) -> None:
    """Tell the person at the terminal, whatever standard output is for."""
    click.echo(text, err=True)


@contextmanager
def going_on(directory: Path) -> Iterator[None]:
    """Around work whose results are kept in `directory` as they come: say so when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what has ended is kept in {directory}; the same command goes on from there"
        ) from None


def columns() -> int:
    """How wide a table may be."""
    return shutil.get_terminal_size((PIPED, 0)).columns if sys.stdout.isatty() else PIPED


def printable(text: str) -> str:
    """`text` with escapes for what a terminal would obey or swallow; models generate any bytes."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def mebibytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


def duration(seconds: float) -> str:
    """A number of seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
