"""Which arm's row is nearer to the truth at a fork: a float32 copy of the target says, with the prefix in one go."""

from dataclasses import dataclass

from specbisect.diagnose.finding import Finding
from specbisect.diagnose.lab import Lab
from specbisect.diagnose.reference import error, reference_row
from specbisect.diagnose.replay import replay
from specbisect.engines.faults import tamper_of
from specbisect.engines.libllama import LibLlama
from specbisect.llama.context import Settings
from specbisect.llama.logits import best, digest
from specbisect.ops.clean import CleanState
from specbisect.ops.evidence import place_of
from specbisect.trace import Trace


@dataclass(frozen=True, slots=True)
class Nearness:
    """The fork's row in both arms: its distance from the reference, and what it chooses.

    Distances are root mean squares over the vocabulary. The rows are computed again; `exact` is whether they have the
    bits that the arms had.
    """

    vanilla: float
    speculative: float
    vanilla_token: int
    speculative_token: int
    reference_token: int
    exact: bool

    @property
    def nearer(self) -> str:
        """The arm, or ``neither`` where both are as far."""
        if self.vanilla == self.speculative:
            return "neither"
        return "vanilla" if self.vanilla < self.speculative else "speculative"

    def __str__(self) -> str:
        tokens = {"vanilla": self.vanilla_token, "speculative": self.speculative_token}
        agrees = " and ".join(arm for arm, t in tokens.items() if t == self.reference_token)
        return (
            f"nearer to float32: {self.nearer} (RMS {self.vanilla:.4g} vanilla, {self.speculative:.4g} speculative); "
            f"float32 chooses the token of {agrees or 'neither'}; neither is wrong by llama.cpp's contract"
        )


def nearness(finding: Finding, reference: str) -> Nearness:
    """Judge the fork of `finding` in this process; `reference` is the path of a float32 copy of its target.

    Raises `BadInput` when it has no fork in a verify batch.
    """
    trace, number, row = place_of(finding)
    case, cycle = finding.case, trace.cycles[number]
    engine = LibLlama()
    try:
        speculative = replay(Lab(engine, case, trace.prompt_ids), trace, [number]).kept[number][row]
        history = trace.ids[: cycle.base - len(trace.prompt_ids)] + cycle.batch[: row + 1]
        model = engine.models.get(case.cell.target, case.cell)
        tamper = tamper_of(case.fault)
        with CleanState(model, Settings.of(case.cell), tamper=tamper) as state:
            vanilla = state.read(trace.prompt_ids, history).copy()
        truth = reference_row(engine, case, reference, (*trace.prompt_ids, *history))
    finally:
        engine.close()
    fork = len(history)
    arms = ((finding.vanilla, vanilla), (trace, speculative))
    return Nearness(
        error(vanilla, truth),
        error(speculative, truth),
        best(vanilla),
        best(speculative),
        best(truth),
        all(isinstance(t, Trace) and t.digests[fork : fork + 1] == (digest(r),) for t, r in arms),
    )
