"""Pasted command lines and bug reports: files under tests/cases/cmdline, each named by what is the matter with it."""

import re
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbisect.cell import DRAFTERS, Cell, Model
from specbisect.cmdline import CommandLine, issue_file, mapped, parse, table
from specbisect.errors import BadInput

CASES = Path(__file__).parent.parent / "cases" / "cmdline"
LINES = sorted((CASES / "lines").glob("*.toml"))
REPORTS = sorted((CASES / "reports").glob("*.md"))
KEYS = {
    "line", "maps", "warns", "settings", "drafter", "irrelevant", "not_understood", "missing", "prompt", "target",
}  # fmt: skip


def model(path: str) -> Model:
    return Model(Path(path).stem, "?", f"file:{path}", path)


def drafter_of(line: CommandLine) -> dict[str, Any]:
    drafter = line.drafter(model(line.draft) if line.draft else None)
    if drafter is None:
        return {}
    found = asdict(drafter)
    if "model" in found:
        found["model"] = found["model"]["path"] if found["model"] else ""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.stem)
def test_line(path: Path) -> None:
    case = tomllib.loads(path.read_text())
    assert case.keys() <= KEYS
    line = parse(case["line"], [tuple(pair) for pair in case.get("maps", ())])
    fates: dict[str, list[str]] = {"used": [], "irrelevant": [], "not understood": []}
    for note in line.notes:
        fates[note.fate].append(note.written)
        assert note.why

    if "warns" in case:
        unexpected = [
            w for w in line.warnings if not any(expected in w for expected in case["warns"])
        ]
        missed = [w for w in case["warns"] if not any(w in warning for warning in line.warnings)]
        assert (missed, unexpected) == ([], [])
    if "settings" in case:
        assert line.settings == case["settings"]
    if "drafter" in case:
        assert drafter_of(line) == case["drafter"]
    if "not_understood" in case:  # absent: not looked at; empty: every word is understood
        assert fates["not understood"] == case["not_understood"]
    for written in case.get("irrelevant", ()):
        assert written in fates["irrelevant"]
    if "missing" in case:
        assert len(line.missing) == len(case["missing"])
        assert all(
            found.startswith(m) for found, m in zip(line.missing, case["missing"], strict=True)
        )
    if "prompt" in case:
        assert line.prompt == case["prompt"]
    if "target" in case:
        assert line.target == case["target"]
    assert isinstance(line.cell(model("t"), model("d") if line.draft else None), Cell)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("llama-server -m", "-m lacks its value"),
        ("llama-server -m 't.gguf", "the quotes in .* do not match"),
        ("what is this?", "no llama.cpp program in 'what is this.'"),
        ("", "no llama.cpp program"),
        ("llama-server -c many", "-c many: that is no number"),
        ("llama-server -fa on --spec-draft-n-max 1.5", "that is no number"),
        ("LLAMA_ARG_FLASH_ATTN=perhaps llama-server", "flash attention is on, off or auto"),
        ("llama-server --temp warm", "--temp warm: that is no number"),
    ],
)
def test_what_cannot_be_read_is_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_every_flag_of_llama_cpp_is_known_under_each_of_its_names() -> None:
    for name in (
        "-m",
        "--model",
        "-np",
        "-md",
        "--model-draft",
        "-ctkd",
        "--no-webui",
        "-nkvo",
        "-cd",
        "--spec_type",
    ):
        assert table.flag(name), name
    assert table.flag("--no-kv-unified") == table.Flag("--kv-unified", 0, negated=True)
    assert table.flag("--control-vector-layer-range") == table.Flag(
        "--control-vector-layer-range", 2
    )
    assert table.variable("LLAMA_ARG_NO_MMAP") == table.Flag("--mmap", 0, negated=True)
    assert table.flag("--no-such-flag") is None


@pytest.mark.parametrize(
    "name", sorted({*table.IRRELEVANT, *table.RENAMED, *table.RENAMED.values()})
)
def test_what_is_said_about_a_flag_is_about_one_that_exists(name: str) -> None:
    flag = table.flag(name)
    assert flag is not None
    assert flag.name == name


def test_drafters_of_lines_are_drafters_of_cells() -> None:
    methods = {tomllib.loads(p.read_text()).get("drafter", {}).get("method") for p in LINES} - {
        None
    }
    assert methods <= DRAFTERS.keys()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/a/b.gguf", "/here/a/b.gguf"),
        ("/models/special/b.gguf", "/elsewhere/b.gguf"),
        ("/modelsx/b.gguf", "/modelsx/b.gguf"),
        (r"C:\models\a\b.gguf", "/win/a/b.gguf"),
        ("org/repo:Q4", "/here/q4.gguf"),
    ],
)
def test_paths_are_mapped_by_their_longest_prefix(path: str, expected: str) -> None:
    maps = [
        ("/models", "/here"),
        ("/models/special/", "/elsewhere"),
        (r"C:\models", "/win"),
        ("org/repo:Q4", "/here/q4.gguf"),
    ]
    assert mapped(path, maps) == expected


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_report(path: Path) -> None:
    """Each ``<name>.md`` has its ``<name>.toml``: what is understood, warned of, missing, and unreadable."""
    expected = tomllib.loads(path.with_suffix(".toml").read_text())
    report = issue_file(path.read_text())
    assert list(report.understood) == expected["understood"]
    assert list(report.missing) == expected["missing"]
    for warning in expected.get("warns", ()):
        assert any(warning in found for found in report.warnings), warning
    assert [
        bool(re.search(p, found))
        for p, found in zip(expected.get("problems", ()), report.problems, strict=True)
    ] == [True for _ in report.problems]


def test_a_report_with_nothing_in_it_says_what_it_needs() -> None:
    report = issue_file("It does not work. llama-server is broken!")
    assert report.command is None
    assert report.understood == ()
    assert report.missing[0] == "the command line"


PIECES = r"""
llama-server llama-cli -m t.gguf -md --spec-type draft-simple ngram-mod none -np 4 ' " | ` curl -d ## Prompt $ = -
http://h/completion {"prompt":"a"} --draft-max 0.5 -fa -ctkd --repeat-penalty LLAMA_ARG_THREADS=x --unknown= 'a\nb' -hf
"""
WORDS = st.sampled_from(
    [*PIECES.replace("\\n", "\n").split(" "), "\\\n", "^\n", "```\n", "\n", "\n    "]
)
TEXTS = st.lists(WORDS | st.text(max_size=8), max_size=30).map(" ".join)


def refusal(text: str) -> str:
    try:
        parse(text)
    except BadInput as reason:
        return str(reason)
    return ""


@given(TEXTS)
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    assert "\n" not in refusal(text)


@given(TEXTS)
def test_any_report_is_read(text: str) -> None:
    report = issue_file(text)
    assert all("\n" not in line for line in (*report.understood, *report.missing, *report.problems))
