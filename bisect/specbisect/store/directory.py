"""The run directory as files: who may write it, how a file is replaced, and what a disk can do to us."""

import errno
import fcntl
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from specbisect.errors import BadInput

DATABASE = "run.sqlite"
MATRIX = "matrix.json"
LOCK = "run.lock"

_SHOWN = 3
"""How many differences one line says."""


def check(path: Path) -> None:
    """Raise `BadInput` if a run cannot be kept at `path` because something else is there."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file; choose a directory for the run")
    if is_run(path) or not path.exists():
        return
    if strangers := sorted({p.name for p in path.iterdir()} - {MATRIX, LOCK}):
        raise BadInput(
            f"{path} is not a run directory (it holds {strangers[0]}); choose an empty or a new one"
        )


def is_run(path: Path) -> bool:
    """Whether a run has been kept at `path`."""
    return (path / DATABASE).is_file()


def clear(path: Path) -> None:
    """Remove what a run has left at `path`, except its lock."""
    for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", MATRIX):
        (path / name).unlink(missing_ok=True)


def matrix(path: Path) -> Mapping[str, Any]:
    """The resolved matrix of the run at `path`. Raises `BadInput` when it is missing or damaged."""
    file = path / MATRIX
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise _lost(file, "is missing") from None
    except ValueError as error:
        raise _lost(file, f"is damaged ({error})") from None
    if not isinstance(found, dict):
        raise _lost(file, "is damaged (it holds no object)")
    return found


def _lost(file: Path, what: str) -> BadInput:
    return BadInput(
        f"{file} {what}; the command that made this run writes it anew, without --fresh, and keeps all results"
    )


def connect(path: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """The database of the run at `path`, in autocommit mode."""
    file = path / DATABASE
    if readonly:
        # In a directory that may not be written, SQLite reads a file in WAL mode only on the promise that it is idle.
        idle = not os.access(path, os.W_OK) and not file.with_name(f"{DATABASE}-wal").exists()
        uri = f"{file.absolute().as_uri()}?mode=ro{'&immutable=1' if idle else ''}"
        return sqlite3.connect(uri, uri=True, isolation_level=None)
    database = sqlite3.connect(file, isolation_level=None)
    database.executescript("PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON")
    return database


def acquire(path: Path) -> IO[str]:
    """The right to write at `path`, until the file is closed or this process ends, however it ends.

    Raises `BadInput` when another process has it.
    """
    lock = (path / LOCK).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another"
        lock.close()
        raise BadInput(
            f"{path} is being written by process {holder}; wait for its end, or choose another directory"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def write(path: Path, text: str) -> None:
    """Put `text` into the file at `path`, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def changes(old: Any, new: Any) -> str:
    """The first few differences between two JSON values, and how many more there are; empty when they are equal."""
    found = list(differences(old, new))
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join(found[:_SHOWN] + more)


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Where two JSON values differ: ``target.quant: "Q8_0" → "F16"``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            inner = f"{name}.{key}" if name else key
            yield from differences(old.get(key), new.get(key), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _nested(old):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{name}[{i}]")
    elif old != new:
        yield f"{name}: {_brief(old)} → {_brief(new)}"


def _nested(values: list[Any]) -> bool:
    return any(isinstance(value, (dict, list)) for value in values)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Whatever the disk or its contents can do to us, in one line."""
    try:
        yield
    except sqlite3.Error as error:
        # Prefixes, because SQLite appends details: SQLITE_IOERR_WRITE.
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            raise _no_space(path) from error
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            raise _damaged(path, error) from error
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR")):
            raise BadInput(
                f"cannot use {path / DATABASE}: {error}; check permissions and disk"
            ) from error
        raise
    except (zlib.error, ValidationError, json.JSONDecodeError) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(path) from error
        raise BadInput(
            f"cannot use {error.filename or path}: {error.strerror}; choose another directory"
        ) from error


def _no_space(path: Path) -> BadInput:
    return BadInput(f"no disk space at {path}; free some and run the same command again")


def _damaged(path: Path, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0]
    return BadInput(
        f"{path / DATABASE} is damaged ({reason}); restore it, or run again with --fresh"
    )
