"""What the page on the release gate says is what the program does."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from specbisect.diagnose.finding import Label
from specbisect.gate.identity import PARTS
from specbisect.gate.policy import Acceptance, Allow, Allowable, Policy, prompts_needed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "release-gate.md").read_text()


def test_the_policy_is_one_and_every_key_is_described() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    Policy.model_validate(tomllib.loads(text))
    written = set(re.findall(r"`([\w-]+)`", PAGE)) | set(
        re.findall(r"^(\w+) =", text, re.MULTILINE)
    )
    for table in (Policy, Allow, Acceptance):
        keys = {field.alias or name for name, field in table.model_fields.items()}
        assert keys - written - {"allow", "acceptance"} <= {"min_drafted"}


def test_parts_and_labels_that_can_never_be_allowed() -> None:
    assert all(f"`{part}`" in PAGE for part in PARTS)
    (text,) = re.findall(r"says so, and (.*?) can never be", PAGE, re.DOTALL)
    never = set(re.findall(r"`([\w-]+)`", text))
    assert never == {*get_args(Label), "degenerate"} - {
        *get_args(Allowable), "none", "not-engaged", "draft-alignment",
    }  # fmt: skip


def test_the_number_of_prompts_is_right() -> None:
    assert "one departing prompt among 93 shows 5 %" in PAGE
    assert prompts_needed(1, 0.05, 0.95) == 93


def test_the_workflow_is_yaml_and_its_steps_do_something() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    steps = yaml.safe_load(text)["jobs"]["gate"]["steps"]
    assert all("uses" in step or "run" in step for step in steps)
