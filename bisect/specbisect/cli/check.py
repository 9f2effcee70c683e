"""``specbisect check``: one case, from flags or from a pasted command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cell import Prompt
from specbisect.cli import flags, options, output
from specbisect.cli.asked import Asked, from_line, from_report, parse_maps, read_prompt
from specbisect.cli.verdicts import Verdicts
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.cell import Case
    from specbisect.cli.pair import Pair


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
@options.timeout
@options.server
@options.as_json
def command(
    *,
    cmdline: str | None,
    issue_file: Path | None,
    maps: tuple[str, ...],
    timeout: float,
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
    pair = _run(_case(asked), timeout)
    if as_json:
        read = {"account": asked.account, "warnings": asked.warnings}
        output.emit(pair.document() | (read if cmdline or issue_file else {}))
    else:
        click.echo("\n\n".join(pair.render(output.columns())))
    return Verdicts.of([pair.verdict.outcome])


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


def _case(asked: Asked) -> "Case":
    """The one case that is asked for, checked as far as can be without running it."""
    from specbisect.cli.run import check
    from specbisect.matrix import Overrides, build

    if asked.target is None:
        raise BadInput("no target is given; add -m FILE")
    if asked.prompt is None:
        raise BadInput("no prompt is given; add --prompt TEXT or --prompt-file FILE")
    overrides = Overrides(targets=(asked.target,), prompts=(asked.prompt,), axes=asked.axes)
    plan = build(asked.tables(), overrides, source="check")
    if plan.count() != 1:
        raise BadInput(
            f"these flags make {plan.count()} cells, and check runs one; give single values, or write a matrix"
        )
    check(plan)
    return next(plan.cases())


def _run(case: "Case", timeout: float) -> "Pair":
    from specbisect.cli.pair import Pair
    from specbisect.engines import run_arm
    from specbisect.trace import Failure
    from specbisect.workers import Workers

    with Workers(1, timeout) as workers:
        vanilla = workers.submit(run_arm, case.vanilla).result()
        if isinstance(vanilla, Failure):
            return Pair(case, vanilla, None)
        return Pair(case, vanilla, workers.submit(run_arm, case).result())
