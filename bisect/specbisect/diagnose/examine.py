"""One case, examined: the ordered experiments of DESIGN section 7, in this process, until one earns a label.

`examine` is what worker processes are asked to call. It never guesses: a label is given by the experiment that
proves it, and without one the finding is ``unexplained`` and keeps everything that was seen.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specbisect import stage
from specbisect.cell import Case, DraftModel, SelfDraft
from specbisect.diagnose import numeric
from specbisect.diagnose.alignment import align
from specbisect.diagnose.casefile import CaseFile
from specbisect.diagnose.conclusion import Conclusion, Options
from specbisect.diagnose.drafts import draft_replay
from specbisect.diagnose.finding import Finding
from specbisect.diagnose.lab import Lab, scripted
from specbisect.diagnose.replay import (
    Replay,
    cycle_of,
    first_token,
    positive_control,
    replay,
    replay_as,
)
from specbisect.engines.decoding import Observe
from specbisect.engines.libllama import LibLlama
from specbisect.llama.context import Logits
from specbisect.trace import Trace

SELF_ACCEPTANCE = 0.98
"""The target as its own drafter is accepted at least this often, near-ties aside."""


class Examination(CaseFile):
    """The experiments on one case, each run once."""

    def conclude(self) -> Conclusion:
        """The first label that an experiment earns, in order."""
        if not self.speculative.drafted:
            return self._not_engaged()
        if not self._control():
            return Conclusion(
                "unexplained", "void", "the positive control failed: a wrong row was called equal"
            )
        first = self._replay()
        watched = self._watched(first)
        rows: dict[int, Logits] = {}
        if found := self._repeat(first, watched, rows):
            return found
        if found := self._verification():
            return found
        if not first.equal:
            return self._state(first, rows)
        if self.verdict.fork is None and not (self.speculative.nonfinite or self.vanilla.nonfinite):
            return self._alignment() or numeric.audit(self)
        found = numeric.conclude(self, rows)
        # Wrong rows explain whatever was rejected, for drafts were held against them.
        if found.label in ("kernel-defect", "baseline") or found.kind == numeric.NEEDS_REFERENCE:
            return found
        aligned = self._alignment()
        return found if aligned is None else replace(found, also=(*found.also, aligned.label))

    def _not_engaged(self) -> Conclusion:
        self.note(
            "engagement",
            "count drafted tokens",
            "nothing was drafted in the whole answer",
            drafted=0,
        )
        return Conclusion("not-engaged", "", "a drafter was asked for and nothing was drafted")

    def _control(self) -> bool:
        stage.report("positive control")
        told = positive_control(self.lab, self.speculative)
        outcome = (
            "called different, as it must be" if told else "called equal: this diagnosis is void"
        )
        self.note("positive-control", "cycle 0 with one wrong token", outcome, told=told)
        return told

    def _replay(self) -> Replay:
        stage.report("replay")
        keep = []
        if self.verdict.fork is not None and (at := cycle_of(self.speculative, self.verdict.fork)):
            keep.append(at[0])
        found = replay(self.lab, self.speculative, keep)
        n, bad = len(self.speculative.cycles), len(found.differing)
        outcome = f"rows bit-identical in {n - bad} of {n} cycles"
        data: dict[str, Any] = {"cycles": n, "equal": n - bad, "prompt_equal": found.prompt_equal}
        if found.differing:
            first = found.differing[0]
            outcome += f", first different in cycle {first}"
            data |= {"first_bad_cycle": first} | self._around(first)
        self.note(
            "replay",
            "every verify batch again, same width, no drafter, no rollback",
            outcome,
            **data,
        )
        return found

    def _around(self, cycle: int) -> dict[str, Any]:
        here = self.speculative.cycles[cycle]
        found = {"accepted": here.accepted, "rejected": here.drafted - here.accepted}
        if cycle:
            before = self.speculative.cycles[cycle - 1]
            found |= {
                "accepted_before": before.accepted,
                "rejected_before": before.drafted - before.accepted,
                "after_reject": before.drafted > before.accepted,
            }
        return found

    def _watched(self, first: Replay) -> set[int]:
        """Token indices whose batch rows the repeated speculative arm should keep."""
        watched = set()
        if first.differing:
            watched.add(first_token(self.speculative, self.speculative.cycles[first.differing[0]]))
        if (fork := self.verdict.fork) is not None and (at := cycle_of(self.speculative, fork)):
            watched.add(first_token(self.speculative, self.speculative.cycles[at[0]]))
        return watched

    def _repeat(
        self, first: Replay, watched: set[int], rows: dict[int, Logits]
    ) -> Conclusion | None:
        """Each arm again; `rows` receives the watched batches of the speculative arm."""
        stage.report("repeat")
        again = scripted(self.case, self.speculative)
        for arm, case, original in (
            ("speculative", again, self.speculative),
            ("vanilla", self.case.vanilla, self.vanilla),
        ):
            observe = _keep(watched, rows) if arm == "speculative" else None
            for _ in range(self.options.repeats):
                trace = self.lab.run(case, observe)
                if found := self._differs(arm, original, trace, first):
                    return found
        return None

    def _differs(self, arm: str, original: Trace, again: Trace, first: Replay) -> Conclusion | None:
        run = "the arm again in another process" + (
            ", its drafts scripted" if arm == "speculative" else ""
        )
        tokens = _first_difference(original.ids, again.ids)
        bits = _first_difference(original.digests, again.digests)
        if bits is None and tokens is None:
            self.note(
                f"repeat-{arm}",
                run,
                f"same tokens and same bits in {len(again.ids)} tokens",
                equal=True,
            )
            return None
        what = "tokens" if tokens is not None else "bits"
        at = tokens if tokens is not None else bits
        self.note(
            f"repeat-{arm}",
            run,
            f"other {what} from token {at} on",
            equal=False,
            tokens=tokens,
            bits=bits,
        )
        if tokens is None and not self._replays_repeat(first):
            return None  # the backend itself is not bitwise repeatable: its noise is what counts from here on
        return Conclusion(
            "nondeterministic",
            arm,
            f"the {arm} arm differs from itself when repeated, from token {at} on",
        )

    def _replays_repeat(self, first: Replay) -> bool:
        stage.report("replay noise")
        second = replay_as(self.lab, self.speculative, shared=first.shared)
        same = first.digests == second.digests
        outcome = "bit-identical" if same else "not bit-identical: the backend is not repeatable"
        self.note("replay-noise", "the replay against itself", outcome, equal=same)
        return same

    def _verification(self) -> Conclusion | None:
        trace = self.speculative
        wrong = [
            i
            for i, (token, best) in enumerate(zip(trace.ids, trace.best, strict=True))
            if token != best
        ]
        run = "every emitted token against the argmax of its own verify row"
        if wrong:
            at, (cycle, row) = wrong[0], cycle_of(trace, wrong[0]) or (0, 0)
            said = f"token {at} (cycle {cycle}, row {row}) is {trace.ids[at]}, its row says {trace.best[at]}"
            self.note("verification", run, said, token=at, cycle=cycle, row=row, wrong=len(wrong))
            return Conclusion(
                "verification", "not-argmax", f"emitted a token its own row does not choose: {said}"
            )
        beyond = self._past_end()
        if beyond is not None:
            said = (
                f"{len(trace.ids) - beyond - 1} tokens after the end-of-generation token {beyond}"
            )
            self.note("verification", run, said, token=beyond, past_end=True)
            return Conclusion("verification", "past-eog", f"the speculative arm reports {said}")
        self.note("verification", run, f"all {len(trace.ids)} tokens are", wrong=0)
        return None

    def _past_end(self) -> int | None:
        if self.case.cell.ignore_eos:
            return None
        ends = set(self.lab.model.vocab.end_tokens)
        found = next((i for i, token in enumerate(self.speculative.ids) if token in ends), None)
        return found if found is not None and found < len(self.speculative.ids) - 1 else None

    def _state(self, first: Replay, rows: Mapping[int, Logits]) -> Conclusion:
        if not first.prompt_equal:
            return Conclusion("unexplained", "prompt", "the row after the prompt is not reproduced")
        cycle = first.differing[0]
        data = self._size_of(cycle, rows, first.shared)
        here = self.speculative.cycles[cycle]
        around = self._around(cycle)
        silent = self.verdict.fork is None
        after = (
            f"after a cycle that accepted {around['accepted_before']} and rejected {around['rejected_before']}"
            if cycle
            else "in the first cycle"
        )
        size = (
            f"max |Δlogit| {data['max_difference']:.3g}"
            if "max_difference" in data
            else "size unknown"
        )
        healed = data.get("healed")
        self.note(
            "state",
            "the first different cycle against the replay and against a fresh prefill of the same prefix",
            f"{size}; a fresh prefill {'heals' if healed else 'does not heal'} it",
            cycle=cycle,
            base=here.base,
            **around,
            **data,
        )
        return Conclusion(
            "state",
            "silent" if silent else "",
            f"without rollback the same batches give other bits from cycle {cycle} on, {after}: "
            f"the memory held something else ({size})",
        )

    def _size_of(self, number: int, rows: Mapping[int, Logits], shared: bool) -> dict[str, Any]:
        """How far the arm's rows are from the replay's in that cycle; whether a fresh prefill is near the replay."""
        cycle = self.speculative.cycles[number]
        seen = rows.get(first_token(self.speculative, cycle))
        right = replay_as(self.lab, self.speculative, [number], shared=shared).kept[number]
        kept = slice(0, cycle.accepted + 1)
        prefix = (*self.speculative.prompt_ids, *self.speculative.ids)[: cycle.base]
        with Lab(self.lab.engine, self.case, prefix).bench() as bench:
            fresh = bench.try_out(cycle.batch, cycle.base)
        to_fresh = float(np.abs(fresh[kept] - right[kept]).max())
        data: dict[str, Any] = {"prefill_difference": to_fresh}
        if seen is not None:
            off = seen[kept] - right[kept]
            data["max_difference"] = float(np.abs(off).max())
            data["rms_difference"] = float(np.sqrt(np.mean(off.astype(np.float64) ** 2)))
            data["healed"] = to_fresh < data["max_difference"]
        if self.options.envelope and (known := self.options.envelope.at(cycle.width)):
            data["envelope_largest"] = known.largest[2]
        return data

    def _alignment(self) -> Conclusion | None:
        trace = self.speculative
        alignment = align(trace)
        acceptance = trace.accepted / trace.drafted
        if alignment is not None and alignment.shift is not None:
            shift = alignment.shift
            said = (
                f"acceptance {acceptance:.2f}; drafts moved by {shift:+d} match "
                f"{alignment.matches[shift]:.2f} instead of {alignment.matches[0]:.2f}"
            )
            self.note(
                "alignment",
                "drafts against the answer, moved",
                said,
                matches=dict(alignment.matches),
            )
            return Conclusion(
                "draft-alignment", f"shift {shift:+d}", f"shift by {shift} explains it: {said}"
            )
        if self.options.audit and isinstance(self.case.cell.drafter, DraftModel | SelfDraft):
            return self._draft_replay() or self._self_control()
        return None

    def _draft_replay(self) -> Conclusion | None:
        stage.report("draft replay")
        run = "every draft again, by a fresh draft context that is never rolled back"
        wrong = draft_replay(self.lab, self.speculative)
        n = len(self.speculative.cycles)
        if not wrong:
            self.note("draft-replay", run, f"the same drafts in all {n} cycles", differing=[])
            return None
        said = f"other drafts in {len(wrong)} of {n} cycles, first in cycle {wrong[0]}"
        self.note("draft-replay", run, said, differing=wrong)
        return Conclusion(
            "draft-alignment", "draft-state", f"the drafter's own memory is wrong: {said}"
        )

    def _self_control(self) -> Conclusion | None:
        stage.report("self control")
        control = numeric.self_control(self)
        said = (
            f"{control.accepted} of {control.drafted} accepted, {control.near_ties} near-ties aside"
        )
        share = control.share
        self.note("self-control", "the target as its own drafter", said, acceptance=share)
        if share >= SELF_ACCEPTANCE:
            return None
        return Conclusion(
            "draft-alignment",
            "self-control",
            f"the target as its own drafter is accepted only {share:.2f} of the time: drafts are fed or kept wrongly",
        )


def _keep(watched: set[int], rows: dict[int, Logits]) -> Observe:
    def observe(token: int, logits: Logits) -> None:
        if token in watched:
            rows[token] = logits.copy()

    return observe


def _first_difference(a: tuple[Any, ...], b: tuple[Any, ...]) -> int | None:
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def examine(
    engine: LibLlama, case: Case, vanilla: Trace, speculative: Trace, options: Options
) -> Finding:
    """The finding on one case, by experiments in this process."""
    examination = Examination(engine, case, vanilla, speculative, options)
    conclusion = examination.conclude()
    return Finding(
        case=case,
        verdict=examination.verdict,
        label=conclusion.label,
        kind=conclusion.kind,
        summary=conclusion.summary,
        also=conclusion.also,
        evidence=tuple(examination.evidence),
        vanilla=vanilla,
        speculative=speculative,
        counters=examination.lab.counters,
    )
