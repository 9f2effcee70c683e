"""The server engine on the real llama-server, and against the libllama engine of the same llama.cpp."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from specbisect.cell import (
    Case,
    Cell,
    Drafter,
    DraftModel,
    Model,
    NgramSimple,
    Prompt,
    SelfDraft,
    ServerSpec,
)
from specbisect.cmdline import table
from specbisect.compare import compare
from specbisect.engines import scenario
from specbisect.engines.libllama import LibLlama
from specbisect.engines.scenario import Scenario
from specbisect.engines.server import ServerEngine, binary, flags
from specbisect.errors import EngineFault
from specbisect.llama import files

PROMPTS = [
    "The history of the bicycle begins",
    "def quicksort(arr):\n",
    "Once upon a time, in a small village",
    "Question: What is the capital of France?\nAnswer:",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "import numpy as np\n\n\ndef softmax(x):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. " * 4,
]
CASES = [Prompt(str(i), text=text) for i, text in enumerate(PROMPTS)]


@pytest.fixture
def binary_path(llama_server: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(binary.VARIABLE, str(llama_server))
    # threads that spin while they wait would take the cores from this process, which computes too
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    return llama_server


@pytest.fixture
def server(binary_path: Path) -> Iterator[ServerEngine]:
    made = ServerEngine()
    yield made
    made.close()
    alive = [p for p in psutil.Process().children(recursive=True) if p.name() == binary_path.name]
    assert alive == []


@pytest.fixture
def libllama() -> Iterator[LibLlama]:
    made = LibLlama()
    yield made
    made.close()


def model(path: Path) -> Model:
    return Model("SmolLM2", path.stem, f"sha256:{files.sha256(path)}", str(path))


@pytest.fixture
def cell(ladder: Callable[[str], Path]) -> Callable[..., Cell]:
    """A cell of the server engine with the given type of weights; ``draft=3`` adds a draft model at that length."""

    def made(quant: str, *, draft: int = 0, **axes: object) -> Cell:
        drafter = DraftModel(model(ladder("Q2_K")), n_max=draft) if draft else None
        settings = {"engine": "server", "drafter": drafter, "n_predict": 48} | axes
        return Cell(model(ladder(quant)), **settings)  # type: ignore[arg-type]

    return made


@pytest.mark.parametrize("quant", ["BF16", "Q8_0", "Q4_K_M"])
def test_both_engines_do_the_same(
    server: ServerEngine,
    libllama: LibLlama,
    ladder: Callable[[str], Path],
    cell: Callable[..., Cell],
    quant: str,
) -> None:
    """Every token, every drafted and accepted token, cycle by cycle, and with them the place of every fork."""
    draft = model(ladder("Q2_K"))
    drafters: list[Drafter | None] = [None, *(DraftModel(draft, n_max=n) for n in (1, 3, 7))]
    drafters.append(NgramSimple(size_n=3, size_m=5))
    drafted = 0
    for drafter in drafters:
        for prompt in CASES:
            ours, theirs = (
                engine.run(Case(cell(quant, engine=name, drafter=drafter, n_predict=32), prompt))
                for name, engine in (("libllama", libllama), ("server", server))
            )
            assert ours.prompt_ids == theirs.prompt_ids
            assert ours.ids == theirs.ids, (drafter, prompt)
            assert ours.cycles == theirs.cycles
            assert (ours.drafted, ours.accepted) == (theirs.drafted, theirs.accepted)
            assert (ours.finish, ours.pieces) == (theirs.finish, theirs.pieces)
            assert theirs.unhonoured == ()
            drafted += theirs.drafted
    assert drafted > 0
    assert server.starts == len(drafters)


@pytest.mark.parametrize(
    "axes",
    [
        {"n_ubatch": 2},
        {"type_k": "q8_0", "type_v": "q8_0"},
        {"flash_attn": "off"},
        {"use_extra_bufts": False},
        {"n_batch": 4, "n_ubatch": 4},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_axes_mean_the_same_in_both_engines(
    server: ServerEngine, libllama: LibLlama, cell: Callable[..., Cell], axes: dict[str, object]
) -> None:
    for draft in (0, 3):
        case = Case(cell("Q4_K_M", draft=draft, **axes), CASES[0])
        theirs = server.run(case)
        ours = libllama.run(replace(case, cell=replace(case.cell, engine="libllama")))
        assert (ours.ids, ours.finish, ours.cycles) == (theirs.ids, theirs.finish, theirs.cycles)
        assert (ours.unhonoured, theirs.unhonoured) == ((), ())
        shared = ours.resolved["target"].keys() & theirs.resolved["target"].keys()
        assert {"n_ctx", "flash_attn", "type_k", "n_ubatch"} <= shared
        assert all(ours.resolved["target"][k] == theirs.resolved["target"][k] for k in shared)


def test_a_target_that_drafts_for_itself_is_the_same_in_both_engines(
    server: ServerEngine, libllama: LibLlama, cell: Callable[..., Cell]
) -> None:
    case = Case(cell("Q8_0", drafter=SelfDraft(), type_k="q8_0"), CASES[0])
    theirs = server.run(case)
    ours = libllama.run(replace(case, cell=replace(case.cell, engine="libllama")))
    assert (ours.ids, ours.cycles) == (theirs.ids, theirs.cycles)


def test_the_end_of_the_context_is_the_same_in_both_engines(
    server: ServerEngine, libllama: LibLlama, cell: Callable[..., Cell]
) -> None:
    """Of the vanilla arms: a llama-server that speculates drops accepted tokens there, up to a whole draft."""
    long = Prompt("long", ids=tuple(range(1000, 1220)))
    case = Case(cell("Q8_0", n_ctx=256, n_predict=100, ignore_eos=True), long)
    theirs = server.run(case)
    ours = libllama.run(replace(case, cell=replace(case.cell, engine="libllama")))
    assert theirs.finish == "context"
    assert (ours.ids, ours.finish) == (theirs.ids, theirs.finish)


def test_a_draft_model_without_a_method_never_speculates(
    server: ServerEngine, ladder: Callable[[str], Path], cell: Callable[..., Cell]
) -> None:
    drafter = ServerSpec("none", model=model(ladder("Q2_K")))
    vanilla, speculative = (
        server.run(Case(cell("Q8_0", drafter=d, n_predict=8), CASES[0])) for d in (None, drafter)
    )
    verdict = compare(vanilla, speculative)
    assert (verdict.outcome, verdict.reason) == ("unexercised", "nothing was drafted")
    assert speculative.resolved["server"]["spec_types"] == []


@pytest.mark.parametrize("kind", ["ngram-cache", "ngram-map-k", "ngram-map-k4v", "ngram-mod"])
def test_every_method_without_a_draft_model_runs(
    server: ServerEngine, cell: Callable[..., Cell], kind: str
) -> None:
    trace = server.run(Case(cell("Q8_0", drafter=ServerSpec(kind), ignore_eos=True), CASES[-1]))
    assert trace.resolved["server"]["spec_types"] == [kind]
    assert len(trace.ids) == 48


def test_the_table_has_every_flag_of_the_binary(binary_path: Path) -> None:
    found = binary.find()
    assert "draft-simple" in found.spec_types
    assert all(group[0] in found.flags for group in flags.QUIET)
    assert [
        f for f in found.flags if f.startswith("--") and not f.endswith("-") and not table.flag(f)
    ] == []


def test_a_batch_too_small_for_a_draft_is_a_fault_and_the_run_goes_on(
    server: ServerEngine, cell: Callable[..., Cell]
) -> None:
    small = cell("Q8_0", draft=7, n_batch=2, n_ubatch=2)
    with pytest.raises(EngineFault):
        server.run(Case(small, CASES[0]))
    assert server.run(Case(replace(small, n_batch=64), CASES[0])).ids


def test_nothing_but_loopback_is_bound(server: ServerEngine, cell: Callable[..., Cell]) -> None:
    server.run(Case(cell("Q8_0", n_predict=4), CASES[0]))
    sockets = [
        c for p in psutil.Process().children(recursive=True) for c in p.net_connections("inet")
    ]
    assert {c.laddr.ip for c in sockets} == {"127.0.0.1"}


def test_servers_beside_each_other_do_not_collide(
    binary_path: Path, cell: Callable[..., Cell]
) -> None:
    engines = [ServerEngine(), ServerEngine()]
    cases = [Case(cell("Q8_0", n_predict=8), prompt) for prompt in CASES[:2]]
    with ThreadPoolExecutor() as pool:
        together = list(
            pool.map(lambda pair: pair[0].run(pair[1]), zip(engines, cases, strict=True))
        )
    alone = [engines[0].run(case) for case in cases]
    for engine in engines:
        engine.close()
    assert together == alone


def test_a_prompt_cache_is_used_only_when_asked_for(
    server: ServerEngine, cell: Callable[..., Cell]
) -> None:
    for cached in (False, True):
        case = Case(cell("Q8_0", n_predict=4, cache_prompt=cached), CASES[-1])
        trace = server.play(case, scenario.REPEATED).trace
        assert (trace.resolved["server"]["cached"] > 0) == cached
        assert trace == server.play(case, scenario.REPEATED).trace


def test_a_drafter_that_remembers_shows_by_what_it_drafts(
    server: ServerEngine, cell: Callable[..., Cell]
) -> None:
    """ngram-mod keeps one table for all requests, so that a request that was answered before is drafted better."""
    args = (
        "--spec-ngram-mod-n-match",
        "4",
        "--spec-ngram-mod-n-min",
        "1",
        "--spec-ngram-mod-n-max",
        "8",
    )
    case = Case(cell("Q8_0", drafter=ServerSpec("ngram-mod", args=args)), CASES[0])
    cold = server.play(case, scenario.COLD).trace
    warm = server.play(case, scenario.REPEATED).trace
    assert warm.accepted > cold.accepted


def test_companions_are_decoded_beside_the_case(
    server: ServerEngine, cell: Callable[..., Cell]
) -> None:
    case = Case(cell("Q4_K_M", n_parallel=4, kv_unified=True), CASES[0])
    alone = server.play(case, scenario.ALONE)
    beside = server.play(case, Scenario.of(case.cell))
    assert alone.companions == ()
    assert beside.trace.prompt_ids == alone.trace.prompt_ids
    assert len(beside.companions) == 3
    assert beside.contamination == ()
    # what a canary looks like when it is there
    assert all(scenario.canaries_in(companion.text()) for companion in beside.companions)
