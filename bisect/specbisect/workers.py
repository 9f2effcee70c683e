"""Child processes that may die of what they are asked to do, so that a crash is a value and not the end.

llama.cpp aborts, segfaults and hangs; each call therefore runs in a child, and what becomes of the child is part
of the answer. Every worker is a Pebble pool of its own with one process. In a shared pool the workers read from one
locked pipe, so a worker killed at the wrong moment stalls or breaks the others; here a death can damage nothing
but its own channel, which is thrown away with it.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from specbisect import stage
from specbisect.errors import BadInput, EngineFault
from specbisect.trace import Failure

T = TypeVar("T")

LOG_LINES = 20
_LOG_BYTES = 1 << 14
_STATE_BYTES = 128
_POLL_S = 1.0
_STARTS = 2
_PR_SET_PDEATHSIG = 1


class WorkerBug(RuntimeError):
    """A call raised what no call should raise; the message is the traceback it had in the child."""


class Workers:
    """`jobs` child processes, each running one call at a time and replaced when it dies.

    A context manager: leaving it stops every child, whatever it is doing. `timeout` (seconds, None for never) is the
    default of every call and starts when a child takes the call.
    """

    def __init__(self, jobs: int, timeout: float | None = None) -> None:
        self.slots = jobs
        self._timeout = timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="specbisect-")
        self._lock = threading.Lock()
        self._stopped = False
        self._workers: dict[int, _Worker] = {}
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in reversed(range(jobs)):
            self._free.put(slot)
        # Children inherit the signal mask of the thread that starts them: Ctrl-C is for the parent alone. These
        # threads live as long as the pool, which matters because Linux ties a child's life to the starting thread.
        self._threads = ThreadPoolExecutor(
            jobs, "worker", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stopped = True
        for worker in self._workers.values():
            worker.stop()
        self._threads.shutdown()
        for worker in self._workers.values():
            worker.join()
        self._scratch.cleanup()

    def submit(
        self, call: Callable[..., T], *args: object, timeout: float | None = None
    ) -> Future[T | Failure]:
        """Run ``call(*args)`` in a child; both must be picklable, `call` by name.

        The future resolves to the call's value, or to a `Failure` when the call raised `EngineFault`, ran out of
        memory or out of time, or took its process down. `BadInput` is raised as it is, anything else as `WorkerBug`.
        """
        return self._threads.submit(self._run, call, args, timeout or self._timeout)

    def _run(
        self, call: Callable[..., T], args: tuple[object, ...], timeout: float | None
    ) -> T | Failure:
        slot = self._free.get()
        try:
            for _ in range(_STARTS):
                worker = self._worker(slot)
                try:
                    return worker.run(call, args, timeout)
                except BrokenProcessPool:
                    log = worker.log()
                finally:
                    if worker.dead:
                        self._replace(slot)
            return Failure("start", "no worker process lives long enough to take the call", log)
        finally:
            self._free.put(slot)

    def _worker(self, slot: int) -> "_Worker":
        with self._lock:
            if self._stopped:
                raise CancelledError
            if slot not in self._workers:
                self._workers[slot] = _Worker(Path(tempfile.mkdtemp(dir=self._scratch.name)))
            return self._workers[slot]

    def _replace(self, slot: int) -> None:
        with self._lock:
            if self._stopped:
                return
            worker = self._workers.pop(slot)
        worker.stop()
        worker.join()


class _Worker:
    """One child process and the two files through which it can be read after its death."""

    def __init__(self, directory: Path) -> None:
        self.dead = False
        self._directory = directory
        self._state.write_bytes(bytes(_STATE_BYTES))
        self._future: ProcessFuture[Any] | None = None
        self._pool = ProcessPool(
            max_workers=1,
            initializer=_start,
            initargs=(os.getpid(), self._log, self._state),
            context=multiprocessing.get_context("spawn"),  # no fork: llama.cpp's threads die of it
        )

    @property
    def _log(self) -> Path:
        return self._directory / "log"

    @property
    def _state(self) -> Path:
        return self._directory / "state"

    def log(self) -> tuple[str, ...]:
        """The last lines that the process printed during its last call."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return tuple(file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:])
        return ()

    def _read_state(self) -> tuple[int, str]:
        pid, _, name = (
            self._state.read_bytes().rstrip(b"\0").decode("utf-8", "replace").partition(" ")
        )
        return int(pid or 0), name or "start"

    def run(
        self, call: Callable[..., T], args: tuple[object, ...], timeout: float | None
    ) -> T | Failure:
        """See `Workers.submit`; raises `BrokenProcessPool` when no process took the call."""
        try:
            self._future = self._schedule(call, args, timeout)
            answer: T = self._wait(self._future)
            return answer
        except EngineFault as fault:
            return Failure(fault.stage, fault.reason, self.log())
        except TimeoutError:
            reason = f"no answer within {timeout:g} s"
        except MemoryError:
            reason = "out of memory"
        except ProcessExpired as death:
            reason = _describe(death.exitcode)
        except BrokenProcessPool:
            self.dead = True
            raise
        self.dead = True
        return Failure(self._read_state()[1], reason, self.log())

    def _schedule(
        self, call: Callable[..., T], args: tuple[object, ...], timeout: float | None
    ) -> ProcessFuture[T]:
        try:
            return self._pool.schedule(_call, (call, args), timeout=timeout)
        except RuntimeError as error:  # the process died while it had nothing to do
            raise BrokenProcessPool from error

    def _wait(self, future: ProcessFuture[T]) -> T:
        while True:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():
                    return future.result()
                if self._lost(future):
                    break
        # Two ends that Pebble does not report: a process that exits with code 0 in the middle of a call, and a call
        # that was handed over just when the process died.
        with contextlib.suppress(TimeoutError):
            return future.result(_POLL_S)
        if not future.running():
            raise BrokenProcessPool
        raise ProcessExpired("exited", code=0)  # type: ignore[no-untyped-call]  # Pebble leaves it bare

    def _lost(self, future: ProcessFuture[T]) -> bool:
        pid, _ = self._read_state()
        return not self._pool.active or (
            future.running() and pid > 0 and not psutil.pid_exists(pid)
        )

    def stop(self) -> None:
        """Begin to end the process, whatever it is doing."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        if self._future is not None:
            self._future.cancel()  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Wait for the end, and take along what the process itself has started (a llama-server)."""
        with contextlib.suppress(RuntimeError):
            self._pool.join()
        pid, _ = self._read_state()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid:
                os.killpg(pid, signal.SIGKILL)


def _describe(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    match name:
        case "SIGABRT":
            return "aborted (SIGABRT)"
        case "SIGKILL":
            return "killed (SIGKILL; out of memory?)"
    return f"killed by {name}"


def _die_with(parent: int) -> None:
    """Let this process end when the process `parent` does, even by SIGKILL.

    Linux sends the signal itself, at once; everywhere else a thread notices within a second.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _start(parent: int, log: Path, state: Path) -> None:
    _die_with(parent)
    # Pebble's handler is Python code, which does not run while the process is deep in llama.cpp.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    # Without it an abort attaches a debugger, whose output buries the message.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = os.fdopen(1, "w", buffering=1)  # by lines: a buffer is lost in a crash

    with state.open("r+b") as file:
        view = mmap.mmap(file.fileno(), _STATE_BYTES)
    pid = os.getpid()

    def sink(name: str) -> None:
        view[:] = f"{pid} {name}".encode()[:_STATE_BYTES].ljust(_STATE_BYTES, b"\0")

    stage.watch(sink)


def _call(call: Callable[..., T], args: tuple[object, ...]) -> T:
    os.ftruncate(2, 0)
    stage.report("start")
    try:
        return call(*args)
    except (BadInput, EngineFault, MemoryError):
        raise
    except BaseException:
        raise WorkerBug(traceback.format_exc()) from None
