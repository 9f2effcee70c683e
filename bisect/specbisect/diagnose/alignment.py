"""Draft alignment: are the drafts right, only in the wrong place?

Needs no model: the speculative arm's own tokens say what each draft should have been.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from specbisect.diagnose.replay import first_token
from specbisect.trace import Trace

SHIFTS = (-1, 0, 1, 2)
GAIN = 0.25
"""A shift explains a collapse when it raises the share of matching drafted tokens by this much."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Share of drafted tokens that equal the answer's token so many places further on, per shift."""

    matches: Mapping[int, float]
    compared: int

    @property
    def shift(self) -> int | None:
        """The shift other than 0 that explains the drafts better, if one does."""
        best = max(self.matches, key=lambda s: (self.matches[s], -abs(s)))
        gained = self.matches[best] - self.matches.get(0, 0.0)
        return best if best != 0 and gained >= GAIN else None


def align(trace: Trace) -> Alignment | None:
    """Compare every drafted token with the arm's own answer at each shift; None when nothing was drafted."""
    hits = dict.fromkeys(SHIFTS, 0)
    counted = dict.fromkeys(SHIFTS, 0)
    for cycle in trace.cycles:
        start = first_token(trace, cycle)
        for j, token in enumerate(cycle.batch[1:]):
            for shift in SHIFTS:
                if 0 <= start + j + shift < len(trace.ids):
                    counted[shift] += 1
                    hits[shift] += token == trace.ids[start + j + shift]
    if not counted[0]:
        return None
    return Alignment({s: hits[s] / counted[s] for s in SHIFTS if counted[s]}, counted[0])
