"""Cells: one frozen configuration each, with every axis at a value.

A `Cell` is the only carrier of settings. Each axis is declared once, as a field of `Cell`, with its default, why
that default is the simplest value, and which engines honour it; `AXES` is read off those fields. Names are
llama.cpp's own. A `Case` is a cell and a prompt: a value that goes into an engine.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import TypeAdapter

from specbisect.fault import Fault

EngineName = Literal["libllama", "binding", "server"]
FlashAttn = Literal["auto", "on", "off"]
SplitMode = Literal["none", "layer", "row"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

ENGINES: tuple[EngineName, ...] = get_args(EngineName)
INT32 = 2**31 - 1
"""The largest number that llama.cpp's settings hold, unless one says otherwise."""
MAX_THREADS = 512
"""GGML_MAX_N_THREADS: more of them are beyond the end of an array."""


def digest(value: object) -> str:
    """16 hex digits of SHA-256 over the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without(value: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`value` without `keys`, at any depth of nested tables."""
    kept = {k: v for k, v in value.items() if k not in keys}
    return {k: without(v, *keys) if isinstance(v, dict) else v for k, v in kept.items()}


@dataclass(frozen=True, slots=True)
class Model:
    """A GGUF named by its content.

    `identity` is ``sha256:<hex>`` of a file, or ``quantize:<sha256 of base>:<type>:<library build>`` of a file that
    can be made. `name` is what people call it and `path` where it lies on this machine; neither takes part in
    equality or keys.
    """

    name: str = field(compare=False)
    quant: str
    identity: str
    path: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A second GGUF drafts greedily (llama-server: ``draft-simple``)."""

    model: Model
    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"
    method: Literal["draft-model"] = "draft-model"


@dataclass(frozen=True, slots=True)
class SelfDraft:
    """The target drafts for itself, in a second context: the control whose acceptance should be near 1."""

    n_max: int = 3
    method: Literal["self"] = "self"


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Prompt-lookup decoding: the earliest match of the longest suffix n-gram, as in llama-cpp-python."""

    ngram_size: int = 2
    n_max: int = 10
    method: Literal["prompt-lookup"] = "prompt-lookup"


@dataclass(frozen=True, slots=True)
class NgramSimple:
    """llama.cpp's ``ngram-simple``: latest earlier match of the last `size_n` tokens, then `size_m` tokens."""

    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1
    method: Literal["ngram-simple"] = "ngram-simple"

    @property
    def n_max(self) -> int:
        """Longest draft, in tokens."""
        return self.size_m


@dataclass(frozen=True, slots=True)
class Scripted:
    """Given drafts: pairs of (tokens generated so far, the draft to verify there); elsewhere nothing is drafted.

    `limit` is the longest draft the original drafter could have made, where the script replays one.
    """

    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    limit: int = 0
    method: Literal["scripted"] = "scripted"

    @property
    def n_max(self) -> int:
        """Longest draft, in tokens."""
        return max(self.limit, *(len(ids) for _, ids in self.drafts), 0)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Any ``--spec-type`` a llama-server knows, with further flags as they stand on its command line."""

    spec_type: str
    n_max: int = 3
    args: tuple[str, ...] = ()
    model: Model | None = None
    method: Literal["server"] = "server"


Drafter = DraftModel | SelfDraft | PromptLookup | NgramSimple | Scripted | ServerSpec
DRAFTERS: dict[str, type[Drafter]] = {
    kind.__dataclass_fields__["method"].default: kind for kind in get_args(Drafter)
}
DRAFTER_ENGINES: dict[str, frozenset[EngineName]] = {
    "draft-model": frozenset(ENGINES),
    "self": frozenset(ENGINES),
    "prompt-lookup": frozenset({"libllama", "binding"}),
    "ngram-simple": frozenset({"libllama", "server"}),
    "scripted": frozenset({"libllama"}),
    "server": frozenset({"server"}),
}


def drafter_label(drafter: Drafter | None) -> str:
    """What tables call a drafter: its method, or the server's own ``--spec-type``."""
    if drafter is None:
        return "none"
    return drafter.spec_type if isinstance(drafter, ServerSpec) else drafter.method


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of `Cell`: what it defaults to, why that is simplest, who honours it."""

    name: str
    default: Any
    why: str
    engines: frozenset[EngineName]
    minimum: int | None
    maximum: int
    values: tuple[Any, ...] | None

    def rank(self, value: Any) -> tuple[int, Any]:
        """Sort key from simplest to most complex: the default, then declared or ascending order."""
        if value == self.default:
            return 0, 0
        return 1, self.values.index(value) if self.values else value


def _axis(
    default: Any,
    why: str,
    *,
    only: str = "libllama binding server",
    minimum: int | None = None,
    maximum: int = INT32,
    values: tuple[Any, ...] | None = None,
) -> Any:
    return field(
        default=default,
        metadata={
            "why": why,
            "only": frozenset(only.split()),
            "minimum": minimum,
            "maximum": maximum,
            "values": values,
        },
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """One frozen configuration. `drafter` None is the vanilla arm's half of a cell."""

    target: Model
    drafter: Drafter | None = None
    engine: EngineName = _axis("libllama", "fewest layers of the stack", values=ENGINES)
    n_batch: int = _axis(2048, "llama.cpp's default; larger than any verify batch", minimum=1)
    n_ubatch: int = _axis(512, "llama.cpp's default; a verify batch is one micro-batch", minimum=1)
    n_parallel: int = _axis(1, "one sequence in a batch", only="libllama server", minimum=1)
    kv_unified: bool = _axis(
        False, "llama.cpp's default", only="libllama server", values=(False, True)
    )
    n_ctx: int = _axis(
        2048, "holds prompt and answer; 0 (from the model) may ask for 128k cells", minimum=0
    )
    n_threads: int = _axis(0, "0 is every physical core", minimum=0, maximum=MAX_THREADS)
    n_threads_batch: int = _axis(0, "0 is the same as n_threads", minimum=0, maximum=MAX_THREADS)
    flash_attn: FlashAttn = _axis("auto", "llama.cpp's default", values=get_args(FlashAttn))
    type_k: CacheType = _axis("f16", "llama.cpp's default", values=get_args(CacheType))
    type_v: CacheType = _axis("f16", "llama.cpp's default", values=get_args(CacheType))
    swa_full: bool = _axis(False, "llama-server's default", values=(False, True))
    n_gpu_layers: int = _axis(
        -1, "llama.cpp's default: every layer that fits; no effect without a GPU"
    )
    split_mode: SplitMode = _axis("layer", "llama.cpp's default", values=get_args(SplitMode))
    op_offload: bool = _axis(True, "llama.cpp's default", values=(True, False))
    use_extra_bufts: bool = _axis(
        True, "llama.cpp's default: repacked weights", only="libllama server", values=(True, False)
    )
    cache_prompt: bool = _axis(
        False,
        "every request starts from an empty memory, not from what the last one left in the server's slot or in the "
        "binding's object",
        only="server binding",
        values=(False, True),
    )
    ignore_eos: bool = _axis(False, "a case ends where its text ends", values=(False, True))
    n_predict: int = _axis(96, "long enough for most forks", minimum=1)
    seed: int = _axis(0, "greedy decoding draws no random numbers", minimum=0)
    host_class: str = _axis("", "any host; no engine looks at it, it says which hosts may run this")

    kind: ClassVar[str] = "specbisect.cell/1"

    @property
    def key(self) -> str:
        """16 hex digits that name this configuration by content; names and paths of models take no part."""
        return digest(without(asdict(self), "name", "path"))

    @property
    def vanilla(self) -> Self:
        """The same cell without a drafter: what the vanilla arm depends on."""
        return replace(self, drafter=None)

    @property
    def width(self) -> int:
        """Most rows a verify batch can have."""
        return 1 if self.drafter is None else self.drafter.n_max + 1

    def to_json(self) -> dict[str, Any]:
        """Plain JSON without paths, so that it is the same on every machine."""
        return without(asdict(self), "path")

    def problems(self) -> Iterator[str]:
        """Why this cell cannot run, one sentence each; nothing when it can."""
        for axis in AXES.values():
            value = getattr(self, axis.name)
            if self.engine not in axis.engines and value != axis.default:
                yield f"{axis.name} = {value!r} is not honoured by engine {self.engine}"
            if axis.minimum is not None and value < axis.minimum:
                yield f"{axis.name} = {value} is below {axis.minimum}"
            if isinstance(value, int) and value > axis.maximum:
                yield f"{axis.name} = {value} is above {axis.maximum}"
        if self.drafter is not None:
            yield from _drafter_problems(self.engine, self.drafter)
        if self.n_ubatch > self.n_batch:
            yield f"n_ubatch = {self.n_ubatch} is larger than n_batch = {self.n_batch}; lower n_ubatch"
        if self.type_v not in ("f32", "f16", "bf16"):
            if self.flash_attn == "off":
                yield f"type_v = {self.type_v} needs flash attention; set flash_attn to on or auto"
            elif self.flash_attn == "auto" and self.engine == "binding":
                yield f"type_v = {self.type_v} needs flash attention, which the binding leaves off; set it to on"
        if 0 < self.n_ctx <= self.n_predict:
            yield f"n_ctx = {self.n_ctx} leaves no room for a prompt beside n_predict = {self.n_predict}"


def _drafter_problems(engine: EngineName, drafter: Drafter) -> Iterator[str]:
    if engine not in DRAFTER_ENGINES[drafter.method]:
        others = " or ".join(sorted(DRAFTER_ENGINES[drafter.method]))
        yield f"drafter {drafter_label(drafter)} does not exist in engine {engine}; set engine to {others}"
    if drafter.n_max < 1 and not isinstance(drafter, Scripted):
        yield f"drafter {drafter_label(drafter)} may draft {drafter.n_max} tokens; allow at least 1"
    if isinstance(drafter, DraftModel) and drafter.n_min > drafter.n_max:
        yield f"n_min = {drafter.n_min} is larger than n_max = {drafter.n_max}: nothing could be drafted"


AXES: dict[str, Axis] = {
    f.name: Axis(
        f.name,
        f.default,
        f.metadata["why"],
        f.metadata["only"],
        f.metadata["minimum"],
        f.metadata["maximum"],
        f.metadata["values"],
    )
    for f in fields(Cell)
    if "why" in f.metadata
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text (tokenised once, by the target) or as token ids (used as they are)."""

    id: str
    text: str = ""
    group: str = "default"
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A cell and a prompt: the unit of work. `fault` is planted on purpose, to try the tool itself."""

    cell: Cell
    prompt: Prompt
    fault: Fault | None = None

    @property
    def key(self) -> str:
        """16 hex digits that name this case by content."""
        planted = [] if self.fault is None else [asdict(self.fault)]
        return digest([self.cell.key, asdict(self.prompt), *planted])

    @property
    def vanilla(self) -> Self:
        """The case of the vanilla arm, shared by every drafter of the same target and settings."""
        backend = self.fault if self.fault is not None and self.fault.in_kernel else None
        return replace(self, cell=self.cell.vanilla, fault=backend)


CASE = TypeAdapter(Case)
"""JSON both ways (with paths), for the run directory."""
