"""What a search for the smallest case found: a file that people read, and that a later session takes up again.

`minimal` is a whole finding, because the smallest case is diagnosed like any other: its label is earned by its own
experiments, and a report and a repro can be made of it alone.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specbisect.cell import Case
from specbisect.diagnose.finding import Finding, Label
from specbisect.trace import Counters

Shown = Label | Literal["failed", "unresolved"]
"""What a trial showed: a label (``none`` when it shows no difference), a crash, or nothing that can be told."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(_Part):
    """One simplification that kept the label. `part` is what was simplified, at `stage` of the search.

    `before` and `after` are what tables show of it; `trials` were spent on it.
    """

    stage: str
    part: str
    before: str
    after: str
    trials: int = 0


class Neighbour(_Part):
    """The value of an axis nearest to the minimal case's own at which it no longer shows the same thing.

    Everything else is as in the minimal case. `neighbour` None: no value was found that does not show it.
    """

    axis: str
    value: Any
    neighbour: Any = None
    shows: Shown | None = None


class Irrelevant(_Part):
    """An axis that does not matter: the label was the same at every value in `tried`."""

    axis: str
    original: Any
    now: Any
    tried: tuple[Any, ...] = ()


class Width(_Part):
    """What the minimal case shows when its batch has `width` rows."""

    width: int
    shows: Shown


class Precision(_Part):
    """What was shown when the target had the file type `type`, nothing else being changed."""

    type: str
    shows: Shown


class Tensors(_Part):
    """The tensors that must stay quantised, and the two runs that make them the cause.

    `without` is what is shown when only these have the type `safe`, `alone` when only these have the type `unsafe`.
    `enough` are those of them that the minimal case has at the type `unsafe`, where fewer than all are enough for it.
    `base_sha256` and `overrides` (pattern, type) say how the minimal case's file is made with ``llama-quantize``.
    """

    names: tuple[str, ...]
    unsafe: str
    safe: str
    without: Shown
    alone: Shown
    enough: tuple[str, ...] = ()
    base_sha256: str = ""
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def causal(self) -> bool:
        """Whether swapping them out removes what is shown, and having only them brings it about."""
        return self.without == "none" and self.alone not in ("none", "failed", "unresolved")


class Narrowed(BaseModel):
    """From a case to the smallest one with the same label.

    `steps` are in the order in which they were made. `precisions` are the original type and all finer ones that were
    tried. `interactions` are axes that show it only together. `proved_minimal` is true only when every stage was tried
    on the minimal case in vain; `reason` says why the search stopped before its end. `counters` is what all `trials`
    cost, `original_decoded` the tokens that both arms of the original case decode, for comparison.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["specbisect.narrowed/1"] = Field(
        default="specbisect.narrowed/1", alias="schema"
    )
    original: Case
    minimal: Finding
    steps: tuple[Step, ...] = ()
    irrelevant: tuple[Irrelevant, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    widths: tuple[Width, ...] = ()
    precisions: tuple[Precision, ...] = ()
    interactions: tuple[tuple[str, ...], ...] = ()
    tensors: Tensors | None = None
    proved_minimal: bool = False
    reason: str = ""
    trials: int = 0
    counters: Counters = Counters()
    original_decoded: int = 0
