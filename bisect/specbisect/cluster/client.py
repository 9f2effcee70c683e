"""A Dask cluster as `runner.Submit`: who runs what, and what becomes of a call whose worker is lost.

Dask carries the calls and notices who comes and goes; which worker a call goes to is decided here, since only here is
known that a worker has a model loaded already, or that two hosts compute different bits. A call is sent to one worker
and to another one when that is lost. However often it ran, one answer is taken.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from distributed import Client, KilledWorker
from distributed.comm.addressing import get_address_host_port
from distributed.comm.core import CommClosedError

from specbisect.cluster import files, node
from specbisect.cluster.placing import PATIENCE_S, POLL_S, Job, Members, Worker
from specbisect.errors import BadInput, EngineFault
from specbisect.trace import Failure, host_kind

CONNECT_S = 5.0
DESCRIBE_S = 60.0
SILENT_S = 30.0
"""A worker that has not been heard of for so long is lost."""
MAX_LOSSES = 4
"""Workers that a call may lose before it counts as the cause."""
AHEAD = 64
"""Calls that may wait for their kind of host while others are free."""
_THREADS = 1024  # each only waits; started when needed


class Lost(Exception):
    """The worker of a call is gone, or nobody knows any more what became of it."""


_LOSSES = (Lost, CancelledError, asyncio.CancelledError, KilledWorker, CommClosedError, OSError)
"""What Dask raises when something between here and a worker is lost."""


class Cluster:
    """The Dask cluster whose scheduler is at `address`; a context manager.

    `timeout` (seconds) is the default of every call, `maps` say where models lie on the workers, `resources` is what
    each call takes of a worker's own (``{"GPU": 1}``), `note` is told in one line what people should know.

    Raises `BadInput` when the scheduler cannot be reached, has no worker to offer, or a worker has other versions.
    """

    def __init__(
        self,
        address: str,
        timeout: float | None = None,
        *,
        maps: files.Maps = (),
        resources: Mapping[str, float] | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        logging.getLogger("distributed").setLevel(
            logging.CRITICAL
        )  # its tracebacks explain nothing
        self._address, self._timeout, self._maps = address, timeout, maps
        self._resources, self._note = dict(resources or {}), note
        self._session = uuid.uuid4().hex
        self._members = Members()
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._begun = False
        self._client = self._connect()
        try:
            self._first_workers()
        except BaseException:
            self._client.close()
            raise
        self._threads = ThreadPoolExecutor(_THREADS, "cluster")
        self._begun = True
        self._watch = threading.Thread(
            target=self._keep_watching, daemon=True, name="cluster watch"
        )
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._members.changed:
            self._members.broken = BadInput("the run has ended")
            self._members.changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._watch.join()
        ending = threading.Thread(target=self._end_calls, daemon=True)
        ending.start()
        ending.join(CONNECT_S)  # a worker that hangs keeps nobody waiting
        self._threads.shutdown()
        self._client.close(CONNECT_S)

    def _end_calls(self) -> None:
        with suppress(Exception):
            self._client.run(node.close, self._session, on_error="ignore")

    @property
    def slots(self) -> int:
        """How many calls are taken at the same time; changes as workers come and go.

        Calls that wait for a host of another kind than those that are free leave room for others.
        """
        with self._members.changed:
            capacity = sum(worker.capacity for worker in self._members.ready())
            return max(1, capacity + min(self._members.waiting, AHEAD))

    def submit(
        self, call: Callable[..., Any], *args: object, timeout: float | None = None
    ) -> Future[Any]:
        """As `Workers.submit`, in a child process of one of the cluster's workers.

        A call that loses `MAX_LOSSES` workers resolves to a `Failure`. What is wrong with a worker's files is raised
        as `BadInput` that names the worker.
        """
        return self._threads.submit(self._run, Job.of(call, args, timeout or self._timeout))

    def everywhere(self, call: Callable[..., Any], *args: object) -> dict[str, Any]:
        """What ``call(*args)`` comes to in a child process of each worker, by its address.

        Raises what the call raises, and `EngineFault` when a worker has no answer.
        """
        with self._members.changed:
            addresses = [worker.address for worker in self._members.ready()]
        return {address: self._at(address, call, args) for address in addresses}

    def _at(self, address: str, call: Callable[..., Any], args: tuple[object, ...]) -> Any:
        work = (self._session, call, args, (), self._maps, self._timeout)
        try:
            answer = self._ask(address, node.perform, *work, resources=self._resources)
        except Lost:
            raise EngineFault("worker", f"{address} was lost; run the command again") from None
        if answer.error:
            raise answer.error
        if isinstance(answer.value, Failure):
            raise EngineFault(answer.value.stage, f"worker {address}: {answer.value.reason}")
        return answer.value

    def _run(self, job: Job) -> Any:
        losses = 0
        while losses < MAX_LOSSES:
            worker = self._members.take(job)
            if isinstance(worker, Failure):
                return worker
            try:
                return self._on(worker, job)
            except Lost:
                losses += worker.address not in self._members.known
            finally:
                self._members.give_back(worker)
        return Failure("worker", f"{MAX_LOSSES} workers of the cluster were lost while they ran it")

    def _on(self, worker: Worker, job: Job) -> Any:
        work = (self._session, job.call, job.args, job.models, self._maps, job.timeout)
        for _ in range(len(job.models) + 1):
            answer = self._ask(worker.address, node.perform, *work, resources=self._resources)
            if not answer.missing:
                break
            self._send(worker.address, answer.missing)
        if answer.missing:
            raise BadInput(
                f"worker {worker.address}: {answer.missing.path} was sent and is gone again"
            )
        if answer.error:
            raise answer.error
        return answer.value

    def _ask(
        self, address: str, function: Callable[..., node.Answer], *args: object, **how: Any
    ) -> node.Answer:
        """The answer of one worker. Raises `Lost` when it is not to be had."""
        client = self._client
        future = None
        try:
            future = client.submit(
                function, *args, workers=[address], allow_other_workers=False, pure=False, **how
            )
            while True:
                try:
                    answer: node.Answer = future.result(POLL_S)
                    return answer
                except TimeoutError:
                    if address not in self._members.known or client is not self._client:
                        raise Lost from None
                    if self._stop.is_set():
                        raise CancelledError from None
        except (Exception, asyncio.CancelledError) as error:
            if self._stop.is_set():
                raise CancelledError from None
            if client.status == "running" and not isinstance(error, _LOSSES):
                raise
            self._stop.wait(POLL_S)  # lets the watch see who is gone
            raise Lost from None
        finally:
            if future is not None:
                with suppress(Exception):
                    if not future.done():
                        future.cancel()
                    future.release()

    def _send(self, address: str, model: files.Wanted) -> None:
        """Bring `model` to the host of a worker, unless another worker there has it meanwhile."""
        with self._sending:
            if not self._ask(address, node.locate, model, self._maps).missing:
                return
            self._note(f"sending {Path(model.path).name} to {address}")
            for part in model.parts:
                with Path(model.path).with_name(part).open("rb") as file:
                    offset = 0
                    while (piece := file.read(files.PIECE)) or not offset:
                        self._hand_over(address, model, part, offset, piece)
                        offset += len(piece) or 1
            answer = self._ask(address, node.accept, model, self._session)
            if answer.error:
                raise answer.error

    def _hand_over(
        self, address: str, model: files.Wanted, part: str, offset: int, piece: bytes
    ) -> None:
        try:
            self._client.run(
                files.receive, model, self._session, part, offset, piece, workers=[address]
            )
        except BadInput as error:
            raise BadInput(f"worker {address}: {error}") from None
        except (CommClosedError, OSError, ValueError):
            raise Lost from None

    # Who is there

    def _connect(self) -> Client:
        try:
            # A client that cannot read its address ends in a traceback of its own.
            get_address_host_port(self._address)
            return Client(self._address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, OverflowError, ValueError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(
                f"no Dask scheduler answers at {self._address} ({reason}); start one with `dask scheduler`, "
                "or check the address"
            ) from None

    def _first_workers(self) -> None:
        """Wait for those that are there to describe themselves."""
        began = time.monotonic()
        while True:
            self._look()
            waiting = [w for w in self._members.known.values() if not w.host_kind]
            spent = time.monotonic() - began
            if self._members.broken:
                raise self._members.broken
            if self._members.known and (not waiting or spent > DESCRIBE_S):
                break
            if spent > CONNECT_S and not self._members.known:
                raise BadInput(
                    f"the scheduler at {self._address} has no worker; start some with `dask worker {self._address}`"
                )
            time.sleep(POLL_S / 10)
        if not self._members.ready():
            takes = ", ".join(f"{k}={v:g}" for k, v in self._resources.items()) or "the run"
            raise BadInput(
                f"no worker of {self._address} can take a call with {takes}; start workers with --resources, "
                "or ask for less"
            )

    def _keep_watching(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                if self._client.status == "closed":
                    self._forget()
                    self._client = self._connect()
                self._look()
            except Exception as error:  # whatever it is, a run without a watch would wait for ever
                self._judge(BadInput(str(error)))

    def _forget(self) -> None:
        with self._members.changed:
            self._members.known.clear()

    def _judge(self, reason: BadInput) -> None:
        with self._members.changed:
            if time.monotonic() - self._members.since > PATIENCE_S:
                self._members.broken = reason
                self._members.changed.notify_all()

    def _look(self) -> None:
        """Take up workers that have come, and let go those that are gone or silent."""
        present = self._client.scheduler_info(n_workers=-1)["workers"]
        if self._client.status != "running":
            present = {}
        now, members = time.monotonic(), self._members
        with members.changed:
            for address, facts in present.items():
                worker = members.known.get(address) or Worker(address, self._capacity(facts))
                if worker.heard[0] != facts["last_seen"]:
                    worker.heard = facts["last_seen"], now
                if now - worker.heard[1] < SILENT_S:
                    members.known[address] = worker
                else:
                    members.known.pop(address, None)
            for address in members.known.keys() - present.keys():
                del members.known[address]
            strangers = [w for w in members.known.values() if not w.host_kind]
        for worker in strangers:
            self._introduce(worker)
        with members.changed:
            members.greet(now)
            members.changed.notify_all()
        if now - members.since > PATIENCE_S:
            self._judge(BadInput(f"no worker of {self._address} is left; start some and run again"))

    def _capacity(self, facts: Mapping[str, Any]) -> int:
        """How many calls a worker takes: by its threads, and by what each call takes of its resources."""
        has = facts["resources"]
        shares = [int(has.get(name, 0) // amount) for name, amount in self._resources.items()]
        return min(facts["nthreads"], *shares) if shares else int(facts["nthreads"])

    def _introduce(self, worker: Worker) -> None:
        """Ask a worker what it is, and see whether it has answered."""
        if worker.description is None:
            worker.description = self._client.submit(
                node.describe,
                self._session,
                workers=[worker.address],
                allow_other_workers=False,
                pure=False,
                priority=10,
            )
        elif worker.description.status not in ("pending", "lost", "cancelled"):
            try:
                problem = self._admit(worker, worker.description.result(CONNECT_S))
            except (CancelledError, OSError, CommClosedError):
                return
            except Exception as error:
                problem = f"cannot run specbisect ({error}); install specbisect[cluster] there"
            if problem:
                self._refuse(worker, problem)

    def _admit(self, worker: Worker, answer: node.Answer) -> str:
        """Why a worker cannot be used; empty when it is used from now on."""
        if answer.error or isinstance(answer.value, Failure):
            return f"cannot load llama.cpp ({answer.error or answer.value.reason}); mend its installation"
        for name, mine in node.versions().items():
            if (its := answer.value.versions[name]) != mine:
                return f"has {name} {its} and this machine {mine}; install the same there"
        worker.host_kind, worker.host_class = (
            host_kind(answer.value.host),
            answer.value.host_class,
        )
        return ""

    def _refuse(self, worker: Worker, problem: str) -> None:
        line = f"worker {worker.address} {problem}"
        worker.capacity, worker.host_kind = 0, "refused"
        if self._begun:
            self._note(f"{line}; it is not used")  # one that came late
        else:
            self._members.broken = BadInput(line)
