"""What is installed is `specbisect` and nothing else, and the directory name `bisect` hides nothing."""

import importlib
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bisect" / "specbisect"


def files_below(directory: Path) -> set[str]:
    found = (p.relative_to(directory) for p in directory.rglob("*") if p.is_file())
    return {str(p) for p in found if "__pycache__" not in p.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside the wheel built from this tree, without the network."""
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", target, ROOT], check=True, capture_output=True)
    (built,) = target.glob("specbisect-*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("path", [None, "bisect"])
def test_the_standard_library_keeps_its_bisect(path: str | None) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = path
    code = "import bisect, random; print(bisect.bisect([1, 2], 1), random.Random(0).choice([3]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1 3\n"), done.stderr


def test_the_source_root_is_no_package() -> None:
    assert sorted(p.name for p in (ROOT / "bisect").iterdir() if p.name != "__pycache__") == [
        "specbisect"
    ]


def test_the_wheel_installs_specbisect_only(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specbisect"}


def test_the_wheel_has_every_file_of_the_package_and_the_matrices(wheel: set[str]) -> None:
    wanted = {f"specbisect/{name}" for name in files_below(PACKAGE)}
    wanted |= {f"specbisect/matrices/{name}" for name in files_below(ROOT / "matrices")}
    assert wanted - wheel == set()


def test_the_wheel_declares_the_command(wheel: set[str]) -> None:
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel)
    assert any("/licenses/LICENSE" in name for name in wheel)


def test_every_requirement_is_pinned_at_a_version_it_admits() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pending = project["dependencies"] + [
        line for extra in project["optional-dependencies"].values() for line in extra
    ]
    seen = set()
    while pending:
        requirement = Requirement(pending.pop())
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        assert name in pinned, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pinned[name], prereleases=True), requirement
        if name not in seen:
            seen.add(name)
            pending += requires(name) or []


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_every_script_imports_what_is_there(script: str) -> None:
    importlib.import_module(script)
