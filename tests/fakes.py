"""Calls for worker processes that do what llama.cpp does on a bad day, and an engine without models."""

import ctypes
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from specbisect import stage
from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.errors import BadInput, EngineFault
from specbisect.trace import Counters, Cycle, Trace


def double(value: int) -> int:
    return 2 * value


def pid() -> int:
    return os.getpid()


def fault() -> None:
    os.write(2, b"cannot find room for a batch\n")
    raise EngineFault("prompt", "llama_decode returned 1")


def bad_input() -> None:
    raise BadInput("the prompt is longer than n_ctx; shorten it")


def bug() -> None:
    raise TimeoutError({}[3])


def abort() -> None:
    for i in range(30):
        sys.stdout.write(f"line {i}\n")
    os.write(2, b"GGML_ASSERT(n_tokens <= n_batch) failed\n")
    stage.report("verify 12")
    os.abort()


def segfault() -> None:
    stage.report("load")
    ctypes.string_at(0)


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def exit_with(code: int) -> None:
    stage.report("draft 3")
    os._exit(code)


def hang() -> None:
    stage.report("verify 7")
    ctypes.CDLL(None).sleep(600)  # in C, where no Python handler runs


def exhaust_memory() -> None:
    stage.report("context")
    bytearray(1 << 60)


def dies_when_idle() -> int:
    """Returns at once; the process is gone a moment later."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return os.getpid()


def with_child() -> int:
    """Starts a process of its own, as the server engine does, and crashes."""
    child = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
    sys.stdout.write(f"{child}\n")
    os.kill(os.getpid(), signal.SIGKILL)
    return child


def takes_parent_along() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


MISHAPS = {
    "fault": fault,
    "bad-input": bad_input,
    "bug": bug,
    "abort": abort,
    "segfault": segfault,
    "hang": hang,
    "exhaust-memory": exhaust_memory,
}


def arm(case: Case) -> Trace:
    """An arm with made-up tokens, always the same for the same case; about one case in four forks.

    A prompt "abort speculative" aborts in that arm, and so on for all `MISHAPS`.
    """
    name = "vanilla" if case.cell.drafter is None else "speculative"
    mishap, _, where = case.prompt.text.partition(" ")
    if where == name:
        MISHAPS[mishap]()
    dice = random.Random(case.vanilla.key)
    ids = [dice.randrange(1000) for _ in range(case.cell.n_predict)]
    margins = tuple(dice.random() for _ in ids)
    dice = random.Random(case.key)
    if name == "speculative" and dice.random() < 0.25:
        ids[dice.randrange(len(ids))] += 1000
    return Trace(
        name,
        (1, 2, 3),
        tuple(ids),
        "length",
        margins=margins,
        cycles=(Cycle(2, (3, *ids[:3]), 2),) if name == "speculative" else (),
        drafted=3 if name == "speculative" else 0,
        accepted=2 if name == "speculative" else 0,
        resolved={"n_batch": case.cell.n_batch},
        provenance={"library": "none", "target": {"sha256": case.cell.target.identity}},
        counters=Counters(1, len(ids), len(ids), 0.5, 1.0),
    )


def slow_arm(case: Case) -> Trace:
    """The same, in a few milliseconds."""
    time.sleep(0.004)
    return arm(case)


def slower_arm(case: Case) -> Trace:
    """The same, in a fifth of a second."""
    time.sleep(0.2)
    return arm(case)


def plan(
    quants: int = 2, drafters: int = 3, prompts: tuple[str, ...] = ("",) * 4
) -> Iterator[Case]:
    """Cases in the order of a matrix: targets, then drafters, then prompts with these texts."""
    for q in range(quants):
        target = Model("fake", f"Q{q}", f"sha256:{q}")
        for n_max in range(1, drafters + 1):
            cell = Cell(
                target, DraftModel(Model("fake", "Q2_K", "sha256:draft"), n_max), n_predict=8
            )
            for i, text in enumerate(prompts):
                yield Case(cell, Prompt(f"{i}", text))


def content(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """All that a run directory knows of arms and cases."""
    with sqlite3.connect(path / "run.sqlite") as database:
        return {
            table: database.execute(f"SELECT * FROM {table} ORDER BY key").fetchall()
            for table in ("arms", "results", "cases")
        }
