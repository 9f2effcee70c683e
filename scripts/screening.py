"""Does screening miss a fork on this machine? Width profiles of SmolLM2 at six types, against cases that are run.

Every fork must lie at widths at which the profile says that bits depart, targets proved bit-identical must not fork,
and where screening proves that a case cannot fork, both arms must have the same rows bit for bit.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

import fetch_model
from specbisect.cell import Case, Cell
from specbisect.llama import library
from specbisect.matrix import Overrides, Plan, build, find
from specbisect.ops.profile import Profile, can_fork
from specbisect.ops.widths import measure
from specbisect.runner import Summary, run
from specbisect.store import Store
from specbisect.trace import Failure, Trace
from specbisect.workers import Workers

MATRIX = {
    "schema": "specbisect.matrix/1",
    "prompts": "prompts/default.jsonl",
    "n_predict": 32,
    "target": {"quants": ["BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0"]},
    "drafter": [
        {"method": "draft-model", "quant": "Q2_K", "n_max": [1, 2, 3, 5, 7, 15]},
        {"method": "ngram-simple", "size_n": 3, "size_m": [4, 8]},
    ],
}
PROMPTS = 7
"""One of each group, and one more: 336 cases."""


@dataclass(frozen=True)
class Result:
    """One case that ran: the widths it used up to its fork, if it has one, and what screening says of them."""

    case: str
    quant: str
    prompt: str
    drafter: str
    n_max: int
    fork: int | None
    widths: tuple[int, ...]
    departs: int | None
    can_fork: bool
    same_bits: bool

    @property
    def missed(self) -> bool:
        """Whether screening would have left out a case that it must not."""
        forks = self.fork is not None
        too_narrow = self.departs is None or max(self.widths, default=1) < self.departs
        return (forks and too_narrow) or (not self.can_fork and not (self.same_bits and not forks))


def planned(base: Path, prompts: int) -> Plan:
    """The cases, with their files made; one thread each, so that several can run beside each other."""
    overrides = Overrides(base=base, max_prompts=prompts, axes={"n_threads": "1"})
    plan = build(MATRIX, overrides, source="screening", folder=find("demo").parent)
    plan.prepare()
    return plan


def profiles(plan: Plan, workers: Workers) -> dict[str, Profile]:
    """The width profile of every target, by the key of its vanilla cell."""
    groups = {group[0].vanilla: max(cell.width for cell in group) for group in plan.groups()}
    futures = {
        cell: workers.submit(measure, [Case(cell, p) for p in plan.prompts], range(2, width + 1))
        for cell, width in groups.items()
    }
    return {cell.key: profiled(cell, future.result()) for cell, future in futures.items()}


def profiled(cell: Cell, found: Profile | Failure) -> Profile:
    """The profile, or a clear end."""
    if isinstance(found, Failure):
        sys.exit(f"{cell.target.quant} has no profile: {found.stage}: {found.reason}")
    print(f"{cell.target.quant}: {found}", file=sys.stderr)
    return found


def results(plan: Plan, store: Store, known: dict[str, Profile]) -> Iterator[Result]:
    """Every case that was compared, beside what its target's profile says."""
    for row in store.rows():
        case = store.case(row.id)
        vanilla, arm = store.arm(case.vanilla.key), store.arm(case.key)
        if not isinstance(vanilla, Trace) or not isinstance(arm, Trace):
            print(f"{row.id}: {row.reason}", file=sys.stderr)
            continue
        profile = known[case.cell.vanilla.key]
        start = len(arm.prompt_ids)
        end = start + (len(arm.ids) if row.fork is None else row.fork)
        used = {cycle.width for cycle in arm.cycles if cycle.base < end}
        yield Result(
            case=row.id,
            quant=row.quant,
            prompt=row.prompt_id,
            drafter=row.drafter,
            n_max=row.n_max,
            fork=row.fork,
            widths=tuple(sorted(used)),
            departs=profile.departs(),
            can_fork=can_fork(profile, used, range(start, start + case.cell.n_predict)),
            same_bits=arm.digests == vanilla.digests,
        )


def table(found: list[Result]) -> str:
    """One line a target."""
    lines = []
    for quant in dict.fromkeys(result.quant for result in found):
        mine = [result for result in found if result.quant == quant]
        forks = [result for result in mine if result.fork is not None]
        lines.append(
            (
                quant,
                mine[0].departs,
                len(mine),
                sum(not result.can_fork for result in mine),
                len(forks),
                min((max(result.widths, default=1) for result in forks), default=None),
                sum(result.missed for result in mine),
            )
        )
    heads = ("target", "departs at", "cases", "proved", "forks", "narrowest fork", "missed")
    return tabulate(lines, heads, missingval="none")


def main() -> int:
    """Run it; exit 1 when screening misses anything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=Path, help="the model [SmolLM2, out of the cache]")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"so many [{PROMPTS}]")
    parser.add_argument("--jobs", type=int, default=library.cores())
    parser.add_argument("-o", "--output", type=Path, help="write every result as JSON here")
    asked = parser.parse_args()
    plan = planned(asked.base or fetch_model.fetch("smollm2"), asked.prompts)
    with (
        tempfile.TemporaryDirectory() as scratch,
        Store.create(Path(scratch) / "run", plan.digest, plan.resolved()) as store,
        Workers(asked.jobs) as workers,
        tqdm(total=plan.count_cases(), unit="case", disable=None) as bar,
    ):

        def show(summary: Summary) -> None:
            bar.update(summary.done - bar.n)

        known = profiles(plan, workers)
        run(plan.cases(), store, workers, progress=show)
        found = list(results(plan, store, known))
    missed = [result for result in found if result.missed]
    print(f"{table(found)}\n\n{len(found)} cases, {len(missed)} missed")
    for result in missed:
        print(f"missed: {result}")
    if asked.output:
        document = [asdict(result) | {"missed": result.missed} for result in found]
        asked.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if missed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
