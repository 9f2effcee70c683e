"""The command line: what it prints where, what it exits with, and one line for every bad input."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from specbisect import cli
from specbisect.cli.verdicts import Verdicts
from specbisect.compare import Outcome
from specbisect.errors import EngineFault
from specbisect.llama import quantize
from specbisect.store import Store

DEFECTS = Path(__file__).parents[1] / "cases" / "cli"
MATRIX = """\
schema = "specbisect.matrix/1"
n_predict = 8
prompts = "prompts.jsonl"

[target]
base = "base.gguf"

[[drafter]]
method = "draft-model"
model = "draft.gguf"
n_max = 3

[axes]
n_threads = 1
"""
PROMPTS = """\
{"id": "one", "text": "Hello there"}
{"id": "two", "text": "in the end the"}
"""

Tiny = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, tiny_models: Tiny, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with models, good and bad, a matrix and prompts."""
    here = tmp_path / "here"
    here.mkdir()
    base = tiny_models()
    shutil.copy(base, here / "base.gguf")
    shutil.copy(tiny_models(noise=0.1), here / "draft.gguf")
    (here / "cut-short.gguf").write_bytes(base.read_bytes()[:-1000])
    (here / "projector.gguf").write_bytes(
        base.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x04\0\0\0\0\0\0\0clip", 1)
    )
    (here / "foreign.gguf").write_bytes(base.read_bytes().replace(b"<0x41>", b"<0x4X>"))
    (here / "matrix.toml").write_text(MATRIX)
    (here / "prompts.jsonl").write_text(PROMPTS)
    monkeypatch.chdir(here)
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))
    for name in ("SPECBISECT_LLAMA_SERVER", "SPECBISECT_VANILLA_URL", "SPECBISECT_SPECULATIVE_URL"):
        monkeypatch.delenv(name, raising=False)
    return here


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: exit code, standard output, standard error."""

    def specbisect(line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            cli.main(shlex.split(line))
        assert isinstance(done.value.code, int)
        return done.value.code, *capfd.readouterr()

    return specbisect


Run = Callable[[str], tuple[int, str, str]]


def everything(directory: Path) -> set[tuple[str, int]]:
    return {(str(p.relative_to(directory)), p.lstat().st_mtime_ns) for p in directory.rglob("*")}


@pytest.mark.parametrize("defect", sorted(DEFECTS.iterdir()), ids=lambda path: path.name)
def test_bad_input_is_explained_and_nothing_is_written(place: Path, run: Run, defect: Path) -> None:
    shutil.copytree(defect, place, dirs_exist_ok=True)
    before = everything(place)

    code, out, err = run((defect / "command.txt").read_text())

    assert (code, out) == (2, "")
    # "…" stands for words of Python or its libraries, which change with their versions.
    expected = (defect / "message.txt").read_text()
    assert re.fullmatch(".*".join(map(re.escape, expected.split("…"))), err), err
    assert everything(place) == before
    assert not (place.parent / "cache" / "models").exists()


def test_no_disk_space_is_said_before_anything_is_written(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    before = everything(place)
    for line in ("run matrix.toml --quant Q8_0", "quantize base.gguf Q8_0"):
        code, out, err = run(line)
        assert (code, out) == (2, "")
        assert re.fullmatch(
            r"error: no disk space: needs 1 MiB, has 0 MiB at .*; free space or set SPECBISECT_CACHE\n",
            err,
        )
    assert everything(place) == before


def test_a_run_says_what_it_found_and_goes_on_where_it_was(place: Path, run: Run) -> None:
    code, out, err = run("run matrix.toml --quant BF16,Q8_0 --max-cases 3 -o found")
    assert code == 0
    assert "0/2 in 16 tokens" in out
    assert "3 cases: 3 agree." in out
    assert "making Q8_0 of base.gguf, 1 MiB (1 of 1)\n" in err
    assert "3 of 4 cases have finished; `specbisect run` goes on." in err

    code, out, err = run("run matrix.toml --quant BF16,Q8_0 -o found --json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [case["prompt_id"] for case in found["cases"]] == ["one", "two"] * 2
    assert found["counters"]["vanilla_runs"] == 4
    assert run("run matrix.toml --quant BF16,Q8_0 -o found --json")[1] == out

    assert run("show found --json") == (0, out, "")
    (shown,) = json.loads(run("show found --quant q8_0 --prompt two --json")[1])["cases"]
    assert shown == found["cases"][3]


def test_the_same_run_again_and_with_two_jobs_gives_the_same_traces(place: Path, run: Run) -> None:
    for options in ("-o one", "-o again", "-o two --jobs 2"):
        run(f"run matrix.toml --quant Q4_K_M --set n_ubatch=512,2 {options}")
    with Store.open(Path("one"), readonly=True) as store:
        rows = list(store.rows())
        traces = [(store.arm(store.case(row.id).vanilla.key), store.arm(row.id)) for row in rows]
    assert len(rows) == 4
    for other in ("again", "two"):
        with Store.open(Path(other), readonly=True) as store:
            assert list(store.rows()) == rows
            assert traces == [
                (store.arm(store.case(row.id).vanilla.key), store.arm(row.id)) for row in rows
            ]


def test_json_of_a_run_has_what_it_promises(place: Path, run: Run) -> None:
    run("run matrix.toml --prompts prompts.jsonl --draft draft.gguf")
    found = json.loads(run("show runs/matrix --json")[1])
    assert found["schema"] == "specbisect.run/1"
    (host,) = found["environment"]["hosts"]
    assert host["library"].startswith("llama-cpp-python")
    assert {facts["file_type"] for facts in found["environment"]["models"].values()} == {"BF16"}
    assert found["counters"].keys() >= {
        "model_loads",
        "vanilla_runs",
        "decode_calls",
        "decode_s",
        "total_s",
    }
    case = found["cases"][0]
    assert (case["engine"], case["target"], case["quant"]) == ("libllama", "base", "BF16")
    assert (case["drafter"], case["n_max"]) == ("draft-model", 3)
    assert (case["n_batch"], case["n_ubatch"]) == (2048, 512)
    assert (case["outcome"], case["fork"], case["compared"]) == ("agree", None, 8)
    assert case["drafted"] == case["accepted"] + case["rejected"] > 0
    assert case["cycles"] > 0
    assert case["resolved"]["target"]["n_ctx"] == 2048
    assert case.keys() >= {"id", "prompt_id", "reference_token", "speculative_token", "margin"}


def test_a_changed_matrix_is_refused_unless_fresh(place: Path, run: Run) -> None:
    run("run matrix.toml")
    code, out, err = run("run matrix.toml --set n_predict=4")
    assert (code, out) == (2, "")
    assert "n_predict: [8] → [4]" in err
    code, out, _ = run("run matrix.toml --set n_predict=4 --fresh")
    assert code == 0
    assert "0/2 in 8 tokens" in out


def test_one_case_is_shown_with_both_texts(place: Path, run: Run) -> None:
    run("run matrix.toml")
    first = json.loads(run("show runs/matrix --json")[1])["cases"][0]
    code, out, _ = run(f"show runs/matrix --case {first['id'][:6]}")
    assert code == 0
    assert out.startswith(f"case {first['id']}: base BF16 draft-model n_max 3 model draft BF16")
    assert "no difference in 8 tokens" in out
    assert re.search(r"^vanilla +speculative$", out, re.MULTILINE)
    assert f"drafted {first['drafted']}, accepted {first['accepted']} (" in out

    whole = json.loads(run(f"show runs/matrix --case {first['id']} --json")[1])
    assert whole["vanilla"]["ids"] == whole["speculative"]["ids"]
    assert sum(accepted for _, accepted in whole["accepted_by_position"]) == first["accepted"]

    code, _, err = run("show runs/matrix --case zz")
    assert code == 2
    assert "no finished case is called 'zz'" in err


def test_a_plan_says_what_a_run_would_do(place: Path, run: Run) -> None:
    with (place / "matrix.toml").open("a") as file:
        file.write("n_ubatch = [512, 4, 2]\n\n[[exclude]]\nn_ubatch = 2\n")
    before = everything(place)
    code, out, err = run("plan matrix.toml --quant BF16,Q8_0,Q8_0")
    assert (code, err) == (0, "")
    assert "matrix.toml: 4 cells (2 targets, 1 drafters), 2 prompts, 8 cases" in out
    assert "pruned: 2 cells\n  2: matches exclude[0]" in out
    assert "asked for more than once, run once: 3 cells" in out
    assert "files to make: 1, 1 MiB\n  Q8_0 of base.gguf, 1 MiB" in out
    assert re.search(r"estimated time: \d+ s with one job \(base.gguf decodes \d+ tokens/s", out)

    code, out, _ = run("plan matrix.toml --quant BF16,Q8_0 --only q8_0 --no-probe --json")
    planned = json.loads(out)
    assert (planned["cells"], planned["cases"], planned["estimated_seconds"]) == (4, 4, None)
    assert everything(place) == before


def test_check_runs_one_case(place: Path, run: Run) -> None:
    line = (
        "check -m base.gguf -md draft.gguf --n-max 2 -n 8 -t 1 -ub 64 -p Hello --no-repack --json"
    )
    code, out, err = run(line)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["outcome"], found["compared"]) == ("agree", 8)
    cell = found["cell"]
    assert (cell["n_predict"], cell["n_ubatch"], cell["use_extra_bufts"]) == (8, 64, False)
    assert cell["drafter"]["n_max"] == 2
    assert "prompt_ids" in found["vanilla"]


def test_check_names_the_cause_and_narrows_it_down(place: Path, run: Run) -> None:
    """With a drafter that has nothing to draft from: that shows on every machine."""
    line = (
        "check -m base.gguf --drafter ngram-simple --size-n 12 -p Hello -n 8 -t 1 -ub 64 --narrow"
    )
    code, out, _ = run(f"{line} --json")
    found = json.loads(out)
    assert code == 3
    assert (found["outcome"], found["finding"]["label"]) == ("unexercised", "not-engaged")
    narrowed = found["narrowed"]
    assert narrowed["proved_minimal"]
    smallest = narrowed["minimal"]
    assert (smallest["label"], smallest["case"]["cell"]["n_predict"]) == ("not-engaged", 1)

    code, out, _ = run(line)
    assert code == 3
    assert "cause: not-engaged: a drafter was asked for and nothing was drafted" in out
    assert "proved 1-minimal" in out


def test_check_reads_a_pasted_command_line(place: Path, run: Run) -> None:
    line = (
        "llama-server -m /there/base.gguf -md /there/draft.gguf --spec-type draft-simple "
        "--spec-draft-n-max 2 -t 1 -np 1 -n 99 --frobnicate 3 --temp 0.7"
    )
    (place / "prompt.txt").write_text("Hello\n")
    code, out, err = run(
        f"check --cmdline '{line}' --map /there={place} -f prompt.txt -n 8 --set n_ubatch=64 --json"
    )
    found = json.loads(out)
    assert code == 0
    assert (found["cell"]["n_predict"], found["cell"]["n_ubatch"]) == (8, 64)
    assert found["cell"]["drafter"]["n_max"] == 2
    assert found["prompt"]["text"] == "Hello"
    assert "not understood: --frobnicate 3" in err
    assert "warning: --temp 0.7" in err
    assert len(found["warnings"]) == 1


def test_check_reads_a_bug_report(place: Path, run: Run) -> None:
    (place / "report.md").write_text(
        "The output changes.\n\n```\nllama-server -m base.gguf -md draft.gguf --spec-type draft-simple"
        " -t 1 -np 1\n```\n\n```\ncurl http://localhost:8080/completion -d "
        '\'{"prompt": "Hello", "n_predict": 8, "temperature": 0}\'\n```\n'
    )
    code, out, err = run("check --issue-file report.md --json")
    found = json.loads(out)
    assert code == 0
    assert (found["prompt"]["text"], found["cell"]["n_predict"]) == ("Hello", 8)
    assert "the report does not say the version or commit of llama.cpp" in err


def test_quantising_says_what_is_in_the_files(place: Path, run: Run) -> None:
    code, out, _ = run("quantize base.gguf bf16 Q4_K_M -o made --json")
    assert code == 0
    files = json.loads(out)["files"]
    assert [file["type"] for file in files] == ["BF16", "Q4_K_M"]
    assert [Path(file["path"]).name for file in files] == ["base.gguf", "base.Q4_K_M.gguf"]
    assert files[1]["tensor_types"].keys() > {"Q4_K"}
    assert (place / "made" / "base.gguf").read_bytes() == (place / "base.gguf").read_bytes()


def test_the_environment_names_nobody(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = place.parent
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SPECBISECT_LLAMA_SERVER", str(home / "llama-server"))
    monkeypatch.setenv("LLAMA_ARG_API_KEY", "secret")
    monkeypatch.setenv("LLAMA_ARG_MODEL", str(home / "model.gguf"))
    code, out, _ = run("env")
    assert code == 0
    assert str(home) not in out
    assert "secret" not in out
    assert "LLAMA_ARG_MODEL=~/model.gguf" in out


def test_the_demo_without_its_model_says_where_it_comes_from(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, out, err = run("demo")
    assert (code, out) == (2, "")
    assert err.startswith("error: SmolLM2-135M-Instruct.Q4_1.gguf is not here; run scripts/demo")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([], 3),
        (["agree"], 0),
        (["agree", "unexercised"], 0),
        (["unexercised"], 3),
        (["agree", "failed"], 3),
        (["agree", "invalid"], 3),
        (["agree", "fork"], 1),
        (["length", "failed"], 1),
        (["degenerate", "invalid", "unexercised"], 1),
    ],
)
def test_exit_code_of_verdicts(outcomes: list[Outcome], code: int) -> None:
    assert Verdicts.of(outcomes).exit_code == code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (EngineFault("load", "no memory"), 3, "error: load: no memory\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("go on"), 130, "interrupted; go on\n"),
        (
            ZeroDivisionError("3\n4"),
            3,
            "error: internal error: ZeroDivisionError: 4; please report …\n",
        ),
    ],
)
def test_every_error_is_one_line_and_an_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "invoke", fail)
    found, out, err = run("env")
    assert (found, out) == (code, "")
    assert re.fullmatch(".*".join(map(re.escape, said.split("…"))), err), err
    if isinstance(error, ZeroDivisionError):
        traceback = Path(err.split()[-1])
        assert "in fail" in traceback.read_text()
        traceback.unlink()
        assert "in fail" in run("--debug env")[2]


def test_output_that_nobody_reads_to_its_end(place: Path) -> None:
    command = [sys.executable, "-m", "specbisect", "run", "--help"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def _shell(line: str, place: Path) -> subprocess.CompletedProcess[str]:
    """`line` in a shell, where ``specbisect`` is this package."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHON": sys.executable}
    line = line.replace("specbisect", '"$PYTHON" -m specbisect', 1)
    return subprocess.run(
        line, shell=True, cwd=place, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", ["env", "--help"])
def test_output_that_finds_no_space(place: Path, command: str) -> None:
    done = _shell(f"specbisect {command} >/dev/full", place)
    said = "error: standard output: No space left on device; free space, or send it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_output_thrown_away(place: Path, closed: str) -> None:
    done = _shell(f"specbisect run matrix.toml -o runs/here {closed}", place)
    assert done.returncode == 0, done.stderr
    assert _shell(f"specbisect show runs/here {closed}", place).returncode == 0


def test_a_pattern_that_fits_no_case_of_a_run_is_refused(place: Path, run: Run) -> None:
    run("run matrix.toml")
    code, out, err = run("diagnose runs/matrix --only n_max=99")
    assert (code, out) == (2, "")
    assert err.startswith("error: --only n_max=99 fits no case; the first is called base/BF16/")


def test_an_agreeing_case_is_not_narrowed(place: Path, run: Run) -> None:
    run("run matrix.toml")
    with Store.open(place / "runs" / "matrix", readonly=True) as store:
        agreeing = next(row.id for row in store.rows() if row.outcome == "agree")
    code, out, err = run(f"narrow runs/matrix --case {agreeing}")
    said = f"case {agreeing[:8]} shows no difference, so there is none to narrow"
    assert (code, out, err) == (2, "", f"error: {said}; choose another\n")
    with Store.open(place / "runs" / "matrix", readonly=True) as store:
        assert not store.findings(agreeing)

    code, out, err = run("check -m base.gguf --drafter self -n 4 -t 1 -p Once --narrow")
    assert code == 0
    assert "cause: none" in out
    assert "shows no difference, so there is none to narrow" in err


def test_an_interrupted_diagnosis_says_that_it_goes_on(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    run("run matrix.toml")
    with Store.open(place / "runs" / "matrix", readonly=True) as store:
        key = next(iter(store.rows())).id
    monkeypatch.setattr("specbisect.diagnose.run.diagnose", interrupted)
    monkeypatch.setattr("specbisect.narrow.run.narrow_case", interrupted)
    kept = (
        "interrupted; what has ended is kept in runs/matrix; the same command goes on from there\n"
    )
    assert run("diagnose runs/matrix --audit") == (130, "", kept)
    assert run(f"narrow runs/matrix --case {key}") == (130, "", kept)


def test_a_check_of_other_things_is_refused_unless_fresh(place: Path, run: Run) -> None:
    line = "check -m base.gguf --drafter self -t 1 -p Once -o kept -n"
    assert run(f"{line} 4")[0] == 0
    code, out, err = run(f"{line} 5")
    assert (code, out) == (2, "")
    assert err.startswith("error: kept holds 1 case of another matrix (")
    assert err.endswith("; choose another directory, or --fresh to discard them\n")
    assert run(f"{line} 5 --fresh")[0] == 0


def test_crowding_is_mended_by_what_can_be_changed(place: Path, run: Run) -> None:
    err = run("run matrix.toml --jobs 9999")[2]
    assert re.search(r"9999 jobs with 1 thread each crowd (\d+) cores; --jobs \1 is no slower", err)


def test_a_run_that_is_terminated_ends_its_children_and_says_that_it_goes_on(place: Path) -> None:
    matrix = MATRIX.replace("n_predict = 8", "n_predict = 2000")
    (place / "matrix.toml").write_text(matrix)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "specbisect", "run", "matrix.toml", "-o", "kept", "--set"]
    process = subprocess.Popen(
        [*line, "n_ctx=4096"], env=env, cwd=place, stderr=subprocess.PIPE, text=True
    )
    begun = place / "kept" / "run.sqlite"
    children: list[psutil.Process] = []
    while len(children) < 2:  # the worker, and what tracks its semaphores
        assert process.poll() is None
        children = psutil.Process(process.pid).children() if begun.exists() else []
    process.terminate()
    err = process.communicate()[1]
    assert process.returncode == 130
    assert (
        err == "interrupted; what has ended is kept in kept; the same command goes on from there\n"
    )
    assert not psutil.wait_procs(children, timeout=60)[1]
