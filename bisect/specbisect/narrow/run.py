"""Narrowing a finding, or a case of a run directory, to a result that is proved once more in a fresh process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specbisect.cell import Case, Prompt, Scripted
from specbisect.diagnose import run as diagnosis
from specbisect.diagnose.finding import Finding
from specbisect.errors import BadInput
from specbisect.llama import files
from specbisect.narrow import explain
from specbisect.narrow.candidate import Candidate, Drafts, compares_widths, script
from specbisect.narrow.ddmin import Reason
from specbisect.narrow.gate import Budget, Gate, Journal, Memory, StoredJournal, Wanted
from specbisect.narrow.result import Narrowed
from specbisect.narrow.running import Trials
from specbisect.narrow.search import Search
from specbisect.narrow.smallest import Ending, smallest
from specbisect.narrow.trial import Look, line_ends
from specbisect.narrow.weights import FromBase
from specbisect.runner import Submit
from specbisect.store import Store
from specbisect.trace import Failure, Trace

Show = Callable[[Gate], None]


def _unseen(_gate: Gate) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Request:
    """How to search: how much it may take, and in how many of how many runs a candidate must show it.

    `base` is what other weights are made from, None the target itself. With `retry`, candidates that failed in an
    earlier search are tried again.
    """

    trials: int | None = None
    seconds: float | None = None
    needed: int = 1
    runs: int = 1
    base: Path | None = None
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What came of it; `reason` is why the search ended."""

    narrowed: Narrowed
    reason: Reason
    wanted: Wanted

    @property
    def holds(self) -> bool:
        """Whether the smallest case, examined in full in a fresh process, has the label of the original one."""
        minimal = self.narrowed.minimal
        return (minimal.label, minimal.kind) == (self.wanted.label, self.wanted.kind)

    @property
    def exit_code(self) -> int:
        """1 when there is a smallest case, since it differs; 3 when it does not hold what its trials promised."""
        return 1 if self.holds else 3


def narrow_case(
    store: Store, workers: Submit, key: str, request: Request, progress: Show = _unseen
) -> Narrowing:
    """Narrow a case of a run directory, by the beginning of its key, and keep the result there if it holds.

    A case without a finding is diagnosed first. The same request goes on where an earlier one was stopped. Raises
    `BadInput` when there is nothing to narrow, `NotReproduced` when the case does not show what its finding says.
    """
    key = store.case(key).key
    finding = _finding(store, workers, key)
    label = f"{finding.label}:{finding.kind}:{request.needed}/{request.runs}"
    journal = StoredJournal(store, f"narrow:{key}:{label}", request.retry)
    found = narrow(finding, workers, request, journal, progress)
    if found.holds:
        store.keep(f"narrowed:{key}", found.narrowed.model_dump_json(by_alias=True))
    return found


def _finding(store: Store, workers: Submit, key: str) -> Finding:
    """The latest finding on a case, else a new one, which is kept if there is anything to find."""
    if texts := store.findings(key):
        return Finding.model_validate_json(texts[-1])
    audit, rows = diagnosis.Request(audit=True), list(store.rows())
    chosen = [row for row in diagnosis.select(rows, audit.audit) if row.id == key]
    if not chosen:
        raise BadInput(
            f"case {key[:8]} failed or is invalid, so there is no finding to narrow; choose another"
        )
    coordinator = diagnosis.Coordinator(store, workers, audit, diagnosis.siblings(rows))
    (finding,) = coordinator.findings(chosen)
    if finding.label != "none":
        store.save_finding(key, finding.model_dump_json(by_alias=True))
    return finding


def nothing_to_narrow(finding: Finding) -> str:
    """Why a finding cannot be narrowed, empty when it can."""
    case = f"case {finding.case.key[:8]}"
    if isinstance(finding.speculative, Failure):
        return f"{case} failed, so there is no difference to narrow"
    return {
        "none": f"{case} shows no difference, so there is none to narrow",
        "unexplained": f"the difference of {case} is unexplained, so there is no cause to narrow it by",
    }.get(finding.label, "")


def narrow(
    finding: Finding,
    workers: Submit,
    request: Request,
    journal: Journal | None = None,
    progress: Show = _unseen,
) -> Narrowing:
    """Narrow a finding; raises as `narrow_case` does. Stopped early, it comes to the best so far."""
    trace = _speculative(finding)
    weighed = (found := finding.experiment("reference")) is not None and found.data["made"]
    trials = Trials(workers, Look(finding.label, finding.kind, bool(weighed)))
    gate = Gate(
        Candidate(_with_ids(finding.case, trace)),
        Wanted(finding.label, finding.kind, request.needed, request.runs),
        trials,
        journal or Memory(),
        Budget(request.trials, request.seconds),
        workers.slots,
        progress,
    )
    trials.in_use = lambda: gate.best.weights.recipe
    target = finding.case.cell.target.path
    ends = workers.submit(line_ends, target, trace.prompt_ids).result()
    search = Search(
        gate,
        recorded=_drafts(trace),
        line_ends=frozenset() if isinstance(ends, Failure) else ends,
        ladder=FromBase(_base(finding.case, request.base)),
    )
    try:
        ending = smallest(search)
    finally:
        trials.tidy()
    return Narrowing(_narrowed(finding, search, ending, trials), ending.reason, gate.wanted)


def _speculative(finding: Finding) -> Trace:
    """The speculative arm of a finding that can be narrowed."""
    if reason := nothing_to_narrow(finding):
        raise BadInput(f"{reason}; choose another")
    assert isinstance(finding.speculative, Trace)
    return finding.speculative


def _with_ids(case: Case, trace: Trace) -> Case:
    prompt = Prompt(case.prompt.id, group=case.prompt.group, ids=trace.prompt_ids)
    return replace(case, prompt=prompt)


def _drafts(trace: Trace) -> Drafts:
    """What was drafted, each with the number of tokens generated before it."""
    first = len(trace.prompt_ids) - 1
    return script((cycle.base - first, cycle.batch[1:]) for cycle in trace.cycles)


def _base(case: Case, given: Path | None) -> Path:
    """What other weights are made from. Raises `BadInput` for a base that the target was not made from."""
    target = case.cell.target
    if given is None:
        return Path(target.path)
    kind, _, rest = target.identity.partition(":")
    wanted = rest.partition(":")[0]
    if kind == "quantize" and files.inspect(given).sha256 != wanted:
        raise BadInput(
            f"the target was not made from {given} but from a file with SHA-256 {wanted[:16]}…; give that as --base"
        )
    return given


def _narrowed(finding: Finding, search: Search, ending: Ending, trials: Trials) -> Narrowed:
    gate, minimal = search.gate, finding
    if search.steps:
        minimal = trials.examine(_runnable(search))
    arms = (finding.vanilla, finding.speculative)
    return Narrowed(
        original=finding.case,
        minimal=minimal,
        steps=tuple(search.steps),
        irrelevant=explain.irrelevant(search),
        neighbours=ending.neighbours,
        widths=ending.widths,
        precisions=search.precisions,
        interactions=search.interactions,
        tensors=search.tensors,
        proved_minimal=ending.proved,
        reason="" if ending.reason is Reason.COMPLETE else str(ending.reason),
        trials=gate.trials,
        counters=gate.counters,
        original_decoded=sum(a.counters.decoded_tokens for a in arms if isinstance(a, Trace)),
    )


def _runnable(search: Search) -> Case:
    """The best case as an engine can run it; one that compares widths as what it comes to, scripted."""
    case = search.best.case
    if not compares_widths(case.cell.drafter):
        return case
    drafter = Scripted(script(search.gate.shown.drafts))
    return replace(case, cell=replace(case.cell, drafter=drafter))
