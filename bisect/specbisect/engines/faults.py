"""Planted faults: the real arms with one step gone wrong, so that every label can be tried on this machine.

State, verification and noise faults replace one step of `Speculative`; draft faults wrap the drafter; kernel faults
change logits as they leave `Context.evaluate`, in every context, as a wrong kernel would.
"""

from collections.abc import Sequence

import numpy as np

from specbisect.engines.decoding import Recorder, Rows, Speculative
from specbisect.engines.drafters import ModelProposer, Proposer
from specbisect.fault import Fault
from specbisect.llama.context import Checkpoint, Context, Logits, Row, Tamper, rows_of
from specbisect.llama.logits import Choice

SMALL, LARGE = 1e-3, 8.0
"""Size of a wrong kernel's error, in standard deviations of the row's logits."""


def tamper_of(fault: Fault | None) -> Tamper | None:
    """What `fault` does to the logits of every evaluation, if it is the backend's."""
    if fault is None or not fault.in_kernel:
        return None
    width = 1 if fault.kind == "kernel-baseline" else fault.width
    size = SMALL if fault.kind == "kernel-small" else LARGE
    planted = fault

    def tamper(rows: Sequence[Row], logits: Logits) -> None:
        struck = len(rows) == width or (planted.wider and len(rows) > width)
        if not struck or len(logits) != len(rows):
            return
        if planted.kind == "nan-row":
            logits[-1] = np.nan
            return
        # The error depends on the position only, as a wrong result of a deterministic kernel does.
        for row, line in zip(rows, logits, strict=True):
            noise = np.random.default_rng([planted.seed, row.position]).standard_normal(len(line))
            line += (noise * (size * line.std())).astype(np.float32)

    return tamper


class Faulty(Speculative):
    """The speculative arm with a planted fault. `planted` is the cycle it struck in, None until it has."""

    def __init__(
        self, context: Context, drafter: Proposer, recorder: Recorder, width: int, fault: Fault
    ) -> None:
        super().__init__(context, _faulty_drafter(drafter, fault), recorder, width)
        self.fault = fault
        self.planted: int | None = None
        self.shift = 0  # how far the memory's positions are off after a wrong rollback
        self.random = np.random.default_rng(fault.seed)
        self.noise = np.random.default_rng()  # unseeded: differs from run to run
        self.earlier: Checkpoint | None = None

    def strikes(self, kind: str, *, next_cycle: bool = False) -> bool:
        """Whether the fault is of this kind and due now; `next_cycle` when it acts on the rows after this round."""
        number = len(self.cycles) + next_cycle
        return self.fault.kind == kind and self.planted is None and number >= self.fault.cycle

    def strike(self, *, next_cycle: bool = False) -> None:
        """Note that the fault happens now."""
        self.planted = len(self.cycles) + next_cycle

    def verify(self, base: int, batch: Sequence[int]) -> Logits:
        """Wrong positions after a wrong rollback, a foreign token, or noise."""
        rows = rows_of(batch, base + self.shift)
        if self.strikes("foreign-token"):
            other = (batch[0] + 1 + int(self.random.integers(100))) % self.context.model.n_vocab
            rows[0] = rows[0]._replace(token=other)
            self.strike()
        logits = self.context.evaluate(rows)
        if self.fault.kind == "noise":
            logits += (self.noise.standard_normal(logits.shape) * 1e-2).astype(np.float32)
        return logits

    def accept(self, batch: Sequence[int], rows: Rows) -> list[int]:
        """A wrong row, a wrong rule."""
        tokens = super().accept(batch, rows)
        wrong, accepted = list(tokens), len(tokens) - 1
        rejected = accepted < len(batch) - 1
        if self.strikes("row-off-by-one") and len(batch) > 1:
            wrong = [rows[1].token]
            while len(wrong) + 1 < len(batch) and wrong[-1] == batch[len(wrong)]:
                wrong.append(rows[len(wrong) + 1].token)
        elif self.strikes("accept-too-many") and rejected:
            wrong = [*batch[1 : accepted + 2], rows[accepted + 1].token]
        elif self.strikes("typical-acceptance") and rejected:
            if rows[accepted].runner_up == batch[accepted + 1]:
                wrong = [*batch[1 : accepted + 2], rows[accepted + 1].token]
        elif self.strikes("bonus-wrong-row") and len(batch) > 1:
            wrong[-1] = rows[accepted + 1 if rejected else accepted - 1].token
        elif self.fault.kind == "constant-loop" and len(self.cycles) >= self.fault.cycle:
            wrong = [self.history[-1]]
        if wrong != tokens and self.planted is None:
            self.strike()
        return wrong

    def roll_back(self, base: int, batch: Sequence[int], accepted: int) -> int:
        """A memory that is left in a wrong state; the rows of the next cycle are the first to show it."""
        keep = base + 1 + accepted
        rejected = accepted < len(batch) - 1
        cuts = self.memory.method == "partial"
        context, start = self.context, base + self.shift
        if self.strikes("rollback-skipped", next_cycle=True) and rejected:
            self.strike(next_cycle=True)
            self.shift = context.end() + 1 - keep
            return 0
        if (
            self.strikes("wrong-checkpoint", next_cycle=True)
            and rejected
            and self.earlier is not None
        ):
            self.strike(next_cycle=True)
            context.restore(self.earlier)
            again = batch[: accepted + 1]
            context.evaluate(rows_of(again, context.end() + 1, last_only=True))
            self.shift = context.end() + 1 - keep
            return len(again)
        self.earlier = self.memory.saved or self.earlier
        if self.shift and self.memory.saved is None:
            context.remove(0, keep + self.shift)
            return 0
        redecoded = self.memory.keep(start, batch, accepted)
        if cuts and rejected:
            self._spoil(keep, batch, accepted)
        return redecoded

    def _spoil(self, keep: int, batch: Sequence[int], accepted: int) -> None:
        """Damage a memory that was just rolled back rightly to end before position `keep`."""
        context = self.context
        if self.strikes("stale-kv", next_cycle=True):
            context.remove(0, keep - 1)
            context.evaluate(rows_of([batch[accepted + 1]], keep - 1))
        elif self.strikes("swapped-positions", next_cycle=True) and accepted:
            if batch[accepted] == batch[accepted - 1]:
                return
            context.remove(0, keep - 2)
            context.evaluate(rows_of([batch[accepted], batch[accepted - 1]], keep - 2))
        elif self.strikes("rollback-too-few", next_cycle=True):
            context.evaluate(rows_of([batch[accepted + 1]], keep))
            self.shift = 1
        elif self.strikes("rollback-too-many", next_cycle=True):
            context.remove(0, keep - 1)
            self.shift = -1
        else:
            return
        self.strike(next_cycle=True)

    def commit(self, tokens: Sequence[int], choices: Sequence[Choice]) -> None:
        """Goes on after an end-of-generation token."""
        ends = self.recorder.ends
        if self.fault.kind == "past-eog" and ends.intersection(tokens):
            self.strike()
            self.recorder.ends = frozenset()
        super().commit(tokens, choices)


class _Wrapped:
    """A drafter behind a fault; does what the real one does."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    def begin(self, prompt: Sequence[int]) -> None:
        self.inner.begin(prompt)

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        return self.inner.draft(history, limit)

    def verified(self, base: int, batch: Sequence[int], accepted: int) -> None:
        self.inner.verified(base, batch, accepted)

    def close(self) -> None:
        self.inner.close()


class _Silent(_Wrapped):
    """Never drafts."""

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        return []


class _Shifted(_Wrapped):
    """Proposes for each position what it means for the next one."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        if isinstance(inner, ModelProposer):
            inner.n_max += 1

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        return self.inner.draft(history, limit + 1)[1:]


class _Stale(_Wrapped):
    """A draft model whose own memory keeps a wrong token at the end of every round."""

    def verified(self, base: int, batch: Sequence[int], accepted: int) -> None:
        self.inner.verified(base, batch, accepted)
        if isinstance(self.inner, ModelProposer) and self.inner.memory.method == "partial":
            context, last = self.inner.context, base + accepted
            context.remove(0, last)
            context.evaluate(rows_of([(batch[-1] + 1) % context.model.n_vocab], last))


_DRAFTERS = {"never-drafts": _Silent, "draft-shift": _Shifted, "draft-kv-stale": _Stale}


def _faulty_drafter(drafter: Proposer, fault: Fault) -> Proposer:
    wrapper = _DRAFTERS.get(fault.kind)
    return wrapper(drafter) if wrapper is not None else drafter
