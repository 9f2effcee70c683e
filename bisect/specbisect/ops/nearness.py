"""Which of two rows is nearer to the truth: a float32 copy of the target says, with the prefix in one go."""

from dataclasses import dataclass, replace

from specbisect.cell import Case
from specbisect.diagnose.reference import error, reference_row
from specbisect.engines.faults import tamper_of
from specbisect.engines.libllama import LibLlama
from specbisect.llama.context import Settings
from specbisect.llama.logits import best
from specbisect.ops.clean import CleanState
from specbisect.ops.study import Spot


@dataclass(frozen=True, slots=True)
class Nearness:
    """One row, computed singly and in a batch: the distance of each from the reference, and what each chooses.

    Distances are root mean squares over the vocabulary.
    """

    single: float
    batch: float
    single_token: int
    batch_token: int
    reference_token: int

    @property
    def nearer(self) -> str:
        """``single``, ``batch``, or ``neither`` where both are as far."""
        if self.single == self.batch:
            return "neither"
        return "single" if self.single < self.batch else "batch"

    def __str__(self) -> str:
        chosen = {"single": self.single_token, "batch": self.batch_token}
        agree = " and ".join(n for n, token in chosen.items() if token == self.reference_token)
        return (
            f"nearer to float32: {self.nearer} (RMS {self.single:.3g} single, {self.batch:.3g} in the batch); "
            f"float32 chooses the token of {agree or 'neither'}; neither is wrong by llama.cpp's contract"
        )


def nearness(case: Case, spot: Spot, row: int, reference: str) -> Nearness:
    """Judge row `row` of the batch at a place, in this process; `reference` is the path of a float32 copy."""
    engine = LibLlama()
    cell = case.cell.vanilla
    try:
        model = engine.models.get(cell.target, cell)
        with CleanState(model, Settings.of(cell), tamper=tamper_of(case.fault)) as state:
            state.read(spot.prompt, spot.then)
            batch = state.batch(spot.batch)[row].copy()
            for token in spot.batch[: row + 1]:
                single = state.step(token)
            single = single.copy()
        prefix = (*spot.prompt, *spot.then, *spot.batch[: row + 1])
        truth = reference_row(engine, replace(case, cell=cell), reference, prefix)
        return Nearness(
            error(single, truth), error(batch, truth), best(single), best(batch), best(truth)
        )
    finally:
        engine.close()
