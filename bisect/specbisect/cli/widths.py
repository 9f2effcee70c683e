"""``specbisect widths``: at which widths a target gives other bits than at width 1, how far off, and from where."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cell import Case
from specbisect.cli import options, output
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.matrix import Overrides, Plan
    from specbisect.ops.invariance import Invariance
    from specbisect.ops.profile import Profile
    from specbisect.trace import Failure

PROMPTS = 4
ROWS = 16
"""Rows of the batch that a table of types is made for."""

WIDTH_HEADS = (
    "width",
    "rows",
    "same bits",
    "max |Δ|",
    "RMS Δ",
    "flips/1000",
    "inside",
    "first node",
)
TYPE_HEADS = ("type", "order", "departs at", "relative")


@dataclass(slots=True)
class Profiles:
    """Profiles and tables of types, by what people call the target and its settings; and what failed."""

    found: dict[str, "Profile"] = field(default_factory=dict)
    types: dict[str, Sequence["Invariance"]] = field(default_factory=dict)
    failed: dict[str, "Failure"] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1 when bits depart anywhere, else 3 when something failed, else 0."""
        if any(profile.departs() for profile in self.found.values()):
            return 1
        return 3 if self.failed else 0


@click.command("widths")
@click.argument("models", metavar="[TARGET]…", nargs=-1, type=options.PATH)
@options.matrix
@click.option(
    "--widths",
    "text",
    default="2..16",
    show_default=True,
    metavar="N,…",
    help="Widths to compare with width 1, such as 2..16 or 2,4,8.",
)
@click.option(
    "--ops", is_flag=True, help="Also try the product that departs in every type there is."
)
@click.option("--html", "page", type=options.PATH, help="Write a page with heat maps to this file.")
@options.timeout
@options.as_json
def command(
    *,
    models: tuple[Path, ...],
    overrides: "Overrides",
    text: str,
    ops: bool,
    page: Path | None,
    timeout: float,
    as_json: bool,
) -> Profiles:
    """Compare batches of every width with single rows, on the greedy text of each TARGET.

    \b
    specbisect widths model-q4_k_m.gguf --widths 2..8
    specbisect widths --base model-bf16.gguf --quant Q8_0,Q4_K_M --set flash_attn=on,off

    Every number is measured from a clean state, and the first node of the graph that departs is named.

    \b
    Exit codes: 0 bit-identical at all widths, 1 bits depart, 2 bad input,
    3 engine failure, 130 interrupted.
    """
    from specbisect.cli.run import check, make

    widths = numbers(text)
    overrides = replace(
        overrides,
        targets=(*models, *overrides.targets),
        max_prompts=overrides.max_prompts or PROMPTS,
    )
    plan = plan_of(overrides)
    make(check(plan))
    n_batch = min(cell.n_batch for cell in plan.cells())
    if widths[-1] > n_batch:
        raise BadInput(
            f"--widths {text}: no batch has more than n_batch = {n_batch} rows; lower it"
        )
    profiles = measure(plan, widths, timeout, ops=ops)
    if page:
        from specbisect.report.widths import write

        write(page, profiles.found, profiles.types)
    if as_json:
        output.emit(document(profiles))
    else:
        click.echo("\n\n".join(render(profiles)))
    return profiles


def numbers(text: str) -> list[int]:
    """Widths as people write them. Raises `BadInput` for anything that is none."""
    from specbisect.matrix.values import expand, parse_flag

    try:
        widths = expand(parse_flag(text))
    except ValueError as error:
        raise BadInput(f"--widths {text}: {error}; write such as 2..16") from None
    if not all(type(w) is int and w > 0 for w in widths):
        raise BadInput(f"--widths {text}: write whole numbers, such as 2..16 or 2,4,8")
    return sorted(set(widths))


def plan_of(overrides: "Overrides") -> "Plan":
    """The cells that are asked for, one per target and settings; their drafter is of no account."""
    from specbisect.matrix import build, shipped

    tables = {
        "schema": "specbisect.matrix/1",
        "prompts": "prompts/default.jsonl",
        "drafter": [{"method": "prompt-lookup"}],
    }
    return build(tables, overrides, source="widths", folder=shipped()["demo"].parent)


def cases_of(plan: "Plan") -> Iterator[tuple[str, list[Case]]]:
    """Per target and settings, a name and a case for every prompt."""
    from specbisect.cli.naming import Naming

    cells = [group[0].vanilla for group in plan.groups()]
    naming = Naming(cells)
    for cell in cells:
        named = zip(naming.headers, naming.settings(cell), strict=True)
        target, *axes = (
            value if i == 0 else f"{name} {value}" for i, (name, value) in enumerate(named)
        )
        yield ", ".join([target, *axes]), [Case(cell, prompt) for prompt in plan.prompts]


def measure(plan: "Plan", widths: Sequence[int], timeout: float, *, ops: bool) -> Profiles:
    """Profiles of all cells of `plan`, each in a child process."""
    from tqdm import tqdm

    from specbisect.ops.study import types
    from specbisect.ops.widths import measure as profile
    from specbisect.trace import Failure
    from specbisect.workers import Workers

    profiles = Profiles()
    groups = list(cases_of(plan))
    with Workers(1, timeout * len(plan.prompts)) as workers, tqdm(groups, disable=None) as bar:
        for name, cases in bar:
            bar.set_description(name)
            found = workers.submit(profile, cases, widths).result()
            if isinstance(found, Failure):
                profiles.failed[name] = found
                continue
            profiles.found[name] = found
            if ops:
                width = found.departs() or max(widths)
                rows = workers.submit(types, cases[0], max(ROWS, width)).result()
                if isinstance(rows, Failure):
                    profiles.failed[f"{name}, types"] = rows
                else:
                    profiles.types[name] = rows
    return profiles


def render(profiles: Profiles) -> Iterator[str]:
    """For each target a line that says where bits depart, and the numbers."""
    from tabulate import tabulate

    for name, profile in profiles.found.items():
        yield f"{name}: {profile}"
        if profile.widths:
            yield tabulate(_rows(profile), WIDTH_HEADS, floatfmt=".3g")
        if name in profiles.types:
            yield tabulate(map(_type, profiles.types[name]), TYPE_HEADS, floatfmt=".1e")
    for name, failure in profiles.failed.items():
        yield f"{name}: failed at {failure.stage}: {failure.reason}"


def _rows(profile: "Profile") -> Iterator[tuple[Any, ...]]:
    for at in profile.widths:
        found = profile.first(at.width)
        inside = f"{100 * at.share_inside:.0f} %"
        first = str(found.first) if found else "none"
        numbers = (at.largest, at.rms, at.flips_per_1000)
        yield at.width, at.rows, at.identical, *numbers, inside, first


def _type(row: "Invariance") -> tuple[Any, ...]:
    from specbisect.ops.profile import ranges

    departs = ranges(row.widths) or "none"
    return row.type, row.buffer or "plain", departs, row.relative or None


def document(profiles: Profiles) -> dict[str, Any]:
    """The same as JSON."""
    from dataclasses import asdict

    from specbisect.ops.profile import PROFILE

    targets = [
        {
            "target": name,
            "departs": profile.departs(),
            "line": str(profile),
            "profile": PROFILE.dump_python(profile, mode="json"),
            "types": [asdict(row) for row in profiles.types.get(name, ())],
        }
        for name, profile in profiles.found.items()
    ]
    failed = {name: f"{f.stage}: {f.reason}" for name, f in profiles.failed.items()}
    return {"schema": "specbisect.widths/1", "targets": targets, "failed": failed}
