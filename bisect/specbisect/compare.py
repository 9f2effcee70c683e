"""Two traces → verdict. Comparing happens on token ids and never runs a model."""

from dataclasses import dataclass
from typing import Literal, TypeVar

from specbisect.trace import ArmResult, Failure, Trace

Outcome = Literal["agree", "unexercised", "fork", "length", "degenerate", "failed", "invalid"]

T = TypeVar("T")

LOOP_PERIOD = 8
"""Longest cycle, in tokens, that counts as a short loop."""
LOOP_TOKENS = 32
"""A loop must fill at least this many tokens at the end of an arm, so that lists and refrains do not count."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comparing two traces says.

    `fork` is the index of the first generated token where the arms differ (for ``length``: where the shorter ends);
    `reference_token` and `speculative_token` are what stands there in either arm, `margin` the vanilla arm's there.
    `compared` tokens were compared. `reason` is one sentence for every outcome but ``agree`` and ``fork``.
    """

    outcome: Outcome
    compared: int = 0
    fork: int | None = None
    reference_token: int | None = None
    speculative_token: int | None = None
    margin: float | None = None
    reason: str = ""


def compare(vanilla: ArmResult, speculative: ArmResult) -> Verdict:
    """The verdict on one case, outcomes as in the README's table."""
    if isinstance(vanilla, Failure):
        return Verdict("failed", reason=f"vanilla arm, {vanilla.stage}: {vanilla.reason}")
    if isinstance(speculative, Failure):
        return Verdict(
            "failed", reason=f"speculative arm, {speculative.stage}: {speculative.reason}"
        )
    if reason := _incomparable(vanilla, speculative):
        return Verdict("invalid", reason=reason)

    compared = min(len(vanilla.ids), len(speculative.ids))
    pairs = zip(vanilla.ids, speculative.ids, strict=False)
    fork = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if fork is None and len(vanilla.ids) != len(speculative.ids):
        fork = compared
    at = _Fork(vanilla, speculative, fork)

    if reason := _degenerate(vanilla, speculative, fork):
        return at.verdict("degenerate", reason)
    if fork is None:
        if not speculative.drafted:
            return at.verdict("unexercised", "nothing was drafted")
        if not speculative.accepted:
            return at.verdict("unexercised", "no drafted token was accepted")
        return at.verdict("agree")
    if fork == compared:
        shorter = "vanilla" if len(vanilla.ids) == compared else "speculative"
        return at.verdict(
            "length", f"the {shorter} arm ends after {compared} tokens, the other goes on"
        )
    return at.verdict("fork")


@dataclass(frozen=True, slots=True)
class _Fork:
    """The two arms at the fork; builds the verdicts that carry one."""

    vanilla: Trace
    speculative: Trace
    index: int | None

    def verdict(self, outcome: Outcome, reason: str = "") -> Verdict:
        i = self.index
        if i is None:
            return Verdict(outcome, compared=len(self.vanilla.ids), reason=reason)
        return Verdict(
            outcome,
            compared=i,
            fork=i,
            reference_token=_at(self.vanilla.ids, i),
            speculative_token=_at(self.speculative.ids, i),
            margin=_at(self.vanilla.margins, i),
            reason=reason,
        )


def _at(values: tuple[T, ...], index: int) -> T | None:
    return values[index] if index < len(values) else None


def _incomparable(vanilla: Trace, speculative: Trace) -> str:
    if vanilla.prompt_ids != speculative.prompt_ids:
        return "the arms were given different prompt ids"
    for trace in (vanilla, speculative):
        if trace.unhonoured:
            return f"{trace.arm} arm: not honoured: {', '.join(trace.unhonoured)}"
    if vanilla.host_kind != speculative.host_kind and vanilla.host_kind and speculative.host_kind:
        return "the arms ran on hosts that compute different bits"
    a, b = (t.provenance.get("target", {}).get("sha256") for t in (vanilla, speculative))
    if a != b:
        return "the arms ran different target files"
    asked = [t.resolved.get("target", {}) for t in (vanilla, speculative)]
    differing = sorted(k for k in {*asked[0], *asked[1]} if asked[0].get(k) != asked[1].get(k))
    if differing:
        k = differing[0]
        return f"the arms resolved {k} differently: {asked[0].get(k)!r} and {asked[1].get(k)!r}"
    return ""


def _degenerate(vanilla: Trace, speculative: Trace, fork: int | None) -> str:
    for trace in (vanilla, speculative):
        if trace.nonfinite:
            return f"{trace.arm} arm: NaN or infinity in the logits of token {trace.nonfinite[0]}"
    if fork is not None:
        loops = {t.arm: loop_period(t.ids) for t in (vanilla, speculative)}
        looping = [arm for arm, period in loops.items() if period]
        if len(looping) == 1:
            return f"only the {looping[0]} arm ends in a loop of {loops[looping[0]]} tokens"
    return ""


def loop_period(ids: tuple[int, ...]) -> int | None:
    """Length of the shortest cycle that the last `LOOP_TOKENS` ids repeat, or None."""
    tail = ids[-LOOP_TOKENS:]
    if len(tail) < LOOP_TOKENS:
        return None
    for period in range(1, LOOP_PERIOD + 1):
        if tail[period:] == tail[:-period]:
            return period
    return None
