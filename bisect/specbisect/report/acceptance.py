"""Acceptance by draft position: of the drafts that had a token there, how many had it accepted."""

from collections.abc import Iterable
from dataclasses import dataclass

from specbisect.trace import Cycle


@dataclass(frozen=True, slots=True)
class AtPosition:
    """Counts for the draft's token at `position` (the first is 1)."""

    position: int
    drafted: int
    accepted: int

    @property
    def share(self) -> float:
        """Accepted among drafted."""
        return self.accepted / self.drafted


def by_position(cycles: Iterable[Cycle]) -> list[AtPosition]:
    """One entry per draft position that occurs."""
    drafted: list[int] = []
    accepted: list[int] = []
    for cycle in cycles:
        grow = cycle.drafted - len(drafted)
        drafted += [0] * grow
        accepted += [0] * grow
        for i in range(cycle.drafted):
            drafted[i] += 1
            accepted[i] += i < cycle.accepted
    return [AtPosition(i + 1, d, a) for i, (d, a) in enumerate(zip(drafted, accepted, strict=True))]
