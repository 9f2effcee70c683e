"""``repro.sh``: both arms on upstream's own llama-server with curl, for findings that exist there."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbisect.cell import Case, DraftModel, NgramSimple, SelfDraft, ServerSpec
from specbisect.engines.scenario import canary
from specbisect.engines.server.binary import Binary
from specbisect.engines.server.client import NEUTRAL
from specbisect.engines.server.flags import command
from specbisect.report import render, text
from specbisect.report.repro import Script, model_file
from specbisect.report.subject import Subject
from specbisect.trace import Trace

TARGET, DRAFT = "$target", "$draft"
_MODEL_FLAGS = {"--model": TARGET, "--spec-draft-model": DRAFT}
_OWN_FLAGS = ("--host", "--port", "--verbosity")


class _All(frozenset[str]):
    """The flags of a llama-server that was not asked: any it may need."""

    __slots__ = ()

    def __contains__(self, flag: object) -> bool:
        return True


ANY = Binary(Path("llama-server"), "", _All(), ())


def script(about: Subject) -> Script:
    """The shell repro of a finding as it was found: servers take no scripted drafts, so not of a minimal case."""
    case = about.finding.case
    if reason := _impossible(about, case):
        return Script(reason=reason)
    drafter = case.cell.drafter
    assert drafter is not None
    draft = drafter.model if isinstance(drafter, DraftModel | ServerSpec) else None
    shas = [about.provenance.get(which, {}).get("sha256", "") for which in ("target", "draft")]
    how = _HOW.get(about.finding.label, "arms")
    template = render.script().get_template("repro.sh.j2")
    found = template.render(
        label=about.finding.label,
        version=about.version,
        case=about.case_id,
        target_file=model_file(case.cell.target),
        draft_file=model_file(draft) if draft else "",
        target_sha=shas[0],
        draft_sha=shas[1] if draft else "",
        flags=_quoted(_words(about, case, "vanilla")),
        drafter_flags=_quoted(_added(about, case)),
        how=how,
        words=_WORDS[how],
        prompt=shlex.quote(json.dumps(list(about.prompt_ids))),
        settings=shlex.quote(json.dumps(_settings(case))[1:-1]),
        history=_history(about),
        companions=shlex.quote(_companions(about, case)),
        redacted=about.redacted,
        found_in=case.cell.engine,
        verdict=about.finding.verdict,
        build=text.comment(str(about.provenance.get("server", {}).get("build", ""))),
    )
    return Script(found)


def commands(about: Subject) -> list[str]:
    """The arms as command lines for people: the servers that `script` starts, with what its requests ask for."""
    case = about.finding.case
    asked = ["--predict", str(case.cell.n_predict), "--temp", "0"]
    draft = getattr(case.cell.drafter, "model", None)
    files = {TARGET: model_file(case.cell.target), DRAFT: model_file(draft) if draft else ""}
    how = _HOW.get(about.finding.label, "arms")
    lines = [_words(about, case, "vanilla")] if how == "arms" else []
    lines.append(_words(about, case, "speculative"))
    return [
        shlex.join(["llama-server", *(files.get(word, word) for word in words), *asked])
        for words in lines
    ]


def _impossible(about: Subject, case: Case) -> str:
    drafter = case.cell.drafter
    if case.fault is not None:
        return "the fault was planted in this tool, llama-server does not have it"
    if not about.prompt_ids:
        return "no arm got as far as its prompt's token ids"
    if case.cell.engine == "server" and "server" in about.provenance:
        external = "--model" not in about.provenance["server"].get("command", "")
        return "the server was somebody else's, its flags are not known" if external else ""
    if case.cell.engine == "binding":
        return "it was found in the Python binding"
    if not isinstance(drafter, DraftModel | SelfDraft | NgramSimple):
        return "llama-server has no such drafter"
    if about.finding.label in ("none", "verification"):
        return "it is not in what llama-server shares with this engine"
    return ""


def _words(about: Subject, case: Case, arm: str) -> list[str]:
    """The command line of an arm's server, without the program, host and port."""
    trace = about.vanilla if arm == "vanilla" else about.speculative
    recorded = trace.provenance.get("server", {}).get("command") if trace else None
    words = recorded.split() if recorded else _made(case, trace, arm)
    return _with_variables(words)


def _made(case: Case, trace: Trace | None, arm: str) -> Sequence[str]:
    cell = case.cell if arm == "speculative" else case.cell.vanilla
    got = trace.resolved.get("target", {}) if trace else {}
    threads = got.get("n_threads", cell.n_threads), got.get("n_threads_batch", cell.n_threads_batch)
    return command(replace(cell, n_threads=threads[0], n_threads_batch=threads[1]), ANY)


def _added(about: Subject, case: Case) -> list[str]:
    """What the speculative arm's command line has more than the vanilla one's."""
    base = _pairs(_words(about, case, "vanilla"))
    return [
        w for pair in _pairs(_words(about, case, "speculative")) if pair not in base for w in pair
    ]


def _pairs(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Flags with their values."""
    found: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            found.append((word,))
        elif found:
            found[-1] += (word,)
    return found


def _with_variables(words: Sequence[str]) -> list[str]:
    """The words without flags of our own, and with shell variables in place of the models' paths."""
    kept = [pair for pair in _pairs(words) if pair[0] not in _OWN_FLAGS]
    named = [(f, _MODEL_FLAGS[f]) if f in _MODEL_FLAGS else (f, *rest) for f, *rest in kept]
    return [word for pair in named for word in pair]


def _quoted(words: Sequence[str]) -> str:
    """Words for a shell, a flag with its values a line."""
    lines = [
        " ".join(f'"{w}"' if w in (TARGET, DRAFT) else shlex.quote(w) for w in pair)
        for pair in _pairs(words)
    ]
    return "\n    ".join(lines)


def _settings(case: Case) -> dict[str, Any]:
    """Everything a request says beside its prompt."""
    cell = case.cell
    return dict(NEUTRAL) | {
        "n_predict": cell.n_predict,
        "seed": cell.seed,
        "ignore_eos": cell.ignore_eos,
        "cache_prompt": cell.cache_prompt,
        "return_tokens": True,
        "stream": False,
    }


def _history(about: Subject) -> list[str]:
    """Prompts asked between the two times the case is asked, for a shell; empty for the case's own."""
    asked = about.datum("history") or []
    return [shlex.quote(json.dumps(ids)) if ids != list(about.prompt_ids) else "" for ids in asked]


def _companions(about: Subject, case: Case) -> str:
    """Prompts asked together with the case's, as JSON without the brackets."""
    asked = about.datum("companions") or [
        canary(i).text for i in range(max(1, case.cell.n_parallel - 1))
    ]
    return json.dumps(asked)[1:-1]


_HOW = {"prompt-cache": "cache", "batch-composition": "beside", "cross-sequence": "beside"}
_WORDS = {
    "arms": "the same request to llama-server without and with its drafter",
    "cache": "the same request to one llama-server again and again",
    "beside": "the same request to llama-server alone and beside others",
}
