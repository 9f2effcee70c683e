"""``specbisect check``: one case, from flags or from a pasted command line."""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cell import Prompt
from specbisect.cli import flags, options, output
from specbisect.cli.asked import Asked, from_line, from_report, parse_maps, read_prompt
from specbisect.cli.verdicts import Verdicts
from specbisect.cli.where import check_hosts
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specbisect.cli.pair import Pair
    from specbisect.diagnose.finding import Finding
    from specbisect.matrix import Plan
    from specbisect.narrow.result import Narrowed


@click.command("check")
@click.option("-m", "--target", type=options.PATH, help="The model under test.")
@click.option("-md", "--draft", type=options.PATH, help="Draft model.")
@click.option("--drafter", metavar="METHOD", help="How tokens are drafted.  [default: draft-model]")
@flags.parameters
@click.option("-p", "--prompt", help="The prompt, used as it stands: no chat template.")
@click.option("-f", "--prompt-file", type=options.PATH, help="File with the prompt.")
@click.option("--cmdline", metavar="LINE", help="A llama.cpp command line, pasted in quotes.")
@click.option("--issue-file", type=options.PATH, help="A bug report to read the case from.")
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="FROM=TO",
    help="Where a path of LINE is on this machine.",
)
@flags.axes
@options.settings
@click.option(
    "-o",
    "--output",
    "directory",
    type=options.PATH,
    help="Keep the run there, for narrow and report.  [default: kept nowhere]",
)
@click.option("--fresh", is_flag=True, help="Discard what that directory holds.")
@click.option("--diagnose", is_flag=True, help="Find the cause, also when the arms agree.")
@click.option("--narrow", is_flag=True, help="Then find the smallest case with that cause.")
@options.timeout
@options.server
@options.as_json
def command(
    *,
    cmdline: str | None,
    issue_file: Path | None,
    maps: tuple[str, ...],
    directory: Path | None,
    as_json: bool,
    **given: Any,
) -> Verdicts:
    """Run one prompt without and with a drafter.

    Shows both texts, and where they part if they do.

    \b
    specbisect check -m target.gguf -md draft.gguf --n-max 7 -p "Once upon a time"
    specbisect check -m target.gguf --drafter ngram-simple --size-n 3 -f prompt.txt
    specbisect check --cmdline 'llama-server -m a.gguf -md b.gguf --spec-type draft-simple' -f prompt.txt

    Exit codes: 0 no difference, 1 a difference, 2 bad input, 3 failed or nothing was tested.
    """
    asked = _pasted(cmdline, issue_file, tuple(parse_maps(maps))).under(_flags(given))
    for line in asked.account:
        output.note(line)
    for warning in asked.warnings:
        output.note(f"warning: {warning}")
    read = {"account": asked.account, "warnings": asked.warnings}
    with tempfile.TemporaryDirectory(prefix="specbisect-") as scratch:
        plan = _plan(asked)
        with output.going_on(directory) if directory else nullcontext():
            found = _run(plan, directory or Path(scratch) / "check", given)
    if as_json:
        output.emit(found.document() | (read if cmdline or issue_file else {}))
    else:
        click.echo("\n\n".join(found.render(output.columns())))
    return Verdicts.of([found.pair.verdict.outcome])


@dataclass(frozen=True, slots=True)
class Found:
    """What came of the case: its arms, its finding and the smallest case, as far as they were asked for."""

    pair: "Pair"
    finding: "Finding | None" = None
    narrowed: "Narrowed | None" = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        more = {"finding": self.finding, "narrowed": self.narrowed}
        return self.pair.document() | {
            name: value.model_dump(mode="json", by_alias=True)
            for name, value in more.items()
            if value is not None
        }

    def render(self, width: int) -> "Iterator[str]":
        """As paragraphs."""
        from specbisect.cli import diagnose, narrow

        yield from self.pair.render(width)
        if self.finding is not None:
            yield diagnose.cause(self.finding)
        if self.narrowed is not None:
            yield from narrow.render(self.narrowed)


def _pasted(line: str | None, report: Path | None, maps: tuple[tuple[str, str], ...]) -> Asked:
    if line is not None and report is not None:
        raise BadInput("--cmdline and --issue-file are two ways to say the same; give one")
    if line is not None:
        return from_line(line, maps)
    return from_report(report, maps) if report else Asked()


def _flags(given: dict[str, Any]) -> Asked:
    axes, drafter = flags.taken(given)
    if given["drafter"]:
        drafter["method"] = given["drafter"]
    text, file = given["prompt"], given["prompt_file"]
    if text is not None and file is not None:
        raise BadInput("--prompt and --prompt-file are two prompts; give one")
    return Asked(
        target=given["target"],
        draft=given["draft"],
        drafter=drafter,
        axes=axes | options.axes(given["settings"]),
        prompt=read_prompt(file) if file else Prompt("prompt", text) if text is not None else None,
    )


def _plan(asked: Asked) -> "Plan":
    """A plan of the one case that is asked for, checked as far as can be without running it."""
    from specbisect.cli.run import check
    from specbisect.matrix import Impossible, Overrides, build

    if asked.target is None:
        raise BadInput("no target is given; add -m FILE")
    if asked.prompt is None:
        raise BadInput("no prompt is given; add --prompt TEXT or --prompt-file FILE")
    overrides = Overrides(targets=(asked.target,), prompts=(asked.prompt,), axes=asked.axes)
    tables = asked.tables()
    try:
        plan = build(tables, overrides, source="check")
    except Impossible as error:
        raise BadInput(error.reason) from None
    except BadInput as error:
        raise BadInput(flags.in_flags(str(error))) from None
    if plan.count() != 1:
        raise BadInput(
            f"these flags make {plan.count()} cells, and check runs one; give single values, or write a matrix"
        )
    check(plan)
    check_hosts(plan.host_classes, None)
    return plan


def _run(plan: "Plan", directory: Path, given: dict[str, Any]) -> Found:
    from specbisect.cli import diagnose, narrow
    from specbisect.cli.pair import Pair
    from specbisect.narrow.run import nothing_to_narrow
    from specbisect.runner import run
    from specbisect.store import Store
    from specbisect.workers import Workers

    (case,) = plan.cases()
    with Store.create(directory, plan.digest, plan.resolved(), fresh=given["fresh"]) as store:
        with Workers(1, given["timeout"]) as workers:
            run([case], store, workers)
        vanilla = store.arm(case.vanilla.key)
        assert vanilla is not None  # it is saved before any verdict that rests on it
        pair = Pair(case, vanilla, store.arm(case.key))
        if not (given["diagnose"] or given["narrow"]) or pair.verdict.outcome in (
            "failed",
            "invalid",
        ):
            return Found(pair)
        diagnose.diagnose(store, jobs=1, timeout=given["timeout"], key=case.key)
        (finding,) = diagnose.findings(store)
        if not given["narrow"]:
            return Found(pair, finding)
        if reason := nothing_to_narrow(finding):
            output.note(reason)
            return Found(pair, finding)
        return Found(pair, finding, narrow.smallest(store, case.key, given["timeout"]))
