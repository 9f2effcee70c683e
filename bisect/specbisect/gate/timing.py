"""Arms with a watch: where the time of a token goes, in engine libllama, models loaded before the watch starts.

The arms are the engine's own; only the recorder is another one, which also notes when each token came. What is timed
includes reading each row (choice, margin, digest), in both arms alike.
"""

import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specbisect import stage
from specbisect.cell import Case, Cell, DraftModel
from specbisect.engines import engine
from specbisect.engines.account import prompt_ids
from specbisect.engines.decoding import Recorder, read_prompt, vanilla
from specbisect.engines.libllama import LibLlama, speculative_arm
from specbisect.engines.memory import Memory
from specbisect.gate.acceptance import Acceptance
from specbisect.gate.cost import Arm, Paired, Spent
from specbisect.llama.context import Context, Settings, rows_of
from specbisect.llama.logits import Choice, digest
from specbisect.llama.model import LoadedModel
from specbisect.runner import Submit
from specbisect.trace import Cycle, Failure, Trace

WARM_UP = 8
"""Tokens of an uncounted run of each arm, in which weights come into memory."""
STEP = 2.0
_KIB = 1024


@dataclass(slots=True)
class Stopwatch(Recorder):
    """A recorder that notes when each token came."""

    stamps: list[float] = field(default_factory=list)

    def emit(self, token: int, choice: Choice) -> None:
        """One more token."""
        Recorder.emit(self, token, choice)  # no super(): a class with slots is made twice
        self.stamps.append(time.perf_counter())


@dataclass(frozen=True, slots=True)
class Timed:
    """One run of one arm, and the process it ran in."""

    arm: Arm
    process: int


def timed_arm(case: Case) -> Timed:
    """Run one arm of `case` in this process, with the watch; what worker processes are asked to call."""
    own = _engine()
    target, *_ = _load(own, case.cell)
    prompt = prompt_ids(case, target.vocab)
    cycles: Sequence[Cycle] = ()
    stage.report("context")
    began = time.perf_counter()
    with Context(target, Settings.of(case.cell)) as context:
        watch = Stopwatch(context, case.cell.n_predict, case.cell.ignore_eos)
        if case.cell.drafter is None:
            vanilla(context, prompt, watch)
        else:
            drafter, _ = own.drafter(case.cell)
            try:
                arm = speculative_arm(case, context, drafter, watch)
                arm.run(prompt)
            finally:
                drafter.close()
            cycles = arm.cycles
        ended = time.perf_counter()
    return Timed(_account(prompt, watch, cycles, began, ended), os.getpid())


def _account(
    prompt: Sequence[int], watch: Stopwatch, cycles: Sequence[Cycle], began: float, ended: float
) -> Arm:
    trace = Trace(
        "speculative",
        tuple(prompt),
        tuple(watch.ids),
        watch.finish or "length",
        cycles=tuple(cycles),
    )
    return Arm(
        runs=1,
        tokens=len(watch.ids) - 1,
        answered=len(watch.ids),
        decode_s=watch.stamps[-1] - watch.stamps[0],
        draft_s=sum(c.draft_s for c in cycles),
        verify_s=sum(c.verify_s for c in cycles),
        first_s=watch.stamps[0] - began,
        total_s=ended - began,
        counts=Acceptance.of(trace),
    )


def _engine() -> LibLlama:
    found = engine("libllama")
    assert isinstance(found, LibLlama)
    return found


def _load(own: LibLlama, cell: Cell) -> list[LoadedModel]:
    """The target of `cell`, and its draft model if it has one."""
    models = [cell.target]
    if isinstance(cell.drafter, DraftModel):
        models.append(cell.drafter.model)
    return [own.models.get(model, cell) for model in models]


@dataclass(slots=True)
class Measured:
    """What came of one prompt: the pairs by cell key, and the time every arm took, that of failures included.

    The vanilla arm stands in `spent` and `failures` under the key of its own cell.
    """

    pairs: dict[str, Paired] = field(default_factory=dict)
    spent: dict[str, Spent] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def warm_up(workers: Submit, cases: Sequence[Case]) -> None:
    """Run the beginning of every case, and of the vanilla arm, without counting it."""
    for case in (cases[0].vanilla, *cases):
        n_predict = min(WARM_UP, case.cell.n_predict)
        workers.submit(
            timed_arm, replace(case, cell=replace(case.cell, n_predict=n_predict))
        ).result()


def measure(workers: Submit, cases: Sequence[Case], rounds: int) -> Measured:
    """Time the vanilla arm and all `cases`, which share it, `rounds` times in turns, every other round backwards.

    `workers` has one slot, so that nothing else runs beside an arm. Arms make a pair only when they ran in the same
    process and round: a machine that becomes slower, or a process that was lost, touches both or none.
    """
    vanilla_case = cases[0].vanilla
    turns = [vanilla_case, *cases]
    found = Measured()
    for number in range(rounds):
        timed = {
            case: result
            for case in (turns if number % 2 == 0 else reversed(turns))
            if (result := _time(workers, case, found)) is not None
        }
        baseline = timed.pop(vanilla_case, None)
        for case, result in timed.items():
            if baseline is not None and baseline.process == result.process:
                key = case.cell.key
                before = found.pairs.get(key, _unpaired(case))
                found.pairs[key] = replace(
                    before,
                    baseline=before.baseline + baseline.arm,
                    speculative=before.speculative + result.arm,
                )
    return found


def _unpaired(case: Case) -> Paired:
    return Paired(case.prompt.id, case.prompt.group, Arm(), Arm())


def _time(workers: Submit, case: Case, found: Measured) -> Timed | None:
    began = time.perf_counter()
    result: Timed | Failure = workers.submit(timed_arm, case).result()
    took, key = time.perf_counter() - began, case.cell.key
    before = found.spent.get(key, Spent())
    if isinstance(result, Failure):
        found.failures[key] = f"{result.stage}: {result.reason}"
        found.spent[key] = before + Spent(failed_s=took)
        return None
    found.spent[key] = before + Spent(result.arm.total_s, tokens=result.arm.answered)
    return result


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an arm needs before and beside its work: seconds to load its models, most bytes resident at any time."""

    load_s: float
    peak_bytes: int


def footprint(case: Case) -> Footprint:
    """Load and run one arm of `case`. Call it in a process of its own, whose peak is then the arm's."""
    models = _load(_engine(), case.cell)
    timed_arm(case)
    return Footprint(sum(model.load_s for model in models), peak_memory())


def peak_memory() -> int:
    """The most bytes this process ever had resident.

    On Linux, what `resource` says may be the peak of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB


@dataclass(frozen=True, slots=True)
class WidthCost:
    """What one verify batch of `width` rows takes (median), and the bits of its first row."""

    width: int
    seconds: float
    digest: str


def width_costs(case: Case, widest: int, rounds: int) -> list[WidthCost]:
    """Time verify batches of 1…`widest` rows after the prompt of `case`, in turns, every other round backwards."""
    (target, *_) = _load(_engine(), replace(case.cell, drafter=None))
    prompt = prompt_ids(case, target.vocab)
    rows = (list(prompt) * (widest // len(prompt) + 1))[:widest]
    times: dict[int, list[float]] = {width: [] for width in range(1, widest + 1)}
    digests: dict[int, str] = {}
    with Context(target, Settings.of(case.cell)) as context:
        read_prompt(context, prompt)
        memory = Memory(context, widest)
        for number in range(rounds + 1):
            for width in times if number % 2 else reversed(times):
                stage.report(f"width {width}")
                memory.mark()
                began = time.perf_counter()
                logits = context.evaluate(rows_of(rows[:width], len(prompt)))
                times[width].append(time.perf_counter() - began)
                digests[width] = digest(logits[0])
                memory.back_to_mark(len(prompt))
    # The first round finds nothing in any cache and is left out.
    return [WidthCost(w, statistics.median(t[1:]), digests[w]) for w, t in times.items()]


@dataclass(frozen=True, slots=True)
class Step:
    """From one width to the next: seconds the last row added, and whether that is a step or other bits show.

    A step is at least `STEP` times what a row usually adds here, and a tenth of a batch of one row.
    """

    cost: WidthCost
    added: float
    step: bool
    changed: bool


def steps(costs: Sequence[WidthCost]) -> Iterator[Step]:
    """Every width from the second on, against the one before."""
    added = [after.seconds - before.seconds for before, after in itertools.pairwise(costs)]
    usual = statistics.median(added) if added else 0.0
    least = max(STEP * usual, costs[0].seconds / 10)
    for (before, cost), more in zip(itertools.pairwise(costs), added, strict=True):
        yield Step(cost, more, more >= least, cost.digest != before.digest)
