"""Acceptance as text and as JSON, for every command that shows a run."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from specbisect.cell import Cell
from specbisect.cli.grid import grid
from specbisect.cli.naming import Naming
from specbisect.gate.acceptance import Acceptance, total

Counts = Mapping[tuple[Cell, str], Acceptance]
PLACES = 8
"""Places in the draft that a table shows; a document has all."""


def table(counts: Counts, *, groups: bool = True) -> str:
    """One line for each cell and, where there are several and `groups`, for each of its prompt groups."""
    naming = Naming(cell for cell, _ in counts)
    by_cell: dict[Cell, dict[str, Acceptance]] = {}
    for (cell, group), found in counts.items():
        by_cell.setdefault(cell, {})[group] = found
    lines = []
    for cell, own in by_cell.items():
        name = [*naming.settings(cell), " ".join(naming.drafter(cell))]
        lines.append([*name, *_numbers(total(own.values()))])
        if groups and len(own) > 1:
            lines += [
                [*[""] * (len(name) - 1), f"  {group}", *_numbers(found)]
                for group, found in own.items()
            ]
    heads = [*naming.headers, "drafter", "drafted", "accepted", "per cycle", "by place"]
    return grid(lines, heads)


def _numbers(found: Acceptance) -> list[str]:
    shares = [_share(share) for share in found.conditional]
    more = ["…"] if len(shares) > PLACES else []
    return [
        str(found.drafted),
        _share(found.rate),
        "–" if found.per_cycle is None else f"{found.per_cycle:.2f}",
        " ".join(shares[:PLACES] + more),
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".removeprefix("0")


def documents(counts: Counts) -> Iterator[dict[str, Any]]:
    """Per cell and prompt group, the counts and the shares that follow from them."""
    for (cell, group), found in counts.items():
        yield {"cell": cell.key, "group": group, **document(found)}


def document(found: Acceptance) -> dict[str, Any]:
    """Counts, and the ratios of totals that follow from them."""
    return asdict(found) | {
        "rate": found.rate,
        "per_cycle": found.per_cycle,
        "accepted_at": found.accepted_at,
        "conditional": found.conditional,
        "unconditional": found.unconditional,
    }
