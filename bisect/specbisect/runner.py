"""Drives cases: which arm runs when, and what is saved when it ends.

The runner knows no processes and no models. It hands calls to whatever can run them, never more than run at once and
always the arm whose case comes first in the plan, so that a worker goes through the models in the order of the plan
and loads each once. A case is an arm without a drafter, shared by all cases it fits and run once, and an arm with one,
run only when the first gave a trace; both go to disk in the transaction in which they end. An arm that comes back
from another kind of host than its vanilla arm is not used: all cases of that vanilla arm start over with it.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from specbisect.cell import Case
from specbisect.compare import Outcome, compare
from specbisect.engines import run_arm
from specbisect.errors import BadInput
from specbisect.store import Store
from specbisect.trace import ArmResult, Failure, Trace

MAX_WAITING = 256
"""Cases that may wait for a vanilla arm in flight before no further ones are looked at."""
MAX_MOVES = 3
"""How often the cases of a vanilla arm start over on another kind of host; after that they are invalid."""


class Submit(Protocol):
    """Where calls run: `Workers` here, the executor of a cluster elsewhere."""

    @property
    def slots(self) -> int:
        """How many calls run at the same time."""

    def submit(
        self, call: Callable[..., Any], *args: object, timeout: float | None = None
    ) -> Future[Any]:
        """Run ``call(*args)``; the future resolves to its value, or to a `Failure` when it was not to be had."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How many cases have ended how; `resumed` of them were in the store before."""

    outcomes: Mapping[Outcome, int]
    resumed: int

    @property
    def done(self) -> int:
        """All cases that have ended."""
        return sum(self.outcomes.values())

    @property
    def forks(self) -> int:
        """Cases whose arms differ at some token, or by their length."""
        return self.outcomes.get("fork", 0) + self.outcomes.get("length", 0)

    @property
    def failures(self) -> int:
        """Cases of which an arm gave no trace."""
        return self.outcomes.get("failed", 0)


def run(
    cases: Iterable[Case],
    store: Store,
    workers: Submit,
    *,
    call: Callable[[Case], Trace] = run_arm,
    wanted: Callable[[Case], bool] = lambda case: True,
    progress: Callable[[Summary], None] = lambda summary: None,
    retry_failed: bool = False,
) -> Summary:
    """Bring every case that is `wanted` to its verdict, and every verdict and trace into `store`.

    `cases` are read lazily and should be ordered by target, then drafter. What the store has already is not run
    again, failed cases only when `retry_failed`. `progress` is called after every change of the summary.

    Raises what a call raises (a `Failure` is a value), what the store raises, and KeyboardInterrupt; what has ended by
    then is saved.
    """
    plan = ((place, case) for place, case in enumerate(cases) if wanted(case))
    return _Run(store, workers, call, progress, retry_failed).to_the_end(plan)


@dataclass(slots=True)
class _Open:
    """A case that has begun; once it has `vanilla`, its speculative arm is next."""

    ordinal: int
    case: Case
    key: str
    vanilla_key: str
    vanilla: Trace | None = None

    def __lt__(self, other: "_Open") -> bool:
        return self.ordinal < other.ordinal


@dataclass(slots=True)
class _Run:
    """`ready` cases have an arm to run (a heap by place in the plan), `flying` ones have it running; `waiting` ones,
    by the key of the vanilla arm, need one that is ready or flying for the first of them.
    """

    store: Store
    workers: Submit
    call: Callable[[Case], Trace]
    progress: Callable[[Summary], None]
    retry_failed: bool
    ready: list[_Open] = field(default_factory=list)
    flying: dict[Future[ArmResult], _Open] = field(default_factory=dict)
    waiting: dict[str, list[_Open]] = field(default_factory=dict)
    failed_now: set[str] = field(default_factory=set)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    resumed: int = 0

    def to_the_end(self, plan: Iterable[tuple[int, Case]]) -> Summary:
        unfinished = self._unfinished(plan)
        try:
            while self._fill(unfinished):
                self._collect(wait(self.flying, return_when=FIRST_COMPLETED).done)
        except BaseException:
            with suppress(BadInput):  # of the store, which may be why we are here
                self._rescue()
            raise
        return self._summary()

    def _unfinished(self, plan: Iterable[tuple[int, Case]]) -> Iterator[_Open]:
        for ordinal, case in plan:
            key = case.key
            outcome = self.store.outcome(key)
            if outcome is None or (outcome == "failed" and self.retry_failed):
                yield _Open(ordinal, case, key, case.vanilla.key)
            else:
                self.resumed += 1
                self._count(outcome)

    def _fill(self, unfinished: Iterator[_Open]) -> bool:
        """Give every free slot an arm; whether any arm is running."""
        while len(self.flying) < self.workers.slots:
            while not self.ready and sum(map(len, self.waiting.values())) < MAX_WAITING:
                if (case := next(unfinished, None)) is None:
                    break
                self._begin(case)
            if not self.ready:
                break
            case = heapq.heappop(self.ready)
            arm = case.case if case.vanilla else case.case.vanilla
            self.flying[self.workers.submit(self.call, arm)] = case
        return bool(self.flying)

    def _begin(self, case: _Open) -> None:
        if case.vanilla_key in self.waiting:
            self.waiting[case.vanilla_key].append(case)
            return
        vanilla = self.store.arm(case.vanilla_key)
        again = self.retry_failed and case.vanilla_key not in self.failed_now
        if isinstance(vanilla, Failure) and not again:
            self._count(self._save_verdict(case, vanilla, None))
            return
        if isinstance(vanilla, Trace):
            case.vanilla = vanilla
        else:
            self.waiting[case.vanilla_key] = [case]
        heapq.heappush(self.ready, case)

    def _collect(self, done: Iterable[Future[ArmResult]]) -> None:
        ended = [(future, self.flying[future], future.result()) for future in done]
        moved = [entry for entry in ended if self._moved(*entry[1:])]
        kept = [entry for entry in ended if entry not in moved]
        with self.store.transaction():
            outcomes = [o for _, case, result in kept for o in self._save(case, result)]
        for future, case, result in kept:
            del self.flying[future]
            if case.vanilla is None:
                self._go_on(case.vanilla_key, result)
        for future, case, _ in moved:
            del self.flying[future]
            self._start_over(case)
        for outcome in outcomes:
            self._count(outcome)

    def _moved(self, case: _Open, result: ArmResult) -> bool:
        """Whether a speculative arm ran on another kind of host than the vanilla arm it is to be compared with.

        Also when that vanilla arm has been replaced, or is about to be.
        """
        if case.vanilla is None or isinstance(result, Failure):
            return False
        key, old, new = case.vanilla_key, case.vanilla.host_kind, result.host_kind
        if self.moves[key] and (key in self.waiting or self._host_kind(key) != old):
            return True
        return "" not in (old, new) and old != new and self.moves[key] < MAX_MOVES

    def _host_kind(self, key: str) -> str:
        arm = self.store.arm(key)
        return arm.host_kind if isinstance(arm, Trace) else ""

    def _start_over(self, case: _Open) -> None:
        """Run the vanilla arm of `case` again, and all cases that were compared with the old one."""
        key, old = case.vanilla_key, case.vanilla
        case.vanilla = None
        if key in self.waiting:
            self.waiting[key].append(case)
            return
        vanilla = self.store.arm(key)
        if isinstance(vanilla, Trace) and old is not None and vanilla.host_kind != old.host_kind:
            case.vanilla = vanilla  # another case has seen to it
        else:
            self.moves[key] += 1
            self.waiting[key] = [case]
            for ordinal, other, outcome in self.store.reopen(key):
                self.outcomes[outcome] -= 1
                self.waiting[key].append(_Open(ordinal, other, other.key, key))
        heapq.heappush(self.ready, case)

    def _save(self, case: _Open, result: ArmResult) -> list[Outcome]:
        """Save the arm that has ended and every verdict that follows from it."""
        if case.vanilla is not None:
            self.store.save_arm(case.key, result)
            return [self._save_verdict(case, case.vanilla, result)]
        self.store.save_arm(case.vanilla_key, result)
        if isinstance(result, Trace):
            return []
        return [self._save_verdict(other, result, None) for other in self.waiting[case.vanilla_key]]

    def _save_verdict(
        self, case: _Open, vanilla: ArmResult, speculative: ArmResult | None
    ) -> Outcome:
        verdict = compare(vanilla, speculative or vanilla)
        self.store.save_case(case.ordinal, case.case, verdict, speculative)
        return verdict.outcome

    def _go_on(self, vanilla_key: str, result: ArmResult) -> None:
        """Let the cases that waited for a vanilla arm take the next step."""
        waited = self.waiting.pop(vanilla_key)
        if isinstance(result, Failure):
            self.failed_now.add(vanilla_key)
            return
        for case in waited:
            case.vanilla = result
            heapq.heappush(self.ready, case)

    def _rescue(self) -> None:
        """Save what has ended and was not collected."""
        with self.store.transaction():
            for future, case in self.flying.items():
                ended = future.done() and not future.cancelled() and future.exception() is None
                if ended and not self._moved(case, future.result()):
                    self._save(case, future.result())

    def _count(self, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
        self.progress(self._summary())

    def _summary(self) -> Summary:
        return Summary(dict(self.outcomes), self.resumed)
