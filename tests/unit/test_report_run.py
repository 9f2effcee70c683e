"""What a report says of a whole run, in every format."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

import fakes
from findings import finding, narrowed
from hostile import HOSTILE
from specbisect.cell import Case, Prompt
from specbisect.cli.report import FORMATS as CHOICES
from specbisect.cli.report import command
from specbisect.compare import compare
from specbisect.errors import BadInput
from specbisect.report import page, run, stored
from specbisect.report.formats import FORMATS
from specbisect.report.run import SEVERITY, UNDIAGNOSED, Run
from specbisect.report.scrub import Scrubber
from specbisect.store import Store
from specbisect.trace import Failure

CLEAN = Scrubber({}, {})
LARGEST_PAGE = 5_000_000


def fill(store: Store, cases: Iterator[Case], failing: int = 13) -> None:
    """Every case run with made-up arms; every so many fail, forks of one drafter have a finding."""
    with store.transaction():
        for place, case in enumerate(cases):
            vanilla, speculative = fakes.arm(case.vanilla), fakes.arm(case)
            arm = speculative if place % failing else Failure("verify 3", "aborted <b>here</b>", ())
            store.save_arm(case.vanilla.key, vanilla)
            store.save_arm(case.key, arm)
            verdict = compare(vanilla, arm)
            store.save_case(place, case, verdict, arm)
            if verdict.outcome == "fork" and case.cell.width == 3:
                told = replace(case, prompt=replace(case.prompt, text='"label":"verification"'))
                found = finding("state", case=told, verdict=verdict)
                store.save_finding(case.key, found.model_dump_json(by_alias=True))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("run") / "a run"
    with Store.create(path, "plan", {}) as made:
        fill(made, fakes.plan(quants=3, drafters=3, prompts=("",) * 20))
        yield made


@pytest.fixture(scope="module")
def found(store: Store) -> Run:
    return run.read(store, CLEAN)


def test_every_case_is_in_one_cell(found: Run) -> None:
    assert len(found.entries) == 180
    assert sum(len(g.entries) for g in found.groups.values()) == 180
    assert found.targets == ["Q0", "Q1", "Q2"]
    assert found.drafters == [("draft-model", 1), ("draft-model", 2), ("draft-model", 3)]


def test_a_case_comes_to_its_label_or_else_to_its_outcome(found: Run) -> None:
    for entry in found.entries:
        expected: str = entry.row.outcome
        if expected == "fork":
            expected = "state" if entry.row.n_max == 2 else UNDIAGNOSED
        assert entry.verdict == expected
    for group in found.groups.values():
        assert group.worst == min((e.verdict for e in group.entries), key=SEVERITY.index)


def test_failures_take_no_part_in_the_share_that_differs(found: Run) -> None:
    for group in found.groups.values():
        failed = sum(e.row.outcome == "failed" for e in group.entries)
        assert group.compared == len(group.entries) - failed
        assert group.different == sum(e.row.fork is not None for e in group.entries)
    (failure,) = found.failures()
    assert failure[:2] == ("failed: speculative arm, verify 3: aborted <b>here</b>", 14)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_run_gives_the_same_bytes(name: str, store: Store, found: Run) -> None:
    _, made = FORMATS[name]
    assert made(found) == made(run.read(store, CLEAN))


def test_the_formats_are_those_of_the_command() -> None:
    assert tuple(FORMATS) == CHOICES


class Links(HTMLParser):
    """Ids, links and elements of a page; complains about elements that are not closed in order."""

    VOID = ("meta", "link", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        self.names.add(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [v for k, v in given.items() if k in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)


def test_every_link_of_the_page_leads_into_it(found: Run) -> None:
    links = Links(page.page(found))
    assert len(set(links.ids)) == len(links.ids)
    inside = {link.removeprefix("#") for link in links.links if link.startswith("#")}
    assert inside <= set(links.ids)
    assert {f"g{i}" for i in range(len(found.groups))} <= inside
    assert [link for link in links.links if not link.startswith(("#", "data:"))] == []
    assert links.names.isdisjoint({"script", "b>here", "iframe", "img"})


def test_the_page_draws_what_there_is(found: Run) -> None:
    html = page.page(found)
    for title in ("No difference yet", "Margins of forks", "Acceptance by draft position"):
        assert f"<figcaption>{title}" in html
    assert "2026" not in re.sub(r'd="[^"]*"', "", html)


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", "plan", {}) as made:
        cases = fakes.plan(quants=1, drafters=1, prompts=HOSTILE[:1])
        names = [text.encode("utf-8", "replace").decode()[:300] for text in HOSTILE]
        cell = next(iter(cases)).cell
        cell = replace(cell, target=replace(cell.target, quant="<i>$x^2$</i>"))
        fill(made, (Case(cell, Prompt(name, name)) for name in names), failing=3)
        found = run.read(made, CLEAN)
    for name, (_, make) in FORMATS.items():
        text = make(found)
        text.encode()
        if name == "html":
            assert Links(text).names.isdisjoint({"script", "i"})
        if name == "junit":
            assert sum(suite.tests for suite in JUnitXml.fromstring(text.encode())) == len(names)
        if name == "md":
            assert "<script>" not in text


def test_junit_counts_differences_as_failures(found: Run) -> None:
    suites = list(JUnitXml.fromstring(FORMATS["junit"][1](found).encode()))
    assert sum(s.tests for s in suites) == 180
    assert sum(s.failures for s in suites) == found.outcomes["fork"]
    assert sum(s.errors for s in suites) == 14
    assert {len(list(s)) for s in suites} == {20}


def test_the_json_has_every_case(found: Run) -> None:
    text = json.loads(FORMATS["json"][1](found))
    assert text["schema"] == "specbisect.run-report/1"
    assert [c["id"] for c in text["cases"]] == [e.row.id for e in found.entries]
    assert sum(g["different"] for g in text["groups"]) == found.outcomes["fork"]


def test_a_page_of_twenty_thousand_cases_stays_small(found: Run) -> None:
    entries = [
        replace(e, row=e.row._replace(id=f"{n}-{e.row.id}", ordinal=n))
        for n, e in zip(range(20_000), found.entries * 112, strict=False)
    ]
    many: dict[Any, Any] = {}
    for number, entry in enumerate(entries):
        key = f"Q{number % 8}", ("draft-model", number % 10)
        many.setdefault(key, run.Group(key[0], *key[1])).entries.append(entry)
    large = replace(
        found,
        entries=entries,
        groups=many,
        targets=sorted({t for t, _ in many}),
        drafters=sorted({d for _, d in many}),
    )
    html = page.page(large)
    assert len(html.encode()) < LARGEST_PAGE
    assert html.count("<article") == len(many) == 40
    assert 5000 >= html.count("<tr><td><code>") > 4000


def test_the_latest_finding_counts_and_what_it_was_narrowed_to(store: Store) -> None:
    row = next(row for row in store.rows(outcome="fork") if row.n_max == 2)
    case = store.case(row.id)
    first, narrow = stored.latest(store, row.id)
    assert (first.label, narrow) == ("state", None)
    again = finding("verification", case=case)
    with store.transaction():
        store.save_finding(row.id, again.model_dump_json(by_alias=True))
    store.keep(f"narrowed:{row.id}", narrowed(again).model_dump_json(by_alias=True))
    latest, narrow = stored.latest(store, row.id)
    assert latest.label == "verification"
    assert narrow is not None
    assert narrow.trials == 41
    with store.transaction():
        store.save_finding(row.id, first.model_dump_json(by_alias=True))


def test_a_case_without_a_finding_is_to_be_diagnosed_first(store: Store) -> None:
    row = next(iter(store.rows(outcome="agree")))
    with pytest.raises(BadInput, match=f"specbisect diagnose .* --case {row.id[:8]}"):
        stored.latest(store, row.id)
    with store.transaction():
        store.save_finding(row.id, '{"schema":"specbisect.finding/0"}')
    with pytest.raises(BadInput, match="diagnose it again"):
        stored.latest(store, row.id)


def test_the_command_writes_what_it_lists(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(*arguments: str) -> list[Path]:
        command.main(
            [str(store.path), "-o", str(tmp_path / "out"), "--json", *arguments],
            standalone_mode=False,
        )
        return [Path(name) for name in json.loads(capsys.readouterr().out)["files"]]

    assert [p.name for p in report()] == ["index.html"]
    assert [p.name for p in report("--format", "md", "--format", "junit")] == [
        "report.md",
        "junit.xml",
    ]
    case = next(row.id for row in store.rows(outcome="fork") if row.n_max == 2)
    names = {p.name for p in report("--case", case[:10])}
    assert names >= {"issue.md", "finding.json", "SHA256SUMS"}
    assert all((tmp_path / "out" / name).is_file() for name in names)
    for wrong in (("--case", case, "--format", "md"), ("--redact-prompt",)):
        with pytest.raises(BadInput):
            report(*wrong)


def test_cells_of_another_setting_are_another_row(tmp_path: Path) -> None:
    cases = list(fakes.plan(quants=1, drafters=1, prompts=("",) * 2))
    narrow = [replace(c, cell=replace(c.cell, n_ubatch=4)) for c in cases]
    with Store.create(tmp_path / "run", "plan", {}) as made:
        fill(made, iter(cases + narrow))
        assert run.read(made, CLEAN).targets == ["Q0, n_ubatch 512", "Q0, n_ubatch 4"]


def test_only_a_difference_is_reported_and_into_a_directory_with_a_name(
    store: Store, tmp_path: Path
) -> None:
    row = list(store.rows(outcome="agree"))[1]
    nothing = finding("none", case=store.case(row.id))
    with store.transaction():
        store.save_finding(row.id, nothing.model_dump_json(by_alias=True))
    with pytest.raises(BadInput, match=f"case {row.id[:8]} shows no difference; there is nothing"):
        report(store, "--case", row.id, "-o", str(tmp_path / "out"))
    with pytest.raises(BadInput, match="-o is empty"):
        report(store, "-o", "")
    assert not (tmp_path / "out").exists()


def test_the_command_says_that_it_reports_the_narrowed_case_and_where_its_models_are(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = list(store.rows(outcome="fork"))[-1]
    whole = finding("verification", case=finding().case)
    with store.transaction():
        store.save_finding(row.id, whole.model_dump_json(by_alias=True))
    store.keep(f"narrowed:{row.id}", narrowed(whole).model_dump_json(by_alias=True))
    report(store, "--case", row.id, "-o", str(tmp_path))
    said = capsys.readouterr().err
    origin = f"smallest case found by narrowing case {row.id[:8]} (token 4 of the answer"
    assert origin in said
    assert "SmolLM2.Q4_K_M.gguf is /home/alice/models/SmolLM2.Q4_K_M.gguf" in said
    assert "mallest case found by narrowing case" in (tmp_path / "issue.md").read_text()
    assert "alice" not in "".join(p.read_text() for p in tmp_path.iterdir())


def report(store: Store, *arguments: str) -> None:
    command.main([str(store.path), *arguments], standalone_mode=False)
