"""The two arms over llama.cpp's C API: greedy decoding without and with a drafter.

The speculative arm is a loop of small steps (`draft`, `verify`, `accept`, `roll_back`), each one method, so that a
planted fault replaces exactly one of them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specbisect import stage
from specbisect.engines.drafters import Proposer
from specbisect.engines.memory import Memory
from specbisect.llama.context import Context, Logits, rows_of
from specbisect.llama.logits import Choice, choose
from specbisect.trace import Cycle, Finish


@dataclass(slots=True)
class Recorder:
    """Collects what an arm generates, and says when it is over."""

    context: Context
    n_predict: int
    ignore_eos: bool
    choices: list[Choice] = field(default_factory=list)
    finish: Finish | None = None
    banned: npt.NDArray[np.intp] | None = None

    def __post_init__(self) -> None:
        if self.ignore_eos:  # llama.cpp's meaning: end-of-generation tokens cannot be chosen
            self.banned = np.asarray(self.context.model.vocab.end_tokens, dtype=np.intp)

    @property
    def ids(self) -> list[int]:
        """The tokens generated so far."""
        return [choice.token for choice in self.choices]

    def read(self, row: Logits) -> Choice:
        """The greedy choice of `row`, end-of-generation tokens barred where they are to be ignored."""
        return choose(row, self.banned)

    def emit(self, choice: Choice) -> None:
        """One more token. Call only while `finish` is None."""
        self.choices.append(choice)
        if choice.token in self.context.model.vocab.end_tokens and not self.ignore_eos:
            self.finish = "eog"
        elif len(self.choices) >= self.n_predict:
            self.finish = "length"

    def fits(self, position: int) -> bool:
        """Whether the context has room for a token at `position`; if not, the arm is over."""
        if position >= self.context.n_ctx_seq:
            self.finish = "context"
        return self.finish is None


def read_prompt(context: Context, prompt: Sequence[int]) -> Logits:
    """Evaluate the prompt, in n_batch pieces; the logits row after its last token."""
    stage.report("prompt")
    row: Logits = context.evaluate(rows_of(prompt, 0, last_only=True))[-1]
    return row


def vanilla(context: Context, prompt: Sequence[int], recorder: Recorder) -> None:
    """Greedy decoding, one token at a time."""
    recorder.emit(recorder.read(read_prompt(context, prompt)))
    while recorder.finish is None:
        position = len(prompt) + len(recorder.choices) - 1
        if recorder.fits(position):
            stage.report(f"decode {len(recorder.choices)}")
            row = context.evaluate(rows_of([recorder.choices[-1].token], position))[0]
            recorder.emit(recorder.read(row))


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
        self.commit([first])
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
        rows = self.verify(base, batch)
        verified = time.perf_counter()
        accepted, choices = self.accept(batch, rows)
        stage.report(f"rollback {number}")
        redecoded = self.roll_back(base, batch, accepted)
        self.commit(choices)
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
        left = self.recorder.n_predict - len(self.recorder.choices) - 1
        limit = min(left, self.context.n_ctx_seq - base - 2)
        return self.drafter.draft(self.history, limit) if limit > 0 else []

    def verify(self, base: int, batch: Sequence[int]) -> Logits:
        """The target's logits after each row of the batch, shape (width, n_vocab)."""
        return self.context.evaluate(rows_of(batch, base))

    def accept(self, batch: Sequence[int], rows: Logits) -> tuple[int, list[Choice]]:
        """The longest drafted prefix that the target would have chosen itself, and its own next token.

        Returns how many drafted tokens are accepted, and the choices to commit, one more than that.
        """
        choices = [self.recorder.read(rows[0])]
        while len(choices) < len(batch) and choices[-1].token == batch[len(choices)]:
            choices.append(self.recorder.read(rows[len(choices)]))
        return len(choices) - 1, choices

    def roll_back(self, base: int, batch: Sequence[int], accepted: int) -> int:
        """Remove rejected tokens from the memory; how many rows had to be decoded again."""
        return self.memory.keep(base, batch, accepted)

    def commit(self, choices: Sequence[Choice]) -> None:
        """Append choices to the answer, none past its end."""
        for choice in choices:
            if self.recorder.finish is None:
                self.recorder.emit(choice)
                self.history.append(choice.token)
