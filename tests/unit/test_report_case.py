"""The files of a report on a case: complete, reproducible, and safe whatever the prompt holds."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from findings import CYCLES, DRAFT, HOST, PROMPT_IDS, TARGET, finding, narrowed, trace
from hostile import HOSTILE, hostile
from specbisect.cell import DraftModel, Prompt
from specbisect.cmdline import issue_file
from specbisect.diagnose.finding import Evidence
from specbisect.errors import BadInput
from specbisect.fault import Fault
from specbisect.report import capsule, case, file, hardware, planted, subject
from specbisect.report.scrub import Scrubber
from specbisect.trace import Cycle, Failure

FORM = (
    "Name and Version",
    "Operating systems",
    "GGML backends",
    "Hardware",
    "Models",
    "Problem description & steps to reproduce",
    "First Bad Commit",
    "Relevant log output",
)
"""Labels of llama.cpp's .github/ISSUE_TEMPLATE/011-bug-results.yml, in its order."""
LONGEST_ISSUE = 65_536
CLEAN = Scrubber({}, {})


def files(found: Any, *more: Any, **options: Any) -> dict[str, str]:
    return case.files(found, *more, scrubber=CLEAN, **options)


def outside(issue: str) -> list[str]:
    """The lines outside of code blocks."""
    kept, fence = [], ""
    for line in issue.split("\n"):
        if mark := re.match(r"`{3,}", line):
            fence = "" if line == fence else fence or mark[0]
        elif not fence:
            kept.append(line)
    assert not fence, "a code block is open to the end"
    return kept


def headings(issue: str) -> list[str]:
    return [line.removeprefix("### ") for line in outside(issue) if line.startswith("#")]


@pytest.mark.parametrize("label", ["batch-width", "state", "verification", "unexplained", "none"])
def test_the_issue_has_the_headings_of_the_form(label: str) -> None:
    assert tuple(headings(files(finding(label))["issue.md"])) == FORM


def test_the_issue_says_who_wrote_it_first() -> None:
    first = files(finding())["issue.md"].split("\n")[0]
    assert first.startswith("<!--")
    for words in ("measuring tool", "no language model", "add your own words"):
        assert words in first


def test_only_numerics_are_called_expected() -> None:
    assert "expected" in files(finding())["issue.md"].split("### ")[0]
    assert "treats this class" not in files(finding("state"))["issue.md"]


def test_the_issue_tells_everything_of_the_fork() -> None:
    issue = files(finding())["issue.md"]
    for wanted in (
        '| **4** | 9 | `" t9"` | 4.5 | 90 | `" t90"` | 1 / 0 |',
        "| envelope at width 4 | median 0.1, p95 0.4, largest 0.75 |",
        "| replay | every verify batch again | rows bit-identical in 2 of 2 cycles |",
        "| 3 | 2 | 1 | 0.500 |",
        "| n_threads | 0 | 0 | 2 |",
        "a" * 64,
        "1, 20, 21, 22",
        "Once upon a time",
    ):
        assert wanted in issue


def test_the_issue_names_the_commit_of_llama_cpp_and_a_processor_once() -> None:
    found = finding()
    host = {**HOST, "llama_cpp": "0c1e570 (ggml 0.25.3)"}
    for arm in (found.vanilla, found.speculative):
        object.__setattr__(arm, "provenance", {**arm.provenance, "host": host})
    for name in ("issue.md", "git-bisect.md"):
        assert f"llama.cpp 0c1e570 (ggml 0.25.3), in {HOST['library']}" in files(found)[name]
    assert files(found)["issue.md"].count("Some CPU") == 1
    own = hardware.of(subject.of(finding(), scrubber=CLEAN))
    assert own.library == HOST["library"]


def test_the_issue_can_be_read_as_a_bug_report() -> None:
    read = issue_file(files(finding())["issue.md"], ())
    assert read.command is not None
    assert (read.command.target, read.command.draft) == (
        "SmolLM2.Q4_K_M.gguf",
        "SmolLM2.Q2_K.gguf",
    )
    assert read.command.settings["n_predict"] == 8
    assert read.command.cell(finding().case.cell.target, DRAFT).drafter == DraftModel(DRAFT, 3)
    assert read.prompts == ("Once upon a time",)
    assert not read.problems


def test_the_issue_says_how_both_models_are_made_and_from_what() -> None:
    found = finding()
    made = [f"quantize:{'d' * 64}:{quant}:library" for quant in ("Q4_K_M", "Q2_K")]
    target, draft = (replace(m, identity=i) for m, i in zip((TARGET, DRAFT), made, strict=True))
    cell = replace(found.case.cell, target=target, drafter=DraftModel(draft, 3))
    issue = files(found.model_copy(update={"case": replace(found.case, cell=cell)}))["issue.md"]
    base = f"# SmolLM2.gguf: sha256 {'d' * 64}"
    for quant in ("Q4_K_M", "Q2_K"):
        wanted = f"SmolLM2.gguf SmolLM2.{quant}.gguf {quant}  {base}"
        assert f"llama-quantize --allow-requantize {wanted}" in issue
    assert "llama-quantize" not in files(finding())["issue.md"]


def test_the_issue_explains_the_words_it_uses() -> None:
    issue = files(finding())["issue.md"]
    assert "- *envelope*: how much" in issue
    assert "- *accumulated*: the batch alone does not" in issue
    assert "- *at-fork*" not in issue
    assert "- *" not in files(finding("state", evidence=()))["issue.md"]


@pytest.mark.parametrize("name", ["repro.py", "op_repro.py"])
def test_programs_explain_themselves_and_bear_a_closed_pipe(name: str, tmp_path: Path) -> None:
    node = SimpleNamespace(result=SimpleNamespace(ne=(1,)))
    operation: Any = SimpleNamespace(
        described=lambda: "ADD()", node=node, block=None, departs=[2], faithful=True
    )
    text = files(finding())["repro.py"] if name == "repro.py" else capsule.text(operation)
    (tmp_path / name).write_text(text)
    command = [sys.executable, str(tmp_path / name), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (125, "")
    assert f"python {name} " in shown.stdout
    reading, writing = os.pipe()
    os.close(reading)
    closed = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (closed.returncode, closed.stderr) == (125, b"")


def test_the_shell_program_names_a_server_that_ends_in_silence(tmp_path: Path) -> None:
    found = finding()
    for arm in (found.vanilla, found.speculative):
        object.__setattr__(arm, "provenance", {"host": HOST})  # any file is the model
    case.write(tmp_path, files(found))
    (tmp_path / "model.gguf").touch()
    server = shutil.which("true")
    assert server is not None
    shown = subprocess.run(
        ["bash", "repro.sh", "model.gguf", "model.gguf"],
        cwd=tmp_path,
        env={**os.environ, "LLAMA_SERVER": server, "PORT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 125
    assert f"{server} ended: it printed nothing" in shown.stdout


def test_the_width_upstream_is_told_is_that_of_the_traced_batch() -> None:
    node = Evidence(experiment="first-node", run="a batch of 4 rows", outcome="MUL_MAT departs")
    widths = Evidence(experiment="widths", run="", outcome="", data={"departs_at": 2})
    found = finding().model_copy(update={"evidence": (node, widths)})
    assert "in a batch of 4 rows, MUL_MAT departs" in files(found)["issue.md"].split("### ")[0]


def test_the_issue_of_a_narrowed_case_sets_it_against_the_original() -> None:
    found = finding()
    issue = files(found, narrowed(found))["issue.md"]
    for wanted in (
        "41 trials; proved 1-minimal",
        "| n_predict | 8 | 5 |",
        "| n_max | 3 | 2 | none | `python repro.py SmolLM2.Q4_K_M.gguf width=3` |",
        "`python repro.py SmolLM2.Q4_K_M.gguf use_extra_bufts=0` |",
        "| target | Q4_K_M | Q8_0 | none |  |",
        "| 4 | batch-width |",
        "| Q6_K | none |",
        "n_ubatch + type_k",
        "| flash_attn | on | auto | on, off |",
        "| blk.1.ffn_down.weight | Q4_K | Q8_0 | none | batch-width | all of them |",
        "--tensor-type blk.1.ffn_down=q4_K",
    ):
        assert wanted in issue


@hostile
def test_a_hostile_prompt_stays_inside(found: str) -> None:
    whole = files(finding(text=found, summary=found[:200]))
    for text in whole.values():
        text.encode()
    issue = whole["issue.md"]
    assert tuple(headings(issue)) == FORM
    assert len(issue) < LONGEST_ISSUE
    lines = outside(issue)
    assert lines.count("<details>") == lines.count("</details>") == 3
    compile(whole["repro.py"], "repro.py", "exec")
    assert file.load(whole["finding.json"]).finding.case.prompt.text == found


def test_a_hostile_piece_of_an_answer_stays_in_its_cell() -> None:
    found = finding()
    pieces = tuple(t.encode("utf-8", "replace").decode("latin-1")[:40] for t in HOSTILE[:8])
    object.__setattr__(found.vanilla, "pieces", pieces)
    issue = files(found)["issue.md"]
    rows = [line for line in issue.split("\n") if line.startswith(("| 1 |", "| **4** |"))]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows if "t90" in row] == [8]
    assert tuple(headings(issue)) == FORM


def test_the_same_finding_gives_the_same_bytes() -> None:
    found = finding()
    first, again = files(found, narrowed(found)), files(finding(), narrowed(finding()))
    later = files(found, narrowed(found), created="2026-01-01T00:00:00+00:00")
    assert first == again
    assert {name for name in first if first[name] != later[name]} == {"finding.json", case.SUMS}


def test_the_sums_are_those_of_the_files(tmp_path: Path) -> None:
    texts = files(finding())
    case.write(tmp_path, texts)
    for line in (tmp_path / case.SUMS).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert set(texts) == {
        "issue.md",
        "repro.py",
        "repro.sh",
        "git-bisect.md",
        "finding.json",
        case.SUMS,
    }


def test_a_directory_that_cannot_be_made_is_the_users_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="choose another directory"):
        case.write(tmp_path / "file" / "below", files(finding()))


def test_the_finding_can_be_read_back_with_numbers_that_are_none() -> None:
    found = finding()
    object.__setattr__(
        found.vanilla, "margins", (float("nan"), float("inf"), *found.vanilla.margins[2:])
    )
    text = files(found)["finding.json"]
    assert "NaN," not in text.replace('"NaN"', "")
    read = file.load(text).finding.vanilla
    assert read.margins[0] != read.margins[0]
    assert read.margins[1] == float("inf")


def test_the_finding_keeps_to_its_published_schema() -> None:
    schema = file.FindingFile.model_json_schema(by_alias=True)
    for texts in (files(finding()), files(finding(), narrowed(finding()), redact_prompt=True)):
        jsonschema.validate(json.loads(texts["finding.json"]), schema)
        assert file.load(texts["finding.json"]).schema_ == "specbisect.report/1"


def test_a_redacted_report_has_neither_text_nor_ids() -> None:
    secret = "a sentence that nobody should read"
    ids = (40001, 40002, 40003, 40004)
    found = finding(text=secret)
    for arm in (found.vanilla, found.speculative):
        object.__setattr__(arm, "prompt_ids", ids)
    object.__setattr__(found, "case", replace(found.case, prompt=Prompt("p", secret, ids=ids)))
    found = found.model_copy(update={"summary": f"after {secret}"})
    for name, text in files(found, redact_prompt=True).items():
        assert secret not in text, name
        assert "40002" not in text, name
        if name in ("issue.md", "finding.json", "repro.py"):
            assert subject.ids_digest(ids) in text, name


def test_an_arm_that_failed_is_reported_without_programs() -> None:
    failed = finding("unexplained", speculative=Failure("verify 3", "aborted", ("GGML_ASSERT(x)",)))
    texts = files(failed)
    assert "repro.py" not in texts
    assert "repro.py: none, because an arm failed" in texts["issue.md"]
    assert "GGML_ASSERT(x)" in texts["issue.md"]


def test_a_planted_fault_is_called_one() -> None:
    found = finding("state")
    spoiled = found.model_copy(update={"case": replace(found.case, fault=Fault("stale-kv", 1))})
    texts = files(spoiled)
    assert "PLANTED: llama.cpp does not have this defect" in texts["repro.py"]
    assert "planted fault" in texts["issue.md"]
    assert "repro.sh" not in texts


@pytest.mark.parametrize(
    ("kind", "cycle", "base"),
    [
        ("stale-kv", 1, 4),
        ("stale-kv", 3, 9),
        ("swapped-positions", 2, 12),
        ("rollback-skipped", 0, 4),
        ("wrong-checkpoint", 0, 9),
        ("foreign-token", 2, 9),
    ],
)
def test_faults_strike_where_the_engine_lets_them(kind: Any, cycle: int, base: int) -> None:
    cycles = (
        Cycle(4, (5, 6, 60), 1),
        Cycle(6, (7, 8, 9), 2),
        Cycle(9, (10, 11, 12), 0),
        Cycle(10, (11, 11, 12), 1),
        Cycle(12, (13, 14, 15), 1),
    )
    strike = planted.strike(Fault(kind, cycle), trace("speculative", tuple(range(5, 16)), cycles))
    assert strike is not None
    assert strike.base == base


def test_a_row_is_found_in_its_cycle() -> None:
    about = subject.of(finding(), scrubber=CLEAN)
    assert about.place is not None
    assert (about.place.number, about.place.row, about.place.cycle) == (1, 0, CYCLES[1])
    assert about.prompt_ids == PROMPT_IDS
