"""``specbisect show``: what a run has found."""

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from specbisect.cli import options, output
from specbisect.cli.program import program
from specbisect.compare import Outcome
from specbisect.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from specbisect.store import Row, Store


@click.command("show")
@click.argument("directory", type=options.PATH)
@click.option("--cases", "each", is_flag=True, help="One line for each case.")
@click.option(
    "--case",
    "key",
    metavar="ID",
    help="One case, by the beginning of its id: both texts around the fork, tokens, settings.",
)
@click.option("--acceptance", is_flag=True, help="Acceptance by draft position and prompt group.")
@options.listed("--quant", metavar="TYPE", help="Only these quantisations.")
@options.listed("--drafter", metavar="METHOD", help="Only these methods of drafting.")
@options.listed("--outcome", metavar="OUTCOME", help=f"Only these: {', '.join(get_args(Outcome))}.")
@options.listed("--prompt", metavar="ID", help="Only these prompts.")
@options.only
@options.as_json
def command(
    *,
    directory: Path,
    each: bool,
    key: str | None,
    acceptance: bool,
    as_json: bool,
    only: str | None,
    **filters: tuple[str, ...],
) -> None:
    """Show what the run in DIRECTORY has found.

    For each target and drafter, the table says how many cases differ and where the earliest difference is. The exit
    code is 0 whatever is shown.
    """
    from specbisect.store import Store

    with Store.open(directory, readonly=True) as store:
        if key is not None:
            _show_case(store, key, as_json)
            return
        rows = _filtered(store, only, **filters)
        if not as_json and not rows and store.count():
            output.note("no finished case fits; leave out a filter")
        elif acceptance:
            _show_acceptance(store, rows, as_json)
        elif as_json:
            from specbisect.cli.document import document

            output.emit(document(store, rows))
        else:
            print_rows(rows, each=each)
            print_hosts(store, rows)
            suggest(store, rows, directory)


def _show_acceptance(store: "Store", rows: "Sequence[Row]", as_json: bool) -> None:
    from specbisect.cli.acceptance import documents, table
    from specbisect.gate.acceptance import by_group

    found = by_group(store, rows)
    if as_json:
        output.emit(list(documents(found)))
    else:
        click.echo(table(found))


def _show_case(store: "Store", key: str, as_json: bool) -> None:
    from pydantic_core import from_json

    from specbisect.cli.diagnose import cause
    from specbisect.cli.pair import Pair
    from specbisect.diagnose.finding import Finding

    case = store.case(key)
    vanilla = store.arm(case.vanilla.key)
    assert vanilla is not None  # it is saved before any verdict that rests on it
    pair = Pair(case, vanilla, store.arm(case.key))
    findings = store.findings(case.key)[-1:]
    if as_json:
        found = {"finding": from_json(findings[0])} if findings else {}
        output.emit(pair.document() | found)
    else:
        click.echo("\n\n".join(pair.render(output.columns())))
        for text in findings:
            click.echo(f"\n{cause(Finding.model_validate_json(text))}")


def _filtered(
    store: "Store",
    only: str | None,
    *,
    quant: Sequence[str],
    drafter: Sequence[str],
    outcome: Sequence[str],
    prompt: Sequence[str],
) -> "list[Row]":
    for word in outcome:
        if word not in get_args(Outcome):
            raise BadInput(f"--outcome {word} is none{did_you_mean(word, get_args(Outcome))}")
    wanted = {
        "quant": [q.upper() for q in quant],
        "drafter": drafter,
        "outcome": outcome,
        "prompt_id": prompt,
    }
    rows = store.rows(**{name: tuple(values) for name, values in wanted.items() if values})
    return only_rows(rows, only)


def only_rows(rows: "Iterable[Row]", pattern: str | None) -> "list[Row]":
    """The rows that fit ``--only``."""
    if pattern is None:
        return list(rows)
    from specbisect.matrix import matches

    return [row for row in rows if matches(options.named(row), pattern)]


def print_rows(rows: "Sequence[Row]", *, each: bool = False) -> None:
    """Print the table of `rows` and what it means, or a line for each."""
    from specbisect.cli import render

    if each:
        click.echo(render.cases(rows, output.columns()))
    elif rows:
        cells = render.by_cell(rows)
        click.echo(f"{render.table(cells, output.columns())}\n")
        for sentence in render.legend(cells):
            click.echo(textwrap.fill(sentence, output.columns()))


def print_hosts(store: "Store", rows: "Sequence[Row]") -> None:
    """Print how far hosts of different classes agree, if the run is on several."""
    from specbisect.cli import hosts

    if found := list(hosts.pairs(store, rows)):
        click.echo(f"\n{hosts.table(found)}")


def suggest(store: "Store", rows: "Sequence[Row]", directory: Path) -> None:
    """Say what is left to run, and what to look at next."""
    matrix, done = store.matrix(), store.count()
    planned = matrix["counts"]["cells"] * len(matrix["prompts"]["ids"])
    if done < planned:
        output.note(f"{done} of {planned} cases have finished; `specbisect run` goes on.")
    show = f"{program()} show {shlex.quote(str(directory))}"
    if any(row.label is not None for row in rows):
        output.note(f"the cause of each: {show} --cases")
    if different := [row for row in rows if row.fork is not None]:
        output.note(f"look at one: {show} --case {different[0].id[:8]}")
