"""The other forms of a run's report: Markdown for people without a browser, JSON and JUnit for programs."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree as ET

from specbisect.compare import Verdict
from specbisect.report import render, text
from specbisect.report.page import page
from specbisect.report.run import DIFFERENT, Entry, Group, Run

SCHEMA = "specbisect.run-report/1"
WORST = 50
"""Cases that the Markdown report lists."""


def markdown(run: Run) -> str:
    """The matrix and the worst cases as tables."""
    order = sorted(run.entries, key=lambda e: (e.rank, e.row.ordinal))
    worst = [e for e in order if e.verdict not in ("agree", "none", "unexercised")]
    return (
        render.markdown()
        .get_template("run.md.j2")
        .render(
            run=run,
            outcomes=list(run.verdicts.items()),
            head=["target", *(f"{name} {n_max}" for name, n_max in run.drafters)],
            matrix=[
                (target, *(_brief(run.groups.get((target, d))) for d in run.drafters))
                for target in run.targets
            ],
            worst=[_line(e) for e in worst[:WORST]],
            more=max(0, len(worst) - WORST),
            failures=[(reason, n, text.code(key)) for reason, n, key in run.failures()[:WORST]],
            axes=list(run.axes()),
        )
    )


def _brief(group: Group | None) -> str:
    return "–" if group is None else f"{group.different} of {group.compared}: {group.worst}"


def _line(entry: Entry) -> tuple[object, ...]:
    row = entry.row
    margin = "" if row.margin is None else f"{row.margin:.3g}"
    drafter = f"{row.drafter} {row.n_max}"
    where = "" if row.fork is None else row.fork
    return (
        text.code(row.id[:12]),
        entry.target,
        drafter,
        row.prompt_id,
        entry.verdict,
        where,
        margin,
    )


def document(run: Run) -> str:
    """Everything but the traces, every case included, as JSON."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "specbisect": run.version,
            "run": run.name,
            "outcomes": dict(run.outcomes),
            "verdicts": dict(run.verdicts),
            "groups": [_group(g) for g in run.groups.values()],
            "cases": [_case(e) for e in run.entries],
            "provenance": list(run.provenances),
        },
        indent=1,
        default=str,
    )


def _group(group: Group) -> dict[str, Any]:
    return {
        "target": group.target,
        "drafter": group.drafter,
        "n_max": group.n_max,
        "cases": len(group.entries),
        "compared": group.compared,
        "different": group.different,
        "acceptance": group.acceptance,
        "rejected": group.rejected,
        "verdicts": dict(group.counts),
        "worst": group.worst,
    }


def _case(entry: Entry) -> dict[str, Any]:
    row = entry.row
    names = ("id", "engine", "target", "quant", "drafter", "n_max", "prompt_id", "outcome")
    numbers = (*Verdict.__dataclass_fields__, "drafted", "accepted")
    margin = row.margin if row.margin is not None and math.isfinite(row.margin) else None
    found = {n: getattr(row, n) for n in (*names, *numbers)}
    return found | {"margin": margin, "verdict": entry.verdict}


def junit(run: Run) -> str:
    """A test suite per cell of the matrix and a test per case: a difference fails, a failed arm is an error."""
    top = ET.Element("testsuites", name=f"specbisect {text.visible(run.name)}")
    for group in run.groups.values():
        suite = ET.SubElement(
            top, "testsuite", name=f"{group.target}, {group.drafter} {group.n_max}"
        )
        tests = [_test(suite, entry) for entry in group.entries]
        for kind in ("failure", "error", "skipped"):
            key = {"failure": "failures", "error": "errors", "skipped": "skipped"}[kind]
            suite.set(key, str(sum(t == kind for t in tests)))
        suite.set("tests", str(len(tests)))
    for element in top.iter():
        for name, value in element.items():
            element.set(name, text.visible(value))
    ET.indent(top, " ")
    return ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _test(suite: ET.Element, entry: Entry) -> str:
    """Add a test; what became of it."""
    row = entry.row
    drafter = f"{row.drafter} {row.n_max}"
    test = ET.SubElement(
        suite, "testcase", classname=f"{entry.target}.{drafter}", name=f"{row.prompt_id} {row.id}"
    )
    if row.outcome in DIFFERENT:
        at = f"token {row.fork}: {row.reference_token} without, {row.speculative_token} with the drafter"
        said = f"{entry.verdict}: {row.reason or at}"
        ET.SubElement(test, "failure", type=row.outcome, message=said)
        return "failure"
    if entry.verdict not in ("agree", "none", "unexercised", "not-engaged", "invalid", "failed"):
        ET.SubElement(test, "failure", type=entry.verdict, message="the tokens agree")
        return "failure"
    if row.outcome in ("failed", "invalid"):
        ET.SubElement(test, "error", type=row.outcome, message=row.reason)
        return "error"
    if row.outcome == "unexercised":
        ET.SubElement(test, "skipped", message=row.reason)
        return "skipped"
    return ""


FORMATS: Mapping[str, tuple[str, Callable[[Run], str]]] = {
    "html": ("index.html", page),
    "md": ("report.md", markdown),
    "json": ("report.json", document),
    "junit": ("junit.xml", junit),
}
"""File name and renderer of each format."""
