"""What is spent on explaining cases, by what running them costs: screening, diagnosis, audit, narrowing."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fetch_model
from bench_growth import Found
from specbisect.cli.screen import screened
from specbisect.diagnose import run as diagnosing
from specbisect.diagnose.finding import Finding
from specbisect.matrix import Overrides, Plan, find, load
from specbisect.narrow.run import Request as Narrow
from specbisect.narrow.run import narrow_case, nothing_to_narrow
from specbisect.runner import run
from specbisect.store import Store
from specbisect.trace import Trace
from specbisect.workers import Workers

PROMPTS = 5
TRIALS = 150


@contextmanager
def demo(threads: int, part: float) -> Iterator[tuple[Plan, Store, Workers]]:
    """The demo matrix on SmolLM2, or a part of its prompts, with its files made; a run for it, and one worker."""
    plan = load(
        find("demo"),
        Overrides(
            base=fetch_model.fetch("smollm2"),
            max_prompts=max(1, round(part * PROMPTS)),
            axes={"n_threads": str(threads)},
        ),
    )
    plan.prepare()
    with (
        tempfile.TemporaryDirectory() as scratch,
        Store.create(Path(scratch) / "run", plan.digest, plan.resolved()) as store,
        Workers(1) as workers,
    ):
        yield plan, store, workers


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def screening(threads: int, part: float) -> Iterator[Found]:
    """What it costs to tell which cases of the demo matrix can fork, by running them all."""
    with demo(threads, part) as (plan, store, workers):
        began = time.perf_counter()
        screen = screened(plan, workers)
        looked = time.perf_counter() - began
        ran = seconds(lambda: run(plan.cases(), store, workers))
        calls = sum(profile.counters.decode_calls for profile in screen.profiles.values())
        wanted = sum(map(screen, plan.cases()))
        all_calls = store.totals().counters.decode_calls
    yield "cases of the demo matrix", plan.count_cases(), None, None
    yield "cases left to run", wanted, None, None
    yield "decode calls by those of running every case", calls / all_calls, None, None
    yield "wall time by that of running every case", looked / ran, None, 0.35


def diagnosis(threads: int, part: float) -> Iterator[Found]:
    """The cost of a finding in vanilla passes of its case, by decode calls; narrowing is that of one fork."""
    with demo(threads, part) as (plan, store, workers):
        run(plan.cases(), store, workers)
        took = seconds(lambda: diagnosing.diagnose(store, workers, diagnosing.Request()))
        found = findings(store)
        yield from passes("diagnosis", found, 5.0)
        if found:
            inclusive = took / sum(vanilla_arm(f).counters.decode_s for f in found)
            yield (
                "its wall time, with all that cases share, by that of vanilla",
                inclusive,
                None,
                None,
            )
        diagnosing.diagnose(store, workers, diagnosing.Request(audit=True))
        known = {finding.case.key for finding in found}
        yield from passes("audit", [f for f in findings(store) if f.case.key not in known], None)
        forks = [finding for finding in found if not nothing_to_narrow(finding)]
        if forks:
            key = forks[0].case.key
            narrowed = narrow_case(store, workers, key, Narrow(trials=TRIALS)).narrowed
            spent = narrowed.counters.decode_calls / vanilla_arm(forks[0]).counters.decode_calls
            yield f"vanilla passes of narrowing, {narrowed.trials} trials", spent, None, None


def findings(store: Store) -> list[Finding]:
    """The latest finding of every case that has one."""
    texts = (store.findings(row.id) for row in store.rows())
    return [Finding.model_validate_json(text[-1]) for text in texts if text]


def vanilla_arm(finding: Finding) -> Trace:
    """The vanilla arm of a finding's case, which ran or there would be no finding."""
    assert isinstance(finding.vanilla, Trace)
    return finding.vanilla


def passes(what: str, found: list[Finding], most: float | None) -> Iterator[Found]:
    """What findings cost in vanilla passes."""
    spent = [f.counters.decode_calls / vanilla_arm(f).counters.decode_calls for f in found]
    yield f"cases of {what}", len(spent), None, None
    if spent:
        yield f"vanilla passes of {what}, median", statistics.median(spent), None, None
        yield f"vanilla passes of {what}, most", max(spent), None, most
