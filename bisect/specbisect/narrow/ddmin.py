"""Searches for the smallest thing that still shows something; generic, deterministic, without I/O.

A search asks one question, again and again: does this candidate still show it? The answer has
three values, because a candidate that crashes has neither kept nor lost what is looked for. A
search never loses its best: out of budget or interrupted, it returns what it has and says why it
stopped.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import chain, groupby, pairwise
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T", bound=Hashable)


class Outcome(Enum):
    """What one test said about one candidate."""

    STILL = "still"  #: it shows the same thing
    DIFFERENT = "different"  #: it was tried to the end and does not show it
    UNRESOLVED = "unresolved"  #: it cannot be told: crash, time-out, impossible, another label


class Reason(StrEnum):
    """Why a search ended."""

    COMPLETE = "complete"
    BUDGET = "out of budget"
    INTERRUPTED = "interrupted"
    ABSENT = "the whole input does not show it"


class OutOfBudget(Exception):
    """Raised by a test that may not run any more: a signal to its search, not an error."""


@dataclass(frozen=True, slots=True)
class Trial(Generic[T]):
    """One call of the test. `candidate` is a subset in `ddmin`, a value in a sweep."""

    candidate: T
    outcome: Outcome


Subset: TypeAlias = tuple[T, ...]
Cut: TypeAlias = Callable[[Subset[T]], Sequence[Subset[T]]]


@dataclass(frozen=True, slots=True)
class Minimised(Generic[T]):
    """What `ddmin` found: the smallest subset it has seen to show it, and every trial, in order."""

    items: Subset[T]
    reason: Reason
    trials: tuple[Trial[Subset[T]], ...]

    @property
    def minimal(self) -> bool:
        """Whether `items` is proved 1-minimal: without any one of them, no test said STILL."""
        return self.reason is Reason.COMPLETE

    @property
    def tests(self) -> int:
        """Number of calls of the test."""
        return len(self.trials)

    @property
    def removals(self) -> tuple[Outcome | None, ...]:
        """What was seen without each of `items`, in their order; None where it was not tried.

        DIFFERENT makes an item necessary. UNRESOLVED means only that it could not be removed.
        """
        seen = {trial.candidate: trial.outcome for trial in self.trials}
        return tuple(
            seen.get(self.items[:at] + self.items[at + 1 :]) for at in range(len(self.items))
        )


@dataclass(frozen=True, slots=True)
class Swept(Generic[T]):
    """What the values of one ordered axis showed: a trial for each that was tried, simplest first."""

    trials: tuple[Trial[T], ...]
    reason: Reason

    @property
    def simplest(self) -> Trial[T] | None:
        """The simplest value that still shows it, if any does."""
        return next((trial for trial in self.trials if trial.outcome is Outcome.STILL), None)

    @property
    def nearest_without(self) -> Trial[T] | None:
        """The value closest to `simplest` that does not show it; of two as close, the simpler."""
        if self.simplest is None:
            return None
        at = self.trials.index(self.simplest)
        by_distance = sorted(range(len(self.trials)), key=lambda i: abs(i - at))
        near_first = (self.trials[i] for i in by_distance)
        return next((trial for trial in near_first if trial.outcome is Outcome.DIFFERENT), None)


class _Trials(Generic[T]):
    """The only caller of the test: never twice for one candidate, never beyond the budget."""

    def __init__(self, test: Callable[[T], Outcome], budget: int | None) -> None:
        self._test = test
        self._budget = budget
        self.seen: dict[T, Outcome] = {}

    def still(self, candidate: T) -> bool:
        if candidate not in self.seen:
            if self._budget is not None and len(self.seen) >= self._budget:
                raise OutOfBudget
            self.seen[candidate] = self._test(candidate)
        return self.seen[candidate] is Outcome.STILL


def ddmin(
    items: Sequence[T],
    test: Callable[[Subset[T]], Outcome],
    *,
    cuts: Sequence[Cut[T]] = (),
    budget: int | None = None,
) -> Minimised[T]:
    """Reduce `items` to a subset, in the same order, of which no single item can be spared.

    Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input",
    IEEE TSE 28(2), 2002): halve, keep a part alone if that still shows it, else drop a part if the
    rest still shows it, else use finer parts. At the finest, items are dropped one by one until a
    full round drops none, which proves 1-minimality for predicates of any kind, monotone or not.
    Items may repeat; two subsets with the same content are one candidate. The empty one is tried
    too: a test for which it makes no sense answers UNRESOLVED.

    `cuts` are natural divisions, coarsest first (`cut_after` line ends, `cut_by` kind). Each is
    applied to what is left, and its pieces are minimised whole before the next finer ones.

    `budget` is the largest number of calls of `test`. `test` may also raise `OutOfBudget` or be
    interrupted by Ctrl-C; neither leaves this function. Any other exception does.

    For n items and no cuts, `test` is called at most n(n + 13)/2 + 2 times, at most 7n + 2 times if
    it is monotone (a set that holds a STILL one is STILL), and at most 2 ceil(log2 n) + 2 times if
    one item is all it takes. Every cut adds as much, for its number of pieces.
    """
    best = tuple(items)
    trials = _Trials(test, budget)

    def still(pieces: Iterable[Subset[T]]) -> bool:
        nonlocal best
        candidate = _joined(pieces)
        if shown := trials.still(candidate):
            best = candidate
        return shown

    def search() -> Reason:
        if not still([best]):
            return Reason.ABSENT
        levels: Sequence[Cut[T]] = (*cuts, _singly)
        for cut in levels:
            _minimise(cut(best), still)
        return Reason.COMPLETE

    reason = _until_stopped(search)
    return Minimised(best, reason, tuple(Trial(*entry) for entry in trials.seen.items()))


def sweep(
    values: Sequence[T],
    test: Callable[[T], Outcome],
    *,
    cost: Callable[[T], float] | None = None,
    budget: int | None = None,
) -> Swept[T]:
    """Try every one of `values`, given from simplest to most complex; nothing is taken as monotone.

    They run in the order of `cost`, cheapest first, or as given. Stops as `ddmin` does.
    """
    trials = _Trials(test, budget)

    def search() -> Reason:
        for value in values if cost is None else sorted(values, key=cost):
            trials.still(value)
        return Reason.COMPLETE

    return _swept(values, trials, _until_stopped(search))


def first_still(
    values: Sequence[T], test: Callable[[T], Outcome], *, budget: int | None = None
) -> Swept[T]:
    """Try `values`, given from simplest to most complex, up to the first that still shows it.

    Enough to know the simplest one. Stops as `ddmin` does.
    """
    trials = _Trials(test, budget)

    def search() -> Reason:
        for value in values:
            if trials.still(value):
                break
        return Reason.COMPLETE

    return _swept(values, trials, _until_stopped(search))


def cut_after(is_end: Callable[[T], bool]) -> Cut[T]:
    """Cut after every item that ends something: the line-end tokens of a prompt."""

    def cut(items: Subset[T]) -> Sequence[Subset[T]]:
        ends = [at + 1 for at, item in enumerate(items) if is_end(item)]
        bounds = [0, *ends, len(items)]
        return [items[a:b] for a, b in pairwise(bounds) if a < b]

    return cut


def cut_by(key: Callable[[T], object]) -> Cut[T]:
    """Cut where `key` changes between neighbours: tensors, sorted by kind, into kinds."""
    return lambda items: [tuple(run) for _, run in groupby(items, key)]


def _minimise(pieces: Sequence[Subset[T]], still: Callable[[Iterable[Subset[T]]], bool]) -> None:
    """Reduce `pieces`, whose whole is known to be STILL, until none of them can be spared."""
    chunks = [tuple(pieces)]
    while True:
        chunks = _pass(chunks, still)
        if all(len(chunk) == 1 for chunk in chunks):
            break
        chunks = [half for chunk in chunks for half in _halves(chunk)]

    kept = [piece for (piece,) in chunks]
    at, in_vain = len(kept), 0
    while in_vain < len(kept):
        at = (at - 1) % len(kept)
        rest = kept[:at] + kept[at + 1 :]
        if still(rest):
            kept, in_vain = rest, 0
        else:
            in_vain += 1


def _pass(
    chunks: list[tuple[Subset[T], ...]], still: Callable[[Iterable[Subset[T]]], bool]
) -> list[tuple[Subset[T], ...]]:
    """One round at one granularity: one chunk alone or, failing that, without those not needed."""
    if len(chunks) > 1:
        for chunk in chunks:
            if still(chunk):
                return [chunk]
    # Last first: a prompt without a late chunk shares the longest prefix with what is cached.
    for at in reversed(range(len(chunks))):
        rest = chunks[:at] + chunks[at + 1 :]
        if still(_joined(rest)):
            chunks = rest
    return chunks


def _halves(chunk: tuple[Subset[T], ...]) -> list[tuple[Subset[T], ...]]:
    middle = (len(chunk) + 1) // 2
    return [half for half in (chunk[:middle], chunk[middle:]) if half]


def _singly(items: Subset[T]) -> Sequence[Subset[T]]:
    return [(item,) for item in items]


def _joined(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))


def _until_stopped(search: Callable[[], Reason]) -> Reason:
    try:
        return search()
    except OutOfBudget:
        return Reason.BUDGET
    except KeyboardInterrupt:
        return Reason.INTERRUPTED


def _swept(values: Sequence[T], trials: _Trials[T], reason: Reason) -> Swept[T]:
    tried = [value for value in dict.fromkeys(values) if value in trials.seen]
    return Swept(tuple(Trial(value, trials.seen[value]) for value in tried), reason)
