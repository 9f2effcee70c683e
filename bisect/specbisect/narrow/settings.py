"""Stages about the configuration: precision of the weights, width, and every other axis."""

from typing import Any

from specbisect.cell import AXES, Axis
from specbisect.narrow.candidate import Candidate, Weights, in_width
from specbisect.narrow.ddmin import Outcome
from specbisect.narrow.result import Precision
from specbisect.narrow.search import Search
from specbisect.narrow.weights import Ladder


def precision(search: Search) -> None:
    """The most precise weights that still show it. Every rung is tried: more rounding does not always mean more."""
    weights = search.best.weights
    if search.ladder is None or weights.kept is not None:
        return
    with search.step("precision", "target", lambda c: c.weights.type):
        rungs = [search.best.but(target=rung) for rung in search.ladder.above(weights)]
        seen = search.gate.observe_all([search.best, *rungs])
        types = [weights.type, *(rung.weights.type for rung in rungs)]
        if not search.precisions:
            search.precisions = tuple(
                Precision(type=t, shows=s.label) for t, s in zip(types, seen, strict=True)
            )
        search.first(reversed(rungs))


def safe_weights(search: Search, ladder: Ladder) -> Weights | None:
    """The least precise weights above the best ones that do not show it; rather those with no difference in any row."""
    passing = []
    for rung in ladder.above(search.best.weights):
        seen = search.gate.observe(search.best.but(target=rung))
        if search.wanted.outcome(seen) is Outcome.DIFFERENT:
            passing.append((seen.departs, rung))
            if not seen.departs:
                break
    return min(passing, key=lambda found: found[0])[1] if passing else None


def width(search: Search) -> None:
    """The smallest width that still shows it; it need not be that all larger ones do."""
    drafter = search.best.cell.drafter
    assert drafter is not None
    with search.step("width", "width", lambda c: c.cell.width):
        narrower = range(2, search.best.cell.width)
        tried = (search.best.but(drafter=in_width(drafter, w)) for w in narrower)
        any(search.still(candidate) is Outcome.STILL for candidate in tried)


def axes(search: Search) -> None:
    """As many axes as can be at their defaults, by ddmin; each of the others at its simplest value.

    Axes that are left because none can be spared belong together: it takes all of them.
    """
    with search.step("axes", "axes", lambda c: ", ".join(c.changed()) or "all at default"):
        changed = search.best.changed()

        def at_default(kept: tuple[str, ...]) -> Candidate:
            return search.best.but(**{n: AXES[n].default for n in changed if n not in kept})

        found = search.reduce(changed, at_default, any_text=True)
    needed = [n for n, out in zip(found.items, found.removals, strict=True) if _needed(out)]
    search.interactions = (tuple(needed),) if len(needed) > 1 else ()
    for name in found.items:
        _simplest(search, AXES[name])


def _needed(without: Outcome | None) -> bool:
    return without is Outcome.DIFFERENT


def _simplest(search: Search, axis: Axis) -> None:
    """The simplest value of an axis, other than its default, that still shows it."""
    with search.step("axes", axis.name, lambda c: getattr(c.cell, axis.name)):
        value = getattr(search.best.cell, axis.name)

        def at(other: Any) -> Candidate:
            return search.best.but(**{axis.name: other})

        if axis.values is not None:
            simpler = (v for v in axis.values if (0, 0) < axis.rank(v) < axis.rank(value))
            any(search.still(at(v)) is Outcome.STILL for v in simpler)
        elif not isinstance(value, str):
            search.least(axis.minimum or 0, value, at)
