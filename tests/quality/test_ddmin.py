"""The generic searches keep their promises for any predicate, monotone or not, and at any call.

A predicate of no particular kind is a list of answers, given out in the order of the questions:
since a search never asks twice, every such list is some consistent predicate, and hypothesis can
shrink it. What the predicate does not say any more is DIFFERENT.
"""

from collections.abc import Callable
from math import ceil, log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbisect.narrow.ddmin import (
    Minimised,
    Outcome,
    OutOfBudget,
    Reason,
    cut_after,
    cut_by,
    ddmin,
    first_still,
    sweep,
)

settings.register_profile("untimed", deadline=None)  # a busy machine is no defect
settings.load_profile("untimed")

STILL, DIFFERENT, UNRESOLVED = Outcome

Items = tuple[int, ...]


def long_answers(seed: int, still_in_ten: int) -> list[Outcome]:
    weights = [still_in_ten, 8 - still_in_ten, 2]
    return Random(seed).choices([STILL, DIFFERENT, UNRESOLVED], weights, k=400)


answers = st.lists(st.sampled_from(Outcome), max_size=60) | st.builds(
    long_answers, st.integers(0, 2**32), st.integers(1, 5)
)
outcome_lists = st.lists(st.sampled_from(Outcome), max_size=12)
distinct_items = st.integers(0, 24).map(lambda n: tuple(range(n)))
repeating_items = st.lists(st.integers(0, 3), max_size=16).map(tuple)
any_items = distinct_items | repeating_items


class Predicate:
    """Gives out `answers` in order; the first question, the whole input, is always STILL."""

    def __init__(self, answers: list[Outcome], stop_at: int | None = None, stop=OutOfBudget):
        self.answers = iter([STILL, *answers])
        self.said: dict[object, Outcome] = {}
        self.stop_at = stop_at
        self.stop = stop

    def __call__(self, candidate: object) -> Outcome:
        assert candidate not in self.said, "asked twice"
        if len(self.said) == self.stop_at:
            raise self.stop
        self.said[candidate] = next(self.answers, DIFFERENT)
        return self.said[candidate]


def without_each(items: Items) -> list[Items]:
    return [items[:at] + items[at + 1 :] for at in range(len(items))]


def is_subsequence(part: Items, whole: Items) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


def contains_any_of(needed: list[frozenset[int]]) -> Callable[[Items], Outcome]:
    """Monotone: STILL for every superset of one of the `needed` sets."""
    return lambda candidate: STILL if any(n <= set(candidate) for n in needed) else DIFFERENT


def bound(n: int) -> int:
    return n * (n + 13) // 2 + 2


@given(any_items, answers)
def test_any_predicate_gives_a_failing_1_minimal_subset_within_the_bound(items, answers):
    predicate = Predicate(answers)
    found = ddmin(items, predicate)

    assert found.minimal
    assert found.reason is Reason.COMPLETE
    assert predicate.said[found.items] is STILL
    assert is_subsequence(found.items, items)
    assert all(predicate.said[fewer] is not STILL for fewer in without_each(found.items))
    assert found.removals == tuple(predicate.said[fewer] for fewer in without_each(found.items))
    assert found.tests == len(predicate.said) <= bound(len(items))
    assert {trial.candidate: trial.outcome for trial in found.trials} == predicate.said


@given(any_items, answers, st.sampled_from([2, 3, 5]))
def test_cuts_keep_the_proof_and_add_their_own_bound(items, answers, size):
    cut = cut_by(lambda item: item // size)
    predicate = Predicate(answers)
    found = ddmin(items, predicate, cuts=[cut])

    assert found.minimal
    assert predicate.said[found.items] is STILL
    assert all(predicate.said[fewer] is not STILL for fewer in without_each(found.items))
    assert found.tests <= bound(len(cut(items))) + bound(len(items))


@given(st.data())
def test_monotone_predicates_take_a_linear_number_of_calls(data):
    items = tuple(range(data.draw(st.integers(1, 60))))
    subsets = st.frozensets(st.sampled_from(items))
    needed = data.draw(st.lists(subsets, min_size=1, max_size=4))
    found = ddmin(items, contains_any_of(needed))

    assert found.minimal
    assert frozenset(found.items) in needed
    assert found.tests <= 7 * len(items) + 2


@given(st.data())
def test_the_planted_set_is_found_exactly(data):
    items = tuple(range(data.draw(st.integers(0, 60))))
    needed = frozenset(item for item in items if data.draw(st.booleans()))
    found = ddmin(items, contains_any_of([needed]))

    assert found.items == tuple(sorted(needed))
    assert found.removals == (DIFFERENT,) * len(needed)


@given(st.integers(1, 1000), st.data())
def test_one_needle_takes_a_logarithmic_number_of_calls(n, data):
    needle = data.draw(st.integers(0, n - 1))
    found = ddmin(range(n), contains_any_of([frozenset([needle])]))

    assert found.items == (needle,)
    assert found.tests <= 2 * ceil(log2(n)) + 2


@given(any_items, answers, st.integers(0, 60), st.sampled_from([OutOfBudget, KeyboardInterrupt]))
def test_stopped_at_any_call_it_returns_a_failing_candidate(items, answers, calls, stop):
    whole_run = ddmin(items, Predicate(answers))
    predicate = Predicate(answers, stop_at=calls, stop=stop)
    found = ddmin(items, predicate)

    assert found.trials == whole_run.trials[:calls]
    assert found.minimal == (calls >= whole_run.tests)
    assert found.items == items or predicate.said[found.items] is STILL
    assert len(whole_run.items) <= len(found.items) <= len(items)
    if not found.minimal:
        ended = Reason.BUDGET if stop is OutOfBudget else Reason.INTERRUPTED
        assert found.reason is ended


@given(any_items, answers, st.integers(0, 60))
def test_a_budget_ends_the_search_as_the_test_itself_would(items, answers, budget):
    by_budget = ddmin(items, Predicate(answers), budget=budget)
    by_test = ddmin(items, Predicate(answers, stop_at=budget))

    assert by_budget == by_test
    assert by_budget.tests <= budget


@given(any_items, answers)
def test_the_same_input_gives_the_same_answer(items, answers):
    assert ddmin(items, Predicate(answers)) == ddmin(list(items), Predicate(answers))


@given(distinct_items, st.sampled_from([DIFFERENT, UNRESOLVED]))
def test_nothing_is_reduced_when_every_smaller_candidate_is(items, outcome):
    found = ddmin(items, lambda candidate: STILL if candidate == items else outcome)

    assert found.items == items
    assert found.removals == (outcome,) * len(items)


def test_removals_tell_a_necessary_item_from_one_that_crashes_without():
    def crashes_without_2(candidate: Items) -> Outcome:
        if 2 not in candidate:
            return UNRESOLVED
        return STILL if 5 in candidate else DIFFERENT

    found = ddmin(range(8), crashes_without_2)
    assert dict(zip(found.items, found.removals, strict=True)) == {2: UNRESOLVED, 5: DIFFERENT}


def test_minimality_is_proved_where_dropping_an_early_item_frees_a_late_one():
    shown = {(0, 1, 2, 3), (1, 2, 3), (1, 2)}
    found = ddmin(range(4), lambda candidate: STILL if candidate in shown else DIFFERENT)
    assert found.items == (1, 2)


def test_a_part_that_shows_it_only_when_alone_is_found():
    shown = {tuple(range(8)), (2, 3)}
    found = ddmin(range(8), lambda candidate: STILL if candidate in shown else DIFFERENT)
    assert found.items == (2, 3)


def test_that_nothing_is_needed_takes_two_calls():
    found = ddmin(range(100), lambda _: STILL)
    assert (found.items, found.minimal, found.tests) == ((), True, 2)


@pytest.mark.parametrize("outcome", [DIFFERENT, UNRESOLVED])
def test_no_search_starts_on_what_does_not_show_it(outcome):
    found = ddmin("abc", lambda _: outcome)
    assert (found.items, found.minimal, found.tests) == (("a", "b", "c"), False, 1)
    assert found.reason is Reason.ABSENT
    assert found.removals == (None, None, None)


def test_an_error_in_the_test_is_not_swallowed():
    def broken(_: Items) -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ddmin(range(3), broken)


def test_lines_go_before_tokens():
    text = "one two\nthree four\nfive six\n"
    cut = cut_after(lambda character: character == "\n")
    asked: list[str] = []

    def four_is_there(candidate: tuple[str, ...]) -> Outcome:
        asked.append("".join(candidate))
        return STILL if "four" in asked[-1] else DIFFERENT

    found: Minimised[str] = ddmin(text, four_is_there, cuts=[cut])
    assert "".join(found.items) == "four"
    by_lines = asked[: asked.index("three four\n") + 1]
    lines = text.splitlines(keepends=True)
    assert all(set(seen.splitlines(keepends=True)) <= set(lines) for seen in by_lines)


@given(repeating_items)
def test_cuts_lose_nothing(items):
    for cut in (cut_after(lambda item: item == 0), cut_by(lambda item: item % 2)):
        pieces = cut(items)
        assert all(pieces)
        assert sum(pieces, ()) == items
    assert all(0 not in piece[:-1] for piece in cut_after(lambda item: item == 0)(items))


@given(outcome_lists)
def test_a_sweep_tries_every_value_and_finds_the_edge(outcomes):
    swept = sweep(range(len(outcomes)), outcomes.__getitem__)
    assert swept.reason is Reason.COMPLETE
    assert [(t.candidate, t.outcome) for t in swept.trials] == list(enumerate(outcomes))

    simplest = swept.simplest and swept.simplest.candidate
    assert simplest == (outcomes.index(STILL) if STILL in outcomes else None)
    if simplest is None:
        assert swept.nearest_without is None
    else:
        gone = [value for value, outcome in enumerate(outcomes) if outcome is DIFFERENT]
        nearest = swept.nearest_without and swept.nearest_without.candidate
        assert nearest == min(gone, key=lambda v: (abs(v - simplest), v), default=None)


def test_a_sweep_runs_the_cheapest_first_and_reports_the_simplest_first():
    cost = {"BF16": 16, "Q8_0": 8, "Q6_K": 6, "Q4_K_M": 4}
    outcome = {"BF16": STILL, "Q8_0": DIFFERENT, "Q6_K": UNRESOLVED, "Q4_K_M": STILL}
    asked: list[str] = []

    def test(value: str) -> Outcome:
        asked.append(value)
        return outcome[value]

    swept = sweep(list(cost), test, cost=cost.__getitem__)
    assert asked == ["Q4_K_M", "Q6_K", "Q8_0", "BF16"]
    assert [trial.candidate for trial in swept.trials] == list(cost)
    assert swept.simplest == swept.trials[0]
    assert swept.nearest_without == swept.trials[1]


@given(st.integers(0, 12), st.integers(0, 14), st.sampled_from([OutOfBudget, KeyboardInterrupt]))
def test_a_stopped_sweep_keeps_what_it_has(n, calls, stop):
    by_test = sweep(range(n), Predicate([], stop_at=calls, stop=stop))
    assert [trial.candidate for trial in by_test.trials] == list(range(min(n, calls)))
    assert (by_test.reason is Reason.COMPLETE) == (calls >= n)
    by_budget = sweep(range(n), Predicate([]), budget=calls)
    assert by_budget.trials == by_test.trials


@given(outcome_lists)
def test_first_still_asks_no_further_than_it_must(outcomes):
    swept = first_still(range(len(outcomes)), outcomes.__getitem__)
    asked = outcomes.index(STILL) + 1 if STILL in outcomes else len(outcomes)

    assert swept.reason is Reason.COMPLETE
    assert len(swept.trials) == asked
    assert swept.simplest == (swept.trials[-1] if STILL in outcomes else None)
