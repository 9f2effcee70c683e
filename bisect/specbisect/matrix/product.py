"""The cells of a matrix, produced one at a time and never all held.

The target is the outermost loop, then what a model is loaded with, then what a context is made with, and the drafter
innermost: models load once, and cells that share their vanilla arm stay together.
"""

import itertools
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from specbisect.cell import AXES, Cell, Drafter, Model, drafter_label
from specbisect.errors import BadInput

Settings = tuple[Any, ...]
"""A value for every axis, in the order of `AXES`."""

_LOADING = ("engine", "n_gpu_layers", "split_mode", "use_extra_bufts")
_SLOWEST_FIRST = (*_LOADING, *(name for name in AXES if name not in _LOADING))
_in_cell_order = operator.itemgetter(*(_SLOWEST_FIRST.index(name) for name in AXES))
_INDEX = {name: i for i, name in enumerate(AXES)}


def parameter(drafter: Drafter, name: str) -> Any:
    """A parameter as matrix files name it, None where the drafter has none of that name.

    ``model`` is the name of a draft model, ``quant`` its quantisation.
    """
    if name in ("model", "quant"):
        model = getattr(drafter, "model", None)
        return model and getattr(model, "name" if name == "model" else "quant")
    return getattr(drafter, name, None)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """An ``[[exclude]]`` table called `name`: the values it matches, None where it says nothing."""

    name: str
    axes: Mapping[str, frozenset[Any]]
    quants: frozenset[str] | None = None
    drafter: Mapping[str, frozenset[Any]] | None = None

    def matches(self, target: Model, settings: Settings) -> bool:
        """Whether it applies to these, drafters aside."""
        if self.quants is not None and target.quant not in self.quants:
            return False
        return all(settings[_INDEX[axis]] in wanted for axis, wanted in self.axes.items())

    def matches_drafter(self, drafter: Drafter) -> bool:
        """Whether it applies to cells with this drafter."""
        if self.drafter is None:
            return True
        return all(parameter(drafter, name) in wanted for name, wanted in self.drafter.items())


@dataclass(frozen=True, slots=True)
class Block:
    """A product: targets × values of every axis × drafters, less what `exclusions` match.

    Values are unique; `asked` is the size of the product before doubles were dropped from it.
    """

    targets: tuple[Model, ...]
    axes: Mapping[str, tuple[Any, ...]]
    drafters: tuple[Drafter, ...]
    asked: int
    exclusions: tuple[Exclusion, ...] = ()

    def settings(self) -> Iterator[Settings]:
        """Every combination of axis values; what a model is loaded with varies slowest."""
        return map(_in_cell_order, itertools.product(*(self.axes[name] for name in _SLOWEST_FIRST)))

    def active(self, target: Model, settings: Settings) -> list[Exclusion]:
        """The exclusions that match a target and settings."""
        return [e for e in self.exclusions if e.matches(target, settings)]

    def holds(self, target: Model, settings: Settings, drafter: Drafter) -> bool:
        """Whether this is one of its cells."""
        return (
            target in self.targets
            and drafter in self.drafters
            and all(settings[i] in self.axes[name] for name, i in _INDEX.items())
            and not any(e.matches_drafter(drafter) for e in self.active(target, settings))
        )


class Group(NamedTuple):
    """Cells that share their vanilla arm, and those of the same product that exclusions drop, with the reason."""

    cells: list[Cell]
    pruned: list[tuple[Cell, str]]


def groups(blocks: Sequence[Block]) -> Iterator[Group]:
    """All cells of all blocks, each once, by target and settings."""
    for target in dict.fromkeys(t for block in blocks for t in block.targets):
        for i, block in enumerate(blocks):
            if target in block.targets:
                for settings in block.settings():
                    yield _group(block, blocks[:i], target, settings)


def _group(block: Block, earlier: Sequence[Block], target: Model, settings: Settings) -> Group:
    group = Group([], [])
    active = block.active(target, settings)
    for drafter in block.drafters:
        if earlier and any(other.holds(target, settings, drafter) for other in earlier):
            continue
        cell = Cell(target, drafter, *settings)
        if reason := _excluded_by(active, drafter):
            group.pruned.append((cell, reason))
        else:
            group.cells.append(cell)
    return group


def _excluded_by(active: Iterable[Exclusion], drafter: Drafter) -> str:
    for exclusion in active:
        if exclusion.matches_drafter(drafter):
            return f"matches {exclusion.name}"
    return ""


class Counts(NamedTuple):
    """How many cells there are, how many exclusions drop, and how many were asked for more than once."""

    cells: int
    pruned: int
    duplicates: int


class Impossible(BadInput):
    """A cell that cannot run; `reason` is why, without how a matrix leaves such cells out."""

    def __init__(self, source: str, reason: str, mend: str) -> None:
        super().__init__(f"{source}: {reason}; {mend}")
        self.reason = reason


def check(blocks: Sequence[Block], source: str) -> Counts:
    """Look at every cell once.

    Raises `Impossible` for the first that cannot run and is not excluded, `BadInput` when none is left. `source` is
    what the message calls the matrix.
    """
    cells = pruned = 0
    for group in groups(blocks):
        cells += len(group.cells)
        pruned += len(group.pruned)
        for cell in group.cells:
            for reason in cell.problems():
                raise Impossible(source, reason, _mend(cell, reason))
    if not cells:
        raise BadInput(f"{source}: no cell is left; add a [[drafter]] or relax [[exclude]]")
    return Counts(cells, pruned, sum(block.asked for block in blocks) - cells - pruned)


def _mend(cell: Cell, reason: str) -> str:
    """How to leave out an impossible cell and its like: the table that names what the reason names."""
    words = set(re.findall(r"\w+", reason))
    keys = [f"{name} = {json.dumps(getattr(cell, name))}" for name in AXES if name in words]
    if cell.drafter is not None:
        named = [
            f"{f.name} = {json.dumps(getattr(cell.drafter, f.name))}"
            for f in fields(cell.drafter)
            if f.name in words and f.name not in (*AXES, "model")
        ]
        if named:
            keys.append(f"drafter = {{ {', '.join(named)} }}")
        elif "drafter" in words:
            keys.append(f'drafter = "{drafter_label(cell.drafter)}"')
    return f"change it, or leave such cells out with [[exclude]] {', '.join(keys)}"
