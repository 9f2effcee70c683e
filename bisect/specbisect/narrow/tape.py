"""The vanilla arm as far as somebody asked for it, and states of it that other contexts can start from.

Trials of one search share almost everything: the same prompt, the same tokens before the batch in question. A tape
decodes them once. A context that is to go on from there is given the tape's state instead of decoding it again, if a
state that was read back gives the bits it should; that is tried once for each model and settings.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from specbisect import stage
from specbisect.cell import Case
from specbisect.diagnose.lab import Bench, Lab
from specbisect.engines.account import prompt_ids
from specbisect.engines.decoding import Recorder, read_prompt
from specbisect.engines.faults import tamper_of
from specbisect.engines.libllama import LibLlama
from specbisect.llama.context import Context, Settings, rows_of
from specbisect.llama.logits import Choice, digest
from specbisect.trace import Counters

WHOLE = 0
"""Flags of a checkpoint that holds all of a sequence's state."""


class Tape:
    """Greedy decoding of one prompt, one token at a time, in a context that stays open.

    `trusted` says between which contexts states can be handed over; it outlives the tape.
    """

    def __init__(self, engine: LibLlama, case: Case, trusted: dict[Hashable, bool]) -> None:
        cell = case.cell
        self.model = engine.models.get(cell.target, cell)
        self.prompt = prompt_ids(case, self.model.vocab)
        self.settings = Settings.of(cell)
        self.context = Context(self.model, self.settings, tamper=tamper_of(case.vanilla.fault))
        self._recorder = Recorder(self.context, self.context.n_ctx_seq, cell.ignore_eos)
        self.prompt_row = read_prompt(self.context, self.prompt).copy()
        choice = self._recorder.read(self.prompt_row.copy())
        self._recorder.emit(choice.token, choice)
        self._begun = self.context.checkpoint(flags=WHOLE)
        self._trusted = trusted

    def ids(self, n: int) -> tuple[int, ...]:
        """The first `n` tokens of the answer, or all there are."""
        recorder = self._recorder
        while len(recorder.ids) < n and recorder.finish is None:
            position = len(self.prompt) + len(recorder.ids) - 1
            if recorder.fits(position):
                stage.report(f"decode {len(recorder.ids)}")
                row = self.context.evaluate(rows_of(recorder.ids[-1:], position))[0]
                choice = recorder.read(row)
                recorder.emit(choice.token, choice)
        return tuple(recorder.ids[:n])

    def choices(self, n: int) -> list[Choice]:
        """What the rows say that gave them."""
        return self._recorder.choices[: len(self.ids(n))]

    @property
    def can_start_anywhere(self) -> bool:
        """Whether the memory, cut back, is what it was: not where it holds states or drops what left a window."""
        window = self.model.n_swa and not self.settings.swa_full
        return not (self.model.keeps_states or window)

    def lend(self, context: Context, n: int) -> None:
        """Bring sequence 0 of an empty `context` to where this arm is about to evaluate its `n`-th token, n ≥ 1."""
        history = self.ids(n)[: n - 1]
        if (n == 1 or self.can_start_anywhere) and self._trusts(context):
            self._restore(context, n)
            return
        read_prompt(context, self.prompt)
        for i, token in enumerate(history):
            context.evaluate(rows_of([token], len(self.prompt) + i))

    def _restore(self, context: Context, n: int) -> None:
        saved = self._begun if n == 1 else self.context.checkpoint(flags=WHOLE)
        context.restore(saved, flags=WHOLE)
        context.remove(0, len(self.prompt) + n - 1)

    def _trusts(self, context: Context) -> bool:
        """Whether a restored state gives the row this arm had there, bit for bit."""
        pair = self.model.path, self.settings, context.settings
        if pair not in self._trusted:
            ids = self.ids(2)
            if len(ids) < 2:
                return False
            self._restore(context, 1)
            row = context.evaluate(rows_of(ids[:1], len(self.prompt)))[0]
            self._trusted[pair] = digest(row) == self._recorder.choices[1].digest
            context.clear()
        return self._trusted[pair]

    def close(self) -> None:
        """Free the context. Idempotent."""
        self.context.close()


@dataclass(slots=True)
class TapeLab(Lab):
    """A lab whose benches start where `tape` is about to evaluate its `start`-th token."""

    tape: Tape = field(kw_only=True)
    start: int = field(kw_only=True)

    @contextmanager
    def bench(self) -> Iterator[Bench]:
        """See `Lab.bench`; nothing before the start is decoded again."""
        settings = replace(Settings.of(self.case.cell), n_seq_max=2, kv_unified=True)
        with Context(self.model, settings, tamper=tamper_of(self.case.fault)) as context:
            self.tape.lend(context, self.start)
            try:
                yield Bench(context, self.tape.prompt_row)
            finally:
                self.counters += context.counters


class Tapes:
    """The tape of this process: one at a time, because contexts of large models are large."""

    def __init__(self, engine: LibLlama) -> None:
        self._engine = engine
        self._key = ""
        self._tape: Tape | None = None
        self._counted = Counters()
        self._trusted: dict[Hashable, bool] = {}

    def get(self, case: Case) -> Tape:
        """The tape of the vanilla arm of `case`, whatever its length."""
        key = replace(case.vanilla, cell=replace(case.cell.vanilla, n_predict=1)).key
        if self._tape is None or key != self._key:
            self.close()  # before another model is loaded, which may need the room
            self._tape, self._key = Tape(self._engine, case, self._trusted), key
        return self._tape

    def spent(self) -> Counters:
        """What the tape has cost since this was last asked."""
        total = self._tape.context.counters if self._tape else Counters()
        before, self._counted = self._counted, total
        return Counters(
            decode_calls=total.decode_calls - before.decode_calls,
            decoded_tokens=total.decoded_tokens - before.decoded_tokens,
            decode_s=total.decode_s - before.decode_s,
        )

    def close(self) -> None:
        """Free it."""
        if self._tape is not None:
            self._tape.close()
        self._tape, self._key, self._counted = None, "", Counters()
