"""A search in progress: its gate, what it may use, and what it has come to."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from specbisect.narrow.candidate import Candidate, Drafts, Weights
from specbisect.narrow.ddmin import Cut, Minimised, Outcome, OutOfBudget, Reason, ddmin
from specbisect.narrow.gate import Gate, Wanted
from specbisect.narrow.result import Precision, Step, Tensors
from specbisect.narrow.weights import Ladder

T = TypeVar("T", bound=Hashable)


SHORT, OTHERS = 4, 5
"""Prompts of at most so many tokens are exchanged, for so many others."""
FEW = 16
"""So many numbers are tried one after the other."""


class Stopped(Exception):
    """A search ends before its end, with the best so far in its gate; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(slots=True)
class Search:
    """What the stages of a search share.

    `recorded` is what the drafter drafted in the original run, `line_ends` the token ids that end a line or sentence
    of the prompt, `ladder` where other weights come from, None when there are none. `mixing` are the weights that show
    it and those that do not, once files of mixed types are made of them.
    """

    gate: Gate
    recorded: Drafts = ()
    line_ends: frozenset[int] = frozenset()
    ladder: Ladder | None = None
    mixing: tuple[Weights, Weights] | None = None
    steps: list[Step] = field(default_factory=list)
    precisions: tuple[Precision, ...] = ()
    interactions: tuple[tuple[str, ...], ...] = ()
    tensors: Tensors | None = None

    @property
    def best(self) -> Candidate:
        """The simplest candidate so far."""
        return self.gate.best

    @property
    def wanted(self) -> Wanted:
        """What candidates must show."""
        return self.gate.wanted

    @contextmanager
    def step(self, stage: str, part: str, shown: Callable[[Candidate], object]) -> Iterator[None]:
        """Enter a step when the block makes the best simpler; `shown` is what tables show of `part`.

        It is entered also when the search is stopped inside, which leaves the block as `Stopped`.
        """
        before, trials = self.best, self.gate.trials
        try:
            yield
        except OutOfBudget:
            raise Stopped(Reason.BUDGET) from None
        except KeyboardInterrupt:
            raise Stopped(Reason.INTERRUPTED) from None
        finally:
            if self.best.key != before.key:
                spent = self.gate.trials - trials
                values = (str(shown(candidate)) for candidate in (before, self.best))
                self.steps.append(Step(stage=stage, part=part, trials=spent, **_ends(*values)))

    def first(self, candidates: Iterable[Candidate]) -> bool:
        """Whether one of `candidates` still shows it; they are tried in order until one does."""
        return any(self.gate.consider(c) is Outcome.STILL for c in candidates)

    def still(self, candidate: Candidate) -> Outcome:
        """`Gate.consider`, and where that is lost by a hair, the same with other prompts as short.

        When rows differ and no token does, or the tokens differ for a neighbouring cause of the same label, it takes
        another text to show it, and a prompt of few tokens is as good as another: the original one has plenty. That
        holds while whole answers are compared, not once a batch was chosen in one of them.
        """
        outcome = self.gate.consider(candidate)
        seen, length = self.gate.known(candidate), len(candidate.prompt)
        if outcome is Outcome.STILL or seen is None:
            return outcome
        another_may = seen.departs or seen.label == self.wanted.label
        if not another_may or candidate.layer != "widths" or length > SHORT:
            return outcome
        again = (candidate.but(prompt=ids) for ids in self.prompts(length, OTHERS))
        return Outcome.STILL if self.first(again) else outcome

    def least(self, low: int, high: int, build: Callable[[int], Candidate]) -> None:
        """The least number from `low` on, below `high`, that still shows it; it need not be that all larger ones do.

        A few are all tried in turn; of many, ever farther ones from the least, and then those before the first found.
        """
        while low < high:
            for number in _farther(low, high):
                if self.still(build(number)) is Outcome.STILL:
                    high = number
                    break
                low = number + 1
            else:
                return

    def prompts(self, length: int, n: int) -> Iterator[tuple[int, ...]]:
        """`n` pieces of the original prompt, each of `length` tokens, from all over it."""
        ids = self.best.original.prompt.ids or ()
        last = max(0, len(ids) - length)
        for at in dict.fromkeys(last * i // n for i in range(1, n + 1)):
            yield ids[at : at + length]

    def reduce(
        self,
        items: Sequence[T],
        build: Callable[[tuple[T, ...]], Candidate],
        cuts: Sequence[Cut[T]] = (),
        any_text: bool = False,
    ) -> Minimised[T]:
        """`ddmin` over candidates: `build` makes one of what is left of `items`. Raises `Stopped`.

        With `any_text`, by `still` instead of the gate alone.
        """
        test = self.still if any_text else self.gate.consider
        found = ddmin(items, lambda kept: test(build(kept)), cuts=cuts)
        if found.reason in (Reason.BUDGET, Reason.INTERRUPTED):
            raise Stopped(found.reason)
        return found


def _farther(low: int, high: int) -> Iterator[int]:
    if high - low <= FEW:
        yield from range(low, high)
        return
    distance = 0
    while low + distance < high:
        yield low + distance
        distance = 2 * distance + 1


def _ends(before: str, after: str) -> dict[str, str]:
    return {"before": before, "after": after}
