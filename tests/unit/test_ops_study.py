"""From a place in a text to its kernel, and the proof by change, on tiny models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from specbisect.cell import Case, Cell, Model, Prompt, SelfDraft
from specbisect.compare import compare
from specbisect.diagnose.finding import Finding
from specbisect.diagnose.replay import first_token
from specbisect.engines.libllama import LibLlama
from specbisect.errors import BadInput
from specbisect.llama import files, quantize
from specbisect.ops import evidence, study
from specbisect.ops.nearness import Nearness, nearness
from specbisect.ops.profile import Profile
from specbisect.ops.study import Confirmation, Spot
from specbisect.trace import Cycle, Trace

PROMPT, TOKENS = tuple(range(40, 60)), tuple(range(80, 92))
SPOT = Spot(PROMPT[:12], PROMPT[12:], TOKENS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))


def case_of(path: Path, **settings: object) -> Case:
    model = Model(path.name, "", f"sha256:{files.sha256(path)}", str(path))
    cell = Cell(model, n_ctx=256, n_batch=64, n_ubatch=16, n_threads=1)
    return Case(replace(cell, **settings), Prompt("a", ids=PROMPT))  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["BF16", "Q6_K", "Q4_K_M"])
def test_the_node_is_the_cause_if_another_kernel_moves_it(
    tiny_models: Callable[..., Path], quant: str
) -> None:
    case = case_of(tiny_models("llama", quant))
    traces = study.look(case, SPOT, [2, 4, 8, 12])
    trace = next((t for t in traces if t.first), None)
    if (
        trace is None or trace.first is None
    ):  # a CPU on which this type has one kernel for all widths
        assert all(not t.errors for t in traces)
        return
    opened = study.open_up(case, SPOT, trace.first.node.key)
    assert trace.width in opened.capsule.departs
    assert opened.capsule.faithful
    found = study.confirm(case, SPOT, trace, opened)
    if opened.substitute:
        assert found
        assert all(c.confirmed for c in found), found
        assert opened.substitute in found[0].change


def test_attention_is_given_another_cache(tiny_models: Callable[..., Path]) -> None:
    case = case_of(tiny_models("llama", "Q8_0"), flash_attn="off")
    (trace,) = study.look(case, SPOT, [12])
    if trace.first is not None and trace.first.node.weight is None:
        opened = study.open_up(case, SPOT, trace.first.node.key)
        assert not opened.substitute
        found = study.confirm(case, SPOT, trace, opened)
        assert {c.change for c in found} <= {
            "type_k = q8_0",
            "type_k = type_v = bf16",
            "type_k = type_v = f32",
            "n_threads = 1",
        }
        assert any(c.confirmed for c in found)


@pytest.mark.parametrize("quant", ["BF16", "Q4_K_M"])
def test_only_what_is_named_changes_its_type(tiny_models: Callable[..., Path], quant: str) -> None:
    base = tiny_models("moe", quant)
    made = study.retype(base, {"blk.0.ffn_down_exps.weight": "Q8_0", "blk.1.attn_q.weight": "Q5_0"})
    before = {t.name: t for t in gguf.GGUFReader(base).tensors}
    after = {t.name: t for t in gguf.GGUFReader(made).tensors}
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name == "blk.0.ffn_down_exps.weight":
            assert tensor.tensor_type.name == "Q8_0"
        elif name == "blk.1.attn_q.weight":
            assert tensor.tensor_type.name == "Q5_0"
        else:
            assert tensor.tensor_type == before[name].tensor_type
            np.testing.assert_array_equal(tensor.data, before[name].data)


def test_a_table_of_types_is_made_for_any_target(tiny_models: Callable[..., Path]) -> None:
    for quant in ("Q8_0", "Q6_K"):
        rows = study.types(case_of(tiny_models("llama", quant)), 12, ["F32", "Q8_0"])
        assert {row.type for row in rows} == {"F32", "Q8_0"}


def test_a_place_after_a_prompt_is_in_the_targets_own_text(
    tiny_models: Callable[..., Path],
) -> None:
    found = study.spot(case_of(tiny_models("llama", "Q8_0")), 16)
    assert (found.prompt, found.then, len(found.batch)) == (PROMPT, (), 16)
    assert found.batch[:12] == study.spot(case_of(tiny_models("llama", "Q8_0")), 12).batch
    ended = study.spot(case_of(tiny_models("llama", "Q8_0", ends_as=found.batch[2])), 8)
    assert len(ended.batch) == 8


def test_outcomes_in_words() -> None:
    gone = Confirmation("blk.3.ffn_down as Q8_0", None, "gone")
    assert str(gone) == "with blk.3.ffn_down as Q8_0, no node departs"
    assert gone.confirmed
    assert not Confirmation("x", None, "stays").confirmed


def test_nearness_in_words() -> None:
    said = str(Nearness(0.25, 0.5, 7, 9, 7, True))
    assert said.startswith("nearer to float32: vanilla (RMS 0.25 vanilla, 0.5 speculative)")
    assert "float32 chooses the token of vanilla; neither is wrong" in said
    assert "token of neither" in str(Nearness(0.5, 0.25, 7, 9, 8, True))
    assert Nearness(0.5, 0.5, 7, 7, 7, True).nearer == "neither"


def trace_of(arm: str, ids: tuple[int, ...], cycles: tuple[Cycle, ...] = ()) -> Trace:
    drafted = sum(c.drafted for c in cycles)
    accepted = sum(c.accepted for c in cycles)
    return Trace(arm, PROMPT, ids, "length", cycles=cycles, drafted=drafted, accepted=accepted)  # type: ignore[arg-type]


def test_the_fork_of_a_finding_is_found_in_its_text(tiny_models: Callable[..., Path]) -> None:
    n = len(PROMPT)
    cycles = (Cycle(n, (5, 6, 7), 2), Cycle(n + 3, (8, 9, 10, 11), 1), Cycle(n + 5, (12, 13), 0))
    vanilla = trace_of("vanilla", (5, 6, 7, 8, 9, 99))
    speculative = trace_of("speculative", (5, 6, 7, 8, 9, 12), cycles)
    finding = Finding(
        case=case_of(tiny_models("llama")),
        verdict=compare(vanilla, speculative),
        label="batch-width",
        summary="",
        vanilla=vanilla,
        speculative=speculative,
    )
    spot = evidence.spot_of(finding)
    assert spot == Spot(PROMPT, (5, 6, 7), (8, 9, 10, 11))
    assert evidence.place_of(finding) == (speculative, 1, 1)
    (trace,) = study.look(finding.case, spot, [4])
    profile = Profile("key", "name", {"n_ubatch": 16}, {}, (), (), 0, 0)
    said = evidence.first_node(trace, profile)
    assert said.data["width"] == 4
    assert (said.data["node"] is None) == (trace.first is None)
    assert said.outcome == (
        f"the first node that departs is {trace.first}" if trace.first else "no node departs"
    )
    annotated = evidence.annotated(finding)
    assert annotated.experiment("first-node") == evidence.first_node(trace)
    assert evidence.annotated(annotated) is annotated
    other = finding.model_copy(update={"label": "state"})
    assert evidence.annotated(other) is other
    agreeing = finding.model_copy(update={"verdict": replace(finding.verdict, fork=None)})
    with pytest.raises(BadInput, match="has no fork in a verify batch"):
        evidence.spot_of(agreeing)
    assert evidence.annotated(agreeing) is agreeing


def test_the_arm_that_ran_in_float32_is_nearer_to_it(tiny_models: Callable[..., Path]) -> None:
    quantised = case_of(tiny_models("llama", "Q4_K_M"))
    cell = replace(quantised.cell, drafter=SelfDraft(n_max=3), n_predict=24)
    case = replace(quantised, cell=cell)
    exact = quantize.quantize(tiny_models("llama", "Q4_K_M"), "F32")
    engine = LibLlama()
    vanilla, speculative = engine.run(case.vanilla), engine.run(case)
    engine.close()
    verdict = replace(
        compare(vanilla, speculative),
        outcome="fork",
        fork=first_token(speculative, speculative.cycles[2]),
    )
    finding = Finding(
        case=case,
        verdict=verdict,
        label="batch-width",
        summary="",
        vanilla=vanilla,
        speculative=speculative,
    )
    found = nearness(finding, str(exact))
    assert found.exact
    assert 0 < found.vanilla < 10
    if vanilla.digests[verdict.fork] == speculative.digests[verdict.fork]:
        assert found.nearer == "neither"
    copy = replace(case_of(exact).cell, drafter=SelfDraft(n_max=3), n_predict=24)
    itself = nearness(finding.model_copy(update={"case": replace(case, cell=copy)}), str(exact))
    assert not itself.exact
    assert itself.vanilla < 0.1 * found.vanilla
