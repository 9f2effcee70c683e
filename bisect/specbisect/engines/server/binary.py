"""The llama-server binary: found, tried, and asked what it knows."""

import functools
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from specbisect.errors import BadInput

VARIABLE = "SPECBISECT_LLAMA_SERVER"
NAME = "llama-server"
_TRY_S = 10.0
_MEND = f"build one with scripts/build_llama_server, or name one with --llama-server or {VARIABLE}"
_FLAG = re.compile(r"(?<![\w-])(-{1,2}[A-Za-z][\w.-]*)")


@dataclass(frozen=True, slots=True)
class Binary:
    """A llama-server that starts. `flags` are those its ``--help`` names, `spec_types` its ``--spec-type`` values."""

    path: Path
    version: str
    flags: frozenset[str]
    spec_types: tuple[str, ...]


def find() -> Binary:
    """The llama-server named by `VARIABLE`, else the one on ``PATH``.

    Raises `BadInput` when there is none, or when it does not run on this machine.
    """
    named = os.environ.get(VARIABLE)
    found = named or shutil.which(NAME)
    if not found:
        raise BadInput(f"there is no {NAME} on PATH; {_MEND}")
    path = Path(found).expanduser()
    if not path.is_file():
        raise BadInput(f"{path} is no file; {_MEND}")
    if not os.access(path, os.X_OK):
        raise BadInput(f"{path} is not executable; chmod +x it, or {_MEND}")
    return _tried(path.resolve(), path.stat().st_mtime_ns)


@functools.cache
def _tried(path: Path, _changed: int) -> Binary:
    version = re.search(r"version: (.*)", output := _say(path, "--version"))
    help_text = _say(path, "--help")
    flags = frozenset(_FLAG.findall(help_text))
    if version is None or "--model" not in flags:
        said = " ".join(output.split())[:80]
        raise BadInput(
            f"{path} is no llama-server (asked for its version, it says {said!r}); {_MEND}"
        )
    return Binary(path, version[1].strip(), flags, _spec_types(help_text))


def _say(path: Path, flag: str) -> str:
    """What the binary prints, both streams. Raises `BadInput` when it cannot be run."""
    try:
        code, said = _run(path, flag)
    except OSError as error:
        raise BadInput(f"{path} does not run on this machine ({error.strerror}); {_MEND}") from None
    except subprocess.TimeoutExpired:
        raise BadInput(f"{path} {flag} did not end within {_TRY_S:.0f} s; {_MEND}") from None
    text = said.decode("utf-8", "replace")
    if code != 0:
        last = " ".join((text.strip().splitlines() or ["it printed nothing"])[-1].split())
        raise BadInput(f"{path} {flag} failed with exit code {code} ({last}); {_MEND}")
    return text


def _run(path: Path, flag: str) -> tuple[int, bytes]:
    """Exit code and output; a script that hangs takes along whatever it has started."""
    with subprocess.Popen(
        [path, flag],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=_TRY_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


def _spec_types(help_text: str) -> tuple[str, ...]:
    """The values ``--help`` lists behind ``--spec-type``; none when it lists them otherwise."""
    found = re.search(r"--spec-type\s+\[?([a-z0-9][a-z0-9,|-]*)", help_text)
    return tuple(re.split(r"[,|]", found[1])) if found else ()
