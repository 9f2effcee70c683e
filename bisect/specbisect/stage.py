"""What this process is doing right now, so that a crash can be named by whoever watches it."""

from collections.abc import Callable


def _unwatched(_name: str) -> None:
    """Nobody listens."""


_sink: Callable[[str], None] = _unwatched


def report(name: str) -> None:
    """Say what comes next: ``load``, ``context``, ``prompt``, ``draft 12``, ``verify 12``, ``rollback 12``…"""
    _sink(name)


def watch(sink: Callable[[str], None]) -> None:
    """Send every later report to `sink`; the worker process points it at a file its parent can read."""
    global _sink
    _sink = sink
