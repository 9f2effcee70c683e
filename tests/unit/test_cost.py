"""The arithmetic of cost: the worksheet's example, and what must hold for any numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbisect.gate.acceptance import Acceptance
from specbisect.gate.cost import (
    Arm,
    Paired,
    Spent,
    alpha_needed,
    committed_per_cycle,
    faster,
    fit_alpha,
    fitted_per_cycle,
    ratio_interval,
    time_per_token,
    worth,
)

UNTIMED = settings(deadline=None)  # a busy machine is no defect

ALPHA = st.floats(0.0, 1.0)
LENGTH = st.integers(0, 24)


def test_the_worksheet() -> None:
    per_cycle = committed_per_cycle(0.7, 4)
    assert per_cycle == pytest.approx(2.7731)
    assert time_per_token(4, 12, 2, per_cycle) == pytest.approx(6.49, abs=0.005)
    assert time_per_token(16, 12, 2, per_cycle) == pytest.approx(10.82, abs=0.005)
    # against T = 10: the first drafter pays; the second does not, and would from some α = 0.74 on
    assert 10 / time_per_token(4, 12, 2, per_cycle) == pytest.approx(1.54, abs=0.005)
    assert alpha_needed((4 + 12 + 2) / 10, 4) == pytest.approx(0.4553, abs=1e-4)
    assert alpha_needed((16 + 12 + 2) / 10, 4) == pytest.approx(0.7413, abs=1e-4)


@UNTIMED
@given(LENGTH)
def test_ends_of_the_range(k: int) -> None:
    assert committed_per_cycle(0.0, k) == 1.0
    assert committed_per_cycle(1.0, k) == k + 1
    assert alpha_needed(1.0, k) == 0.0
    assert alpha_needed(k + 1.5, k) is None


@UNTIMED
@given(ALPHA)
def test_no_draft_commits_one(alpha: float) -> None:
    assert committed_per_cycle(alpha, 0) == 1.0


@UNTIMED
@given(ALPHA, st.integers(1, 24))
def test_the_formula_is_a_geometric_series(alpha: float, k: int) -> None:
    m = committed_per_cycle(alpha, k)
    assert 1 <= m <= k + 1
    assert m == pytest.approx(
        k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-6
    )
    needed = alpha_needed(m, k)
    assert needed is not None
    assert committed_per_cycle(needed, k) == pytest.approx(m)


def full(k: int, histogram: tuple[int, ...]) -> Acceptance:
    """Cycles that all drafted `k` tokens and accepted as the histogram says."""
    n = sum(histogram)
    return Acceptance(
        drafted=k * n,
        accepted=sum(i * c for i, c in enumerate(histogram)),
        cycles=n,
        drafting=n,
        committed=sum((i + 1) * c for i, c in enumerate(histogram)),
        histogram=histogram,
        offered=(n,) * k,
        reached=tuple(sum(histogram[i:]) for i in range(k)),
    )


def test_fit_worked_example() -> None:
    # Ten drafts of two: five rejected at once, two after one token, three whole. 15 tokens had their chance, 8 passed.
    counts = full(2, (5, 2, 3))
    assert fit_alpha(counts) == 8 / 15
    assert fitted_per_cycle(counts, 0.5) == committed_per_cycle(0.5, 2) == 1.75


@pytest.mark.parametrize(("histogram", "alpha"), [((9, 0, 0), 0.0), ((0, 0, 9), 1.0)])
def test_fit_at_the_ends(histogram: tuple[int, ...], alpha: float) -> None:
    assert fit_alpha(full(2, histogram)) == alpha
    assert fitted_per_cycle(full(2, histogram), alpha) == 1 + 2 * alpha


def test_nothing_to_fit() -> None:
    assert fit_alpha(Acceptance(cycles=5, committed=5)) is None
    assert fitted_per_cycle(Acceptance(), 0.5) == 1.0


@UNTIMED
@given(st.integers(1, 6), ALPHA)
def test_fit_recovers_what_the_formula_made(k: int, alpha: float) -> None:
    n = 10**9
    counts = full(k, (*(round(n * alpha**i * (1 - alpha)) for i in range(k)), round(n * alpha**k)))
    assert fit_alpha(counts) == pytest.approx(alpha, abs=1e-6)
    assert fitted_per_cycle(counts, alpha) == pytest.approx(
        counts.committed / counts.cycles, rel=1e-6
    )


def paired(
    prompt: str, baseline: float, cycle: tuple[float, float, float], counts: Acceptance
) -> Paired:
    """Times given in seconds per token and per cycle (D, V, H)."""
    n = counts.cycles
    draft, verify, rest = (n * part for part in cycle)
    return Paired(
        prompt,
        "all",
        Arm(1, 100, 101, 100 * baseline),
        Arm(
            1,
            counts.committed,
            counts.committed + 1,
            draft + verify + rest,
            draft,
            verify,
            counts=counts,
        ),
    )


def test_worth_gives_back_the_worksheet() -> None:
    counts = full(4, (300, 210, 147, 103, 240))  # α = 0.7, rounded to whole cycles
    found = worth([paired("a", 10, (4, 12, 2), counts)] * 3, k=4)
    assert found is not None
    assert (found.baseline, found.draft, found.verify, found.rest) == pytest.approx((10, 4, 12, 2))
    assert found.per_cycle == pytest.approx(2.7731, abs=1e-3)
    assert found.per_token == pytest.approx(6.49, abs=0.005)
    assert found.speed_up == pytest.approx(1.54, abs=0.005)
    assert found.needed == pytest.approx(0.4553, abs=1e-4)
    assert found.alpha == pytest.approx(0.7, abs=1e-3)
    assert found.misfit == pytest.approx(0, abs=1e-3)
    assert found.pays
    # prompts that are all alike leave no spread
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((found.speed_up,) * 2)


def test_one_prompt_has_no_interval_and_shows_nothing() -> None:
    found = worth([paired("a", 10, (4, 12, 2), full(4, (0, 0, 0, 0, 9)))], k=4)
    assert found is not None
    assert found.speed_up > 2
    assert found.interval is None
    assert not found.pays


def test_arms_without_cycles_are_worth_nothing() -> None:
    assert worth([], k=4) is None
    assert worth([paired("a", 10, (0, 0, 0), Acceptance())], k=4) is None


@UNTIMED
@given(
    st.lists(
        st.tuples(st.floats(0.5, 20), st.integers(1, 100), st.floats(0.5, 20), st.integers(1, 100)),
        min_size=2,
        max_size=8,
    ),
)
def test_the_interval_holds_the_ratio_of_totals_between_its_extremes(
    terms: list[tuple[float, int, float, int]],
) -> None:
    interval = ratio_interval(terms)
    assert interval is not None
    assert interval == ratio_interval(terms)
    single = [(a / n) / (b / m) for a, n, b, m in terms]
    one = [a / n for a, n, _, _ in terms]
    other = [b / m for _, _, b, m in terms]
    assert interval.low >= min(one) / max(other) * (1 - 1e-9)
    assert interval.high <= max(one) / min(other) * (1 + 1e-9)
    if max(single) == min(single) and len({t[1] for t in terms}) == 1 == len({t[3] for t in terms}):
        assert interval.low == pytest.approx(single[0])


def test_faster_needs_the_prompts_of_both() -> None:
    counts = full(2, (1, 1, 8))
    quick = [paired(name, 1, (0.1, 1, 0), counts) for name in "abc"]
    slow = [paired(name, 1, (0.9, 1, 0), counts) for name in "abc"]
    assert faster(quick, slow)
    assert not faster(slow, quick)
    assert not faster(quick, [replace(p, prompt=p.prompt * 2) for p in slow])


def test_price_counts_failed_work() -> None:
    assert Spent(3600.0, 0.0, 1_000_000).price(2.5) == 2.5
    assert Spent(1800.0, 1800.0, 500_000).price(2.5) == 5.0
    assert Spent(0.0, 60.0, 0).price(2.5) is None
    price = Spent(10.0, 0.0, 100).price(0.36)
    assert price is not None
    assert math.isclose(price, 10.0)
