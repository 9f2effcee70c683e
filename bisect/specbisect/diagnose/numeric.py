"""When the replay gives the same bits: a matter of arithmetic. But is it the arithmetic of reordering, or a defect?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbisect import stage
from specbisect.cell import SelfDraft
from specbisect.diagnose.casefile import CaseFile
from specbisect.diagnose.conclusion import Conclusion
from specbisect.diagnose.finding import Label
from specbisect.diagnose.percentile import ordinal, percentile_of
from specbisect.diagnose.reference import RATIO, error, reference_row
from specbisect.diagnose.replay import cycle_of, first_token
from specbisect.diagnose.widths import WIDEST, WidthTable, width_table
from specbisect.llama.context import Logits
from specbisect.trace import Cycle, Trace

NEEDS_REFERENCE = "needs-reference"
"""Sub-kind of a finding that has to be examined again with the float32 reference."""
OUT_OF_LINE = 2.0
"""A change of this many times the largest in the envelope is looked at with the float32 reference."""


@dataclass(frozen=True, slots=True)
class Change:
    """Where a row changed: generated token, its cycle, row and width, and the speculative arm's row if it was kept."""

    token: int
    cycle: int
    row: int
    width: int
    seen: Logits | None


def conclude(ex: CaseFile, rows: Mapping[int, Logits]) -> Conclusion:
    """The label of a case whose rows are reproduced bit for bit and yet differ between the arms."""
    trace = ex.speculative
    token = ex.verdict.fork
    if token is None:
        token = (trace.nonfinite or ex.vanilla.nonfinite)[0]
    at = cycle_of(trace, token)
    if at is None or token >= len(ex.vanilla.ids):
        return Conclusion(
            "unexplained", "", "both arms take this token from rows that are the same"
        )
    cycle = trace.cycles[at[0]]
    batch = rows.get(first_token(trace, cycle))
    change = Change(token, at[0], at[1], cycle.width, None if batch is None else batch[at[1]])

    table, flips = _clean_history(ex, change)
    before = _widths(trace.cycles[: at[0]])
    # Where the fork's own batch is not enough, it is the work of all widths before it.
    if found := _defect(ex, table, [change.width] if flips else [change.width, *before], change):
        return found
    kind = "at-fork" if flips else "accumulated"
    also: tuple[Label, ...] = ("kernel-defect",) if set(table.loners()) & set(before) else ()
    return Conclusion("batch-width", kind, _in_words(ex, kind, change, table), also)


def audit(ex: CaseFile) -> Conclusion:
    """The label of a case in which tokens agree and rows are reproduced: is any width it used out of line?"""
    trace = ex.speculative
    number = _audited(trace)
    cycle = trace.cycles[number]
    change = Change(first_token(trace, cycle), number, 0, cycle.width, None)
    table, _ = _clean_history(ex, change)
    if found := _defect(ex, table, _widths(trace.cycles), None):
        return found
    return Conclusion(
        "none", "", f"no difference in {ex.verdict.compared} tokens; every row as it should be"
    )


def _widths(cycles: Sequence[Cycle]) -> list[int]:
    """The widths of verify batches, ascending; that of a single row cannot be out of line with itself."""
    return sorted({cycle.width for cycle in cycles} - {1})


def _clean_history(ex: CaseFile, change: Change) -> tuple[WidthTable, bool]:
    """The fork's batch and its row at every width, both on a history that was decoded one token at a time."""
    stage.report("width-1 history")
    trace = ex.speculative
    cycle = trace.cycles[change.cycle]
    n_prompt, start = len(trace.prompt_ids), first_token(trace, cycle)
    ahead = [*cycle.batch, *trace.ids[start + cycle.accepted :]]
    with ex.lab.bench() as bench:
        bench.commit_singly(trace.ids[: start - 1], n_prompt)
        widest = max(WIDEST, change.width + 1)
        table = width_table(bench, ahead, cycle.base, change.row, widest)
    whole = table.logits[change.width]
    reference = ex.vanilla.ids[change.token]
    flips = _pick(ex, whole) != reference
    ex.note(
        "at-fork",
        f"the same batch of {change.width} on a width-1 history",
        "gives the speculative token too"
        if flips
        else "gives the vanilla token: the history of widths is needed",
        token=change.token,
        cycle=change.cycle,
        row=change.row,
        width=change.width,
        flips=flips,
        vanilla_row_reproduced=table.rows[0].digest == ex.vanilla.digests[change.token],
    )
    _note_widths(ex, table)
    return table, flips


def _pick(ex: CaseFile, row: Logits) -> int:
    if ex.case.cell.ignore_eos:
        row = row.copy()
        row[list(ex.lab.model.vocab.end_tokens)] = -np.inf
    return int(row.argmax())


def _note_widths(ex: CaseFile, table: WidthTable) -> None:
    departs, flips = table.departs_at(), table.smallest_flip()
    said = "same bits at every width" if departs is None else f"other bits from width {departs} on"
    said += "" if flips is None else f", another token from width {flips} on"
    ex.note(
        "widths",
        f"that row in batches of 1 to {table.rows[-1].width}, after the same history",
        said,
        classes=table.classes(),
        distance={r.width: r.distance for r in table.rows},
        tokens={r.width: r.token for r in table.rows},
        departs_at=departs,
        smallest_flip=flips,
    )


def _defect(
    ex: CaseFile, table: WidthTable, used: Sequence[int], change: Change | None
) -> Conclusion | None:
    """A `kernel-defect` or `baseline`, when the change is not what reordering a sum makes."""
    silent = "" if change is not None else " (tokens agree)"
    broken = [r.width for r in table.rows if not r.finite] or (
        [change.width] if change is not None and ex.speculative.nonfinite else []
    )
    if broken and (1 in broken or set(broken) & set(used)):
        label: Label = "baseline" if 1 in broken else "kernel-defect"
        what = "width 1 gives" if 1 in broken else f"widths {broken} give"
        return Conclusion(label, "nan", f"{what} NaN or infinity{silent}")
    loners = table.loners()
    odd = [width for width in used if width in loners]
    if odd:
        return Conclusion(
            "kernel-defect",
            f"width {odd[0]}",
            f"width {odd[0]} gives bits that no other width gives, off by {table.at(odd[0]).distance:.3g}{silent}",
        )
    if not (table.one_stands_alone() or _beyond_envelope(ex, table, change)):
        return None
    return _against_reference(ex, table, used, change)


def _beyond_envelope(ex: CaseFile, table: WidthTable, change: Change | None) -> bool:
    envelope = ex.options.envelope
    if change is None or envelope is None or (known := envelope.at(change.width)) is None:
        return False
    apart = table.at(change.width).distance
    if change.seen is not None:
        apart = max(apart, float(np.abs(change.seen - table.logits[1]).max()))
    return apart > OUT_OF_LINE * known.largest[2]


def _against_reference(
    ex: CaseFile, table: WidthTable, used: Sequence[int], change: Change | None
) -> Conclusion | None:
    run = "every width's row against a float32 copy of the target"
    if ex.options.reference is None:
        return Conclusion(
            "unexplained", NEEDS_REFERENCE, "a float32 copy of the target has to be made first"
        )
    if not ex.options.reference:
        ex.note("reference", run, "not made: it would be too large for this machine", made=False)
        return None
    stage.report("reference")
    audited = ex.speculative.cycles[_audited(ex.speculative)]
    token = change.token if change is not None else first_token(ex.speculative, audited)
    prefix = (*ex.speculative.prompt_ids, *ex.speculative.ids[:token])
    truth = reference_row(ex.lab.engine, ex.case, ex.options.reference, prefix)
    errors = {w: error(row, truth) for w, row in table.logits.items()}
    if change is not None and change.seen is not None:
        errors[change.width] = max(errors[change.width], error(change.seen, truth))
    others = float(np.median([e for w, e in errors.items() if w > 1]))
    worst = max(used, key=lambda w: errors[w], default=1)
    nearer = "width 1" if errors[1] <= errors[worst] else f"width {worst}"
    ex.note(
        "reference",
        run,
        f"RMS error {errors[1]:.3g} at width 1, {errors[worst]:.3g} at width {worst}: {nearer} is nearer; "
        "neither is wrong by contract",
        errors=errors,
        made=True,
    )
    if errors[1] > RATIO * others:
        return Conclusion(
            "baseline",
            "",
            f"width 1 is the odd one out: RMS error {errors[1]:.3g}, other widths {others:.3g}",
        )
    if errors[worst] > RATIO * errors[1]:
        return Conclusion(
            "kernel-defect",
            f"width {worst}",
            f"width {worst} is off: RMS error {errors[worst]:.3g}, width 1 {errors[1]:.3g}",
        )
    return None


def _audited(trace: Trace) -> int:
    """The cycle whose row an audit looks at: an early one, which is cheap to come to."""
    return min(1, len(trace.cycles) - 1)


def _in_words(ex: CaseFile, kind: str, change: Change, table: WidthTable) -> str:
    """The evidence for `batch-width` as users read it."""
    vanilla, envelope = ex.vanilla, ex.options.envelope
    margin = vanilla.margins[change.token]
    percentile = percentile_of(margin, vanilla.margins)
    data: dict[str, Any] = {"margin": margin, "margin_percentile": percentile}
    said = f"margin {margin:.2g} is the {ordinal(percentile)} percentile of the arm's own"
    if envelope is not None and (known := envelope.at(change.width)) is not None:
        median, high, largest = known.top2
        data |= {"width": known.width, "median": median, "p95": high, "largest": largest}
        said += (
            f"; top-2 changes at width {known.width}: median {median:.2g}, largest {largest:.2g}"
        )
    if change.seen is not None:
        data["change"] = float(np.abs(change.seen - table.logits[1]).max())
    if ex.options.siblings:
        data["forks_by_draft_length"] = dict(ex.options.siblings)
        data["constant_fork"] = len(set(ex.options.siblings.values())) == 1
    ex.note("envelope", "the fork's margin against measured changes between widths", said, **data)
    return (
        f"same bits without a drafter and without rollback: batch-width numerics, {kind}; "
        f"margin {margin:.2g}, {ordinal(percentile)} percentile"
    )


@dataclass(frozen=True, slots=True)
class Control:
    """The target as its own drafter. A rejection within the envelope is a near-tie and counts neither way."""

    accepted: int
    drafted: int
    rejections: int
    near_ties: int

    @property
    def share(self) -> float:
        """Accepted tokens among those that were decided, near-ties aside."""
        decided = self.accepted + self.rejections - self.near_ties
        return self.accepted / decided if decided else 1.0


def self_control(ex: CaseFile) -> Control:
    """Run the target as its own drafter at the case's draft length."""
    drafter = ex.case.cell.drafter
    assert drafter is not None
    case = replace(ex.case, cell=replace(ex.case.cell, drafter=SelfDraft(drafter.n_max)))
    trace = ex.lab.run(case)
    rejections = near = 0
    for cycle in trace.cycles:
        at = first_token(trace, cycle) + cycle.accepted
        if cycle.accepted == cycle.drafted or at >= len(trace.ids):
            continue
        rejections += 1
        envelope = ex.options.envelope
        known = envelope.at(cycle.width) if envelope is not None else None
        bound = np.inf if known is None else OUT_OF_LINE * known.largest[2]
        is_second = cycle.batch[cycle.accepted + 1] == trace.runners_up[at]
        near += is_second and trace.margins[at] <= bound
    return Control(trace.accepted, trace.drafted, rejections, near)
