"""``specbisect plan``: what a run would do, and how long it would take."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import options, output
from specbisect.cli.probe import Speed, measure

if TYPE_CHECKING:
    from specbisect.cell import Cell
    from specbisect.llama.quantize import Recipe
    from specbisect.matrix import Overrides, Plan

SHOWN = 8
"""Prunings and files that are listed one by one."""
CHARACTERS_PER_TOKEN = 4


@click.command("plan")
@click.argument("file", metavar="MATRIX")
@options.matrix
@options.only
@click.option("--no-probe", is_flag=True, help="Do not decode for a second to estimate the time.")
@options.as_json
def command(
    *, file: str, overrides: "Overrides", only: str | None, no_probe: bool, as_json: bool
) -> None:
    """Say what a run of MATRIX would do.

    Counts cells and cases, names what is pruned and which files must be made, and estimates the time. Writes nothing.
    """
    from specbisect.cli.run import check
    from specbisect.matrix import find, load

    plan = load(find(file), overrides)
    options.check_only(only, plan.cases())
    plan = replace(plan, only=only)
    outlook = _Outlook.of(plan, check(plan), probe=not no_probe)
    if as_json:
        output.emit(outlook.document())
    else:
        click.echo("\n".join(outlook.lines()))


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What running a plan will take. `seconds` is None where no probe was made."""

    plan: "Plan"
    files: "list[tuple[Recipe, int]]"
    pruned: Mapping[str, int]
    cases: int
    speed: Speed | None
    seconds: float | None

    @classmethod
    def of(cls, plan: "Plan", files: "list[tuple[Recipe, int]]", *, probe: bool) -> "_Outlook":
        pruned = Counter(reason for _, reason in plan.pruned()) if plan.counts.pruned else {}
        cases = plan.count_cases()
        speed = _probe(plan) if probe else None
        sizes = {recipe.identity: size for recipe, size in files}
        share = cases / (plan.count() * len(plan.prompts))
        seconds = share * _seconds(plan, sizes, speed) if speed else None
        return cls(plan, files, pruned, cases, speed, seconds)

    def document(self) -> dict[str, Any]:
        """As JSON, with the whole matrix as it runs."""
        return self.plan.resolved() | {
            "cells": self.plan.count(),
            "cases": self.cases,
            "pruned": self.pruned,
            "files_to_make": [
                {"type": recipe.type, "base": recipe.base.name, "bytes": size}
                for recipe, size in self.files
            ],
            "probe": self.speed,
            "estimated_seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        plan, counts = self.plan, self.plan.counts
        yield (
            f"{plan.source}: {counts.cells} cells ({len(plan.targets)} targets, {len(plan.drafters)} drafters), "
            f"{len(plan.prompts)} prompts, {self.cases} cases"
        )
        if plan.host_classes:
            yield (
                f"on hosts of {', '.join(plan.host_classes)}: run it with the --scheduler of a cluster that has them"
            )
        if counts.duplicates:
            yield f"asked for more than once, run once: {counts.duplicates} cells"
        if counts.pruned:
            yield f"pruned: {counts.pruned} cells"
            yield from _listed([f"{n}: {reason}" for reason, n in self.pruned.items()])
        if self.files:
            total = sum(size for _, size in self.files)
            yield f"files to make: {len(self.files)}, {output.mebibytes(total)}"
            yield from _listed(
                [f"{r.type} of {r.base.name}, {output.mebibytes(size)}" for r, size in self.files]
            )
        if self.speed and self.seconds is not None:
            yield (
                f"estimated time: {output.duration(self.seconds)} with one job "
                f"({self.speed.model} decodes {1 / self.speed.decode_s:.0f} tokens/s; rough, drafters not counted)"
            )


def _listed(texts: list[str]) -> list[str]:
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return [f"  {text}" for text in texts[:SHOWN] + more]


def _probe(plan: "Plan") -> Speed:
    """The speed of the smallest target that is there, or of a base that targets are made from."""
    from specbisect.llama import child

    cell = next(plan.cells())
    there = [Path(target.path) for target in plan.targets if Path(target.path).exists()]
    bases = [recipe.base for recipe in plan.recipes.values()]
    path = min(there or bases, key=lambda p: p.stat().st_size)
    return child.call(measure, path, cell)


def _seconds(plan: "Plan", sizes: Mapping[str, int], speed: Speed) -> float:
    """Time of all arms, each reckoned as a vanilla pass."""
    texts = [len(p.ids) if p.ids else len(p.text) / CHARACTERS_PER_TOKEN for p in plan.prompts]

    def arm(cell: "Cell") -> float:
        size = sizes.get(cell.target.identity) or Path(cell.target.path).stat().st_size
        tokens = len(texts) * cell.n_predict * speed.decode_s + sum(texts) * speed.prompt_s
        return tokens * size / speed.size

    return sum(arm(group[0]) * (1 + len(group)) for group in plan.groups())
