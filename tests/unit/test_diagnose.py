"""The experiments of a diagnosis: exact where nothing is wrong, whatever the memory and the settings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, NgramSimple, Prompt, Scripted, SelfDraft
from specbisect.diagnose.alignment import align
from specbisect.diagnose.conclusion import Options
from specbisect.diagnose.envelope import measure
from specbisect.diagnose.examine import examine
from specbisect.diagnose.lab import Lab, scripted
from specbisect.diagnose.replay import positive_control, replay, replay_as
from specbisect.diagnose.run import examine_case, measure_envelope
from specbisect.diagnose.widths import AtWidth, WidthTable
from specbisect.engines.libllama import LibLlama
from specbisect.errors import BadInput
from specbisect.fault import Fault
from specbisect.trace import Cycle, Trace

KINDS = ["llama", "moe", "swa", "recurrent", "hybrid"]
PROMPT = Prompt("p", "Once upon a time, in a village by the sea, there lived")


@pytest.fixture(scope="module")
def engine() -> LibLlama:
    return LibLlama()


@pytest.fixture
def case_of(tiny_models: Callable[..., Path]) -> Callable[..., Case]:
    """A case of a tiny model with a drafter that is sometimes wrong."""

    def case(kind: str, n_max: int = 5, quant: str = "Q4_K_M", **settings: Any) -> Case:
        target, draft = tiny_models(kind, quant), tiny_models(kind, noise=0.1)
        drafter = DraftModel(Model("draft", "BF16", f"{kind}-draft", str(draft)), n_max)
        cell = Cell(Model(kind, quant, f"{kind}-{quant}", str(target)), drafter, n_threads=1)
        return Case(replace(cell, **{"n_predict": 32, "n_ctx": 512, **settings}), PROMPT)

    return case


SETTINGS: list[dict[str, Any]] = [
    {},
    {"flash_attn": "off"},
    {"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"},
    {"n_ubatch": 2},
    {"n_batch": 4, "n_ubatch": 3},
    {"swa_full": True},
    {"use_extra_bufts": False},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "plain"
)
def test_replay_gives_the_bits_of_an_undisturbed_arm(
    kind: str, settings: dict[str, Any], case_of: Callable[..., Case], engine: LibLlama
) -> None:
    case = case_of(kind, **settings)
    trace = engine.run(case)
    assert 0 < trace.accepted < trace.drafted  # there is something to roll back
    lab = Lab(engine, case, trace.prompt_ids)
    assert replay(lab, trace).equal
    assert positive_control(lab, trace)


def test_experts_need_the_form_in_which_rejected_rows_keep_their_company(
    case_of: Callable[..., Case], engine: LibLlama
) -> None:
    found = []
    for n_max in (3, 5, 7):
        case = case_of("moe", n_max)
        trace = engine.run(case)
        found.append(replay_as(Lab(engine, case, trace.prompt_ids), trace, shared=True).equal)
    assert all(found)


@pytest.mark.parametrize("kind", KINDS)
def test_scripted_drafts_give_the_same_arm(
    kind: str, case_of: Callable[..., Case], engine: LibLlama
) -> None:
    case = case_of(kind)
    trace = engine.run(case)
    again = engine.run(scripted(case, trace))
    assert (again.ids, again.digests) == (trace.ids, trace.digests)
    assert [c.batch for c in again.cycles] == [c.batch for c in trace.cycles]


def test_checkpointed_memories_say_what_was_decoded_again(
    case_of: Callable[..., Case], engine: LibLlama
) -> None:
    trace = engine.run(case_of("recurrent"))
    for cycle in trace.cycles:
        assert cycle.redecoded == (cycle.accepted + 1 if cycle.accepted < cycle.drafted else 0)


def test_a_window_that_a_split_batch_would_overwrite_is_rolled_back_by_checkpoint(
    case_of: Callable[..., Case], engine: LibLlama
) -> None:
    assert any(c.redecoded for c in engine.run(case_of("swa", n_ubatch=2)).cycles)
    assert not any(
        c.redecoded for c in engine.run(case_of("swa", n_ubatch=2, swa_full=True)).cycles
    )


def test_a_state_fault_is_found_in_its_cycle_with_its_size(
    case_of: Callable[..., Case], engine: LibLlama
) -> None:
    case = replace(case_of("llama"), fault=Fault("stale-kv", cycle=2))
    vanilla, speculative = engine.run(case.vanilla), engine.run(case)
    finding = examine(engine, case, vanilla, speculative, Options())
    assert finding.label == "state"
    seen = finding.experiment("state")
    assert seen is not None
    assert seen.data["cycle"] == speculative.resolved["planted"]
    assert seen.data["after_reject"]
    assert seen.data["max_difference"] > 0
    assert seen.data["healed"]


def test_an_agreeing_case_is_audited_to_the_end(
    case_of: Callable[..., Case], engine: LibLlama
) -> None:
    case = case_of("llama", quant="Q8_0")
    vanilla = engine.run(case.vanilla)
    case = replace(case, cell=replace(case.cell, drafter=SelfDraft(3)))
    speculative = engine.run(case)
    envelope = measure(engine, case.vanilla, vanilla, (2, 4))
    finding = examine(engine, case, vanilla, speculative, Options(audit=True, envelope=envelope))
    if finding.verdict.fork is None:  # whether it forks is up to this CPU's kernels
        assert finding.label == "none"
        assert {"positive-control", "replay", "verification", "draft-replay", "widths"} <= {
            e.experiment for e in finding.evidence
        }


def test_nothing_drafted_is_not_engaged(case_of: Callable[..., Case], engine: LibLlama) -> None:
    case = case_of("llama")
    case = replace(case, cell=replace(case.cell, drafter=NgramSimple(size_n=64, size_m=64)))
    vanilla, speculative = engine.run(case.vanilla), engine.run(case)
    assert examine(engine, case, vanilla, speculative, Options()).label == "not-engaged"


def test_a_void_control_voids_the_diagnosis(
    case_of: Callable[..., Case], engine: LibLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("llama")
    vanilla, speculative = engine.run(case.vanilla), engine.run(case)
    monkeypatch.setattr("specbisect.diagnose.examine.positive_control", lambda lab, trace: False)
    finding = examine(engine, case, vanilla, speculative, Options())
    assert (finding.label, finding.kind) == ("unexplained", "void")


def test_traces_of_another_kind_of_host_are_not_replayed_here(
    case_of: Callable[..., Case], engine: LibLlama
) -> None:
    """A replay gives other bits there, and a diagnosis would blame the memory."""
    case = case_of("llama")

    def elsewhere(trace: Trace) -> Trace:
        host = {**trace.provenance["host"], "cpu": "another"}
        return replace(trace, provenance={**trace.provenance, "host": host})

    vanilla, speculative = engine.run(case.vanilla), engine.run(case)
    with pytest.raises(BadInput, match=f"{case.key} ran where cpu is another, not .*--fresh"):
        examine_case(case, elsewhere(vanilla), elsewhere(speculative), Options())
    with pytest.raises(BadInput, match="diagnose it there"):
        measure_envelope(case.vanilla, elsewhere(vanilla), (2,))


def test_findings_survive_the_way_to_disk(case_of: Callable[..., Case], engine: LibLlama) -> None:
    case = replace(case_of("llama"), fault=Fault("row-off-by-one"))
    finding = examine(engine, case, engine.run(case.vanilla), engine.run(case), Options())
    assert type(finding).model_validate_json(finding.model_dump_json(by_alias=True)) == finding


def _trace(ids: list[int], cycles: list[Cycle]) -> Trace:
    return Trace("speculative", (1, 2), tuple(ids), "length", cycles=tuple(cycles))


def test_shifted_drafts_are_recognised() -> None:
    ids = list(range(10, 40))
    moved = [Cycle(2 + i, (ids[i], ids[i + 2], ids[i + 3]), 0) for i in range(20)]
    found = align(_trace(ids, moved))
    assert found is not None
    assert found.shift == 1


def test_right_drafts_have_no_shift() -> None:
    ids = list(range(10, 40))
    right = [Cycle(2 + i, (ids[i], ids[i + 1], ids[i + 2]), 2) for i in range(0, 20, 3)]
    found = align(_trace(ids, right))
    assert found is not None
    assert found.shift is None
    assert found.matches[0] == 1.0


def _table(digests: str) -> WidthTable:
    rows = [AtWidth(w, d, 0, 0.0, True) for w, d in enumerate(digests, 1)]
    return WidthTable(tuple(rows), {})


@pytest.mark.parametrize(
    ("digests", "loners", "alone", "departs"),
    [
        ("aaaaaaaa", [], False, None),
        ("aaabbbbb", [], False, 4),
        ("aaaXaaaa", [4], False, 4),
        ("aaabXbbb", [5], False, 4),
        ("abbbbbbb", [], True, 2),
        (
            "abcdefgh",
            [],
            True,
            2,
        ),  # every width has bits of its own: how a backend works, no defect
    ],
)
def test_the_odd_width_out(
    digests: str, loners: list[int], alone: bool, departs: int | None
) -> None:
    table = _table(digests)
    assert table.loners() == loners
    assert table.one_stands_alone() == alone
    assert table.departs_at() == departs


def test_scripts_know_the_longest_draft_of_what_they_replay() -> None:
    assert Scripted(((1, (5, 6)),), limit=4).n_max == 4
    assert Scripted(((1, (5, 6)),)).n_max == 2
    assert Scripted().n_max == 0
