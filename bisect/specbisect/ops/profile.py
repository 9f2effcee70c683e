"""The width profile of a target, as a value: which widths give the bits of single rows, how far the others are off."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from specbisect.ops.trace import Departure, NodeTrace
from specbisect.trace import Counters

QUANTILES = (0.5, 0.9, 0.99, 1.0)
BLOCK = 256
"""Attention works on whole blocks of this many cells (llama_kv_cache::get_n_kv); kernels change with their number."""


@dataclass(frozen=True, slots=True)
class AtWidth:
    """One width against width 1, over `rows` rows of greedy text from a clean state.

    `identical` rows have the same bits. `margins` are `QUANTILES` of the absolute change of the difference between the
    two best logits, which has to exceed a margin for a flip; `logits` are those of a row's largest absolute change.
    `rms` is over all logits of all rows; `flips` counts rows where another token is best, `inside` those whose margin
    is not larger than the largest change of a margin.
    """

    width: int
    rows: int
    identical: int
    margins: tuple[float, ...]
    logits: tuple[float, ...]
    rms: float
    flips: int
    inside: int

    @property
    def largest(self) -> float:
        """The largest change of any logit."""
        return self.logits[-1]

    @property
    def flips_per_1000(self) -> float:
        """Rows in a thousand where another token is best."""
        return 1000 * self.flips / self.rows if self.rows else 0.0

    @property
    def share_inside(self) -> float:
        """Share of rows that a change of the size seen could flip."""
        return self.inside / self.rows if self.rows else 0.0


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a node trace of one width says where attention works on `cells` cells; of its errors, one per layer."""

    cells: int
    trace: NodeTrace

    @property
    def width(self) -> int:
        """Rows in the batch."""
        return self.trace.width

    @property
    def first(self) -> Departure | None:
        """The first node that departs."""
        return self.trace.first

    @property
    def invariant(self) -> bool:
        """Whether every node gives the bits of single rows, also when nobody watches."""
        return self.first is None and self.trace.transparent


@dataclass(frozen=True, slots=True)
class Profile:
    """The width profile of one target in one configuration.

    `cell` is the cell's key, `name` what people call the target, `resolved` what llama.cpp made of the settings.
    `batches` and `singles` count the decode calls for batches and for the single rows they are compared with.
    """

    cell: str
    name: str
    resolved: Mapping[str, Any]
    host: Mapping[str, Any]
    widths: tuple[AtWidth, ...]
    kernels: tuple[Kernels, ...]
    batches: int
    singles: int
    counters: Counters = field(default=Counters(), compare=False)

    def departs(self) -> int | None:
        """The smallest width at which bits depart; None when none does."""
        measured = [a.width for a in self.widths if a.identical < a.rows]
        traced = [k.width for k in self.kernels if not k.invariant]
        return min([*measured, *traced], default=None)

    def at(self, width: int) -> AtWidth | None:
        """The measurement at `width`, or at the widest measured below it."""
        return max(
            (a for a in self.widths if a.width <= width), key=lambda a: a.width, default=None
        )

    def first(self, width: int) -> Kernels | None:
        """The trace at `width` in which a node departs; of several, that with the fewest cells."""
        departed = [k for k in self.kernels if k.width == width and k.first]
        return min(departed, key=lambda k: k.cells, default=None)

    def __str__(self) -> str:
        """Where bits depart and at which node, in one line."""
        lines: dict[str, int] = {}
        for cells in sorted({k.cells for k in self.kernels}):
            lines.setdefault(_line([k for k in self.kernels if k.cells == cells]), cells)
        if len(lines) == 1:
            return next(iter(lines))
        return ", ".join(f"in {cells} cells: {line}" for line, cells in lines.items())


PROFILE = TypeAdapter(Profile)
"""JSON both ways."""


def can_fork(profile: Profile, widths: Iterable[int], positions: range) -> bool:
    """Whether batches of `widths` at `positions` can give other bits than single rows. False only where it is proved:

    by a trace in which no node departs, for every width (or the micro-batches it is split into) and every number of
    cells that attention works on there, and by no measured row that departs.
    """
    pieces = split(widths, profile.resolved["n_ubatch"])
    proved = {(k.width, k.cells) for k in profile.kernels if k.invariant}
    departed = {a.width for a in profile.widths if a.identical < a.rows}
    needed = {(w, cells) for w in pieces for cells in blocks(positions)}
    return not needed <= proved or not departed.isdisjoint(pieces)


def split(widths: Iterable[int], n_ubatch: int) -> set[int]:
    """The widths above 1 of the micro-batches that batches of `widths` are computed in."""
    pieces = {piece for w in widths for piece in (min(w, n_ubatch), w % n_ubatch)}
    return {piece for piece in pieces if piece > 1}


def blocks(positions: range) -> Iterator[int]:
    """The numbers of cells that attention works on at `positions` of a sequence alone in its context."""
    for block in range(positions.start // BLOCK, -(-positions.stop // BLOCK)):
        yield (block + 1) * BLOCK


def _line(kernels: Sequence[Kernels]) -> str:
    kernels = sorted(kernels, key=lambda k: k.width)
    same = ranges([1, *(k.width for k in kernels if k.invariant)])
    departed = next((k for k in kernels if not k.invariant), None)
    if departed is None:
        return f"bit-identical for widths {same}"
    node = departed.first or "a node that shows it only when nobody watches"
    return f"bit-identical for widths {same}; departs at {departed.width}: {node}"


def ranges(numbers: Sequence[int]) -> str:
    """``1–3, 5`` for 1, 2, 3, 5."""
    groups: list[list[int]] = []
    for n in numbers:
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}–{g[-1]}" for g in groups)
