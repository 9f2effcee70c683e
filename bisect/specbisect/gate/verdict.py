"""The gate's verdict: every case and every drafter of a run against a policy and a locked baseline.

Prompts are what a release is sampled by, so rates are judged cell by cell over prompts: the cells of a run share their
prompts, and counting them together would count the same evidence again and again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specbisect.cell import Cell
from specbisect.compare import Outcome
from specbisect.gate import policy as rules
from specbisect.gate.acceptance import Acceptance, by_group
from specbisect.gate.causes import NONE, UNEXERCISED, UNTESTED, Judged, judge
from specbisect.gate.policy import Allow, Policy
from specbisect.gate.quality import quality
from specbisect.store import Row, Store

State = Literal["pass", "fail", "inconclusive"]

Baseline = Callable[[Cell, str], Acceptance | None]
"""The locked acceptance of a cell on a prompt group."""


@dataclass(frozen=True, slots=True)
class Check:
    """One answer about one cell: what was asked, and in a sentence how it stands. `cases` are those it rests on."""

    kind: Literal["tokens", "quality"]
    cell: Cell
    subject: str
    state: State
    said: str
    cases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """All answers. `forced` names mismatches that were overridden, `accepted` changes of identity that were meant."""

    checks: tuple[Check, ...]
    cases: tuple[Judged, ...]
    acceptance: dict[tuple[Cell, str], Acceptance] = field(repr=False)
    forced: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        """Fail when any check fails; else inconclusive when any is, or when nothing was checked; else pass."""
        states = {check.state for check in self.checks}
        if "fail" in states:
            return "fail"
        return "pass" if states == {"pass"} else "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 3 inconclusive."""
        return {"pass": 0, "fail": 1, "inconclusive": 3}[self.state]

    def of(self, case: Judged) -> Check:
        """The check that the tokens of `case` are part of."""
        return next(c for c in self.checks if c.kind == "tokens" and case.row.id in c.cases)

    def state_of(self, case: Judged) -> State:
        """How `case` itself stands: one that was not tested never passes, however many others were."""
        return "inconclusive" if case.cause in UNTESTED else self.of(case).state


def evaluate(
    store: Store,
    rows: Iterable[Row],
    policy: Policy,
    baseline: Baseline | None = None,
    *,
    forced: Sequence[str] = (),
    accepted: Sequence[str] = (),
) -> GateVerdict:
    """Judge the finished and diagnosed cases `rows` of `store`.

    Without a `baseline` acceptance is only held against the floors that the policy gives in numbers.
    """
    rows = list(rows)
    cases = list(judge(store, rows))
    counts = by_group(store, rows)
    by_cell: dict[Cell, list[Judged]] = {}
    for case in cases:
        by_cell.setdefault(case.row.cell, []).append(case)
    checks: list[Check] = []
    for cell, own in by_cell.items():
        checks += _tokens(cell, own, policy)
        checks += (
            Check("quality", cell, q.subject, q.state, q.said, q.cases)
            for q in quality(store, cell, own, counts, policy, baseline)
        )
    return GateVerdict(tuple(checks), tuple(cases), counts, tuple(forced), tuple(accepted))


def _tokens(cell: Cell, cases: Sequence[Judged], policy: Policy) -> Iterator[Check]:
    """One check for each cause, and rule about it, among the cases of a cell; every case is in exactly one."""
    agreeing = [case for case in cases if case.cause == NONE]
    if agreeing:
        tokens = sum(case.row.compared for case in agreeing)
        said = f"no difference in {tokens} tokens over {_prompts(len(agreeing))}"
        if not any(case.row.rejected for case in cases):
            said += "; no drafted token was rejected, so rollback was not tested"
        yield Check("tokens", cell, "agreement", "pass", said, _keys(agreeing))
    for cause in UNTESTED:
        if untested := [case for case in cases if case.cause == cause]:
            said = f"{len(untested)} of {_prompts(len(cases))} {cause}"
            state: State = "inconclusive"
            exercised = 1 - len(untested) / len(cases)
            if cause == UNEXERCISED and exercised >= max(policy.min_exercised, 1 / len(cases)):
                state, said = "pass", f"{said}; not counted"
            yield Check("tokens", cell, cause, state, said, _keys(untested))
    for cause in sorted({case.cause for case in cases if case.departs}):
        shares: dict[int, list[Judged]] = {}
        for case in cases:
            if case.cause not in UNTESTED:
                shares.setdefault(id(policy.allowed(cause, case.row)), []).append(case)
        for share in shares.values():
            if departing := [case for case in share if case.cause == cause]:
                rule = policy.allowed(cause, departing[0].row)
                state, said = _departures(departing, len(share), rule)
                yield Check("tokens", cell, cause, state, said, _keys(departing))


def _departures(cases: Sequence[Judged], n: int, rule: Allow | None) -> tuple[State, str]:
    """Whether `cases`, of `n` prompts under `rule`, may depart."""
    events, first = len(cases), min(_first(case.row) for case in cases)
    where = "" if first == _NOWHERE else f", first at token {first}"
    found = f"{events} of {_prompts(n)}{where}"
    if rule is None or rule.rate == 0:
        return "fail", f"{found}; none is allowed"
    if first < rule.not_before:
        return "fail", f"{found}; none is allowed before token {rule.not_before}"
    bound = rules.upper_bound(events, n, rule.confidence)
    sure = f"{100 * rule.confidence:g} % sure"
    if bound <= rule.rate:
        return "pass", f"{found}; at most {_share(bound)} ({sure}), {_share(rule.rate)} are allowed"
    least = rules.lower_bound(events, n, rule.confidence)
    if least > rule.rate:
        return (
            "fail",
            f"{found}; at least {_share(least)} ({sure}), {_share(rule.rate)} are allowed",
        )
    if events / n > rule.rate:
        return "inconclusive", (
            f"{found}, and {_share(rule.rate)} are allowed; more prompts are needed to be {sure}"
        )
    needed = rules.prompts_needed(events, rule.rate, rule.confidence)
    return "inconclusive", (
        f"{found}; it may be up to {_share(bound)} ({sure}), and {_share(rule.rate)} are allowed; "
        f"{needed} prompts without another would show it"
    )


_NOWHERE = 1 << 62
_ANYWHERE: tuple[Outcome, ...] = ("fork", "length", "degenerate")


def _first(row: Row) -> int:
    """Where a case departs; far behind every token when its tokens do not."""
    return row.fork if row.outcome in _ANYWHERE and row.fork is not None else _NOWHERE


def _keys(cases: Sequence[Judged]) -> tuple[str, ...]:
    return tuple(case.row.id for case in cases)


def _prompts(n: int) -> str:
    return f"{n} prompt{'s' * (n != 1)}"


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"
