"""What two classes of hosts make of the same target and prompts: their vanilla arms, held against each other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from specbisect.cell import Cell
from specbisect.cli.grid import grid
from specbisect.cli.naming import Naming
from specbisect.store import Row, Store
from specbisect.trace import Trace


@dataclass(frozen=True, slots=True)
class Pair:
    """The vanilla arms of `cell`, whatever host it names, on two classes of hosts.

    For each prompt, in `tokens` the index of the first token that differs and in `rows` that of the first row of
    logits with other bits, None where there is none; `compared` tokens were compared. `rows` is empty where an engine
    shows no logits.
    """

    cell: Cell
    classes: tuple[str, str]
    compared: int
    tokens: tuple[int | None, ...]
    rows: tuple[int | None, ...]

    @classmethod
    def of(
        cls, cell: Cell, classes: tuple[str, str], arms: Sequence[tuple[Trace, Trace]]
    ) -> "Pair":
        """What two arms for each prompt come to."""
        return cls(
            cell,
            classes,
            sum(min(len(a.ids), len(b.ids)) for a, b in arms),
            tuple(_first(a.ids, b.ids) for a, b in arms),
            tuple(_first(a.digests, b.digests) for a, b in arms if a.digests and b.digests),
        )

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "cell": self.cell.to_json(),
            "classes": self.classes,
            "prompts": len(self.tokens),
            "compared": self.compared,
            "tokens": _count(self.tokens),
            "rows": _count(self.rows),
        }


def pairs(store: Store, rows: Sequence[Row]) -> Iterator[Pair]:
    """Every class of hosts in `rows` against the first one, by target and settings; none where there is but one."""
    if len({row.cell.host_class for row in rows}) < 2:
        return
    found: dict[Cell, dict[str, dict[str, str]]] = {}
    for row in rows:
        classes = found.setdefault(replace(row.cell.vanilla, host_class=""), {})
        classes.setdefault(row.cell.host_class, {}).setdefault(row.prompt_id, row.id)
    for cell, classes in found.items():
        first, *others = classes
        for other in others:
            arms = list(_arms(store, classes[first], classes[other]))
            yield Pair.of(cell, (first, other), arms)


def _arms(
    store: Store, one: Mapping[str, str], other: Mapping[str, str]
) -> Iterator[tuple[Trace, Trace]]:
    """The vanilla arms of the prompts that both have, given the id of a case for each."""
    for prompt in filter(other.__contains__, one):
        a, b = (store.arm(store.case(ids[prompt]).vanilla.key) for ids in (one, other))
        if isinstance(a, Trace) and isinstance(b, Trace):
            yield a, b


def _first(one: Sequence[object], other: Sequence[object]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


def _different(firsts: Sequence[int | None]) -> list[int]:
    return [first for first in firsts if first is not None]


def _count(firsts: Sequence[int | None]) -> dict[str, Any]:
    different = _different(firsts)
    return {
        "prompts": len(firsts),
        "different": len(different),
        "first": min(different, default=None),
    }


def table(found: Sequence[Pair]) -> str:
    """One line for each two classes, by target and settings."""
    naming = Naming(pair.cell for pair in found)
    lines = [
        [
            *naming.settings(pair.cell),
            " : ".join(name or "any" for name in pair.classes),
            _words(pair.tokens) or f"0/{len(pair.tokens)} in {pair.compared} tokens",
            _words(pair.rows) or (f"0/{len(pair.rows)}" if pair.rows else "not shown"),
        ]
        for pair in found
    ]
    return grid(
        lines, [*naming.headers, "hosts", "vanilla arms that differ", "rows with other bits"]
    )


def _words(firsts: Sequence[int | None]) -> str:
    different = _different(firsts)
    return f"{len(different)}/{len(firsts)}, first at {min(different)}" if different else ""
