"""``issue.md``: a finding under the headings of llama.cpp's form "Bug (model use)", as facts, commands and tables."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from specbisect.cell import AXES, Drafter, Model
from specbisect.diagnose.percentile import ordinal, percentile_of
from specbisect.gate.acceptance import Acceptance
from specbisect.narrow.result import Tensors
from specbisect.report import hardware, narrowing, render, text
from specbisect.report.repro import Script, model_file
from specbisect.report.shell import commands as command_lines
from specbisect.report.subject import Subject, ids_digest, place_of, token
from specbisect.report.text import Markdown, code
from specbisect.trace import Trace

BEFORE, AFTER = 3, 6
"""Tokens shown before and after the fork."""
PROMPT_CHARACTERS, PROMPT_IDS = 4000, 600
"""How much of a prompt is shown: an issue may not have more than 65,536 characters. finding.json has all of it."""
LOG_LINES, LOG_CHARACTERS = 40, 4000
DATA_CHARACTERS = 12_000

TERMS = {
    "envelope": "how much the difference of the two best logits changes between batch widths, measured for this target",
    "at-fork": "whether the verify batch alone, on a history of single rows, gives the other token; as cause: it does",
    "accumulated": "the batch alone does not: earlier batches of other widths have left other rounding in the KV cache",
    "contract": "llama.cpp does not promise the same bits at every batch width, so neither result breaks a promise",
}
"""Words of results that a reader may not know, and what they mean."""

Rows = list[tuple[object, ...]]


def issue(about: Subject, original: Subject, python: Script, shell: Script) -> str:
    """The text of the issue on `about`, which is `original` or its minimal case.

    `python` shows the former, `shell` the latter; where there is one of them, a recipe for ``git bisect`` lies beside.
    """
    finding, target = about.finding, about.provenance.get("target", {})
    template = render.markdown().get_template("issue.md.j2")
    return template.render(
        about=about,
        finding=finding,
        title=_title(about),
        upstream=_upstream(about),
        hardware=hardware.of(about),
        models=list(_models(about)),
        result=[*_result(about), *_envelope(about, original)],
        around=_around(about),
        experiments=[(e.experiment, e.run, e.outcome) for e in finding.evidence],
        terms=_terms(about),
        data=_data(about),
        acceptance=_acceptance(about),
        arms=_arms(about),
        narrowed=narrowing.tables(about, original, python),
        settings=_settings(about),
        drafter_settings=_drafter_settings(finding.case.cell.drafter),
        prompt=_prompt(about),
        quantised=_quantised(about, original),
        model=model_file(finding.case.cell.target),
        models_of_shell=_files(original),
        target=target,
        python=python,
        shell=shell,
        servers="\n".join(command_lines(original)) if shell.text else "",
        bisect=bool(python.text or shell.text),
        logs=_logs(about),
    )


def _title(about: Subject) -> str:
    finding, fork = about.finding, about.finding.verdict.fork
    where = f"token {fork} differs" if fork is not None else finding.verdict.outcome
    width = f" with a verify batch of {about.width}" if about.place else ""
    where_from = f"{finding.case.cell.target.quant}, {', '.join(hardware.of(about).backends)}"
    return text.comment(f"Eval bug: {where}{width} ({finding.label}, {where_from})")


def _upstream(about: Subject) -> str:
    """For the class that upstream expects: what would make it worth filing all the same."""
    if about.finding.label != "batch-width":
        return ""
    node = about.evidence("first-node", "node", "nodes", "ops")
    types = ", ".join(about.provenance.get("target", {}).get("tensor_types", {}))
    repacked = "on" if about.finding.case.cell.use_extra_bufts else "off"
    kernel = node.outcome if node else f"tensor types {types}, weight repacking {repacked}"
    return (
        "llama.cpp treats this class as expected: batches of another width go through other kernels, which sum in "
        f"another order. Worth filing is a kernel that need not do so: in a batch of {about.width} rows, {kernel}."
    )


def _models(about: Subject) -> Iterator[tuple[str, Rows]]:
    for role in ("target", "draft"):
        facts = about.provenance.get(role)
        if facts:
            special = ", ".join(f"{k} {v}" for k, v in facts.get("special", {}).items())
            types = ", ".join(f"{k} × {v}" for k, v in facts.get("tensor_types", {}).items())
            shown: dict[str, Any] = {
                "name": facts.get("name"),
                "architecture": facts.get("architecture"),
                "file type": facts.get("file_type"),
                "size": f"{facts['size']} bytes" if facts.get("size") else None,
                "SHA-256": code(facts["sha256"]) if facts.get("sha256") else None,
                "tensors": types,
                "tokenizer": " ".join(
                    filter(None, (facts.get("tokenizer"), facts.get("pre_tokenizer")))
                ),
                "vocabulary": facts.get("n_vocab"),
                "special tokens": special,
                "chat template (digest)": facts.get("chat_template"),
                "layers": facts.get("n_layer"),
            }
            yield role, [(k, v) for k, v in shown.items() if v]


def _result(about: Subject) -> Iterator[tuple[object, object]]:
    finding, verdict = about.finding, about.finding.verdict
    yield "outcome", " — ".join(filter(None, (verdict.outcome, verdict.reason)))
    yield "cause", f"{finding.label}{f' ({finding.kind})' if finding.kind else ''}"
    yield "in words", finding.summary
    yield "compared", f"{verdict.compared} tokens"
    if finding.case.fault is not None:
        yield "planted fault", ", ".join(f"{k} {v}" for k, v in asdict(finding.case.fault).items())
    if verdict.fork is not None:
        yield "first differing token (index)", verdict.fork
        yield "vanilla arm there", _token(token(about.vanilla, verdict.fork))
        yield "speculative arm there", _token(token(about.speculative, verdict.fork))
    if verdict.margin is not None:
        yield "margin (best − second best logit, vanilla)", text.number(verdict.margin)
        yield "its percentile among the arm's margins", _percentile(about)
    if place := about.place:
        cycle, where = place.cycle, f"cycle {place.number}, row {place.row} of {place.cycle.width}"
        yield (
            "verify batch there",
            f"{where}; drafted {cycle.drafted}, accepted {cycle.accepted}",
        )
    if (first := about.datum("first_bad_cycle", "replay")) is not None:
        yield "first cycle that is not reproduced", first


def _percentile(about: Subject) -> str:
    known = about.datum("margin_percentile")
    margins, margin = about.vanilla.margins if about.vanilla else (), about.finding.verdict.margin
    if known is None and margins and margin is not None:
        known = percentile_of(margin, margins)
    return "not known" if known is None else f"{ordinal(known)} (of {len(margins)} margins)"


def _envelope(about: Subject, original: Subject) -> Rows:
    """The measured change of the two best logits' difference, of the original case where only that was measured."""
    for subject, words in ((about, ""), (original, " (original case)")):
        found = subject.evidence("envelope")
        quantiles = [(n, found.data.get(n)) for n in ("median", "p95", "largest")] if found else []
        shown = [f"{name} {text.number(value)}" for name, value in quantiles if value is not None]
        if found is not None and shown:
            width = found.data.get("width", subject.width)
            return [(f"envelope at width {width}{words}", ", ".join(shown))]
    return []


def _around(about: Subject) -> Rows:
    """Both arms' tokens from a few before the fork to a few after it."""
    fork = about.finding.verdict.fork
    if fork is None:
        return []
    found: Rows = []
    for index in range(max(0, fork - BEFORE), fork + AFTER + 1):
        arms = token(about.vanilla, index), token(about.speculative, index)
        if arms == (None, None):
            break
        margins = about.vanilla.margins if about.vanilla else ()
        place = place_of(about.speculative, index) if about.speculative else None
        found.append(
            (
                Markdown(f"**{index}**") if index == fork else index,
                *(arms[0] or ("", "")),
                text.number(margins[index]) if index < len(margins) else "",
                *(arms[1] or ("", "")),
                "" if place is None else f"{place.number} / {place.row}",
            )
        )
    return [(i, a, _quoted(at), m, b, _quoted(bt), p) for i, a, at, m, b, bt, p in found]


def _quoted(found: object) -> Markdown:
    return code(text.quoted(str(found))) if found else Markdown("")


def _token(found: tuple[int, str] | None) -> Markdown:
    return Markdown("none") if found is None else Markdown(f"{found[0]} {_quoted(found[1])}")


def _arms(about: Subject) -> Rows:
    named = ("vanilla", about.vanilla), ("speculative", about.speculative)
    return [
        (
            name,
            len(t.ids),
            t.finish,
            t.drafted,
            t.accepted,
            t.drafted - t.accepted,
            len(t.cycles),
            code(ids_digest(t.ids)[:16]),
        )
        for name, t in named
        if t is not None
    ]


def _acceptance(about: Subject) -> Rows:
    trace = about.speculative
    if trace is None:
        return []
    if not trace.cycles:  # a server that does not log its drafts may still print these shares
        shares = trace.resolved.get("server", {}).get("acceptance_per_position", ())
        return [(i + 1, "", "", f"{share:.3f}") for i, share in enumerate(shares)]
    return [
        (position, drafted, accepted, f"{accepted / drafted:.3f}")
        for position, (drafted, accepted) in enumerate(Acceptance.of(trace).by_position, 1)
    ]


def _settings(about: Subject) -> Rows:
    """Every axis of llama.cpp as asked and as resolved."""
    cell = about.finding.case.cell
    target, draft = (
        about.traces[0].resolved.get(k, {}) if about.traces else {} for k in ("target", "draft")
    )
    return [
        (a.name, getattr(cell, a.name), a.default, target.get(a.name, ""), draft.get(a.name, ""))
        for a in AXES.values()
        if a.name != "host_class"
    ]


def _drafter_settings(drafter: Drafter | None) -> Rows:
    """The drafter's own parameters; a script's drafts are in repro.py."""
    if drafter is None:
        return []
    shown = {k: v for k, v in asdict(drafter).items() if k not in ("drafts", "model")}
    return [(k, " ".join(v) if isinstance(v, list | tuple) else v) for k, v in shown.items()]


def _prompt(about: Subject) -> dict[str, Any]:
    """The prompt's ids and text, shortened in the middle where they are long."""
    ids, prompt = about.prompt_ids, about.finding.case.prompt
    half = PROMPT_IDS // 2
    shown = list(ids) if len(ids) <= PROMPT_IDS else [*ids[:half], "…", *ids[-half:]]
    body, left_out = text.shortened(prompt.text, PROMPT_CHARACTERS)
    return {
        "n": len(ids),
        "digest": ids_digest(ids),
        "ids": ", ".join(map(str, shown)),
        "ids_left_out": max(0, len(ids) - PROMPT_IDS),
        "text": body,
        "left_out": left_out,
        "redacted": about.redacted,
    }


def _quantised(about: Subject, original: Subject) -> str:
    """How the models' files are made from those they were quantised from; empty when they were given."""
    tensors = about.narrowed.tensors if about.narrowed else None
    draft = getattr(original.finding.case.cell.drafter, "model", None)
    found = [_made(about.finding.case.cell.target, tensors), _made(draft) if draft else ""]
    return "\n".join(filter(None, found))


def _made(model: Model, tensors: Tensors | None = None) -> str:
    overrides = tensors.overrides if tensors else ()
    options = "".join(f" --tensor-type {shlex.quote(f'{n}={t}')}" for n, t in overrides)
    kind, _, rest = model.identity.partition(":")
    sha = rest.split(":")[0] if kind == "quantize" else tensors.base_sha256 if tensors else ""
    if not sha:
        return ""
    base = model_file(replace(model, path="")) if kind == "quantize" else "BASE.gguf"
    quant = model.quant.split("+")[0]
    made = f"llama-quantize --allow-requantize{options} {base} {model_file(model)} {quant}"
    return f"{made}  # {base}: sha256 {sha}"


def _files(about: Subject) -> str:
    """What a command line calls the models of a case."""
    cell = about.finding.case.cell
    draft = getattr(cell.drafter, "model", None)
    return " ".join(model_file(m) for m in (cell.target, draft) if m)


def _terms(about: Subject) -> list[tuple[str, str]]:
    """Those of `TERMS` that this finding uses."""
    finding = about.finding
    used = [finding.kind, finding.summary]
    used += [f"{e.experiment} {e.outcome}" for e in finding.evidence]
    return [(term, words) for term, words in TERMS.items() if term in " ".join(used)]


def _data(about: Subject) -> str:
    """The numbers behind the experiments, one experiment a line."""
    lines = [
        f"{e.experiment}: {json.dumps(_rounded(e.data), default=str)}"
        for e in about.finding.evidence
        if e.data
    ]
    return text.shortened("\n".join(lines), DATA_CHARACTERS)[0]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {str(k): _rounded(v) for k, v in value.items()}
    return (
        [_rounded(v) for v in value]
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )


def _logs(about: Subject) -> str:
    """What llama.cpp said: of itself, and last of all where an arm failed."""
    lines = [f"$ system_info\n{about.host.get('system_info', '')}"] if about.host else []
    for arm, failure in about.failures:
        said = "\n".join(failure.log[-LOG_LINES:])
        lines.append(f"$ {arm} arm: {failure.stage}: {failure.reason}\n{said}")
    for trace in about.traces:
        if command := _command(trace):
            lines.append(f"$ {command}")
    return text.shortened("\n\n".join(lines), LOG_CHARACTERS)[0]


def _command(trace: Trace) -> str:
    return str(trace.provenance.get("server", {}).get("command", ""))
