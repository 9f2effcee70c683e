"""What the demo says: true counts, and commands that work from where the person is."""

import sys
import time
from pathlib import Path

import pytest

from specbisect.cli import demo, run
from specbisect.cli.program import program
from specbisect.cli.verdicts import Verdicts
from specbisect.runner import Summary


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an installation in a virtual environment that is not on PATH."""
    there = tmp_path / "my .venv" / "bin"
    there.mkdir(parents=True)
    (there / "specbisect").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(there / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return there


def test_the_program_is_called_as_it_can_be_called(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert program() == f"'{installed / 'specbisect'}'"
    monkeypatch.chdir(tmp_path)
    assert program() == "'my .venv/bin/specbisect'"
    monkeypatch.setenv("PATH", str(installed))
    assert program() == "specbisect"


def test_the_demo_counts_every_case_and_names_the_next_step(installed: Path) -> None:
    text = "\n".join(
        demo.meaning(Verdicts({"fork": 17, "agree": 32, "unexercised": 1}), Path("runs/demo"))
    )
    assert "In 17 of 49 cases" in text
    assert "Not counted, because they tested nothing: 1 unexercised." in text
    assert f"  {program()} diagnose runs/demo " in text
    same = "\n".join(demo.meaning(Verdicts({"agree": 50}), Path("runs/demo")))
    assert "Not counted" not in same
    assert "diagnose" not in same


def test_without_a_terminal_a_line_now_and_then_says_how_far_a_run_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 1.0, 31.0, 32.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with run._Bar(50) as bar:
        for done in (1, 7, 8):
            bar.show(Summary({"agree": done - 1, "fork": 1}, 0))
    assert capsys.readouterr().err == "7 of 50 cases, forks 1, failed 0\n"
