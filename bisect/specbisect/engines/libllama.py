"""The libllama engine: both arms straight over llama.cpp's C API, in this process."""

import time
from dataclasses import replace

from specbisect import stage
from specbisect.cell import Case, Cell, DraftModel, NgramSimple, PromptLookup, Scripted, SelfDraft
from specbisect.engines.account import prompt_ids, trace_of
from specbisect.engines.decoding import Observe, Recorder, Speculative, vanilla
from specbisect.engines.drafters import (
    LookupProposer,
    ModelProposer,
    NgramProposer,
    Proposer,
    ScriptedProposer,
)
from specbisect.engines.faults import Faulty, tamper_of
from specbisect.engines.models import Models
from specbisect.errors import BadInput
from specbisect.llama.context import Context, Settings
from specbisect.trace import Counters, Trace


class LibLlama:
    """Runs arms with a fresh context each; models stay loaded."""

    def __init__(self) -> None:
        self.models = Models()

    def run(self, case: Case, observe: Observe | None = None) -> Trace:
        """One arm of `case`: speculative, or vanilla when its cell has no drafter; `observe` sees every row."""
        began, loads = time.perf_counter(), self.models.loads
        cell = case.cell
        model = self.models.get(cell.target, cell)
        prompt = prompt_ids(case, model.vocab)
        stage.report("context")
        with Context(model, Settings.of(cell), tamper=tamper_of(case.fault)) as context:
            recorder = Recorder(context, cell.n_predict, cell.ignore_eos, observe)
            if cell.drafter is None:
                vanilla(context, prompt, recorder)
                trace = trace_of(case, prompt, recorder, ())
                counters = context.counters
            else:
                drafter, draft_context = self.drafter(cell)
                try:
                    arm = speculative_arm(case, context, drafter, recorder)
                    arm.run(prompt)
                finally:
                    drafter.close()
                trace = trace_of(case, prompt, recorder, arm.cycles, draft_context)
                if isinstance(arm, Faulty):
                    trace = replace(trace, resolved={**trace.resolved, "planted": arm.planted})
                counters = context.counters + (
                    draft_context.counters if draft_context else Counters()
                )
        spent = Counters(model_loads=self.models.loads - loads, total_s=time.perf_counter() - began)
        return replace(trace, counters=counters + spent)

    def drafter(self, cell: Cell) -> tuple[Proposer, Context | None]:
        """The drafter of `cell`, and its context when it is a model."""
        match cell.drafter:
            case PromptLookup() as spec:
                return LookupProposer(spec), None
            case NgramSimple() as spec:
                return NgramProposer(spec), None
            case Scripted() as spec:
                return ScriptedProposer(spec), None
            case SelfDraft() | DraftModel() as spec:
                context = self.models.draft_context(cell, spec)
                return ModelProposer(context, spec), context
        raise BadInput(f"the libllama engine has no drafter {cell.drafter}")

    def close(self) -> None:
        """Free every model."""
        self.models.close()


def speculative_arm(
    case: Case, context: Context, drafter: Proposer, recorder: Recorder
) -> Speculative:
    """The speculative loop of `case`, with its planted fault if it has one."""
    if case.fault is None or case.fault.in_kernel:
        return Speculative(context, drafter, recorder, case.cell.width)
    return Faulty(context, drafter, recorder, case.cell.width, case.fault)


def make() -> LibLlama:
    """The engine, as the registry makes it."""
    return LibLlama()
