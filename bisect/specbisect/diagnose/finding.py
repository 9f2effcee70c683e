"""A finding: a verdict, the cause that experiments earned it, and their results.

Findings are written to disk and read back, also by other programs: the JSON schema is published by
`Finding.model_json_schema()`, and `schema_` says which version a file has.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specbisect.cell import Case
from specbisect.compare import Verdict
from specbisect.trace import Counters, Failure, Trace

Label = Literal[
    "nondeterministic",
    "not-engaged",
    "verification",
    "batch-width",
    "kernel-defect",
    "baseline",
    "state",
    "draft-alignment",
    "prompt-cache",
    "batch-composition",
    "cross-sequence",
    "server-only",
    "binding-only",
    "unexplained",
    "none",
]
"""DESIGN's causes; ``none`` is what an audit says of a case in which it found nothing wrong."""


class Evidence(BaseModel):
    """One experiment: what was run, what came out in one plain sentence, and the numbers behind it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    experiment: str
    run: str
    outcome: str
    data: dict[str, Any] = Field(default_factory=dict)


class Finding(BaseModel):
    """What is wrong with one case, and the proof.

    `kind` is the label's sub-kind (``at-fork`` or ``accumulated`` for ``batch-width``; ``silent`` where tokens agree
    but rows do not; …). `summary` is the sentence users read, `also` names a second, independent cause. `counters`
    is what the diagnosis cost.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, ser_json_inf_nan="constants"
    )

    schema_: Literal["specbisect.finding/1"] = Field(default="specbisect.finding/1", alias="schema")
    case: Case
    verdict: Verdict
    label: Label
    kind: str = ""
    summary: str
    also: tuple[Label, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    vanilla: Trace | Failure
    speculative: Trace | Failure
    counters: Counters = Counters()

    def experiment(self, name: str) -> Evidence | None:
        """The evidence of that experiment, if it was run."""
        return next((e for e in self.evidence if e.experiment == name), None)
