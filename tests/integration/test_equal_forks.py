"""The engine forks where a bare loop forks that knows nothing of it.

The bare loop keeps the books of its drafter in the simplest way there is: the draft model is fed what was committed
since the last draft, and nothing twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.compare import compare
from specbisect.engines.libllama import LibLlama
from specbisect.llama import library

PROMPTS = [
    "The history of the bicycle begins",
    "def quicksort(arr):\n",
    "Once upon a time, in a small village",
    "<|im_start|>user\nExplain why the sky is blue.<|im_end|>\n<|im_start|>assistant\n",
]
N_MAX = [3, 7]
N_PREDICT, N_CTX, N_BATCH = 96, 1024, 512

Ladder = Callable[[str], Path]


class Bare:
    """A model and a context over it, with no more code than that takes."""

    def __init__(self, path: Path) -> None:
        library.load()  # for its log to be caught
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_BATCH, N_BATCH
        params.n_threads = params.n_threads_batch = library.cores()
        self.context: Any = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 2))()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, True)
        return list(ids[:n])

    def ends(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    def feed(self, ids: Sequence[int], position: int) -> list[int]:
        """The greedy choice after each of `ids`."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        assert llama_cpp.llama_decode(self.context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        rows: NDArray[np.float32] = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self.context), (len(ids), self.n_vocab)
        )
        return [int(i) for i in rows.argmax(axis=1)]

    def cut(self, position: int) -> None:
        assert llama_cpp.llama_memory_seq_rm(self.memory, 0, position, -1)


def whole(target: Bare, ids: list[int]) -> list[int]:
    """`ids` up to the end of the answer."""
    end = next((i for i, token in enumerate(ids) if target.ends(token)), N_PREDICT)
    return ids[: min(end + 1, N_PREDICT)]


def vanilla(target: Bare, prompt: list[int]) -> list[int]:
    target.cut(0)
    ids = target.feed(prompt, 0)[-1:]
    while len(ids) < N_PREDICT:
        ids += target.feed(ids[-1:], len(prompt) + len(ids) - 1)
    return whole(target, ids)


def speculative(target: Bare, drafter: Bare, prompt: list[int], n_max: int) -> list[int]:
    target.cut(0)
    drafter.cut(0)
    ids = target.feed(prompt, 0)[-1:]
    drafter.feed(prompt, 0)
    known = len(prompt)  # positions the drafter has in its memory and that were committed
    while len(ids) < N_PREDICT:
        history = prompt + ids
        base = len(history) - 1
        drafter.cut(known)
        draft: list[int] = []
        wanted = min(n_max, N_PREDICT - len(ids) - 1)
        if wanted:
            draft = drafter.feed(history[known:], known)[-1:]
            known = len(history)
        while len(draft) < wanted:
            draft += drafter.feed(draft[-1:], base + len(draft))
        choices = target.feed([ids[-1], *draft], base)
        accepted = 0
        while accepted < len(draft) and choices[accepted] == draft[accepted]:
            accepted += 1
        ids += choices[: accepted + 1]
        target.cut(base + 1 + accepted)
    return whole(target, ids)


def fork(one: list[int], other: list[int]) -> int | None:
    """Where two answers part; where the shorter ends, if it is the beginning of the longer."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.fixture(scope="module")
def engine() -> Iterator[LibLlama]:
    made = LibLlama()
    yield made
    made.close()


@pytest.mark.network
@pytest.mark.parametrize("quant", ["BF16", "Q8_0", "Q4_K_M"])
def test_the_engine_forks_where_a_bare_loop_forks(
    ladder: Ladder, engine: LibLlama, quant: str
) -> None:
    expected: dict[tuple[str, int], int | None] = {}
    answers: dict[str, list[int]] = {}
    with Bare(ladder(quant)) as target, Bare(ladder("Q2_K")) as drafter:
        for text in PROMPTS:
            prompt = target.tokenize(text)
            answers[text] = vanilla(target, prompt)
            for n_max in N_MAX:
                drafted = speculative(target, drafter, prompt, n_max)
                expected[text, n_max] = fork(answers[text], drafted)

    found: dict[tuple[str, int], int | None] = {}
    model, draft = (Model("smollm2", q, "", str(ladder(q))) for q in (quant, "Q2_K"))
    cell = Cell(model, n_ctx=N_CTX, n_batch=N_BATCH, n_predict=N_PREDICT)
    for text in PROMPTS:
        reference = engine.run(Case(cell, Prompt(text, text)))
        assert list(reference.ids) == answers[text]
        for n_max in N_MAX:
            drafting = replace(cell, drafter=DraftModel(draft, n_max))
            trace = engine.run(Case(drafting, Prompt(text, text)))
            assert trace.accepted > 0
            found[text, n_max] = compare(reference, trace).fork

    assert found == expected
