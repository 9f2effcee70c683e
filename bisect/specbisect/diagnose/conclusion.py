"""What a diagnosis is asked for, and what it concludes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbisect.diagnose.envelope import Envelope
from specbisect.diagnose.finding import Label


@dataclass(frozen=True, slots=True)
class Options:
    """How much to do.

    `repeats` of each arm; `audit` also examines what gives no cause for suspicion; `envelope` of the target as
    measured before; `reference` is the path of the dequantised target, None before it is made, "" when it cannot be;
    `siblings` are the fork indices of the same case at all draft lengths.
    """

    repeats: int = 1
    audit: bool = False
    envelope: Envelope | None = None
    reference: str | None = None
    siblings: Mapping[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A label, its sub-kind, the sentence users read, and the labels of causes that are there beside it."""

    label: Label
    kind: str
    summary: str
    also: tuple[Label, ...] = ()
