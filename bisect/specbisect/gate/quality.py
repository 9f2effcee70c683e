"""Acceptance as a signal of quality: shares against the locked ones, and what explains a difference.

Greedy decoding draws no random numbers, so the same drafter on the same prompts has the same acceptance wherever the
arithmetic is the same. A change is a change of something, and is looked into before it is put down to speed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specbisect.cell import Cell
from specbisect.diagnose.alignment import align
from specbisect.gate import policy as rules
from specbisect.gate.acceptance import Acceptance, total
from specbisect.gate.causes import Judged
from specbisect.gate.policy import Policy
from specbisect.store import Store
from specbisect.trace import Trace

WORDS = {-1: "minus one", 1: "one", 2: "two"}


@dataclass(frozen=True, slots=True)
class Quality:
    """One answer about the drafts of a cell."""

    subject: str
    state: Literal["pass", "fail", "inconclusive"]
    said: str
    cases: tuple[str, ...]


def quality(
    store: Store,
    cell: Cell,
    cases: Sequence[Judged],
    counts: Mapping[tuple[Cell, str], Acceptance],
    policy: Policy,
    baseline: Callable[[Cell, str], Acceptance | None] | None,
) -> Iterator[Quality]:
    """What the policy's acceptance rules, and the diagnosis of the drafts, say of one cell."""
    misaligned = [case for case in cases if case.misaligned]
    if misaligned:
        said = explanation(store, misaligned) or misaligned[0].summary
        yield Quality("alignment", "fail", said, _keys(misaligned))
    governed: dict[int, list[Judged]] = {}
    for case in cases:
        governed.setdefault(id(policy.floor(case.row)), []).append(case)
    for own in governed.values():
        rule = policy.floor(own[0].row)
        if rule is None:
            continue
        groups = sorted(
            {case.row.prompt_group for case in own} & {g for c, g in counts if c == cell}
        )
        now = total(counts[cell, group] for group in groups)
        locked = _locked(cell, groups, baseline)
        for subject, state, said in _judge(now, locked, rule, baseline is not None):
            if state == "fail" and (why := explanation(store, own)):
                said = f"{said}; {why}"
            yield Quality(_subject(subject, groups, cases), state, said, _keys(own))


def _locked(
    cell: Cell, groups: Sequence[str], baseline: Callable[[Cell, str], Acceptance | None] | None
) -> Acceptance | None:
    """The locked counts of the same groups together; None when any is missing."""
    found = [baseline(cell, group) for group in groups] if baseline else []
    known = [counts for counts in found if counts is not None]
    return total(known) if known and len(known) == len(groups) else None


_Answer = tuple[str, Literal["pass", "fail", "inconclusive"], str]


def _judge(
    now: Acceptance, locked: Acceptance | None, rule: rules.Acceptance, compares: bool
) -> Iterator[_Answer]:
    if now.rate is None:  # which its tokens have been judged for already
        if locked is not None and locked.drafted >= rule.min_drafted:
            yield (
                "acceptance",
                "fail",
                f"nothing drafted, where {locked.drafted} tokens were locked",
            )
        return
    if now.drafted < rule.min_drafted:
        said = f"{now.drafted} tokens drafted, which says too little (min_drafted = {rule.min_drafted})"
        yield "acceptance", "inconclusive", said
        return
    shown = f"{now.rate:.3f} of {now.drafted} drafted tokens accepted"
    if now.rate < rule.at_least:
        yield "acceptance", "fail", f"{shown}, below the floor of {rule.at_least:g}"
    elif locked is not None and locked.rate is not None:
        yield "acceptance", *_compare(shown, now.rate, locked.rate, rule.tolerance)
        yield from _positions(now, locked, rule)
    elif compares:
        yield (
            "acceptance",
            "inconclusive",
            f"{shown}; the lock knows none for this drafter and target",
        )
    elif rule.at_least:
        yield "acceptance", "pass", f"{shown}, the floor is {rule.at_least:g}"


def _compare(
    shown: str, now: float, locked: float, tolerance: float
) -> tuple[Literal["pass", "fail"], str]:
    against = f"{shown}, locked {locked:.3f} ± {tolerance:g}"
    if abs(now - locked) <= tolerance:
        return "pass", against
    return "fail", f"{against}: it {'rose' if now > locked else 'fell'}"


def _positions(now: Acceptance, locked: Acceptance, rule: rules.Acceptance) -> Iterator[_Answer]:
    """The share accepted at each place among drafts that were right so far, where there are enough of them."""
    places = zip(now.conditional, locked.conditional, now.reached, locked.reached, strict=False)
    for at, (share, before, n, m) in enumerate(list(places)[: rule.positions]):
        if share is None or before is None or min(n, m) < rule.min_drafted:
            continue
        shown = f"{share:.3f} of {n} accepted that had their chance"
        yield f"acceptance at place {at + 1}", *_compare(shown, share, before, rule.tolerance)


def explanation(store: Store, cases: Sequence[Judged]) -> str:
    """What the alignment check says of the drafts of `cases`; empty when they are where they should be, or none."""
    arms = [arm for case in cases if isinstance(arm := store.arm(case.row.id), Trace)]
    found = [aligned for arm in arms if (aligned := align(arm)) is not None]
    shifts = Counter(a.shift for a in found if a.shift is not None)
    if not shifts:
        return ""
    shift, n = shifts.most_common(1)[0]
    own = [a for a in found if a.shift == shift]
    moved, put = (sum(a.matches[s] for a in own) / n for s in (shift, 0))
    return (
        f"shift by {WORDS[shift]} explains it: drafts moved by {shift:+d} match {moved:.2f} of the answer "
        f"instead of {put:.2f}, in {n} of {len(found)} cases"
    )


def _subject(name: str, groups: Sequence[str], cases: Sequence[Judged]) -> str:
    """The name, and the groups where a rule is not about all of them."""
    everything = {case.row.prompt_group for case in cases}
    return name if set(groups) == everything else f"{name} ({', '.join(groups)})"


def _keys(cases: Sequence[Judged]) -> tuple[str, ...]:
    return tuple(case.row.id for case in cases)
