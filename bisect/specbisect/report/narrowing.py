"""What narrowing came to, as tables: the minimal case against the original one, and what is around it."""

from typing import Any

from specbisect.cell import AXES, Drafter, Model, drafter_label
from specbisect.diagnose.finding import Finding
from specbisect.narrow.result import Narrowed, Neighbour, Tensors
from specbisect.report import text
from specbisect.report.repro import Script, model_file
from specbisect.report.subject import Subject
from specbisect.report.text import Markdown, code

Rows = list[tuple[object, ...]]


def tables(about: Subject, original: Subject, python: Script) -> dict[str, Any]:
    """The tables about the minimal case; nothing when there is none."""
    found = about.narrowed
    if found is None:
        return {}
    return {
        "origin": origin(original.case_id, original.finding),
        "trials": found.trials,
        "proved": found.proved_minimal,
        "reason": found.reason,
        "minimal": _minimal(about, original),
        "precisions": [(p.type, p.shows) for p in found.precisions],
        "widths": [(w.width, w.shows) for w in found.widths],
        "neighbours": _neighbours(about, found, python),
        "interactions": "; ".join(" + ".join(axes) for axes in found.interactions),
        "irrelevant": [
            (i.axis, i.original, i.now, ", ".join(map(str, i.tried))) for i in found.irrelevant
        ],
        "tensors": [_tensors(found.tensors)] if found.tensors else [],
    }


def origin(key: str, original: Finding) -> str:
    """What a minimal case is, in one line that names the case it comes from, whose key is `key`."""
    fork = original.verdict.fork
    where = "" if fork is None else f" (token {fork} of the answer to the original prompt)"
    return f"smallest case found by narrowing case {key[:8]}{where}"


def _tensors(found: Tensors) -> tuple[object, ...]:
    enough = text.ranges(found.enough) or "all of them"
    return text.ranges(found.names), found.unsafe, found.safe, found.without, found.alone, enough


def _minimal(about: Subject, original: Subject) -> Rows:
    """Where the minimal case is not the original one, axis by axis."""
    old, new = original.finding.case.cell, about.finding.case.cell
    rows: Rows = [
        ("target", _model(old.target), _model(new.target)),
        ("drafter", _drafter(old.drafter), _drafter(new.drafter)),
        *((a, getattr(old, a), getattr(new, a)) for a in AXES),
        ("tokens of the prompt", len(original.prompt_ids), len(about.prompt_ids)),
        ("widest verify batch up to there", original.width, about.width),
        *(
            (words, _at_fork(original, part), _at_fork(about, part))
            for part, words in _FORK.items()
        ),
    ]
    return [row for row in rows if row[1] != row[2]]


_FORK = {
    "fork": "first differing token (index)",
    "reference_token": "vanilla arm there",
    "speculative_token": "speculative arm there",
    "margin": "margin",
}


def _at_fork(about: Subject, part: str) -> object:
    value = getattr(about.finding.verdict, part)
    return text.number(value) if isinstance(value, float) else value


def _model(model: Model) -> str:
    return f"{model.name} {model.quant}"


def _drafter(drafter: Drafter | None) -> str:
    return f"{drafter_label(drafter)}, n_max {drafter.n_max}" if drafter else "none"


def _neighbours(about: Subject, narrowed: Narrowed, python: Script) -> Rows:
    file = model_file(about.finding.case.cell.target)
    found: Rows = []
    for n in narrowed.neighbours:
        argument = _argument(n)
        runs = argument.partition("=")[0] in python.settings
        found.append(
            (
                n.axis,
                n.value,
                "none found" if n.neighbour is None else n.neighbour,
                n.shows or "",
                code(f"python repro.py {file} {argument}") if runs else Markdown(""),
            )
        )
    return found


def _argument(found: Neighbour) -> str:
    """A neighbour as an argument of repro.py, which can make batches narrower but not wider; empty without one."""
    value = found.neighbour
    if value is None or (found.axis == "n_max" and value > found.value):
        return ""
    if found.axis == "n_max":
        return f"width={value + 1}"
    return f"{found.axis}={int(value) if isinstance(value, bool) else value}"
