"""The demo on its real model, as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.network


def specbisect(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specbisect", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a demo, and the table it printed."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    done = specbisect("demo", "--base", smollm2, "-o", directory)
    assert done.returncode == 0, done.stderr
    assert "What this means" in done.stderr
    return directory, done.stdout


@pytest.fixture(scope="module")
def found(run: tuple[Path, str]) -> dict[str, Any]:
    done = specbisect("show", run[0], "--json")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_every_case_ran(found: dict[str, Any]) -> None:
    assert len(found["cases"]) == 50
    assert {case["outcome"] for case in found["cases"]} <= {
        "agree",
        "fork",
        "length",
        "degenerate",
        "unexercised",
    }
    assert {case["quant"] for case in found["cases"]} == {"BF16", "Q8_0", "Q4_K_M"}


def test_models_are_loaded_once_and_vanilla_arms_are_shared(found: dict[str, Any]) -> None:
    assert found["counters"]["model_loads"] == 3 + 1
    assert found["counters"]["vanilla_runs"] == 4 * 5


def test_a_draft_model_of_the_same_family_is_accepted_often(found: dict[str, Any]) -> None:
    cases = [case for case in found["cases"] if case["drafter"] == "draft-model"]
    assert sum(case["accepted"] for case in cases) > 0.2 * sum(case["drafted"] for case in cases)
    assert any(case["rejected"] for case in cases)


def test_the_demo_again_only_shows_what_is_there(run: tuple[Path, str], smollm2: Path) -> None:
    done = specbisect("demo", "--base", smollm2, "-o", run[0])
    assert (done.returncode, done.stdout) == (0, run[1])


def test_every_verdict_follows_from_the_two_arms(run: tuple[Path, str], found: Any) -> None:
    case = next((c for c in found["cases"] if c["outcome"] == "fork"), found["cases"][0])
    whole = json.loads(specbisect("show", run[0], "--case", case["id"], "--json").stdout)
    vanilla, speculative = whole["vanilla"], whole["speculative"]
    same = case["compared"]
    assert vanilla["ids"][:same] == speculative["ids"][:same]
    assert vanilla["prompt_ids"] == speculative["prompt_ids"]
    if case["outcome"] == "fork":
        assert vanilla["ids"][same] == case["reference_token"] != case["speculative_token"]
        assert vanilla["margins"][same] == case["margin"]
        assert 0 < whole["margin_percentile"] <= 100
    assert sum(len(cycle["batch"]) - 1 for cycle in speculative["cycles"]) == case["drafted"]
