"""A matrix by `specbisect run`, against the same cases run by hand: a shell loop around llama-server and curl."""

import json
import os
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import fetch_model
import llama_build
from bench_growth import Found
from specbisect.cell import Cell, DraftModel, NgramSimple
from specbisect.llama import library
from specbisect.matrix import Overrides, Plan, load
from specbisect.store import Store
from specbisect.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
QUANTS = "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0"
PROMPTS = (
    "The history of the bicycle begins",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "To boil an egg, first",
    "red, green, blue, red, green, blue, red,",
    "def add(a, b):\n    return",
)
"""As people type them at a shell."""
TOKENS = 24
MATRIX = f"""
schema = "specbisect.matrix/1"
prompts = "prompts.jsonl"
n_predict = {TOKENS}

[axes]
n_ctx = 512
ignore_eos = true

[target]
quants = {json.dumps(QUANTS)}

[[drafter]]
method = "draft-model"
quant = "Q2_K"
n_max = [1, 3, 5, 7]

[[drafter]]
method = "ngram-simple"
size_n = [2, 3]
size_m = [2, 3, 5, 7]
"""
"""Sixty cells."""

SCRIPT = """\
#!/usr/bin/env bash
# Vanilla and speculative decoding by hand: by-hand.sh LLAMA-SERVER PORT THREADS, in a directory with prompts/.
set -euo pipefail
server=$1 url=http://127.0.0.1:$2 port=$2 threads=$3
mkdir -p answers

arm() { # NAME FLAG…: a server of its own, every prompt posted to it, its answers kept
    local name=$1
    shift
    "$server" --host 127.0.0.1 --port "$port" --threads "$threads" --ctx-size 512 --parallel 1 "$@" >server.log 2>&1 &
    until curl --silent --fail "$url/health" >/dev/null; do
        kill -0 $! # it has died
        sleep 0.2
    done
    for prompt in prompts/*.json; do
        curl --silent --fail "$url/completion" --data "@$prompt" --output "answers/$name.$(basename "$prompt")"
    done
    kill $!
    wait $! || true
}

targets=(
    @targets
)
drafters=(
    @drafters
)
cell=0
for target in "${targets[@]}"; do
    for drafter in "${drafters[@]}"; do
        arm $cell.vanilla --model "$target"
        # shellcheck disable=SC2086 # a drafter is several words
        arm $cell.speculative --model "$target" $drafter
        cell=$((cell + 1))
    done
done
"""


def write(plan: Plan, directory: Path) -> None:
    """Put the script, and what it posts, into `directory`."""
    (directory / "prompts").mkdir(parents=True)
    for prompt in plan.prompts:
        body = {"prompt": prompt.text, "n_predict": TOKENS, "temperature": 0, "top_k": 1}
        body |= {"ignore_eos": True, "return_tokens": True}
        (directory / f"prompts/{prompt.id}.json").write_text(json.dumps(body))
    cells = list(plan.cells())
    targets = dict.fromkeys(shlex.quote(cell.target.path) for cell in cells)
    drafters = dict.fromkeys(shlex.quote(flags(cell)) for cell in cells)
    text = SCRIPT.replace("@targets", "\n    ".join(targets))
    text = text.replace("@drafters", "\n    ".join(drafters))
    (directory / "by-hand.sh").write_text(text)


def flags(cell: Cell) -> str:
    """A drafter as llama-server's flags."""
    match cell.drafter:
        case DraftModel(model, n_max):
            return f"--spec-type draft-simple --model-draft {model.path} --spec-draft-n-max {n_max}"
        case NgramSimple(size_n, size_m):
            sizes = f"--spec-ngram-simple-size-n {size_n} --spec-ngram-simple-size-m {size_m}"
            return f"--spec-type ngram-simple {sizes}"
    raise AssertionError(cell.drafter)


def cost(command: Iterable[object], directory: Path, **environment: str) -> tuple[float, float]:
    """Seconds of wall time and of CPU time that a command takes; exit code 1 means that cases differ."""
    began, used = time.perf_counter(), children()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return time.perf_counter() - began, children() - used


def children() -> float:
    """Seconds of CPU time of every process that this one has waited for, and those waited for by them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def agreeing(store: Store, plan: Plan, answers: Path) -> Iterator[bool]:
    """For both arms of every case, whether the tokens are the same both ways."""
    numbers = {cell: number for number, cell in enumerate(plan.cells())}
    for case in plan.cases():
        for name, arm in ("vanilla", case.vanilla), ("speculative", case):
            file = answers / f"{numbers[case.cell]}.{name}.{case.prompt.id}.json"
            trace = store.arm(arm.key)
            assert isinstance(trace, Trace)
            yield list(trace.ids) == json.loads(file.read_text())["tokens"]


def by_hand(threads: int, part: float, jobs: int | None = None) -> Iterator[Found]:
    """Wall time by `specbisect run` over that of the loop; `threads` for every case in both, 0 for one."""
    threads = threads or 1
    jobs = jobs or max(1, library.cores() // threads)
    quants = QUANTS[: max(1, round(part * len(QUANTS)))]
    base, server = fetch_model.fetch("smollm2"), llama_build.server()
    with tempfile.TemporaryDirectory() as scratch:
        there, matrix = Path(scratch) / "by-hand", Path(scratch) / "by-hand.toml"
        matrix.write_text(MATRIX)
        axes = {"n_threads": str(threads)}
        lines = [json.dumps({"id": f"p{n}", "text": text}) for n, text in enumerate(PROMPTS)]
        (Path(scratch) / "prompts.jsonl").write_text("\n".join(lines))
        plan = load(matrix, Overrides(base=base, quants=quants, axes=axes))
        plan.prepare()
        write(plan, there)
        run = [sys.executable, "-m", "specbisect", "run", matrix, "--base", base, "-o", "run"]
        run += ["--quant", ",".join(quants), "--set", f"n_threads={threads}", "--jobs", jobs]
        run += ["--json"]
        here, here_cpu = cost(run, Path(scratch), PYTHONPATH=str(ROOT / "bisect"))
        hand, hand_cpu = cost(["bash", "by-hand.sh", server, free_port(), threads], there)
        with Store.open(Path(scratch) / "run", readonly=True) as store:
            same = list(agreeing(store, plan, there / "answers"))
            totals = store.totals()
    arms = totals.vanilla_runs + plan.count_cases()
    inside = totals.counters.decode_s / totals.counters.total_s
    yield "cells", plan.count(), None, None
    yield "seconds by hand", hand, None, None
    yield "arms with the same tokens both ways, share", sum(same) / len(same), None, None
    yield "arms run by those by hand", arms / len(same), None, None
    yield "share of the arms' time inside llama_decode", inside, None, None
    yield "CPU time of `run` by that by hand", here_cpu / hand_cpu, None, None
    yield f"wall time of `run --jobs {jobs}` by that by hand", here / hand, None, 0.25
