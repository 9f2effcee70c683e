"""``specbisect cost``: is this drafter worth running at all?"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import options, output, release
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.cli.run import Execution
    from specbisect.gate import load
    from specbisect.gate.study import Costs, Study
    from specbisect.matrix import Overrides, Plan
    from specbisect.store import Store


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured, how often, and at which price of an hour."""

    rounds: int
    price: float | None
    load: "load.Asked | None"


@click.command("cost")
@click.argument("file", metavar="MATRIX")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How often every arm runs on every prompt, in turns with the others.",
)
@click.option(
    "--price",
    type=options.Finite(min=0),
    metavar="PER_HOUR",
    help="What an hour of this machine costs, for a price per million tokens.",
)
@options.listed(
    "--parallel",
    metavar="SLOTS",
    help="Also measure llama-server under load, with so many slots, such as 1,2,4.",
)
@click.option(
    "--rate",
    type=options.Finite(min=0, min_open=True),
    metavar="PER_SECOND",
    help="Requests a second under load.  [default: 70 % of what one vanilla slot gets done]",
)
@click.option(
    "--limit",
    type=options.Finite(min=0, min_open=True),
    metavar="SECONDS",
    help="Time within which a request must be done to count as goodput.",
)
@release.shared
@release.force
@options.as_json
def command(
    *,
    file: str,
    overrides: "Overrides",
    directory: Path | None,
    force: bool,
    as_json: bool,
    **how: Any,
) -> "Costs":
    """Measure what each drafter of MATRIX is worth: keep it, tune its draft length, or switch it off.

    Runs and diagnoses MATRIX first, since a drafter that is not right is not eligible. Then both arms run in turns,
    in one process at a time, and nothing beside them: leave the machine alone meanwhile.

    \b
    Exit codes: 0 measured, 2 bad input, 3 an arm failed or nothing could be timed,
    130 interrupted.
    """
    from specbisect.cli import worth
    from specbisect.cli.run import RUNS, Execution
    from specbisect.matrix import find, load

    path = find(file)
    asked = Asked(how.pop("rounds"), how.pop("price"), _load(how))
    execution = Execution(directory or RUNS / path.stem, **how)
    costs = study(load(path, overrides), execution, asked, force=force)
    if as_json:
        output.emit(worth.document(costs))
    else:
        click.echo(worth.plain(costs))
    return costs


def _load(how: dict[str, Any]) -> "load.Asked | None":
    from specbisect.gate import load

    slots, rate, limit = (how.pop(name) for name in ("parallel", "rate", "limit"))
    if not slots:
        if rate or limit:
            raise BadInput("--rate and --limit are about load; give the slots with --parallel")
        return None
    if not all(word.isdecimal() and int(word) for word in slots):
        raise BadInput(f"--parallel {','.join(slots)}: give numbers of slots, such as 1,2,4")
    return load.Asked(tuple(map(int, slots)), rate, limit)


def study(plan: "Plan", how: "Execution", asked: Asked, *, force: bool) -> "Costs":
    """Run and diagnose `plan`, then time it, then put a server under load if that is asked for."""
    from specbisect.cli.diagnose import diagnose
    from specbisect.cli.run import make, run_cases
    from specbisect.gate import decision
    from specbisect.gate.causes import judge
    from specbisect.gate.identity import identify
    from specbisect.gate.study import Costs, studies

    found = studies(plan)
    if asked.load:
        _check_served(plan, asked.load)
    ready = release.ready(plan, force=force)
    make(ready.files)
    with release.opened(plan, how, identify(plan)) as store:
        run_cases(plan, store, how)
        if any(row.outcome not in ("failed", "invalid") for row in store.rows()):
            diagnose(store, jobs=how.jobs, timeout=how.timeout)
        for one in found:
            _measure(one, plan, asked.rounds, store, how)
        cases = list(judge(store, store.rows()))
        return Costs(
            tuple(found),
            decision.barred(cases),
            decision.bit_identical(store, cases),
            asked.rounds,
            asked.price,
            tuple(map(str, ready.forced)),
            tuple(_loads(plan, asked.load)) if asked.load else (),
        )


def _check_served(plan: "Plan", asked: "load.Asked") -> None:
    """Raise `BadInput` when there is no llama-server, or when it cannot run a cell."""
    from specbisect.engines.server import binary
    from specbisect.gate.load import served

    binary.find()
    for cell in plan.cells():
        served(cell, max(asked.slots))


def _loads(plan: "Plan", asked: "load.Asked") -> "Iterator[load.Load]":
    from tqdm import tqdm

    from specbisect.gate.load import loads

    groups = list(plan.groups())
    total = len(asked.slots) * sum(len(cells) + 2 for cells in groups)
    with tqdm(total=total, unit="load", disable=None) as bar:
        for cells in groups:
            for one in loads(cells, plan.prompts, asked):
                yield one
                bar.update()


def _measure(one: "Study", plan: "Plan", rounds: int, store: "Store", how: "Execution") -> None:
    from tqdm import tqdm

    from specbisect.gate.study import fill, profile, weigh
    from specbisect.workers import Workers

    arms = (one.vanilla, *one.cells)
    total = len(plan.prompts) + 1 + len(arms)
    with tqdm(total=total, unit="step", disable=None, smoothing=0) as bar:
        with Workers(1, how.timeout) as workers:
            for _ in fill(one, plan.prompts, rounds, store, workers):
                bar.update()
            profile(one, plan.prompts[0], workers)
            bar.update()
        for cell in arms:
            with Workers(1, how.timeout) as fresh:
                weigh(one, cell, plan.prompts[0], fresh)
            bar.update()
