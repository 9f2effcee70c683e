"""The libllama engine: both arms straight over llama.cpp's C API, in this process."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

from specbisect import stage
from specbisect.cell import (
    Case,
    Cell,
    DraftModel,
    Model,
    NgramSimple,
    PromptLookup,
    Scripted,
    SelfDraft,
)
from specbisect.engines.decoding import Observe, Recorder, Speculative, vanilla
from specbisect.engines.drafters import (
    LookupProposer,
    ModelProposer,
    NgramProposer,
    Proposer,
    ScriptedProposer,
)
from specbisect.engines.faults import Faulty, tamper_of
from specbisect.errors import BadInput
from specbisect.llama import files, library
from specbisect.llama.context import Context, Settings
from specbisect.llama.model import LoadedModel
from specbisect.trace import Counters, Cycle, Trace

MEMORY_SHARE = 0.6
"""Models stay loaded while they fit into this share of the memory that is free."""


class Models:
    """Models loaded in this process, by file and placement; the least recently used go when memory is short."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[tuple[Any, ...], LoadedModel] = OrderedDict()
        self.loads = 0

    def get(self, model: Model, cell: Cell) -> LoadedModel:
        """`model` as `cell` places it, loaded if need be."""
        key = (model.path, cell.n_gpu_layers, cell.split_mode, cell.use_extra_bufts)
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        facts = files.inspect(model.path)
        if model.identity.startswith("sha256:") and model.identity != f"sha256:{facts.sha256}":
            raise BadInput(
                f"{model.path} changed since the run was planned; start a new run with --fresh"
            )
        self._make_room(facts.size)
        stage.report("load")
        loaded = LoadedModel(
            model.path,
            n_gpu_layers=cell.n_gpu_layers,
            split_mode=cell.split_mode,
            use_extra_bufts=cell.use_extra_bufts,
        )
        self.loads += 1
        self._loaded[key] = loaded
        return loaded

    def _make_room(self, size: int) -> None:
        while self._loaded and size > MEMORY_SHARE * psutil.virtual_memory().available:
            _, oldest = self._loaded.popitem(last=False)
            oldest.close()

    def close(self) -> None:
        """Free every model."""
        while self._loaded:
            self._loaded.popitem()[1].close()


class LibLlama:
    """Runs arms with a fresh context each; models stay loaded."""

    def __init__(self) -> None:
        self.models = Models()

    def run(self, case: Case, observe: Observe | None = None) -> Trace:
        """One arm of `case`: speculative, or vanilla when its cell has no drafter; `observe` sees every row."""
        began, loads = time.perf_counter(), self.models.loads
        cell = case.cell
        model = self.models.get(cell.target, cell)
        prompt = prompt_ids(case, model)
        stage.report("context")
        with Context(model, Settings.of(cell), tamper=tamper_of(case.fault)) as context:
            recorder = Recorder(context, cell.n_predict, cell.ignore_eos, observe)
            if cell.drafter is None:
                vanilla(context, prompt, recorder)
                trace = trace_of(case, context, prompt, recorder, ())
                counters = context.counters
            else:
                drafter, draft_context = self.drafter(cell, model)
                arm = speculative_arm(case, context, drafter, recorder)
                try:
                    arm.run(prompt)
                finally:
                    drafter.close()
                trace = trace_of(case, context, prompt, recorder, arm.cycles, draft_context)
                if isinstance(arm, Faulty):
                    trace = replace(trace, resolved={**trace.resolved, "planted": arm.planted})
                counters = context.counters + (
                    draft_context.counters if draft_context else Counters()
                )
        spent = Counters(model_loads=self.models.loads - loads, total_s=time.perf_counter() - began)
        return replace(trace, counters=counters + spent)

    def drafter(self, cell: Cell, target: LoadedModel) -> tuple[Proposer, Context | None]:
        """The drafter of `cell`, and its context when it is a model."""
        match cell.drafter:
            case PromptLookup() as spec:
                return LookupProposer(spec), None
            case NgramSimple() as spec:
                return NgramProposer(spec), None
            case Scripted() as spec:
                return ScriptedProposer(spec), None
            case SelfDraft() as spec:
                context = Context(target, Settings.of(cell))
            case DraftModel() as spec:
                settings = replace(Settings.of(cell), type_k=spec.type_k, type_v=spec.type_v)
                context = Context(self.models.get(spec.model, cell), settings)
            case _:
                raise BadInput(f"the libllama engine has no drafter {cell.drafter}")
        return ModelProposer(context, spec), context

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


def prompt_ids(case: Case, model: LoadedModel) -> tuple[int, ...]:
    """The prompt as given, or tokenised by the target; never empty."""
    prompt = case.prompt
    ids = prompt.ids if prompt.ids is not None else model.vocab.tokenize(prompt.text)
    if not ids:
        raise BadInput(f"prompt {prompt.id} has no tokens; give it some text")
    bad = [i for i in ids if not 0 <= i < model.n_vocab]
    if bad:
        raise BadInput(
            f"prompt {prompt.id}: token id {bad[0]} is not in the vocabulary of {model.n_vocab}"
        )
    return tuple(ids)


def trace_of(
    case: Case,
    context: Context,
    prompt: Sequence[int],
    recorder: Recorder,
    cycles: Sequence[Cycle],
    draft: Context | None = None,
) -> Trace:
    """What the arm did, with what was resolved and where it ran."""
    choices, vocab = recorder.choices, context.model.vocab
    resolved: dict[str, Any] = {"target": context.resolved}
    provenance: dict[str, Any] = {"host": library.environment(), "target": facts_of(context)}
    unhonoured = context.unhonoured()
    if draft is not None:
        resolved["draft"] = draft.resolved
        provenance["draft"] = facts_of(draft)
        unhonoured += [f"draft {name}" for name in draft.unhonoured()]
    return Trace(
        arm="vanilla" if case.cell.drafter is None else "speculative",
        prompt_ids=tuple(prompt),
        ids=tuple(recorder.ids),
        finish=recorder.finish or "length",
        pieces=tuple(vocab.piece(token).decode("latin-1") for token in recorder.ids),
        digests=tuple(c.digest for c in choices),
        best=tuple(c.token for c in choices),
        runners_up=tuple(c.runner_up for c in choices),
        margins=tuple(c.margin for c in choices),
        nonfinite=tuple(i for i, c in enumerate(choices) if not c.finite),
        cycles=tuple(cycles),
        drafted=sum(c.drafted for c in cycles),
        accepted=sum(c.accepted for c in cycles),
        resolved=resolved,
        unhonoured=tuple(unhonoured),
        provenance=provenance,
    )


def facts_of(context: Context) -> dict[str, Any]:
    """What a trace says about a model file; no path."""
    return files.inspect(context.model.path).to_json()


def make() -> LibLlama:
    """The engine, as the registry makes it."""
    return LibLlama()
