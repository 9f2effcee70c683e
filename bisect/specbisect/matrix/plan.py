"""A plan: a matrix whose models and prompts are known, ready to run."""

import fnmatch
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from specbisect.cell import AXES, Case, Cell, Drafter, Model, Prompt, digest, drafter_label, without
from specbisect.llama import quantize
from specbisect.matrix.product import Block, Counts, groups, parameter
from specbisect.matrix.prompts import prompts_digest

SCHEMA = "specbisect.plan/1"


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells and cases in running order. Made by `specbisect.matrix.load`, which has checked every cell.

    `source` is what messages call the matrix, `recipes` are the files that can be made, by model identity. `only`
    restricts the cases to those whose label fits a shell pattern.
    """

    source: str
    blocks: tuple[Block, ...]
    prompts: tuple[Prompt, ...]
    recipes: Mapping[str, quantize.Recipe]
    counts: Counts
    only: str | None = None

    @property
    def targets(self) -> tuple[Model, ...]:
        """The models under test, in running order."""
        return tuple(dict.fromkeys(t for block in self.blocks for t in block.targets))

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Every drafter with its parameters."""
        return tuple(dict.fromkeys(d for block in self.blocks for d in block.drafters))

    @property
    def host_classes(self) -> tuple[str, ...]:
        """The classes of hosts that cells ask for."""
        return tuple(dict.fromkeys(n for b in self.blocks for n in b.axes["host_class"] if n))

    def groups(self) -> Iterator[list[Cell]]:
        """Cells that share their vanilla arm: one target, one set of settings, all drafters."""
        return (group.cells for group in groups(self.blocks) if group.cells)

    def cells(self) -> Iterator[Cell]:
        """Every cell once."""
        return itertools.chain.from_iterable(self.groups())

    def count(self) -> int:
        """How many cells `cells` gives."""
        return self.counts.cells

    def pruned(self) -> Iterator[tuple[Cell, str]]:
        """Cells that an ``[[exclude]]`` table drops, with the reason, and why they could not run if they could not."""
        for group in groups(self.blocks):
            for cell, reason in group.pruned:
                yield cell, "; ".join([reason, *cell.problems()])

    def cases(self) -> Iterator[Case]:
        """Every case once; the drafters of one prompt follow each other, so that they share its vanilla arm."""
        for group in self.groups():
            for prompt in self.prompts:
                for cell in group:
                    case = Case(cell, prompt)
                    if self.only is None or matches(case, self.only):
                        yield case

    def count_cases(self) -> int:
        """How many cases `cases` gives."""
        if self.only is None:
            return self.counts.cells * len(self.prompts)
        return sum(1 for _ in self.cases())

    def files_to_make(self) -> tuple[tuple[quantize.Recipe, int], ...]:
        """Quantised files that are not in the cache yet, with the bytes they will take.

        Raises `BadInput` for a type that needs an importance matrix.
        """
        missing = [recipe for recipe in self.recipes.values() if not recipe.path.exists()]
        return tuple(zip(missing, quantize.sizes(missing), strict=True))

    def prepare(self, progress: quantize.Progress | None = None) -> None:
        """Make what `files_to_make` lists. Raises `BadInput` before the first when the disk cannot hold all."""
        missing = self.files_to_make()
        quantize.check_space(sum(size for _, size in missing))
        for recipe, _ in missing:
            quantize.make(recipe, progress=progress)

    @property
    def digest(self) -> str:
        """16 hex digits that change when an axis, a drafter, the content of a model or a prompt changes."""
        return digest(
            [[_plain(block, "name") for block in self.blocks], prompts_digest(self.prompts)]
        )

    def resolved(self) -> dict[str, Any]:
        """The matrix as it runs, in plain JSON without paths: every axis, model and drafter spelt out."""
        return {
            "schema": SCHEMA,
            "matrix": self.source,
            "blocks": [_plain(block) for block in self.blocks],
            "prompts": {
                "digest": prompts_digest(self.prompts),
                "ids": [p.id for p in self.prompts],
            },
            "counts": self.counts._asdict(),
            "digest": self.digest,
        }

    def resolved_json(self) -> str:
        """`resolved` as text."""
        return json.dumps(self.resolved(), indent=2, ensure_ascii=False) + "\n"


def _plain(block: Block, *left_out: str) -> dict[str, Any]:
    """A block in plain JSON; `asked` is how it was written, not what it is."""
    return {
        "targets": [without(asdict(t), "path", *left_out) for t in block.targets],
        "axes": {name: list(values) for name, values in block.axes.items()},
        "drafters": [without(asdict(d), "path", *left_out) for d in block.drafters],
        "exclude": [
            [_lists(e.axes), e.quants and sorted(e.quants), _lists(e.drafter or {})]
            for e in block.exclusions
        ],
    }


def _lists(values: Mapping[str, frozenset[Any]]) -> dict[str, list[Any]]:
    return {name: sorted(wanted) for name, wanted in values.items()}


def label(case: Case, *, whole: bool = False) -> str:
    """A name for people: model, quantisation, drafter, settings that are not the default (or all), prompt."""
    cell, drafter = case.cell, case.cell.drafter
    words = [cell.target.name, cell.target.quant, drafter_label(drafter)]
    if drafter is not None:
        words += [
            f"{name}={parameter(drafter, 'quant' if name == 'model' else name)}"
            for name, default in _defaults(drafter)
            if whole or getattr(drafter, name) not in (default, None)
        ]
    words += [
        f"{axis.name}={value}"
        for axis in AXES.values()
        if (value := getattr(cell, axis.name)) != axis.default or whole
    ]
    return "/".join([*words, case.prompt.id])


def _defaults(drafter: Drafter) -> Iterator[tuple[str, Any]]:
    return ((f.name, f.default) for f in fields(drafter) if f.name not in ("method", "spec_type"))


def matches(case: Case, pattern: str) -> bool:
    """Whether a shell pattern fits anywhere in the whole label, in any case."""
    return fnmatch.fnmatchcase(label(case, whole=True).lower(), f"*{pattern.lower()}*")
