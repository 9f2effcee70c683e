"""``specbisect gate``: may this model go into service with this drafter?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import options, output, release
from specbisect.cli.where import asking, cluster
from specbisect.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbisect.cli.run import Execution
    from specbisect.gate.identity import Part
    from specbisect.gate.lock import Lock
    from specbisect.gate.policy import Policy
    from specbisect.gate.verdict import GateVerdict
    from specbisect.matrix import Overrides, Plan

FORMATS = ("text", "md", "json", "junit")


@click.command("gate")
@click.argument("file", metavar="MATRIX")
@click.option(
    "--policy",
    default="gate",
    show_default=True,
    metavar="POLICY",
    help="What is allowed: a file, or the name of a shipped policy.",
)
@click.option("--lock", "lock_file", type=options.PATH, help="The lock to compare with.")
@options.listed(
    "--accept",
    metavar="PART",
    help="Changes that are meant: target, drafter, library, machine, settings, prompts.",
)
@release.shared
@release.force
@options.jobs
@cluster
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="How the verdict is written on standard output.",
)
@options.as_json
def command(
    *,
    file: str,
    overrides: "Overrides",
    policy: str,
    lock_file: Path | None,
    accept: tuple[str, ...],
    directory: Path | None,
    force: bool,
    **how: Any,
) -> "GateVerdict":
    """Run MATRIX, diagnose what departs, and hold all of it against a policy and a lock.

    MATRIX is a file or the name of a shipped matrix, such as release-gate. The same command again goes on where an
    earlier one ended.

    \b
    Exit codes: 0 passed, 1 failed, 2 bad input or not what was locked,
    3 inconclusive, 130 interrupted.
    """
    from specbisect.cli.run import RUNS, Execution
    from specbisect.gate import lock as locks
    from specbisect.gate import policy as policies
    from specbisect.matrix import find, load

    form = how.pop("form")
    form = "json" if how.pop("as_json") else form
    path = find(file)
    rules = policies.load(policies.find(policy))
    locked = locks.load(lock_file) if lock_file else None
    parts = _parts(accept, locked)
    execution = Execution(directory or RUNS / path.stem, **how)
    plan = load(path, overrides)
    verdict = judge(plan, rules, locked, parts, execution, force=force)
    _print(verdict, path.stem, form)
    return verdict


def _parts(accept: "Sequence[str]", locked: "Lock | None") -> "list[Part]":
    from specbisect.gate.identity import PARTS

    for word in accept:
        if word not in PARTS:
            raise BadInput(f"--accept {word} is no part of a lock{did_you_mean(word, PARTS)}")
    if accept and locked is None:
        raise BadInput("--accept says which change of a lock is meant; give the lock with --lock")
    return [part for part in PARTS if part in accept]


def judge(
    plan: "Plan",
    rules: "Policy",
    locked: "Lock | None",
    accept: "Sequence[Part]",
    how: "Execution",
    *,
    force: bool,
) -> "GateVerdict":
    """Run and diagnose `plan`, and evaluate what came of it.

    Raises `BadInput` before anything runs when a drafter does not fit, or when something is not as it was locked.
    """
    from specbisect.cli.diagnose import diagnose
    from specbisect.cli.run import make, run_cases
    from specbisect.gate.identity import identify, resolve
    from specbisect.gate.lock import compare
    from specbisect.gate.verdict import evaluate

    ready = release.ready(plan, where=how.where, force=force)
    make(ready.files)
    identity = identify(plan, asking(how.where))
    if locked is None:
        if rules.acceptance:
            output.note("without --lock, acceptance is held against fixed floors only")
    else:
        compare(locked.identity, identity, accept)
    meant: tuple[str, ...] = ()
    with release.opened(plan, how, identity) as store:
        run_cases(plan, store, how)
        if locked is not None:
            meant = compare(locked.identity, resolve(identity, store.rows()), accept)
        for line in meant:
            output.note(f"accepted: {line}")
        if any(row.outcome not in ("failed", "invalid") for row in store.rows()):
            diagnose(
                store,
                jobs=how.jobs,
                timeout=how.timeout,
                where=how.where,
                audit=rules.audit,
            )
        baseline = locked.baseline(plan) if locked else None
        forced = [str(mismatch) for mismatch in ready.forced]
        return evaluate(store, store.rows(), rules, baseline, forced=forced, accepted=meant)


def _print(verdict: "GateVerdict", name: str, form: str) -> None:
    from specbisect.cli import verdict as text
    from specbisect.gate.junit import junit

    match form:
        case "json":
            output.emit(text.document(verdict))
        case "junit":
            click.echo(junit(verdict, name), nl=False)
        case "md":
            click.echo(text.markdown(verdict, name))
        case _:
            click.echo(text.plain(verdict, output.columns()))
