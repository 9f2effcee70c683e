"""What the experiments on one case share: the case, its traces, the bench, and what was seen so far."""

from typing import Any

from specbisect.cell import Case
from specbisect.compare import Verdict, compare
from specbisect.diagnose.conclusion import Options
from specbisect.diagnose.finding import Evidence
from specbisect.diagnose.lab import Lab
from specbisect.engines.libllama import LibLlama
from specbisect.trace import Trace


class CaseFile:
    """One case under examination, and the evidence as it comes in."""

    def __init__(
        self, engine: LibLlama, case: Case, vanilla: Trace, speculative: Trace, options: Options
    ) -> None:
        self.case = case
        self.vanilla, self.speculative = vanilla, speculative
        self.options = options
        self.verdict: Verdict = compare(vanilla, speculative)
        self.lab = Lab(engine, case, speculative.prompt_ids)
        self.evidence: list[Evidence] = []

    def note(self, experiment: str, run: str, outcome: str, **data: Any) -> None:
        """Keep what an experiment said."""
        self.evidence.append(Evidence(experiment=experiment, run=run, outcome=outcome, data=data))
