import gc
import itertools
from collections import Counter
from concurrent.futures import Future
from concurrent.futures._base import DoneAndNotDoneFutures
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fakes
from specbisect import runner
from specbisect.cell import Case
from specbisect.errors import BadInput, EngineFault
from specbisect.runner import run
from specbisect.store import Store
from specbisect.trace import ArmResult, Failure, Trace
from specbisect.workers import WorkerBug, Workers


class Inline:
    """Calls run in this process, when the runner waits for them and in the order that `choose` gives."""

    def __init__(self, slots=2, choose=lambda futures: futures[:1]):
        self.slots = slots
        self.submitted: list[Case] = []
        self.most = 0
        self._choose = choose
        self._calls = {}

    def submit(self, call, *args, timeout=None):
        self.submitted += args
        future = Future()
        self._calls[future] = call, args
        self.most = max(self.most, len(self._calls))
        return future

    def wait(self, futures, return_when):
        chosen = self._choose(list(futures))
        for future in chosen:
            call, args = self._calls.pop(future)
            try:
                future.set_result(call(*args))
            except EngineFault as fault:
                future.set_result(Failure(fault.stage, fault.reason))
            except BaseException as error:
                future.set_exception(error)
        return DoneAndNotDoneFutures(set(chosen), set(futures) - set(chosen))

    def run(self, *args, **options):
        with mock.patch.object(runner, "wait", self.wait):
            return run(*args, self, **{"call": fakes.arm} | options)


def new_store(path: Path) -> Store:
    return Store.create(path, "plan", {})


@pytest.fixture
def store(tmp_path):
    with new_store(tmp_path / "run") as made:
        yield made


def test_every_case_gets_the_verdict_of_its_two_arms(store):
    summary = Inline().run(fakes.plan(), store)
    cases = list(fakes.plan())
    assert [row.id for row in store.rows()] == [case.key for case in cases]
    for case, row in zip(cases, store.rows(), strict=True):
        vanilla, speculative = fakes.arm(case.vanilla), fakes.arm(case)
        assert store.arm(case.vanilla.key) == vanilla
        assert store.arm(case.key) == speculative
        assert row.outcome == ("agree" if vanilla.ids == speculative.ids else "fork")
    assert summary.outcomes == Counter(row.outcome for row in store.rows())
    assert summary.forks > 0
    assert (summary.done, summary.resumed, summary.failures) == (24, 0, 0)


def test_a_vanilla_arm_runs_once_for_all_drafters(store):
    workers = Inline(slots=8)
    workers.run(fakes.plan(quants=2, drafters=5), store)
    runs = Counter(case.cell.drafter is None for case in workers.submitted)
    assert runs == {True: 2 * 4, False: 2 * 4 * 5}
    assert store.totals().vanilla_runs == 8


def test_no_more_calls_are_out_than_run_and_the_first_in_the_plan_goes_first(store):
    workers = Inline(slots=3)
    workers.run(fakes.plan(), store)
    assert workers.most == 3
    targets = [case.cell.target.quant for case in workers.submitted]
    assert targets == sorted(targets)


def test_a_plan_is_read_only_as_far_as_work_is_needed(store):
    taken, ahead = [], []
    plan = (taken.append(case) or case for case in fakes.plan(quants=50))
    Inline(slots=2).run(
        plan, store, progress=lambda summary: ahead.append(len(taken) - summary.done)
    )
    assert len(ahead) == 600
    assert max(ahead) <= 2


def test_cases_that_wait_for_one_vanilla_arm_are_not_all_read(store):
    taken = []
    plan = (taken.append(case) or case for case in fakes.plan(1, 1000, ("",)))

    class Enough(Exception):
        pass

    def first_call(case: Case) -> Trace:
        raise Enough

    with pytest.raises(Enough):
        Inline(slots=2).run(plan, store, call=first_call)
    assert len(taken) == runner.MAX_WAITING


def test_traces_of_finished_cases_are_let_go(store):
    alive = []
    workers = Inline(slots=4)
    gc.freeze()  # what is there already need not be looked through every time
    try:
        workers.run(
            fakes.plan(quants=5, drafters=4),
            store,
            progress=lambda _: alive.append(sum(type(o) is Trace for o in gc.get_objects())),
        )
    finally:
        gc.unfreeze()
    before = min(alive)
    assert max(alive) <= before + 4 * workers.slots


def test_what_is_stored_is_not_run_again(store):
    Inline().run(itertools.islice(fakes.plan(), 10), store)
    workers = Inline()
    events = []
    summary = workers.run(fakes.plan(), store, progress=events.append)
    assert (summary.done, summary.resumed) == (24, 10)
    assert [event.done for event in events] == list(range(1, 25))
    ran = {case.key for case in workers.submitted}
    assert ran.isdisjoint(case.key for case in itertools.islice(fakes.plan(), 10))
    idle = Inline()
    assert idle.run(fakes.plan(), store).resumed == 24
    assert idle.submitted == []


def test_only_wanted_cases_run_and_keep_their_place_in_the_plan(store):
    Inline().run(fakes.plan(), store, wanted=lambda case: case.cell.target.quant == "Q1")
    assert [row.ordinal for row in store.rows()] == list(range(12, 24))
    Inline().run(fakes.plan(), store)
    assert [row.id for row in store.rows()] == [case.key for case in fakes.plan()]


def test_a_failed_vanilla_arm_fails_its_cases_and_spares_their_speculative_arms(store):
    workers = Inline()
    workers.run(fakes.plan(1, 3, ("", "fault vanilla")), store)
    assert [row.outcome == "failed" for row in store.rows()] == [False, True] * 3
    assert {row.reason for row in store.rows(outcome="failed")} == {
        "vanilla arm, prompt: llama_decode returned 1"
    }
    assert sum(case.prompt.text == "fault vanilla" for case in workers.submitted) == 1


def test_failed_cases_are_run_again_only_on_request(store):
    plan = list(fakes.plan(1, 3, ("fault vanilla", "fault speculative")))
    failing = Inline()
    assert failing.run(plan, store).failures == 6
    idle = Inline()
    assert idle.run(plan, store).failures == 6
    assert idle.submitted == []

    stubborn = Inline()
    assert stubborn.run(plan, store, retry_failed=True).failures == 6
    assert Counter(stubborn.submitted) == Counter(failing.submitted) - Counter(
        [plan[1].vanilla]  # the vanilla arm that has a trace
    )

    mended = Inline()
    with mock.patch.dict(fakes.MISHAPS, fault=lambda: None):
        assert mended.run(plan, store, retry_failed=True).failures == 0
    assert len(mended.submitted) == len(stubborn.submitted) + 3
    assert {row.outcome for row in store.rows()} <= {"agree", "fork"}


@pytest.mark.parametrize(("mishap", "error"), [("bad-input", BadInput), ("bug", KeyError)])
def test_an_error_that_is_no_failure_ends_the_run_and_what_has_ended_is_saved(store, mishap, error):
    texts = ["", "", f"{mishap} speculative", ""]
    workers = Inline(slots=4, choose=lambda futures: futures)
    with pytest.raises(error):
        workers.run(fakes.plan(1, 1, texts), store)
    assert [row.prompt_id for row in store.rows()] == ["0", "1", "3"]


def test_an_interrupt_saves_what_has_ended(store):
    class Interrupted(Inline):
        def wait(self, futures, return_when):
            if len(self.submitted) == 6:
                super().wait(futures, return_when)
                raise KeyboardInterrupt
            return super().wait(futures, return_when)

    workers = Interrupted(slots=2, choose=lambda futures: futures)
    with pytest.raises(KeyboardInterrupt):
        workers.run(fakes.plan(), store)
    for case in workers.submitted:
        assert store.arm(case.key) == fakes.arm(case)


def test_an_interrupt_while_saving_loses_nothing(store, monkeypatch):
    save_case = store.save_case
    interrupts = [KeyboardInterrupt]

    def interrupted(*args):
        save_case(*args)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(store, "save_case", interrupted)
    workers = Inline(slots=2)
    with pytest.raises(KeyboardInterrupt):
        workers.run(fakes.plan(), store)
    assert [row.ordinal for row in store.rows()] == [0]
    workers.run(fakes.plan(), store)
    assert len(list(store.rows())) == 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a store holds after a run in which nothing went wrong, by the plan's arguments."""

    def content_of(*plan):
        path = tmp_path_factory.mktemp("undisturbed")
        with new_store(path) as store:
            Inline(slots=1).run(fakes.plan(*plan), store)
        return fakes.content(path)

    return content_of


MIXED = 2, 3, ("", "fault vanilla", "", "fault speculative")


@settings(max_examples=20, deadline=None)
@given(data=st.data(), slots=st.integers(1, 6))
def test_any_order_of_completion_gives_the_same_store(tmp_path_factory, undisturbed, data, slots):
    path = tmp_path_factory.mktemp("shuffled")

    def choose(futures):
        return data.draw(st.lists(st.sampled_from(futures), min_size=1, unique=True))

    with new_store(path) as store:
        Inline(slots, choose).run(fakes.plan(*MIXED), store)
    assert fakes.content(path) == undisturbed(*MIXED)


# With real processes


def test_every_mishap_is_a_failed_case_and_the_others_are_untouched(store):
    expected = {
        "": "",
        "abort vanilla": "vanilla arm, verify 12: aborted (SIGABRT)",
        "segfault speculative": "speculative arm, load: killed by SIGSEGV",
        "hang speculative": "speculative arm, verify 7: no answer within 1 s",
        "exhaust-memory speculative": "speculative arm, context: out of memory",
    }
    with Workers(jobs=2, timeout=1) as workers:
        summary = run(fakes.plan(1, 2, tuple(expected)), store, workers, call=fakes.arm)
    assert [row.reason for row in store.rows()] == list(expected.values()) * 2
    assert summary.failures == 8
    failed = [case for case in fakes.plan(1, 2, tuple(expected)) if "segfault" in case.prompt.text]
    results: list[ArmResult | None] = [store.arm(case.key) for case in failed]
    assert results == [Failure("load", "killed by SIGSEGV")] * 2


def test_our_own_defects_are_not_taken_for_failures(store):
    with Workers(jobs=1) as workers, pytest.raises(WorkerBug, match="KeyError: 3"):
        run(fakes.plan(1, 1, ("bug vanilla",)), store, workers, call=fakes.arm)


def test_two_workers_find_what_one_finds(tmp_path, undisturbed):
    with new_store(tmp_path) as store, Workers(jobs=2) as workers:
        run(fakes.plan(*MIXED), store, workers, call=fakes.arm)
    assert strip_logs(fakes.content(tmp_path)) == strip_logs(undisturbed(*MIXED))


def strip_logs(found):
    """Without the results of failed arms, which hold what the process printed."""
    traces = {key for key, _, resolved, *_ in found["arms"] if resolved}
    return found | {"results": [row for row in found["results"] if row[0] in traces]}
