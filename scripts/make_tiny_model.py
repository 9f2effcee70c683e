"""Tiny language models for tests: real architectures, random weights, files of a few megabytes.

Rows are multiples of 256, so that K-quants are real; the vocabulary has every byte, so that any text can be
tokenised and back. The weights are scaled for lively greedy text: every token calls for a certain next one, and
what attention or the state brings from all that came before overrules it about every other time. So a copy with
`noise`, or a coarser quantisation, drafts for the original with some of its tokens accepted and some rejected.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from numpy.typing import NDArray

N_EMBD = 256
N_FF = 512
N_HEAD = 4
N_HEAD_KV = 2
HEAD = N_EMBD // N_HEAD
N_CTX = 4096
WINDOW = 16  # positions that a layer with sliding-window attention sees

D_INNER = 2 * N_EMBD
D_STATE = 16
D_CONV = 4
DT_RANK = 32  # not a multiple of 256: ssm_dt shows how quantising falls back to another type

N_EXPERT = 4
N_EXPERT_USED = 2
N_FF_EXPERT = 256

HABIT = 0.35  # how strongly a token calls for the one STRIDE further on
STRIDE = 97

UNK, BOS, EOS = range(3)
WORDS = ["th", "he", "in", "er"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *WORDS]
TYPES = [
    TokenType.UNKNOWN,
    *[TokenType.CONTROL] * 2,
    *[TokenType.BYTE] * 256,
    *[TokenType.NORMAL] * (1 + len(WORDS)),
]


@dataclass(frozen=True)
class Kind:
    """An architecture of llama.cpp and what its layers are made of."""

    arch: str
    layers: tuple[str, ...]  # "attention" or "mamba", first to last
    feed_forward: str = "dense"  # or "experts", "none"
    q_k_norm: bool = False
    post_norm: bool = False
    dt_b_c_norm: bool = False


KINDS = {
    "llama": Kind("llama", ("attention",) * 2),
    "moe": Kind("llama", ("attention",) * 2, feed_forward="experts"),
    "swa": Kind("gemma3", ("attention",) * 4, q_k_norm=True, post_norm=True),
    "recurrent": Kind("mamba", ("mamba",) * 4, feed_forward="none"),
    "hybrid": Kind("jamba", ("mamba", "attention"), dt_b_c_norm=True),
}


@dataclass(frozen=True)
class Weight:
    """A tensor to be: its shape as numpy has it (rows first) and how it is filled.

    Matrices are normal with deviation `gain` / sqrt(columns); vectors hold `value`.
    """

    name: str
    shape: tuple[int, ...]
    gain: float = 1.0
    value: float | NDArray[np.float32] | None = None


def _attention(kind: Kind, at: str) -> Iterator[Weight]:
    yield Weight(f"{at}.attn_q.weight", (N_HEAD * HEAD, N_EMBD), gain=2.0)
    yield Weight(f"{at}.attn_k.weight", (N_HEAD_KV * HEAD, N_EMBD), gain=2.0)
    yield Weight(f"{at}.attn_v.weight", (N_HEAD_KV * HEAD, N_EMBD))
    yield Weight(f"{at}.attn_output.weight", (N_EMBD, N_HEAD * HEAD))
    if kind.q_k_norm:
        yield Weight(f"{at}.attn_q_norm.weight", (HEAD,), value=2.0)
        yield Weight(f"{at}.attn_k_norm.weight", (HEAD,), value=2.0)


def _mamba(kind: Kind, at: str) -> Iterator[Weight]:
    yield Weight(f"{at}.ssm_in.weight", (2 * D_INNER, N_EMBD))
    yield Weight(f"{at}.ssm_conv1d.weight", (D_INNER, D_CONV))
    yield Weight(f"{at}.ssm_conv1d.bias", (D_INNER,), value=0.0)
    yield Weight(f"{at}.ssm_x.weight", (DT_RANK + 2 * D_STATE, D_INNER))
    yield Weight(f"{at}.ssm_dt.weight", (D_INNER, DT_RANK))
    yield Weight(f"{at}.ssm_dt.bias", (D_INNER,), value=-2.0)
    decay = np.linspace(-1 / D_STATE, -1, D_STATE, dtype=np.float32)  # slow: it remembers
    yield Weight(f"{at}.ssm_a", (D_INNER, D_STATE), value=decay)
    yield Weight(f"{at}.ssm_d", (D_INNER,), value=1.0)
    yield Weight(f"{at}.ssm_out.weight", (N_EMBD, D_INNER))
    if kind.dt_b_c_norm:
        yield Weight(f"{at}.ssm_dt_norm.weight", (DT_RANK,), value=1.0)
        yield Weight(f"{at}.ssm_b_norm.weight", (D_STATE,), value=1.0)
        yield Weight(f"{at}.ssm_c_norm.weight", (D_STATE,), value=1.0)


def _feed_forward(kind: Kind, at: str) -> Iterator[Weight]:
    if kind.feed_forward == "none":
        return
    yield Weight(f"{at}.ffn_norm.weight", (N_EMBD,), value=1.0)
    if kind.feed_forward == "experts":
        yield Weight(f"{at}.ffn_gate_inp.weight", (N_EXPERT, N_EMBD))
        yield Weight(f"{at}.ffn_gate_exps.weight", (N_EXPERT, N_FF_EXPERT, N_EMBD))
        yield Weight(f"{at}.ffn_up_exps.weight", (N_EXPERT, N_FF_EXPERT, N_EMBD))
        yield Weight(f"{at}.ffn_down_exps.weight", (N_EXPERT, N_EMBD, N_FF_EXPERT))
    else:
        yield Weight(f"{at}.ffn_gate.weight", (N_FF, N_EMBD))
        yield Weight(f"{at}.ffn_up.weight", (N_FF, N_EMBD))
        yield Weight(f"{at}.ffn_down.weight", (N_EMBD, N_FF))


def _weights(kind: Kind) -> Iterator[Weight]:
    # gemma3 multiplies embeddings by the root of N_EMBD; here all kinds end up with deviation 1.
    yield Weight(
        "token_embd.weight", (len(TOKENS), N_EMBD), gain=1 if kind.arch == "gemma3" else N_EMBD**0.5
    )
    yield Weight("output_norm.weight", (N_EMBD,), value=1.0)
    yield Weight("output.weight", (len(TOKENS), N_EMBD), gain=4.0)
    for index, layer in enumerate(kind.layers):
        at = f"blk.{index}"
        yield Weight(f"{at}.attn_norm.weight", (N_EMBD,), value=1.0)
        yield from (_attention if layer == "attention" else _mamba)(kind, at)
        if kind.post_norm:
            yield Weight(f"{at}.post_attention_norm.weight", (N_EMBD,), value=0.5)
            yield Weight(f"{at}.post_ffw_norm.weight", (N_EMBD,), value=0.5)
        yield from _feed_forward(kind, at)


def _values(
    weight: Weight, seed: int, noise: float, ends_as: int | None = None
) -> NDArray[np.float32]:
    if weight.value is not None:
        return np.broadcast_to(np.float32(weight.value), weight.shape).copy()
    values = _normal(weight.name, weight.shape, seed, noise)
    if weight.name == "output.weight":
        embedding = _normal("token_embd.weight", weight.shape, seed, noise)
        values += HABIT * np.roll(embedding, STRIDE, axis=0)
        values[:3] = 0  # logit 0 never wins against hundreds of normal ones
        if ends_as is not None:
            values[EOS] = 1.25 * values[ends_as]
    return values * np.float32(weight.gain / weight.shape[-1] ** 0.5)


def _normal(name: str, shape: tuple[int, ...], seed: int, noise: float) -> NDArray[np.float32]:
    """Normal deviates that depend on `name`, not on the tensors made before."""
    source = np.random.default_rng([seed, crc32(name.encode())])
    values = source.standard_normal(shape, dtype=np.float32)
    return values + np.float32(noise) * source.standard_normal(shape, dtype=np.float32)


def _metadata(writer: gguf.GGUFWriter, kind: Kind) -> None:
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(len(kind.layers))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_feed_forward_length(
        {"none": 0, "dense": N_FF, "experts": N_FF_EXPERT}[kind.feed_forward]
    )
    if "attention" in kind.layers:
        writer.add_head_count(N_HEAD)
        writer.add_head_count_kv([N_HEAD_KV * (layer == "attention") for layer in kind.layers])
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
    if "mamba" in kind.layers:
        writer.add_ssm_conv_kernel(D_CONV)
        writer.add_ssm_inner_size(D_INNER)
        writer.add_ssm_state_size(D_STATE)
        writer.add_ssm_time_step_rank(DT_RANK)
    if kind.feed_forward == "experts":
        writer.add_expert_count(N_EXPERT)
        writer.add_expert_used_count(N_EXPERT_USED)
    if kind.arch == "gemma3":
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern(2)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([float(len(token)) for token in TOKENS])
    writer.add_token_types(TYPES)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def make(
    kind: str, path: str | Path, seed: int = 0, noise: float = 0.0, ends_as: int | None = None
) -> Path:
    """Write the model `kind` (a key of `KINDS`) to `path`: the same bytes for the same arguments.

    Matrices are BF16, vectors and small tensors F32. `noise` perturbs the weights of `seed` by normal deviates
    of that relative size. No text ends by itself, unless `ends_as` names a token: the end-of-text token then
    comes where that one would have come.
    """
    shape = KINDS[kind]
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"tiny {kind}")
    _metadata(writer, shape)
    for weight in _weights(shape):
        values = _values(weight, seed, noise, ends_as)
        if weight.value is None and "conv1d" not in weight.name and "gate_inp" not in weight.name:
            bf16 = GGMLQuantizationType.BF16
            writer.add_tensor(weight.name, gguf.quantize(values, bf16), raw_dtype=bf16)
        else:
            writer.add_tensor(weight.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random model as GGUF.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, help="relative size of a perturbation")
    parser.add_argument(
        "--ends-as", type=int, metavar="ID", help="end the text where this token comes"
    )
    arguments = parser.parse_args()
    make(**vars(arguments))


if __name__ == "__main__":
    main()
