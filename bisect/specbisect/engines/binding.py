"""The binding engine: arms run on ``llama_cpp.Llama.generate``, the speculative one with its ``draft_model``.

Sampling, accepting, rolling back and reusing prefixes are the binding's own; it is only watched from outside, through
`Llama.eval`, which every evaluation goes through, and through the drafter, which it lets its user bring along. Its
memory is cut without looking whether that worked, and a draft that n_batch splits aborts the process: what comes of it
is the answer.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from specbisect import stage
from specbisect.cell import Case, Cell, DraftModel, PromptLookup, SelfDraft, drafter_label
from specbisect.engines.account import prompt_ids, trace_of
from specbisect.engines.decoding import Recorder
from specbisect.engines.drafters import ModelProposer, Proposer
from specbisect.engines.models import Models
from specbisect.engines.scenario import ALONE, Played, Scenario, ids_of
from specbisect.errors import BadInput, EngineFault
from specbisect.llama import library
from specbisect.llama.context import Context, Settings, resolve, unhonoured
from specbisect.llama.vocab import Vocab
from specbisect.trace import ArmName, Counters, Cycle, Trace

Ids = npt.NDArray[np.intc]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One call of `Llama.eval`: `batch` from position `base` on, cut into pieces of n_batch."""

    base: int
    batch: tuple[int, ...]
    seconds: float


class Watched(llama_cpp.Llama):
    """A `Llama` that writes down what it evaluates, and knows what became of its settings.

    Raises `EngineFault` with stage ``load`` or ``context`` when it cannot be made.
    """

    def __init__(self, cell: Cell) -> None:
        self.path = Path(cell.target.path)
        self.settings = Settings.of(cell)
        self.evaluations: list[Evaluation] = []
        lib = library.load()
        n_threads = cell.n_threads or library.cores()
        with library.listening() as log:
            try:
                super().__init__(
                    str(self.path),
                    n_gpu_layers=cell.n_gpu_layers,
                    split_mode=getattr(lib, f"LLAMA_SPLIT_MODE_{cell.split_mode.upper()}"),
                    seed=cell.seed,
                    n_ctx=cell.n_ctx,
                    n_batch=cell.n_batch,
                    n_ubatch=cell.n_ubatch,
                    n_threads=n_threads,
                    n_threads_batch=cell.n_threads_batch or n_threads,
                    flash_attn=cell.flash_attn == "on",  # auto is left to the binding: off
                    type_k=GGMLQuantizationType[cell.type_k.upper()].value,
                    type_v=GGMLQuantizationType[cell.type_v.upper()].value,
                    swa_full=cell.swa_full,
                    op_offload=cell.op_offload,
                    logits_all=True,  # what a drafter makes of it; so the vanilla arm has it too
                    verbose=True,  # else the file descriptor that an abort is reported on is closed meanwhile
                )
            except ValueError as error:
                step = "context" if hasattr(self, "_model") else "load"
                reasons = [line for line in log if "error" in line.lower()] or log[-1:]
                raise EngineFault(
                    step, f"{self.path.name}: {(reasons or [str(error)])[0]}"
                ) from error
        self.vocab = Vocab(lib.llama_model_get_vocab(self.model))
        self.resolved = resolve(self.ctx, self.settings, log)

    @property
    def n_ctx_seq(self) -> int:
        """How many positions there is room for: llama.cpp rounds n_ctx up, the binding's own arrays are not."""
        return min(len(self.input_ids), int(self.resolved["n_ctx_seq"]))

    def unhonoured(self) -> list[str]:
        """Settings that were asked for and not followed."""
        return unhonoured(self.settings, self.resolved)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate, and write it down."""
        base, batch = self.n_tokens, tuple(int(token) for token in tokens)
        began = time.perf_counter()
        super().eval(tokens)
        self.evaluations.append(Evaluation(base, batch, time.perf_counter() - began))

    @property
    def counters(self) -> Counters:
        """What the evaluations cost."""
        return Counters(
            decode_calls=sum(-(-len(e.batch) // self.n_batch) for e in self.evaluations),
            decoded_tokens=sum(len(e.batch) for e in self.evaluations),
            decode_s=sum(e.seconds for e in self.evaluations),
        )


class Timed(LlamaDraftModel):
    """A drafter of the binding's, and how long each draft took."""

    def __init__(self, drafter: LlamaDraftModel) -> None:
        self._drafter = drafter
        self.seconds: list[float] = []

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        """The draft that is to follow `input_ids`: prompt and everything committed."""
        number = len(self.seconds)
        stage.report(f"draft {number}")
        began = time.perf_counter()
        draft = self._drafter(input_ids, **kwargs)
        self.seconds.append(time.perf_counter() - began)
        stage.report(f"verify {number}")
        return draft


class Following(LlamaDraftModel):
    """A drafter of the libllama engine, called as the binding calls its own: with all ids so far.

    What became of the last draft follows from how many they are. Drafts end before position `end`, as llama-server's
    do: where the answer or the context does.
    """

    def __init__(self, proposer: Proposer, end: int) -> None:
        self._proposer = proposer
        self._end = end
        self._batch: list[int] = []
        self._base = 0

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        """The draft that is to follow `input_ids`: prompt and everything committed."""
        history = input_ids.tolist()
        base = len(history) - 1
        if self._batch:
            self._proposer.verified(self._base, self._batch, base - self._base - 1)
        else:
            self._proposer.begin(history[:-1])
        limit = self._end - base - 2
        draft = self._proposer.draft(history, limit) if limit > 0 else []
        self._base, self._batch = base, [history[-1], *draft]
        return np.asarray(draft, dtype=np.intc)


class Binding:
    """Runs arms on a fresh `Llama` each; with cache_prompt, on the one that the arm before left, if it fits."""

    def __init__(self) -> None:
        self.models = Models()
        self.loads = 0
        self._kept: dict[ArmName, tuple[Cell, Watched]] = {}

    def run(self, case: Case) -> Trace:
        """One arm of `case`."""
        return self.play(case, ALONE).trace

    def play(self, case: Case, scenario: Scenario) -> Played:
        """`case` as the last request of `scenario` to one object.

        Without cache_prompt the object is reset before each. Raises `BadInput` when it cannot be run as asked,
        `EngineFault` when the binding fails.
        """
        if case.fault is not None:
            raise BadInput("faults can be planted in the libllama engine only")
        if scenario.companions:
            raise BadInput("the binding decodes one sequence at a time; it has no companions")
        began, loads = time.perf_counter(), self.loads + self.models.loads
        cell = case.cell
        llama = self._llama(cell, scenario.fresh)
        try:
            prompt = prompt_ids(case, llama.vocab)
            for before in scenario.history:
                self._answer(llama, case, ids_of(before, prompt, llama.vocab.tokenize))
            trace = self._answer(llama, case, prompt)
        except BaseException:
            llama.close()
            raise
        if cell.cache_prompt:
            self._kept[_arm(cell)] = cell, llama
        else:
            llama.close()
        spent = Counters(
            model_loads=self.loads + self.models.loads - loads,
            total_s=time.perf_counter() - began,
        )
        return Played(replace(trace, counters=trace.counters + spent))

    def _llama(self, cell: Cell, fresh: bool) -> Watched:
        """An object for `cell`: the kept one of its arm, which is not kept any more, or another."""
        if kept := self._kept.pop(_arm(cell), None):
            if kept[0] == cell and not fresh:
                return kept[1]
            kept[1].close()
        self.models.make_room(cell.target)
        stage.report("load")
        self.loads += 1
        return Watched(cell)

    def _answer(self, llama: Watched, case: Case, prompt: tuple[int, ...]) -> Trace:
        """The trace of one request to `llama`."""
        cell = case.cell
        llama.evaluations.clear()
        if not cell.cache_prompt:
            llama.reset()  # type: ignore[no-untyped-call]
        recorder = Recorder(llama, cell.n_predict, cell.ignore_eos)
        end = min(len(prompt) + cell.n_predict, llama.n_ctx_seq)
        with self._drafter(cell, end) as (drafter, draft_context):
            llama.draft_model = drafter
            spent = _generate(llama, prompt, recorder)
            cycles = _cycles(llama, len(prompt), recorder.ids, drafter, spent)
            trace = trace_of(case, prompt, recorder, cycles, draft_context)
            counters = llama.counters + (draft_context.counters if draft_context else Counters())
        resolved = {**trace.resolved, "binding": {"cached": llama.evaluations[0].base}}
        return replace(trace, resolved=resolved, counters=counters)

    @contextmanager
    def _drafter(self, cell: Cell, end: int) -> Iterator[tuple[Timed | None, Context | None]]:
        """The drafter of `cell`, and where it drafts when it is a model."""
        match cell.drafter:
            case None:
                yield None, None
            case PromptLookup() as spec:
                yield Timed(LlamaPromptLookupDecoding(spec.ngram_size, spec.n_max)), None
            case DraftModel() | SelfDraft() as spec:
                with self.models.draft_context(cell, spec) as context:
                    yield Timed(Following(ModelProposer(context, spec), end)), context
            case _:
                raise BadInput(f"the binding engine has no drafter {drafter_label(cell.drafter)}")

    def close(self) -> None:
        """Free every object and model. Idempotent."""
        while self._kept:
            self._kept.popitem()[1][1].close()
        self.models.close()


def _arm(cell: Cell) -> ArmName:
    return "vanilla" if cell.drafter is None else "speculative"


def _generate(llama: Watched, prompt: Sequence[int], recorder: Recorder) -> list[float]:
    """Let the binding generate until the recorder says it is over; seconds that each token took."""
    spent: list[float] = []
    stage.report("prompt")
    tokens = llama.generate(
        prompt,
        temp=0.0,  # with it the binding's samplers are penalties and argmax; the rest is neutral all the same
        top_k=1,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repeat_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logits_processor=_barring(recorder.banned),
    )
    last = len(prompt) - 1
    while recorder.finish is None and (not recorder.ids or recorder.fits(last, spare=0)):
        number = len(recorder.ids)
        if number and llama.draft_model is None:
            stage.report(f"decode {number}")
        began = time.perf_counter()
        try:
            token = next(tokens)
        except (RuntimeError, ValueError) as error:
            raise EngineFault(
                "decode" if number else "prompt", f"Llama.generate: {error}"
            ) from error
        spent.append(time.perf_counter() - began)
        recorder.emit(token, recorder.read(llama.scores[last]))
        last += 1
    return spent


def _barring(banned: npt.NDArray[np.intp] | None) -> llama_cpp.LogitsProcessorList | None:
    """What keeps the binding from choosing `banned` tokens; it has no ignore_eos of its own."""
    if banned is None:
        return None

    def bar(_ids: Ids, row: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        row[banned] = -np.inf
        return row

    return llama_cpp.LogitsProcessorList([bar])


def _cycles(
    llama: Watched, n_prompt: int, ids: Sequence[int], drafter: Timed | None, spent: Sequence[float]
) -> list[Cycle]:
    """The rounds, from what was evaluated after the prompt and what was committed of it.

    Where the answer ends inside a batch, the tokens after its end were not looked at and count as not accepted.
    """
    if drafter is None:
        return []
    rounds = llama.evaluations[1:]
    starts = [e.base - n_prompt + 1 for e in rounds]
    cycles = []
    for e, draft_s, start, end in zip(
        rounds, drafter.seconds, starts, [*starts[1:], len(ids)], strict=True
    ):
        matches = zip(ids[start:end], e.batch[1:], strict=False)
        cycles.append(
            Cycle(
                base=e.base,
                batch=e.batch,
                accepted=sum(token == drafted for token, drafted in matches),
                draft_s=draft_s,
                verify_s=e.seconds,
                rest_s=sum(spent[start:end]) - draft_s - e.seconds,
            )
        )
    return cycles


def make() -> Binding:
    """The engine, as the registry makes it."""
    return Binding()
