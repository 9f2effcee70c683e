"""The one gate: whether a candidate is simpler than the best so far and still shows the same thing.

Every candidate of every stage goes through `Gate.consider`: what it is, whether it was tried before, whether it is
strictly simpler, whether it can run at all; then it is entered in the journal, run, and judged. Nothing else decides.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from pydantic import TypeAdapter

from specbisect.diagnose.finding import Label
from specbisect.narrow.candidate import Candidate, Drafts
from specbisect.narrow.ddmin import Outcome, OutOfBudget
from specbisect.narrow.result import Shown
from specbisect.store import Store
from specbisect.trace import Counters


@dataclass(frozen=True, slots=True)
class Seen:
    """What one candidate showed.

    Where it is a difference: `fork` is the first token that differs, `start` the number of tokens generated when the
    batch began that decides it, `row` the row in it. `needed` is how long an answer must be for none of the batches up
    to there to be cut short, `drafts` what was drafted up to there, `history` the ids generated before that batch.
    Where it is none, `departs` says whether rows differ all the same, so that another text might show it. `reason` says
    why a candidate failed or could not be told.
    """

    label: Shown
    kind: str = ""
    fork: int | None = None
    start: int = 1
    row: int = 0
    needed: int = 1
    drafts: Drafts = ()
    history: tuple[int, ...] = ()
    departs: bool = False
    reason: str = ""
    counters: Counters = field(default=Counters(), compare=False)


SEEN = TypeAdapter(Seen)
Trial = Callable[[Candidate], Seen]
"""Runs a candidate. Whatever goes wrong with it is a value; what it raises is nobody's trial."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a candidate must show: this label and this sub-kind, in `needed` of `runs` runs."""

    label: Label
    kind: str = ""
    needed: int = 1
    runs: int = 1

    def shown_by(self, seen: Seen) -> bool:
        """Whether one run shows it."""
        return (seen.label, seen.kind) == (self.label, self.kind)

    def outcome(self, seen: Seen) -> Outcome:
        """Still the same, nothing any more, or neither: a crash, a time-out and another label are neither."""
        if self.shown_by(seen):
            return Outcome.STILL
        return Outcome.DIFFERENT if seen.label == "none" else Outcome.UNRESOLVED


@dataclass(slots=True)
class Budget:
    """How much a search may take: trials, and seconds from its first trial on; None is without end."""

    trials: int | None = None
    seconds: float | None = None
    _ends: float | None = field(default=None, init=False)

    def allows(self, trials: int) -> bool:
        """Whether one more may be begun after `trials`."""
        if self._ends is None and self.seconds is not None:
            self._ends = time.monotonic() + self.seconds
        late = self._ends is not None and time.monotonic() >= self._ends
        return not late and (self.trials is None or trials < self.trials)


class Journal(Protocol):
    """Where trials are entered before they run."""

    def ended(self) -> Mapping[str, Seen]:
        """Results by key of the candidate; of a trial that took its process along, that it failed."""

    def begin(self, key: str) -> None:
        """Enter a trial."""

    def end(self, key: str, seen: Seen | None) -> None:
        """Enter its result; None when it was given up and says nothing."""


class Memory:
    """A journal that is forgotten with the search."""

    def ended(self) -> Mapping[str, Seen]:
        """Nothing."""
        return {}

    def begin(self, key: str) -> None:
        """Nothing to do."""

    def end(self, key: str, seen: Seen | None) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class StoredJournal:
    """The journal of one search in a run directory. With `retry`, what failed before is not known and runs again."""

    store: Store
    search: str
    retry: bool = False

    def ended(self) -> Mapping[str, Seen]:
        """A trial without a result had begun when everything ended with it: it is not tried again."""
        died = Seen("failed", reason="the trial did not live to its end")
        entries = self.store.trials(self.search)
        found = {
            entry.candidate: SEEN.validate_json(entry.result) if entry.result else died
            for entry in entries
            if entry.result != _GIVEN_UP
        }
        return {k: s for k, s in found.items() if not (self.retry and s.label == "failed")}

    def begin(self, key: str) -> None:
        """See `Journal`."""
        self.store.begin_trial(self.search, key)

    def end(self, key: str, seen: Seen | None) -> None:
        """See `Journal`."""
        text = _GIVEN_UP if seen is None else SEEN.dump_json(seen).decode()
        self.store.end_trial(self.search, key, text)


_GIVEN_UP = "null"


@dataclass(slots=True)
class Gate:
    """Knows every result and the best candidate. `begin` comes first; `progress` is called after each trial."""

    best: Candidate
    wanted: Wanted
    trial: Trial
    journal: Journal = field(default_factory=Memory)
    budget: Budget = field(default_factory=Budget)
    jobs: int = 1
    progress: Callable[["Gate"], None] = lambda gate: None
    trials: int = 0
    spent: int = 0
    counters: Counters = field(default_factory=Counters)
    _known: dict[str, Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, seen in self.journal.ended().items():
            self._learn(key, seen)

    @property
    def shown(self) -> Seen:
        """What the best candidate showed."""
        return self._known[self.best.key]

    def known(self, candidate: Candidate) -> Seen | None:
        """What `candidate` showed, if it has been tried."""
        return self._known.get(candidate.key)

    def consider(self, candidate: Candidate) -> Outcome:
        """Whether `candidate` still shows what is wanted; if so and it is simpler, it is the best from now on.

        One that is not simpler, being no step forward, is not run. Raises `OutOfBudget`.
        """
        if candidate.key != self.best.key and candidate.complexity >= self.best.complexity:
            return Outcome.UNRESOLVED
        outcome = self.wanted.outcome(self.observe(candidate))
        if outcome is Outcome.STILL:
            self.best = candidate
        return outcome

    def observe(self, candidate: Candidate) -> Seen:
        """What `candidate` shows, whether it is simpler or not. Raises `OutOfBudget`."""
        key = candidate.key
        if key not in self._known:
            if (reason := impossible(candidate)) is not None:
                self._known[key] = Seen("unresolved", reason=reason)
                return self._known[key]
            self._may_run()
            self.journal.begin(key)
            self._end(key, self._run(candidate, key))
        return self._known[key]

    def observe_all(self, candidates: Sequence[Candidate]) -> list[Seen]:
        """What each of them shows; several run at the same time where there are several jobs."""
        new = {c.key: c for c in candidates if c.key not in self._known and impossible(c) is None}
        if self.jobs > 1 and len(new) > 1:
            for keys in _groups(list(new), self.jobs):
                self._run_together({key: new[key] for key in keys})
        return [self.observe(candidate) for candidate in candidates]

    def _run_together(self, candidates: Mapping[str, Candidate]) -> None:
        begun: list[str] = []
        for key in candidates:
            if not self.budget.allows(self.spent + len(begun)):
                break
            self.journal.begin(key)
            begun.append(key)
        pool = ThreadPoolExecutor(self.jobs)
        try:
            running = {key: pool.submit(self._repeat, candidates[key]) for key in begun}
            for key, future in running.items():
                self._end(key, future.result())
                begun.remove(key)
        except BaseException:
            for key in begun:
                self.journal.end(key, None)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _may_run(self) -> None:
        if not self.budget.allows(self.spent):
            raise OutOfBudget

    def _run(self, candidate: Candidate, key: str) -> Seen:
        try:
            return self._repeat(candidate)
        except BaseException:
            self.journal.end(key, None)
            raise

    def _repeat(self, candidate: Candidate) -> Seen:
        """Run as often as it takes to know whether enough of the runs show it."""
        wanted, counters = self.wanted, Counters()
        shows: list[Seen] = []
        others: list[Seen] = []
        while len(shows) < wanted.needed and len(others) <= wanted.runs - wanted.needed:
            seen = self.trial(candidate)
            counters += seen.counters
            (shows if wanted.shown_by(seen) else others).append(seen)
        if len(shows) >= wanted.needed:
            return replace(shows[0], counters=counters)
        if shows:
            said = f"shown in {len(shows)} of {len(shows) + len(others)} runs"
            return Seen("unresolved", reason=said, counters=counters)
        usual, _ = Counter(seen.label for seen in others).most_common(1)[0]
        return replace(next(s for s in others if s.label == usual), counters=counters)

    def _end(self, key: str, seen: Seen) -> None:
        self.journal.end(key, seen)
        self.spent += 1
        self._learn(key, seen)
        self.progress(self)

    def _learn(self, key: str, seen: Seen) -> None:
        self._known[key] = seen
        self.trials += 1
        self.counters += seen.counters


def impossible(candidate: Candidate) -> str | None:
    """Why a candidate cannot run, known without running it."""
    if not candidate.prompt:
        return "a prompt has at least one token"
    return next(candidate.cell.problems(), None)


def _groups(keys: list[str], size: int) -> Iterator[list[str]]:
    return (keys[at : at + size] for at in range(0, len(keys), size))
