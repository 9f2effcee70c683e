"""The binding engine: what it reports, what it shares with libllama, and what of one request reaches the next."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from specbisect.cell import (
    Case,
    Cell,
    Drafter,
    DraftModel,
    Model,
    NgramSimple,
    Prompt,
    PromptLookup,
    SelfDraft,
)
from specbisect.compare import compare
from specbisect.engines import run_arm, scenario
from specbisect.engines.binding import Binding
from specbisect.engines.libllama import LibLlama
from specbisect.engines.scenario import Scenario
from specbisect.errors import BadInput, EngineFault
from specbisect.fault import Fault
from specbisect.llama import files
from specbisect.llama.context import Context, Settings, rows_of
from specbisect.llama.logits import digest
from specbisect.trace import Trace

PROMPT = Prompt("p", ids=tuple(range(10, 40)) * 2)
OTHER = Prompt("o", ids=tuple(range(90, 50, -1)))


@pytest.fixture
def engine() -> Iterator[Binding]:
    made = Binding()
    yield made
    made.close()


@pytest.fixture
def libllama() -> Iterator[LibLlama]:
    made = LibLlama()
    yield made
    made.close()


@pytest.fixture
def model(tiny_models: Callable[..., Path]) -> Callable[..., Model]:
    def made(kind: str = "llama", quant: str = "BF16", **options: object) -> Model:
        path = tiny_models(kind, quant, **options)
        return Model(kind, quant, f"sha256:{files.sha256(path)}", str(path))

    return made


@pytest.fixture
def cell(model: Callable[..., Model]) -> Callable[..., Cell]:
    def made(target: Model | None = None, drafter: Drafter | None = None, **axes: object) -> Cell:
        settings = {"engine": "binding", "n_ctx": 512, "n_predict": 24, "n_threads": 1} | axes
        return Cell(target or model(), drafter, **settings)  # type: ignore[arg-type]

    return made


def in_libllama(case: Case, **axes: object) -> Case:
    return replace(case, cell=replace(case.cell, engine="libllama", **axes))


def cached(trace: Trace) -> int:
    return int(trace.resolved["binding"]["cached"])


def drafters(model: Callable[..., Model]) -> list[Drafter]:
    return [SelfDraft(), DraftModel(model(quant="Q4_K_M"), n_max=5), PromptLookup()]


# what an arm reports


def test_the_registry_knows_it(cell: Callable[..., Cell]) -> None:
    assert run_arm(Case(cell(), PROMPT)).resolved["binding"] == {"cached": 0}


def test_cycles_commit_the_answer_and_every_token_is_what_its_row_says(
    engine: Binding, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    for drafter in drafters(model):
        trace = engine.run(Case(cell(drafter=drafter), PROMPT))
        assert trace.arm == "speculative"
        assert trace.ids == trace.best
        assert len(trace.ids) == len(trace.pieces) == len(trace.digests) == len(trace.margins) == 24
        assert min(trace.margins) >= 0
        history = (*trace.prompt_ids, *trace.ids)
        at = len(trace.prompt_ids)
        for cycle in trace.cycles:
            assert cycle.base == at
            confirmed = cycle.batch[: cycle.accepted + 1]
            assert confirmed == history[at : at + len(confirmed)]
            at += len(confirmed)
        assert len(history) - at in (0, 1)
        assert trace.drafted == sum(c.drafted for c in trace.cycles) > 0
        assert trace.accepted == sum(c.accepted for c in trace.cycles)


def test_a_vanilla_arm_has_no_cycles(engine: Binding, cell: Callable[..., Cell]) -> None:
    trace = engine.run(Case(cell(), PROMPT))
    assert (trace.arm, trace.cycles, trace.drafted, trace.finish) == ("vanilla", (), 0, "length")
    assert trace.counters.decode_calls == 24
    assert trace.counters.decoded_tokens == 60 + 23


def test_the_arms_can_be_compared(engine: Binding, cell: Callable[..., Cell]) -> None:
    vanilla, speculative = (
        engine.run(Case(cell(drafter=drafter), PROMPT)) for drafter in (None, SelfDraft())
    )
    assert vanilla.unhonoured == speculative.unhonoured == ()
    assert vanilla.resolved["target"] == speculative.resolved["target"]
    assert vanilla.provenance["target"] == speculative.provenance["draft"]
    assert compare(vanilla, speculative).outcome != "invalid"


def test_settings_arrive_in_the_context(engine: Binding, cell: Callable[..., Cell]) -> None:
    axes = {
        "n_batch": 64,
        "n_ubatch": 32,
        "n_threads": 2,
        "n_threads_batch": 1,
        "flash_attn": "on",
        "type_k": "q8_0",
        "type_v": "q8_0",
    }
    trace = engine.run(Case(cell(**axes), PROMPT))
    assert trace.unhonoured == ()
    assert {name: trace.resolved["target"][name] for name in axes} == axes
    assert trace.ids == trace.best


def test_flash_attention_is_off_unless_asked_for(
    engine: Binding, cell: Callable[..., Cell]
) -> None:
    trace = engine.run(Case(cell(flash_attn="auto"), PROMPT))
    assert trace.resolved["target"]["flash_attn"] == "off"
    assert trace.unhonoured == ()
    (problem,) = cell(flash_attn="auto", type_v="q8_0").problems()
    assert "set it to on" in problem
    assert not list(cell(flash_attn="on", type_v="q8_0").problems())


def test_models_are_counted_as_they_are_loaded(
    engine: Binding, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    drafter = DraftModel(model(quant="Q4_K_M"))
    loads = [
        engine.run(Case(cell(drafter=d), PROMPT)).counters.model_loads
        for d in (None, drafter, drafter, None)
    ]
    assert loads == [1, 2, 1, 1]  # a draft model stays loaded, a `Llama` does not


def test_an_answer_ends_with_its_end_token(
    engine: Binding, libllama: LibLlama, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    ends_as = engine.run(Case(cell(), PROMPT)).ids[7]
    target = model(ends_as=ends_as)
    for drafter in (None, SelfDraft(), PromptLookup()):
        case = Case(cell(target, drafter), PROMPT)
        trace = engine.run(case)
        assert trace.finish == "eog"
        assert trace.ids[-1] == 2
        assert 2 not in trace.ids[:-1]
        ignoring = replace(case, cell=replace(case.cell, ignore_eos=True, flash_attn="off"))
        trace = engine.run(ignoring)
        assert (trace.finish, len(trace.ids)) == ("length", 24)
        assert trace.ids == trace.best
        assert 2 not in trace.ids
        if drafter is None:
            assert trace.ids == libllama.run(in_libllama(ignoring)).ids


def test_an_answer_ends_where_the_arrays_of_the_binding_do(
    engine: Binding, libllama: LibLlama, cell: Callable[..., Cell]
) -> None:
    prompt = Prompt("long", ids=PROMPT.ids * 4 if PROMPT.ids else None)
    for drafter in (None, SelfDraft()):
        trace = engine.run(Case(cell(drafter=drafter, n_ctx=250, n_predict=100), prompt))
        assert trace.resolved["target"]["n_ctx"] == 256
        assert (trace.finish, len(trace.ids)) == ("context", 11)
        assert trace.unhonoured == ()
        there = libllama.run(
            in_libllama(Case(cell(drafter=drafter, n_ctx=250, n_predict=100), prompt))
        )
        assert (there.finish, len(there.ids)) == ("context", 16)  # it leaves one place free
        assert there.unhonoured == ()


# the same in libllama


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("quant", ["BF16", "Q4_K_M"])
def test_rows_are_those_of_libllama_from_the_second_on(
    quant: str,
    flash_attn: str,
    engine: Binding,
    libllama: LibLlama,
    cell: Callable[..., Cell],
    model: Callable[..., Model],
) -> None:
    for drafter in (None, SelfDraft(), DraftModel(model(quant="Q2_K"), n_max=4)):
        case = Case(cell(model(quant=quant), drafter, flash_attn=flash_attn), PROMPT)
        ours, theirs = engine.run(case), libllama.run(in_libllama(case))
        assert ours.ids == theirs.ids
        assert ours.digests[1:] == theirs.digests[1:]
        assert ours.cycles == theirs.cycles


def test_the_first_row_is_that_of_a_prompt_evaluated_with_all_its_rows(
    engine: Binding, libllama: LibLlama, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    case = Case(cell(model(quant="Q4_K_M"), flash_attn="off"), PROMPT)
    trace = engine.run(case)
    alike = in_libllama(case).cell
    with Context(libllama.models.get(alike.target, alike), Settings.of(alike)) as context:
        rows = context.evaluate(rows_of(trace.prompt_ids, 0))
        assert digest(rows[-1]) == trace.digests[0]


def test_prompt_lookup_drafts_beyond_the_end_of_the_answer(
    engine: Binding, libllama: LibLlama, cell: Callable[..., Cell]
) -> None:
    drafter = PromptLookup(n_max=6)
    case = Case(cell(drafter=drafter, flash_attn="off"), PROMPT)
    ours = engine.run(case)
    longer = libllama.run(in_libllama(case, n_predict=case.cell.n_predict + drafter.n_max + 1))
    assert ours.digests[1:] == longer.digests[1 : len(ours.digests)]
    pairs = list(zip(ours.cycles, longer.cycles, strict=False))
    assert len(pairs) == len(ours.cycles)
    assert all((a.base, a.batch) == (b.base, b.batch) for a, b in pairs)
    assert all(a.accepted == b.accepted for a, b in pairs[:-1])


# from one request to the next


def test_with_prompt_cache_an_arm_keeps_its_object(
    engine: Binding, cell: Callable[..., Cell]
) -> None:
    for drafter in (None, SelfDraft()):
        case = Case(cell(drafter=drafter, cache_prompt=True), PROMPT)
        first, second = engine.run(case), engine.run(case)
        assert cached(first) == 0
        assert cached(second) == len(second.prompt_ids) - 1  # the last is evaluated once more
        assert second.counters.model_loads == 0
        assert second.ids == second.best
        changed = engine.run(Case(replace(case.cell, n_predict=8), PROMPT))
        assert (cached(changed), changed.counters.model_loads) == (0, 1)


def test_without_prompt_cache_an_arm_leaves_nothing(
    engine: Binding, cell: Callable[..., Cell]
) -> None:
    case = Case(cell(), PROMPT)
    first, second = engine.run(case), engine.run(case)
    assert first == second
    assert second.counters.model_loads == 1


def test_a_prompt_that_is_all_there_is_not_evaluated_again(
    engine: Binding, cell: Callable[..., Cell]
) -> None:
    case = Case(cell(cache_prompt=True, n_predict=1), PROMPT)
    first, second = engine.run(case), engine.run(case)
    assert second.digests == first.digests
    assert second.ids == first.ids
    assert cached(second) == len(second.prompt_ids)
    assert second.counters.decoded_tokens == 0


@pytest.mark.parametrize("kind", ["llama", "swa", "recurrent"])
def test_a_reset_object_is_like_a_fresh_one(
    kind: str, engine: Binding, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    case = Case(cell(model(kind)), PROMPT)
    alone = engine.run(case)
    assert alone == engine.play(case, Scenario(history=("longer", OTHER))).trace


def test_a_memory_that_cannot_be_cut_is_not_reused(
    engine: Binding, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    case = Case(cell(model("recurrent"), cache_prompt=True), PROMPT)
    first = engine.run(case)
    assert first == engine.play(case, scenario.REPEATED).trace


def test_a_prefix_is_reused_although_its_window_is_gone(
    engine: Binding, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    """A defect of the binding: with a small sliding-window cache it attends to nothing where the window was."""
    long = tuple((i * 37) % 250 + 5 for i in range(700))
    prompt = Prompt("p", ids=(*long[:100], 7, 8, 9))
    moved = {}
    for swa_full in (False, True):
        case = Case(cell(model("swa"), n_ctx=1024, n_ubatch=16, swa_full=swa_full), prompt)
        alone = engine.run(case)
        reusing = replace(case, cell=replace(case.cell, cache_prompt=True))
        after = engine.play(reusing, Scenario(history=(Prompt("long", ids=long),))).trace
        assert cached(after) == 100
        moved[swa_full] = abs(after.margins[0] - alone.margins[0])
    assert moved[False] > 10 * moved[True]


# what goes wrong


def test_a_rejected_draft_that_a_memory_keeps_is_a_failure(
    engine: Binding, cell: Callable[..., Cell], model: Callable[..., Model]
) -> None:
    drafter = DraftModel(model("recurrent", noise=0.5), n_max=4)
    case = Case(cell(model("recurrent"), drafter), PROMPT)
    with pytest.raises(EngineFault, match=r"decode: Llama.generate: llama_decode returned"):
        engine.run(case)
    assert engine.run(Case(cell(), PROMPT)).ids


def test_drafts_past_the_arrays_of_the_binding_are_a_failure(
    engine: Binding, cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LlamaPromptLookupDecoding, "__call__", lambda *_: np.full(8, 5, dtype=np.intc)
    )
    prompt = Prompt("long", ids=PROMPT.ids * 4 if PROMPT.ids else None)
    case = Case(cell(drafter=PromptLookup(), n_ctx=250, n_predict=100), prompt)
    with pytest.raises(EngineFault, match="broadcast"):
        engine.run(case)
    assert engine.run(Case(replace(case.cell, n_ctx=256), prompt)).finish == "context"


def test_a_prompt_longer_than_the_context_is_a_failure(
    engine: Binding, cell: Callable[..., Cell]
) -> None:
    long = Prompt("long", ids=(5,) * 600)
    with pytest.raises(EngineFault, match=r"^prompt: Llama.generate"):
        engine.run(Case(cell(), long))


def test_what_llama_cpp_refuses_is_a_failure_with_its_words(
    engine: Binding, cell: Callable[..., Cell], tmp_path: Path
) -> None:
    with pytest.raises(EngineFault, match=r"^context: .*V cache"):
        engine.run(Case(cell(type_v="q8_0", flash_attn="off"), PROMPT))
    broken = tmp_path / "broken.gguf"
    whole = Path(cell().target.path).read_bytes()
    broken.write_bytes(whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"))
    target = Model("broken", "BF16", f"sha256:{files.sha256(broken)}", str(broken))
    with pytest.raises(EngineFault, match=r"^load: broken.gguf: .*attn_q"):
        engine.run(Case(cell(target), PROMPT))


def test_what_cannot_be_run_is_said(engine: Binding, cell: Callable[..., Cell]) -> None:
    case = Case(cell(), PROMPT)
    with pytest.raises(BadInput, match="has no drafter ngram-simple"):
        engine.run(replace(case, cell=replace(case.cell, drafter=NgramSimple())))
    with pytest.raises(BadInput, match="companions"):
        engine.play(case, Scenario(companions=(OTHER,)))
    with pytest.raises(BadInput, match="libllama engine only"):
        engine.run(replace(case, fault=Fault("stale-kv")))
    with pytest.raises(BadInput, match="no tokens"):
        engine.run(Case(cell(), Prompt("empty", ids=())))
    with pytest.raises(BadInput, match="token id 99999"):
        engine.run(Case(cell(), Prompt("bad", ids=(99999,))))
    moved = replace(cell().target, identity="sha256:0")
    with pytest.raises(BadInput, match="changed since"):
        engine.run(Case(cell(moved), PROMPT))
