"""The commands that measure: what they print, keep and exit with, on tiny models."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from specbisect import cli
from specbisect.cell import Case
from specbisect.gate import study, timing
from specbisect.workers import Workers

MATRIX = """\
schema = "specbisect.matrix/1"
n_predict = 16
prompts = "prompts.jsonl"
[target]
files = ["target.gguf"]
[[drafter]]
method = "draft-model"
model = "draft.gguf"
n_max = [1, 3]
[axes]
n_threads = 1
n_ctx = 256
n_ubatch = 32
ignore_eos = true
"""
PROMPTS = """\
{"id": "one", "text": "Hello there", "group": "chat"}
{"id": "two", "text": "in the end the", "group": "chat"}
{"id": "three", "text": "def f(x):", "group": "code"}
"""

Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def place(
    tmp_path: Path, tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    (tmp_path / "target.gguf").symlink_to(tiny_models())
    (tmp_path / "draft.gguf").symlink_to(tiny_models(noise=0.1))
    (tmp_path / "matrix.toml").write_text(MATRIX)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def specbisect(line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            cli.main(shlex.split(line))
        assert isinstance(done.value.code, int)
        return done.value.code, *capfd.readouterr()

    return specbisect


def test_cost(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("cost matrix.toml --rounds 2 --price 1.5 --json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["schema"], found["rounds"], found["price_per_hour"]) == (
        "specbisect.cost/1",
        2,
        1.5,
    )
    (target,) = found["targets"]
    assert len(target["cells"]) == 2
    for key in target["cells"]:
        pairs = target["pairs"][key]
        assert [pair["prompt"] for pair in pairs] == ["one", "two", "three"]
        for pair in pairs:
            assert pair["baseline"]["runs"] == pair["speculative"]["runs"] == 2
            assert pair["baseline"]["tokens"] == pair["speculative"]["tokens"] == 2 * 15
    shown = {(d["cell"], d["group"]): d for d in target["decisions"]}
    assert set(shown) == {(c, g) for c in target["cells"] for g in ("all", "chat", "code")}
    for decision in shown.values():
        assert decision["action"] in ("keep", "tune", "disable", "not eligible")
        parts = decision["worth"]
        cycle = parts["draft"] + parts["verify"] + parts["rest"]
        assert parts["per_token"] == pytest.approx(cycle / parts["per_cycle"])
        assert parts["speed_up"] == pytest.approx(parts["baseline"] / parts["per_token"])
    assert [cost["width"] for cost in target["widths"]] == [1, 2, 3, 4]
    arms = target["arms"]
    assert set(arms) == {target["vanilla"], *target["cells"]}
    for arm in arms.values():
        assert arm["peak_bytes"] > 0
        assert 0 < arm["first_s"] < arm["end_to_end_s"]
        spent = arm["spent"]
        assert arm["price_per_million_tokens"] == pytest.approx(
            1.5 / 3600 * spent["seconds"] / spent["tokens"] * 1e6
        )

    # What was timed is kept: the same command again times nothing.
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(study, "measure", never)
    code, out, _ = run("cost matrix.toml --rounds 2 --json")
    assert code == 0
    assert json.loads(out)["targets"][0]["pairs"] == target["pairs"]

    code, out, _ = run("cost matrix.toml --rounds 2")
    assert code == 0
    assert "BF16: 3 prompts, 2 rounds, times in ms" in out
    assert "bit-identical and pays" in out


def test_cost_of_an_engine_that_shows_no_cycles(place: Path, run: Run) -> None:
    code, out, err = run("cost matrix.toml --set engine=server --llama-server /bin/true")
    assert (code, out) == (2, "")
    assert "engine server does not show where the time of a cycle goes" in err


def test_a_failed_arm_is_shown_and_is_inconclusive(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(_workers: Workers, cases: list[Case], _rounds: int) -> timing.Measured:
        return timing.Measured(failures={cases[0].cell.key: "verify 3: aborted (SIGABRT)"})

    monkeypatch.setattr(study, "measure", measure)
    code, out, _ = run("cost matrix.toml")
    assert code == 3
    assert "failed: draft-model n_max 1, verify 3: aborted (SIGABRT)" in out
