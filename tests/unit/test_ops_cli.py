"""The commands widths and capsule: what they print, write and exit with."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbisect import cli
from specbisect.cli.widths import numbers
from specbisect.errors import BadInput

FAST = ("--set", "n_threads=1", "--set", "n_ctx=4096", "--set", "n_predict=12")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    return command


Run = Callable[..., tuple[int, str, str]]


def test_a_profile_as_text_page_and_json_says_the_same(
    run: Run, tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    page = tmp_path / "widths.html"
    asked = ("widths", tiny_models("llama"), "--max-prompts", 1, "--widths", "2..4", *FAST)
    code, out, _ = run(*asked, "--html", page)
    said: dict[str, Any]
    code_json, text, _ = run(*asked, "--json")
    said = json.loads(text)
    (target,) = said["targets"]
    assert code == code_json == (0 if target["departs"] is None else 1)
    assert said["schema"] == "specbisect.widths/1"
    assert target["line"] in out
    assert target["line"] in page.read_text()
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[0]) for row in rows] == [2, 3, 4]
    tiles = re.findall(r"<td style=[^>]*>([^<]*)</td>", page.read_text())[:3]
    assert [tile == "=" for tile in tiles] == [row[1] == row[2] for row in rows]
    assert [a["identical"] for a in target["profile"]["widths"]] == [int(row[2]) for row in rows]


def test_every_target_and_setting_has_a_name(run: Run, tiny_models: Callable[..., Path]) -> None:
    _, out, _ = run(
        *("widths", tiny_models("llama"), tiny_models("swa"), "--max-prompts", 1),
        *("--widths", 2, "--set", "flash_attn=on,off", *FAST, "--json"),
    )
    named = [t["target"] for t in json.loads(out)["targets"]]
    assert len(set(named)) == 4
    assert sum("flash_attn off" in name for name in named) == 2


def test_a_capsule_is_written_and_shown(
    run: Run, tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    asked = ("capsule", tiny_models("llama", "Q6_K"), "-o", tmp_path / "c", *FAST, "-p", "Hello")
    code, out, _ = run(*asked, "--json")
    said = json.loads(out)
    if said["capsule"] is None:  # a CPU on which this type has one kernel for all widths
        assert code == 0
        assert not any(t["first"] for t in said["traces"])
        return
    assert code == 1
    assert said["capsule"]["shown"]
    assert (tmp_path / "c" / "op_repro.py").exists()
    assert all(c["outcome"] in ("gone", "later") for c in said["confirmations"])
    _, out, _ = run(*asked, "--no-confirm")
    assert said["capsule"]["operation"] in out
    assert "shows it in a process of its own" in out
    assert "confirmed" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["widths"], "names no target; give --base FILE or --target FILE"),
        (["widths", "x.gguf"], "x.gguf does not exist"),
        (["widths", "MODEL", "--widths", "2..x"], "--widths 2..x: write whole numbers"),
        (["widths", "MODEL", "--widths", "1"], "no width above 1"),
        (["widths", "MODEL", "--widths", "2..99999"], "no batch has more than n_batch = 2048 rows"),
        (["capsule", "x.gguf"], "x.gguf does not exist"),
        (["capsule", "MODEL", "--case", "12"], "is no directory"),
        (["capsule", "MODEL", "--set", "n_ubatch=8,16"], "one target is opened at a time"),
        (["capsule", "FOLDER"], "holds many cases; add --case ID"),
        (["capsule", "FOLDER", "--case", "1", "-p", "x"], "leave those options out"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    run: Run, tiny_models: Callable[..., Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"MODEL": str(tiny_models("llama")), "FOLDER": str(tmp_path)}
    code, _, err = run(*(places.get(word, word) for word in arguments))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_widths_as_people_write_them() -> None:
    assert numbers("2..5,8,3") == [2, 3, 4, 5, 8]
    for wrong in ("", "0", "5..2", "a", "true"):
        with pytest.raises(BadInput, match="--widths"):
            numbers(wrong)
