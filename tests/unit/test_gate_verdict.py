"""The gate's verdict: every cause, every rule, acceptance either way, and the same as JUnit."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from junitparser import JUnitXml

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.compare import compare
from specbisect.diagnose.finding import Evidence, Finding, Label
from specbisect.gate.acceptance import Acceptance
from specbisect.gate.junit import junit
from specbisect.gate.policy import Policy
from specbisect.gate.verdict import GateVerdict, evaluate
from specbisect.store import Store
from specbisect.trace import Cycle, Failure, Trace

DRAFT = DraftModel(Model("m", "Q2_K", "sha256:d"), n_max=3)
CELL = Cell(Model("m", "Q8_0", "sha256:t"), DRAFT, n_predict=40)
PROMPT_IDS = (1, 2, 3)
STRICT: dict[str, Any] = {"schema": "specbisect.gate/1"}


def answer(prompt: int, n: int = 40) -> tuple[int, ...]:
    return tuple(1000 * prompt + 7 * i for i in range(n))


def arms(prompt: int, *, fork: int | None, accepted: int, shift: int) -> tuple[Trace, Trace]:
    """Both arms; every draft of three has its first `accepted` right, or is the answer from `shift` further on."""
    ids = answer(prompt)
    vanilla = Trace("vanilla", PROMPT_IDS, ids, "length", margins=(0.5,) * len(ids))
    own = ids if fork is None else (*ids[:fork], *(t + 1 for t in ids[fork:]))
    cycles, at = [], 0
    while at < len(own) - 4:
        right = own[at + 1 + shift : at + 4 + shift]
        draft = right if shift else tuple(t + 3 * (i >= accepted) for i, t in enumerate(right))
        cycles.append(Cycle(len(PROMPT_IDS) + at, (own[at], *draft), 0 if shift else accepted))
        at += cycles[-1].accepted + 1
    return vanilla, Trace(
        "speculative",
        PROMPT_IDS,
        own[: at + 1] if fork is None else own,
        "length",
        cycles=tuple(cycles),
        drafted=sum(c.drafted for c in cycles),
        accepted=sum(c.accepted for c in cycles),
    )


class Run:
    """A store to which finished cases are added, one by one."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._ordinals = itertools.count()

    def add(
        self,
        label: Label | None = None,
        *,
        cell: Cell = CELL,
        group: str = "chat",
        fork: int | None = None,
        accepted: int = 2,
        shift: int = 0,
        drafted: bool = True,
        failure: str = "",
        also: tuple[Label, ...] = (),
    ) -> str:
        """One case; its key."""
        ordinal = next(self._ordinals)
        case = Case(cell, Prompt(f"p{ordinal}", "text", group))
        vanilla, speculative = arms(ordinal, fork=fork, accepted=accepted, shift=shift)
        if fork is None:
            vanilla = replace(vanilla, ids=speculative.ids)
        if not drafted:
            speculative = replace(speculative, cycles=(), drafted=0, accepted=0)
        result = Failure("verify 3", failure) if failure else speculative
        verdict = compare(vanilla, result)
        with self.store.transaction():
            self.store.save_arm(case.vanilla.key, vanilla)
            self.store.save_arm(case.key, result)
            self.store.save_case(ordinal, case, verdict, result)
            if label is not None:
                finding = Finding(
                    case=case,
                    verdict=verdict,
                    label=label,
                    summary=f"it is {label}",
                    also=also,
                    evidence=(
                        Evidence(experiment="replay", run="again", outcome="rows differ\x1b[0m"),
                    ),
                    vanilla=vanilla,
                    speculative=result,
                )
                self.store.save_finding(case.key, finding.model_dump_json(by_alias=True))
        return case.key

    def judge(self, policy: dict[str, Any] | None = None, **options: Any) -> GateVerdict:
        """The verdict of the policy `STRICT` with these tables."""
        made = Policy.model_validate(STRICT | (policy or {}))
        return evaluate(self.store, self.store.rows(), made, **options)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Store.create(tmp_path / "run", "plan", {}) as store:
        yield Run(store)


def states(verdict: GateVerdict) -> dict[str, str]:
    return {check.subject: check.state for check in verdict.checks}


def said(verdict: GateVerdict, subject: str) -> str:
    (found,) = [check.said for check in verdict.checks if check.subject == subject]
    return found


def test_agreement_passes_and_says_how_far(run: Run) -> None:
    for _ in range(3):
        run.add("none")
    verdict = run.judge()
    assert (verdict.state, verdict.exit_code) == ("pass", 0)
    assert said(verdict, "agreement") == "no difference in 111 tokens over 3 prompts"


def test_agreement_says_when_rollback_was_not_tested(run: Run) -> None:
    run.add("none", accepted=3)
    verdict = run.judge()
    assert said(verdict, "agreement").endswith(
        "no drafted token was rejected, so rollback was not tested"
    )


@pytest.mark.parametrize(
    "label",
    ["state", "verification", "cross-sequence", "nondeterministic", "kernel-defect", "batch-width"],
)
def test_no_departure_is_allowed_by_silence(run: Run, label: Label) -> None:
    run.add("none")
    key = run.add(label, fork=9)
    verdict = run.judge()
    assert (verdict.state, verdict.exit_code) == ("fail", 1)
    (check,) = [c for c in verdict.checks if c.subject == label]
    assert (check.cell, check.cases) == (CELL, (key,))
    assert check.said == "1 of 2 prompts, first at token 9; none is allowed"


def test_a_silent_fault_fails_though_the_tokens_agree(run: Run) -> None:
    run.add("state")
    verdict = run.judge()
    assert verdict.exit_code == 1
    assert said(verdict, "state") == "1 of 1 prompt; none is allowed"


def test_a_departure_nobody_explained_is_unexplained(run: Run) -> None:
    run.add(None, fork=5)
    run.add("unexplained", fork=5)
    assert states(run.judge()) == {"unexplained": "fail"}


@pytest.mark.parametrize(
    ("options", "cause"),
    [({"drafted": False}, "unexercised"), ({"failure": "aborted (SIGABRT)"}, "failed")],
)
def test_what_was_not_tested_never_passes(run: Run, options: dict[str, Any], cause: str) -> None:
    run.add("none")
    run.add(**options)
    verdict = run.judge()
    assert (verdict.state, verdict.exit_code) == ("inconclusive", 3)
    assert states(verdict) == {"agreement": "pass", cause: "inconclusive"}


@pytest.mark.parametrize(
    ("least", "state"), [(1.0, "inconclusive"), (0.7, "pass"), (0.8, "inconclusive")]
)
def test_some_prompts_may_go_unexercised_and_are_not_counted(
    run: Run, least: float, state: str
) -> None:
    for _ in range(3):
        run.add("none")
    run.add(drafted=False)
    verdict = run.judge({"min_exercised": least})
    assert states(verdict) == {"agreement": "pass", "unexercised": state}
    assert said(verdict, "agreement") == "no difference in 111 tokens over 3 prompts"
    assert verdict.state_of(verdict.cases[-1]) == "inconclusive"
    (tokens, *_) = JUnitXml.fromstring(junit(verdict, "m").encode())
    assert (tokens.tests, tokens.skipped) == (4, 1)


def test_a_drafter_that_never_drafts_is_inconclusive_whatever_is_asked(run: Run) -> None:
    run.add(drafted=False)
    assert run.judge({"min_exercised": 0.0}).exit_code == 3


def test_nothing_at_all_is_inconclusive(run: Run) -> None:
    assert run.judge().exit_code == 3


def test_a_failure_elsewhere_takes_no_departure_back(run: Run) -> None:
    run.add("state", fork=9)
    run.add(failure="timeout")
    assert run.judge().exit_code == 1


def allow(**rule: Any) -> dict[str, Any]:
    return {"allow": [{"label": "batch-width", **rule}]}


@pytest.mark.parametrize(
    ("forked", "prompts", "rule", "state", "words"),
    [
        (1, 30, {"rate": 0.2}, "pass", "at most 14.9 % (95 % sure), 20 % are allowed"),
        (1, 10, {"rate": 0.2}, "inconclusive", "22 prompts without another would show it"),
        (9, 10, {"rate": 0.2}, "fail", "at least 60.6 % (95 % sure), 20 % are allowed"),
        (3, 10, {"rate": 0.2}, "inconclusive", "more prompts are needed to be 95 % sure"),
        (10, 10, {"rate": 1.0}, "pass", "at most 100 %"),
        (1, 10, {"rate": 0.2, "confidence": 0.5}, "pass", "at most 16.2 % (50 % sure)"),
        (1, 30, {"rate": 0.2, "not_before": 10}, "fail", "none is allowed before token 10"),
        (1, 30, {"rate": 0.2, "not_before": 9}, "pass", "first at token 9"),
        (1, 30, {"rate": 0.2, "quant": "F16"}, "fail", "none is allowed"),
    ],
)
def test_rates(
    run: Run, forked: int, prompts: int, rule: dict[str, Any], state: str, words: str
) -> None:
    for i in range(prompts):
        run.add("batch-width", fork=9) if i < forked else run.add("none")
    verdict = run.judge(allow(**rule))
    assert states(verdict)["batch-width"] == state
    assert words in said(verdict, "batch-width")


def test_prompts_under_another_rule_are_no_evidence_for_this_one(run: Run) -> None:
    run.add("batch-width", fork=9, group="code")
    for _ in range(50):
        run.add("none", group="chat")
    policy = {
        "allow": [
            {"label": "batch-width", "rate": 0.2},
            {"label": "batch-width", "group": "code", "rate": 0.3},
        ]
    }
    verdict = run.judge(policy)
    assert said(verdict, "batch-width") == (
        "1 of 1 prompt, first at token 9, and 30 % are allowed; more prompts are needed to be 95 % sure"
    )
    assert states(verdict)["batch-width"] == "inconclusive"


def test_cells_are_judged_one_by_one(run: Run) -> None:
    other = replace(CELL, drafter=replace(DRAFT, n_max=7))
    run.add("batch-width", fork=9)
    run.add("none", cell=other)
    verdict = run.judge()
    failing = [check.cell for check in verdict.checks if check.state == "fail"]
    assert failing == [CELL]


def acceptance(**rule: Any) -> dict[str, Any]:
    return {"acceptance": [{"tolerance": 0.05, "min_drafted": 20, **rule}]}


def locked(accepted: int) -> Acceptance:
    """What a run of three prompts has when `accepted` of every three drafted tokens are right."""
    parts = [Acceptance.of(arms(i, fork=None, accepted=accepted, shift=0)[1]) for i in range(3)]
    return sum(parts, Acceptance())


@pytest.mark.parametrize(
    ("before", "state", "words"),
    [
        (2, "pass", "0.667 of 108 drafted tokens accepted, locked 0.667 ± 0.05"),
        (1, "fail", "locked 0.333 ± 0.05: it rose"),
        (3, "fail", "locked 1.000 ± 0.05: it fell"),
    ],
)
def test_acceptance_may_move_neither_way(run: Run, before: int, state: str, words: str) -> None:
    for _ in range(3):
        run.add("none")
    verdict = run.judge(acceptance(), baseline=lambda cell, group: locked(before))
    assert states(verdict) == {"agreement": "pass", "acceptance": state}
    assert words in said(verdict, "acceptance")
    assert verdict.exit_code == (0 if state == "pass" else 1)


def test_acceptance_place_by_place(run: Run) -> None:
    for _ in range(3):
        run.add("none")
    rule = acceptance(positions=3, tolerance=0.4)
    verdict = run.judge(rule, baseline=lambda cell, group: locked(3))
    # Two of three drafted tokens right, instead of three: at the first two places nothing changed.
    assert states(verdict) == {
        "agreement": "pass",
        "acceptance": "pass",
        "acceptance at place 1": "pass",
        "acceptance at place 2": "pass",
        "acceptance at place 3": "fail",
    }


def test_acceptance_by_group(run: Run) -> None:
    for group, accepted in (("chat", 2), ("code", 1)):
        run.add("none", group=group, accepted=accepted)
    rule = acceptance(group="code", min_drafted=10)
    verdict = run.judge(rule, baseline=lambda cell, group: locked(2))
    assert states(verdict) == {"agreement": "pass", "acceptance (code)": "fail"}


def test_a_floor_needs_no_lock(run: Run) -> None:
    for _ in range(3):
        run.add("none")
    assert states(run.judge(acceptance(at_least=0.6)))["acceptance"] == "pass"
    verdict = run.judge(acceptance(at_least=0.7))
    assert "below the floor of 0.7" in said(verdict, "acceptance")
    assert verdict.exit_code == 1


def test_without_a_lock_acceptance_is_not_compared(run: Run) -> None:
    run.add("none")
    assert states(run.judge(acceptance())) == {"agreement": "pass"}


def test_a_lock_that_knows_nothing_of_a_drafter_is_inconclusive(run: Run) -> None:
    run.add("none")
    verdict = run.judge(acceptance(), baseline=lambda cell, group: None)
    assert states(verdict)["acceptance"] == "inconclusive"


def test_too_few_drafted_tokens_say_too_little(run: Run) -> None:
    run.add("none")
    verdict = run.judge(acceptance(min_drafted=1000), baseline=lambda cell, group: locked(2))
    assert said(verdict, "acceptance") == (
        "36 tokens drafted, which says too little (min_drafted = 1000)"
    )
    assert verdict.exit_code == 3


def test_a_drafter_that_fell_silent(run: Run) -> None:
    run.add(drafted=False)
    assert states(run.judge(acceptance())) == {"unexercised": "inconclusive"}
    verdict = run.judge(acceptance(), baseline=lambda cell, group: locked(2))
    assert said(verdict, "acceptance") == "nothing drafted, where 108 tokens were locked"
    assert verdict.exit_code == 1


def test_a_shifted_draft_passes_its_tokens_and_fails_its_acceptance(run: Run) -> None:
    for _ in range(3):
        run.add("none", shift=1)
    verdict = run.judge(acceptance(), baseline=lambda cell, group: locked(2))
    assert states(verdict) == {"unexercised": "inconclusive", "acceptance": "fail"}
    assert verdict.exit_code == 1
    assert "it fell; shift by one explains it: drafts moved by +1 match 1.00" in said(
        verdict, "acceptance"
    )


def test_a_diagnosed_misalignment_needs_no_policy(run: Run) -> None:
    run.add("draft-alignment", shift=1)
    verdict = run.judge()
    assert states(verdict)["alignment"] == "fail"
    assert said(verdict, "alignment").startswith("shift by one explains it")


def test_a_misalignment_beside_another_cause_is_quality(run: Run) -> None:
    run.add("batch-width", fork=9, also=("draft-alignment",))
    verdict = run.judge(allow(rate=1.0))
    assert states(verdict) == {"batch-width": "pass", "alignment": "fail"}


@pytest.fixture
def mixed(run: Run) -> GateVerdict:
    run.add("none")
    run.add("batch-width", fork=9)
    run.add("state", fork=7)
    run.add(drafted=False)
    run.add(failure="killed (SIGKILL)")
    return run.judge(
        acceptance(at_least=0.99) | allow(rate=1.0),
        forced=["d.gguf does not fit t.gguf: token 5 is 'a' instead of 'b'"],
        accepted=['target[0].quant: "Q8_0" → "Q6_K"'],
    )


def test_junit_has_one_case_per_case_and_the_evidence(mixed: GateVerdict) -> None:
    text = junit(mixed, "gate.toml")
    suites = {suite.name: suite for suite in JUnitXml.fromstring(text.encode())}
    tokens = list(suites["tokens"])
    assert [case.name for case in tokens] == [case.name for case in mixed.cases]
    assert {case.classname for case in tokens} == {"m.Q8_0"}
    kinds = [type(case.result[0]).__name__ if case.result else "pass" for case in tokens]
    assert kinds == ["pass", "pass", "Failure", "Skipped", "Error"]
    failure = tokens[2].result[0]
    assert (failure.type, failure.message) == ("state", "state: it is state")
    assert "replay: rows differ" in failure.text
    assert "1 of 3 prompts, first at token 7; none is allowed" in failure.text
    assert "\x1b" not in text
    assert "replay: rows differ" in tokens[1].system_out
    (quality,) = suites["quality"]
    assert "below the floor of 0.99" in quality.result[0].message
    counted = [(s.tests, s.failures, s.errors, s.skipped) for s in suites.values()]
    assert counted == [(5, 1, 1, 1), (1, 1, 0, 0)]


def test_junit_marks_what_was_forced_and_what_was_meant(mixed: GateVerdict) -> None:
    root = ET.fromstring(junit(mixed, "gate.toml"))
    for suite in root:
        found = {p.get("name"): p.get("value") for p in suite.iter("property")}
        assert found == {"forced": mixed.forced[0], "accepted": mixed.accepted[0]}
