"""What the kernels say about a finding, as evidence beside that of the diagnosis."""

from dataclasses import asdict
from typing import Any

from specbisect.diagnose.finding import Evidence, Finding
from specbisect.diagnose.replay import cycle_of
from specbisect.errors import BadInput
from specbisect.llama import child
from specbisect.ops.profile import Profile
from specbisect.ops.study import Spot, look
from specbisect.ops.trace import NodeTrace
from specbisect.trace import Trace

KERNELS = ("batch-width", "kernel-defect", "baseline")
"""Labels that have a departing node."""


def place_of(finding: Finding) -> tuple[Trace, int, int]:
    """The speculative arm, and the cycle and row of the fork. Raises `BadInput` when no verify batch has it."""
    trace, fork = finding.speculative, finding.verdict.fork
    place = cycle_of(trace, fork) if isinstance(trace, Trace) and fork is not None else None
    if place is None or not isinstance(trace, Trace):
        raise BadInput(
            f"case {finding.case.key[:8]} has no fork in a verify batch; choose one that has"
        )
    return trace, *place


def spot_of(finding: Finding) -> Spot:
    """Where the fork's row was verified, on a width-1 history. Raises `BadInput` as `place_of` does."""
    trace, number, _ = place_of(finding)
    return Spot.of(trace, trace.cycles[number])


def annotated(finding: Finding) -> Finding:
    """The finding with its first departing node as one more evidence, found in a child process.

    Unchanged where the label is not one of `KERNELS`, where no verify batch of two rows or more has the fork, and where
    it has that evidence already. Raises `EngineFault` as a node trace does.
    """
    if finding.label not in KERNELS or finding.experiment("first-node"):
        return finding
    try:
        spot = spot_of(finding)
    except BadInput:
        return finding
    if len(spot.batch) < 2:
        return finding
    (trace,) = child.call(look, finding.case, spot, [len(spot.batch)])
    return finding.model_copy(update={"evidence": (*finding.evidence, first_node(trace))})


def first_node(trace: NodeTrace, profile: Profile | None = None) -> Evidence:
    """The evidence of a node trace at the fork, with the profile's line where there is a profile."""
    first = trace.first
    data: dict[str, Any] = {
        "width": trace.width,
        "position": trace.position,
        "row": trace.row,
        "transparent": trace.transparent,
        "node": asdict(first) if first else None,
        "layers": [
            {"layer": e.layer, "largest": e.largest, "relative": e.relative}
            for e in trace.by_layer()
        ],
        "jumps": [{"node": e.key.name, "op": e.key.op, "factor": f} for e, f in trace.jumps()],
    }
    if profile is not None:
        data["profile"] = str(profile)
    what = f"the first node that departs is {first}" if first else "no node departs"
    return Evidence(
        experiment="first-node",
        run=f"a batch of {trace.width} rows against single rows, node by node, from the same state",
        outcome=what if trace.transparent else f"{what}, but watching changes the result here",
        data=data,
    )
