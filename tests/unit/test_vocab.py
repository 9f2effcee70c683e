"""Vocabularies: ids and bytes both ways, and llama.cpp's rule of which two can speculate together."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest

import make_tiny_model as tiny
from specbisect.errors import BadInput, EngineFault
from specbisect.llama import child, files, vocab
from specbisect.llama.vocab import Vocab, differences, open_vocab

Tiny = Callable[..., Path]


@pytest.fixture
def target(tiny_models: Tiny) -> Iterator[Vocab]:
    with open_vocab(tiny_models()) as opened:
        yield opened


def changed(source: Path, path: Path, old: bytes, new: bytes) -> Path:
    assert len(old) == len(new)
    path.write_bytes(source.read_bytes().replace(old, new))
    return path


def with_field(source: Path, path: Path, key: str, value: int | bool) -> Path:
    """A copy of `source` with one scalar of its metadata changed."""
    path.write_bytes(source.read_bytes())
    gguf.GGUFReader(path, "r+").fields[key].parts[-1][0] = value
    return path


def test_facts(target: Vocab) -> None:
    assert target.n_tokens == len(tiny.TOKENS)
    assert (target.bos, target.eos, target.eot) == (tiny.BOS, tiny.EOS, None)
    assert (target.add_bos, target.add_eos) == (True, False)
    assert target.end_tokens == (tiny.EOS,)
    assert target.is_eog(tiny.EOS)
    assert not target.is_eog(tiny.BOS)


@pytest.mark.parametrize("text", ["Once upon a time", "é☃𝄞", "\x00\n\t", "a" * 5000, ""])
def test_text_comes_back(target: Vocab, text: str) -> None:
    ids = target.tokenize(text, add_special=False)
    assert b"".join(target.pieces(ids)) == text.encode()
    assert target.tokenize(text) == (tiny.BOS, *ids)


def test_special_tokens_are_parsed_unless_told_not_to(target: Vocab) -> None:
    assert target.tokenize("</s>", add_special=False) == (tiny.EOS,)
    plain = target.tokenize("</s>", add_special=False, parse_special=False)
    assert tiny.EOS not in plain
    assert target.piece(tiny.EOS) == b"</s>"


def test_every_byte_has_a_token(target: Vocab) -> None:
    assert target.pieces(range(3, 259)) == [bytes([byte]) for byte in range(256)]


def test_pieces_longer_than_any_buffer_are_whole(tiny_models: Tiny, tmp_path: Path) -> None:
    word = b"x" * 300
    content = tiny_models().read_bytes()
    entry = len(b"</s>").to_bytes(8, "little") + b"</s>"
    longer = content.replace(entry, len(word).to_bytes(8, "little") + word)
    assert longer != content
    path = tmp_path / "m.gguf"
    path.write_bytes(longer + bytes(64))  # the tensors begin further on
    with open_vocab(path) as opened:
        assert opened.piece(tiny.EOS) == word


def test_no_difference_between_quantisations(tiny_models: Tiny, target: Vocab) -> None:
    with open_vocab(tiny_models("swa", "Q4_0")) as draft:
        assert differences(target, draft) == []


def test_only_the_first_five_tokens_are_named(
    tiny_models: Tiny, tmp_path: Path, target: Vocab
) -> None:
    other = changed(tiny_models(), tmp_path / "m.gguf", b"<0x4", b"<0X4")  # sixteen byte tokens
    with open_vocab(other) as draft:
        found = differences(target, draft)
    named = range(tiny.TOKENS.index("<0x40>"), tiny.TOKENS.index("<0x45>"))
    assert found == [
        *(
            f"token {t} is {tiny.TOKENS[t].replace('x', 'X')!r} instead of {tiny.TOKENS[t]!r}"
            for t in named
        ),
        "11 more tokens differ",
    ]


def test_first_tokens_are_not_compared(tiny_models: Tiny, tmp_path: Path, target: Vocab) -> None:
    with open_vocab(changed(tiny_models(), tmp_path / "m.gguf", b"<unk>", b"<UNK>")) as draft:
        assert differences(target, draft) == []


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("tokenizer.ggml.bos_token_id", 7, ["BOS added as 7 instead of added as 1"]),
        ("tokenizer.ggml.eos_token_id", 7, []),  # not added, so that it does not matter
    ],
)
def test_special_ids(
    tiny_models: Tiny, tmp_path: Path, target: Vocab, key: str, value: int, found: list[str]
) -> None:
    with open_vocab(with_field(tiny_models(), tmp_path / "m.gguf", key, value)) as draft:
        assert differences(target, draft) == found


def test_other_processes(tiny_models: Tiny, tmp_path: Path) -> None:
    assert child.call(vocab.token_counts, tiny_models(), ["", "xyz"]) == [1, 4]
    with pytest.raises(
        EngineFault, match="load: m.gguf: llama.cpp could not read.*last words: .*No such file"
    ):
        child.call(vocab.token_counts, tmp_path / "m.gguf", ["x"])


def test_a_call_that_dies_is_a_fault_and_one_that_refuses_is_not(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="SIGABRT"):
        child.call(os.abort)
    with pytest.raises(BadInput, match="does not exist; check the path$"):
        child.call(files.inspect, tmp_path / "m.gguf")
