"""``specbisect report``: what a run or a case has shown, for others to read and to check."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specbisect.cli import options, output
from specbisect.errors import BadInput, EngineFault

if TYPE_CHECKING:
    from specbisect.cell import Model
    from specbisect.diagnose.finding import Finding
    from specbisect.store import Store

FORMATS = ("html", "md", "json", "junit")


def _named(_context: click.Context, _parameter: click.Parameter, value: str) -> Path:
    """The directory of that name. Raises `BadInput` for an empty one: `Path` takes it for the current directory."""
    if not value.strip():
        raise BadInput("-o is empty; name a directory, or . for the current one")
    return Path(value)


@click.command("report")
@click.argument("directory", type=options.PATH)
@click.option("--case", "key", metavar="ID", help="One case, by the beginning of its id.")
@click.option(
    "-o",
    "--output",
    "target",
    callback=_named,
    required=True,
    help="Directory to write to; made if need be.",
    metavar="PATH",
)
@click.option(
    "--format",
    "formats",
    type=click.Choice(FORMATS),
    multiple=True,
    help="Of a whole run: how to write it; may be repeated.  [default: html]",
)
@click.option(
    "--redact-prompt",
    is_flag=True,
    help="Of a case: leave out the prompt's text and token ids, and write their SHA-256 instead.",
)
@click.option(
    "--capsule",
    is_flag=True,
    help="Of a case: add the operation that departs first, as `specbisect capsule` takes it out.",
)
@options.as_json
def command(
    *,
    directory: Path,
    key: str | None,
    target: Path,
    formats: tuple[str, ...],
    redact_prompt: bool,
    capsule: bool,
    as_json: bool,
) -> None:
    """Write a report on the run in DIRECTORY: a page for the whole of it or, with --case, an issue to file.

    The page is one file that needs no network. For a case there are issue.md, under the headings of llama.cpp's bug
    form, repro.py and repro.sh, which show it without specbisect, git-bisect.md and finding.json. No report names
    this user, this host, home directories or keys.
    """
    from specbisect.store import Store

    if key is not None and formats:
        raise BadInput(
            "--format is for whole runs; with --case, leave it out: every file is written"
        )
    if key is None and capsule:
        raise BadInput("--capsule is for one case; add --case ID")
    if key is None and redact_prompt:
        raise BadInput("--redact-prompt is for one case; a report on a run shows no prompts")
    with Store.open(directory, readonly=True) as store:
        if key is not None:
            paths = _of_case(store, key, target, redact_prompt=redact_prompt, capsule=capsule)
        else:
            paths = _of_run(store, target, formats or FORMATS[:1])
    if as_json:
        output.emit({"schema": "specbisect.written/1", "files": [str(p) for p in paths]})
    else:
        click.echo("\n".join(map(str, paths)))


def _of_case(
    store: "Store", key: str, target: Path, *, redact_prompt: bool, capsule: bool
) -> list[Path]:
    from specbisect.ops.evidence import annotated
    from specbisect.report import case, narrowing, stored

    key = store.case(key).key
    finding, narrowed = stored.latest(store, key)
    if finding.label == "none":
        raise BadInput(f"case {key[:8]} shows no difference; there is nothing to report")
    if narrowed is not None:
        output.note(f"issue.md and repro.py are about the {narrowing.origin(key, finding)}")
    with suppress(EngineFault):  # the report says all the rest without the first departing node
        if narrowed is None:
            finding = annotated(finding)
        else:
            narrowed = narrowed.model_copy(update={"minimal": annotated(narrowed.minimal)})
    created = datetime.now(UTC).isoformat(timespec="seconds")
    texts = case.files(finding, narrowed, created=created, redact_prompt=redact_prompt)
    paths = case.write(target, texts)
    for model in dict.fromkeys(_models(finding if narrowed is None else narrowed.minimal, finding)):
        output.note(f"{Path(model.path).name} is {model.path}")
    return paths + (_capsule(narrowed.minimal if narrowed else finding, target) if capsule else [])


def _models(*findings: "Finding") -> "Iterator[Model]":
    """The models that the programs of a report are given, as far as they are files here."""
    for finding in findings:
        cell = finding.case.cell
        for model in (cell.target, getattr(cell.drafter, "model", None)):
            if model is not None and model.path:
                yield model


def _capsule(finding: "Finding", target: Path) -> list[Path]:
    """The operation that departs first, taken out of the model, beside the report."""
    from specbisect.cli.capsule import open_up
    from specbisect.ops.evidence import KERNELS, spot_of

    if finding.label not in KERNELS:
        raise BadInput(
            f"a case with cause {finding.label} has no operation to take out; leave out --capsule"
        )
    spot = spot_of(finding)
    found = open_up(finding.case, spot, [len(spot.batch)], target, confirm=False)
    return [] if found.program is None else [target / "capsule.gguf", found.program]


def _of_run(store: "Store", target: Path, formats: Iterable[str]) -> list[Path]:
    from specbisect.report import case, run
    from specbisect.report import formats as made

    found = run.read(store)
    if not found.entries:
        raise BadInput(f"{store.path} holds no finished case; run it first")
    wanted = [made.FORMATS[name] for name in dict.fromkeys(formats)]
    return case.write(target, {name: make(found) for name, make in wanted})
