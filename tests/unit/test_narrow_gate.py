"""The gate: what it lets pass, what it runs and how often, and what of that is on disk before it does."""

import threading
from dataclasses import replace

import pytest

from specbisect.cell import AXES, Case, Cell, DraftModel, Model, Prompt, Scripted
from specbisect.narrow.candidate import (
    Candidate,
    Patch,
    Weights,
    in_width,
    own_tokens,
    widths_only,
)
from specbisect.narrow.ddmin import Outcome, OutOfBudget
from specbisect.narrow.explain import near
from specbisect.narrow.gate import Budget, Gate, Memory, Seen, StoredJournal, Wanted
from specbisect.store import Store
from specbisect.trace import Counters

STILL, DIFFERENT, UNRESOLVED = Outcome
CELL = Cell(
    Model("m", "Q4_K_M", "sha256:a"),
    DraftModel(Model("d", "Q2_K", "sha256:b"), n_max=7),
    n_ubatch=64,
    type_k="q8_0",
    n_predict=50,
)
ORIGINAL = Candidate(Case(CELL, Prompt("p", ids=(1, 2, 3, 4))))
SHOWS = Seen("batch-width", "at-fork", fork=3, counters=Counters(decoded_tokens=10))
NOT = Seen("none", counters=Counters(decoded_tokens=20))
WANTED = Wanted("batch-width", "at-fork")
SIMPLER = ORIGINAL.but(n_ubatch=512)


class Says:
    """A trial that gives out answers in order, then the last one for ever."""

    def __init__(self, *answers: Seen) -> None:
        self.answers = list(answers)
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Seen:
        self.asked.append(candidate)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def gate(*answers: Seen, **how) -> Gate:
    made = Gate(ORIGINAL, how.pop("wanted", WANTED), Says(*answers), **how)
    assert made.consider(ORIGINAL) is made.wanted.outcome(made.shown)
    return made


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (SHOWS, STILL),
        (NOT, DIFFERENT),
        (Seen("failed", reason="aborted"), UNRESOLVED),
        (Seen("unresolved"), UNRESOLVED),
        (Seen("state"), UNRESOLVED),
        (Seen("batch-width", "accumulated"), UNRESOLVED),
        (Seen("not-engaged"), UNRESOLVED),
    ],
)
def test_only_the_same_label_and_sub_kind_is_the_same(seen: Seen, outcome: Outcome) -> None:
    tried = gate(SHOWS, seen)
    assert tried.consider(SIMPLER) is outcome
    assert tried.best == (SIMPLER if outcome is STILL else ORIGINAL)


def test_what_is_not_simpler_is_not_run() -> None:
    tried = gate(SHOWS)
    assert tried.consider(ORIGINAL.but(n_threads=3)) is UNRESOLVED
    assert tried.consider(SIMPLER) is STILL
    assert tried.consider(ORIGINAL.but(type_k="f32")) is UNRESOLVED  # the best is simpler by now
    assert tried.trials == 2


def test_what_was_tried_is_not_tried_again() -> None:
    tried = gate(SHOWS, NOT)
    for _ in range(3):
        assert tried.consider(SIMPLER) is DIFFERENT
    elsewhere = replace(CELL.target, path="/elsewhere", name="other")
    assert tried.consider(SIMPLER.but(target=Weights.of(elsewhere))) is DIFFERENT
    assert tried.trials == 2
    assert tried.counters.decoded_tokens == 30


@pytest.mark.parametrize("parts", [{"prompt": ()}, {"flash_attn": "off", "type_v": "q4_0"}])
def test_what_cannot_run_is_no_trial(parts: dict) -> None:
    tried = gate(SHOWS)
    assert tried.observe(ORIGINAL.but(**parts)).label == "unresolved"
    assert tried.trials == 1


@pytest.mark.parametrize(
    ("answers", "runs", "outcome"),
    [
        ([SHOWS, SHOWS], 2, STILL),
        ([SHOWS, NOT, SHOWS], 3, STILL),
        ([NOT, NOT], 2, DIFFERENT),
        ([NOT, SHOWS, NOT], 3, UNRESOLVED),
        ([NOT, Seen("state"), NOT], 2, DIFFERENT),
        ([Seen("failed"), SHOWS, SHOWS], 3, STILL),
    ],
)
def test_it_is_shown_when_two_of_three_runs_show_it(
    answers: list[Seen], runs: int, outcome: Outcome
) -> None:
    trial = Says(SHOWS, SHOWS, *answers)
    tried = Gate(ORIGINAL, replace(WANTED, needed=2, runs=3), trial)
    assert tried.consider(ORIGINAL) is STILL
    assert tried.consider(SIMPLER) is outcome
    assert len(trial.asked) == 2 + runs
    assert tried.trials == 2


def test_a_budget_of_trials_is_kept_to() -> None:
    tried = gate(SHOWS, budget=Budget(trials=2))
    assert tried.consider(SIMPLER) is STILL
    with pytest.raises(OutOfBudget):
        tried.consider(SIMPLER.but(type_k="f16"))
    assert tried.consider(SIMPLER) is STILL  # known already
    assert tried.best == SIMPLER


def test_a_budget_of_time_begins_with_the_first_trial() -> None:
    budget = Budget(seconds=1e-9)
    assert budget.allows(0) in (True, False)
    with pytest.raises(OutOfBudget):
        Gate(ORIGINAL, WANTED, Says(SHOWS), budget=budget).consider(ORIGINAL)


def test_several_run_at_once_and_are_entered_in_order() -> None:
    together = threading.Barrier(2, timeout=30)

    def meets(candidate: Candidate) -> Seen:
        together.wait()
        return Seen("none", fork=candidate.cell.n_threads)

    order: list[str] = []

    class Journal(Memory):
        def end(self, key: str, seen: Seen | None) -> None:
            order.append(key)

    tried = Gate(ORIGINAL, WANTED, meets, Journal(), jobs=2)
    candidates = [ORIGINAL.but(n_threads=n) for n in (1, 2, 3, 4, 1)]
    assert [seen.fork for seen in tried.observe_all(candidates)] == [1, 2, 3, 4, 1]
    assert order == [c.key for c in candidates[:4]]


def test_several_at_once_stay_within_the_budget() -> None:
    tried = gate(SHOWS, jobs=2, budget=Budget(trials=4))
    with pytest.raises(OutOfBudget):
        tried.observe_all([ORIGINAL.but(n_threads=n) for n in range(1, 9)])
    assert tried.trials == 4


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "run", "plan", {}) as made:
        yield made


def test_a_trial_is_in_the_journal_before_it_runs(store) -> None:
    def looks(candidate: Candidate) -> Seen:
        (*_, entry) = store.trials("search")
        assert (entry.candidate, entry.result) == (candidate.key, None)
        return SHOWS

    tried = Gate(ORIGINAL, WANTED, looks, StoredJournal(store, "search"))
    assert tried.consider(ORIGINAL) is STILL
    (entry,) = store.trials("search")
    assert entry.result is not None


def test_a_search_knows_what_an_earlier_one_found(store) -> None:
    first = gate(SHOWS, NOT, journal=StoredJournal(store, "search"))
    first.consider(SIMPLER)
    second = gate(Seen("state"), journal=StoredJournal(store, "search"), budget=Budget(trials=1))
    assert second.shown == SHOWS
    assert second.consider(SIMPLER) is DIFFERENT
    assert (second.trials, second.spent, second.counters) == (2, 0, first.counters)
    assert second.observe(ORIGINAL.but(n_threads=1)).label == "state"


def test_a_trial_that_took_everything_along_is_a_failed_one(store) -> None:
    store.begin_trial("search", SIMPLER.key)  # and then the machine went down
    tried = gate(SHOWS, journal=StoredJournal(store, "search"))
    assert tried.observe(SIMPLER).label == "failed"
    again = gate(SHOWS, journal=StoredJournal(store, "search", retry=True))
    assert again.observe(SIMPLER) == SHOWS


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trial_that_was_interrupted_says_nothing(store, jobs: int) -> None:
    def interrupted(candidate: Candidate) -> Seen:
        raise KeyboardInterrupt

    journal = StoredJournal(store, "search")
    with pytest.raises(KeyboardInterrupt):
        Gate(ORIGINAL, WANTED, interrupted, journal, jobs=jobs).observe_all([ORIGINAL, SIMPLER])
    tried = gate(SHOWS, journal=StoredJournal(store, "search"))
    assert tried.consider(SIMPLER) is STILL


def test_patches_combine_and_the_later_one_wins() -> None:
    one, two = Patch.of(n_ubatch=8, prompt=(1,)), Patch.of(n_ubatch=4, type_k="f16")
    assert one | two == Patch.of(n_ubatch=4, prompt=(1,), type_k="f16")
    assert (len(Patch()), len(one), len(one | two)) == (0, 2, 3)
    assert (one | two).apply(ORIGINAL.case) == two.apply(one.apply(ORIGINAL.case))
    assert Patch().apply(ORIGINAL.case) == ORIGINAL.case


def test_two_ways_to_one_case_are_one_candidate() -> None:
    one = ORIGINAL.but(n_ubatch=8).but(n_ubatch=512)
    assert one.patch != Patch()
    assert one.key == SIMPLER.key
    assert ORIGINAL.but(n_ubatch=64).key == ORIGINAL.key


BATCH = ORIGINAL.but(drafter=Scripted(((5, (7, 0, 8)),)))
MIXED = Weights(Model("m", "Q8_0+2", "x:1"), "Q4_K_M", kept=("a", "b"))


@pytest.mark.parametrize(
    ("simple", "complex"),
    [
        (ORIGINAL.but(engine="libllama"), ORIGINAL.but(engine="server")),
        (ORIGINAL.but(engine="binding"), ORIGINAL.but(engine="server")),
        (ORIGINAL.but(drafter=widths_only(16)), ORIGINAL),
        (
            ORIGINAL.but(drafter=Scripted(((1, (2,)), (3, (4,))))),
            ORIGINAL.but(drafter=widths_only(2)),
        ),
        (BATCH, ORIGINAL.but(drafter=Scripted(((1, (2,)), (3, (4,)))))),
        (
            ORIGINAL.but(target=Weights(Model("m", "Q8_0", "x:2"), "Q8_0")),
            ORIGINAL.but(n_ubatch=512),
        ),
        (ORIGINAL.but(drafter=in_width(CELL.drafter, 3)), ORIGINAL.but(n_ubatch=512, type_k="f16")),
        (ORIGINAL.but(type_k="f16"), ORIGINAL.but(n_predict=2, prompt=(1,))),
        (ORIGINAL.but(type_k="f32"), ORIGINAL),
        (ORIGINAL.but(n_predict=2), ORIGINAL.but(prompt=(1,))),
        (ORIGINAL.but(prompt=(9, 9, 9)), ORIGINAL),
        (BATCH.but(drafter=Scripted(((5, (7, 0, 0)),))), BATCH),
        (BATCH.but(target=MIXED), BATCH),
        (BATCH.but(target=replace(MIXED, kept=("a",))), BATCH.but(target=MIXED)),
    ],
)
def test_the_declared_order(simple: Candidate, complex: Candidate) -> None:
    assert simple.complexity < complex.complexity


def test_a_draft_too_long_for_a_width_goes_on_in_the_next_batch() -> None:
    drafts = Scripted(((1, (10, 11, 12, 13, 14, 15, 16)), (20, (30,))))
    assert in_width(drafts, 4) == Scripted(((1, (10, 11, 12)), (5, (14, 15, 16)), (20, (30,))))
    assert in_width(drafts, 8) == drafts
    assert in_width(widths_only(8), 4) == widths_only(4)


def test_an_answer_in_batches_of_one_width() -> None:
    ids = tuple(range(10, 19))
    assert own_tokens(ids, 4) == ((1, (11, 12, 13)), (5, (15, 16, 17)))
    assert own_tokens(ids, 2) == ((1, (11,)), (3, (13,)), (5, (15,)), (7, (17,)))
    assert own_tokens(ids[:1], 4) == ()


@pytest.mark.parametrize(
    ("axis", "value", "around"),
    [
        ("n_ubatch", 8, [7, 9, 512]),
        ("n_threads", 0, [1, 0]),
        ("flash_attn", "on", ["auto", "off"]),
        ("host_class", "avx2", [""]),
    ],
)
def test_values_around_one_are_the_nearest_and_the_default(axis, value, around):
    assert near(AXES[axis], value) == around
