"""A gate's verdict as text, as Markdown and as JSON."""

import textwrap
from collections.abc import Iterator
from typing import Any

from specbisect import __version__
from specbisect.cell import Cell
from specbisect.cli import acceptance
from specbisect.cli.grid import grid
from specbisect.cli.naming import Naming
from specbisect.cli.output import printable
from specbisect.gate.acceptance import total
from specbisect.gate.causes import UNTESTED, Judged
from specbisect.gate.verdict import Check, GateVerdict, State

SCHEMA = "specbisect.verdict/1"
FORCED = "!"
"""Marks results of drafters that do not fit their targets."""
LISTED = 5
"""Cases of a check that are listed."""


def document(verdict: GateVerdict) -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        "schema": SCHEMA,
        "specbisect": __version__,
        "state": verdict.state,
        "exit_code": verdict.exit_code,
        "forced": verdict.forced,
        "accepted_changes": verdict.accepted,
        "checks": [
            {
                "kind": check.kind,
                "cell": check.cell.key,
                "subject": check.subject,
                "state": check.state,
                "said": check.said,
                "cases": check.cases,
            }
            for check in verdict.checks
        ],
        "cases": [_case(case, verdict) for case in verdict.cases],
        "acceptance": list(acceptance.documents(verdict.acceptance)),
        "cells": {check.cell.key: check.cell.to_json() for check in verdict.checks},
    }


def _case(case: Judged, verdict: GateVerdict) -> dict[str, Any]:
    return {
        "id": case.row.id,
        "name": case.name,
        "cell": case.row.cell.key,
        "prompt": case.row.prompt_id,
        "group": case.row.prompt_group,
        "outcome": case.row.outcome,
        "fork": case.row.fork,
        "cause": case.cause,
        "misaligned": case.misaligned,
        "state": verdict.state_of(case),
        "forced": bool(verdict.forced),
        "summary": case.summary,
        "evidence": case.evidence,
    }


def plain(verdict: GateVerdict, width: int) -> str:
    """The table of cells, every check that did not pass with its cases, and the verdict."""
    parts = [grid(list(_lines(verdict)), _heads(verdict))]
    for kind in ("tokens", "quality"):
        found = [c for c in verdict.checks if c.kind == kind and c.state != "pass"]
        paragraphs = [text for check in found for text in _paragraph(check, verdict, width)]
        if paragraphs:
            parts.append("\n".join([kind, *paragraphs]))
    parts += [textwrap.fill(f"{FORCED} {text}", width) for text in _notes(verdict)]
    parts.append(f"gate: {verdict.state}")
    return printable("\n\n".join(parts))


def markdown(verdict: GateVerdict, name: str) -> str:
    """The same for a pull request or a job summary."""
    table = grid(list(_lines(verdict)), _heads(verdict), "github")
    parts = [f"### specbisect gate `{name}`: {verdict.state}", table]
    open_checks = [check for check in verdict.checks if check.state != "pass"]
    if open_checks:
        naming = _naming(verdict)
        parts.append(
            "\n".join(
                f"- **{check.state}**, {check.kind}, {_name(check.cell, naming)}, {check.subject}: {check.said}"
                + "".join(f"\n  - `{text}`" for text in _listed(check, verdict))
                for check in open_checks
            )
        )
    parts += [f"- {text}" for text in _notes(verdict)]
    return printable("\n\n".join(parts))


def _naming(verdict: GateVerdict) -> Naming:
    return Naming(check.cell for check in verdict.checks)


def _name(cell: Cell, naming: Naming) -> str:
    return " ".join([*naming.settings(cell), *naming.drafter(cell)])


def _heads(verdict: GateVerdict) -> list[str]:
    return [*_naming(verdict).headers, "drafter", "prompts", "depart", "accepted", "verdict"]


def _lines(verdict: GateVerdict) -> Iterator[list[str]]:
    """One line for each cell; prompts are those that were tested."""
    naming, mark = _naming(verdict), FORCED * bool(verdict.forced)
    for cell in dict.fromkeys(check.cell for check in verdict.checks):
        cases = [case for case in verdict.cases if case.row.cell == cell]
        tested = [case for case in cases if case.cause not in UNTESTED]
        counts = total(n for (c, _), n in verdict.acceptance.items() if c == cell)
        rate = "–" if counts.rate is None else f"{counts.rate:.3f}"
        yield [
            *naming.settings(cell),
            " ".join(naming.drafter(cell)),
            f"{len(tested)}/{len(cases)}",
            str(sum(case.departs for case in cases)),
            rate,
            _state(check for check in verdict.checks if check.cell == cell) + mark,
        ]


def _state(checks: Iterator[Check]) -> State:
    states = {check.state for check in checks}
    order: tuple[State, ...] = ("fail", "inconclusive", "pass")
    return next(state for state in order if state in states)


def _paragraph(check: Check, verdict: GateVerdict, width: int) -> Iterator[str]:
    where = _name(check.cell, _naming(verdict))
    text = f"{check.state}: {where}, {check.subject}: {check.said}"
    yield textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    ")
    for line in _listed(check, verdict):
        yield textwrap.fill(line, width, initial_indent="    ", subsequent_indent="      ")


def _listed(check: Check, verdict: GateVerdict) -> Iterator[str]:
    """The first cases of a check of tokens, with what was found out about them."""
    if check.kind == "quality":
        return
    cases = [case for case in verdict.cases if case.row.id in check.cases]
    for case in cases[:LISTED]:
        yield f"{case.row.id[:8]} {case.row.prompt_id}: {case.summary or case.row.outcome}"
    if len(cases) > LISTED:
        yield f"and {len(cases) - LISTED} more"


def _notes(verdict: GateVerdict) -> Iterator[str]:
    yield from (f"forced, and every result is marked: {text}" for text in verdict.forced)
    yield from (f"a change that was meant: {text}" for text in verdict.accepted)
