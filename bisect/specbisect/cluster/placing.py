"""Which worker of a cluster takes a call: one of the right kind of host, rather with the model loaded already."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from specbisect.cell import Case
from specbisect.cluster import files
from specbisect.errors import BadInput
from specbisect.trace import Failure, Trace

GRACE_S = 15.0
"""How long a call waits for a host like the one it began on."""
POLL_S = 0.5
"""How often whoever waits looks around."""


@dataclass(slots=True)
class Worker:
    """A worker of the cluster; `host_class` is empty until it has described itself."""

    address: str
    capacity: int
    host_class: str = ""
    busy: int = 0
    model: str = ""
    used: float = 0.0
    heard: tuple[object, float] = (None, 0.0)
    description: Any = None


@dataclass(frozen=True, slots=True)
class Job:
    """A call and what decides where it may run.

    `host` is the class of the host that made a trace among its arguments, `group` names arms that must run on equal
    hosts, `model` is the identity of the target.
    """

    call: Callable[..., Any]
    args: tuple[object, ...]
    timeout: float | None
    models: tuple[files.Wanted, ...]
    host: str = ""
    group: str = ""
    model: str = ""

    @classmethod
    def of(cls, call: Callable[..., Any], args: tuple[object, ...], timeout: float | None) -> Self:
        """The job of ``call(*args)``. Raises `BadInput` when a model it names cannot be read."""
        paths = dict.fromkeys(path for arg in args for path in files.named(arg))
        models = tuple(map(files.wanted, paths))
        host = next((arg.host_class for arg in args if isinstance(arg, Trace)), "")
        case = next((arg for arg in args if isinstance(arg, Case)), None)
        if case is None:
            return cls(call, args, timeout, models, host)
        return cls(call, args, timeout, models, host, case.vanilla.key, case.cell.target.identity)


@dataclass(slots=True)
class Members:
    """The workers that may be used, and what is waited for under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    known: dict[str, Worker] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    broken: BadInput | None = None
    since: float = field(default_factory=time.monotonic)
    """When there was a worker last."""

    def ready(self) -> list[Worker]:
        """Those that take calls."""
        return [w for w in self.known.values() if w.host_class and w.capacity]

    def take(self, job: Job) -> Worker | Failure:
        """A worker with room for `job`: on a host of its class, rather with its model loaded, rather one long unused.

        Arms of one group go to hosts of one class as long as there are any.
        """
        began = time.monotonic()
        with self.changed:
            while True:
                if self.broken:
                    raise self.broken
                ready, now = self.ready(), time.monotonic()
                need = job.host or self.pins.get(job.group, "")
                if need and ready and all(w.host_class != need for w in ready):
                    if now - began > GRACE_S and job.host:
                        reason = "no worker has the library build, CPU and devices that made the trace; start one"
                        return Failure("host", reason)
                    if now - began > GRACE_S:
                        need = ""
                free = [w for w in ready if w.busy < w.capacity and need in ("", w.host_class)]
                if free:
                    chosen = min(free, key=lambda w: (w.model != job.model, w.model != "", w.used))
                    chosen.busy, chosen.model, chosen.used = chosen.busy + 1, job.model, now
                    if job.group:
                        self.pins[job.group] = chosen.host_class
                    return chosen
                self.changed.wait(POLL_S)

    def give_back(self, worker: Worker) -> None:
        """End a call that `take` found a worker for."""
        with self.changed:
            worker.busy -= 1
            self.changed.notify_all()
