"""Drafters under load: requests that arrive at fixed times, whatever has become of the ones before.

An open loop, so that a server that falls behind is not asked less: every time counts from when a request was due, not
from when somebody got round to sending it.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from specbisect.cell import Cell, Prompt
from specbisect.engines.server import binary, flags
from specbisect.engines.server.process import Server
from specbisect.errors import BadInput, EngineFault

PERCENTILES = (50, 95, 99)
BURST_S = 0.002
"""Tokens that come within so many seconds of each other are one burst: what a verify batch accepted."""
UTILISATION = 0.7
"""Requests arrive at this share of what one slot of the vanilla server gets done, when no rate is given."""
_QUIET = "3"

Send = Callable[[tuple[int, ...]], Iterator[int]]
"""Asks for a completion of a prompt, and says how many tokens came whenever some did."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request. Times in seconds since it was due; `gaps` are those between bursts. `refused` says why it failed."""

    first_s: float | None
    done_s: float | None
    gaps: tuple[float, ...]
    tokens: int
    refused: str = ""


def play(send: Send, prompts: Sequence[tuple[int, ...]], interval: float) -> list[Answered]:
    """Send `prompts` one every `interval` seconds, none of them waiting for another; their answers, in order."""
    answers: list[Answered | None] = [None] * len(prompts)
    began = time.perf_counter()

    def one(at: int) -> None:
        answers[at] = _ask(send, prompts[at], began + at * interval)

    threads = [threading.Thread(target=one, args=(at,), daemon=True) for at in range(len(prompts))]
    for at, thread in enumerate(threads):
        time.sleep(max(0.0, began + at * interval - time.perf_counter()))
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]


def _ask(send: Send, prompt: tuple[int, ...], due: float) -> Answered:
    stamps: list[float] = []
    tokens = 0
    try:
        for count in send(prompt):
            if count:
                stamps.append(time.perf_counter() - due)
                tokens += count
    except EngineFault as fault:
        return Answered(None, None, (), tokens, fault.reason)
    if not stamps:
        return Answered(None, None, (), 0, "it answered without a token")
    gaps = [b - a for a, b in itertools.pairwise(stamps) if b - a >= BURST_S]
    return Answered(stamps[0], stamps[-1], tuple(gaps), tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """How one arm did. Each of `first_s`, `gap_s` and `done_s` has one value for each of `PERCENTILES`.

    `goodput` counts requests a second that were done within the limit, None without a limit.
    """

    arm: Cell
    slots: int
    requests: int
    refusals: tuple[str, ...]
    tokens_per_s: float
    first_s: tuple[float, ...]
    gap_s: tuple[float, ...]
    done_s: tuple[float, ...]
    goodput: float | None


def load(
    arm: Cell, answers: Sequence[Answered], interval: float, limit: float | None = None
) -> Load:
    """What `answers`, one due every `interval` seconds, come to."""
    done = [a.done_s for a in answers if a.done_s is not None]
    ends = [at * interval + a.done_s for at, a in enumerate(answers) if a.done_s is not None]
    span = max(ends, default=0.0)
    within = sum(seconds <= limit for seconds in done) if limit is not None else None
    return Load(
        arm=arm,
        slots=arm.n_parallel,
        requests=len(answers),
        refusals=tuple(a.refused for a in answers if a.refused),
        tokens_per_s=sum(a.tokens for a in answers) / span if span else 0.0,
        first_s=_percentiles(a.first_s for a in answers if a.first_s is not None),
        gap_s=_percentiles(gap for a in answers for gap in a.gaps),
        done_s=_percentiles(done),
        goodput=None if within is None else within / span if span else 0.0,
    )


def _percentiles(values: Iterable[float]) -> tuple[float, ...]:
    known = list(values)
    return tuple(map(float, np.percentile(known, PERCENTILES))) if known else ()


@dataclass(frozen=True, slots=True)
class Asked:
    """How the load is made: slots to try, requests a second (None: `UTILISATION`), seconds within which one counts."""

    slots: tuple[int, ...]
    rate: float | None = None
    limit: float | None = None


def served(cell: Cell, slots: int) -> Cell:
    """`cell` on a llama-server with so many slots, each with the context that the cell asks for.

    Raises `BadInput` when llama-server cannot run it.
    """
    n_ctx = cell.n_ctx if cell.kv_unified else cell.n_ctx * slots
    made = replace(cell, engine="server", n_parallel=slots, n_ctx=n_ctx)
    if problem := next(made.problems(), None):
        raise BadInput(f"--parallel needs llama-server: {problem}")
    return made


def loads(cells: Sequence[Cell], prompts: Sequence[Prompt], asked: Asked) -> Iterator[Load]:
    """Every arm under load, for each number of slots: vanilla, the drafters, and vanilla again, to see a drift.

    All arms get the same requests at the same times. `cells` share their vanilla arm. Raises `EngineFault` when a
    server does not start.
    """
    interval = 1 / asked.rate if asked.rate else None
    for slots in asked.slots:
        vanilla = served(cells[0].vanilla, slots)
        for arm in (vanilla, *(served(cell, slots) for cell in cells), vanilla):
            with _serving(arm) as server:
                ids = [p.ids or server.client.tokenize(p.text) for p in prompts]

                def send(
                    prompt: tuple[int, ...], server: Server = server, arm: Cell = arm
                ) -> Iterator[int]:
                    return server.client.stream(arm, prompt)

                _ask(send, ids[0], time.perf_counter())  # brings weights into memory
                interval = interval or _alone(send, ids) / UTILISATION
                yield load(arm, play(send, ids, interval), interval, asked.limit)


def _alone(send: Send, prompts: Sequence[tuple[int, ...]]) -> float:
    """Mean time of a request that nothing runs beside. Raises `EngineFault` when one fails."""
    times = []
    for prompt in prompts:
        answer = _ask(send, prompt, time.perf_counter())
        if answer.done_s is None:
            raise EngineFault("request", answer.refused)
        times.append(answer.done_s)
    return sum(times) / len(times)


@contextmanager
def _serving(arm: Cell) -> Iterator[Server]:
    """A llama-server for `arm` that does not spend its time on a log of every token."""
    command = list(flags.command(arm, binary.find()))
    command[command.index("--verbosity") + 1] = _QUIET
    server = Server(command)
    try:
        yield server
    finally:
        server.close()
