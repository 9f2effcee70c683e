"""Planted faults as values: what goes wrong, at which cycle. `engines.faults` makes them happen.

They exist so that the tool can be tried on a machine: every kind has one right label.
"""

from dataclasses import dataclass
from typing import Literal, get_args

StateKind = Literal[
    "stale-kv",
    "swapped-positions",
    "rollback-too-few",
    "rollback-too-many",
    "rollback-skipped",
    "wrong-checkpoint",
    "foreign-token",
]
VerifyKind = Literal[
    "row-off-by-one",
    "accept-too-many",
    "typical-acceptance",
    "bonus-wrong-row",
    "past-eog",
    "constant-loop",
]
DraftKind = Literal["draft-shift", "draft-kv-stale", "never-drafts"]
NoiseKind = Literal["noise"]
KernelKind = Literal["kernel-small", "kernel-large", "nan-row", "kernel-baseline"]
FaultKind = Literal[StateKind, VerifyKind, DraftKind, NoiseKind, KernelKind]

FAULT_KINDS: tuple[FaultKind, ...] = tuple(
    kind
    for group in (StateKind, VerifyKind, DraftKind, NoiseKind, KernelKind)
    for kind in get_args(group)
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A defect to plant.

    State and verification faults strike once, in the first cycle from `cycle` on whose rows they can change
    (`cycle` counts from 0; for a damaged rollback that is the cycle after it). Draft and noise faults hold all the
    time. Kernel faults belong to the backend: they hold in every context, on batches of `width` rows; with `wider` on
    all wider ones too, the same error for each, as where a backend goes over to another kernel.
    """

    kind: FaultKind
    cycle: int = 2
    width: int = 2
    seed: int = 0
    wider: bool = False

    @property
    def in_kernel(self) -> bool:
        """Whether the fault is the backend's: then it is there in every experiment too."""
        return self.kind in get_args(KernelKind)

    @property
    def in_drafter(self) -> bool:
        """Whether only what is drafted goes wrong."""
        return self.kind in get_args(DraftKind)
