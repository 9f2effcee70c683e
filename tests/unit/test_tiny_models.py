"""The tiny models are what the tests that use them take them for."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

import make_tiny_model
from specbisect.llama import library

KINDS = sorted(make_tiny_model.KINDS)
TEXT = "Hello there, how are the others?"
N = 64

Tiny = Callable[..., Path]


class Session:
    """A model in a context of its own, straight over the C API."""

    def __init__(self, lib: Any, model: Any) -> None:
        self.lib = lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
        self.context = lib.llama_init_from_model(model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.vocab = lib.llama_model_get_vocab(model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.n_past = 0

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (self.lib.llama_token * (len(raw) + 2))()
        n = self.lib.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, False)
        return list(ids[:n])

    def detokenize(self, ids: Sequence[int]) -> bytes:
        buffer = bytearray()
        for token in ids:
            piece = ctypes.create_string_buffer(16)
            n = self.lib.llama_token_to_piece(self.vocab, token, piece, len(piece), 0, False)
            buffer += piece.raw[:n]
        return bytes(buffer)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Decode `ids` after what came before: one row of logits each."""
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, self.n_past + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        assert self.lib.llama_decode(self.context, batch) == 0
        self.lib.llama_batch_free(batch)
        self.n_past += len(ids)
        rows = self.lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(rows, (len(ids), self.n_vocab)).copy()

    def greedy(self, ids: Sequence[int], n: int = N) -> list[int]:
        text: list[int] = []
        while len(text) < n:
            text.append(int(self.logits(ids)[-1].argmax()))
            ids = text[-1:]
        return text


@contextmanager
def opened(path: Path) -> Iterator[Session]:
    lib = library.load()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    session = Session(lib, model)
    yield session
    lib.llama_free(session.context)
    lib.llama_model_free(model)


def vanilla(path: Path, prompt: str = TEXT) -> list[int]:
    with opened(path) as session:
        return session.greedy(session.tokenize(prompt))


def agreement(path: Path, text: Sequence[int]) -> float:
    """Share of `text` that the model at `path` would have chosen too: its acceptance as a drafter."""
    with opened(path) as session:
        prompt = session.tokenize(TEXT)
        rows = session.logits([*prompt, *text])[len(prompt) - 1 : -1]
        return float((rows.argmax(axis=1) == text).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bytes(kind: str, tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    make_tiny_model.make(kind, first, seed=7)
    make_tiny_model.make(kind, again, seed=7)
    make_tiny_model.make(kind, other, seed=8)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    assert first.stat().st_size < 6_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_finite_and_varied(kind: str, tiny_models: Tiny) -> None:
    with opened(tiny_models(kind)) as session:
        prompt = session.tokenize(TEXT)
        assert np.isfinite(session.logits(prompt)).all()
    text = vanilla(tiny_models(kind))
    assert len(set(text)) > N // 3
    assert not {make_tiny_model.UNK, make_tiny_model.BOS, make_tiny_model.EOS} & set(text)


@pytest.mark.parametrize("kind", KINDS)
def test_text_depends_on_the_distant_past(kind: str, tiny_models: Tiny) -> None:
    """Otherwise a fault in a model's memory would not show."""
    path = tiny_models(kind)
    assert vanilla(path, f"A{TEXT}") != vanilla(path, f"B{TEXT}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", [{"noise": 0.1}, {"quant": "Q2_K"}])
def test_drafters_are_accepted_and_rejected(
    kind: str, drafter: dict[str, Any], tiny_models: Tiny
) -> None:
    assert 0.1 < agreement(tiny_models(kind, **drafter), vanilla(tiny_models(kind))) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_quantises_to_real_k_quants(kind: str, tiny_models: Tiny) -> None:
    for quant, tensor_type in [("Q8_0", "Q8_0"), ("Q4_K_M", "Q4_K"), ("Q2_K", "Q2_K")]:
        tensors = GGUFReader(tiny_models(kind, quant)).tensors
        types = Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1)
        assert types.most_common(1)[0][0] == tensor_type


@pytest.mark.parametrize("kind", KINDS)
def test_only_attention_memory_can_be_cut(kind: str, tiny_models: Tiny) -> None:
    with opened(tiny_models(kind)) as session:
        session.logits(session.tokenize(TEXT))
        cut = session.lib.llama_memory_seq_rm(session.memory, 0, session.n_past - 3, -1)
    assert cut == ("mamba" not in make_tiny_model.KINDS[kind].layers)


def test_window_is_interleaved(tiny_models: Tiny) -> None:
    with opened(tiny_models("swa")) as session:
        model = session.lib.llama_get_model(session.context)
        assert session.lib.llama_model_n_swa(model) == make_tiny_model.WINDOW


def test_text_can_be_made_to_end(tiny_models: Tiny) -> None:
    text = vanilla(tiny_models())
    ended = vanilla(tiny_models(ends_as=text[10]))
    assert ended[: text.index(text[10]) + 1] == [*text[: text.index(text[10])], make_tiny_model.EOS]


@pytest.mark.parametrize("text", [TEXT, " a leading space", "日本語, ×é\n\ttab", "in the other\0"])
def test_tokenising_loses_nothing(text: str, tiny_models: Tiny) -> None:
    with opened(tiny_models()) as session:
        bos, *ids = session.tokenize(text)
        assert bos == make_tiny_model.BOS
        assert session.detokenize(ids) == text.encode()
