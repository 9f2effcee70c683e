"""The bench experiments are made on: the case's own model and settings, fresh contexts, every evaluation counted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from specbisect.cell import Case, Scripted
from specbisect.engines.decoding import Observe, read_prompt
from specbisect.engines.faults import tamper_of
from specbisect.engines.libllama import LibLlama
from specbisect.llama.context import Context, Logits, Settings, rows_of
from specbisect.llama.model import LoadedModel
from specbisect.trace import Counters, Trace

SCRATCH = 1
"""The sequence that rejected rows and side experiments ride on."""


@dataclass(slots=True)
class Lab:
    """Experiments on one case. `counters` adds up what they cost."""

    engine: LibLlama
    case: Case
    prompt: tuple[int, ...]
    counters: Counters = field(default_factory=Counters)

    @property
    def model(self) -> LoadedModel:
        """The target, loaded."""
        return self.engine.models.get(self.case.cell.target, self.case.cell)

    def run(self, case: Case, observe: Observe | None = None) -> Trace:
        """An arm, counted."""
        trace = self.engine.run(case, observe)
        self.counters += trace.counters
        return trace

    @contextmanager
    def bench(self) -> Iterator["Bench"]:
        """A fresh context with a scratch sequence beside sequence 0, the prompt evaluated.

        It is unified: one that is not splits a batch by sequence, and the width would not be the same.
        """
        settings = replace(Settings.of(self.case.cell), n_seq_max=2, kv_unified=True)
        with Context(self.model, settings, tamper=tamper_of(self.case.fault)) as context:
            row = read_prompt(context, self.prompt).copy()
            try:
                yield Bench(context, row)
            finally:
                self.counters += context.counters


@dataclass(slots=True)
class Bench:
    """A context with a prompt in sequence 0, and the row after the prompt."""

    context: Context
    prompt_row: Logits

    def commit(self, ids: Sequence[int], start: int) -> Logits:
        """Evaluate `ids` in one batch on sequence 0, for good; their rows."""
        return self.context.evaluate(rows_of(ids, start))

    def commit_singly(self, ids: Sequence[int], start: int) -> None:
        """Evaluate `ids` on sequence 0 one by one, for good: a width-1 history."""
        for i, token in enumerate(ids):
            self.context.evaluate(rows_of([token], start + i))

    def try_out(self, ids: Sequence[int], start: int, lead: Sequence[int] = ()) -> Logits:
        """The rows `ids` would give after sequence 0, in one batch of that width, leaving sequence 0 as it is.

        `lead` are tokens before them that are decoded one by one.

        They are evaluated on a copy of the sequence, which shares its cells and is dropped again, so that this works
        for memories that cannot be cut and never rolls sequence 0 back in place. Copied: the caller keeps them.
        """
        self.context.copy(0, SCRATCH)
        for i, token in enumerate(lead):
            self.context.evaluate(rows_of([token], start - len(lead) + i, sequence=SCRATCH))
        rows = self.context.evaluate(rows_of(ids, start, sequence=SCRATCH)).copy()
        self.context.remove(SCRATCH, -1)
        return rows

    def verify(
        self, ids: Sequence[int], start: int, accepted: int, *, shared: bool = False
    ) -> Logits:
        """One batch whose rejected rows ride on the scratch sequence: same width, nothing to roll back.

        With `shared`, the scratch sequence holds the history and the committed rows too, so that rejected rows see
        what they saw and compute what they computed: a mixture of experts sorts the rows of a batch by what is in
        them, and a row's bits may depend on its company.
        """
        rows = rows_of(ids, start)
        if shared:
            self.context.copy(0, SCRATCH)
            rows = [row._replace(also=SCRATCH) for row in rows]
        rows[accepted + 1 :] = rows_of(ids[accepted + 1 :], start + accepted + 1, sequence=SCRATCH)
        logits = self.context.evaluate(rows)
        self.context.remove(SCRATCH, -1)
        return logits


def scripted(case: Case, trace: Trace) -> Case:
    """The speculative case again with the drafts that `trace` shows, and no drafter model.

    Faults of the drafter are already in those drafts and are not planted again.
    """
    assert case.cell.drafter is not None
    drafts = tuple(
        (cycle.base - len(trace.prompt_ids) + 1, cycle.batch[1:])
        for cycle in trace.cycles
        if cycle.drafted
    )
    drafter = Scripted(drafts, limit=case.cell.drafter.n_max)
    fault = case.fault if case.fault is None or not case.fault.in_drafter else None
    return replace(case, cell=replace(case.cell, drafter=drafter), fault=fault)
