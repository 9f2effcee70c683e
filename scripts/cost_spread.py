"""How repeatable is `specbisect cost`? The demo's cost table several times over: scripts/cost_spread.py [--repeats N]

Each repetition is a new process with new pairs of arms. Times drift with the machine; the speed-up is a ratio of arms
that ran in turns, and its spread here is what the intervals of one table have to be trusted by.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

import fetch_model
from specbisect.cell import Cell
from specbisect.gate.cost import Worth, worth
from specbisect.gate.study import fill, studies
from specbisect.matrix import Overrides, Plan, find, load
from specbisect.store import Store
from specbisect.workers import Workers


def repetition(plan: Plan, rounds: int, directory: Path) -> Iterator[tuple[Cell, Worth]]:
    """Every cell of `plan` with what it was measured to be worth this time."""
    with (
        Store.create(directory, plan.digest, plan.resolved()) as store,
        Workers(1) as workers,
    ):
        for study in studies(plan):
            for _ in tqdm(fill(study, plan.prompts, rounds, store, workers), leave=False):
                pass
            for cell, pairs in study.pairs.items():
                if (found := worth(pairs, cell.width - 1)) is not None:
                    yield cell, found


def name(cell: Cell) -> str:
    assert cell.drafter is not None
    return f"{cell.target.quant} {cell.drafter.method} {cell.width - 1} n_ubatch={cell.n_ubatch}"


def line(cell: Cell, found: list[Worth]) -> list[str]:
    times, ratios = [w.baseline for w in found], [w.speed_up for w in found]
    held = sum(
        w.interval is not None and w.interval.low <= statistics.median(ratios) <= w.interval.high
        for w in found
    )
    return [
        name(cell),
        f"{1000 * statistics.median(times):.1f}",
        f"{100 * (max(times) / min(times) - 1):.0f} %",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f}–{max(ratios):.3f}",
        f"{100 * (max(ratios) / min(ratios) - 1):.0f} %",
        f"{held}/{len(found)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--base", type=Path, help="the model [SmolLM2, out of the cache]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--n-predict", type=int, default=48)
    asked = parser.parse_args()
    overrides = Overrides(
        base=asked.base or fetch_model.fetch("smollm2"),
        max_prompts=asked.prompts,
        axes={"n_predict": str(asked.n_predict)},
    )
    plan = load(find("demo"), overrides)
    plan.prepare()
    found: dict[Cell, list[Worth]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(asked.repeats):
            for cell, one in repetition(plan, asked.rounds, Path(scratch) / str(number)):
                found.setdefault(cell, []).append(one)
    heads = ["cell", "T ms", "spread", "speed-up", "range", "spread", "in interval"]
    print(tabulate([line(*item) for item in found.items()], heads, disable_numparse=True))


if __name__ == "__main__":
    main()
