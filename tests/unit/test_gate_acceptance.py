"""Acceptance: every number against a recount of the same cycles, one token at a time."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbisect.cell import Cell, Model, ServerSpec
from specbisect.errors import BadInput
from specbisect.gate.acceptance import Acceptance, committed, refuse_synthetic, total
from specbisect.trace import Cycle, Trace

UNTIMED = settings(deadline=None)  # a busy machine is no defect

PROMPT = (7, 8, 9)


def arm(cycles: list[tuple[int, int]], *, cut: int = 0) -> Trace:
    """A trace of cycles given as (drafted, accepted); the last `cut` committed tokens are behind an EOS."""
    base, made = len(PROMPT), []
    for drafted, accepted in cycles:
        made.append(Cycle(base, tuple(range(drafted + 1)), accepted))
        base += accepted + 1
    return Trace(
        "speculative",
        PROMPT,
        tuple(range(base - len(PROMPT) + 1 - cut)),
        "eog" if cut else "length",
        cycles=tuple(made),
        drafted=sum(d for d, _ in cycles),
        accepted=sum(a for _, a in cycles),
    )


def test_worked_example() -> None:
    # Four rounds of up to three tokens: all accepted, none, one of three, and a round without a draft.
    found = Acceptance.of(arm([(3, 3), (3, 0), (3, 1), (0, 0)]))
    assert found == Acceptance(
        drafted=9,
        accepted=4,
        cycles=4,
        drafting=3,
        committed=8,
        histogram=(1, 1, 0, 1),
        offered=(3, 3, 3),
        reached=(3, 2, 1),
    )
    assert found.rate == 4 / 9
    assert found.per_cycle == 2.0
    assert found.accepted_at == (2, 1, 1)
    assert found.unconditional == (2 / 3, 1 / 3, 1 / 3)
    assert found.conditional == (2 / 3, 1 / 2, 1.0)
    assert found.by_position == ((3, 2), (3, 1), (3, 1))


def test_totals_are_not_averages() -> None:
    short, long = arm([(1, 1)]), arm([(9, 0), (9, 0), (9, 0)])
    assert total(map(Acceptance.of, [short, long])).rate == 1 / 28


def test_tokens_behind_an_end_of_generation_are_accepted_and_not_committed() -> None:
    found = Acceptance.of(arm([(3, 1), (3, 3)], cut=3))
    assert (found.accepted, found.committed, found.per_cycle) == (4, 3, 1.5)


def test_an_arm_without_cycles_counts_its_totals() -> None:
    unseen = Trace("speculative", PROMPT, (1, 2), "length", drafted=6, accepted=3)
    found = Acceptance.of(unseen) + Acceptance.of(arm([(3, 3)]))
    assert (found.rate, found.per_cycle, found.unseen) == (6 / 9, 4.0, 1)


def test_nothing_drafted() -> None:
    for trace in (arm([]), arm([(0, 0)] * 5), Trace("speculative", PROMPT, (1,), "eog")):
        found = Acceptance.of(trace)
        assert (found.rate, found.histogram, found.unconditional, found.unseen) == (None, (), (), 0)
    assert Acceptance.of(arm([(0, 0)] * 5)).per_cycle == 1.0


@st.composite
def arms(draw: st.DrawFn) -> Trace:
    cycles = draw(
        st.lists(st.integers(0, 6).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))))
    )
    last = cycles[-1][1] if cycles else 0
    return arm(cycles, cut=draw(st.integers(0, last)))


@UNTIMED
@given(st.lists(arms(), max_size=5))
def test_equals_a_recount_token_by_token(traces: list[Trace]) -> None:
    found = total(map(Acceptance.of, traces))
    tokens: Counter[tuple[int, str]] = Counter()
    for trace in traces:
        answer = len(trace.ids) - 1
        for cycle in trace.cycles:
            for at in range(len(cycle.batch) - 1):
                tokens[at, "offered"] += 1
                tokens[at, "reached"] += at <= cycle.accepted
                tokens[at, "accepted"] += at < cycle.accepted
            answer -= committed(trace, cycle)
        assert answer == 0
    places = range(len(found.offered))
    assert found.offered == tuple(tokens[at, "offered"] for at in places)
    assert found.reached == tuple(tokens[at, "reached"] for at in places)
    assert found.accepted_at == tuple(tokens[at, "accepted"] for at in places)
    assert found.drafted == sum(found.offered)
    assert found.accepted == sum(found.accepted_at)
    assert found.accepted == sum(n * count for n, count in enumerate(found.histogram))
    assert found.drafting == sum(found.histogram)
    assert list(found.accepted_at) == sorted(found.accepted_at, reverse=True)
    assert found.committed == sum(len(t.ids) - 1 for t in traces)


@UNTIMED
@given(st.lists(arms(), min_size=1, max_size=5))
def test_the_parts_make_the_whole(traces: list[Trace]) -> None:
    found = total(map(Acceptance.of, traces))
    product = Fraction(1)
    for reached, accepted in zip(found.reached, found.accepted_at, strict=True):
        assert accepted <= reached
    # With drafts that are all of one length, the conditional shares multiply to the unconditional ones.
    if len(set(found.offered)) == 1:
        for at, (reached, accepted) in enumerate(
            zip(found.reached, found.accepted_at, strict=True)
        ):
            product *= Fraction(accepted, reached) if reached else 0
            assert product == Fraction(found.accepted_at[at], found.drafting)


@pytest.mark.parametrize("flag", ["--spec-synth-len=3", "--spec_synth_rates"])
def test_made_up_acceptance_is_no_evidence(flag: str) -> None:
    spec = ServerSpec("draft-simple", args=("--spec-draft-n-min", "1", flag, "0.5"))
    with pytest.raises(BadInput, match="accepts drafted tokens at random"):
        refuse_synthetic([Cell(Model("m", "Q8_0", "sha256:0"), spec, engine="server")])
