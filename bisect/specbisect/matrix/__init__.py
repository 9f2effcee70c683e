"""Matrix files: from a TOML file to the cells and cases of a plan, validated and lazy."""

from importlib.resources import files as _package_files
from pathlib import Path

from specbisect.errors import BadInput, did_you_mean
from specbisect.matrix.building import Overrides, build, load
from specbisect.matrix.plan import Plan, label, matches
from specbisect.matrix.product import Impossible
from specbisect.matrix.schema import json_schema
from specbisect.matrix.vocabularies import validate_drafters, validate_prompts

__all__ = [
    "Impossible",
    "Overrides",
    "Plan",
    "build",
    "find",
    "json_schema",
    "label",
    "load",
    "matches",
    "shipped",
    "validate_drafters",
    "validate_prompts",
]


def shipped() -> dict[str, Path]:
    """The matrix files that come with specbisect, by name: ``demo``, ``quant-ladder``…"""
    package = Path(str(_package_files("specbisect")))
    installed, checkout = package / "matrices", package.parents[1] / "matrices"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(name: str) -> Path:
    """The matrix file at the path `name`, else the shipped one of that name. Raises `BadInput` when there is none."""
    if Path(name).is_file():
        return Path(name)
    if name in shipped():
        return shipped()[name]
    raise BadInput(
        f"matrix {name!r} is neither a file nor a shipped matrix{did_you_mean(name, shipped())}"
    )
