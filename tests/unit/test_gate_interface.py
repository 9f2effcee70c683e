"""The draft interface: every kind of mismatch is found and named, and nothing is found where there is none."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import TokenType

from make_tiny_model import BOS, EOS, TOKENS, TYPES
from specbisect.gate import interface
from specbisect.gate.interface import Asked, differences
from specbisect.matrix import Overrides, build

PLAIN = Asked("draft-model", n_max=3, n_ctx=2048)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Writes the header of a model: an architecture with a tiny vocabulary, and whatever else is given."""

    def write(
        name: str,
        arch: str = "llama",
        *,
        tokens: Sequence[str] = TOKENS,
        types: Sequence[TokenType] = TYPES,
        tensors: Sequence[str] = (),
        eos: int = EOS,
        **own: Any,
    ) -> Path:
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", arch)
        values = {"context_length": 4096, "embedding_length": 256, "block_count": 24} | own
        for key, value in values.items():
            if key == "mask":
                writer.add_mask_token_id(value)
            elif key == "add_space":
                writer.add_add_space_prefix(value)
            elif key == "pre":
                writer.add_tokenizer_pre(value)
            elif isinstance(value, bool):
                writer.add_bool(f"{arch}.{key}", value)
            elif isinstance(value, list):
                writer.add_array(f"{arch}.{key}", value)
            else:
                writer.add_uint32(f"{arch}.{key}", value)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(tokens))
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types(list(types))
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(eos)
        for tensor in ["output_norm.weight", *tensors]:
            writer.add_tensor(tensor, np.ones(256, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / f"{name}.gguf"

    return write


Model = Callable[..., Path]


def test_models_that_fit(model: Model) -> None:
    assert differences(model("t"), model("d", embedding_length=64, block_count=2), PLAIN) == []
    assert differences(model("t"), model("d", "qwen2"), PLAIN) == []


def changed(at: int, value: Any, values: Sequence[Any]) -> list[Any]:
    found = list(values)
    found[at] = value
    return found


LETTER = TOKENS.index("<0x41>")

MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "text of a token": (
        {"tokens": changed(LETTER, "<0x4X>", TOKENS)},
        f"token {LETTER} is '<0x4X>' instead of '<0x41>'",
    ),
    "size": (
        {
            "tokens": [*TOKENS, *(f"t{i}" for i in range(200))],
            "types": [*TYPES, *[TokenType.NORMAL] * 200],
        },
        f"{len(TOKENS) + 200} tokens instead of {len(TOKENS)}",
    ),
    "control token": (
        {"types": changed(262, TokenType.CONTROL, TYPES)},
        "token 262 is a control token only in the drafter",
    ),
    "end of generation": ({"eos": 262}, "token 262 ends generation only in the drafter"),
    "pre-tokenizer": (
        {"pre": "qwen2"},
        "tokenizer.ggml.pre is qwen2 instead of None",
    ),
    "add-space rule": (
        {"add_space": False},
        "tokenizer.ggml.add_space_prefix is False instead of None",
    ),
    "context": ({"context_length": 1024}, "trained for a context of 1024 tokens, used with 2048"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_is_named(model: Model, what: str) -> None:
    options, expected = MISMATCHES[what]
    assert expected in differences(model("t"), model("d", **options), PLAIN)


def test_add_space_shows_in_tokens_too(model: Model) -> None:
    found = differences(model("t"), model("d", add_space=False), PLAIN)
    space, letter = TOKENS.index("▁"), TOKENS.index("<0x61>")
    assert f"'a' is tokenised as [{letter}] instead of [{space}, {letter}]" in found


def test_many_differences_are_counted_not_listed(model: Model) -> None:
    types = [TokenType.NORMAL if t == TokenType.BYTE else t for t in TYPES]
    found = differences(
        model("t", types=types),
        model("d", types=[*types[:200], *[TokenType.CONTROL] * (len(types) - 200)]),
        PLAIN,
    )
    listed = [entry for entry in found if "only in the drafter" in entry]
    assert len(listed) == 5
    assert f"{len(TYPES) - 205} more tokens differ in whether one is a control token" in found


EAGLE: dict[str, Any] = {"target_layers": [2, 12, 21], "target_hidden_size": 256}
DFLASH: dict[str, Any] = {"target_layers": [1, 9, 23], "block_size": 8, "mask": 5}
HEADS: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "eagle3 alone": (
        "draft-model",
        "eagle3",
        EAGLE,
        3,
        "architecture eagle3 reads hidden states and cannot draft from tokens alone",
    ),
    "eagle3 hidden size": (
        "draft-eagle3",
        "eagle3",
        EAGLE | {"target_hidden_size": 4096},
        3,
        "made for hidden states of size 4096, the target's have 256",
    ),
    "eagle3 layer": (
        "draft-eagle3",
        "eagle3",
        EAGLE | {"target_layers": [2, 24, 25]},
        3,
        "reads target layers [25], the target has 24",
    ),
    "eagle3 layers": (
        "draft-eagle3",
        "eagle3",
        EAGLE | {"target_layers": [2, 12]},
        3,
        "declares 2 target layers instead of 3",
    ),
    "dflash hidden size": (
        "draft-dflash",
        "dflash",
        DFLASH | {"embedding_length": 512},
        3,
        "made for hidden states of size 512, the target's have 256",
    ),
    "dflash layer": (
        "draft-dflash",
        "dflash",
        DFLASH | {"target_layers": [24]},
        3,
        "reads target layers [24], the target has 24",
    ),
    "dflash block": (
        "draft-dflash",
        "dflash",
        DFLASH,
        8,
        "n_max = 8 is more than 7: its block of 8 drafts after the anchor",
    ),
    "dspark block": (
        "draft-dspark",
        "dflash",
        DFLASH | {"tensors": ["markov_w1.weight"]},
        9,
        "n_max = 9 is more than 8: its block of 8 drafts from the anchor on",
    ),
    "dspark anchor": (
        "draft-dspark",
        "dflash",
        DFLASH | {"tensors": ["markov_w1.weight"], "sample_from_anchor": False},
        8,
        "n_max = 8 is more than 7: its block of 8 drafts after the anchor",
    ),
    "dflash mask": (
        "draft-dflash",
        "dflash",
        {k: v for k, v in DFLASH.items() if k != "mask"},
        3,
        "declares no mask token, which its queries are made of",
    ),
    "mtp width": (
        "draft-mtp",
        "llama",
        {"embedding_length": 128},
        3,
        "its prediction heads take hidden states of size 128, the target's have 256",
    ),
    "mtp heads": (
        "draft-mtp",
        "llama",
        {"nextn_predict_layers": 2},
        3,
        "n_max = 3 is more than its 2 prediction heads can draft",
    ),
}


@pytest.mark.parametrize("what", HEADS)
def test_declared_convention_is_compared(model: Model, what: str) -> None:
    method, arch, own, n_max, expected = HEADS[what]
    found = differences(model("t"), model("d", arch, **own), Asked(method, n_max, 2048))
    assert found == [expected]


@pytest.mark.parametrize(
    ("method", "arch", "own"),
    [
        ("draft-eagle3", "eagle3", EAGLE | {"target_layers": [2, 12, 24]}),
        ("draft-dflash", "dflash", DFLASH),
        ("draft-dspark", "dflash", DFLASH | {"tensors": ["markov_w1.weight"]}),
        ("draft-mtp", "llama", {"nextn_predict_layers": 3}),
        ("draft-mtp", "llama", {"nextn_predict_layers": 1}),
    ],
)
def test_heads_that_fit(model: Model, method: str, arch: str, own: dict[str, Any]) -> None:
    assert differences(model("t"), model("d", arch, **own), Asked(method, 3, 2048)) == []


def test_a_plan_is_checked_pair_by_pair(
    tmp_path: Path, tiny_models: Callable[..., Path], model: Model
) -> None:
    good, bad = tiny_models(noise=0.1), model("bad", tokens=changed(LETTER, "<0x4X>", TOKENS))
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "text": "Hello"}\n')
    tables = {
        "schema": "specbisect.matrix/1",
        "drafter": [
            {"method": "draft-model", "model": [str(good), str(bad)], "n_max": [1, 3]},
            {"method": "self", "n_max": 2},
            {"method": "ngram-simple"},
        ],
    }
    plan = build(tables, Overrides(targets=(tiny_models(),), prompts=tmp_path / "prompts.jsonl"))
    (found,) = interface.check(plan)
    assert (found.target, found.draft) == (tiny_models().name, "bad.gguf")
    assert str(found).startswith(
        f"bad.gguf does not fit {tiny_models().name}: token {LETTER} is '<0x4X>' instead of '<0x41>'"
    )
