"""Which worker of a cluster takes a call: one of the right kind of host, rather with the model loaded already."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from specbisect.cell import Case
from specbisect.cluster import files
from specbisect.errors import BadInput
from specbisect.trace import Failure, Trace

GRACE_S = 15.0
"""How long a call waits for a host like the one it began on, or of a class that was never there."""
PATIENCE_S = 300.0
"""How long a run waits for a scheduler, for any worker, or for any of a class, that was there to come back."""
POLL_S = 0.5
"""How often whoever waits looks around."""


@dataclass(slots=True)
class Worker:
    """A worker of the cluster; `host_kind` and `host_class` are empty until it has described itself."""

    address: str
    capacity: int
    host_kind: str = ""
    host_class: str = ""
    busy: int = 0
    model: str = ""
    used: float = 0.0
    heard: tuple[object, float] = (None, 0.0)
    description: Any = None


@dataclass(frozen=True, slots=True)
class Job:
    """A call and what decides where it may run.

    `host_kind` is the kind of host that made a trace among its arguments, `host_class` what its cell asks for, `group`
    names arms that must run on equal hosts, `model` is the identity of the target.
    """

    call: Callable[..., Any]
    args: tuple[object, ...]
    timeout: float | None
    models: tuple[files.Wanted, ...]
    host_kind: str = ""
    host_class: str = ""
    group: str = ""
    model: str = ""

    @classmethod
    def of(cls, call: Callable[..., Any], args: tuple[object, ...], timeout: float | None) -> Self:
        """The job of ``call(*args)``. Raises `BadInput` when a model it names cannot be read."""
        paths = dict.fromkeys(path for arg in args for path in files.named(arg))
        job = cls(call, args, timeout, tuple(map(files.wanted, paths)))
        kind = next((arg.host_kind for arg in args if isinstance(arg, Trace)), "")
        case = next((arg for arg in args if isinstance(arg, Case)), None)
        if case is None:
            return replace(job, host_kind=kind)
        cell = case.cell
        return replace(
            job,
            host_kind=kind,
            host_class=cell.host_class,
            group=case.vanilla.key,
            model=cell.target.identity,
        )


@dataclass(slots=True)
class Members:
    """The workers that may be used, and what is waited for under `changed`.

    `pins` are kinds of hosts by group of arms, `waiting` counts calls without a worker.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    known: dict[str, Worker] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    waiting: int = 0
    broken: BadInput | None = None
    since: float = field(default_factory=time.monotonic)
    """When there was a worker last."""
    seen: dict[str, float] = field(default_factory=dict)
    """When there was a worker of a kind, or of a class, last."""

    def ready(self) -> list[Worker]:
        """Those that take calls."""
        return [w for w in self.known.values() if w.host_kind and w.capacity]

    def greet(self, now: float) -> None:
        """Remember who is there."""
        for worker in self.ready():
            self.since = self.seen[worker.host_kind] = self.seen[worker.host_class] = now

    def take(self, job: Job) -> Worker | Failure:
        """A worker with room for `job`: on a host of its kind, rather with its model loaded, rather one long unused.

        Arms of one group go to hosts of one kind as long as there are any. Raises `BadInput` when the class of hosts
        that is asked for is not there.
        """
        with self.changed:
            self.waiting += 1
            try:
                return self._take(job, time.monotonic())
            finally:
                self.waiting -= 1

    def _take(self, job: Job, began: float) -> Worker | Failure:
        while True:
            if self.broken:
                raise self.broken
            ready, now = self.ready(), time.monotonic()
            able = [w for w in ready if job.host_class in ("", w.host_class)]
            if ready and not able:
                self._miss(job.host_class, now - began)
            need = job.host_kind or self.pins.get(job.group, "")
            if need and able and all(w.host_kind != need for w in able):
                gone = now - self.seen.get(need, began) > GRACE_S
                if gone and job.host_kind:
                    reason = "no worker has the library build, CPU and devices that made the trace; start one"
                    return Failure("host", reason)
                if gone:
                    need = ""
            free = [w for w in able if w.busy < w.capacity and need in ("", w.host_kind)]
            if free:
                chosen = min(free, key=lambda w: (w.model != job.model, w.model != "", w.used))
                chosen.busy, chosen.model, chosen.used = chosen.busy + 1, job.model, now
                if job.group:
                    self.pins[job.group] = chosen.host_kind
                return chosen
            self.changed.wait(POLL_S)

    def _miss(self, host_class: str, waited: float) -> None:
        """Raise when a class of hosts has been away for too long."""
        if host_class in self.seen:
            away, patience = time.monotonic() - self.seen[host_class], PATIENCE_S
        else:
            away, patience = waited, GRACE_S
        if away > patience:
            there = ", ".join(sorted({w.host_class for w in self.ready()}))
            raise BadInput(
                f"no worker is of host_class {host_class!r}, only of {there}; start one with "
                f"SPECBISECT_HOST_CLASS={host_class}"
            )

    def give_back(self, worker: Worker) -> None:
        """End a call that `take` found a worker for."""
        with self.changed:
            worker.busy -= 1
            self.changed.notify_all()
