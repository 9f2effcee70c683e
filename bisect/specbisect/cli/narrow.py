"""``specbisect narrow``: the smallest case that still shows the same, and the nearest one that does not."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from specbisect.cli import options, output
from specbisect.cli.where import Where, check_hosts, cluster, opened

if TYPE_CHECKING:
    from specbisect.cell import Case
    from specbisect.narrow.candidate import Candidate
    from specbisect.narrow.gate import Gate
    from specbisect.narrow.result import Narrowed, Shown
    from specbisect.narrow.run import Narrowing
    from specbisect.store import Store

TRIALS = 150


@click.command("narrow")
@click.argument("directory", type=options.PATH)
@click.option(
    "--case", "key", required=True, metavar="ID", help="The case, by the beginning of its id."
)
@click.option(
    "--base",
    type=options.PATH,
    help="What the target was quantised from, to make other precisions of.  [default: the target itself]",
)
@click.option(
    "--budget-trials",
    "trials",
    type=click.IntRange(min=1),
    default=TRIALS,
    show_default=True,
    metavar="N",
    help="End the search after so many trials.",
)
@click.option(
    "--budget-seconds",
    "seconds",
    type=options.Finite(min=0, min_open=True),
    metavar="SECONDS",
    help="End the search after so long.  [default: never]",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run each candidate up to so often.",
)
@click.option(
    "--needed",
    type=click.IntRange(min=1),
    help="How many of the runs must show it.  [default: all]",
)
@click.option(
    "--retry-failed", "retry", is_flag=True, help="Try candidates again that failed before."
)
@options.jobs
@options.timeout
@cluster
@options.server
@options.as_json
def command(
    *,
    directory: Path,
    key: str,
    as_json: bool,
    jobs: int,
    timeout: float,
    where: Where | None,
    needed: int | None,
    **how: Any,
) -> "Narrowing":
    """Find the smallest case that still has the label of one in DIRECTORY.

    Everything is tried to be taken away: the drafter, settings, precision, width, prompt, drafted tokens, quantised
    tensors. The smallest case is examined in full in a fresh process and kept in DIRECTORY. The same command goes on
    where an earlier one was stopped.

    \b
    Exit codes: 1 a smallest case was found, 2 bad input, 3 the case does not
    show what its finding says or the smallest one does not, 130 interrupted.
    """
    from specbisect.errors import BadInput
    from specbisect.narrow.ddmin import Reason
    from specbisect.narrow.run import Request, narrow_case
    from specbisect.narrow.smallest import NotReproduced
    from specbisect.store import Store

    request = Request(needed=needed or how["runs"], **how)
    if request.needed > request.runs:
        raise BadInput(f"--needed {needed} is more than --runs {request.runs}; raise --runs")
    with (
        Store.open(directory) as store,
        opened(jobs, timeout, where) as workers,
        _Bar(how["trials"]) as bar,
    ):
        check_hosts([store.case(key).cell.host_class], where)
        try:
            with output.going_on(directory):
                found = narrow_case(store, workers, key, request, bar.show)
        except NotReproduced as error:
            again = f"specbisect diagnose {directory} --case {key} --again"
            raise type(error)(error.seen, f"diagnose it anew: {again}") from None
    if as_json:
        output.emit(found.narrowed.model_dump(mode="json", by_alias=True))
    else:
        click.echo("\n\n".join(render(found.narrowed)))
    if not found.holds:
        minimal = found.narrowed.minimal
        output.note(
            f"the smallest case, examined in full, shows {_label(minimal.label, minimal.kind)} instead of "
            f"{_label(found.wanted.label, found.wanted.kind)}: it is not kept"
        )
    if found.reason is Reason.INTERRUPTED:
        raise KeyboardInterrupt("the best so far is above; the same command goes on from there")
    return found


class _Bar:
    """Trials done, and the best so far, on a terminal's standard error."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="trial", disable=None, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, gate: "Gate") -> None:
        """Show how far the search is."""
        self._bar.set_postfix_str(in_short(gate.best), refresh=False)
        self._bar.update(gate.spent - self._bar.n)


def in_short(candidate: "Candidate") -> str:
    """A candidate in a few words."""
    cell = candidate.cell
    axes = len(candidate.changed())
    return (
        f"{candidate.layer} {cell.target.quant} width {cell.width}, {axes} axes, "
        f"{len(candidate.prompt)}+{cell.n_predict} tokens"
    )


def render(found: "Narrowed") -> Iterator[str]:
    """What was found, for people: the smallest case, how it was come to, and what is around it."""
    from tabulate import tabulate

    minimal, proved = found.minimal, found.proved_minimal
    yield (
        f"{_label(minimal.label, minimal.kind)}: {minimal.summary}\n"
        f"{'proved 1-minimal' if proved else 'not proved minimal'}"
        f"{f' ({found.reason})' if found.reason else ''}; {found.trials} trials, "
        f"{found.counters.decoded_tokens} tokens decoded, {found.original_decoded} by the original case"
    )
    rows = list(_differences(found.original, minimal.case))
    yield tabulate(rows, ["", "original case", "smallest case"], disable_numparse=True)
    if found.steps:
        steps = [(s.stage, s.part, s.before, s.after, s.trials) for s in found.steps]
        yield tabulate(
            steps, ["stage", "part", "before", "after", "trials"], maxcolwidths=[None, None, 30, 30]
        )
    if len(found.precisions) > 1:
        yield tabulate(
            [[_mark(p.shows, minimal.label) for p in found.precisions]],
            [p.type for p in found.precisions],
        )
    if found.widths:
        yield tabulate(
            [[_mark(w.shows, minimal.label) for w in found.widths]],
            [str(w.width) for w in found.widths],
        )
    if found.neighbours:
        near = [(n.axis, n.value, n.neighbour, n.shows) for n in found.neighbours]
        yield tabulate(
            near, ["part", "smallest case", "nearest without", "shows"], missingval="none found"
        )
    if found.interactions:
        yield "needed together: " + "; ".join(" + ".join(axes) for axes in found.interactions)
    if found.tensors:
        yield "\n".join(_tensors(found))


def _differences(original: "Case", minimal: "Case") -> Iterator[tuple[str, Any, Any]]:
    from specbisect.cell import AXES, drafter_label

    old, new = original.cell, minimal.cell
    yield "target", old.target.quant, new.target.quant
    yield "drafter", drafter_label(old.drafter), drafter_label(new.drafter)
    yield "width", old.width, new.width
    for name in AXES:
        if getattr(old, name) != getattr(new, name):
            yield name, getattr(old, name), getattr(new, name)
    ids = minimal.prompt.ids or ()
    yield "prompt", original.prompt.id, f"{len(ids)} tokens: {' '.join(map(str, ids[:8]))}"


def _tensors(found: "Narrowed") -> Iterator[str]:
    tensors = found.tensors
    assert tensors is not None
    cause = "the cause" if tensors.causal else "enough, though not the only ones"
    yield f"tensors at {tensors.unsafe}, {cause}: {', '.join(tensors.names)}"
    yield f"  only these at {tensors.safe}: {tensors.without}; only these at {tensors.unsafe}: {tensors.alone}"
    if tensors.enough:
        yield f"  in the smallest case: {', '.join(tensors.enough)}"


def _mark(shown: "Shown", label: str) -> str:
    return {"none": "no", label: "yes"}.get(shown, shown)


def _label(label: str, kind: str) -> str:
    return f"{label} ({kind})" if kind else label


def smallest(store: "Store", key: str, timeout: float | None) -> "Narrowed":
    """The smallest case of an open run directory, found with the usual budget and a progress bar."""
    from specbisect.narrow.run import Request, narrow_case
    from specbisect.workers import Workers

    with Workers(1, timeout) as workers, _Bar(TRIALS) as bar:
        return narrow_case(store, workers, key, Request(trials=TRIALS), bar.show).narrowed
