"""After a search: what does not matter, and for everything that is left, the nearest value at which it is gone."""

from collections.abc import Iterator
from typing import Any

from specbisect.cell import AXES, Axis
from specbisect.narrow.candidate import Candidate, in_width, padded
from specbisect.narrow.gate import Seen
from specbisect.narrow.result import Irrelevant, Neighbour, Width
from specbisect.narrow.search import Search

WIDEST = 16
"""Widths are tried up to this one: kernels of today change at 2, 4, 8 and 16 rows."""
NEAR = 4
"""Values of one axis that are tried in search of one at which it is gone."""


def widths(search: Search) -> tuple[Width, ...]:
    """What the smallest case shows at every width from 2 on."""
    tried = range(2, max(WIDEST, search.best.cell.width) + 1)
    shown = search.gate.observe_all([at_width(search, w) for w in tried])
    return tuple(Width(width=w, shows=s.label) for w, s in zip(tried, shown, strict=True))


def at_width(search: Search, width: int) -> Candidate:
    """The smallest case with batches of another width, its answer long enough for them."""
    best = search.best
    if width == best.cell.width:
        return best
    if best.layer not in ("batch", "drafts"):
        assert best.cell.drafter is not None
        return best.but(drafter=in_width(best.cell.drafter, width))
    last = max(start for start, _ in best.drafts)
    longest = max(best.cell.n_predict, last + width)
    return best.but(drafter=padded(best.drafts, width), n_predict=longest)


def neighbours(search: Search, row: tuple[Width, ...]) -> Iterator[Neighbour]:
    """The nearest value at which it is gone: of the width, the weights, the length, and every axis not at default."""
    best = search.best
    width = best.cell.width
    passing = [w for w in row if w.shows == "none"]
    nearest = min(passing, key=lambda w: (abs(w.width - width), w.width), default=None)
    yield Neighbour(
        axis="n_max",
        value=width - 1,
        neighbour=nearest.width - 1 if nearest else None,
        shows=nearest.shows if nearest else None,
    )
    if search.mixing is not None:
        _, safe = search.mixing
        seen = search.gate.observe(best.but(target=safe))
        yield _neighbour("target", best.weights.model.quant, safe.model.quant, seen)
    if (shorter := best.cell.n_predict - 1) > 0:
        seen = search.gate.observe(best.but(n_predict=shorter))
        yield _neighbour("n_predict", best.cell.n_predict, shorter, seen)
    for name in best.changed():
        yield _nearest(search, AXES[name])


def _neighbour(axis: str, value: Any, tried: Any, seen: Seen) -> Neighbour:
    if seen.label != "none":
        return Neighbour(axis=axis, value=value)
    return Neighbour(axis=axis, value=value, neighbour=tried, shows=seen.label)


def _nearest(search: Search, axis: Axis) -> Neighbour:
    best = search.best
    value = getattr(best.cell, axis.name)
    for other in near(axis, value):
        seen = search.gate.observe(best.but(**{axis.name: other}))
        if seen.label == "none":
            return Neighbour(axis=axis.name, value=value, neighbour=other, shows=seen.label)
    return Neighbour(axis=axis.name, value=value)


def near(axis: Axis, value: Any) -> list[Any]:
    """Values of an axis around `value`, the nearest first, its default among them."""
    if axis.values is not None:
        at = axis.values.index(value)
        others = [v for v in axis.values if v != value]
        others.sort(key=lambda v: abs(axis.values.index(v) - at) if axis.values else 0)
        found = others[:NEAR]
    elif isinstance(value, str):
        found = []
    else:
        found = [v for v in (value - 1, value + 1) if axis.minimum is None or v >= axis.minimum]
    return found if axis.default in found else [*found, axis.default]


def irrelevant(search: Search) -> tuple[Irrelevant, ...]:
    """Axes that were put to their default, the label staying the same."""
    original, now = search.best.original.cell, search.best.cell
    return tuple(
        Irrelevant(
            axis=name,
            original=getattr(original, name),
            now=axis.default,
            tried=(getattr(original, name), axis.default),
        )
        for name, axis in AXES.items()
        if getattr(original, name) != axis.default and getattr(now, name) == axis.default
    )
