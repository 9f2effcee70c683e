"""What the set-up scripts share: a cache of things made once, commands with progress, one-line trouble.

Standard library only: it runs before anything is installed.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TAIL_LINES = 25
SECONDS_BETWEEN_LINES = 30
NETWORK = re.compile(
    r"NewConnectionError|name resolution|Connection refused|ConnectTimeout|from versions: none"
)
COUNTER = re.compile(r"^\s*\[\s*(\d+/\d+|\d+%)\]")


class Trouble(Exception):
    """Something outside the project is missing or failed; the message says how to mend it."""


def cache_directory() -> Path:
    """Where everything goes that is made once per user (the place that `platformdirs` names)."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/specbisect"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specbisect"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the existing file `path`; says so when another process has it."""
    with path.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that holds {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cached(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made first when it is missing: by one process only, and whole or not at all.

    `make` gets a path in an empty scratch directory beside `path`, where it puts a file or a directory.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.parent / f".{path.name}.lock"
    lock.touch()
    with locked(lock):
        if path.exists():
            return path
        for stale in path.parent.glob(f".{path.name}-*"):  # left by a process that was killed
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            make(made)
            made.rename(path)
    return path


def run(
    command: Sequence[str | Path],
    doing: str,
    log: Path,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run `command` with its output in `log`, showing the build tool's counter as it goes.

    Raises `Trouble` with the end of the log when the command fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = _Progress(doing)
    with (
        log.open("wb", buffering=0) as out,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                out.write(line)
                progress.saw(line.decode(errors="replace"))
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGTERM
                )  # ninja then ends its compilers; KILL would not
            raise
        finally:
            progress.close()
    if process.returncode != 0:
        text = log.read_text(errors="replace")
        tail = "\n".join(line[:300] for line in text.splitlines()[-TAIL_LINES:])
        if NETWORK.search(text):
            raise Trouble(
                f"{doing}: the package index cannot be reached; check the network\n{tail}"
            )
        raise Trouble(f"{doing} failed, exit code {process.returncode}; the end of {log}:\n{tail}")


class _Progress:
    """One line that is rewritten on a terminal; elsewhere a new line now and then."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.terminal = sys.stderr.isatty()
        self.interval = 0.2 if self.terminal else SECONDS_BETWEEN_LINES
        self.start = self.shown = time.monotonic()
        self._show("…")

    def saw(self, line: str) -> None:
        counter = COUNTER.match(line)
        if counter and time.monotonic() - self.shown >= self.interval:
            self._show(f"{counter[1]}, {self._elapsed()}")

    def close(self) -> None:
        self._show(self._elapsed())
        if self.terminal:
            say("")

    def _show(self, state: str) -> None:
        self.shown = time.monotonic()
        if self.terminal:
            print(f"\r{self.doing}: {state}\033[K", end="", file=sys.stderr, flush=True)
        else:
            say(f"{self.doing}: {state}")

    def _elapsed(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self.start), 60)
        return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def start(main: Callable[[], None]) -> None:
    """Run a script's `main`: trouble becomes text and exit code 3, a termination signal cleans up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except Trouble as trouble:
        say(f"{Path(sys.argv[0]).name}: {trouble}")
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(130)
