"""What a run costs around its engine: by its size, and on a Dask cluster. The engine here does nothing for 1 ms."""

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from distributed import LocalCluster

from specbisect.cell import Case, Cell, Model, NgramSimple, Prompt
from specbisect.cluster.client import Cluster
from specbisect.runner import Submit, run
from specbisect.store import Store
from specbisect.trace import Cycle, Trace
from specbisect.workers import Workers

ROOT = Path(__file__).resolve().parent.parent
SIZES = 10, 100, 1000, 10_000
MANY = 100_000
ARM_S = 0.001
TOKENS = 64
LENGTHS = 10
"""Draft lengths for each target, which share one vanilla arm."""
CASES = 30
"""Of the comparison with Dask."""
MIB = 1 << 20

Found = tuple[str, float, float | None, float | None]
"""What was measured, its value, and the least and the most it should be."""


def arm(case: Case) -> Trace:
    """An arm of the size of a real one, in a millisecond."""
    ends = time.perf_counter() + ARM_S
    dice = random.Random(case.vanilla.key)
    ids = tuple(dice.randrange(50_000) for _ in range(TOKENS))
    cycles = tuple(Cycle(8 + i, ids[i : i + 4], 3) for i in range(0, TOKENS, 4))
    speculative = case.cell.drafter is not None
    trace = Trace(
        "speculative" if speculative else "vanilla",
        tuple(range(8)),
        ids,
        "length",
        pieces=("word ",) * TOKENS,
        digests=tuple(f"{dice.getrandbits(64):016x}" for _ in ids),
        best=ids,
        runners_up=ids,
        margins=tuple(dice.random() for _ in ids),
        cycles=cycles if speculative else (),
        drafted=3 * len(cycles) if speculative else 0,
        accepted=3 * len(cycles) if speculative else 0,
    )
    time.sleep(max(0.0, ends - time.perf_counter()))
    return trace


def slow_arm(case: Case) -> Trace:
    """An arm that takes as long as one of the demo's."""
    time.sleep(0.5)
    return arm(case)


def plan(cells: int) -> Iterator[Case]:
    """So many cells with a prompt each."""
    for i in range(cells):
        target = Model("fake", f"Q{i // LENGTHS}", f"sha256:{i // LENGTHS}")
        yield Case(Cell(target, NgramSimple(size_m=1 + i % LENGTHS)), Prompt("p", "text"))


def seconds(directory: str, cells: int, workers: Submit, call=arm) -> float:
    matrix = {"counts": {"cells": cells}, "prompts": {"ids": ["p"]}}
    with Store.create(Path(directory), "bench", matrix) as store:
        began = time.perf_counter()
        summary = run(plan(cells), store, workers, call=call)
    assert summary.done == cells
    return time.perf_counter() - began


def command(*words: str) -> float:
    """Seconds that a command takes."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "specbisect", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "bisect")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return time.perf_counter() - began


def growth() -> Iterator[Found]:
    """Overhead of a case, memory, disk and the time of `show`, from ten cells to very many."""
    busy = {}
    with tempfile.TemporaryDirectory() as scratch, Workers(1) as workers:
        workers.submit(arm, next(plan(1))).result()
        for cells in SIZES:
            directory = f"{scratch}/{cells}"
            arms = cells + -(-cells // LENGTHS)
            began = time.process_time()
            spent = seconds(directory, cells, workers) - arms * ARM_S
            busy[cells] = 1000 * (time.process_time() - began) / cells
            yield f"overhead of a case among {cells}, ms", 1000 * spent / cells, None, 5.0
            yield (
                f"CPU time of the coordinator for a case among {cells}, ms",
                busy[cells],
                None,
                None,
            )
        ratio = busy[10_000] / busy[100]
        yield "CPU time for a case among 10,000 by that among 100", ratio, None, 1.2
        memory = psutil.Process().memory_info().rss / MIB
        yield "memory of the coordinator, MiB", memory, None, 300.0
        size = sum(file.stat().st_size for file in Path(directory).iterdir())
        yield "run directory, KiB a case", size / 1024 / SIZES[-1], None, None
        yield f"show of {SIZES[-1]} cases, s", command("show", directory, "--json"), None, None
        page = f"{scratch}/page"
        yield (
            f"HTML page of {SIZES[-1]} cases, s",
            command("report", directory, "-o", page),
            None,
            None,
        )
        multiply(Path(directory), MANY // SIZES[-1])
        yield f"show of {MANY} cases, s", command("show", directory), None, 2.0


def multiply(directory: Path, times: int) -> None:
    """Let a run directory hold its cases so many times, as cases of other names."""
    with sqlite3.connect(directory / "run.sqlite") as database:
        names = [row[1] for row in database.execute("PRAGMA table_info(cases)")]
        others = ", ".join(name for name in names if name != "key")
        for i in range(1, times):
            database.execute(
                f"INSERT INTO cases (key, {others}) SELECT key || ?, {others} FROM cases"
                " WHERE length(key) = 16",
                (f"{i:x}",),
            )


def dask() -> Iterator[Found]:
    """The wall time of the same cases on local Dask workers, by that of as many child processes."""
    for jobs in (1, 2):
        with tempfile.TemporaryDirectory() as scratch:
            with Workers(jobs) as workers:
                warm = [workers.submit(arm, next(plan(1))) for _ in range(jobs)]
                [future.result() for future in warm]
                here = seconds(f"{scratch}/here", CASES, workers, slow_arm)
            with (
                LocalCluster(
                    n_workers=jobs, threads_per_worker=1, processes=True, dashboard_address=":0"
                ) as local,
                Cluster(local.scheduler_address) as cluster,
            ):
                warm = [cluster.submit(arm, next(plan(1))) for _ in range(jobs)]
                [future.result() for future in warm]
                there = seconds(f"{scratch}/there", CASES, cluster, slow_arm)
        yield f"{jobs} Dask workers by --jobs {jobs}", there / here, None, 1.15
