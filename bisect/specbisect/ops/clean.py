"""A context with a width-1 history, and trials on a copy of it: every batch starts from the same clean state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from specbisect.engines.decoding import read_prompt
from specbisect.errors import BadInput
from specbisect.llama.context import Context, Logits, Settings, Tamper, rows_of
from specbisect.llama.model import LoadedModel

TRIAL = 1
"""The sequence that trials ride on."""


class CleanState:
    """Sequence 0 of a fresh context: a prompt, and tokens after it that were decoded one by one.

    It is never rolled back, so that a memory that forgets wrongly cannot get into what is measured; trials go on a
    copy of the sequence. The context is unified: one that is not splits a batch by sequence. A context manager.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: Settings,
        *,
        tamper: Tamper | None = None,
        cb_eval: Any = None,
    ) -> None:
        unified = replace(settings, n_seq_max=2, kv_unified=True)
        self.context = Context(model, unified, tamper=tamper, cb_eval=cb_eval)
        self.position = 0

    def read(self, prompt: Sequence[int], then: Sequence[int] = ()) -> Logits:
        """Begin with `prompt`, in batches, and `then` one by one; the row after the last of them.

        Raises `BadInput` when the context is too short for them.
        """
        needed = len(prompt) + len(then)
        if needed > self.context.n_ctx_seq:
            raise BadInput(
                f"{needed} tokens do not fit into n_ctx = {self.context.n_ctx_seq}; raise it"
            )
        row = read_prompt(self.context, prompt)
        self.position = len(prompt)
        for token in then:
            row = self.step(token)
        return row

    def step(self, token: int) -> Logits:
        """Lengthen the history by one token; its row."""
        row: Logits = self.context.evaluate(rows_of([token], self.position))[0]
        self.position += 1
        return row

    @contextmanager
    def trial(self) -> Iterator["Trial"]:
        """A copy of the history to decode on; forgotten at the end."""
        self.context.copy(0, TRIAL)
        try:
            yield Trial(self.context, self.position)
        finally:
            self.context.remove(TRIAL, -1)

    def batch(self, tokens: Sequence[int]) -> Logits:
        """The rows that `tokens` get in one batch; the history stays as it is. llama.cpp's own buffer."""
        with self.trial() as trial:
            return trial.decode(tokens)

    def close(self) -> None:
        """Free the context. Idempotent."""
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Trial:
    """A copy of a history that may be decoded on."""

    def __init__(self, context: Context, position: int) -> None:
        self.context = context
        self.position = position

    def decode(self, tokens: Sequence[int]) -> Logits:
        """The rows of `tokens`, in one batch. llama.cpp's own buffer."""
        rows = self.context.evaluate(rows_of(tokens, self.position, sequence=TRIAL))
        self.position += len(tokens)
        return rows
