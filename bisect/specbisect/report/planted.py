"""Planted faults in a repro: which of them it has to make itself, and where they struck.

What a fault of the drafter or of the accept rule did is in the recorded tokens already. A fault of the memory, of the
kernels or of determinism has to happen again.
"""

from dataclasses import dataclass
from typing import get_args

import numpy as np

from specbisect.fault import Fault, StateKind
from specbisect.trace import Cycle, Trace


@dataclass(frozen=True, slots=True)
class Strike:
    """Where a fault of the memory struck: the position of the batch's first row, and the foreign token, if any."""

    base: int
    token: int = 0


def of(fault: Fault | None) -> Fault | None:
    """The fault, if a repro has to make it."""
    if fault is None:
        return None
    return fault if fault.in_kernel or fault.kind == "noise" or _in_memory(fault) else None


def _in_memory(fault: Fault) -> bool:
    return fault.kind in get_args(StateKind)


def strike(fault: Fault | None, trace: Trace) -> Strike | None:
    """Where `fault` struck in the arm that `trace` shows: the rules of `engines.faults`, applied to what it did."""
    if fault is None or not _in_memory(fault):
        return None
    if fault.kind == "foreign-token":
        cycle = trace.cycles[min(fault.cycle, len(trace.cycles) - 1)]
        step = 1 + int(np.random.default_rng(fault.seed).integers(100))
        return Strike(cycle.base, (cycle.batch[0] + step) % trace.provenance["target"]["n_vocab"])
    drafted_before = False
    for number, cycle in enumerate(trace.cycles):
        if number + 1 >= fault.cycle and _damages(fault, cycle, drafted_before):
            return Strike(cycle.base)
        drafted_before = drafted_before or cycle.drafted > 0
    return None


def _damages(fault: Fault, cycle: Cycle, drafted_before: bool) -> bool:
    """Whether the rollback after `cycle` gives the fault something to damage."""
    if cycle.accepted == cycle.drafted:
        return False
    if fault.kind == "wrong-checkpoint":
        return drafted_before
    if fault.kind == "swapped-positions":
        last = cycle.batch[cycle.accepted]
        return cycle.accepted > 0 and last != cycle.batch[cycle.accepted - 1]
    return True
