"""The two arms over llama.cpp's C API: greedy decoding without and with a drafter.

The speculative arm is a loop of small steps (`draft`, `verify`, `accept`, `roll_back`), each one method, so that a
planted fault replaces exactly one of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specbisect import stage
from specbisect.engines.drafters import Proposer
from specbisect.engines.memory import Memory
from specbisect.llama.context import Context, Logits, rows_of
from specbisect.llama.logits import Choice, choose
from specbisect.llama.vocab import Vocab
from specbisect.trace import Cycle, Finish

Observe = Callable[[int, Logits], None]
"""Told the index of the next token and the rows it and its followers are taken from; copy what is to be kept."""


class Place(Protocol):
    """Where a model is evaluated, as far as arms and traces need to know: a context of ours or another layer's."""

    resolved: dict[str, Any]

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""

    @property
    def path(self) -> Path:
        """The model's file."""

    @property
    def n_ctx_seq(self) -> int:
        """How many positions a sequence can have."""

    def unhonoured(self) -> list[str]:
        """Settings that were asked for and not followed."""


@dataclass(slots=True)
class Recorder:
    """Collects what an arm generates, and says when it is over."""

    place: Place
    n_predict: int
    ignore_eos: bool
    observe: Observe | None = None
    ids: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    finish: Finish | None = None
    ends: frozenset[int] = frozenset()
    banned: npt.NDArray[np.intp] | None = None

    def __post_init__(self) -> None:
        tokens = self.place.vocab.end_tokens
        if self.ignore_eos:  # llama.cpp's meaning: end-of-generation tokens cannot be chosen
            self.banned = np.asarray(tokens, dtype=np.intp)
        else:
            self.ends = frozenset(tokens)

    def show(self, logits: Logits) -> Logits:
        """Pass rows on, shown to whoever observes."""
        if self.observe is not None:
            self.observe(len(self.ids), logits)
        return logits

    def read(self, row: Logits) -> Choice:
        """The greedy choice of `row`, end-of-generation tokens barred where they are to be ignored."""
        return choose(row, self.banned)

    def emit(self, token: int, choice: Choice) -> None:
        """One more token, and what its own row says. Call only while `finish` is None."""
        self.ids.append(token)
        self.choices.append(choice)
        if token in self.ends:
            self.finish = "eog"
        elif len(self.ids) >= self.n_predict:
            self.finish = "length"

    def fits(self, position: int, spare: int = 1) -> bool:
        """Whether the context has room for a token at `position` and for `spare` more: llama-server wants one."""
        if position + spare >= self.place.n_ctx_seq:
            self.finish = "context"
        return self.finish is None


def read_prompt(context: Context, prompt: Sequence[int]) -> Logits:
    """Evaluate the prompt, in n_batch pieces; the logits row after its last token."""
    stage.report("prompt")
    row: Logits = context.evaluate(rows_of(prompt, 0, last_only=True))[-1]
    return row


def vanilla(context: Context, prompt: Sequence[int], recorder: Recorder) -> None:
    """Greedy decoding, one token at a time."""
    choice = recorder.read(read_prompt(context, prompt))
    recorder.emit(choice.token, choice)
    while recorder.finish is None:
        position = len(prompt) + len(recorder.ids) - 1
        if recorder.fits(position):
            stage.report(f"decode {len(recorder.ids)}")
            row = recorder.show(context.evaluate(rows_of(recorder.ids[-1:], position)))[0]
            choice = recorder.read(row)
            recorder.emit(choice.token, choice)


class Rows:
    """The rows of a verify batch, each read once and only when asked for."""

    def __init__(self, logits: Logits, recorder: Recorder) -> None:
        self.logits = logits
        self._recorder = recorder
        self._read: dict[int, Choice] = {}

    def __getitem__(self, index: int) -> Choice:
        if index not in self._read:
            self._read[index] = self._recorder.read(self.logits[index])
        return self._read[index]

    def __len__(self) -> int:
        return len(self.logits)


class Speculative:
    """Greedy decoding with a drafter: draft, verify in one batch, accept, roll back.

    `cycles` grows by one `Cycle` a round. Faults subclass this and replace a step.
    """

    def __init__(self, context: Context, drafter: Proposer, recorder: Recorder, width: int) -> None:
        self.context = context
        self.drafter = drafter
        self.recorder = recorder
        self.memory = Memory(context, width)
        self.history: list[int] = []
        self.cycles: list[Cycle] = []

    def run(self, prompt: Sequence[int]) -> None:
        """Generate until the recorder says it is over."""
        self.history = list(prompt)
        first = self.recorder.read(read_prompt(self.context, prompt))
        self.drafter.begin(prompt)
        self.commit([first.token], [first])
        while self.recorder.finish is None:
            base = len(self.history) - 1
            if self.recorder.fits(base):
                self.cycle(base)

    def cycle(self, base: int) -> None:
        """One round. `base` is the position of the last committed token, which the memory does not hold yet."""
        number = len(self.cycles)
        began = time.perf_counter()
        stage.report(f"draft {number}")
        batch = [self.history[-1], *self.draft(base)]
        drafted = time.perf_counter()
        stage.report(f"verify {number}")
        if len(batch) > 1:
            self.memory.mark()
        rows = Rows(self.recorder.show(self.verify(base, batch)), self.recorder)
        verified = time.perf_counter()
        tokens = self.accept(batch, rows)
        accepted = len(tokens) - 1
        choices = [rows[i] for i in range(len(tokens))]
        stage.report(f"rollback {number}")
        redecoded = self.roll_back(base, batch, accepted)
        self.commit(tokens, choices)
        rolled_back = time.perf_counter()
        if self.recorder.finish is None:
            self.drafter.verified(base, batch, accepted)
        ended = time.perf_counter()
        self.cycles.append(
            Cycle(
                base=base,
                batch=tuple(batch),
                accepted=accepted,
                redecoded=redecoded,
                draft_s=drafted - began + ended - rolled_back,
                verify_s=verified - drafted,
                rest_s=rolled_back - verified,
            )
        )

    def draft(self, base: int) -> list[int]:
        """What the drafter proposes; llama-server's limits (get_n_draft_max): the answer's and the context's rest."""
        left = self.recorder.n_predict - len(self.recorder.ids) - 1
        limit = min(left, self.context.n_ctx_seq - base - 2)
        return self.drafter.draft(self.history, limit) if limit > 0 else []

    def verify(self, base: int, batch: Sequence[int]) -> Logits:
        """The target's logits after each row of the batch, shape (width, n_vocab)."""
        return self.context.evaluate(rows_of(batch, base))

    def accept(self, batch: Sequence[int], rows: Rows) -> list[int]:
        """The tokens to commit: the longest drafted prefix the target would have chosen, and its own next token.

        As in llama-server, nothing is accepted after an end-of-generation token inside the draft.
        """
        tokens = [rows[0].token]
        while len(tokens) < len(batch) and tokens[-1] == batch[len(tokens)]:
            if tokens[-1] in self.recorder.ends and len(tokens) < len(batch) - 1:
                break
            tokens.append(rows[len(tokens)].token)
        return tokens

    def roll_back(self, base: int, batch: Sequence[int], accepted: int) -> int:
        """Remove rejected tokens from the memory; how many rows had to be decoded again."""
        return self.memory.keep(base, batch, accepted)

    def commit(self, tokens: Sequence[int], choices: Sequence[Choice]) -> None:
        """Append tokens to the answer, none past its end."""
        for token, choice in zip(tokens, choices, strict=True):
            if self.recorder.finish is None:
                self.recorder.emit(token, choice)
                self.history.append(token)
