"""``specbisect cost``: is this drafter worth running at all?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import options, output, release

if TYPE_CHECKING:
    from specbisect.cli.run import Execution
    from specbisect.gate.study import Costs, Study
    from specbisect.matrix import Overrides, Plan
    from specbisect.store import Store


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
    type=click.FloatRange(min=0),
    metavar="PER_HOUR",
    help="What an hour of this machine costs, for a price per million tokens.",
)
@release.shared
@release.force
@options.as_json
def command(
    *,
    file: str,
    overrides: "Overrides",
    directory: Path | None,
    rounds: int,
    price: float | None,
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
    execution = Execution(directory or RUNS / path.stem, **how)
    costs = study(load(path, overrides), execution, rounds=rounds, price=price, force=force)
    if as_json:
        output.emit(worth.document(costs))
    else:
        click.echo(worth.plain(costs))
    return costs


def study(
    plan: "Plan", how: "Execution", *, rounds: int, price: float | None, force: bool
) -> "Costs":
    """Run and diagnose `plan`, then time it."""
    from specbisect.cli.diagnose import diagnose
    from specbisect.cli.run import make, run_cases
    from specbisect.gate import decision
    from specbisect.gate.causes import judge
    from specbisect.gate.identity import identify
    from specbisect.gate.study import Costs, studies

    found = studies(plan)
    ready = release.ready(plan, force=force)
    make(ready.files)
    with release.opened(plan, how, identify(plan)) as store:
        run_cases(plan, store, how)
        if any(row.outcome not in ("failed", "invalid") for row in store.rows()):
            diagnose(store, jobs=how.jobs, timeout=how.timeout)
        for one in found:
            _measure(one, plan, rounds, store, how)
        cases = list(judge(store, store.rows()))
        return Costs(
            tuple(found),
            decision.barred(cases),
            decision.bit_identical(store, cases),
            rounds,
            price,
            tuple(map(str, ready.forced)),
        )


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
