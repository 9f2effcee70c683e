"""A gate's verdict as JUnit XML: suite ``tokens`` with one test case per case, suite ``quality`` with one per check."""

from collections.abc import Iterable
from xml.etree import ElementTree as ET

from specbisect.cell import drafter_label
from specbisect.gate.causes import UNTESTED, Judged
from specbisect.gate.verdict import Check, GateVerdict

_KINDS = ("failure", "error", "skipped")


def junit(verdict: GateVerdict, name: str) -> str:
    """The XML text. Failing cases carry their cause and evidence; cases that were not tested are skipped or errors."""
    root = ET.Element("testsuites", name=f"specbisect gate {name}")
    tokens = [_case(case, verdict) for case in verdict.cases]
    quality = [_check(check) for check in verdict.checks if check.kind == "quality"]
    for suite, found in (("tokens", tokens), ("quality", quality)):
        root.append(_suite(suite, found, verdict))
    total = {key: sum(int(suite.get(key, 0)) for suite in root) for key in ("tests", *_counted())}
    for key, count in total.items():
        root.set(key, str(count))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counted() -> tuple[str, ...]:
    return tuple("skipped" if kind == "skipped" else f"{kind}s" for kind in _KINDS)


def _suite(name: str, found: Iterable[ET.Element], verdict: GateVerdict) -> ET.Element:
    suite = ET.Element("testsuite", name=name)
    notes = [*(("forced", text) for text in verdict.forced)]
    notes += [("accepted", text) for text in verdict.accepted]
    if notes:
        properties = ET.SubElement(suite, "properties")
        for key, text in notes:
            ET.SubElement(properties, "property", name=key, value=_xml(text))
    suite.extend(found)
    suite.set("tests", str(len(suite.findall("testcase"))))
    for kind, key in zip(_KINDS, _counted(), strict=True):
        suite.set(key, str(len(suite.findall(f"testcase/{kind}"))))
    return suite


def _case(case: Judged, verdict: GateVerdict) -> ET.Element:
    row, check, state = case.row, verdict.of(case), verdict.state_of(case)
    made = ET.Element("testcase", classname=f"{row.target}.{row.quant}", name=_xml(case.name))
    text = "\n".join([case.summary, *case.evidence, f"the cell: {check.said}", f"case {row.id}"])
    if case.cause in ("failed", "invalid"):
        _result(made, "error", case.cause, case.summary, text)
    elif state == "inconclusive":
        why = case.summary if case.cause in UNTESTED else check.said
        _result(made, "skipped", case.cause, f"{case.cause}: {why}", text)
    elif state == "fail":
        _result(made, "failure", case.cause, f"{case.cause}: {case.summary}", text)
    elif case.departs:
        ET.SubElement(made, "system-out").text = _xml(text)
    return made


def _check(check: Check) -> ET.Element:
    cell = check.cell
    name = f"{drafter_label(cell.drafter)} n_max={cell.width - 1} {check.subject} ({cell.key})"
    made = ET.Element(
        "testcase", classname=f"{cell.target.name}.{cell.target.quant}", name=_xml(name)
    )
    if check.state != "pass":
        kind = "failure" if check.state == "fail" else "skipped"
        _result(made, kind, check.subject, check.said, check.said)
    return made


def _result(case: ET.Element, kind: str, what: str, message: str, text: str) -> None:
    made = ET.SubElement(case, kind, type=what, message=_xml(message))
    made.text = _xml(text)


def _xml(text: str) -> str:
    """`text` without the characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
