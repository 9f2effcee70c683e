"""Timing arms: the parts add up, arms that were not run together make no pair, failures are paid for."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, NgramSimple, Prompt
from specbisect.engines import run_arm
from specbisect.gate import timing
from specbisect.gate.acceptance import Acceptance
from specbisect.gate.cost import Arm
from specbisect.trace import Failure

PROMPT = Prompt("one", "in the end the then in the end the then", "repetition")


class Here:
    """Runs calls in this process, and notes which; `answer` may give another result."""

    slots = 1

    def __init__(self, answer: Callable[[Case, int], Any] | None = None) -> None:
        self.cases: list[Case] = []
        self.answer = answer

    def submit(
        self, call: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> Future[Any]:
        self.cases.append(args[0])
        future: Future[Any] = Future()
        future.set_result(self.answer(args[0], len(self.cases)) if self.answer else call(*args))
        return future


@pytest.fixture(scope="module")
def cells(tiny_models: Callable[..., Path]) -> list[Cell]:
    target = Model("tiny", "BF16", "quantize:tiny", str(tiny_models()))
    draft = Model("tiny", "noisy", "quantize:noisy", str(tiny_models(noise=0.1)))
    base = Cell(target, n_predict=24, n_threads=1, n_ctx=256, n_ubatch=32, ignore_eos=True)
    return [replace(base, drafter=DraftModel(draft, k)) for k in (1, 3)]


def test_a_timed_arm_does_what_the_engine_does(cells: list[Cell]) -> None:
    case = Case(cells[1], PROMPT)
    timed, trace = timing.timed_arm(case).arm, run_arm(case)
    assert timed.counts == Acceptance.of(trace)
    assert timed.tokens == timed.counts.committed == len(trace.ids) - 1
    assert timed.answered == len(trace.ids)
    assert 0 < timed.draft_s + timed.verify_s <= timed.decode_s
    assert timed.first_s + timed.decode_s <= timed.total_s

    vanilla = timing.timed_arm(case.vanilla).arm
    assert vanilla.tokens == len(run_arm(case.vanilla).ids) - 1
    assert (vanilla.draft_s, vanilla.verify_s, vanilla.counts) == (0.0, 0.0, Acceptance())


def test_arms_take_turns_and_every_other_round_goes_backwards(cells: list[Cell]) -> None:
    cases = [Case(cell, PROMPT) for cell in cells]
    workers = Here()
    found = timing.measure(workers, cases, rounds=2)
    vanilla = cases[0].vanilla
    assert workers.cases == [vanilla, *cases, *reversed(cases), vanilla]
    assert set(found.pairs) == {cell.key for cell in cells}
    for pair in found.pairs.values():
        assert (pair.prompt, pair.group) == ("one", "repetition")
        assert pair.baseline.runs == pair.speculative.runs == 2
    assert found.spent[vanilla.cell.key].tokens == 2 * 24
    assert found.failures == {}


def arm(case: Case) -> Arm:
    return Arm(1, 23, 24, 2.0, total_s=3.0)


def test_arms_of_two_processes_make_no_pair(cells: list[Cell]) -> None:
    cases = [Case(cell, PROMPT) for cell in cells]
    workers = Here(lambda case, number: timing.Timed(arm(case), process=min(number, 3)))
    found = timing.measure(workers, cases, rounds=2)
    # The first round has processes 1, 2, 3; from then on all arms run in process 3.
    assert {key: pair.baseline.runs for key, pair in found.pairs.items()} == {
        cell.key: 1 for cell in cells
    }
    assert found.spent[cells[0].key].seconds == 6.0


def test_a_failed_arm_costs_its_time_and_gives_no_pair(cells: list[Cell]) -> None:
    cases = [Case(cell, PROMPT) for cell in cells]

    def answer(case: Case, number: int) -> Any:
        if case == cases[1]:
            return Failure("verify 3", "aborted (SIGABRT)")
        return timing.Timed(arm(case), process=1)

    found = timing.measure(Here(answer), cases, rounds=1)
    assert set(found.pairs) == {cells[0].key}
    assert found.failures == {cells[1].key: "verify 3: aborted (SIGABRT)"}
    failed = found.spent[cells[1].key]
    assert (failed.seconds, failed.tokens) == (0.0, 0)
    assert failed.failed_s > 0


def test_warm_up_runs_every_arm_for_a_few_tokens(cells: list[Cell]) -> None:
    workers = Here()
    timing.warm_up(workers, [Case(cell, PROMPT) for cell in cells])
    assert [case.cell.drafter for case in workers.cases] == [None, *(c.drafter for c in cells)]
    assert {case.cell.n_predict for case in workers.cases} == {timing.WARM_UP}


def test_a_drafter_that_finds_nothing_commits_one_token_a_cycle(cells: list[Cell]) -> None:
    case = Case(replace(cells[0], drafter=NgramSimple(size_n=20)), PROMPT)
    found = timing.timed_arm(case).arm
    assert found.counts == Acceptance(cycles=23, committed=23)


def test_widths_are_timed_and_their_bits_compared(cells: list[Cell]) -> None:
    costs = timing.width_costs(Case(cells[0], PROMPT), widest=9, rounds=2)
    assert [cost.width for cost in costs] == list(range(1, 10))
    assert all(cost.seconds > 0 for cost in costs)
    changes = [s.cost.width for s in timing.steps(costs) if s.changed]
    bits = [cost.digest for cost in costs]
    assert changes == [w for w in range(2, 10) if bits[w - 1] != bits[w - 2]]


def test_steps_stand_out_from_what_rows_usually_add() -> None:
    seconds = [1.0, 1.1, 1.2, 2.0, 2.1, 2.2, 2.0]
    costs = [
        timing.WidthCost(i + 1, value, "a" if i < 3 else "b") for i, value in enumerate(seconds)
    ]
    found = list(timing.steps(costs))
    assert [s.cost.width for s in found if s.step] == [4]
    assert [s.cost.width for s in found if s.changed] == [4]
    assert [s.added for s in found] == pytest.approx([0.1, 0.1, 0.8, 0.1, 0.1, -0.2])
    assert list(timing.steps(costs[:1])) == []


def test_footprint(cells: list[Cell]) -> None:
    found = timing.footprint(Case(cells[0], PROMPT))
    sizes = [Path(cells[0].target.path).stat().st_size]
    assert found.load_s > 0
    assert found.peak_bytes > sum(sizes)
