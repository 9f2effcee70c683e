"""What the workers of a cluster are asked to do: each call in a child process of theirs, so that none dies of it."""

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import dask
from distributed import Status, Worker, get_worker

from specbisect import __version__
from specbisect.cluster import files
from specbisect.errors import BadInput
from specbisect.trace import Failure
from specbisect.workers import Workers

POLL_S = 1.0
IDLE_S = float(os.environ.get("SPECBISECT_WORKER_IDLE_S", "600"))
"""Seconds without a call after which a coordinator's child processes, with the models they hold, are let go: one that
was killed cannot say that it is gone, and one that still lives gets new ones."""
_ENDING = (Status.closing, Status.closed, Status.failed)

_lock = threading.Lock()
_sessions: dict[str, "_Session"] = {}


@dataclass(slots=True)
class _Session:
    """The child processes of this worker for one coordinator, how many calls run there, and when one last ended."""

    children: Workers
    running: int = 0
    since: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> bool:
        return not self.running and time.monotonic() - self.since > IDLE_S


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: its value or what it raised, or a model that must be sent before it can run."""

    value: Any = None
    error: Exception | None = None
    missing: files.Wanted | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """Versions by package, the library and machine as traces record them, and the class of hosts it is of."""

    versions: Mapping[str, str]
    host: Mapping[str, Any]
    host_class: str


def versions() -> dict[str, str]:
    """What must be the same wherever a run runs."""
    return {"specbisect": __version__, "llama-cpp-python": version("llama-cpp-python")}


def describe(session: str) -> Answer:
    """The `Description` of this worker."""

    def described() -> Description | Failure:
        host = _in_a_child(session, _environment)
        return host if isinstance(host, Failure) else Description(versions(), *host)

    return _answer(described)


def _environment() -> tuple[Mapping[str, Any], str]:
    from specbisect.llama import library

    return library.environment(), library.host_class()


def locate(model: files.Wanted, maps: files.Maps) -> Answer:
    """Where `model` lies on this host, or that it is missing."""
    place = files.find(model, maps)
    return Answer(place, missing=None if place else model)


def accept(model: files.Wanted, sender: str) -> Answer:
    """`files.accept` as a task."""
    return _answer(lambda: files.accept(model, sender))


def perform(
    session: str,
    call: Callable[..., Any],
    args: tuple[object, ...],
    models: tuple[files.Wanted, ...],
    maps: files.Maps,
    timeout: float | None,
) -> Answer:
    """``call(*args)`` in a child of this worker, with the models where they lie here; values as of `Workers`."""
    places = {}
    for model in models:
        try:
            found = locate(model, maps)
        except BadInput as error:
            return Answer(error=_named(error))
        if found.missing:
            return found
        places[model.path] = found.value
    here = tuple(files.replaced(arg, places) for arg in args)
    return _answer(lambda: _in_a_child(session, call, *here, timeout=timeout))


def _answer(ask: Callable[[], Any]) -> Answer:
    try:
        return Answer(ask())
    except BadInput as error:
        return Answer(error=_named(error))
    except Exception as error:
        return Answer(error=error)


def _named(error: BadInput) -> BadInput:
    return BadInput(f"worker {get_worker().address}: {error}")


def _in_a_child(
    session: str, call: Callable[..., Any], *args: object, timeout: float | None = None
) -> Any:
    """What ``call(*args)`` comes to in a child process of this worker, of which it has as many as threads."""
    with _lock:
        if session not in _sessions:
            worker = get_worker()
            _watch(worker)
            _forget_thread_counts()
            # Dask marks its processes as daemons, which may have no children. Ours end with their parent anyway.
            with suppress(AssertionError):
                multiprocessing.current_process().daemon = False
            _sessions[session] = _Session(Workers(worker.state.nthreads))
        found = _sessions[session]
        found.running += 1
    try:
        return found.children.submit(call, *args, timeout=timeout).result()
    finally:
        with _lock:
            found.running -= 1
            found.since = time.monotonic()


@functools.cache
def _watch(worker: Worker) -> None:
    """End child processes when they are idle, and all when `worker` closes, as it does without its scheduler: it would
    wait for them.
    """

    def end_them() -> None:
        while worker.status not in _ENDING:
            time.sleep(POLL_S)
            _close(lambda _, session: session.idle)
        _close(lambda *_: True)

    threading.Thread(target=end_them, daemon=True, name="worker watch").start()


def _forget_thread_counts() -> None:
    """Take back the variables that Dask sets for its workers: llama.cpp is told its threads, and traces record them."""
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        if os.environ.get(name) == str(value):
            del os.environ[name]


def close(session: str) -> None:
    """End what still runs for that coordinator, and its child processes."""
    _close(lambda name, _: name == session)


def _close(wanted: Callable[[str, _Session], bool]) -> None:
    with _lock:
        gone = [
            _sessions.pop(name) for name, found in list(_sessions.items()) if wanted(name, found)
        ]
    for session in gone:
        session.children.__exit__()
