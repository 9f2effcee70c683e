"""Width profiles as one page: the numbers, how the error grows from layer to layer, and tables of types."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbisect import __version__
from specbisect.errors import BadInput
from specbisect.ops.invariance import Invariance
from specbisect.ops.profile import Profile
from specbisect.report import render

FAINTEST = -8.0
"""Decimal logarithm of a relative error that has no colour; one of 1 has all of it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A cell of a heat map: its text, and how much of the colour it has, 0 to 100."""

    text: str
    share: int


def tile(relative: float) -> Tile:
    """The tile of a relative error."""
    if not relative > 0:
        return Tile("", 0)
    share = 100 * (1 - math.log10(relative) / FAINTEST)
    return Tile(f"{relative:.0e}".replace("e-0", "e-"), max(3, min(100, round(share))))


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
    return template.render(
        version=__version__,
        profiles=profiles,
        maps={name: heat_maps(profile) for name, profile in profiles.items()},
        types=types or {},
    )
