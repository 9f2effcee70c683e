"""The envelope: how much logits change between width 1 and width w from a clean state, measured for this target.

At many positions of greedy text, every width of interest is tried on the same width-1 history. What counts for a
fork is the change of the difference between the two best logits, because that is what has to exceed the margin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specbisect.cell import Case
from specbisect.diagnose.lab import Lab
from specbisect.engines.libllama import LibLlama
from specbisect.llama.context import Logits
from specbisect.trace import Counters, Trace

POSITIONS = 24
"""Positions per trace at which widths are compared."""


@dataclass(frozen=True, slots=True)
class AtWidth:
    """|Δ(best − second best)| and max |Δlogit| over all positions, at one width: median, 95th percentile, largest."""

    width: int
    positions: int
    top2: tuple[float, float, float]
    largest: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Envelope:
    """The measured envelope of one target and its settings."""

    widths: Mapping[int, AtWidth]
    counters: Counters = field(default_factory=Counters, compare=False)

    def at(self, width: int) -> AtWidth | None:
        """The entry for `width`, or for the widest measured below it."""
        below = [w for w in self.widths if w <= width]
        return self.widths[max(below)] if below else None


def measure(engine: LibLlama, case: Case, trace: Trace, widths: Sequence[int]) -> Envelope:
    """Measure on the greedy text of a vanilla `trace`: one vanilla pass, and a batch per position and width."""
    lab = Lab(engine, case, trace.prompt_ids)
    ids, start = trace.ids, len(trace.prompt_ids)
    widest = max(widths)
    usable = max(1, len(ids) - widest)
    at = {int(i) for i in np.linspace(0, usable - 1, min(POSITIONS, usable))}
    top2: dict[int, list[float]] = {w: [] for w in widths}
    largest: dict[int, list[float]] = {w: [] for w in widths}
    with lab.bench() as bench:
        for i in range(usable):
            ahead = ids[i : i + widest]
            tried = {
                w: bench.try_out(ahead[:w], start + i)[0]
                for w in widths
                if i in at and len(ahead) >= w
            }
            one = bench.commit(ids[i : i + 1], start + i)[0]
            for width, row in tried.items():
                top2[width].append(top2_change(one, row))
                largest[width].append(float(np.abs(row - one).max()))
    found = {
        w: AtWidth(w, len(top2[w]), _spread(top2[w]), _spread(largest[w]))
        for w in widths
        if top2[w]
    }
    return Envelope(found, lab.counters)


def top2_change(one: Logits, other: Logits) -> float:
    """|Δ| of the difference between the two best logits of `one`."""
    a, b = np.argpartition(one, -2)[-2:]
    return float(abs((one[a] - one[b]) - (other[a] - other[b])))


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    median, high = np.quantile(values, [0.5, 0.95])
    return float(median), float(high), float(max(values))
