"""Decisions: keep, tune, disable, not eligible; and the deepest draft that is bit-identical and pays."""

from dataclasses import replace

import pytest

from specbisect.cell import Cell, DraftModel, Model, NgramSimple
from specbisect.gate.acceptance import Acceptance
from specbisect.gate.cost import Arm, Paired, alpha_needed
from specbisect.gate.decision import Candidate, Decision, candidates, decide, deepest, family

TARGET = Model("m", "Q8_0", "sha256:t")
DRAFT = DraftModel(Model("m", "Q2_K", "sha256:d"))


def cell(k: int) -> Cell:
    return Cell(TARGET, replace(DRAFT, n_max=k))


def counts(k: int, *, accepts: bool = True, cycles: int = 20) -> Acceptance:
    n = k if accepts else 0
    return Acceptance(
        drafted=k * cycles,
        accepted=n * cycles,
        cycles=cycles,
        drafting=cycles,
        committed=(n + 1) * cycles,
        histogram=(0,) * n + (cycles,),
        offered=(cycles,) * k,
        reached=(cycles,) * min(k, n + 1),
    )


def pairs(k: int, cycle_s: float, groups: str = "aabb", *, accepts: bool = True) -> list[Paired]:
    """Prompts on which vanilla needs one second a token and the drafter `cycle_s` a cycle."""
    own = counts(k, accepts=accepts)
    decode = cycle_s * own.cycles
    return [
        Paired(
            str(i),
            group,
            Arm(1, 100, 101, 100.0 + i),  # no two prompts take the same
            Arm(1, own.committed, own.committed + 1, decode, decode / 4, decode / 2, counts=own),
        )
        for i, group in enumerate(groups)
    ]


def decisions(
    measured: dict[int, list[Paired]], barred: dict[Cell, str] | None = None, group: str = "all"
) -> dict[int, Decision]:
    (members,) = candidates({cell(k): p for k, p in measured.items()}, barred or {}, group)
    return {c.k: d for c, d in zip(members, decide(members), strict=True)}


def test_the_one_that_pays_is_kept() -> None:
    assert decisions({3: pairs(3, 2.0)}) == {3: Decision("keep", 3, "pays")}


def test_a_better_length_is_named() -> None:
    found = decisions({1: pairs(1, 1.5), 3: pairs(3, 2.0), 7: pairs(7, 9.0)})
    assert {k: (d.action, d.k) for k, d in found.items()} == {
        1: ("tune", 3),
        3: ("keep", 3),
        7: ("tune", 3),
    }
    assert found[7].reason == "speed-up 2.03 with 3"


def test_lengths_that_cannot_be_told_apart_are_both_kept() -> None:
    found = decisions({3: pairs(3, 2.0), 4: pairs(4, 2.5)})
    assert {d.action for d in found.values()} == {"keep"}


def test_what_does_not_pay_is_switched_off() -> None:
    (found,) = decisions({3: pairs(3, 3.0, accepts=False)}).values()
    baseline = (100 + 101 + 102 + 103) / 400
    needed = alpha_needed(3.0 / baseline, 3)
    assert found == Decision("disable", 0, f"breaks even at α {needed:.2f}, has 0.00")


def test_what_cannot_pay_is_said_so() -> None:
    (found,) = decisions({3: pairs(3, 9.0)}).values()
    assert found == Decision("disable", 0, "no α would pay")


@pytest.mark.parametrize("cycle_s", [1.0, 9.0])
def test_what_drafts_nothing_is_switched_off_however_fast(cycle_s: float) -> None:
    silent = Acceptance(cycles=50, committed=50)
    own = [replace(p, speculative=replace(p.speculative, counts=silent)) for p in pairs(3, cycle_s)]
    assert decisions({3: own}) == {3: Decision("disable", 0, "drafts nothing")}


def test_one_prompt_shows_nothing() -> None:
    (found,) = decisions({3: pairs(3, 2.0, "a")}).values()
    assert found.action == "disable"
    assert found.reason.startswith("not shown to pay; breaks even at α ")


def test_nothing_timed() -> None:
    assert decisions({3: []}) == {3: Decision("disable", 0, "no cycle was timed")}


def test_what_is_not_right_is_not_eligible_however_fast() -> None:
    reason = "state in 2 cases"
    found = decisions({1: pairs(1, 1.5), 3: pairs(3, 2.0)}, {cell(3): reason})
    assert found[3] == Decision("not eligible", 0, reason)
    assert (found[1].action, found[1].k) == ("keep", 1)


def test_groups_are_decided_one_by_one() -> None:
    slow = [p for p in pairs(3, 9.0) if p.group == "b"]
    fast = [p for p in pairs(3, 2.0) if p.group == "a"]
    measured = {3: fast + slow}
    assert decisions(measured, group="a")[3].action == "keep"
    assert decisions(measured, group="b")[3].action == "disable"


def test_families_are_drafters_without_their_length() -> None:
    ngram = Cell(TARGET, NgramSimple(size_m=5))
    assert family(cell(1)) == family(cell(7)) != family(replace(cell(1), n_ubatch=8))
    assert family(ngram) == family(replace(ngram, drafter=NgramSimple(size_m=9)))
    assert len(candidates({cell(1): [], cell(3): [], ngram: []}, {})) == 2


def test_one_alpha_for_all_lengths_shows_its_misfit() -> None:
    measured = {cell(1): pairs(1, 1.0), cell(3): pairs(3, 1.0, accepts=False)}
    (members,) = candidates(measured, {})
    # 80 tokens had their chance at k = 1, all accepted; 80 at k = 3, none: α = 1/2 for both.
    assert [c.worth and c.worth.alpha for c in members] == [0.5, 0.5]
    assert [c.worth and c.worth.fitted for c in members] == [1.5, 1.875]
    assert [c.worth and c.worth.misfit for c in members] == [0.5, -0.875]


def found_deepest(identical: dict[Cell, bool], barred: dict[Cell, str]) -> Candidate | None:
    measured = {cell(k): pairs(k, s) for k, s in ((1, 1.5), (3, 2.0), (7, 9.0))}
    return deepest(candidates(measured, barred), identical)


def test_deepest() -> None:
    everything = {cell(k): True for k in (1, 3, 7)}
    assert (best := found_deepest(everything, {})) is not None
    assert best.k == 3  # 7 does not pay
    assert (best := found_deepest(everything | {cell(3): False}, {})) is not None
    assert best.k == 1
    assert (
        found_deepest(everything, {cell(3): "state in 1 case", cell(1): "state in 1 case"}) is None
    )
    assert found_deepest({}, {}) is None
