"""Vocabularies: text to token ids and back, and whether two of them can speculate together."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from specbisect import stage
from specbisect.errors import EngineFault
from specbisect.llama import library

MAX_SIZE_DIFFERENCE = 128  # SPEC_VOCAB_MAX_SIZE_DIFFERENCE in llama.cpp's common/speculative.cpp
FIRST_COMPARED = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID, same file
SHOWN = 5


class Vocab:
    """The vocabulary of a loaded model; `handle` is a ``llama_vocab *`` that must outlive it.

    Special ids are None where the vocabulary has no such token.
    """

    def __init__(self, handle: Any) -> None:
        self.lib = library.load()
        self.handle = handle
        self.n_tokens = int(self.lib.llama_vocab_n_tokens(handle))
        self.type = int(self.lib.llama_vocab_type(handle))
        self.add_bos = bool(self.lib.llama_vocab_get_add_bos(handle))
        self.add_eos = bool(self.lib.llama_vocab_get_add_eos(handle))
        self.bos = self._special(self.lib.llama_vocab_bos)
        self.eos = self._special(self.lib.llama_vocab_eos)
        self.eot = self._special(self.lib.llama_vocab_eot)

    def _special(self, call: Any) -> int | None:
        token = int(call(self.handle))
        return None if token < 0 else token

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end generation, ascending."""
        return tuple(filter(self.is_eog, range(self.n_tokens)))

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends generation."""
        return bool(self.lib.llama_vocab_is_eog(self.handle, token))

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = True
    ) -> tuple[int, ...]:
        """Token ids of `text`: with the vocabulary's BOS/EOS, and ``<|…|>`` as special tokens, unless switched off."""
        raw = text.encode()

        def fill(size: int) -> tuple[int, Any]:
            ids = (ctypes.c_int32 * size)()
            flags = add_special, parse_special
            return self.lib.llama_tokenize(self.handle, raw, len(raw), ids, size, *flags), ids

        n, ids = fill(len(raw) + 2)  # a token is a byte or more; BOS and EOS
        if n < 0:  # vocabularies that put a space in front or normalise to more characters
            n, ids = fill(-n)
        return tuple(ids[:n])

    def piece(self, token: int) -> bytes:
        """The bytes `token` stands for; special tokens as their text."""

        def fill(size: int) -> tuple[int, Any]:
            buffer = ctypes.create_string_buffer(size)
            return self.lib.llama_token_to_piece(self.handle, token, buffer, size, 0, True), buffer

        n, buffer = fill(64)
        if n < 0:
            n, buffer = fill(-n)
        return bytes(buffer.raw[:n])

    def pieces(self, tokens: Iterable[int]) -> list[bytes]:
        """`piece` of each token."""
        return [self.piece(t) for t in tokens]

    def text(self, token: int) -> bytes:
        """The vocabulary's own entry for `token`, before it is turned into bytes; what compatibility is judged by."""
        return bytes(self.lib.llama_vocab_get_text(self.handle, token))


@contextmanager
def open_vocab(path: str | Path) -> Iterator[Vocab]:
    """The vocabulary of the GGUF at `path`, without its weights. Raises `EngineFault` at stage ``load``."""
    stage.report("load")
    lib = library.load()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise EngineFault("load", f"{Path(path).name}: llama.cpp could not read the vocabulary")
    try:
        yield Vocab(lib.llama_model_get_vocab(model))
    finally:
        lib.llama_model_free(model)


def differences(target: Vocab, draft: Vocab) -> list[str]:
    """Why `draft` cannot draft for `target`, one phrase each; empty when it can.

    The rule is llama.cpp's own (``common_speculative_are_compatible``): same type, same BOS and EOS where they are
    added, sizes within 128, and the same text of every token from id 5 on. At most five tokens are named.
    """
    found = []
    if target.type != draft.type:
        found.append(f"vocabulary type {draft.type} instead of {target.type}")
    for name in ("bos", "eos"):
        ours, theirs = (_added(v, name) for v in (target, draft))
        if ours != theirs:
            found.append(f"{name.upper()} {theirs} instead of {ours}")
    if abs(target.n_tokens - draft.n_tokens) > MAX_SIZE_DIFFERENCE:
        found.append(f"{draft.n_tokens} tokens instead of {target.n_tokens}")

    shared = range(FIRST_COMPARED, min(target.n_tokens, draft.n_tokens))
    differing = [t for t in shared if target.text(t) != draft.text(t)]
    found += [
        f"token {t} is {_shown(draft.text(t))} instead of {_shown(target.text(t))}"
        for t in differing[:SHOWN]
    ]
    if len(differing) > SHOWN:
        found.append(f"{len(differing) - SHOWN} more tokens differ")
    return found


def _added(vocab: Vocab, name: str) -> str:
    return f"added as {getattr(vocab, name)}" if getattr(vocab, f"add_{name}") else "not added"


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))


def file_differences(target: str | Path, draft: str | Path) -> list[str]:
    """`differences` between two GGUFs on disk."""
    with open_vocab(target) as ours, open_vocab(draft) as theirs:
        return differences(ours, theirs)


def token_counts(path: str | Path, texts: Sequence[str]) -> list[int]:
    """How many tokens each text has in the vocabulary of the GGUF at `path`, specials included."""
    with open_vocab(path) as vocab:
        return [len(vocab.tokenize(text)) for text in texts]
