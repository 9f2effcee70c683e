"""``repro.py``: a finding as one program that needs only llama_cpp and numpy, and that shows what was found.

Which program depends on the label. All of them feed recorded tokens, so that none needs a drafter, and compare rows
that the finding says should be the same. For a planted fault the program has the fault in it, marked as planted.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbisect.cell import Model
from specbisect.diagnose.alignment import GAIN
from specbisect.diagnose.replay import first_token
from specbisect.diagnose.widths import WIDEST
from specbisect.engines.faults import LARGE, SMALL
from specbisect.report import planted, render, subject, text
from specbisect.report.subject import Place, Subject, place_of
from specbisect.trace import Cycle, Trace

CONTEXT = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "swa_full", "op_offload")
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}

Constants = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Script:
    """A program, or why there is none. `settings` are names that its command line may change."""

    text: str = ""
    reason: str = ""
    settings: tuple[str, ...] = ()


def script(about: Subject) -> Script:
    """The repro of a finding; the same bytes for the same finding."""
    trace = about.speculative
    if trace is None:
        return Script(reason="an arm failed before it had tokens that could be fed again")
    if not trace.cycles and about.finding.label not in _WITHOUT:
        return Script(reason="the engine does not show its verify batches: see repro.sh")
    program = _program(about, trace)
    if isinstance(program, str):
        return Script(reason=program)
    name, special = program
    settings = _settings(about, trace, name, special)
    template = render.script().get_template(f"repro/{name}.py.j2")
    return Script(
        template.render(_common(about, trace, settings) | special, modules=_modules(about, name)),
        settings=tuple(settings),
    )


def _program(about: Subject, trace: Trace) -> tuple[str, Constants] | str:
    """Which template shows the finding, with the constants it needs of its own; or why none can, as a clause."""
    label, kind = about.finding.label, about.finding.kind
    if label in _WITHOUT:
        return _WITHOUT[label]
    if label == "draft-alignment" and not kind.startswith("shift"):
        return "it is in how the drafter is fed, and a repro feeds recorded drafts"
    if label in _PROGRAMS:
        name, constants = _PROGRAMS[label]
        return name, constants(about, trace)
    if about.place is None:
        return "no verify batch gave the token in question"
    if label == "batch-width" and kind == "at-fork":
        return "fork", _both(about) | _fork(trace, about.place)
    return "arms", _both(about) | _arms(about, trace, about.place)


_WITHOUT = {
    "none": "nothing was found",
    "not-engaged": "nothing was drafted: it shows in the counts alone",
    "prompt-cache": "it needs llama-server: see repro.sh",
    "batch-composition": "it needs llama-server: see repro.sh",
    "cross-sequence": "it needs llama-server: see repro.sh",
    "server-only": "libllama alone does not show it: see repro.sh",
}


def _modules(about: Subject, program: str) -> list[str]:
    """What of the standard library a program imports."""
    used = ["hashlib", "os", "sys"]
    used += [] if program == "binding" else ["ctypes"]
    used += ["subprocess"] if program == "repeats" else []
    return sorted([*used, "json"] if about.redacted else used)


def _both(about: Subject) -> Constants:
    """What either arm has at the fork."""
    verdict = about.finding.verdict
    arms = (("vanilla", about.vanilla), ("speculative", about.speculative))
    return {
        "expected": repr((verdict.reference_token, verdict.speculative_token)),
        "texts": {arm: _named(subject.token(trace, verdict.fork or 0)) for arm, trace in arms},
    }


def _named(token: tuple[int, str] | None) -> str:
    return "nothing" if token is None else f"{token[0]} {text.comment(text.quoted(token[1]))}"


def _whole(about: Subject, trace: Trace) -> Constants:
    return {"ids": _ids("IDS", trace.ids), "cycles": _cycles(trace.cycles)}


def _binding(about: Subject, trace: Trace) -> Constants:
    entries = (f"{first_token(trace, c)}: {list(c.batch[1:])}" for c in trace.cycles if c.drafted)
    return _both(about) | {
        "n": len(trace.ids),
        "drafts": "{" + _lines(entries)[1:-1] + "}",
        "fork": about.finding.verdict.fork,
    }


def _arms(about: Subject, trace: Trace, place: Place) -> Constants:
    fork = about.finding.verdict.fork
    return {
        "ids": _ids("IDS", trace.ids[:fork]),
        "cycles": _cycles(trace.cycles[: place.number + 1]),
        "fork": fork,
        "rollback": about.finding.label != "batch-width",
    }


def _fork(trace: Trace, place: Place) -> Constants:
    cycle = place.cycle
    return {
        "ids": _ids("IDS", trace.ids[: cycle.base - len(trace.prompt_ids)]),
        "batch": list(cycle.batch),
        "row": place.row,
        "width": cycle.width,
        "n_tokens": cycle.base,
    }


def _kernel(about: Subject, trace: Trace) -> Constants:
    """The row whose widths the diagnosis compared, as it did."""
    cycle, row = trace.cycles[min(1, len(trace.cycles) - 1)], 0
    if place := about.place or (place_of(trace, trace.nonfinite[0]) if trace.nonfinite else None):
        cycle, row = place.cycle, place.row
    at = cycle.base + row - len(trace.prompt_ids)  # generated tokens before the one that is fed
    ahead = [*cycle.batch[row:], *trace.ids[at + 1 :]]
    widest = max(WIDEST, cycle.width + 1)
    while len(ahead) < widest:
        ahead += ahead
    suspect = 1 if about.finding.label == "baseline" else _suspect(about.finding.kind, cycle.width)
    return {
        "ids": _ids("IDS", trace.ids[:at]),
        "ahead": _ids("AHEAD", ahead[:widest]),
        "widest": widest,
        "n_tokens": cycle.base + row,
        "suspect": suspect,
        "broken": about.finding.kind == "nan",
        "alone": [suspect] in (about.datum("classes", "widths") or ()),
        "apart": _recorded_distance(about, suspect),
    }


def _recorded_distance(about: Subject, width: int) -> float:
    """Largest difference of a logit from width 1, as the diagnosis saw it; beyond reach where it did not."""
    known = {int(w): d for w, d in (about.datum("distance", "widths") or {}).items()}
    found = known.get(width, 0.0)
    return found if 0 < found < np.inf else 1e30


def _suspect(kind: str, width: int) -> int:
    """The width that the sub-kind ``width N`` names."""
    word, _, number = kind.partition(" ")
    return int(number) if word == "width" and number.isdigit() else width


def _state(about: Subject, trace: Trace) -> Constants:
    first = about.datum("first_bad_cycle", "replay") or 0
    last = max(first, about.place.number if about.place else first)
    bits = first_token(trace, trace.cycles[first])
    return {
        "cycles": _cycles(trace.cycles[: last + 1]),
        "expected": repr((bits, about.finding.verdict.fork)),
    }


def _verification(about: Subject, trace: Trace) -> Constants:
    found = about.evidence("verification")
    data = found.data if found else {}
    wrong = data.get("token", about.finding.verdict.fork)
    past_end = wrong if data.get("past_end") else None
    stop = len(trace.ids) if past_end is not None or wrong is None else wrong + 1
    place = place_of(trace, stop - 1)
    return {
        "ids": _ids("EMITTED", trace.ids[:stop]),
        "cycles": _cycles(trace.cycles[: place.number + 1] if place else trace.cycles),
        "past_end": past_end,
        "fork": wrong,
        "texts": {"speculative": _named(subject.token(trace, wrong or 0))},
        "engine": about.finding.case.cell.engine,
    }


def _alignment(about: Subject, trace: Trace) -> Constants:
    drafts = [(first_token(trace, c), list(c.batch[1:])) for c in trace.cycles if c.drafted]
    return {
        "ids": _ids("IDS", trace.ids),
        "drafts": _lines(map(repr, drafts)),
        "shift": about.finding.kind.removeprefix("shift "),
        "drafter": about.drafter,
        "gain": GAIN,
    }


_PROGRAMS: Mapping[str, tuple[str, Callable[[Subject, Trace], Constants]]] = {
    "state": ("state", _state),
    "verification": ("verification", _verification),
    "nondeterministic": ("repeats", _whole),
    "draft-alignment": ("alignment", _alignment),
    "kernel-defect": ("kernel", _kernel),
    "baseline": ("kernel", _kernel),
    "binding-only": ("binding", _binding),
}
"""Template and constants of labels that one program shows, whatever the sub-kind."""


def _common(about: Subject, trace: Trace, settings: Mapping[str, str]) -> Constants:
    """What every program has."""
    finding, fault = about.finding, planted.of(about.finding.case.fault)
    target = about.provenance.get("target", {})
    host = about.host
    quant = finding.case.cell.target.quant
    words = [finding.label, finding.kind and f"({finding.kind})"]
    machine = "; ".join(str(host[k]) for k in ("cpu", "library", "os") if host.get(k))
    return {
        "title": text.comment(f"{' '.join(filter(None, words))}: {target.get('name', '')} {quant}"),
        "model": model_file(finding.case.cell.target),
        "version": about.version,
        "case": about.case_id,
        "machine": _literal(text.visible(machine)),
        "settings": settings,
        "notes": {"width": "0: batches as recorded"} if settings.get("width") == "0" else {},
        "has_width": "width" in settings,
        "context_names": CONTEXT,
        "redacted": about.redacted,
        "prompt": _ids("PROMPT", trace.prompt_ids),
        "prompt_sha256": subject.ids_digest(trace.prompt_ids),
        "n_prompt": len(trace.prompt_ids),
        "ignore_eos": finding.case.cell.ignore_eos,
        "checkpoint": any(c.redecoded for c in trace.cycles),
        "fault": fault,
        "strike": planted.strike(fault, trace),
        "fault_size": SMALL if fault and fault.kind == "kernel-small" else LARGE,
    }


def model_file(model: Model) -> str:
    """What a command line calls the file of `model`."""
    name = model.path or f"{model.name or 'model'}.gguf"
    return re.sub(r"[^\w.+-]+", "-", name)


def _settings(about: Subject, trace: Trace, program: str, special: Constants) -> dict[str, str]:
    """SETTINGS as literals: what was resolved where that is known, what was asked for elsewhere."""
    cell = about.finding.case.cell
    got = trace.resolved.get("target", {})
    named: dict[str, Any] = {
        "sha256": about.provenance.get("target", {}).get("sha256", "any"),
        "n_ctx": got.get("n_ctx", cell.n_ctx),
        "n_batch": cell.n_batch,
        "n_ubatch": cell.n_ubatch,
        "n_threads": got.get("n_threads", cell.n_threads),
        "n_threads_batch": got.get("n_threads_batch", cell.n_threads_batch or cell.n_threads),
        "flash_attn": got.get("flash_attn", cell.flash_attn),
        "type_k": cell.type_k,
        "type_v": cell.type_v,
        "swa_full": int(cell.swa_full),
        "op_offload": int(cell.op_offload),
        "n_gpu_layers": cell.n_gpu_layers,
        "split_mode": SPLIT_MODES[cell.split_mode],
        "use_extra_bufts": int(cell.use_extra_bufts),
    }
    if program == "kernel":
        named["width"] = special["suspect"]
    elif program not in ("alignment", "repeats"):
        named["width"] = 0
    if program == "repeats":
        named |= {"width": 0, "repeats": 3, "once": 0}
    if program == "binding":
        del named["use_extra_bufts"]  # it has no such setting
    if about.redacted:
        named["prompt"] = "PROMPT.json"
    if planted.of(about.finding.case.fault):
        named["planted"] = 1
    return {name: _literal(value) for name, value in named.items()}


def _cycles(cycles: Sequence[Cycle]) -> str:
    return _lines(repr((c.base, list(c.batch), c.accepted)) for c in cycles)


def _lines(entries: Iterable[str]) -> str:
    """A list literal with one entry a line, long ones wrapped."""
    return "".join(["[\n", *(_wrapped(f"    {e},", "     ") for e in entries), "]"])


def _wrapped(line: str, indent: str) -> str:
    return textwrap.fill(line, 110, subsequent_indent=indent, break_long_words=False) + "\n"


def _ids(name: str, ids: Sequence[int]) -> str:
    """A list literal of ids, wrapped where it does not fit behind its name."""
    line = ", ".join(map(str, ids))
    if len(name) + len(line) < 80:
        return f"[{line}]"
    body = textwrap.fill(line + ",", 106, initial_indent="    ", subsequent_indent="    ")
    return f"[\n{body}\n]"


def _literal(value: object) -> str:
    """A Python literal, with double quotes where it is text."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
