"""``specbisect lock``: pin everything a good run depended on, and the acceptance its drafters had."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import acceptance, options, output, release
from specbisect.errors import EngineFault

if TYPE_CHECKING:
    from specbisect.matrix import Overrides


@click.command("lock")
@click.argument("file", metavar="MATRIX")
@click.option(
    "-o",
    "--output",
    "lock_file",
    type=options.PATH,
    default="specbisect.lock",
    show_default=True,
    help="The lock to write.",
)
@release.shared
@options.jobs
@options.as_json
def command(
    *,
    file: str,
    overrides: "Overrides",
    lock_file: Path,
    directory: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Run MATRIX and write down what it is of: models, tokenizers, library, machine, settings, prompts.

    The acceptance of every drafter on every prompt group goes with it, for `specbisect gate` to compare with. Cases
    may depart (the gate judges that); none may fail.
    """
    from specbisect.cli.run import RUNS, Execution, make, run_cases
    from specbisect.gate import lock as locks
    from specbisect.gate.acceptance import by_group
    from specbisect.gate.identity import changes, identify, resolve
    from specbisect.matrix import find, load

    path = find(file)
    execution = Execution(directory or RUNS / path.stem, **how)
    plan = load(path, overrides)
    earlier = locks.load(lock_file) if lock_file.exists() else None
    make(release.ready(plan).files)
    identity = identify(plan)
    with release.opened(plan, execution, identity) as store:
        run_cases(plan, store, execution)
        rows = list(store.rows())
        for row in rows:
            if row.outcome in ("failed", "invalid"):
                raise EngineFault("lock", f"case {row.id[:8]} {row.outcome}: {row.reason}")
        counts = by_group(store, rows)
    made = locks.Lock.make(plan, resolve(identity, rows), counts)
    made.write(lock_file)
    if as_json:
        output.emit(made.model_dump(mode="json", by_alias=True))
    else:
        click.echo(acceptance.table(counts))
    if earlier is not None:
        for lines in changes(earlier.identity, made.identity).values():
            for line in lines:
                output.note(f"changed: {line}")
    output.note(f"locked in {lock_file}")
