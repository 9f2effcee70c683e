"""What a worker process is asked to do with a candidate: run both arms, and prove no more than the label takes.

A full examination repeats both arms and looks at everything. For the commonest labels much less is a proof: the arms
run side by side and stop where they part, the speculative one is replayed up to there, and its last batch is tried on
a history of width 1. What cannot be had so cheaply is examined in full; what a search ends with always is.
"""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from specbisect.cell import Case, Scripted
from specbisect.diagnose.conclusion import Options
from specbisect.diagnose.finding import Finding, Label
from specbisect.diagnose.replay import cycle_of, first_token, replay
from specbisect.diagnose.run import examine_case, measure_envelope
from specbisect.engines import engine, run_arm
from specbisect.engines.decoding import Recorder, Speculative
from specbisect.engines.drafters import LookupProposer, Proposer
from specbisect.engines.faults import tamper_of
from specbisect.engines.libllama import LibLlama, speculative_arm
from specbisect.llama.context import Context, Settings
from specbisect.llama.vocab import open_vocab
from specbisect.narrow.candidate import compares_widths, own_tokens
from specbisect.narrow.gate import Seen
from specbisect.narrow.tape import Tape, TapeLab, Tapes
from specbisect.trace import Counters, Cycle, Trace

CHEAP: frozenset[Label] = frozenset({"batch-width", "state", "verification"})
"""Labels that `look` proves without a full examination."""
_ENDS = frozenset({b".", b"!", b"?", b"\n"})


@dataclass(frozen=True, slots=True)
class Look:
    """What is looked for: a label and its sub-kind.

    `weighed` when it was earned by a comparison with a float32 copy of the target; `reference` is the path of that
    copy, None before it is made, "" when it cannot be.
    """

    label: Label
    kind: str = ""
    weighed: bool = False
    reference: str | None = None


def look(case: Case, how: Look) -> Seen:
    """What `case` shows. Raises as engines do."""
    if how.label in CHEAP and case.cell.engine == "libllama":
        return _brief(case, whole=how.label == "state", silent=how.kind == "silent")
    return _examined(case, how if how.weighed else replace(how, reference=""))


def examined(case: Case, how: Look) -> Finding:
    """The finding on `case`, after a full examination."""
    vanilla, speculative = run_arm(case.vanilla), run_arm(case)
    return examine_case(case, vanilla, speculative, _options(case, vanilla, how))


def line_ends(path: str, ids: Sequence[int]) -> frozenset[int]:
    """Those of `ids` that end a line or a sentence in the vocabulary of the GGUF at `path`."""
    with open_vocab(path) as vocab:
        return frozenset(i for i in set(ids) if vocab.piece(i).rstrip(b" ")[-1:] in _ENDS)


@functools.cache
def _tapes() -> Tapes:
    return Tapes(_libllama())


def _libllama() -> LibLlama:
    found = engine("libllama")
    assert isinstance(found, LibLlama)
    return found


def _examined(case: Case, how: Look) -> Seen:
    _tapes().close()  # its context would be in the way of the models of drafters
    vanilla = run_arm(case.vanilla)
    if compares_widths(case.cell.drafter):
        drafter = Scripted(own_tokens(vanilla.ids, case.cell.width))
        case = replace(case, cell=replace(case.cell, drafter=drafter))
    speculative = run_arm(case)
    options = _options(case, vanilla, how)
    found = examine_case(case, vanilla, speculative, options)
    cost = vanilla.counters + speculative.counters + found.counters
    if options.envelope:
        cost += options.envelope.counters
    fork = found.verdict.fork
    deciding = cycle_of(speculative, fork) if fork is not None else None
    last = deciding[0] if deciding else len(speculative.cycles) - 1
    seen = _seen(found.label, found.kind, speculative, last, fork)
    return replace(seen, counters=cost)


def _options(case: Case, vanilla: Trace, how: Look) -> Options:
    """Those of a full examination, with the envelope where the label rests on it."""
    options = Options(audit=how.label == "draft-alignment", reference=how.reference)
    widths = [w for w in {2, 4, case.cell.width} if w <= len(vanilla.ids)]
    if not how.weighed or not widths or len(vanilla.ids) < 3:
        return options
    return replace(options, envelope=measure_envelope(case.vanilla, vanilla, tuple(widths)))


class _Vanillas(LookupProposer):
    """Drafts what the vanilla arm says, at most `n_max` tokens."""

    def __init__(self, tape: Tape, n_max: int) -> None:
        self.tape, self.n_max = tape, n_max

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        """The vanilla arm's next tokens."""
        n = len(history) - len(self.tape.prompt)
        return list(self.tape.ids(n + min(self.n_max, limit))[n:])


def _brief(case: Case, *, whole: bool, silent: bool) -> Seen:
    """The label of a libllama case up to its first fork.

    With `whole`, a fork that its own batches explain does not end it: a wrong state may come later. With `silent`,
    rows are compared where no token differs.
    """
    tapes = _tapes()
    tape = tapes.get(case)
    with ExitStack() as opened:
        race = _Race(case, tape, opened)
        seen = race.verdict(whole=whole, silent=silent)
        return replace(seen, counters=race.spent() + tapes.spent())


class _Race:
    """The speculative arm beside the tape of the vanilla one; what it opens is closed with `opened`."""

    def __init__(self, case: Case, tape: Tape, opened: ExitStack) -> None:
        libllama, cell = _libllama(), case.cell
        self.case, self.tape = case, tape
        self.context = opened.enter_context(
            Context(tape.model, Settings.of(cell), tamper=tamper_of(case.fault))
        )
        self.recorder = Recorder(self.context, cell.n_predict, cell.ignore_eos)
        drafter, self.draft_context = self._drafter(libllama)
        opened.callback(drafter.close)
        self.arm: Speculative = speculative_arm(case, self.context, drafter, self.recorder)
        self.lab = TapeLab(libllama, case, tape.prompt, tape=tape, start=1)
        self.fork: int | None = None

    def _drafter(self, libllama: LibLlama) -> tuple[Proposer, Context | None]:
        if compares_widths(self.case.cell.drafter):
            return _Vanillas(self.tape, self.case.cell.width - 1), None
        return libllama.drafter(self.case.cell)

    def spent(self) -> Counters:
        """What the arm, its drafter and the experiments on it cost."""
        drafting = self.draft_context.counters if self.draft_context else Counters()
        return self.context.counters + drafting + self.lab.counters

    def verdict(self, *, whole: bool, silent: bool) -> Seen:
        """See `_brief`."""
        self._begin()
        self._go_on(past_fork=False)
        if self.fork is not None:
            seen = self._cause()
            if seen.label == "state" or not whole or self.recorder.finish is not None:
                return seen
            self._go_on(past_fork=True)
            return self._cause()
        if not any(cycle.drafted for cycle in self.arm.cycles):
            return Seen("not-engaged")
        return self._cause() if silent else self._nothing()

    def _nothing(self) -> Seen:
        pairs = zip(self.recorder.choices, self.tape.choices(len(self.recorder.ids)), strict=False)
        return Seen("none", departs=any(a.digest != b.digest for a, b in pairs))

    def _begin(self) -> None:
        """Start both where the first draft is; before it, the arms are one and the same."""
        arm, tape, drafter = self.arm, self.tape, self.case.cell.drafter
        start = 1
        fault = self.case.fault
        if isinstance(drafter, Scripted) and drafter.drafts and (not fault or fault.in_kernel):
            start = max(1, min(at for at, _ in drafter.drafts))
        if not tape.can_start_anywhere:
            start = 1
        ids = tape.ids(min(start, self.case.cell.n_predict))
        tape.lend(self.context, len(ids))
        arm.history = list(tape.prompt)
        arm.drafter.begin(tape.prompt)
        arm.commit(ids, tape.choices(len(ids)))
        n = len(tape.prompt)
        arm.cycles += [Cycle(n + i, (token,), 0) for i, token in enumerate(ids[:-1])]

    def _go_on(self, *, past_fork: bool) -> None:
        arm, recorder = self.arm, self.recorder
        while recorder.finish is None and (past_fork or self.fork is None):
            base = len(arm.history) - 1
            if recorder.fits(base):
                arm.cycle(base)
                self.fork = self._first_difference() if self.fork is None else self.fork

    def _first_difference(self) -> int | None:
        ids = self.recorder.ids
        vanilla = self.tape.ids(len(ids))
        pairs = enumerate(zip(ids, vanilla, strict=False))
        found = next((i for i, (a, b) in pairs if a != b), None)
        return len(vanilla) if found is None and len(vanilla) < len(ids) else found

    @property
    def trace(self) -> Trace:
        """The speculative arm so far."""
        choices = self.recorder.choices
        return Trace(
            "speculative",
            self.tape.prompt,
            tuple(self.recorder.ids),
            self.recorder.finish or "length",
            digests=tuple(c.digest for c in choices),
            best=tuple(c.token for c in choices),
            nonfinite=tuple(i for i, c in enumerate(choices) if not c.finite),
            cycles=tuple(self.arm.cycles),
        )

    def _cause(self) -> Seen:
        """The label of what has happened so far, in the order in which a full examination asks."""
        trace, fork = self.trace, self.fork
        deciding = cycle_of(trace, fork) if fork is not None else None
        last = deciding[0] if deciding else len(trace.cycles) - 1
        if (wrong := self._misread(trace)) is not None:
            return _seen("verification", wrong, trace, last, fork)
        if trace.nonfinite or any(not c.finite for c in self.tape.choices(len(trace.ids))):
            return _seen("kernel-defect", "nan", trace, last, fork)
        first = next((i for i, c in enumerate(trace.cycles) if c.drafted), 0)
        self.lab.start = first_token(trace, trace.cycles[first])
        differing = replay(self.lab, replace(trace, cycles=trace.cycles[first:])).differing
        if differing:
            last = max(last, first + differing[0]) if fork is not None else first + differing[0]
            return _seen("state", "" if fork is not None else "silent", trace, last, fork)
        if fork is None:
            return self._nothing()
        if deciding is None:
            return _seen("unexplained", "", trace, last, fork)
        kind = "at-fork" if self._flips(trace, *deciding, fork) else "accumulated"
        return _seen("batch-width", kind, trace, last, fork)

    def _misread(self, trace: Trace) -> str | None:
        """The sub-kind of `verification`, if the arm took a token that its own row does not choose."""
        if trace.ids != trace.best:
            return "not-argmax"
        ends = () if self.case.cell.ignore_eos else self.tape.model.vocab.end_tokens
        return "past-eog" if any(token in ends for token in trace.ids[:-1]) else None

    def _flips(self, trace: Trace, cycle: int, row: int, fork: int) -> bool:
        """Whether the fork's batch on a history of width 1 departs too."""
        if all(c.width == 1 for c in trace.cycles[:cycle]):
            return True  # the replay, which gave the same bits, was on such a history
        batch = trace.cycles[cycle]
        self.lab.start = first_token(trace, batch)
        with self.lab.bench() as bench:
            rows = bench.try_out(batch.batch, batch.base)
        vanilla = self.tape.ids(fork + 1)
        return len(vanilla) > fork and self.recorder.read(rows[row]).token != vanilla[fork]


def _seen(label: Label, kind: str, trace: Trace, last: int, fork: int | None) -> Seen:
    """What is said of a trace that shows `label` in its cycles up to number `last`."""
    if not trace.cycles:
        return Seen(label, kind, fork)
    cycles = trace.cycles[: last + 1]
    starts = [first_token(trace, cycle) for cycle in cycles]
    start = starts[-1]
    return Seen(
        label,
        kind,
        fork,
        start=start,
        row=max(0, fork - start) if fork is not None else 0,
        needed=max(s + c.width for s, c in zip(starts, cycles, strict=True)),
        drafts=tuple((s, c.batch[1:]) for s, c in zip(starts, cycles, strict=True) if c.drafted),
        history=trace.ids[: start - 1],
    )
