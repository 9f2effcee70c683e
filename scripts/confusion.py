"""Does the diagnosis tell faults apart on this machine? Planted faults × labels, and the natural forks found here.

Every kind of fault is planted in cases over several targets, draft lengths and prompts, and each case is diagnosed as
`specbisect diagnose --audit` would. A planted fault counts when it changed a row, a token or a draft; the others are
proved to have had no effect (every row equals that of the undisturbed arm) and are left out, counted. Beside them,
natural forks are looked for and diagnosed: each must be ``batch-width``.

    scripts/confusion.py --tiny                  # tiny models only: a few minutes
    scripts/confusion.py --base SmolLM2.gguf     # with real targets at Q8_0, Q4_K_M and BF16
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from pathlib import Path

from tabulate import tabulate

import make_tiny_model
from specbisect.cell import Case, Cell, Drafter, DraftModel, Model, NgramSimple, Prompt
from specbisect.diagnose.conclusion import Options
from specbisect.diagnose.envelope import Envelope, measure
from specbisect.diagnose.examine import examine
from specbisect.diagnose.finding import Label
from specbisect.engines import engine
from specbisect.engines.libllama import LibLlama
from specbisect.fault import FAULT_KINDS, Fault, FaultKind
from specbisect.llama import files, quantize
from specbisect.matrix import find, prompts
from specbisect.trace import Failure, Trace
from specbisect.workers import Workers

N_MAX = (2, 4, 7)
N_PROMPTS = 5
ENDS_AT = 12
LONGEST = 1200
TINY = ("llama", "moe", "swa", "recurrent", "hybrid")
TINY_NAMES = {f"tiny {kind}" for kind in TINY}
NEEDS_CHECKPOINT: tuple[FaultKind, ...] = ("wrong-checkpoint",)
NEEDS_CUT: tuple[FaultKind, ...] = (
    "stale-kv",
    "swapped-positions",
    "rollback-too-few",
    "rollback-too-many",
    "draft-kv-stale",
)

EXPECTED: dict[FaultKind, Label] = {
    "stale-kv": "state",
    "swapped-positions": "state",
    "rollback-too-few": "state",
    "rollback-too-many": "state",
    "rollback-skipped": "state",
    "wrong-checkpoint": "state",
    "foreign-token": "state",
    "row-off-by-one": "verification",
    "accept-too-many": "verification",
    "typical-acceptance": "verification",
    "bonus-wrong-row": "verification",
    "past-eog": "verification",
    "constant-loop": "verification",
    "draft-shift": "draft-alignment",
    "draft-kv-stale": "draft-alignment",
    "never-drafts": "not-engaged",
    "noise": "nondeterministic",
    "kernel-small": "kernel-defect",
    "kernel-large": "kernel-defect",
    "nan-row": "kernel-defect",
    "kernel-baseline": "baseline",
}


@dataclass(frozen=True)
class Target:
    """A model under test, its drafter and its float32 copy; `cuts` says whether its memory can be cut."""

    name: str
    model: Model
    draft: Model
    reference: str
    cuts: bool
    ends: bool = False  # only for faults that need a text to end


@dataclass(frozen=True)
class Trial:
    """One case to diagnose, planted or natural."""

    target: Target
    case: Case


@dataclass(frozen=True)
class Result:
    """What came of a trial. `effect` is False when the fault changed nothing; `planted` is the cycle it struck."""

    target: str
    kind: str
    n_max: int
    prompt: str
    effect: bool
    fork: int | None
    label: str
    also: tuple[str, ...]
    summary: str
    planted: int | None
    first_bad: int | None
    passes: float

    @property
    def right(self) -> bool:
        """Whether the label, and for state faults the cycle, are exactly what was planted."""
        if self.kind == "natural":
            return self.label == "batch-width"
        wanted = EXPECTED[self.kind]  # type: ignore[index]
        if wanted == "state" and self.first_bad != self.planted:
            return False
        # A drafter's fault does not take away a natural fork in the same case: both causes are named.
        return wanted == self.label or (self.label == "batch-width" and wanted in self.also)


def model(path: Path) -> Model:
    """A file as a model named by its content."""
    facts = files.inspect(path)
    return Model(facts.name, facts.file_type, f"sha256:{facts.sha256}", str(path))


def real_targets(base: Path) -> Iterator[Target]:
    """SmolLM2, or what the user gives, at three types, with a Q2_K of it as drafter."""
    bf16 = quantize.quantize(base, "BF16")
    draft = model(quantize.quantize(bf16, "Q2_K"))
    for quant in ("Q8_0", "Q4_K_M", "BF16"):
        path = quantize.quantize(bf16, quant)
        yield Target(quant, model(path), draft, _float32(path), cuts=True)


def tiny_targets(directory: Path) -> Iterator[Target]:
    """Tiny models of five architectures, one of which ends its text early."""
    for kind in TINY:
        base, draft = directory / f"{kind}.gguf", directory / f"{kind}-draft.gguf"
        make_tiny_model.make(kind, base)
        make_tiny_model.make(kind, draft, noise=0.1)
        path = quantize.quantize(base, "Q4_K_M")
        cuts = kind not in ("recurrent", "hybrid")
        target = Target(f"tiny {kind}", model(path), model(draft), _float32(path), cuts)
        yield target
        ending = directory / f"{kind}-ending.gguf"
        make_tiny_model.make(kind, ending, ends_as=_said(target)[ENDS_AT])
        path = quantize.quantize(ending, "Q4_K_M")
        yield replace(target, model=model(path), reference=_float32(path), ends=True)


def _said(target: Target) -> tuple[int, ...]:
    """What the target says to the first prompt, in a process of its own."""
    with Workers(1) as workers:
        trace = workers.submit(run, Case(cell_of(target, None, ENDS_AT + 1), shipped()[0])).result()
    assert isinstance(trace, Trace)
    return trace.ids


def _float32(path: Path) -> str:
    return str(quantize.quantize(path, "F32"))


def shipped() -> list[Prompt]:
    """The shipped prompts that are short enough for a model that reads bytes."""
    found = prompts.read(find("demo").parent / "prompts" / "default.jsonl")
    return [prompt for prompt in found if len(prompt.text.encode()) < LONGEST]


def cell_of(target: Target, drafter: Drafter | None, n_predict: int) -> Cell:
    """The case's configuration; one thread, so that several workers do not get in each other's way."""
    return Cell(target.model, drafter, n_threads=1, n_predict=n_predict, n_ctx=2048)


def planted(targets: Iterable[Target], chosen: list[Prompt], n_predict: int) -> Iterator[Trial]:
    """Every kind on every target at every draft length; prompts and cycles take turns."""
    turn = count()
    for target in targets:
        for kind in FAULT_KINDS:
            if kind in (NEEDS_CHECKPOINT if target.cuts else NEEDS_CUT):
                continue
            if target.ends != (kind == "past-eog") and target.name in TINY_NAMES:
                continue
            for n_max in N_MAX:
                n = next(turn)
                fault = Fault(kind, cycle=1 + n % 4, width=n_max + 1, seed=n)
                cell = cell_of(target, DraftModel(target.draft, n_max), n_predict)
                yield Trial(
                    target, Case(cell, chosen[0 if target.ends else n % len(chosen)], fault)
                )


def natural(targets: Iterable[Target], chosen: list[Prompt], n_predict: int) -> Iterator[Trial]:
    """Undisturbed cases in which forks may be."""
    for target in (t for t in targets if not t.ends):
        for prompt in chosen:
            for n_max in (1, 2, 3, 4, 5, 7, 8, 12, 15):
                yield Trial(
                    target,
                    Case(cell_of(target, DraftModel(target.draft, n_max), n_predict), prompt),
                )
            yield Trial(target, Case(cell_of(target, NgramSimple(2, 7), n_predict), prompt))


@lru_cache(maxsize=256)
def run(case: Case) -> Trace:
    """An arm, once per process."""
    return engine("libllama").run(case)


@lru_cache(maxsize=256)
def envelope(case: Case, width: int) -> Envelope:
    """The envelope of a vanilla case, once per process."""
    return measure(libllama(), case, run(case), (2, width) if width > 2 else (2,))


def libllama() -> LibLlama:
    """The engine of this process."""
    found = engine("libllama")
    assert isinstance(found, LibLlama)
    return found


def attempt(trial: Trial) -> Result | None:
    """Run and diagnose one trial; None for an undisturbed case without a fork."""
    case, target = trial.case, trial.target
    fault = case.fault
    vanilla, speculative = run(case.vanilla), engine("libllama").run(case)
    if fault is None:
        effect = vanilla.ids != speculative.ids
    else:
        clean = replace(case, fault=None)
        effect = changed(run(clean), speculative) or changed(run(clean.vanilla), vanilla)
    if fault is None and not effect:
        return None
    known = (
        None if not effect or not speculative.drafted else envelope(case.vanilla, case.cell.width)
    )
    options = Options(audit=fault is not None, envelope=known, reference=target.reference)
    finding = examine(libllama(), case, vanilla, speculative, options) if effect else None
    replayed = finding.experiment("replay") if finding else None
    return Result(
        target=target.name,
        kind=fault.kind if fault else "natural",
        n_max=case.cell.width - 1,
        prompt=case.prompt.id,
        effect=effect,
        fork=finding.verdict.fork if finding else None,
        label=finding.label if finding else "",
        also=finding.also if finding else (),
        summary=finding.summary if finding else "",
        planted=speculative.resolved.get("planted"),
        first_bad=replayed.data.get("first_bad_cycle") if replayed else None,
        passes=finding.counters.decode_calls / vanilla.counters.decode_calls if finding else 0.0,
    )


def changed(clean: Trace, disturbed: Trace) -> bool:
    """Whether any row, token or draft differs."""
    a, b = (
        (t.ids, t.digests, tuple((c.batch, c.accepted) for c in t.cycles))
        for t in (clean, disturbed)
    )
    return a != b


def results(trials: Iterable[Trial], jobs: int, forks: int | None = None) -> Iterator[Result]:
    """Attempt trials in child processes, until so many natural forks are found."""
    waiting = iter(trials)
    found = 0
    with Workers(jobs, timeout=900) as workers:
        running = {workers.submit(attempt, t): t for t in islice(waiting, jobs)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                trial, result = running.pop(future), future.result()
                if isinstance(result, Failure):
                    name = trial.case.fault.kind if trial.case.fault else "natural"
                    print(
                        f"! {trial.target.name} {name}: {result.stage}: {result.reason}",
                        file=sys.stderr,
                    )
                    result = None
                if result is not None:
                    found += 1
                    mark = "·" if result.right else "✗" if result.effect else "-"
                    print(mark, end="" if found % 80 else "\n", file=sys.stderr, flush=True)
                    if mark == "✗":
                        print(f"\nwrong: {result}", file=sys.stderr, flush=True)
                    yield result
                if forks is None or found < forks:
                    running |= {workers.submit(attempt, t): t for t in islice(waiting, 1)}


def matrix_of(found: list[Result]) -> str:
    """Kinds × labels, with what had no effect and what is right."""
    effective = [r for r in found if r.effect]
    labels = sorted({r.label for r in effective})
    kinds = [k for k in (*FAULT_KINDS, "natural") if any(r.kind == k for r in found)]
    lines = []
    for kind in kinds:
        mine = [r for r in effective if r.kind == kind]
        said = Counter(r.label for r in mine)
        left_out = sum(r.kind == kind and not r.effect for r in found)
        right = f"{sum(r.right for r in mine)}/{len(mine)}"
        lines.append([kind, *(said[label] or "" for label in labels), left_out or "", right])
    return tabulate(lines, ["planted", *labels, "no effect", "right"])


def main() -> int:
    """Run it; exit 1 when any label is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="a model to quantise and try, such as SmolLM2")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models (the default without --base)"
    )
    parser.add_argument(
        "--only", metavar="KIND,…", help=f"plant these kinds only: {', '.join(FAULT_KINDS)}"
    )
    parser.add_argument("--forks", type=int, default=200, help="natural forks to look for [200]")
    parser.add_argument("--n-predict", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-o", "--output", type=Path, help="write every result as JSON here")
    options = parser.parse_args()
    if unknown := set((options.only or "").split(",")) - {"", *FAULT_KINDS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = shipped()
    with tempfile.TemporaryDirectory() as scratch:
        targets: list[Target] = []
        if options.base:
            targets += real_targets(options.base)
        if options.tiny or not options.base:
            targets += tiny_targets(Path(scratch))
        trials = planted(targets, chosen[:N_PROMPTS], options.n_predict)
        only = options.only.split(",") if options.only else FAULT_KINDS
        wanted = (t for t in trials if t.case.fault is not None and t.case.fault.kind in only)
        found = list(results(wanted, options.jobs))
        if options.forks:
            looked = natural(reversed(targets), chosen[:24], 2 * options.n_predict)
            found += results(looked, options.jobs, options.forks)
    print(f"\n{matrix_of(found)}\n")
    wrong = [r for r in found if r.effect and not r.right]
    for r in wrong:
        print(f"wrong: {r}")
    print(
        f"{sum(r.effect for r in found)} cases, {len(wrong)} wrong; most vanilla passes of one diagnosis: "
        f"{max(r.passes for r in found):.1f}"
    )
    if options.output:
        options.output.write_text(json.dumps([vars(r) for r in found], indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
