"""One row at every width: which widths give the same bits, how far apart they are, and which is the odd one out.

Kernels treat the rows of a batch differently (full tiles and what is left over), so the row keeps its place in the
batch wherever the batch is wide enough for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbisect.diagnose.lab import Bench
from specbisect.llama.context import Logits
from specbisect.llama.logits import best, digest

WIDEST = 16
"""Widths tried at least; kernels of today change at 2, 4, 8 and 16 rows."""
LONERS = 2
"""More widths than this that share their bits with no other width are how a backend works, not a defect."""


@dataclass(frozen=True, slots=True)
class AtWidth:
    """The row at one width: its bits, its choice, its distance from the row at width 1."""

    width: int
    digest: str
    token: int
    distance: float
    finite: bool


@dataclass(frozen=True, slots=True)
class WidthTable:
    """The same row, after the same width-1 history, in batches of every width."""

    rows: tuple[AtWidth, ...]
    logits: dict[int, Logits]

    def at(self, width: int) -> AtWidth:
        """The entry for `width`."""
        return next(r for r in self.rows if r.width == width)

    def classes(self) -> list[list[int]]:
        """Widths grouped by equal bits, each group ascending, groups by their first width."""
        groups: dict[str, list[int]] = {}
        for row in self.rows:
            groups.setdefault(row.digest, []).append(row.width)
        return list(groups.values())

    def departs_at(self) -> int | None:
        """The smallest width whose bits are not those of width 1."""
        return next((r.width for r in self.rows if r.digest != self.rows[0].digest), None)

    def smallest_flip(self) -> int | None:
        """The smallest width at which another token wins than at width 1."""
        return next((r.width for r in self.rows if r.token != self.rows[0].token), None)

    def loners(self) -> list[int]:
        """Widths above 1 that share their bits with no other width, where they are few enough to stand out."""
        alone = [g[0] for g in self.classes() if len(g) == 1 and g[0] > 1]
        return alone if len(alone) <= LONERS else []

    def one_stands_alone(self) -> bool:
        """Whether no other width gives the bits of width 1."""
        return len(self.classes()[0]) == 1


def width_table(bench: Bench, ids: Sequence[int], start: int, row: int, widest: int) -> WidthTable:
    """The row of ``ids[row]`` in batches of widths 1…`widest`, of which `ids` at position `start` is the natural one.

    Batches too narrow to hold that place end with the row, and the tokens before them are decoded one by one. `ids`
    goes on with what fills the rows after it, and is repeated if too short. Sequence 0 stays as it is.
    """
    filled = list(ids)
    while len(filled) < row + widest:
        filled += ids
    rows: list[AtWidth] = []
    logits: dict[int, Logits] = {}
    for width in range(1, widest + 1):
        lead = max(0, row + 1 - width)
        batch = bench.try_out(filled[lead : lead + width], start + lead, lead=filled[:lead])
        one = batch[row - lead]
        logits[width] = one
        distance = float(np.abs(one - logits[1]).max())
        rows.append(
            AtWidth(width, digest(one), best(one), distance, bool(np.isfinite(batch).all()))
        )
    return WidthTable(tuple(rows), logits)
