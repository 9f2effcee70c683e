"""What a drafter is worth: the arithmetic of speculative decoding, and the same quantities as measured.

Speculation replaces M vanilla steps of T seconds by one cycle of D (draft) + V (verify) + H (all else) seconds, so a
committed token costs (D + V + H) / M instead of T. If every drafted token is accepted with probability α whatever
came before, a draft of k tokens commits M(k) = 1 + α + … + αᵏ (Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding", equation 1). Measured M seldom follows that exactly, so both are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.stats import bootstrap

from specbisect.gate.acceptance import Acceptance, total

RESAMPLES = 2000
CONFIDENCE = 0.95


def committed_per_cycle(alpha: float, k: int) -> float:
    """M(k) = 1 + α + … + αᵏ: tokens a cycle commits, its own and the accepted ones, when `k` are drafted."""
    return float(sum(alpha**i for i in range(k + 1)))


def time_per_token(draft_s: float, verify_s: float, rest_s: float, per_cycle: float) -> float:
    """(D + V + H) / M, in seconds per committed token."""
    return (draft_s + verify_s + rest_s) / per_cycle


def alpha_needed(per_cycle: float, k: int) -> float | None:
    """The α at which drafts of `k` tokens commit `per_cycle` a cycle; None when even α = 1 commits fewer.

    With `per_cycle` = (D + V + H) / T this is where speculation breaks even.
    """
    if per_cycle <= 1:
        return 0.0
    if per_cycle > k + 1:
        return None
    return float(brentq(lambda alpha: committed_per_cycle(alpha, k) - per_cycle, 0.0, 1.0))


def fit_alpha(counts: Acceptance) -> float | None:
    """The α under which these cycles are most likely: accepted tokens per token that had its chance.

    A token has its chance when all before it in its draft were accepted, so a draft ends with its first rejection or,
    uncensored, with its length. None when no token had.
    """
    reached = sum(counts.reached)
    return sum(counts.accepted_at) / reached if reached else None


def fitted_per_cycle(counts: Acceptance, alpha: float) -> float:
    """M of drafts as long as these were, for that α: the formula of `committed_per_cycle`, cycle by cycle."""
    gained = sum(n * alpha ** (at + 1) for at, n in enumerate(counts.offered))
    return 1.0 + gained / counts.cycles if counts.cycles else 1.0


@dataclass(frozen=True, slots=True)
class Arm:
    """Times of one arm, in seconds, summed over `runs` runs.

    `decode_s` reaches from the first token to the last, in which `tokens` were added; `draft_s` and `verify_s` are
    parts of it that do not overlap. `first_s` is the time to the first token, `total_s` everything from an empty
    context on, in which the answers came to `answered` tokens. Models were loaded before.
    """

    runs: int = 0
    tokens: int = 0
    answered: int = 0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    first_s: float = 0.0
    total_s: float = 0.0
    counts: Acceptance = field(default=Acceptance())

    def __add__(self, other: "Arm") -> "Arm":
        return Arm(*(getattr(self, name) + getattr(other, name) for name in Arm.__slots__))


@dataclass(frozen=True, slots=True)
class Paired:
    """Both arms on one prompt, run in turns in one process, as often as each other."""

    prompt: str
    group: str
    baseline: Arm
    speculative: Arm


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval at `CONFIDENCE`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Worth:
    """The quantities of the formulas, measured over `prompts` prompts; times in seconds.

    `alpha` and `fitted` (the M it gives) come from the formula, `needed` is the α at which the times measured would
    break even. `interval` is that of `speed_up`, by resampling prompts; None with fewer than two.
    """

    prompts: int
    k: int
    baseline: float
    draft: float
    verify: float
    rest: float
    per_cycle: float
    alpha: float | None
    fitted: float | None
    needed: float | None
    interval: Interval | None

    @property
    def per_token(self) -> float:
        """Seconds per committed token of the speculative arm."""
        return time_per_token(self.draft, self.verify, self.rest, self.per_cycle)

    @property
    def speed_up(self) -> float:
        """T over the above: a ratio of paired runs."""
        return self.baseline / self.per_token

    @property
    def misfit(self) -> float | None:
        """How far the measured M is above the formula's."""
        return None if self.fitted is None else self.per_cycle - self.fitted

    @property
    def pays(self) -> bool:
        """Whether speculation is shown to be faster: the whole interval is above 1."""
        return self.interval is not None and self.interval.low > 1.0


def worth(pairs: Sequence[Paired], k: int, alpha: float | None = None) -> Worth | None:
    """What `pairs` of one cell say together; None when no cycle was timed.

    `alpha` is the fit over all draft lengths of the drafter, where several were measured; else it is fitted here.
    """
    used = [p for p in pairs if p.baseline.tokens and p.speculative.counts.cycles]
    if not used:
        return None
    baseline = sum((p.baseline for p in used), Arm())
    arm = sum((p.speculative for p in used), Arm())
    counts, cycles = arm.counts, arm.counts.cycles
    alpha = fit_alpha(counts) if alpha is None else alpha
    per_baseline = baseline.decode_s / baseline.tokens
    return Worth(
        prompts=len(used),
        k=k,
        baseline=per_baseline,
        draft=arm.draft_s / cycles,
        verify=arm.verify_s / cycles,
        rest=(arm.decode_s - arm.draft_s - arm.verify_s) / cycles,
        per_cycle=counts.committed / cycles,
        alpha=alpha,
        fitted=None if alpha is None else fitted_per_cycle(counts, alpha),
        needed=alpha_needed(arm.decode_s / cycles / per_baseline, k),
        interval=ratio_interval([_terms(p) for p in used]),
    )


Terms = tuple[float, int, float, int]
"""Seconds and tokens of the one arm, seconds and tokens of the other, on one prompt."""


def _terms(pair: Paired) -> Terms:
    arms = pair.baseline, pair.speculative
    (one_s, one), (other_s, other) = ((arm.decode_s, arm.tokens) for arm in arms)
    return one_s, one, other_s, other


def ratio_interval(terms: Sequence[Terms]) -> Interval | None:
    """The interval of (Σ seconds / Σ tokens) of the one arm over that of the other, by resampling prompts.

    A percentile bootstrap in which the two arms of a prompt stay together (Efron & Tibshirani 1993, chapter 13); the
    same data give the same interval. None for fewer than two prompts.
    """
    if len(terms) < 2:
        return None
    found: Any = bootstrap(
        np.asarray(terms, dtype=float).T,
        _ratio_of_rates,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def _ratio_of_rates(*columns: npt.NDArray[np.float64], axis: int = -1) -> npt.NDArray[np.float64]:
    one_s, one, other_s, other = (column.sum(axis=axis) for column in columns)
    ratio: npt.NDArray[np.float64] = (one_s / one) / (other_s / other)
    return ratio


def faster(better: Sequence[Paired], other: Sequence[Paired]) -> bool:
    """Whether the speculative arm of `better` is shown to be faster than that of `other`, on the prompts of both."""
    by_prompt = {p.prompt: p.speculative for p in other}
    terms = [
        (by_prompt[p.prompt].decode_s, by_prompt[p.prompt].tokens, arm.decode_s, arm.tokens)
        for p in better
        if (arm := p.speculative).tokens and by_prompt.get(p.prompt, Arm()).tokens
    ]
    interval = ratio_interval(terms)
    return interval is not None and interval.low > 1.0


def counts_of(pairs: Sequence[Paired]) -> Acceptance:
    """The acceptance of all of them."""
    return total(p.speculative.counts for p in pairs)


@dataclass(frozen=True, slots=True)
class Spent:
    """Wall-clock seconds an arm took in all, those of failed runs among them, and the tokens that came of it."""

    seconds: float = 0.0
    failed_s: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.seconds + other.seconds,
            self.failed_s + other.failed_s,
            self.tokens + other.tokens,
        )

    def price(self, per_hour: float) -> float | None:
        """The price of a million tokens, at so much an hour; failed work is paid for too. None when nothing came."""
        if not self.tokens:
            return None
        return per_hour / 3600 * (self.seconds + self.failed_s) / self.tokens * 1e6
