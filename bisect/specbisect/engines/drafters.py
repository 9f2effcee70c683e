"""Drafters of the libllama engine: what proposes the tokens a verify batch holds.

The draft model follows llama-server's ``draft-simple`` step by step (the seed token alone, one token at a time, its
own rollback, then the whole verify batch once more), because its own numerics decide what is drafted and a finding
must be replayable on upstream's binary.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from specbisect.cell import DraftModel, NgramSimple, PromptLookup, Scripted, SelfDraft
from specbisect.engines.memory import Memory
from specbisect.llama.context import Context, rows_of
from specbisect.llama.logits import Row, best

TOP_K = 10
"""llama-server's draft sampler keeps ten candidates; p_min is compared within them."""


class Proposer(Protocol):
    """What the speculative loop asks of a drafter."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A prompt was evaluated by the target."""

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        """At most `limit` ≥ 1 tokens to follow `history` (prompt and everything committed)."""

    def verified(self, base: int, batch: Sequence[int], accepted: int) -> None:
        """The target evaluated `batch` from position `base` on and accepted that many drafted tokens."""

    def close(self) -> None:
        """Free what the drafter holds."""


class ModelProposer:
    """A model that drafts greedily, in a context of its own."""

    def __init__(self, context: Context, spec: DraftModel | SelfDraft) -> None:
        self.context = context
        self.memory = Memory(context, spec.n_max + 1)
        self.n_max = spec.n_max
        self.n_min = spec.n_min if isinstance(spec, DraftModel) else 0
        self.p_min = spec.p_min if isinstance(spec, DraftModel) else 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        """Evaluate the prompt too."""
        self.context.evaluate(rows_of(prompt, 0, last_only=True))

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        """Greedy tokens until `n_max`, `limit`, or one that is less probable than `p_min`."""
        base = len(history) - 1
        self.memory.mark()
        token, drafted = history[-1], list[int]()
        while len(drafted) < min(self.n_max, limit):
            row = self.context.evaluate(rows_of([token], base + len(drafted)))[0]
            token = best(row)
            if self.p_min > 0 and top_probability(row) < self.p_min:
                break
            drafted.append(token)
        self.memory.back_to_mark(base)
        return drafted if len(drafted) >= self.n_min else []

    def verified(self, base: int, batch: Sequence[int], accepted: int) -> None:
        """Evaluate the verify batch at the same width, then forget what was rejected."""
        self.memory.mark()
        self.context.evaluate(rows_of(batch, base, last_only=True))
        self.memory.keep(base, batch, accepted)

    def close(self) -> None:
        """Free the draft context."""
        self.context.close()


def top_probability(row: Row) -> float:
    """Probability of the best token among the `TOP_K` best, as llama-server's draft sampler sees it."""
    top = np.partition(row, -TOP_K)[-TOP_K:].astype(np.float64)
    return float(1.0 / np.exp(top - top.max()).sum())


class LookupProposer:
    """Prompt-lookup decoding with the very function llama-cpp-python ships."""

    def __init__(self, spec: PromptLookup) -> None:
        self.spec = spec

    def begin(self, prompt: Sequence[int]) -> None:
        """Nothing to prepare."""

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        """The tokens after the earliest match of the longest suffix n-gram."""
        ids = np.asarray(history, dtype=np.intc)
        found = LlamaPromptLookupDecoding.find_candidate_pred_tokens(
            ids, self.spec.ngram_size, min(self.spec.n_max, limit)
        )
        return [int(token) for token in found]

    def verified(self, base: int, batch: Sequence[int], accepted: int) -> None:
        """Keeps no state."""

    def close(self) -> None:
        """Holds nothing."""


class NgramProposer(LookupProposer):
    """llama.cpp's ``ngram-simple`` (common/ngram-map.cpp, common_ngram_simple_draft).

    As there, the continuation must be at least `size_n` long, a match at position 0 does not count, and `min_hits`
    has no effect: upstream reads it and does not use it.
    """

    def __init__(self, spec: NgramSimple) -> None:
        self.size_n, self.size_m = spec.size_n, spec.size_m

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        """The tokens after the latest earlier match of the last `size_n` tokens."""
        n, m = self.size_n, self.size_m
        before = list(history[:-1])  # upstream searches what was committed before the sampled token
        length = len(before)
        if length <= n + m + 1:
            return []
        pattern = list(history[-n:])
        for start in range(length - n - 1, 0, -1):
            if before[start : start + n] == pattern:
                found = before[start + n : start + n + m]
                return found[:limit] if len(found) >= n else []
        return []


class ScriptedProposer(LookupProposer):
    """Given drafts, each at its number of generated tokens."""

    def __init__(self, spec: Scripted) -> None:
        self.drafts = dict(spec.drafts)
        self.n_prompt = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Count generated tokens from here."""
        self.n_prompt = len(prompt)

    def draft(self, history: Sequence[int], limit: int) -> list[int]:
        """The draft scripted for this point, or none."""
        return list(self.drafts.get(len(history) - self.n_prompt, ()))[:limit]
