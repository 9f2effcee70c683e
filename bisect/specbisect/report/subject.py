"""What a report is made of: a finding, scrubbed; the narrowed one, if there is one; and what both say of the fork."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PureWindowsPath
from typing import Any, TypeVar

from specbisect import __version__
from specbisect.cell import drafter_label
from specbisect.diagnose.finding import Evidence, Finding
from specbisect.diagnose.replay import cycle_of
from specbisect.narrow.result import Narrowed
from specbisect.report import text
from specbisect.report.scrub import Scrubber
from specbisect.trace import Cycle, Failure, Trace

REDACTED = "[redacted]"

_Kept = TypeVar("_Kept", Finding, Narrowed)


def ids_digest(ids: Sequence[int]) -> str:
    """SHA-256 of token ids, written in decimal with commas between them: what stands for a redacted prompt."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Subject:
    """The finding a report is about: the minimal one where there is one. `case_id` is the original case's key.

    Nothing in it tells whose machine it was made on: use `of`.
    """

    finding: Finding
    narrowed: Narrowed | None
    case_id: str
    redacted: bool = False
    version: str = __version__

    @property
    def vanilla(self) -> Trace | None:
        """The vanilla arm, unless it failed."""
        return self.finding.vanilla if isinstance(self.finding.vanilla, Trace) else None

    @property
    def speculative(self) -> Trace | None:
        """The speculative arm, unless it failed."""
        return self.finding.speculative if isinstance(self.finding.speculative, Trace) else None

    @property
    def traces(self) -> list[Trace]:
        """The arms that did not fail, the speculative one first."""
        return [t for t in (self.speculative, self.vanilla) if t is not None]

    @property
    def failures(self) -> list[tuple[str, Failure]]:
        """The arms that failed, by name."""
        arms = ("vanilla", self.finding.vanilla), ("speculative", self.finding.speculative)
        return [(name, arm) for name, arm in arms if isinstance(arm, Failure)]

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as it was run; empty when no arm got so far and it was given as text."""
        return next((t.prompt_ids for t in self.traces), self.finding.case.prompt.ids or ())

    @property
    def provenance(self) -> dict[str, Any]:
        """Library, machine and models."""
        return dict(self.traces[0].provenance) if self.traces else {}

    @property
    def host(self) -> dict[str, Any]:
        """Library and machine."""
        return dict(self.provenance.get("host", {}))

    @property
    def drafter(self) -> str:
        """What tables call the drafter."""
        return drafter_label(self.finding.case.cell.drafter)

    def evidence(self, *names: str) -> Evidence | None:
        """The first experiment that has one of these names."""
        return next((found for n in names if (found := self.finding.experiment(n))), None)

    def datum(self, key: str, *names: str) -> Any:
        """A number of the first experiment of these names that has it; None when none has."""
        chosen = names or tuple(e.experiment for e in self.finding.evidence)
        for name in chosen:
            found = self.finding.experiment(name)
            if found and found.data.get(key) is not None:
                return found.data[key]
        return None

    @cached_property
    def place(self) -> "Place | None":
        """What gave the fork's token."""
        trace, fork = self.speculative, self.finding.verdict.fork
        return None if trace is None or fork is None else place_of(trace, fork)

    @property
    def width(self) -> int:
        """Rows in the fork's batch; where that is one, in the widest before it; without a fork, in the widest."""
        trace = self.speculative
        if self.place is not None and self.place.cycle.width > 1:
            return self.place.cycle.width
        cycles = trace.cycles[: self.place.number if self.place else None] if trace else ()
        return max((c.width for c in cycles), default=self.finding.case.cell.width)


@dataclass(frozen=True, slots=True)
class Place:
    """The row that gave a generated token: the cycle, its number, and the row in its batch."""

    cycle: Cycle
    number: int
    row: int


def place_of(trace: Trace, token: int) -> Place | None:
    """What gave the generated token of that index; None where no cycle did."""
    found = cycle_of(trace, token)
    return None if found is None else Place(trace.cycles[found[0]], *found)


def token(trace: Trace | None, index: int) -> tuple[int, str] | None:
    """A generated token and its text; None where the arm has none."""
    if trace is None or not 0 <= index < len(trace.ids):
        return None
    return trace.ids[index], text.piece(trace.pieces[index]) if index < len(trace.pieces) else ""


def of(
    finding: Finding,
    narrowed: Narrowed | None = None,
    *,
    redact_prompt: bool = False,
    scrubber: Scrubber | None = None,
) -> Subject:
    """The subject of a report: scrubbed, and its prompt taken out where that is asked for."""
    clean = scrubber or Scrubber.of_this_machine()
    case_id = finding.case.key
    if narrowed is not None:
        narrowed = _clean(narrowed, clean, redact_prompt)
        return Subject(narrowed.minimal, narrowed, case_id, redact_prompt)
    return Subject(_clean(finding, clean, redact_prompt), None, case_id, redact_prompt)


_AS_THEY_ARE = ("pieces", "ids", "prompt_ids", "digests")
_RECOGNISED = 12
"""A prompt with fewer characters than this could be found in any sentence."""


def _clean(found: _Kept, scrubber: Scrubber, redact: bool) -> _Kept:
    """A finding or a narrowed one, without paths and without whatever the scrubber knows."""
    plain = scrubber.walk(without_paths(found.model_dump(by_alias=True)), skip=_AS_THEY_ARE)
    if redact:
        plain = _redact(plain, frozenset(t for t in _prompts(plain) if len(t) >= _RECOGNISED))
    return type(found).model_validate(plain)


def without_paths(value: Any) -> Any:
    """Models keep their file's name; where it lies is nobody's business."""
    if isinstance(value, dict):
        model = "identity" in value
        return {
            k: PureWindowsPath(v).name if model and k == "path" else without_paths(v)
            for k, v in value.items()
        }
    return [without_paths(v) for v in value] if isinstance(value, list | tuple) else value


def is_prompt(value: dict[str, Any]) -> bool:
    """Whether this is a dumped `Prompt`."""
    return {"id", "text", "group", "ids"} == value.keys()


def _prompts(value: Any) -> list[str]:
    """Texts of prompts, wherever in a dumped finding."""
    if isinstance(value, dict):
        own = [value["text"]] if is_prompt(value) else []
        return own + [t for v in value.values() for t in _prompts(v)]
    return [t for v in value for t in _prompts(v)] if isinstance(value, list) else []


def _redact(value: Any, texts: frozenset[str]) -> Any:
    """Prompts without their text, and other texts without the prompts in them. Token ids stay: repros need them."""
    match value:
        case dict():
            kept = value | {"text": ""} if is_prompt(value) else value
            return {k: _redact(v, texts) for k, v in kept.items()}
        case list():
            return [_redact(v, texts) for v in value]
        case str():
            for known in texts:
                value = value.replace(known, REDACTED)
    return value
