"""What `gate`, `lock` and `cost` have in common: a plan that may run, run and diagnosed to its end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import options, output, servers
from specbisect.cli.where import Where, check_hosts
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.cli.run import Execution
    from specbisect.gate.identity import Identity
    from specbisect.gate.interface import Mismatch
    from specbisect.llama.quantize import Recipe
    from specbisect.matrix import Plan
    from specbisect.store import Store

_SHARED = (
    options.matrix,
    click.option("--directory", type=options.PATH, help="Run directory.  [default: runs/MATRIX]"),
    click.option("--fresh", is_flag=True, help="Discard what the run directory holds."),
    options.timeout,
    options.server,
)


force = click.option(
    "--force",
    is_flag=True,
    help="Run a drafter that does not fit its target, and mark every result.",
)


def shared(command: Any) -> Any:
    """The options that these commands share."""
    for option in reversed(_SHARED):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan that nothing stands in the way of: the files to make first, and mismatches that were overridden."""

    files: "list[tuple[Recipe, int]]"
    forced: "tuple[Mismatch, ...]"


def ready(plan: "Plan", *, where: Where | None = None, force: bool = False) -> Ready:
    """Check everything that can be known before a run; `force` lets drafters run that do not fit.

    Raises `BadInput` for the first thing that is wrong.
    """
    from specbisect.gate.acceptance import refuse_synthetic
    from specbisect.gate.interface import check
    from specbisect.llama import quantize
    from specbisect.matrix import validate_prompts

    refuse_synthetic(plan.cells())
    servers.check(plan)
    check_hosts(plan.host_classes, where)
    validate_prompts(plan)
    mismatches = check(plan)
    if mismatches and not force:
        raise BadInput(
            f"{'; '.join(map(str, mismatches))}; choose a drafter that fits, or run it with --force"
        )
    for mismatch in mismatches:
        output.note(f"forced: {mismatch}")
    files = plan.files_to_make()
    quantize.check_space(sum(size for _, size in files))
    return Ready(list(files), mismatches)


@contextmanager
def opened(plan: "Plan", how: "Execution", identity: "Identity") -> Iterator["Store"]:
    """The run directory of `plan`. Raises `BadInput` when what it holds was found by another library or machine."""
    from specbisect.store import Store

    with Store.create(how.directory, plan.digest, plan.resolved(), fresh=how.fresh) as store:
        now = {"library": identity.library.get("llama.cpp"), "cpu": identity.machine["cpu"]}
        for provenance in store.provenances():
            host = provenance.get("host", {})
            for name, value in now.items():
                if "server" not in provenance and host.get(name, value) != value:
                    raise BadInput(
                        f"{how.directory} holds results of another {name} ({host[name]}, now {value}); "
                        "--fresh runs everything again"
                    )
        with output.going_on(how.directory):
            yield store
