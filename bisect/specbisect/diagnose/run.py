"""Diagnosing the cases of a run: which ones, what they share, and a child process for each.

A child that dies leaves its case ``unexplained``, with the crash as evidence; the others go on.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from specbisect.cell import Case, DraftModel, PromptLookup, SelfDraft, digest
from specbisect.compare import compare
from specbisect.diagnose.conclusion import Options
from specbisect.diagnose.envelope import Envelope, measure
from specbisect.diagnose.examine import examine
from specbisect.diagnose.finding import Evidence, Finding
from specbisect.diagnose.numeric import NEEDS_REFERENCE
from specbisect.diagnose.reference import dequantised
from specbisect.diagnose.served import examine_served
from specbisect.engines import engine
from specbisect.engines.libllama import LibLlama
from specbisect.errors import BadInput
from specbisect.llama import library
from specbisect.runner import Submit
from specbisect.store import Row, Store
from specbisect.trace import HOST_PARTS, Failure, Trace

COLLAPSED = 0.5
"""Acceptance below this share of the group's median is suspicious."""
ENOUGH = 16
"""Drafted tokens from which an acceptance of exactly 1 is suspicious."""
MIN_GROUP = 3

_ENVELOPE = TypeAdapter(Envelope)


@dataclass(frozen=True, slots=True)
class Request:
    """How to diagnose: `audit` takes every case, `repeats` of each arm, a float32 `reference` or none."""

    audit: bool = False
    repeats: int = 1
    reference: bool = True
    again: bool = False


@dataclass(slots=True)
class Progress:
    """Findings so far, by label, of `total` cases."""

    total: int
    labels: Counter[str] = field(default_factory=Counter)


def examine_case(case: Case, vanilla: Trace, speculative: Trace, options: Options) -> Finding:
    """Examine a case in this process; what worker processes are asked to call.

    Raises `BadInput` when its traces were made on another kind of host.
    """
    _made_here(speculative, case)
    experiments = examine if case.cell.engine == "libllama" else examine_served
    return experiments(_libllama(), case, vanilla, speculative, options)


def measure_envelope(case: Case, trace: Trace, widths: tuple[int, ...]) -> Envelope:
    """`measure` in this process, under the condition of `examine_case`; what worker processes are asked to call."""
    _made_here(trace, case)
    return measure(_libllama(), case, trace, widths)


def _made_here(trace: Trace, case: Case) -> None:
    """Bits from another kind of host differ from those of any replay here, and would pass for a wrong memory."""
    there, here = trace.provenance.get("host", {}), library.environment()
    for part in HOST_PARTS:
        if part == "library" and case.cell.engine == "server":
            continue  # the server's own build
        if part in there and digest(there[part]) != digest(here[part]):
            raise BadInput(
                f"case {case.key} ran where {part} is {there[part]}, not {here[part]} as here, so its bits are others; "
                "diagnose it there, or run the matrix here with --fresh"
            )


def _libllama() -> LibLlama:
    found = engine("libllama")
    assert isinstance(found, LibLlama)
    return found


def diagnose(
    store: Store,
    workers: Submit,
    request: Request,
    *,
    wanted: Callable[[Row], bool] = lambda row: True,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Counter[str]:
    """Find the cause of every case that departs or is suspicious, and store the findings; how many have each label.

    Cases that have a finding are left as they are unless `request.again`. Raises `BadInput` when the run has no case.
    """
    rows = list(store.rows())
    if not rows:
        raise BadInput(f"{store.path} holds no finished case; run it first")
    chosen = [row for row in select(rows, request.audit) if wanted(row)]
    done = Progress(len(chosen))
    todo = []
    for row in chosen:
        stored = [] if request.again else store.findings(row.id)
        if stored:
            done.labels[Finding.model_validate_json(stored[-1]).label] += 1
        else:
            todo.append(row)
    progress(done)
    coordinator = Coordinator(store, workers, request, siblings(rows))
    for finding in coordinator.findings(todo):
        store.save_finding(finding.case.key, finding.model_dump_json(by_alias=True))
        done.labels[finding.label] += 1
        progress(done)
    return done.labels


def select(rows: Iterable[Row], audit: bool) -> Iterator[Row]:
    """Cases to diagnose: with `audit` all that ran, else those that depart, are suspicious or have others around."""
    rows = list(rows)
    usual = _usual_acceptance(rows)
    for row in rows:
        if row.outcome in ("failed", "invalid"):
            continue
        surrounded = row.cell.n_parallel > 1 or row.cell.cache_prompt
        if audit or surrounded or row.outcome != "agree" or _suspicious(row, usual):
            yield row


def _group(row: Row) -> tuple[Any, ...]:
    return row.engine, row.drafter, row.n_max, row.prompt_id


def _usual_acceptance(rows: Iterable[Row]) -> dict[tuple[Any, ...], float]:
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row.drafted:
            groups.setdefault(_group(row), []).append(row.accepted / row.drafted)
    return {key: median(values) for key, values in groups.items() if len(values) >= MIN_GROUP}


def _suspicious(row: Row, usual: Mapping[tuple[Any, ...], float]) -> bool:
    if row.drafter == "self":
        return False
    acceptance = row.accepted / row.drafted if row.drafted else 0.0
    perfect = acceptance == 1.0 and row.drafted >= ENOUGH
    return acceptance == 0.0 or perfect or acceptance < COLLAPSED * usual.get(_group(row), 0.0)


def siblings(rows: Iterable[Row]) -> dict[str, dict[int, int | None]]:
    """Per case, the fork index of the same case at every draft length that was run."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        drafter = row.cell.drafter
        if isinstance(drafter, DraftModel | SelfDraft | PromptLookup):
            drafter = replace(drafter, n_max=1)
        key = digest([replace(row.cell, drafter=drafter).key, row.prompt_id])
        groups.setdefault(key, []).append(row)
    return {
        row.id: {r.n_max: r.fork for r in sorted(group, key=lambda r: r.n_max)}
        for group in groups.values()
        for row in group
        if len(group) > 1
    }


@dataclass(slots=True)
class Coordinator:
    """Hands cases to workers, with what they share: envelopes and float32 references, each made once."""

    store: Store
    workers: Submit
    request: Request
    siblings: Mapping[str, Mapping[int, int | None]]
    references: dict[str, str] = field(default_factory=dict)

    def findings(self, rows: Iterable[Row]) -> Iterator[Finding]:
        """The findings on `rows`, as they come."""
        waiting = deque(rows)
        running: dict[Future[Any], tuple[Row, Case]] = {}
        while waiting or running:
            while waiting and len(running) < self.workers.slots:
                row = waiting.popleft()
                case = self.store.case(row.id)
                running[self._submit(row, case)] = row, case
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row, case = running.pop(future)
                result = future.result()
                if isinstance(result, Finding) and result.kind == NEEDS_REFERENCE:
                    target = case.cell.target
                    self.references[target.identity] = dequantised(target.path)
                    waiting.appendleft(row)
                    continue
                yield result if isinstance(result, Finding) else self._crashed(case, result)

    def _submit(self, row: Row, case: Case) -> Future[Any]:
        vanilla, speculative = self._traces(case)
        options = Options(
            repeats=self.request.repeats,
            audit=self.request.audit or row.outcome == "agree",
            envelope=self._envelope(row, case, vanilla),
            reference=self.references.get(case.cell.target.identity)
            if self.request.reference
            else "",
            siblings=self.siblings.get(row.id, {}),
        )
        return self.workers.submit(examine_case, case, vanilla, speculative, options)

    def _traces(self, case: Case) -> tuple[Trace, Trace]:
        vanilla, speculative = self.store.arm(case.vanilla.key), self.store.arm(case.key)
        assert isinstance(vanilla, Trace)
        assert isinstance(speculative, Trace)
        return vanilla, speculative

    def _envelope(self, row: Row, case: Case, vanilla: Trace) -> Envelope | None:
        """The envelope of the case's target and settings at its widths: measured once, on the first case that asks."""
        width = row.n_max + 1
        if len(vanilla.ids) < 3 or not row.drafted:
            return None
        key = f"envelope:{case.cell.vanilla.key}:{case.vanilla.fault}"
        kept = self.store.kept(key)
        known = _ENVELOPE.validate_json(kept) if kept else Envelope({})
        wanted = tuple(w for w in (2, 4, width) if w <= len(vanilla.ids) and w not in known.widths)
        if not wanted or (kept and width in known.widths):
            return known
        measured = self.workers.submit(measure_envelope, case.vanilla, vanilla, wanted).result()
        if isinstance(measured, Failure):
            return known or None
        assert isinstance(measured, Envelope)
        merged = replace(measured, widths={**known.widths, **measured.widths})
        self.store.keep(key, _ENVELOPE.dump_json(merged).decode())
        return merged

    def _crashed(self, case: Case, failure: Failure) -> Finding:
        vanilla, speculative = self._traces(case)
        evidence = Evidence(
            experiment="crash",
            run="the experiments, in a child process",
            outcome=f"{failure.stage}: {failure.reason}",
            data={"log": list(failure.log)},
        )
        return Finding(
            case=case,
            verdict=compare(vanilla, speculative),
            label="unexplained",
            kind="crash",
            summary=f"the diagnosis itself failed at {failure.stage}: {failure.reason}",
            evidence=(evidence,),
            vanilla=vanilla,
            speculative=speculative,
        )
