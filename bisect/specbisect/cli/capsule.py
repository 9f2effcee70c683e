"""``specbisect capsule``: the first departing operation, in a file that needs no model."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.cell import Case, Prompt
from specbisect.cli import options, output
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.diagnose.finding import Finding
    from specbisect.ops.capsule import Capsule
    from specbisect.ops.nearness import Nearness
    from specbisect.ops.study import Confirmation, Spot
    from specbisect.ops.trace import NodeTrace

ROWS = 16
"""Rows that a capsule has at least, so that its program can try many widths."""
TEXT = "Once upon a time, in a small village by the sea, there lived"


@dataclass(slots=True)
class Found:
    """What became of looking for a departing operation; without a capsule, none departs."""

    case: Case
    traces: "Sequence[NodeTrace]"
    capsule: "Capsule | None" = None
    program: Path | None = None
    shown: bool = False
    confirmations: "Sequence[Confirmation]" = field(default_factory=tuple)
    nearness: "Nearness | None" = None

    @property
    def exit_code(self) -> int:
        """1 with a capsule whose program shows it, 3 if that fails, 0 when no node departs."""
        if self.capsule is None:
            return 0
        return 1 if self.shown else 3


@click.command("capsule")
@click.argument("subject", metavar="TARGET|DIRECTORY", type=options.PATH)
@click.option("--case", "key", metavar="ID", help="The case, where DIRECTORY is that of a run.")
@click.option("-p", "--prompt", help="The prompt that a TARGET is looked at after.")
@click.option("--width", type=click.IntRange(min=2), help="Look at this width.  [default: 2 to 16]")
@options.settings
@click.option(
    "-o",
    "--output",
    "directory",
    type=options.PATH,
    default=Path("capsule"),
    show_default=True,
    help="Where to put it.",
)
@click.option(
    "--confirm/--no-confirm",
    default=True,
    help="Make copies of the target without the kernel in question, and look again.  [default: confirm]",
)
@click.option(
    "--reference/--no-reference",
    default=True,
    help="Of a case, say which arm is nearer to a float32 copy of the target.  [default: say]",
)
@options.as_json
def command(
    *,
    subject: Path,
    key: str | None,
    prompt: str | None,
    width: int | None,
    settings: tuple[str, ...],
    directory: Path,
    as_json: bool,
    **checks: bool,
) -> Found:
    """Export the first operation whose result depends on the number of rows, with real inputs.

    \b
    specbisect capsule model-q4_k_m.gguf
    specbisect capsule runs/demo --case 1f3a

    Writes capsule.gguf, some hundred kilobytes, and op_repro.py, which needs llama_cpp and numpy only.

    \b
    Exit codes: 0 no operation departs, 1 one does and its program shows it,
    2 bad input, 3 engine failure, 130 interrupted.
    """
    from specbisect.ops.evidence import spot_of

    if subject.is_dir():
        if prompt is not None or settings or width:
            raise BadInput(
                "a case of a run has its prompt, width and settings; leave those options out"
            )
        finding = _of_run(subject, key)
        case, spot = finding.case, spot_of(finding)
        widths: Sequence[int] = [len(spot.batch)]
    else:
        if key is not None:
            raise BadInput(f"--case names a case of a run, and {subject} is no directory")
        widths = [width] if width else range(2, ROWS + 1)
        finding = None
        case, spot = _of_target(subject, prompt, settings, max(widths))
    found = open_up(case, spot, widths, directory, confirm=checks["confirm"])
    if finding is not None and checks["reference"]:
        found.nearness = _nearness(finding)
    if as_json:
        output.emit(document(found))
    else:
        click.echo("\n".join(render(found)))
    return found


def _of_run(directory: Path, key: str | None) -> "Finding":
    from specbisect.diagnose.finding import Finding
    from specbisect.store import Store

    if key is None:
        raise BadInput(
            f"{directory} holds many cases; add --case ID, as `specbisect show {directory} --cases` lists them"
        )
    with Store.open(directory) as store:
        case = store.case(key)
        stored = store.findings(case.key)
    if not stored:
        raise BadInput(
            f"case {key} has no finding yet; run specbisect diagnose {directory} --case {key}"
        )
    return Finding.model_validate_json(stored[-1])


def _of_target(
    target: Path, text: str | None, settings: Sequence[str], rows: int
) -> "tuple[Case, Spot]":
    from specbisect.cli.run import check, make
    from specbisect.cli.widths import cases_of, plan_of
    from specbisect.llama import child
    from specbisect.matrix import Overrides
    from specbisect.ops.study import spot

    prompts = (Prompt("prompt", TEXT if text is None else text),)
    overrides = Overrides(targets=(target,), prompts=prompts, axes=options.axes(settings))
    plan = plan_of(overrides)
    make(check(plan))
    (_, (case,)), *others = cases_of(plan)
    if others:
        raise BadInput("--set gives several values, and one target is opened at a time; give one")
    return case, child.call(spot, case, max(ROWS, rows))


def open_up(
    case: Case, spot: "Spot", widths: Sequence[int], directory: Path, *, confirm: bool
) -> Found:
    """Find the first departing node, take it out, write it down, and have its program and a change confirm it."""
    from specbisect.llama import child
    from specbisect.ops import study
    from specbisect.report.capsule import write

    found = Found(case, child.call(study.look, case, spot, widths))
    trace = next((t for t in found.traces if t.first), None)
    if trace is None or trace.first is None:
        return found
    opened = child.call(study.open_up, case, spot.widened(ROWS), trace.first.node.key)
    found.capsule = opened.capsule
    facts = [
        f"Model: {case.cell.target.name}, {case.cell.target.quant}.",
        f"Found on {opened.host['cpu']} with {opened.host['library']}.",
    ]
    _, found.program = write(opened.capsule, directory, facts)
    found.shown = _shows(found.program, opened.capsule)
    if confirm:
        found.confirmations = study.confirm(case, spot, trace, opened)
    return found


def _shows(program: Path, capsule: "Capsule") -> bool:
    """Whether the program, in a process of its own, sees what was seen here."""
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line[:4].strip().isdigit()]
    departs = [int(words[0]) for words in lines if words[1] != "none"]
    return done.returncode == int(bool(capsule.departs)) and departs == capsule.departs


def _nearness(finding: "Finding") -> "Nearness | None":
    """None where a float32 copy would be too large or cannot be made."""
    from specbisect.diagnose.reference import dequantised
    from specbisect.llama import child
    from specbisect.ops.nearness import nearness

    path = dequantised(finding.case.cell.target.path)
    return child.call(nearness, finding, path) if path else None


def render(found: Found) -> Iterator[str]:
    """What was found, in lines."""
    from specbisect.ops.profile import ranges

    capsule, program = found.capsule, found.program
    if capsule is None or program is None:
        yield f"no node departs at width {ranges([t.width for t in found.traces])}: nothing to take out"
        return
    first = next(t for t in found.traces if t.first)
    yield f"departs at width {first.width}: {first.first}"
    yield f"by itself it departs for n = {ranges(capsule.departs) or 'none'}: {capsule.described()}"
    if not capsule.faithful:
        yield "by itself it gives other bits than inside the model"
    size = f"{capsule.size / 1024:,.0f} KiB"
    shown = (
        "shows it in a process of its own"
        if found.shown
        else "does NOT show it in a process of its own"
    )
    yield f"{program.parent}: {size}; {program.name} {shown}"
    yield from (
        f"{'confirmed' if c.confirmed else 'not confirmed'}: {c}" for c in found.confirmations
    )
    if found.nearness:
        yield str(found.nearness)


def document(found: Found) -> dict[str, Any]:
    """The same as JSON."""
    from specbisect.ops.trace import NODE_TRACE

    capsule = found.capsule
    about = None
    if capsule is not None:
        about = {
            "node": str(capsule.node),
            "operation": capsule.described(),
            "departs": capsule.departs,
            "differences": [asdict(d) for d in capsule.differences],
            "faithful": capsule.faithful,
            "rows_of_weight": [capsule.block.start, capsule.block.stop] if capsule.block else None,
            "bytes": capsule.size,
            "program": str(found.program),
            "shown": found.shown,
        }
    return {
        "schema": "specbisect.capsule/1",
        "case": found.case.key,
        "traces": [NODE_TRACE.dump_python(t, mode="json") for t in found.traces],
        "capsule": about,
        "confirmations": [
            {"change": c.change, "outcome": c.outcome, "first": str(c.first) if c.first else None}
            for c in found.confirmations
        ],
        "nearness": asdict(found.nearness) if found.nearness else None,
    }
