"""The binding engine in worker processes that it may abort, and on a real model against the libllama engine."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt, PromptLookup, SelfDraft
from specbisect.compare import compare
from specbisect.engines import scenario
from specbisect.engines.binding import Binding
from specbisect.engines.libllama import LibLlama
from specbisect.llama import files
from specbisect.runner import run
from specbisect.store import Store
from specbisect.trace import Failure, Trace
from specbisect.workers import Workers

PROMPTS = [
    Prompt("code", text="def quicksort(arr):\n"),
    Prompt("story", text="Once upon a time, in a small village"),
]


def model(path: Path) -> Model:
    return Model(path.stem, path.stem, f"sha256:{files.sha256(path)}", str(path))


@pytest.fixture
def binding() -> Iterator[Binding]:
    made = Binding()
    yield made
    made.close()


@pytest.fixture
def libllama() -> Iterator[LibLlama]:
    made = LibLlama()
    yield made
    made.close()


def test_a_batch_too_small_for_the_draft_aborts_and_the_run_goes_on(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    """The pieces of a split verify batch overwrite each other's rows, and the binding asks for one that is gone."""
    whole = Cell(
        model(tiny_models()),
        SelfDraft(n_max=3),
        engine="binding",
        n_batch=4,
        n_ubatch=4,
        n_predict=16,
        n_threads=1,
    )
    cells = [replace(whole, n_batch=n, n_ubatch=n) for n in (3, 4, 2, 8)]
    prompts = [Prompt(str(start), ids=tuple(range(start, start + 30))) for start in (10, 60)]
    cases = [Case(cell, prompt) for cell in cells for prompt in prompts]
    with Store.create(tmp_path / "run", "plan", {}) as store, Workers(jobs=1) as workers:
        summary = run(cases, store, workers)
        assert summary.done == len(cases)
        assert summary.failures == 4
        for case in cases:
            assert isinstance(store.arm(case.vanilla.key), Trace)
            failed = case.cell.n_batch < case.cell.width
            assert (store.outcome(case.key) == "failed") == failed
            if failed:
                failure = store.arm(case.key)
                assert isinstance(failure, Failure)
                assert failure.stage == "verify 0"
                assert failure.reason == "aborted (SIGABRT)"
                assert any("invalid logits id" in line for line in failure.log)
                assert "GGML_ASSERT" in failure.log[-1]


@pytest.mark.network
def test_forks_are_those_of_libllama(
    binding: Binding, libllama: LibLlama, ladder: Callable[[str], Path]
) -> None:
    """Where they begin alike: the binding evaluates a prompt with all its rows, which can change the first token."""
    drafter = DraftModel(model(ladder("Q2_K")), n_max=3)
    cell = Cell(model(ladder("Q4_K_M")), n_ctx=512, n_predict=32, n_threads=1, flash_attn="off")
    alike = 0
    for prompt in PROMPTS:
        cases = [Case(replace(cell, drafter=d), prompt) for d in (None, drafter)]
        theirs = [libllama.run(case) for case in cases]
        ours = [
            binding.run(replace(case, cell=replace(case.cell, engine="binding"))) for case in cases
        ]
        if ours[0].ids[0] == theirs[0].ids[0]:
            alike += 1
            assert compare(*ours) == compare(*theirs)
            for a, b in zip(ours, theirs, strict=True):
                assert (a.ids, a.digests[1:], a.cycles) == (b.ids, b.digests[1:], b.cycles)
    assert alike


@pytest.mark.network
def test_prompt_lookup_and_a_reused_object_on_a_real_model(
    binding: Binding, ladder: Callable[[str], Path]
) -> None:
    prompt = Prompt("fox", text="The quick brown fox jumps over the lazy dog. " * 4)
    cell = Cell(
        model(ladder("Q4_K_M")),
        PromptLookup(),
        engine="binding",
        n_ctx=512,
        n_predict=16,
        n_threads=1,
        cache_prompt=True,
    )
    for case in (Case(cell, prompt), Case(cell.vanilla, prompt)):
        fresh = binding.run(case)
        trace = binding.play(case, scenario.REPEATED).trace
        assert fresh.ids == fresh.best
        assert trace.ids == trace.best
        assert fresh.resolved["binding"]["cached"] == 0
        assert trace.resolved["binding"]["cached"] == len(trace.prompt_ids) - 1
        assert (fresh.drafted > 0) == (trace.drafted > 0) == (case.cell.drafter is not None)
