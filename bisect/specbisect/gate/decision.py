"""What to do with a drafter: keep it, tune its draft length, switch it off; or nothing, because it is not right."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specbisect.cell import Cell, DraftModel, NgramSimple, PromptLookup, SelfDraft, ServerSpec
from specbisect.gate.acceptance import total
from specbisect.gate.causes import NONE, Judged
from specbisect.gate.cost import Paired, Worth, counts_of, faster, fit_alpha, worth
from specbisect.store import Store
from specbisect.trace import Trace

Action = Literal["keep", "tune", "disable", "not eligible"]

HARMLESS = (NONE, "unexercised", "batch-width")
"""Causes with which a drafter may run: what the target itself computes differently at another width is its own."""

EVERYTHING = "all"
"""The group of all prompts."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a cell's drafter on a prompt group, and why. `k` is the draft length to run it with."""

    action: Action
    k: int
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter of one draft length: what it was measured to be worth on a group of prompts, and what bars it."""

    cell: Cell
    pairs: tuple[Paired, ...]
    worth: Worth | None
    barred: str

    @property
    def k(self) -> int:
        """Its longest draft."""
        return self.cell.width - 1

    @property
    def pays(self) -> bool:
        """Whether it may run, drafts, and is shown to be faster."""
        found = self.worth
        return not self.barred and found is not None and found.alpha is not None and found.pays


def family(cell: Cell) -> Cell:
    """`cell` with the draft length taken out: what is the same of all lengths of one drafter."""
    drafter = cell.drafter
    if isinstance(drafter, DraftModel | SelfDraft | PromptLookup | ServerSpec):
        drafter = replace(drafter, n_max=1)
    elif isinstance(drafter, NgramSimple):
        drafter = replace(drafter, size_m=1)
    return replace(cell, drafter=drafter)


def candidates(
    pairs: Mapping[Cell, Sequence[Paired]], barred: Mapping[Cell, str], group: str = EVERYTHING
) -> list[list[Candidate]]:
    """The cells of `pairs` by family, each with its worth on the prompts of `group`.

    One α is fitted to all draft lengths of a family, so that the formula can fail to fit any of them.
    """
    families: dict[Cell, dict[Cell, tuple[Paired, ...]]] = {}
    for cell, all_pairs in pairs.items():
        own = tuple(p for p in all_pairs if group in (EVERYTHING, p.group))
        families.setdefault(family(cell), {})[cell] = own
    found = []
    for members in families.values():
        alpha = fit_alpha(total(counts_of(own) for own in members.values()))
        found.append(
            [
                Candidate(cell, own, worth(own, cell.width - 1, alpha), barred.get(cell, ""))
                for cell, own in members.items()
            ]
        )
    return found


def decide(members: Sequence[Candidate]) -> list[Decision]:
    """A decision for each draft length of one family."""
    paying = [c for c in members if c.pays]
    best = max(paying, key=lambda c: c.worth.speed_up if c.worth else 0.0, default=None)
    return [_decide(one, best) for one in members]


def _decide(one: Candidate, best: Candidate | None) -> Decision:
    if one.barred:
        return Decision("not eligible", 0, one.barred)
    if one.worth is None:
        return Decision("disable", 0, "no cycle was timed")
    if best is None:
        return Decision("disable", 0, _loss(one.worth))
    if one is best or (one.pays and not faster(best.pairs, one.pairs)):
        return Decision("keep", one.k, "pays")
    assert best.worth is not None  # it pays
    return Decision("tune", best.k, f"speed-up {best.worth.speed_up:.2f} with {best.k}")


def _loss(found: Worth) -> str:
    if found.alpha is None:
        return "drafts nothing"
    if found.needed is None:
        return "no α would pay"
    shown = "" if found.speed_up < 1 else "not shown to pay; "
    return f"{shown}breaks even at α {found.needed:.2f}, has {found.alpha:.2f}"


def barred(cases: Iterable[Judged]) -> dict[Cell, str]:
    """Cells whose drafter must not run, whatever it is worth, with the reason."""
    found: dict[Cell, list[Judged]] = {}
    for case in cases:
        if case.cause not in HARMLESS:
            found.setdefault(case.row.cell, []).append(case)
    return {
        cell: f"{own[0].cause} in {len(own)} case{'s' * (len(own) != 1)}"
        for cell, own in found.items()
    }


def bit_identical(store: Store, cases: Iterable[Judged]) -> dict[Cell, bool]:
    """Per cell, whether every row of every case had the bits of the vanilla arm; False where they cannot be seen."""
    found: dict[Cell, bool] = {}
    for case in cases:
        arms = (store.arm(store.case(case.row.id).vanilla.key), store.arm(case.row.id))
        digests = [arm.digests if isinstance(arm, Trace) else () for arm in arms]
        same = bool(digests[0]) and digests[0] == digests[1]
        found[case.row.cell] = found.get(case.row.cell, True) and same
    return found


def deepest(
    families: Iterable[Sequence[Candidate]], identical: Mapping[Cell, bool]
) -> Candidate | None:
    """The longest draft that changes no bit of any row and pays."""
    found = [c for members in families for c in members if c.pays and identical.get(c.cell, False)]
    return max(found, key=lambda c: c.k, default=None)
