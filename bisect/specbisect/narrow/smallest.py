"""The whole search: every stage, again and again until none finds anything, then the explanation."""

from collections.abc import Callable
from dataclasses import dataclass

from specbisect.errors import SpecbisectError
from specbisect.narrow import explain
from specbisect.narrow.ddmin import Outcome, OutOfBudget, Reason
from specbisect.narrow.gate import Seen
from specbisect.narrow.layers import descend, single_batch
from specbisect.narrow.result import Neighbour, Width
from specbisect.narrow.search import Search, Stopped
from specbisect.narrow.settings import axes, precision, width
from specbisect.narrow.tensors import tensors
from specbisect.narrow.tokens import drafts, history, length, prompt

Stage = Callable[[Search], None]

STAGES: tuple[Stage, ...] = (
    *(descend, prompt, axes, width, precision, tensors),
    *(single_batch, length, history, drafts),
)
"""In this order because a whole answer has many places at which the arms can part, and one batch has one.

The layer comes first, since it makes every later trial cheaper, then the prompt for the same reason. What changes the
text is changed while any fork will do; only then is one fork chosen and everything around it taken away. Precision
comes after the settings, since finer weights depart more seldom, and a setting would then be kept for want of luck.
"""


class NotReproduced(SpecbisectError):
    """The original case does not show what its finding says, so there is nothing to search with."""

    def __init__(self, seen: Seen, mend: str = "") -> None:
        shown = " ".join(filter(None, (seen.label, seen.kind)))
        said = f"not reproduced: the case now shows {shown}"
        super().__init__("; ".join(filter(None, (said, seen.reason, mend))))
        self.seen = seen


@dataclass(frozen=True, slots=True)
class Ending:
    """How a search ended, its best being in its gate, and what is known around that.

    `proved` says whether every stage was tried on the best in vain; `reason` why nothing more was done.
    """

    proved: bool
    reason: Reason
    widths: tuple[Width, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()


def smallest(search: Search) -> Ending:
    """Bring `search` to its end, or to where it is stopped.

    Raises `NotReproduced` when the original case does not show what is wanted.
    """
    proved = False
    row: tuple[Width, ...] = ()
    try:
        _reproduce(search)
        _reduce(search)
        proved = True
        row = explain.widths(search)
        return Ending(True, Reason.COMPLETE, row, tuple(explain.neighbours(search, row)))
    except Stopped as stopped:
        return Ending(proved, stopped.reason, row)
    except OutOfBudget:
        return Ending(proved, Reason.BUDGET, row)
    except KeyboardInterrupt:
        return Ending(proved, Reason.INTERRUPTED, row)


def _reproduce(search: Search) -> None:
    if search.gate.consider(search.best) is not Outcome.STILL:
        raise NotReproduced(search.gate.shown)


def _reduce(search: Search) -> None:
    """Every stage, until all of them together leave the best as it is."""
    before = ""
    while before != search.best.key:
        before = search.best.key
        for stage in STAGES:
            stage(search)
