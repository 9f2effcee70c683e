"""A one-second probe: how fast this machine decodes a model, to say how long a run will take."""

import time
from dataclasses import dataclass
from pathlib import Path

from specbisect.cell import Cell

SECONDS = 1.0
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds for one token of a model of `size` bytes: generated, and as part of a prompt."""

    model: str
    size: int
    decode_s: float
    prompt_s: float


def measure(path: Path, cell: Cell) -> Speed:
    """Decode the GGUF at `path`, in the context that `cell` asks for, for a second. Call it in a child process."""
    from specbisect import stage
    from specbisect.llama.context import Context, Settings, rows_of
    from specbisect.llama.model import LoadedModel

    stage.report("load")
    placed = {n: getattr(cell, n) for n in ("n_gpu_layers", "split_mode", "use_extra_bufts")}
    with LoadedModel(path, **placed) as model, Context(model, Settings.of(cell)) as context:
        stage.report("decode")
        token = model.n_vocab // 2
        n_prompt = max(1, min(PROMPT_TOKENS, context.n_batch, context.n_ctx_seq // 2))
        context.evaluate(rows_of([token], 0))  # the first evaluation also sets things up
        context.clear()
        began = time.perf_counter()
        context.evaluate(rows_of([token] * n_prompt, 0, last_only=True))
        prompted = time.perf_counter()
        position = n_prompt
        while time.perf_counter() - prompted < SECONDS and position < context.n_ctx_seq:
            context.evaluate(rows_of([token], position))
            position += 1
        decode_s = (time.perf_counter() - prompted) / max(1, position - n_prompt)
    return Speed(path.name, path.stat().st_size, decode_s, (prompted - began) / n_prompt)
