"""A cost study: everything about the worth of the drafters of a finished run, gathered and kept as it comes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from specbisect.cell import Case, Cell, Prompt, digest
from specbisect.errors import BadInput
from specbisect.gate.cost import Arm, Paired, Spent
from specbisect.gate.decision import EVERYTHING, Candidate, Decision, candidates, decide, deepest
from specbisect.gate.load import Load
from specbisect.gate.timing import Footprint, Measured, WidthCost, measure, warm_up, width_costs
from specbisect.gate.timing import footprint as footprint_of
from specbisect.matrix import Plan
from specbisect.runner import Submit
from specbisect.store import Store
from specbisect.trace import Failure

WIDEST, WIDTH_ROUNDS = 16, 5
"""Most rows of a verify batch that are timed one width after the other, and how often each is."""

_MEASURED = TypeAdapter(Measured)


@dataclass(slots=True)
class Study:
    """The cells that share a vanilla arm, and what was measured of them. Lists and tables are by cell."""

    vanilla: Cell
    cells: Sequence[Cell]
    pairs: dict[Cell, list[Paired]] = field(default_factory=dict)
    spent: dict[Cell, Spent] = field(default_factory=dict)
    failures: dict[Cell, str] = field(default_factory=dict)
    footprints: dict[Cell, Footprint] = field(default_factory=dict)
    widths: list[WidthCost] = field(default_factory=list)

    def groups(self) -> list[str]:
        """All prompts, and each prompt group where there are several."""
        found = dict.fromkeys(p.group for own in self.pairs.values() for p in own)
        return [EVERYTHING, *found] if len(found) > 1 else [EVERYTHING]

    def judged(
        self, group: str, barred: Mapping[Cell, str]
    ) -> Iterator[tuple[Candidate, Decision]]:
        """What every drafter is worth on a group, and what to do with it there."""
        for members in candidates(self.pairs, barred, group):
            yield from zip(members, decide(members), strict=True)

    def deepest(
        self, barred: Mapping[Cell, str], identical: Mapping[Cell, bool]
    ) -> Candidate | None:
        """The longest draft that is bit-identical and pays."""
        return deepest(candidates(self.pairs, barred), identical)

    def arm(self, cell: Cell) -> Arm:
        """The times of all runs of a cell that made a pair; those of its baseline, for the vanilla cell."""
        if cell == self.vanilla:
            longest = max(self.pairs.values(), key=len, default=[])
            return sum((p.baseline for p in longest), Arm())
        return sum((p.speculative for p in self.pairs.get(cell, ())), Arm())

    def add(self, measured: Measured) -> None:
        """Take in what came of one more prompt."""
        for cell in (self.vanilla, *self.cells):
            key = cell.key
            if key in measured.pairs:
                self.pairs.setdefault(cell, []).append(measured.pairs[key])
            if key in measured.spent:
                self.spent[cell] = self.spent.get(cell, Spent()) + measured.spent[key]
            if key in measured.failures:
                self.failures[cell] = measured.failures[key]


@dataclass(frozen=True, slots=True)
class Costs:
    """Every study of a run, with what the run has found out about the same cells.

    `barred` says why a cell's drafter must not run, `identical` whether it changes no bit; `price` is that of an hour.
    `loads` are those that a server was put under, if it was.
    """

    studies: tuple[Study, ...]
    barred: Mapping[Cell, str]
    identical: Mapping[Cell, bool]
    rounds: int
    price: float | None
    forced: tuple[str, ...]
    loads: tuple[Load, ...] = ()

    @property
    def exit_code(self) -> int:
        """3 when an arm failed or nothing could be timed; else 0, whatever the drafters are worth."""
        complete = all(study.pairs and not study.failures for study in self.studies)
        refused = any(load.refusals for load in self.loads)
        return 0 if complete and self.studies and not refused else 3


def studies(plan: Plan) -> list[Study]:
    """One empty study for each target and set of settings. Raises `BadInput` for cells that cannot be timed."""
    found = [Study(cells[0].vanilla, cells) for cells in plan.groups()]
    other = [study.vanilla.engine for study in found if study.vanilla.engine != "libllama"]
    if other:
        raise BadInput(
            f"engine {other[0]} does not show where the time of a cycle goes; give --set engine=libllama"
        )
    return found


def fill(
    study: Study, prompts: Sequence[Prompt], rounds: int, store: Store, workers: Submit
) -> Iterator[Prompt]:
    """Time every prompt that `store` has not kept, and keep it; each prompt when it is done.

    `workers` has one slot. Its process is warm before the first prompt that is timed.
    """
    warm = False
    for prompt in prompts:
        cases = [Case(cell, prompt) for cell in study.cells]
        key = f"cost:{digest([rounds, *(case.key for case in cases)])}"
        kept = store.kept(key)
        if kept is None:
            if not warm:
                warm_up(workers, cases)
                warm = True
            measured = measure(workers, cases, rounds)
            store.keep(key, _MEASURED.dump_json(measured).decode())
        else:
            measured = _MEASURED.validate_json(kept)
        study.add(measured)
        yield prompt


def weigh(study: Study, cell: Cell, prompt: Prompt, fresh: Submit) -> None:
    """Measure the footprint of one arm in a process that has done nothing else."""
    result: Footprint | Failure = fresh.submit(footprint_of, Case(cell, prompt)).result()
    if isinstance(result, Footprint):
        study.footprints[cell] = result


def profile(study: Study, prompt: Prompt, workers: Submit) -> None:
    """Time the target's verify batches at every width that the drafters may reach."""
    widest = min(WIDEST, max(cell.width for cell in study.cells))
    call = width_costs, Case(study.vanilla, prompt), widest, WIDTH_ROUNDS
    result: list[WidthCost] | Failure = workers.submit(*call).result()
    if not isinstance(result, Failure):
        study.widths = result
