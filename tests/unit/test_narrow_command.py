"""What the command says of a search that ended, whatever it ended with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt, Scripted
from specbisect.cli.narrow import command, in_short
from specbisect.compare import Verdict
from specbisect.diagnose.finding import Finding
from specbisect.narrow import run
from specbisect.narrow.candidate import Candidate
from specbisect.narrow.ddmin import Reason
from specbisect.narrow.gate import Wanted
from specbisect.narrow.result import Narrowed, Neighbour, Precision, Step, Tensors, Width
from specbisect.narrow.run import Narrowing
from specbisect.store import Store
from specbisect.trace import Counters, Failure

CELL = Cell(
    Model("m", "Q4_K_M", "sha256:m"),
    DraftModel(Model("d", "Q2_K", "sha256:d"), n_max=7),
    type_k="q8_0",
)
ORIGINAL = Case(CELL, Prompt("story", "Once"))
MINIMAL = Case(
    replace(CELL, drafter=Scripted(((1, (0, 0, 0)),)), type_k="f16", n_predict=5),
    Prompt("story", ids=(7,)),
)
GONE = Failure("load", "not run")


def narrowed(label: str = "state", **more: object) -> Narrowed:
    minimal = Finding(
        case=MINIMAL,
        verdict=Verdict("fork"),
        label=label,
        summary="the memory held something else",
        vanilla=GONE,
        speculative=GONE,
    )
    return Narrowed(
        original=ORIGINAL,
        minimal=minimal,
        steps=(Step(stage="prompt", part="prompt", before="9 tokens", after="1 tokens", trials=4),),
        trials=31,
        counters=Counters(decoded_tokens=900),
        original_decoded=100,
        **more,
    )


def invoke(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Narrowed, *options: str
) -> tuple[int, str, str]:
    """Exit code, output and messages of the command when a search ends with `found`."""
    with Store.create(tmp_path / "run", "plan", {}) as store:
        store.save_arm(ORIGINAL.vanilla.key, GONE)
        store.save_case(0, ORIGINAL, Verdict("failed"), None)
    narrowing = Narrowing(found, Reason.COMPLETE, Wanted("state"))
    monkeypatch.setattr(run, "narrow_case", lambda *_: narrowing)
    arguments = [str(tmp_path / "run"), "--case", ORIGINAL.key, *options]
    result = CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)
    assert result.return_value is narrowing
    return narrowing.exit_code, result.stdout, result.stderr


def test_the_smallest_case_and_all_around_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = narrowed(
        proved_minimal=True,
        widths=(
            Width(width=2, shows="none"),
            Width(width=3, shows="failed"),
            Width(width=4, shows="state"),
        ),
        precisions=(Precision(type="Q4_K_M", shows="state"), Precision(type="Q8_0", shows="none")),
        neighbours=(
            Neighbour(axis="n_max", value=3, neighbour=1, shows="none"),
            Neighbour(axis="n_ubatch", value=1),
        ),
        interactions=(("n_ubatch", "n_parallel"),),
        tensors=Tensors(
            names=("a", "b"),
            unsafe="Q4_K",
            safe="Q8_0",
            without="none",
            alone="state",
            enough=("a",),
        ),
    )
    code, out, err = invoke(monkeypatch, tmp_path, found)
    assert (code, err) == (1, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "state: the memory held something else"
    assert lines[1] == "proved 1-minimal; 31 trials, 900 tokens decoded, 100 by the original case"
    for line in (
        "width 8 4",
        "type_k q8_0 f16",
        "prompt story 1 tokens: 7",
        "prompt prompt 9 tokens 1 tokens 4",
        "no failed yes",
        "yes no",
        "n_max 3 1 none",
        "n_ubatch 1 none found none found",
        "needed together: n_ubatch + n_parallel",
        "tensors at Q4_K, the cause: a, b",
        "only these at Q8_0: none; only these at Q4_K: state",
        "in the smallest case: a",
    ):
        assert line in lines


def test_one_that_does_not_hold_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, err = invoke(monkeypatch, tmp_path, narrowed("batch-width"))
    assert code == 3
    assert "not proved minimal" in out
    assert err == (
        "the smallest case, examined in full, shows batch-width instead of state: it is not kept\n"
    )


def test_as_json_it_is_the_result_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, err = invoke(monkeypatch, tmp_path, narrowed(), "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["schema"] == "specbisect.narrowed/1"
    assert Narrowed.model_validate_json(out) == narrowed()


def test_the_progress_bar_tells_the_best_in_a_few_words() -> None:
    assert in_short(Candidate(MINIMAL)) == "batch Q4_K_M width 4, 0 axes, 1+5 tokens"
