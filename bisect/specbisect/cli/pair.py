"""One case with both its arms, as text and as JSON."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from specbisect.cell import Case, drafter_label
from specbisect.cli.naming import told
from specbisect.cli.output import printable
from specbisect.compare import Verdict, compare
from specbisect.diagnose.percentile import ordinal, percentile_of
from specbisect.gate.acceptance import Acceptance
from specbisect.trace import ArmResult, Failure, Trace

AROUND = 6
"""Tokens shown on either side of a fork."""
BEFORE, AFTER = 200, 240
"""Characters of text shown on either side of a fork."""
GAP = 3
MARK = "▶"


@dataclass(frozen=True, slots=True)
class Pair:
    """A case and what its arms did; `speculative` is None when the vanilla arm failed and it never ran."""

    case: Case
    vanilla: ArmResult
    speculative: ArmResult | None

    @property
    def verdict(self) -> Verdict:
        """What comparing the arms says."""
        return compare(self.vanilla, self.speculative or self.vanilla)

    def document(self) -> dict[str, Any]:
        """As JSON: the case, its verdict, and both traces or failures whole."""
        drafted = self.speculative if isinstance(self.speculative, Trace) else None
        return {
            "schema": "specbisect.case/1",
            "id": self.case.key,
            "cell": self.case.cell.to_json(),
            "prompt": asdict(self.case.prompt),
            **asdict(self.verdict),
            "margin_percentile": self.margin_percentile(),
            "accepted_by_position": Acceptance.of(drafted).by_position if drafted else (),
            "vanilla": asdict(self.vanilla),
            "speculative": asdict(self.speculative) if self.speculative else None,
        }

    def margin_percentile(self) -> float | None:
        """`percentile_of` the margin at the fork, among the vanilla arm's."""
        margin, vanilla = self.verdict.margin, self.vanilla
        if margin is None or isinstance(vanilla, Failure):
            return None
        return percentile_of(margin, vanilla.margins)

    def render(self, width: int) -> Iterator[str]:
        """The case as paragraphs, at most `width` columns wide where texts stand side by side."""
        yield self._headline()
        vanilla, speculative = self.vanilla, self.speculative
        for arm in (vanilla, speculative):
            if isinstance(arm, Failure):
                yield _failure("vanilla" if arm is vanilla else "speculative", arm)
        if isinstance(vanilla, Trace) and isinstance(speculative, Trace):
            at = self.verdict.fork
            yield _texts(vanilla, speculative, at, width)
            if at is not None:
                yield _tokens(vanilla, speculative, at)
            yield _acceptance(speculative)
            yield _settings(speculative.resolved)

    def _headline(self) -> str:
        verdict, cell = self.verdict, self.case.cell
        drafter = cell.drafter
        words = [cell.target.name, cell.target.quant, drafter_label(drafter)]
        words += told(drafter) if drafter else []
        lines = [f"case {self.case.key}: {' '.join(words)}, prompt {self.case.prompt.id}"]
        found = f"{verdict.outcome}{f': {verdict.reason}' if verdict.reason else ''}"
        if verdict.outcome == "agree":
            found = f"no difference in {verdict.compared} tokens"
        elif verdict.outcome == "fork" and verdict.fork is not None:
            tokens = [
                f"{arm.arm} {' '.join(_token(arm, verdict.fork)[:2])}"
                for arm in (self.vanilla, self.speculative)
                if isinstance(arm, Trace)
            ]
            found = f"fork at generated token {verdict.fork}: {', '.join(tokens)}"
        lines.append(found)
        if (percentile := self.margin_percentile()) is not None:
            lines.append(
                f"vanilla margin there {verdict.margin:.4g}; the {ordinal(percentile)} percentile of this arm's margins"
            )
        return "\n".join(lines)


def _failure(arm: str, failure: Failure) -> str:
    log = [f"  {line}" for line in failure.log]
    return "\n".join([f"{arm} arm, {failure.stage}: {failure.reason}", *map(printable, log)])


def _texts(vanilla: Trace, speculative: Trace, at: int | None, width: int) -> str:
    """Both texts side by side, the place of the fork marked."""
    half = (width - GAP) // 2
    columns = [_wrapped(_around(trace, at), half) for trace in (vanilla, speculative)]
    height = max(map(len, columns))
    left, right = (lines + [""] * (height - len(lines)) for lines in columns)
    head = ["vanilla", "-" * half], ["speculative", "-" * half]
    rows = zip([*head[0], *left], [*head[1], *right], strict=True)
    return "\n".join(f"{a:<{half}}{' ' * GAP}{b}".rstrip() for a, b in rows)


def _around(trace: Trace, at: int | None) -> str:
    if at is None:
        text = trace.text()
        return text if len(text) <= BEFORE + AFTER else f"{text[: BEFORE + AFTER]}…"
    before, after = trace.text(0, at), trace.text(at)
    before = before if len(before) <= BEFORE else f"…{before[-BEFORE:]}"
    return f"{before}{MARK}{after if len(after) <= AFTER else f'{after[:AFTER]}…'}"


def _wrapped(text: str, width: int) -> list[str]:
    wrapper = textwrap.TextWrapper(width, replace_whitespace=False, drop_whitespace=False)
    return [line for part in printable(text).split("\n") for line in wrapper.wrap(part) or [""]]


def _tokens(vanilla: Trace, speculative: Trace, at: int) -> str:
    last = max(len(vanilla.ids), len(speculative.ids))
    lines = [
        [MARK * (i == at), i, *_token(vanilla, i), *_token(speculative, i)]
        for i in range(max(0, at - AROUND), min(last, at + AROUND + 1))
    ]
    return tabulate(
        lines, ["", "at", "vanilla", "", "margin", "speculative", ""], disable_numparse=True
    )


def _token(trace: Trace, index: int) -> tuple[str, ...]:
    known = index < len(trace.ids)
    piece = repr(trace.text(index, index + 1)) if index < len(trace.pieces) else ""
    shown = (str(trace.ids[index]) if known else "(end)", printable(piece))
    if trace.arm == "speculative":
        return shown
    return *shown, f"{trace.margins[index]:.3g}" if index < len(trace.margins) else ""


def _acceptance(trace: Trace) -> str:
    share = f" ({100 * trace.accepted / trace.drafted:.0f} %)" if trace.drafted else ""
    line = f"drafted {trace.drafted}, accepted {trace.accepted}{share}"
    places = Acceptance.of(trace).by_position
    if not places:  # of an engine that shows totals only, or nothing was drafted
        return line
    line += f" in {len(trace.cycles)} cycles"
    words = [f"{accepted}/{drafted}" for drafted, accepted in places]
    return f"{line}\naccepted/drafted by place in the draft: {' '.join(words)}"


def _settings(resolved: Mapping[str, Any]) -> str:
    """Resolved settings, one line for each part of the engine that has some."""
    parts: Sequence[tuple[str, Any]] = [
        (name, value) for name, value in resolved.items() if isinstance(value, dict)
    ] or [("settings", resolved)]
    return "\n".join(
        textwrap.fill(
            f"{name} context: {', '.join(f'{k} {v}' for k, v in values.items())}",
            width=80,
            subsequent_indent="  ",
        )
        for name, values in parts
    )
