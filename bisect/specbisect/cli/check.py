"""``specbisect check``: one case, from flags."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import flags, options, output
from specbisect.cli.verdicts import Verdicts
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.cell import Case, Prompt
    from specbisect.cli.pair import Pair
    from specbisect.matrix import Plan


@click.command("check")
@click.option("-m", "--target", type=options.PATH, help="The model under test.")
@click.option("-md", "--draft", type=options.PATH, help="Draft model.")
@click.option("--drafter", metavar="METHOD", help="How tokens are drafted.  [default: draft-model]")
@flags.parameters
@click.option("-p", "--prompt", help="The prompt, used as it stands: no chat template.")
@click.option("-f", "--prompt-file", type=options.PATH, help="File with the prompt.")
@flags.axes
@options.settings
@options.timeout
@options.server
@options.as_json
def command(
    *,
    target: Path | None,
    draft: Path | None,
    drafter: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    settings: tuple[str, ...],
    timeout: float,
    as_json: bool,
    **given: Any,
) -> Verdicts:
    """Run one prompt without and with a drafter, and show where the texts part.

    \b
    specbisect check -m target.gguf -md draft.gguf --n-max 7 -p "Once upon a time"
    specbisect check -m target.gguf --drafter ngram-simple --size-n 3 -f prompt.txt

    Exit codes: 0 no difference, 1 a difference, 2 bad input, 3 failed or nothing was tested.
    """
    axes, parameters = flags.taken(given)
    if target is None:
        raise BadInput("no target is given; add -m FILE")
    method = drafter or ("draft-model" if draft else None)
    if method is None:
        raise BadInput("no drafter is given; add -md FILE, or --drafter with a method")
    table = {"method": method} | parameters | ({"model": str(draft.absolute())} if draft else {})
    plan = _plan(target, table, axes | options.axes(settings), _prompt(prompt, prompt_file))
    pair = _pair(_only_case(plan), timeout)
    if as_json:
        output.emit(pair.document())
    else:
        click.echo("\n\n".join(pair.render(output.columns())))
    return Verdicts.of([pair.verdict.outcome])


def _prompt(text: str | None, file: Path | None) -> "Prompt":
    from specbisect.cell import Prompt

    if (text is None) == (file is None):
        raise BadInput("give one prompt, as --prompt TEXT or --prompt-file FILE")
    if file is None:
        return Prompt("prompt", text or "")
    try:
        read = file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--prompt-file {file}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise BadInput(f"--prompt-file {file} is not UTF-8 text; save it as UTF-8") from None
    return Prompt(file.stem, read.removesuffix("\n"))  # as llama.cpp's -f


def _plan(target: Path, drafter: dict[str, Any], axes: dict[str, str], prompt: "Prompt") -> "Plan":
    from specbisect.matrix import Overrides, build

    tables = {"schema": "specbisect.matrix/1", "drafter": [drafter]}
    given = Overrides(targets=(target,), prompts=(prompt,), axes=axes)
    return build(tables, given, source="check")


def _only_case(plan: "Plan") -> "Case":
    from specbisect.cli.run import check

    if plan.count() != 1:
        raise BadInput(
            f"these flags make {plan.count()} cells, and check runs one; give single values, or write a matrix"
        )
    check(plan)
    return next(plan.cases())


def _pair(case: "Case", timeout: float) -> "Pair":
    from specbisect.cli.pair import Pair
    from specbisect.engines import run_arm
    from specbisect.trace import Failure
    from specbisect.workers import Workers

    with Workers(1, timeout) as workers:
        vanilla = workers.submit(run_arm, case.vanilla).result()
        if isinstance(vanilla, Failure):
            return Pair(case, vanilla, None)
        return Pair(case, vanilla, workers.submit(run_arm, case).result())
