"""What the README and the pages beside it say is what the program does."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import click
import pytest

from specbisect import cli, matrix
from specbisect.cell import AXES, DRAFTERS
from specbisect.compare import Outcome
from specbisect.matrix import reading, schema

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {
    path.name: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
}
LINES = [
    pytest.param(re.split(r"   #| >", line)[0].strip(), id=f"{name}: {line.strip()}")
    for name, text in PAGES.items()
    for block in re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip().startswith("specbisect ")
]


def command(name: str) -> click.Command:
    return cli.cli.get_command(click.Context(cli.cli), name)


def table(header: str) -> list[list[str]]:
    """The cells of the README's table whose first column is called so."""
    (body,) = re.findall(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", README, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_is_one(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command(name).make_context(name, arguments)


def test_every_script_is_there() -> None:
    scripts = set(re.findall(r"scripts/\w+(?:\.py)?", "".join(PAGES.values())))
    assert scripts >= {"scripts/demo", "scripts/test"}
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_every_command_is_described() -> None:
    assert [names(row[0])[0] for row in table("command")] == list(cli.COMMANDS)


def test_every_option_in_the_text_is_one() -> None:
    known = {o for name in cli.COMMANDS for p in command(name).params for o in p.opts}
    written = set(re.findall(r"`(--?[a-z][\w-]*)", re.sub(r"`--spec-type`", "", README)))
    assert written <= known


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help_and_json(name: str) -> None:
    options = {o for parameter in command(name).params for o in parameter.opts}
    assert "--json" in options
    assert command(name).help
    for parameter in command(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts


def test_every_outcome_is_explained() -> None:
    assert [names(row[0])[0] for row in table("outcome")] == list(get_args(Outcome))


def test_every_drafter_is_described_with_its_parameters() -> None:
    described = {names(row[0])[0]: names(row[2]) for row in table("method")}
    assert described == {
        method: [n for n in kind.__dataclass_fields__ if n not in ("method", "model")]
        for method, kind in DRAFTERS.items()
    }


def test_every_axis_is_listed() -> None:
    assert [name for row in table("axis") for name in names(row[0])] == list(AXES)


def test_the_matrix_of_the_readme_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    reading.validate(schema.MATRIX, tomllib.loads(text), "README.md", text)


def test_every_shipped_matrix_is_named() -> None:
    (text,) = re.findall(r"^Shipped, and usable by name.*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert set(names(text)) >= set(matrix.shipped())


def test_the_changelog_knows_every_command() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in cli.COMMANDS if f"`{name}`" not in text] == []
