"""Screening: which cases of a plan can differ at all, told from the graph's nodes before any drafter runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specbisect.cell import Case, Cell
from specbisect.cli import output
from specbisect.trace import Failure

if TYPE_CHECKING:
    from specbisect.matrix import Plan
    from specbisect.ops.profile import Profile
    from specbisect.runner import Submit


@dataclass(slots=True)
class Screen:
    """Says of each case whether it is worth running.

    A case whose every batch is proved to give the bits of single rows cannot fork while speculation is right; of a
    cell of such cases one is run, to see that the drafter engages. A wrong memory is not ruled out by this: that is
    what ``--audit`` is for.
    """

    profiles: "dict[str, Profile]"
    lengths: dict[str, int]
    seen: set[str] = field(default_factory=set)
    screened: int = 0

    def __call__(self, case: Case) -> bool:
        """Whether to run it; ask in the order of the plan."""
        first = case.cell.key not in self.seen
        self.seen.add(case.cell.key)
        if first or self._can_fork(case):
            return True
        self.screened += 1
        return False

    def _can_fork(self, case: Case) -> bool:
        from specbisect.ops.profile import can_fork

        profile = self.profiles.get(case.cell.vanilla.key)
        if profile is None or case.cell.engine != "libllama":
            return True
        start = self.lengths[case.prompt.id]
        positions = range(start, start + case.cell.n_predict)
        return can_fork(profile, range(2, case.cell.width + 1), positions)


def screened(plan: "Plan", workers: "Submit") -> Screen:
    """Trace the nodes of every target and its settings at the widths drafters can ask for, and say what was seen."""
    from specbisect.llama.vocab import token_counts
    from specbisect.ops.widths import screen

    groups: dict[str, tuple[Cell, int]] = {}
    for cell in plan.cells():
        if cell.engine == "libllama" and cell.n_parallel == 1:
            _, width = groups.get(cell.vanilla.key, (cell, 1))
            groups[cell.vanilla.key] = cell.vanilla, max(width, cell.width)
    profiles = {}
    for key, (cell, width) in groups.items():
        cases = [Case(cell, prompt) for prompt in plan.prompts]
        found = workers.submit(screen, cases, range(2, width + 1)).result()
        if isinstance(found, Failure):
            output.note(f"{cell.target.quant} is not screened: {found.stage}: {found.reason}")
        else:
            profiles[key] = found
            output.note(f"{cell.target.quant}: {found}")
    target = next(iter(plan.cells())).target.path
    texts = [prompt.text for prompt in plan.prompts if prompt.ids is None]
    counted = iter(_counts(workers.submit(token_counts, target, texts).result()))
    lengths = {p.id: len(p.ids) if p.ids is not None else next(counted) for p in plan.prompts}
    return Screen(profiles, lengths)


def _counts(result: Any) -> list[int]:
    assert not isinstance(
        result, Failure
    )  # the prompts were counted before, when the plan was checked
    return list(result)


def both(first: Callable[[Case], bool], second: Callable[[Case], bool]) -> Callable[[Case], bool]:
    """Wanted by both; the second is asked only about what the first wants."""
    return lambda case: first(case) and second(case)
