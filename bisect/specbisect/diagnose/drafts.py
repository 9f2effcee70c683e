"""Draft replay: what a drafter with a right memory would have drafted, cycle by cycle.

The same experiment as exact-width replay, on the draft model: a fresh context that only ever grows is given every
verify batch at its width, and each draft is made anew on a scratch copy of it. The output of speculative decoding does
not depend on the drafts, so a drafter whose memory is wrong shows nowhere else than in its acceptance.
"""

from collections.abc import Iterable
from dataclasses import replace

from specbisect.cell import DraftModel, SelfDraft
from specbisect.diagnose.lab import SCRATCH, Bench, Lab
from specbisect.llama.context import rows_of
from specbisect.llama.logits import best
from specbisect.trace import Cycle, Trace


def draft_replay(lab: Lab, trace: Trace) -> list[int]:
    """Cycles of a speculative `trace` whose drafted tokens a fresh drafter does not propose."""
    drafter = lab.case.cell.drafter
    assert isinstance(drafter, DraftModel | SelfDraft)
    cell = lab.case.cell
    if isinstance(drafter, DraftModel):
        cell = replace(cell, target=drafter.model, type_k=drafter.type_k, type_v=drafter.type_v)
    beside = Lab(lab.engine, replace(lab.case, cell=cell, fault=None), trace.prompt_ids)
    with beside.bench() as bench:
        wrong = list(_differing(bench, trace.cycles, beside.model.keeps_states))
    lab.counters += beside.counters
    return wrong


def _differing(bench: Bench, cycles: Iterable[Cycle], keeps_states: bool) -> Iterable[int]:
    for number, cycle in enumerate(cycles):
        if not _proposes(bench, cycle):
            yield number
        kept = cycle.batch[: cycle.accepted + 1]
        if cycle.accepted == cycle.drafted:
            bench.commit(cycle.batch, cycle.base)
        elif keeps_states or cycle.redecoded:
            bench.commit(kept, cycle.base)
        else:
            bench.verify(cycle.batch, cycle.base, cycle.accepted, shared=True)


def _proposes(bench: Bench, cycle: Cycle) -> bool:
    context = bench.context
    context.copy(0, SCRATCH)
    agrees = True
    for place, (token, drafted) in enumerate(zip(cycle.batch, cycle.batch[1:], strict=False)):
        row = context.evaluate(rows_of([token], cycle.base + place, sequence=SCRATCH))[0]
        if best(row) != drafted:
            agrees = False
            break
    context.remove(SCRATCH, -1)
    return agrees
