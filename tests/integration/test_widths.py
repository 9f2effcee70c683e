"""Screening against real arms, and both commands on real weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.engines.libllama import LibLlama
from specbisect.llama import files
from specbisect.ops import widths
from specbisect.ops.profile import can_fork

KINDS = ("llama", "moe", "swa")
QUANTS = ("BF16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
LENGTHS = (1, 3, 7)
PROMPTS = [Prompt(f"p{i}", ids=tuple(range(40 + i, 40 + 7 * i + 9))) for i in range(7)]


def model_of(path: Path) -> Model:
    return Model(path.name, "", f"sha256:{files.sha256(path)}", str(path))


@pytest.fixture(scope="module")
def engine() -> Iterator[LibLlama]:
    made = LibLlama()
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "quant"), list(product(KINDS, QUANTS)))
def test_no_fork_is_screened_away(
    tiny_models: Callable[..., Path], engine: LibLlama, kind: str, quant: str
) -> None:
    """15 targets, three draft lengths and seven prompts: 315 cases."""
    target, draft = (model_of(p) for p in (tiny_models(kind, quant), tiny_models(kind, noise=0.2)))
    settings: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_predict": 32, "n_batch": 64}
    cells = {n: Cell(target, DraftModel(draft, n_max=n), n_ubatch=64, **settings) for n in LENGTHS}
    screened = widths.screen([Case(cells[1], p) for p in PROMPTS], range(2, max(LENGTHS) + 2))
    departs, drafted = screened.departs(), 0
    for prompt in PROMPTS:
        vanilla = engine.run(Case(cells[1], prompt).vanilla)
        for cell in cells.values():
            arm = engine.run(Case(cell, prompt))
            drafted += arm.drafted
            used = {cycle.width for cycle in arm.cycles}
            positions = range(len(vanilla.prompt_ids), len(vanilla.prompt_ids) + 32)
            if not can_fork(screened, used, positions):
                assert (arm.ids, arm.digests) == (vanilla.ids, vanilla.digests)
            if arm.ids != vanilla.ids:
                assert departs is not None
                assert departs <= max(used)
    assert drafted > 0


def specbisect(*arguments: object) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "specbisect", *map(str, arguments), "--json"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.network
@pytest.mark.parametrize("quant", ["BF16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0"])
def test_the_capsule_departs_where_the_target_does(
    ladder: Callable[[str], Path], tmp_path: Path, quant: str
) -> None:
    settings = ["--set", "n_threads=1"]
    code, said = specbisect("capsule", ladder(quant), "-o", tmp_path, "--no-confirm", *settings)
    departed = {t["width"]: t["first"]["node"]["key"] for t in said["traces"] if t["first"]}
    if not departed:
        assert (code, said["capsule"]) == (0, None)
        return
    capsule = said["capsule"]
    assert code == 1
    assert capsule["shown"]
    assert capsule["faithful"]
    first = departed[min(departed)]
    assert {w for w, key in departed.items() if key == first} <= set(capsule["departs"])
    assert set(capsule["departs"]) <= set(departed)
    assert (tmp_path / "capsule.gguf").stat().st_size < 2**20


@pytest.mark.network
def test_a_change_confirms_the_node(ladder: Callable[[str], Path], tmp_path: Path) -> None:
    _, said = specbisect("capsule", ladder("Q4_K_M"), "-o", tmp_path, "--set", "n_threads=1")
    if said["capsule"]:
        assert said["confirmations"]
        assert {c["outcome"] for c in said["confirmations"]} <= {"gone", "later"}


@pytest.mark.network
def test_the_profile_of_a_real_target(ladder: Callable[[str], Path], tmp_path: Path) -> None:
    page = tmp_path / "widths.html"
    code, said = specbisect(
        *("widths", ladder("Q4_K_M"), "--widths", "2..5", "--max-prompts", 1),
        *("--set", "n_predict=16", "--set", "n_threads=1", "--html", page),
    )
    (target,) = said["targets"]
    assert code == (0 if target["departs"] is None else 1)
    assert target["line"].startswith("bit-identical for widths 1")
    for at in target["profile"]["widths"]:
        same = at["identical"] == at["rows"]
        assert same or target["departs"] <= at["width"]
    html = page.read_text()
    assert target["line"].split("×")[0] in html
    assert html.count('<td style="--share:') >= 4 * 31 or target["departs"] is None
