"""Trials in worker processes, and the files that candidates need."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specbisect.cell import CASE, Case
from specbisect.diagnose.finding import Finding
from specbisect.diagnose.numeric import NEEDS_REFERENCE
from specbisect.diagnose.reference import dequantised
from specbisect.errors import BadInput, EngineFault
from specbisect.llama import child, quantize
from specbisect.llama.quantize import Recipe
from specbisect.narrow.candidate import Candidate
from specbisect.narrow.gate import Seen
from specbisect.narrow.trial import Look, examined, look
from specbisect.runner import Submit
from specbisect.trace import Failure


@dataclass(slots=True)
class Trials:
    """Runs candidates. Files of mixed types are made for one trial each, and only the one in use is left on disk.

    `in_use` says what the target of the best candidate is made of, if it is made.
    """

    workers: Submit
    how: Look
    in_use: Callable[[], Recipe | None] = lambda: None
    _references: dict[str, str] = field(default_factory=dict)
    _mixed: dict[str, Recipe] = field(default_factory=dict)

    def __call__(self, candidate: Candidate) -> Seen:
        """What `candidate` shows; whatever goes wrong is a result of its own."""
        try:
            self._make(candidate)
            return self._look(candidate.case)
        except BadInput as error:
            return Seen("unresolved", reason=str(error))
        except EngineFault as fault:
            return Seen("failed", reason=str(fault))

    def examine(self, case: Case) -> Finding:
        """The finding on `case`, stored as text and loaded again, in a fresh process. Raises `EngineFault`."""
        found = self._ask(CASE.validate_json(CASE.dump_json(case)), child.call, examined)
        if isinstance(found, Failure):
            raise EngineFault(found.stage, found.reason)
        assert isinstance(found, Finding)
        return found

    def tidy(self) -> None:
        """Remove the files of mixed types that were made for a trial, except the one in use."""
        used = self.in_use()
        for identity, recipe in list(self._mixed.items()):
            if used is None or identity != used.identity:
                recipe.path.unlink(missing_ok=True)
                del self._mixed[identity]

    def _look(self, case: Case) -> Seen:
        seen = self._ask(case, look)
        if isinstance(seen, Failure):
            return Seen("failed", reason=f"{seen.stage}: {seen.reason}")
        assert isinstance(seen, Seen)
        return seen

    def _ask(self, case: Case, *call: Callable[..., Any]) -> Finding | Seen | Failure:
        """What a worker says of `case`; asked again with a float32 copy of the target where that takes one."""
        found: Finding | Seen | Failure = self.workers.submit(*call, case, self._how(case)).result()
        if not isinstance(found, Failure) and found.kind == NEEDS_REFERENCE:
            self._references[case.cell.target.identity] = dequantised(case.cell.target.path)
            found = self.workers.submit(*call, case, self._how(case)).result()
        return found

    def _how(self, case: Case) -> Look:
        return replace(self.how, reference=self._references.get(case.cell.target.identity))

    def _make(self, candidate: Candidate) -> None:
        weights = candidate.weights
        if weights.recipe is None or weights.recipe.path.exists():
            return
        if weights.kept is not None:
            self.tidy()
            self._mixed[weights.recipe.identity] = weights.recipe
        quantize.make(weights.recipe)
