"""What tables call cells: only what tells the cells of one table apart, and never less."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from specbisect.cell import AXES, Cell, Drafter, Model, drafter_label


class Naming:
    """Names for the cells of one table. `headers` are those of what `settings` gives for each."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        cells = list(cells)
        self._axes = [name for name in AXES if len({getattr(cell, name) for cell in cells}) > 1]
        names = {cell.target.name for cell in cells}
        quants = {cell.target.quant for cell in cells}
        self._by_name, self._by_quant = len(names) > 1, len(quants) > 1 or len(names) == 1
        target = "quant" if not self._by_name else "target"
        self.headers = (target, *self._axes)
        self._drafters = _drafter_names({cell.drafter for cell in cells if cell.drafter})

    def settings(self, cell: Cell) -> tuple[str, ...]:
        """The target, and every axis that is not the same in all cells."""
        name, quant = cell.target.name, cell.target.quant
        parts = [name] * self._by_name + [quant] * self._by_quant
        told = name if self._by_name and name.endswith(quant) else " ".join(parts)
        return told, *(_plain(getattr(cell, name)) for name in self._axes)

    def drafter(self, cell: Cell) -> tuple[str, ...]:
        """The method, n_max, and every parameter that is not the same in all drafters of that method."""
        return self._drafters[cell.drafter] if cell.drafter else ("none",)


def _drafter_names(drafters: Iterable[Drafter]) -> dict[Drafter, tuple[str, ...]]:
    by_label: dict[str, list[Drafter]] = {}
    for drafter in drafters:
        by_label.setdefault(drafter_label(drafter), []).append(drafter)
    return {
        drafter: (label, *_telling(parameters(drafter), [parameters(d) for d in alike]))
        for label, alike in by_label.items()
        for drafter in alike
    }


def _telling(own: dict[str, Any], alike: list[dict[str, Any]]) -> Iterator[str]:
    for name, value in own.items():
        if name == "n_max" or any(other[name] != value for other in alike):
            yield f"{name} {_plain(value)}"


def parameters(drafter: Drafter) -> dict[str, Any]:
    """Parameters of a drafter by name, the longest draft first."""
    found = {f.name: getattr(drafter, f.name) for f in fields(drafter)}
    return {"n_max": drafter.n_max} | {
        name: value for name, value in found.items() if name not in ("method", "spec_type")
    }


def told(drafter: Drafter) -> list[str]:
    """n_max, and every parameter that is not at its default."""
    defaults = {f.name: f.default for f in fields(drafter)}
    return [
        f"{name} {_plain(value)}"
        for name, value in parameters(drafter).items()
        if name == "n_max" or value != defaults[name]
    ]


def _plain(value: Any) -> str:
    if isinstance(value, Model):
        return f"{value.name} {value.quant}"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
