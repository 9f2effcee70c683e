"""All verdicts of a command together, and the exit code they amount to."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from specbisect.compare import Outcome

DIFFERENT: tuple[Outcome, ...] = ("fork", "length", "degenerate")
"""Outcomes that are a difference between the arms."""
COMPARED: tuple[Outcome, ...] = ("agree", *DIFFERENT)
"""Outcomes that say something about the arms."""
SHOWN: tuple[Outcome, ...] = (*DIFFERENT, "agree", "unexercised", "failed", "invalid")


@dataclass(frozen=True, slots=True)
class Verdicts:
    """How many cases have which outcome."""

    outcomes: Mapping[Outcome, int]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Self:
        """Count them."""
        return cls(Counter(outcomes))

    def count(self, *outcomes: Outcome) -> int:
        """Cases with any of these outcomes."""
        return sum(self.outcomes.get(outcome, 0) for outcome in outcomes)

    @property
    def exit_code(self) -> int:
        """1 when any case differs: no failure elsewhere takes back a difference that was seen.

        Otherwise 3 when any case failed or is invalid, since it may hide a difference, and when nothing agreed, since
        nothing was tested then (no cases, or only unexercised ones). Otherwise 0.
        """
        if self.count(*DIFFERENT):
            return 1
        if self.count("failed", "invalid") or not self.count("agree"):
            return 3
        return 0

    def __str__(self) -> str:
        words = [f"{self.outcomes[name]} {name}" for name in SHOWN if self.outcomes.get(name)]
        total = sum(self.outcomes.values())
        return f"{total} case{'s' if total != 1 else ''}: {', '.join(words) or 'none'}"
