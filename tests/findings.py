"""Findings without a model behind them, for tests of what is made of findings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.compare import compare
from specbisect.diagnose.finding import Evidence, Finding
from specbisect.narrow.result import (
    Irrelevant,
    Narrowed,
    Neighbour,
    Precision,
    Step,
    Tensors,
    Width,
)
from specbisect.trace import Cycle, Trace

TARGET = Model("SmolLM2", "Q4_K_M", "sha256:" + "a" * 64, "/home/alice/models/SmolLM2.Q4_K_M.gguf")
DRAFT = Model("SmolLM2", "Q2_K", "sha256:" + "b" * 64, "/home/alice/models/SmolLM2.Q2_K.gguf")
HOST: Mapping[str, Any] = {
    "library": "llama-cpp-python 0.3.36 0123456789abcdef",
    "system_info": "CPU : SSE3 = 1 | AVX2 = 1 | REPACK = 1 |",
    "cpu": "Some CPU",
    "machine": "x86_64",
    "os": "Linux 6.1",
    "cores": 2,
    "memory_gib": 16.0,
    "devices": ["Some CPU"],
    "variables": {"OMP_NUM_THREADS": "2"},
}
PROMPT_IDS = (1, 20, 21, 22)
VANILLA_IDS = (5, 6, 7, 8, 9, 10, 11, 12)
SPECULATIVE_IDS = (5, 6, 7, 8, 90, 91, 92, 93)


def facts(model: Model) -> dict[str, Any]:
    """What a trace says about a model file."""
    return {
        "name": model.name,
        "architecture": "llama",
        "file_type": model.quant,
        "size": 1000,
        "sha256": model.identity.removeprefix("sha256:"),
        "n_vocab": 49152,
        "n_layer": 30,
        "tensor_types": {"Q4_K": 180, "F32": 61},
        "tokenizer": "gpt2",
        "pre_tokenizer": "smollm",
        "special": {"bos": 1, "eos": 2},
        "chat_template": "872be49dbb638044",
    }


def trace(arm: Any, ids: tuple[int, ...], cycles: tuple[Cycle, ...] = ()) -> Trace:
    """An arm with these ids."""
    return Trace(
        arm,
        PROMPT_IDS,
        ids,
        "length",
        pieces=tuple(f" t{i}" for i in ids),
        digests=tuple(f"{i:016x}" for i in ids),
        best=ids,
        runners_up=tuple(i + 1 for i in ids),
        margins=tuple(0.5 + i for i in range(len(ids))),
        cycles=cycles,
        drafted=sum(c.drafted for c in cycles),
        accepted=sum(c.accepted for c in cycles),
        resolved={
            "target": {"n_ctx": 2048, "n_threads": 2, "n_threads_batch": 2, "flash_attn": "on"}
        },
        provenance={"host": HOST, "target": facts(TARGET), "draft": facts(DRAFT)},
    )


CYCLES = (
    Cycle(4, (5, 6, 7, 60), 2),
    Cycle(7, (8, 90, 91, 92), 3),
)


def finding(label: Any = "batch-width", text: str = "Once upon a time", **changes: Any) -> Finding:
    """A fork at token 4, in cycle 1, whose cause is `label`; further arguments replace fields."""
    case = Case(Cell(TARGET, DraftModel(DRAFT, 3), n_predict=8), Prompt("story", text))
    vanilla = trace("vanilla", VANILLA_IDS)
    speculative = trace("speculative", SPECULATIVE_IDS, CYCLES)
    made = Finding(
        case=case,
        verdict=compare(vanilla, speculative),
        label=label,
        kind="accumulated" if label == "batch-width" else "",
        summary="same bits without a drafter and without rollback",
        evidence=(
            Evidence(
                experiment="replay",
                run="every verify batch again",
                outcome="rows bit-identical in 2 of 2 cycles",
                data={"cycles": 2, "equal": 2},
            ),
            Evidence(
                experiment="envelope",
                run="margins against changes",
                outcome="inside",
                data={"width": 4, "median": 0.1, "p95": 0.4, "largest": 0.75},
            ),
        ),
        vanilla=vanilla,
        speculative=speculative,
    )
    return made.model_copy(update=changes)


def narrowed(found: Finding) -> Narrowed:
    """A finding narrowed to a shorter answer, with everything a search can say of it."""
    small = replace(found.case, cell=replace(found.case.cell, n_predict=5))
    return Narrowed(
        original=found.case,
        minimal=found.model_copy(update={"case": small}),
        steps=(Step(stage="length", part="n_predict", before="8", after="5", trials=3),),
        irrelevant=(Irrelevant(axis="flash_attn", original="on", now="auto", tried=("on", "off")),),
        neighbours=(
            Neighbour(axis="n_max", value=3, neighbour=2, shows="none"),
            Neighbour(axis="use_extra_bufts", value=True, neighbour=False, shows="none"),
            Neighbour(axis="target", value="Q4_K_M", neighbour="Q8_0", shows="none"),
        ),
        widths=(Width(width=3, shows="none"), Width(width=4, shows="batch-width")),
        precisions=(
            Precision(type="Q4_K_M", shows="batch-width"),
            Precision(type="Q6_K", shows="none"),
        ),
        interactions=(("n_ubatch", "type_k"),),
        tensors=Tensors(
            names=("blk.1.ffn_down.weight",),
            unsafe="Q4_K",
            safe="Q8_0",
            without="none",
            alone="batch-width",
            base_sha256="c" * 64,
            overrides=(("blk.1.ffn_down", "q4_K"),),
        ),
        proved_minimal=True,
        reason="complete",
        trials=41,
        original_decoded=1234,
    )
