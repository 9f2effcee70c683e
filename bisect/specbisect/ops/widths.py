"""Measuring a width profile, on the target's own greedy text.

Every batch starts from a width-1 history, so that what is measured is the kernels' difference and nothing that a
history of other widths has added to it. Batches of w rows follow each other at a distance of w: all rows of the text
are measured once per width, for 1/w of a vanilla pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specbisect import stage
from specbisect.cell import Case, Cell
from specbisect.engines.account import prompt_ids
from specbisect.engines.faults import tamper_of
from specbisect.engines.models import Models
from specbisect.errors import BadInput
from specbisect.llama import library
from specbisect.llama.context import Logits, Settings
from specbisect.llama.logits import Choice, best, choose
from specbisect.llama.model import LoadedModel
from specbisect.ops.clean import CleanState
from specbisect.ops.profile import (
    BLOCK,
    QUANTILES,
    AtWidth,
    Kernels,
    Profile,
    blocks,
    split,
)
from specbisect.ops.trace import Tracer, same_bits
from specbisect.trace import Counters

WIDTHS = tuple(range(2, 17))
"""Widths measured by default: kernels of today change at 2, 4, 8 and 16 rows."""


class Profiler:
    """Measures one target in one configuration, prompt by prompt, and makes the profile.

    A fault that the case carries, if it is the backend's, is in every measurement. Raises `EngineFault` where llama.cpp
    fails and where nodes cannot be traced.
    """

    def __init__(self, models: Models, case: Case, widths: Iterable[int] = WIDTHS) -> None:
        self.cell: Cell = case.cell.vanilla
        self.model: LoadedModel = models.get(self.cell.target, self.cell)
        self.settings = Settings.of(self.cell)
        self.widths = sorted({w for w in widths if w > 1})
        self.counters = Counters()
        self.resolved: dict[str, Any] = {}
        self._tamper = tamper_of(case.fault)
        self._sums = {w: _Sums() for w in self.widths}
        self._kernels: dict[tuple[int, int], Kernels] = {}
        self._batches = self._singles = 0
        if not self.widths:
            raise BadInput("there is no width above 1 to compare with width 1; name some")

    def measure(self, case: Case) -> None:
        """Add the greedy text that follows the prompt of `case`."""
        prompt = prompt_ids(case, self.model.vocab)
        text = self.text(prompt, self.cell.n_predict)
        with self._state() as state:
            state.read(prompt)
            batches: dict[int, Logits] = {}
            for i, token in enumerate(text):
                stage.report(f"widths {i}")
                for w in self.widths:
                    if i % w == 0:
                        batches.pop(w, None)
                        if i + w <= len(text):
                            batches[w] = state.batch(text[i : i + w]).copy()
                            self._batches += 1
                row = state.step(token)
                self._singles += 1
                single = choose(row)
                for w, rows in batches.items():
                    self._sums[w].add(single, row, rows[i % w])
            self._keep(state)

    def text(self, prompt: Sequence[int], n: int) -> list[int]:
        """What the target says after `prompt`, to its end or `n` tokens."""
        text: list[int] = []
        with self._state() as state:
            row = state.read(prompt)
            ends = state.context.model.vocab.end_tokens
            room = state.context.n_ctx_seq - len(prompt)
            while len(text) < min(n, room):
                token = best(row)
                if token in ends and not self.cell.ignore_eos:
                    break
                text.append(token)
                row = state.step(token)
            self._keep(state)
        return text

    def trace(self, case: Case) -> None:
        """Trace every width once for every number of cells that attention works on after the prompt of `case`.

        Which kernels run does not depend on the tokens, so a history of that length is made of the prompt's own.
        """
        prompt = prompt_ids(case, self.model.vocab)
        end = len(prompt) + self.cell.n_predict
        end = min(end, self.cell.n_ctx or end)
        widths = sorted(split(self.widths, self.settings.n_ubatch))
        for cells in blocks(range(len(prompt), end)):
            missing = [w for w in widths if (cells, w) not in self._kernels]
            if not missing:
                continue
            stage.report(f"trace {cells}")
            start = max(
                1, min(cells - BLOCK or len(prompt), cells - missing[-1], end - missing[-1])
            )
            ids = list(prompt) * -(-(start + missing[-1]) // len(prompt))
            with Tracer(self.model, self.settings, ids[:start], tamper=self._tamper) as tracer:
                for trace in tracer.traces(ids[start:], missing):
                    layers = replace(trace, errors=tuple(trace.by_layer()))
                    self._kernels[cells, trace.width] = Kernels(cells, layers)
                self._keep(tracer.state)

    def profile(self) -> Profile:
        """What was found."""
        return Profile(
            cell=self.cell.key,
            name=self.cell.target.name,
            resolved=self.resolved,
            host=library.environment(),
            widths=tuple(s.at(w) for w, s in self._sums.items() if s.margins),
            kernels=tuple(self._kernels[key] for key in sorted(self._kernels)),
            batches=self._batches,
            singles=self._singles,
            counters=self.counters,
        )

    def _state(self) -> CleanState:
        return CleanState(self.model, self.settings, tamper=self._tamper)

    def _keep(self, state: CleanState) -> None:
        self.counters += state.context.counters
        self.resolved = state.context.resolved


@dataclass(slots=True)
class _Sums:
    """What is added up at one width, row by row; `margins` are those of width 1, `changes` what becomes of them."""

    margins: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    identical: int = 0
    flips: int = 0

    def add(self, single: Choice, one: Logits, other: Logits) -> None:
        """A row at width 1, what was chosen from it, and the same row at this width."""
        self.margins.append(single.margin)
        if same_bits(one, other):
            self.identical += 1
            self.changes.append(0.0)
            self.largest.append(0.0)
            self.squares.append(0.0)
            return
        change = other.astype(np.float64) - one
        self.flips += best(other) != single.token
        self.changes.append(float(abs(change[single.token] - change[single.runner_up])))
        self.largest.append(float(np.abs(change).max()))
        self.squares.append(float(np.mean(change**2)))

    def at(self, width: int) -> AtWidth:
        """The sums of this width."""
        margins, logits = (
            tuple(float(q) for q in np.quantile(values, QUANTILES))
            for values in (self.changes, self.largest)
        )
        return AtWidth(
            width=width,
            rows=len(self.margins),
            identical=self.identical,
            margins=margins,
            logits=logits,
            rms=float(np.sqrt(np.mean(self.squares))),
            flips=self.flips,
            inside=sum(m <= margins[-1] for m in self.margins) if margins[-1] else 0,
        )


def measure(cases: Sequence[Case], widths: Iterable[int] = WIDTHS) -> Profile:
    """The whole profile of the cell that `cases` share, in this process; what a worker process is asked to call."""
    return _in_this_process(cases, widths, text=True)


def screen(cases: Sequence[Case], widths: Iterable[int]) -> Profile:
    """Node traces alone: all that `can_fork` needs, for a small part of the cost of running anything."""
    return _in_this_process(cases, widths, text=False)


def _in_this_process(cases: Sequence[Case], widths: Iterable[int], *, text: bool) -> Profile:
    models = Models()
    try:
        profiler = Profiler(models, cases[0], widths)
        for case in cases:
            if text:
                profiler.measure(case)
            profiler.trace(case)
        return profiler.profile()
    finally:
        models.close()
