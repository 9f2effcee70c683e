"""Finished cases with what is wrong with each, in one word: a cause that was diagnosed, or why there is none."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specbisect.cell import Case
from specbisect.diagnose.finding import Finding
from specbisect.matrix import label
from specbisect.store import Row, Store

NONE = "none"
UNEXERCISED = "unexercised"
UNTESTED = (UNEXERCISED, "failed", "invalid")
"""Causes of cases that say nothing about the arms, in whatever way."""
QUALITY = "draft-alignment"
"""The cause that leaves the tokens right and the drafts useless."""

_NO_CAUSE = (NONE, QUALITY, "not-engaged")


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished case. `cause` is a label of `Finding`, ``degenerate``, one of `UNTESTED`, or ``none``.

    `misaligned` says that its drafts are wrong in a way that was found; `summary` and `evidence` come from the
    diagnosis.
    """

    row: Row
    name: str
    cause: str
    misaligned: bool
    summary: str
    evidence: tuple[str, ...]

    @property
    def departs(self) -> bool:
        """Whether something is wrong with what the speculative arm does, seen in its tokens or not."""
        return self.cause not in (NONE, *UNTESTED)


def judge(store: Store, rows: Iterable[Row]) -> Iterator[Judged]:
    """The cases `rows` of `store`, with their latest findings."""
    for row in rows:
        texts = store.findings(row.id)
        finding = Finding.model_validate_json(texts[-1]) if texts else None
        yield judged(row, store.case(row.id), finding)


def judged(row: Row, case: Case, finding: Finding | None) -> Judged:
    """One case. A departure that no experiment has explained is ``unexplained``."""
    labels = (finding.label, *finding.also) if finding else ()
    evidence = [f"{e.experiment}: {e.outcome}" for e in finding.evidence] if finding else []
    summary = finding.summary if finding else row.reason
    misaligned = QUALITY in labels
    return Judged(row, label(case), _cause(row, finding), misaligned, summary, tuple(evidence))


def _cause(row: Row, finding: Finding | None) -> str:
    if row.outcome in ("failed", "invalid", "degenerate"):
        return row.outcome
    if finding is not None and finding.label not in _NO_CAUSE:
        return finding.label
    if row.outcome in ("fork", "length"):
        return "unexplained"
    return NONE if row.outcome == "agree" else row.outcome
