"""Findings on real arms, narrowed in worker processes, from the command line, and after a kill."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbisect.cell import AXES, Case, Cell, DraftModel, Model, Prompt, Scripted
from specbisect.compare import compare
from specbisect.diagnose.conclusion import Options
from specbisect.diagnose.finding import Finding
from specbisect.diagnose.run import examine_case
from specbisect.engines import run_arm
from specbisect.errors import BadInput
from specbisect.fault import Fault
from specbisect.llama import files
from specbisect.narrow.ddmin import Reason
from specbisect.narrow.result import Narrowed
from specbisect.narrow.run import Request, narrow, narrow_case
from specbisect.narrow.smallest import NotReproduced
from specbisect.narrow.trial import Look, examined
from specbisect.store import Store
from specbisect.workers import Workers

IDS = (1, 40, 77, 120, 9, 201, 33, 64, 150, 8, 91, 17, 230, 55, 41, 12)
CROWD = {"n_ctx": 512, "n_ubatch": 64, "type_k": "q8_0", "kv_unified": True, "n_threads": 1}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(1, timeout=600) as made:
        yield made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))


def model(path: Path) -> Model:
    facts = files.inspect(path)
    return Model(path.stem, facts.file_type, f"sha256:{facts.sha256}", str(path))


def found(
    tiny_models: Callable[..., Path], fault: Fault | None, quant: str = "Q8_0", **axes: Any
) -> Finding:
    """The finding on a case with that fault, in this process."""
    target, draft = model(tiny_models("llama", quant)), model(tiny_models("llama", noise=0.1))
    n_predict = 16 if fault is not None and fault.in_drafter else 40
    cell = Cell(target, DraftModel(draft, n_max=3), n_predict=n_predict, **CROWD | axes)
    case = Case(cell, Prompt("p", ids=IDS), fault)
    vanilla, speculative = run_arm(case.vanilla), run_arm(case)
    return examine_case(case, vanilla, speculative, Options(audit=True, reference=""))


@pytest.mark.parametrize(
    ("fault", "label"),
    [
        (Fault("stale-kv", cycle=2), "state"),
        (Fault("row-off-by-one", cycle=1), "verification"),
        (Fault("kernel-large", width=3, seed=1), "kernel-defect"),
        (Fault("draft-shift"), "draft-alignment"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_the_smallest_case_has_the_label_in_a_fresh_process(
    tiny_models: Callable[..., Path], workers: Workers, fault: Fault, label: str
) -> None:
    finding = found(tiny_models, fault, host_class="some")
    assert finding.label == label
    narrowing = narrow(finding, workers, Request())
    minimal = narrowing.narrowed.minimal

    assert narrowing.holds
    assert narrowing.reason is Reason.COMPLETE
    assert narrowing.narrowed.proved_minimal
    assert (minimal.label, minimal.kind) == (finding.label, finding.kind)
    assert (minimal.case.cell.type_k, minimal.case.cell.host_class) == ("f16", "")
    assert len(minimal.case.prompt.ids or ()) == 1
    assert minimal.case.cell.n_predict < finding.case.cell.n_predict
    assert isinstance(minimal.case.cell.drafter, Scripted) == (label != "draft-alignment")

    text = Narrowed.model_validate_json(narrowing.narrowed.model_dump_json(by_alias=True))
    again = examined(text.minimal.case, Look(label, reference=""))
    assert (again.label, again.kind) == (minimal.label, minimal.kind)


def test_a_finding_of_nothing_is_refused(
    tiny_models: Callable[..., Path], workers: Workers
) -> None:
    nothing = found(tiny_models, None).model_copy(update={"label": "none"})
    with pytest.raises(BadInput, match="none to narrow"):
        narrow(nothing, workers, Request())


def kept(directory: Path, finding: Finding) -> str:
    """A run directory with this finding in it; the id of its case there."""
    case = finding.case
    stored = replace(case, fault=None)  # planted faults are no part of a run's cases
    with Store.create(directory, "plan", {}) as store, store.transaction():
        store.save_arm(stored.vanilla.key, finding.vanilla)
        store.save_arm(stored.key, finding.speculative)
        verdict = compare(finding.vanilla, finding.speculative)
        store.save_case(0, stored, verdict, finding.speculative)
        store.save_finding(stored.key, finding.model_dump_json(by_alias=True))
    return stored.key


def test_a_case_that_does_not_show_it_any_more_is_said_so(
    tiny_models: Callable[..., Path], workers: Workers, tmp_path: Path
) -> None:
    finding = found(tiny_models, Fault("row-off-by-one", cycle=1))
    healed = finding.model_copy(update={"case": replace(finding.case, fault=None)})
    key = kept(tmp_path / "run", healed)
    with (
        Store.open(tmp_path / "run") as store,
        pytest.raises(NotReproduced, match="the case now shows"),
    ):
        narrow_case(store, workers, key, Request())

    result = command(tmp_path / "run", key, "--json")
    assert result.returncode == 3
    assert f"specbisect diagnose {tmp_path / 'run'} --case {key[:8]} --again" in result.stderr


def command(directory: Path, key: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        arguments(directory, key, *options), capture_output=True, text=True, check=False
    )


def arguments(directory: Path, key: str, *options: str) -> list[str]:
    program = [sys.executable, "-m", "specbisect", "narrow"]
    return [*program, str(directory), "--case", key[:8], *options]


def trials(directory: Path) -> int:
    """Trials that have ended."""
    path = f"file:{directory / 'run.sqlite'}?mode=ro"
    with closing(sqlite3.connect(path, uri=True)) as database:
        (n,) = database.execute("SELECT count(result) FROM trials").fetchone()
        return int(n)


def caught(
    tmp_path: Path, finding: Finding, n: int, number: signal.Signals, *options: str
) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    """A run directory whose search got a signal after `n` trials, and how it ended.

    Tiny models are quick: a search that ended before the signal came is done over, in another directory.
    """
    for attempt in range(20):
        directory = tmp_path / f"{number.name}-{attempt}"
        key = kept(directory, finding)
        with subprocess.Popen(
            arguments(directory, key, *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            while process.poll() is None and trials(directory) < n:
                time.sleep(0.001)
            process.send_signal(number)
            out, err = process.communicate(timeout=300)
        if process.returncode != 1:
            return directory, subprocess.CompletedProcess("", process.returncode, out, err)
        assert out, err  # it had ended with a result
    raise AssertionError("every search ended before its signal")


def test_the_command_killed_and_resumed_finds_what_an_undisturbed_one_finds(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    finding = found(tiny_models, Fault("row-off-by-one", cycle=1))
    key = kept(tmp_path / "run", finding)

    undisturbed = command(tmp_path / "run", key, "--json")
    assert undisturbed.returncode == 1, undisturbed.stderr
    whole = Narrowed.model_validate_json(undisturbed.stdout)

    killed, ended = caught(tmp_path, finding, 3, signal.SIGKILL)
    assert ended.returncode == -signal.SIGKILL
    before = trials(killed)

    resumed = command(killed, key, "--json", "--retry-failed")
    assert resumed.returncode == 1, resumed.stderr
    narrowed = Narrowed.model_validate_json(resumed.stdout)
    assert narrowed.minimal.case == whole.minimal.case
    assert narrowed.trials == whole.trials == trials(killed) >= before

    with Store.open(killed, readonly=True) as store:
        text = store.kept(f"narrowed:{key}")
    assert text is not None
    assert Narrowed.model_validate_json(text).minimal.case == whole.minimal.case


def test_the_command_stopped_by_its_budget_prints_the_best_so_far(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    finding = found(tiny_models, Fault("row-off-by-one", cycle=1))
    key = kept(tmp_path / "run", finding)
    result = command(tmp_path / "run", key, "--budget-trials", "3")
    assert result.returncode == 1, result.stderr
    assert "not proved minimal (out of budget)" in result.stdout
    assert "verification (not-argmax)" in result.stdout

    bad = command(tmp_path / "run", key, "--runs", "2", "--needed", "3")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: --needed 3 is more than --runs 2")


def test_interrupted_it_prints_the_best_so_far(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    finding = found(tiny_models, Fault("row-off-by-one", cycle=1))
    _, ended = caught(tmp_path, finding, 2, signal.SIGINT, "--json")
    assert ended.returncode == 130, ended.stderr
    narrowed = json.loads(ended.stdout)
    assert narrowed["proved_minimal"] is False
    assert narrowed["reason"] == "interrupted"
    assert narrowed["minimal"]["label"] == "verification"
    assert "goes on from there" in ended.stderr


TWELVE = {
    "n_batch": 1024,
    "n_ubatch": 128,
    "n_ctx": 4096,
    "n_threads": 1,
    "n_threads_batch": 2,
    "flash_attn": "on",
    "type_k": "q8_0",
    "type_v": "bf16",
    "swa_full": True,
    "kv_unified": True,
    "op_offload": False,
    "seed": 7,
}
STORY = """\
The harbour master kept a ledger of every ship that came in during the winter of 1893. Each line held a name, a port \
of origin, a cargo and a remark. The remarks were short at first. The Eleanor came from Bristol with coal and a broken \
mast. The Saint Anne came from Nantes with wine and a quarrelsome crew. The Margarethe came from Hamburg with machine \
parts that nobody had ordered.

In January the remarks grew longer. The harbour master began to write down what the captains told him over supper: how \
the ice had closed behind them, how the lamps of a town that was on no chart had burned all night on the western \
shore, how a dog had been found on a drifting boat and would not leave it. He wrote these things in the same neat hand \
as the weights and the tariffs, and he added them up at the end of the page as if they were numbers.

When the inspector came in spring he read the ledger from the first line to the last. It took him two days. Then he \
asked the harbour master a single question, and the harbour master answered it at once, without looking up from his \
pen. The inspector closed the book, put on his hat and said that in thirty years of service he had never seen accounts \
so complete. Continue the story, and explain what the question was and why the answer satisfied him. Write at least \
three paragraphs, and let the dog have the last word."""


@pytest.mark.network
def test_a_natural_fork_with_a_dozen_settings_comes_down_to_one_batch_of_a_short_prompt(
    ladder: Callable[[str], Path],
) -> None:
    target, draft, base = (ladder(quant) for quant in ("Q4_K_M", "Q2_K", "BF16"))
    cell = Cell(model(target), DraftModel(model(draft), n_max=7), n_predict=200, **TWELVE)
    case = Case(cell, Prompt("story", STORY))
    with Workers(1, timeout=1800) as workers:
        vanilla, speculative = (workers.submit(run_arm, c).result() for c in (case.vanilla, case))
        if compare(vanilla, speculative).fork is None:
            pytest.skip("on this machine the width makes no difference in 200 tokens")
        finding = workers.submit(
            examine_case, case, vanilla, speculative, Options(reference="")
        ).result()
        assert isinstance(finding, Finding)
        assert len(vanilla.prompt_ids) > 280
        found = narrow(finding, workers, Request(trials=150, base=base))

    narrowed = found.narrowed
    cell = narrowed.minimal.case.cell
    assert found.holds
    assert narrowed.proved_minimal
    assert narrowed.trials <= 150
    assert narrowed.counters.decoded_tokens <= 15 * narrowed.original_decoded
    assert len(narrowed.minimal.case.prompt.ids or ()) <= 8
    left = {n for n in TWELVE if getattr(cell, n) != AXES[n].default}
    assert left <= {
        n.axis for n in narrowed.neighbours if n.shows == "none"
    }  # what is left matters
    assert len(left) <= 2
    assert cell.width == min(w.width for w in narrowed.widths if w.shows == finding.label)
    assert narrowed.tensors is None or narrowed.tensors.alone == finding.label
