"""``specbisect run``: a matrix in, the first fork of every case out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from specbisect.cell import Case
from specbisect.cli import options, output, servers
from specbisect.cli.verdicts import Verdicts
from specbisect.cli.where import Where, check_cluster, check_hosts, cluster, opened

if TYPE_CHECKING:
    from specbisect.llama.quantize import Recipe
    from specbisect.matrix import Overrides, Plan
    from specbisect.runner import Summary
    from specbisect.store import Store

RUNS = Path("runs")
"""Where the directories of runs go that nobody names."""
_LINE_S = 30.0
"""Time between two lines about how far a run is, where no bar can be shown."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a plan is run and shown; nothing of it changes what a case finds."""

    directory: Path
    jobs: int = 1
    timeout: float | None = None
    where: Where | None = None
    only: str | None = None
    max_cases: int | None = None
    fresh: bool = False
    retry_failed: bool = False
    screen: bool = False
    diagnose: bool = False
    audit: bool = False
    as_json: bool = False


@click.command("run")
@click.argument("file", metavar="MATRIX")
@options.matrix
@click.option(
    "-o", "--output", "directory", type=options.PATH, help="Run directory.  [default: runs/MATRIX]"
)
@options.only
@click.option("--max-cases", type=click.IntRange(min=1), help="Take only the first so many cases.")
@options.jobs
@options.timeout
@cluster
@options.server
@click.option("--fresh", is_flag=True, help="Discard what the run directory holds.")
@click.option("--retry-failed", is_flag=True, help="Run cases again that failed.")
@click.option(
    "--screen",
    is_flag=True,
    help="First rule out cases whose batches give the bits of single rows.",
)
@click.option("--diagnose", is_flag=True, help="Then find the cause of every case that departs.")
@click.option("--audit", is_flag=True, help="Then replay every case, also those that agree.")
@options.as_json
def command(*, file: str, overrides: "Overrides", directory: Path | None, **how: Any) -> Verdicts:
    """Run every case of MATRIX and show which differ.

    MATRIX is a file or the name of a shipped matrix. The same command again goes on where an earlier one ended.

    \b
    Exit codes: 0 no case differs, 1 some do, 2 bad input,
    3 none differs but some failed or nothing was tested, 130 interrupted.
    """
    from specbisect.matrix import find, load

    path = find(file)
    execution = Execution(directory or RUNS / path.stem, **how)
    return execute(load(path, overrides), execution)


def execute(plan: "Plan", how: Execution) -> Verdicts:
    """Check everything, make the files that are missing, run all cases and print what they found.

    Raises `BadInput` before anything is written for all that can be known by then.
    """
    from specbisect.cli.diagnose import diagnose
    from specbisect.store import Store

    options.check_only(how.only, plan.cases())
    files = check(plan)
    check_hosts(plan.host_classes, how.where)
    check_cluster(how.where)
    with Store.create(how.directory, plan.digest, plan.resolved(), fresh=how.fresh) as store:
        with output.going_on(how.directory):
            make(files)
            summary = run_cases(plan, store, how)
            if how.diagnose or how.audit:
                diagnose(
                    store,
                    jobs=how.jobs,
                    timeout=how.timeout,
                    where=how.where,
                    only=how.only,
                    audit=how.audit,
                )
        _print(store, how)
    return Verdicts(summary.outcomes)


def check(plan: "Plan") -> "list[tuple[Recipe, int]]":
    """The files to make, with their sizes, when nothing stands in the way of running `plan`; else `BadInput`."""
    from specbisect.llama import quantize
    from specbisect.matrix import validate_drafters, validate_prompts

    servers.check(plan)
    validate_prompts(plan)
    validate_drafters(plan)
    files = plan.files_to_make()
    quantize.check_space(sum(size for _, size in files))
    return list(files)


def make(files: "list[tuple[Recipe, int]]") -> None:
    """Make quantised files, saying which."""
    from specbisect.llama import quantize

    for number, (recipe, size) in enumerate(files, 1):
        said = f"{recipe.type} of {recipe.base.name}, {output.mebibytes(size)}"
        output.note(f"making {said} ({number} of {len(files)})")
        quantize.make(recipe)


def run_cases(plan: "Plan", store: "Store", how: Execution) -> "Summary":
    """Run what `store` lacks of `plan`, with a progress bar; its files must have been made."""
    from specbisect.cli.screen import both, screened
    from specbisect.runner import run

    if how.where is None:
        _warn_of_crowding(plan, how.jobs)
    total = replace(plan, only=how.only).count_cases()
    with (
        opened(how.jobs, how.timeout, how.where) as workers,
        _Bar(min(total, how.max_cases or total)) as bar,
    ):
        wanted: Callable[[Case], bool] = _Wanted.of(how)
        if how.screen:
            wanted = both(screened(plan, workers), wanted)
        return run(
            plan.cases(),
            store,
            workers,
            wanted=wanted,
            progress=bar.show,
            retry_failed=how.retry_failed,
        )


def _warn_of_crowding(plan: "Plan", jobs: int) -> None:
    from specbisect.llama.library import cores

    threads = max(n or cores() for block in plan.blocks for n in block.axes["n_threads"])
    if jobs > 1 and jobs * threads > cores():
        fair = cores() // jobs
        mend = (
            f"--set n_threads={fair} is faster, though another thread count is another configuration"
            if fair
            else f"--jobs {max(1, cores() // threads)} is no slower"
        )
        output.note(
            f"{jobs} jobs with {threads} thread{'s' if threads != 1 else ''} each crowd {cores()} cores; {mend}"
        )


@dataclass(slots=True)
class _Wanted:
    """Says in the order of the plan which cases to run."""

    only: str | None
    left: int | None

    @classmethod
    def of(cls, how: Execution) -> Self:
        return cls(how.only, how.max_cases)

    def __call__(self, case: Case) -> bool:
        from specbisect.matrix import matches

        if self.left == 0 or (self.only is not None and not matches(case, self.only)):
            return False
        if self.left is not None:
            self.left -= 1
        return True


class _Bar:
    """Cases done, forks, failures and time left, on a terminal's standard error; elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        # Without smoothing, the time left is reckoned from all cases that ran now, and none that had ended before.
        self._bar = tqdm(total=total, unit="case", disable=None, smoothing=0, dynamic_ncols=True)
        self._total, self._said = total, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, summary: "Summary") -> None:
        """Show how far the run is."""
        if self._bar.disable:
            if (now := time.monotonic()) >= self._said + _LINE_S:
                self._said = now
                output.note(
                    f"{summary.done} of {self._total} cases, "
                    f"forks {summary.forks}, failed {summary.failures}"
                )
            return
        self._bar.initial = summary.resumed
        self._bar.set_postfix(forks=summary.forks, failed=summary.failures, refresh=False)
        self._bar.update(summary.done - self._bar.n)


def _print(store: "Store", how: Execution) -> None:
    from specbisect.cli.show import only_rows, print_hosts, print_rows, suggest

    rows = only_rows(store.rows(), how.only)
    if how.as_json:
        from specbisect.cli.document import document

        output.emit(document(store, rows))
        return
    print_rows(rows)
    print_hosts(store, rows)
    suggest(store, rows, how.directory)
