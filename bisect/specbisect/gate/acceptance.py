"""Acceptance: what became of every drafted token, counted from stored cycles.

Counts add up over cases and every ratio is one of totals; ratios are never averaged. The counts are llama-server's
own (``draft_n``, ``draft_n_accepted``, ``acc per pos`` in tools/server/server-context.cpp), so the same cases give the
same numbers there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from specbisect.cell import Cell, ServerSpec
from specbisect.errors import BadInput
from specbisect.store import Row, Store
from specbisect.trace import Cycle, Trace

SYNTHETIC = "--spec-synth"
"""Begins the names of llama-server's options that accept drafted tokens at random."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over the cycles of one speculative arm, or of many.

    `committed` tokens came into the answer through `cycles` verify batches, of which `drafting` held a draft. The
    first token of an answer comes from the prompt and is not among them; neither are accepted tokens behind an end of
    generation, which the answer leaves out. `histogram[a]` counts the drafting cycles that accepted a prefix of
    exactly `a` tokens. Per position in the draft, from 0: `offered` cycles drafted a token there, in `reached` of
    them everything before it was accepted.

    `drafted` and `accepted` include `unseen` arms, of which an engine showed these totals and no cycles.
    """

    drafted: int = 0
    accepted: int = 0
    cycles: int = 0
    drafting: int = 0
    committed: int = 0
    histogram: tuple[int, ...] = ()
    offered: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    unseen: int = 0

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The counts of one speculative arm."""
        if not trace.cycles:
            return cls(trace.drafted, trace.accepted, unseen=int(trace.drafted > 0))
        drafting = [cycle for cycle in trace.cycles if cycle.drafted]
        places = range(max((cycle.drafted for cycle in drafting), default=0))
        return cls(
            drafted=sum(cycle.drafted for cycle in drafting),
            accepted=sum(cycle.accepted for cycle in drafting),
            cycles=len(trace.cycles),
            drafting=len(drafting),
            committed=sum(committed(trace, cycle) for cycle in trace.cycles),
            histogram=tuple(
                sum(cycle.accepted == n for cycle in drafting)
                for n in range(len(places) + bool(drafting))
            ),
            offered=tuple(sum(cycle.drafted > at for cycle in drafting) for at in places),
            reached=tuple(
                sum(cycle.drafted > at and cycle.accepted >= at for cycle in drafting)
                for at in places
            ),
        )

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.cycles + other.cycles,
            self.drafting + other.drafting,
            self.committed + other.committed,
            _sums(self.histogram, other.histogram),
            _sums(self.offered, other.offered),
            _sums(self.reached, other.reached),
            self.unseen + other.unseen,
        )

    @property
    def rate(self) -> float | None:
        """Share of drafted tokens that were accepted; None when nothing was drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def per_cycle(self) -> float | None:
        """Tokens committed per verify batch, between 1 and k + 1: the M of the cost formulas."""
        return _ratio(self.committed, self.cycles)

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """Per position, the cycles that accepted the token drafted there."""
        return tuple(sum(self.histogram[at + 1 :]) for at in range(len(self.offered)))

    @property
    def by_position(self) -> tuple[tuple[int, int], ...]:
        """Per position, how often a token was drafted there and how often it was accepted."""
        return tuple(zip(self.offered, self.accepted_at, strict=True))

    @property
    def unconditional(self) -> tuple[float, ...]:
        """Per position, the share of drafting cycles that accepted a token there; never rises."""
        return tuple(n / self.drafting for n in self.accepted_at)

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """Per position, the share accepted of the tokens there whose predecessors all were; None where none were."""
        return tuple(map(_ratio, self.accepted_at, self.reached))


def committed(trace: Trace, cycle: Cycle) -> int:
    """Tokens that `cycle` put into the answer: accepted ones and the target's own, up to the end of the answer."""
    start = cycle.base - len(trace.prompt_ids) + 1
    return min(cycle.accepted + 1, len(trace.ids) - start)


def _sums(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def by_group(store: Store, rows: Iterable[Row]) -> dict[tuple[Cell, str], Acceptance]:
    """The acceptance of the finished cases `rows`, added up per cell and prompt group, in the order of `rows`."""
    found: dict[tuple[Cell, str], Acceptance] = {}
    for row in rows:
        trace = store.arm(row.id)
        if isinstance(trace, Trace):
            key = row.cell, row.prompt_group
            found[key] = found.get(key, Acceptance()) + Acceptance.of(trace)
    return found


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """All of them together."""
    return sum(parts, Acceptance())


def refuse_synthetic(cells: Iterable[Cell]) -> None:
    """Raise `BadInput` when a drafter's acceptance would be made up: what it accepts is evidence of nothing."""
    for flag in (f for cell in cells for f in _flags(cell)):
        name = flag.partition("=")[0].replace("_", "-")
        if name.startswith(SYNTHETIC):
            raise BadInput(
                f"{name} accepts drafted tokens at random, which says nothing about a drafter; leave it out of args"
            )


def _flags(cell: Cell) -> Iterator[str]:
    if isinstance(cell.drafter, ServerSpec):
        yield from cell.drafter.args
