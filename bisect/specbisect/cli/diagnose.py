"""``specbisect diagnose``: why the cases of a run depart."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import options, output
from specbisect.cli.where import Where, check_hosts, cluster, opened

if TYPE_CHECKING:
    from specbisect.diagnose.finding import Finding
    from specbisect.store import Store


@dataclass(frozen=True, slots=True)
class Causes:
    """How many cases have which label."""

    labels: Mapping[str, int]

    @property
    def exit_code(self) -> int:
        """1 when a cause was found for any case; 3 when one stayed unexplained and none has a cause; else 0."""
        causes = {label for label, count in self.labels.items() if count} - {"none"}
        if causes - {"unexplained"}:
            return 1
        return 3 if causes else 0

    def __str__(self) -> str:
        total = sum(self.labels.values())
        each = ", ".join(f"{count} {label}" for label, count in sorted(self.labels.items()))
        return f"{total} case{'s' if total != 1 else ''} diagnosed: {each or 'none'}"


@click.command("diagnose")
@click.argument("directory", type=options.PATH)
@click.option(
    "--audit",
    is_flag=True,
    help="Take every case, also those that agree: a memory that is silently wrong is a finding.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How often each arm is repeated.",
)
@click.option(
    "--reference/--no-reference",
    default=True,
    help="Allow a float32 copy of a target to be made, where a change looks too large.  [default: allow]",
)
@click.option("--again", is_flag=True, help="Diagnose cases anew that have a finding.")
@click.option("--case", "key", metavar="ID", help="One case, by the beginning of its id.")
@options.only
@options.jobs
@options.timeout
@cluster
@options.as_json
def command(*, directory: Path, as_json: bool, **how: Any) -> Causes:
    """Find the cause of every case in DIRECTORY that departs, by experiment.

    Each case is replayed, repeated and taken apart in a child process; what proves its cause is kept in DIRECTORY.
    Cases that have a finding are left as they are, so the same command goes on where an earlier one ended.

    \b
    Exit codes: 0 no cause to find, 1 causes found, 2 bad input,
    3 only unexplained ones, 130 interrupted.
    """
    from specbisect.store import Store

    with Store.open(directory) as store:
        with output.going_on(directory):
            causes = diagnose(store, **how)
        if as_json:
            output.emit([f.model_dump(mode="json", by_alias=True) for f in findings(store)])
        else:
            click.echo(table(store))
            output.note(str(causes))
    return causes


def diagnose(
    store: "Store",
    *,
    jobs: int,
    timeout: float | None,
    where: Where | None = None,
    only: str | None = None,
    key: str | None = None,
    **how: Any,
) -> Causes:
    """Diagnose cases of an open run directory, with a progress bar; `how` is what a `Request` takes."""
    from tqdm import tqdm

    from specbisect.diagnose.run import Progress, Request
    from specbisect.diagnose.run import diagnose as run
    from specbisect.matrix import matches
    from specbisect.store import Row

    one = None if key is None else store.case(key).key
    if store.count():
        options.check_only(only, map(options.named, store.rows()))

    def wanted(row: Row) -> bool:
        fits = only is None or matches(options.named(row), only)
        taken = fits if one is None else row.id == one
        if taken:
            check_hosts([row.cell.host_class], where)
        return taken

    with (
        opened(jobs, timeout, where) as workers,
        tqdm(unit="case", disable=None, smoothing=0) as bar,
    ):

        def show(progress: Progress) -> None:
            bar.total = progress.total
            bar.set_postfix(progress.labels, refresh=False)
            bar.update(sum(progress.labels.values()) - bar.n)

        if one is not None:
            how["audit"] = True  # whoever names a case wants to know about it
        request = Request(**how)
        return Causes(run(store, workers, request, wanted=wanted, progress=show))


def findings(store: "Store") -> "list[Finding]":
    """The latest finding of every case that has one, in the order of the plan."""
    from specbisect.diagnose.finding import Finding

    latest = (store.findings(row.id)[-1:] for row in store.rows())
    return [Finding.model_validate_json(text) for (text,) in filter(None, latest)]


def table(store: "Store") -> str:
    """One line a finding: where, what, and the evidence in words."""
    from tabulate import tabulate

    from specbisect.cell import drafter_label

    lines = [
        (
            finding.case.key[:8],
            finding.case.cell.target.quant,
            f"{drafter_label(finding.case.cell.drafter)} {finding.case.cell.width - 1}",
            finding.case.prompt.id,
            finding.verdict.fork,
            "+".join((finding.label, *finding.also)),
            finding.summary,
        )
        for finding in findings(store)
    ]
    width = max(30, output.columns() - 70)
    heads = ("case", "target", "drafter", "prompt", "fork", "label", "evidence")
    return tabulate(lines, heads, maxcolwidths=[None] * 6 + [width], missingval="–")


def cause(finding: "Finding") -> str:
    """A finding as a paragraph: the label, the evidence in words, and every experiment in a line."""
    import textwrap

    from tabulate import tabulate

    label = "+".join((finding.label, *finding.also))
    kind = f" ({finding.kind})" if finding.kind else ""
    head = textwrap.fill(f"cause: {label}{kind}: {finding.summary}", output.columns())
    lines = [(e.experiment, e.run, e.outcome) for e in finding.evidence]
    width = max(24, (output.columns() - 26) // 2)
    heads = ("experiment", "what was run", "what came out")
    return f"{head}\n\n{tabulate(lines, heads, maxcolwidths=[None, width, width])}"
