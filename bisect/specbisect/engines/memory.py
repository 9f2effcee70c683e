"""Rolling a sequence back after a verify batch: by cutting it, or by checkpoint where it cannot be cut.

A false return of ``llama_memory_seq_rm`` that goes unnoticed is the very defect this tool hunts, so every cut is
checked, and memories that refuse (recurrent, hybrid) or that may already have overwritten what a cut would need
(a sliding window whose verify batch spans several micro-batches) are brought back by checkpoint and re-decode.
"""

from collections.abc import Sequence
from typing import Literal

from specbisect.errors import EngineFault
from specbisect.llama.context import Checkpoint, Context, Settings, rows_of
from specbisect.llama.model import LoadedModel

Method = Literal["partial", "checkpoint"]


class Memory:
    """Sequence 0 of a context, as a verify loop needs it. `width` is the most rows a batch will have."""

    def __init__(self, context: Context, width: int) -> None:
        self.context = context
        self.method: Method = rollback_method(context, width)
        self.saved: Checkpoint | None = None

    def mark(self) -> None:
        """Remember this point, if the memory cannot simply be cut back to it."""
        if self.method == "checkpoint":
            self.saved = self.context.checkpoint()

    def back_to_mark(self, base: int) -> None:
        """Forget everything from position `base` on; `mark` was called when the memory ended just before it."""
        if self.saved is not None:
            self.context.restore(self.saved)
        else:
            self._cut(base)

    def keep(self, base: int, batch: Sequence[int], accepted: int) -> int:
        """Keep the last committed token and `accepted` drafted ones of `batch`; how many rows were decoded again."""
        if accepted == len(batch) - 1:
            return 0
        if self.saved is None:
            self._cut(base + 1 + accepted)
            return 0
        self.context.restore(self.saved)
        again = batch[: accepted + 1]
        self.context.evaluate(rows_of(again, base, last_only=True))
        return len(again)

    def _cut(self, start: int) -> None:
        if not self.context.remove(0, start):
            raise EngineFault("rollback", f"llama_memory_seq_rm refused to cut at position {start}")


def rollback_method(context: Context, width: int) -> Method:
    """How sequence 0 of `context` can forget the end of a batch of `width` rows.

    llama.cpp states no such capability; llama-server tries it on two tokens, and so does this, once per model.
    """
    window_at_risk = context.model.n_swa and not context.settings.swa_full
    if window_at_risk and width > min(context.n_batch, context.resolved["n_ubatch"]):
        return "checkpoint"
    if context.model.can_cut is None:
        context.model.can_cut = _try_to_cut(context.model)
    return "partial" if context.model.can_cut else "checkpoint"


def _try_to_cut(model: LoadedModel) -> bool:
    """Whether the second of two tokens can be removed (llama.cpp: common_context_can_seq_rm)."""
    with Context(model, Settings(n_ctx=256, n_batch=32, n_ubatch=32)) as context:
        context.evaluate(rows_of([0, 0], 0, last_only=True))
        return context.remove(0, 1)
