"""The gate on a real model: what passes, what fails and by which name, what is refused; and llama-server's counters."""

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from specbisect import cli
from specbisect.cell import Case, Cell, DraftModel, Model, NgramSimple, Prompt
from specbisect.engines import run_arm
from specbisect.engines.server import ServerEngine, binary
from specbisect.fault import Fault
from specbisect.gate.acceptance import Acceptance
from specbisect.llama import files
from specbisect.matrix import Plan
from specbisect.store import Store

PROMPTS = {
    "bicycle": "The history of the bicycle begins",
    "sort": "def quicksort(arr):\n",
    "village": "Once upon a time, in a small village",
    "count": "1, 2, 3, 4, 5, 6, 7, 8,",
}
MATRIX = """\
schema = "specbisect.matrix/1"
n_predict = 24
prompts = "prompts.jsonl"
[target]
files = ["target.gguf"]
[axes]
n_threads = 1
n_ctx = 512
"""
DRAFT_MODEL = '[[drafter]]\nmethod = "draft-model"\nmodel = "draft.gguf"\nn_max = 3\n'
NGRAM = '[[drafter]]\nmethod = "ngram-simple"\nsize_n = 40\n'
# Which widths have kernels of their own differs from machine to machine, and is not what is tested here.
POLICY = """\
schema = "specbisect.gate/1"
audit = false
[[allow]]
label = "batch-width"
rate = 1.0
[[acceptance]]
tolerance = 0.1
positions = 1
min_drafted = 20
"""

Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path, ladder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with SmolLM2 at Q8_0, a drafter, a matrix and a policy."""
    (tmp_path / "target.gguf").symlink_to(ladder("Q8_0"))
    (tmp_path / "draft.gguf").symlink_to(ladder("Q2_K"))
    (tmp_path / "matrix.toml").write_text(MATRIX + DRAFT_MODEL)
    (tmp_path / "policy.toml").write_text(POLICY)
    lines = [json.dumps({"id": name, "text": text}) for name, text in PROMPTS.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process: exit code, standard output, standard error."""

    def specbisect(line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            cli.main(shlex.split(line))
        assert isinstance(done.value.code, int)
        return done.value.code, *capfd.readouterr()

    return specbisect


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Lets every case that is planned from now on carry a fault, and the store, which keeps none, give it back."""
    cases, case_of = Plan.cases, Store.case

    def plant_it(fault: Fault) -> None:
        def planned(plan: Plan) -> Iterator[Case]:
            return (replace(case, fault=fault) for case in cases(plan))

        def stored(store: Store, key: str) -> Case:
            return replace(case_of(store, key), fault=fault)

        monkeypatch.setattr(Plan, "cases", planned)
        monkeypatch.setattr(Store, "case", stored)

    return plant_it


GATE = "gate matrix.toml --policy policy.toml"


def test_locked_gated_changed_and_meant(
    place: Path, run: Run, ladder: Callable[[str], Path]
) -> None:
    code, out, err = run("lock matrix.toml --directory locked")
    assert code == 0, err
    assert "draft-model n_max 3" in out

    code, out, err = run(f"{GATE} --lock specbisect.lock --directory locked --json")
    assert code == 0, err
    found = json.loads(out)
    assert found["state"] == "pass"
    assert len(found["cases"]) == len(PROMPTS)
    (counts,) = found["acceptance"]
    (again,) = json.loads((place / "specbisect.lock").read_text())["acceptance"]
    assert {k: counts[k] for k in again["counts"]} == again["counts"]
    assert {c["subject"] for c in found["checks"]} >= {"acceptance", "acceptance at place 1"}

    (place / "draft.gguf").unlink()
    (place / "draft.gguf").symlink_to(ladder("Q4_0"))
    code, out, err = run(f"{GATE} --lock specbisect.lock --directory swapped")
    assert (code, out) == (2, "")
    assert 'drafter[0].quant: "Q2_K" → "Q4_0"' in err
    assert err.endswith("If that is meant, give --accept drafter, or make a new lock\n")
    assert not (place / "swapped").exists()

    code, out, err = run(
        f"{GATE} --lock specbisect.lock --directory swapped --accept drafter --format junit"
    )
    suites = {suite.name: suite for suite in JUnitXml.fromstring(out.encode())}
    assert len(list(suites["tokens"])) == len(PROMPTS)
    assert all(not case.result for case in suites["tokens"])
    # A drafter of another precision is accepted more often, which the lock does not expect.
    assert code == int(suites["quality"].failures > 0)
    assert 'accepted: drafter[0].quant: "Q2_K" → "Q4_0"' in err


def test_a_state_fault_fails_by_name(run: Run, place: Path, plant: Callable[[Fault], None]) -> None:
    plant(Fault("stale-kv", cycle=2))
    (place / "policy.toml").write_text(POLICY.replace("audit = false", "audit = true"))
    code, out, err = run(f"{GATE} --format junit")
    assert code == 1, err
    cases = {
        case.name.rpartition("/")[2]: case for case in next(iter(JUnitXml.fromstring(out.encode())))
    }
    assert set(cases) == set(PROMPTS)
    failures = [case.result[0] for case in cases.values() if case.result]
    assert failures
    assert {failure.type for failure in failures} == {"state"}
    assert all("replay: rows bit-identical in" in failure.text for failure in failures)

    code, out, _ = run(f"{GATE} --format md")
    assert code == 1
    assert "**fail**, tokens, Q8_0 draft-model n_max 3, state:" in out


def test_a_drafter_that_never_drafts_is_inconclusive(run: Run, place: Path) -> None:
    (place / "matrix.toml").write_text(MATRIX + NGRAM)
    code, out, err = run(GATE)
    assert code == 3, err
    assert "gate: inconclusive" in out
    everything = f"unexercised: {len(PROMPTS)} of {len(PROMPTS)} prompts unexercised"
    assert everything in " ".join(out.split())


def test_a_shifted_draft_keeps_its_tokens_and_fails_its_acceptance(
    run: Run, place: Path, plant: Callable[[Fault], None]
) -> None:
    assert run("lock matrix.toml --directory locked")[0] == 0
    plant(Fault("draft-shift"))
    code, out, err = run(f"{GATE} --lock specbisect.lock --directory shifted --json")
    assert code == 1, err
    found = json.loads(out)
    assert {check["state"] for check in found["checks"] if check["kind"] == "tokens"} <= {
        "pass",
        "inconclusive",  # where not one of the shifted tokens happened to fit
    }
    (check,) = [check for check in found["checks"] if check["subject"] == "acceptance"]
    assert check["state"] == "fail"
    assert "it fell; shift by one explains it" in check["said"]


def test_a_drafter_that_does_not_fit_is_refused_or_marked(
    run: Run, place: Path, tiny_models: Callable[..., Path]
) -> None:
    for name, model in (("target", tiny_models()), ("draft", place / "other.gguf")):
        (place / f"{name}.gguf").unlink()
        (place / f"{name}.gguf").symlink_to(model)
    (place / "other.gguf").write_bytes(
        tiny_models(noise=0.1).read_bytes().replace(b"<0x41>", b"<0x4X>")
    )
    code, out, err = run(GATE)
    assert (code, out) == (2, "")
    assert f"other.gguf does not fit {tiny_models().name}: token 68 is '<0x4X>'" in err
    assert "run it with --force" in err
    assert not (place / "runs").exists()

    code, out, _ = run(f"{GATE} --force --json")
    found = json.loads(out)
    assert code in (0, 1)
    assert len(found["forced"]) == 1
    assert all(case["forced"] for case in found["cases"])


def test_results_of_another_library_are_not_taken_for_this_ones(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "matrix.toml").write_text(MATRIX + NGRAM)
    assert run(GATE)[0] == 3
    provenances = Store.provenances

    def older(store: Store) -> Any:
        return [
            p | {"host": p["host"] | {"library": "llama-cpp-python 0.1 0123"}}
            for p in provenances(store)
        ]

    monkeypatch.setattr(Store, "provenances", older)
    code, _, err = run(GATE)
    assert code == 2
    assert "runs/matrix holds results of another library (llama-cpp-python 0.1 0123, now " in err
    assert run(f"{GATE} --fresh")[0] == 3


def test_drafters_under_load(
    run: Run,
    place: Path,
    tiny_models: Callable[..., Path],
    llama_server: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(binary.VARIABLE, str(llama_server))
    for name, model in (("target", tiny_models()), ("draft", tiny_models(noise=0.1))):
        (place / f"{name}.gguf").unlink()
        (place / f"{name}.gguf").symlink_to(model)
    code, out, err = run("cost matrix.toml --rounds 1 --parallel 1,2 --rate 20 --limit 60 --json")
    assert code == 0, err
    loads = json.loads(out)["loads"]
    shown = [(x["slots"], x["arm"]["drafter"] is not None) for x in loads]
    assert shown == [(n, drafts) for n in (1, 2) for drafts in (False, True, False)]
    for one in loads:
        assert (one["requests"], one["refusals"]) == (len(PROMPTS), [])
        assert one["arm"]["engine"] == "server"
        assert one["tokens_per_s"] > 0
        assert one["first_s"] == sorted(one["first_s"])
        assert all(a <= b for a, b in zip(one["first_s"], one["done_s"], strict=True))
        assert one["goodput"] > 0

    code, out, _ = run("cost matrix.toml --rounds 1 --parallel 1")
    assert code == 0
    assert "under load, 50/95/99 % in ms" in out


@pytest.fixture
def server(llama_server: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerEngine]:
    monkeypatch.setenv(binary.VARIABLE, str(llama_server))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    made = ServerEngine()
    yield made
    made.close()


def test_acceptance_is_llama_servers_own(
    server: ServerEngine, ladder: Callable[[str], Path]
) -> None:
    def model(quant: str) -> Model:
        path = ladder(quant)
        return Model("SmolLM2", quant, f"sha256:{files.sha256(path)}", str(path))

    base = Cell(model("Q8_0"), engine="server", n_predict=48, n_threads=1, n_ctx=512)
    for drafter in (DraftModel(model("Q2_K"), 3), NgramSimple(size_n=2, size_m=5)):
        cell = replace(base, drafter=drafter)
        for name, text in PROMPTS.items():
            trace = server.run(Case(cell, Prompt(name, text)))
            found = Acceptance.of(trace)
            assert found.unseen == 0
            # drafted and accepted are the server's counters; the cycles were read off its log
            assert (found.drafted, found.accepted) == (trace.drafted, trace.accepted)
            assert found.committed == len(trace.ids) - 1
            shares = trace.resolved["server"].get("acceptance_per_position", [])
            assert [round(share, 3) for share in found.unconditional] == pytest.approx(
                shares[: len(found.unconditional)], abs=6e-4
            )
            assert not any(shares[len(found.unconditional) :])
            ours = run_arm(Case(replace(cell, engine="libllama"), Prompt(name, text)))
            if ours.ids == trace.ids:
                assert Acceptance.of(ours) == found
