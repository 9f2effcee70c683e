"""Width profiles as one page: the numbers, how the error grows from layer to layer, and tables of types."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbisect import __version__
from specbisect.errors import BadInput
from specbisect.ops.invariance import Invariance
from specbisect.ops.profile import AtWidth, Profile
from specbisect.report import render

FAINTEST = -8.0
"""Decimal logarithm of a relative error that has no colour; one of 1 has all of it."""
FAINTEST_LOGIT, FULLEST_LOGIT = -4.0, 1.0
"""The same of a difference between logits, which are far apart when theirs differ by 10."""
SAME = "="
"""Stands for: every bit is the same."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A cell of a heat map: its text, and how much of the colour it has, 0 to 100."""

    text: str
    share: int


def tile(relative: float) -> Tile:
    """The tile of a relative error."""
    if not relative > 0:
        return Tile("", 0)
    return Tile(f"{relative:.0e}".replace("e-0", "e-"), _share(math.log10(relative), FAINTEST, 0.0))


def _share(value: float, faintest: float, fullest: float) -> int:
    """How much colour `value` has; a little, however small it is."""
    return max(3, min(100, round(100 * (value - faintest) / (fullest - faintest))))


def overview(profiles: Mapping[str, Profile]) -> tuple[Sequence[int], Sequence[Sequence[Tile]]]:
    """All measured widths, and for every profile a tile at each: the largest difference between logits there."""
    widths = sorted({at.width for profile in profiles.values() for at in profile.widths})
    return widths, [
        [_at_width({at.width: at for at in profile.widths}.get(width)) for width in widths]
        for profile in profiles.values()
    ]


def _at_width(found: AtWidth | None) -> Tile:
    if found is None:
        return Tile("", 0)
    if found.identical == found.rows:
        return Tile(SAME, 0)
    if not 0 < found.largest < math.inf:  # NaN, or bits such as the sign of a zero
        return Tile(f"{found.largest:.2g}", 100 if found.largest else 3)
    shade = _share(math.log10(found.largest), FAINTEST_LOGIT, FULLEST_LOGIT)
    return Tile(f"{found.largest:.2g}", shade)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Relative errors at the end of every layer (rows) at every traced width (columns)."""

    cells: int
    widths: Sequence[int]
    rows: Sequence[tuple[str, Sequence[Tile]]]


def heat_maps(profile: Profile) -> list[HeatMap]:
    """One map for each number of cells that attention worked on."""
    return [_heat_map(profile, cells) for cells in sorted({k.cells for k in profile.kernels})]


def _heat_map(profile: Profile, cells: int) -> HeatMap:
    traces = {k.width: k.trace for k in profile.kernels if k.cells == cells}
    layers = {w: {e.layer: e.relative for e in t.by_layer()} for w, t in traces.items()}
    known = {layer for found in layers.values() for layer in found}
    order = sorted(known, key=lambda layer: (layer is None, layer or 0))
    rows = [
        (
            "logits" if layer is None else f"layer {layer}",
            [tile(found.get(layer, 0.0)) for found in layers.values()],
        )
        for layer in order
    ]
    return HeatMap(cells, list(traces), rows)


def write(
    path: Path,
    profiles: Mapping[str, Profile],
    types: Mapping[str, Sequence[Invariance]] | None = None,
) -> None:
    """Put the page into the file `path`. Raises `BadInput` when it cannot be written."""
    try:
        path.write_text(page(profiles, types), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; name another file") from None


def page(
    profiles: Mapping[str, Profile], types: Mapping[str, Sequence[Invariance]] | None = None
) -> str:
    """The page: profiles and tables of types, both by what people call the target and its settings."""
    template = render.html().get_template("widths.html.j2")
    widths, tiles = overview(profiles)
    return template.render(
        version=__version__,
        widths=widths,
        tiles=tiles,
        profiles=profiles,
        maps={name: heat_maps(profile) for name, profile in profiles.items()},
        types=types or {},
    )
