"""What specbisect costs on top of llama.cpp, as ratios measured in one run: scripts/bench.py [SECTION…]

Times depend on the machine and on what else it does; ratios of things measured in turns hardly do. Results are printed
and kept as JSON. Needs an environment with specbisect in it, such as .venv.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import llama_cpp
import numpy as np

import bench_by_hand
import bench_growth
import bench_passes
import fetch_model
from bench_passes import seconds
from specbisect.cell import Case, Cell, Model, Prompt
from specbisect.engines.libllama import LibLlama
from specbisect.llama import library, quantize
from specbisect.llama.model import LoadedModel

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The history of the bicycle begins"
TOKENS = 96
ROUNDS = 7


@dataclass(frozen=True)
class Measurement:
    """A number and what is wanted of it: at least `floor`, at most `ceiling`; neither is for information."""

    section: str
    name: str
    value: float
    floor: float | None = None
    ceiling: float | None = None

    @property
    def good(self) -> bool:
        low = self.floor is not None and self.value < self.floor
        high = self.ceiling is not None and self.value > self.ceiling
        return not (low or high)

    def __str__(self) -> str:
        wanted = [f"≥ {self.floor:g}"] if self.floor is not None else []
        wanted += [f"≤ {self.ceiling:g}"] if self.ceiling is not None else []
        verdict = (
            f"  (wanted {', '.join(wanted)}: {'yes' if self.good else 'NO'})" if wanted else ""
        )
        return f"{self.section}: {self.name} {self.value:.4g}{verdict}"


def bare(model: LoadedModel, prompt: list[int], threads: int) -> list[int]:
    """Greedy decoding with nothing but llama_decode and an argmax, in a context of its own."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 2048, 2048, 512
    params.n_threads = params.n_threads_batch = threads or library.cores()
    context = llama_cpp.llama_init_from_model(model.handle, params)
    batch = llama_cpp.llama_batch_init(2048, 0, 1)
    ids: list[int] = []
    rows, position = prompt, 0
    while len(ids) < TOKENS:
        batch.n_tokens = len(rows)
        for i, token in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, i == len(rows) - 1
        assert llama_cpp.llama_decode(context, batch) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (model.n_vocab,))
        ids.append(int(logits.argmax()))
        position += len(rows)
        rows = ids[-1:]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return ids


@dataclass(frozen=True)
class Asked:
    """What was asked for: `threads` of a case (0 for the section's own choice) and the `part` of a long section."""

    threads: int
    part: float


def vanilla(asked: Asked) -> Iterator[Measurement]:
    """Tokens per second of the engine's vanilla arm, against a bare loop, in turns."""
    path = quantize.quantize(fetch_model.fetch("smollm2"), "Q4_K_M")
    target = Model("smollm2", "Q4_K_M", "", str(path))
    cell = Cell(target, n_predict=TOKENS, ignore_eos=True, n_threads=asked.threads)
    case = Case(cell, Prompt("p", TEXT))
    engine = LibLlama()
    model = engine.models.get(cell.target, cell)
    prompt = list(model.vocab.tokenize(TEXT))

    assert len(bare(model, prompt, asked.threads)) == len(
        engine.run(case).ids
    )  # also warms both up
    pairs = [
        (seconds(lambda: bare(model, prompt, asked.threads)), seconds(lambda: engine.run(case)))
        for _ in range(ROUNDS)
    ]
    ratio = statistics.median(one / other for one, other in pairs)
    fastest = min(other for _, other in pairs)
    yield Measurement("vanilla", "tokens/s, engine", TOKENS / fastest)
    yield Measurement("vanilla", "tokens/s of the engine by those of a bare loop", ratio, 0.97)
    engine.close()


def demo(asked: Asked) -> Iterator[Measurement]:
    """Where the time of the demo's workers goes, and how often they load models."""
    base = fetch_model.fetch("smollm2")
    with tempfile.TemporaryDirectory() as scratch:
        program = [sys.executable, "-m", "specbisect"]
        prepared = [*program, "quantize", base, "BF16", "Q8_0", "Q4_K_M", "Q2_K"]
        command = [*program, "run", "demo", "--base", base, "-o", scratch, "--json"]
        command += ["--set", f"n_threads={asked.threads}"]
        env = os.environ | {"PYTHONPATH": str(ROOT / "bisect")}
        subprocess.run(prepared, env=env, stdout=subprocess.DEVNULL, check=True)
        began = time.perf_counter()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
        elapsed = time.perf_counter() - began
    found = json.loads(done.stdout)
    counters = found["counters"]
    targets = {case["quant"] for case in found["cases"]}
    yield Measurement("demo", "seconds", elapsed)
    share = counters["decode_s"] / counters["total_s"]
    yield Measurement("demo", "share of worker time inside llama_decode", share, 0.85)
    yield Measurement(
        "demo", "share of all time inside llama_decode", counters["decode_s"] / elapsed
    )
    yield Measurement("demo", "model loads", counters["model_loads"], ceiling=len(targets) + 1)


def by_hand(asked: Asked) -> Iterator[Measurement]:
    """A matrix by `specbisect run`, against a shell loop around llama-server."""
    found = bench_by_hand.by_hand(asked.threads, asked.part)
    return (Measurement("by-hand", *one) for one in found)


def screening(asked: Asked) -> Iterator[Measurement]:
    """Screening the demo matrix, against running it."""
    found = bench_passes.screening(asked.threads, asked.part)
    return (Measurement("screening", *one) for one in found)


def diagnosis(asked: Asked) -> Iterator[Measurement]:
    """Diagnosis, audit and narrowing in vanilla passes."""
    found = bench_passes.diagnosis(asked.threads, asked.part)
    return (Measurement("diagnosis", *one) for one in found)


def growth(_asked: Asked) -> Iterator[Measurement]:
    """What a run costs around its engine, by its size."""
    return (Measurement("growth", *found) for found in bench_growth.growth())


def dask(_asked: Asked) -> Iterator[Measurement]:
    """A run on local Dask workers, against one in child processes."""
    return (Measurement("dask", *found) for found in bench_growth.dask())


SECTIONS = {
    "vanilla": vanilla,
    "demo": demo,
    "by-hand": by_hand,
    "screening": screening,
    "diagnosis": diagnosis,
    "growth": growth,
    "dask": dask,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument(
        "--threads", type=int, default=0, help="of a case; 0 is every core, in by-hand one [0]"
    )
    parser.add_argument("--part", type=float, default=1.0, help="of a long section: 0.2 is a look")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}")
    found: list[Measurement] = []
    for name in arguments.sections or SECTIONS:
        for measurement in SECTIONS[name](Asked(arguments.threads, arguments.part)):
            print(measurement, flush=True)
            found.append(measurement)
    document = {
        "schema": "specbisect.bench/1",
        "environment": library.environment(),
        "measurements": [asdict(one) | {"good": one.good} for one in found],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1))
    return 0 if all(one.good for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
