"""The server engine against a fake llama-server: what is asked, read and refused, and what is left behind."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
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
    PromptLookup,
    ServerSpec,
)
from specbisect.compare import compare
from specbisect.engines import run_arm, scenario
from specbisect.engines.server import KEY, URLS, ServerEngine, binary, flags, process, reading
from specbisect.engines.server.client import Client
from specbisect.errors import BadInput, EngineFault
from specbisect.trace import Failure
from specbisect.workers import Workers

FAKE = Path(__file__).parent.parent / "fake_llama_server.py"
PROMPT = Prompt("p", ids=(5, 6, 7))
PATIENCE_S = 60


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake as an executable that the engine finds; its pids are left in ``tmp_path / "pids"``."""
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))
    wrapper = script(
        tmp_path / "llama-server", f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n'
    )
    monkeypatch.setenv(binary.VARIABLE, str(wrapper))
    return wrapper


@pytest.fixture
def engine(fake: Path) -> Iterator[ServerEngine]:
    made = ServerEngine()
    yield made
    made.close()
    assert_all_gone(fake)


@pytest.fixture
def cell(tiny_models: Callable[..., Path]) -> Cell:
    path = str(tiny_models())
    return Cell(Model("tiny", "BF16", "sha256:0", path), engine="server", n_predict=8, n_threads=2)


def drafting(cell: Cell, n_max: int = 3) -> Cell:
    return replace(cell, drafter=DraftModel(cell.target, n_max=n_max))


def pids(fake: Path) -> list[int]:
    return [int(entry.name) for entry in (fake.parent / "pids").iterdir()]


def assert_all_gone(fake: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (
        alive := [p for p in pids(fake) if psutil.pid_exists(p)]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive == []


def command_lines(fake: Path) -> list[str]:
    return [entry.read_text() for entry in (fake.parent / "pids").iterdir()]


# what is asked and read


def test_both_arms_come_back_as_traces(engine: ServerEngine, cell: Cell) -> None:
    vanilla = engine.run(Case(cell, PROMPT))
    speculative = engine.run(Case(drafting(cell), PROMPT))
    assert vanilla.ids == speculative.ids == tuple(range(3, 11))
    assert (vanilla.arm, vanilla.finish, vanilla.drafted, vanilla.cycles) == (
        "vanilla",
        "length",
        0,
        (),
    )
    assert (speculative.drafted, speculative.accepted) == (6, 4)
    assert compare(vanilla, speculative).outcome == "agree"
    assert speculative.resolved["server"]["spec_types"] == ["draft-simple"]
    assert speculative.resolved["server"]["acceptance_per_position"] == [1.0, 1.0, 0.0]
    assert vanilla.resolved["target"]["flash_attn"] == "on"
    assert vanilla.provenance["target"]["sha256"] == speculative.provenance["draft"]["sha256"]
    assert "/" not in vanilla.provenance["server"]["command"]


def test_drafts_of_every_cycle_are_read_from_the_log(engine: ServerEngine, cell: Cell) -> None:
    cycles = engine.run(Case(drafting(cell), PROMPT)).cycles
    assert [(c.base, c.batch, c.accepted) for c in cycles] == [
        (3, (3, 4, 5, 0), 2),
        (6, (6, 7, 8, 0), 2),
        (9, (9,), 0),
    ]


def test_bytes_of_tokens_survive(engine: ServerEngine, cell: Cell) -> None:
    trace = engine.run(Case(cell, PROMPT))
    assert trace.pieces[:2] == ("<3>", "\xff\x04")
    assert trace.text(0, 1) == "<3>"


def test_two_runs_of_one_case_are_the_same_trace(engine: ServerEngine, cell: Cell) -> None:
    first, second = (engine.run(Case(drafting(cell), PROMPT)) for _ in range(2))
    assert first == second
    assert (first.counters.model_loads, second.counters.model_loads) == (2, 0)


def test_text_is_tokenised_by_the_target(engine: ServerEngine, cell: Cell) -> None:
    assert engine.run(Case(cell, Prompt("text", text="ab"))).prompt_ids == (1, 97, 98)


def test_each_distinct_server_starts_once_and_the_vanilla_one_survives_the_drafters(
    engine: ServerEngine, cell: Cell, fake: Path
) -> None:
    prompts = [Prompt(str(i), ids=(i, i + 1)) for i in range(3)]
    for n_max in (1, 3, 7):
        for prompt in prompts:
            engine.run(Case(cell, prompt))
            engine.run(Case(drafting(cell, n_max), prompt))
    assert engine.starts == len(pids(fake)) == 4


def test_only_loopback_is_listened_on_and_the_key_is_not_on_the_command_line(
    engine: ServerEngine, cell: Cell, fake: Path
) -> None:
    engine.run(Case(cell, PROMPT))
    listening = [c.laddr.ip for p in pids(fake) for c in psutil.Process(p).net_connections("inet")]
    assert set(listening) == {"127.0.0.1"}
    assert "key" not in command_lines(fake)[0]


def test_settings_of_the_environment_do_not_reach_the_server(
    engine: ServerEngine, cell: Cell, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "7")
    engine.run(Case(cell, PROMPT))
    environment = psutil.Process(pids(fake)[0]).environ()
    assert "LLAMA_ARG_CTX_SIZE" not in environment
    assert not Path(environment["XDG_CONFIG_HOME"], "llama.cpp").exists()


# flags


def test_every_axis_has_its_flag(fake: Path, cell: Cell) -> None:
    changed = replace(
        cell, n_batch=64, n_ubatch=32, n_ctx=512, n_parallel=2, kv_unified=True, flash_attn="off",
        type_k="q8_0", type_v="f32", swa_full=True, n_gpu_layers=0, split_mode="none", op_offload=False,
        use_extra_bufts=False, n_threads=3, n_threads_batch=5, seed=9,
    )  # fmt: skip
    line = " ".join(flags.command(changed, binary.find()))
    for expected in (
        "--batch-size 64", "--ubatch-size 32", "--ctx-size 512", "--parallel 2", "--kv-unified", "--flash-attn off",
        "--cache-type-k q8_0", "--cache-type-v f32", "--swa-full", "--n-gpu-layers 0", "--split-mode none",
        "--no-op-offload", "--no-repack", "--threads 3", "--threads-batch 5", "--seed 9", "--cache-ram 0", "--fit off",
    ):  # fmt: skip
        assert expected in line
    assert (
        "--ctx-checkpoints" not in line
    )  # this binary does not know it, so there is nothing to switch off


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (
            NgramSimple(4, 6, 2),
            "-size-n 4 --spec-ngram-simple-size-m 6 --spec-ngram-simple-min-hits 2 ",
        ),
        (NgramSimple(), "--spec-type ngram-simple"),
        (
            ServerSpec("ngram-mod", args=("--spec-ngram-mod-n-min", "1")),
            "--spec-ngram-mod-n-min 1 ",
        ),
        (ServerSpec("ngram-map-k,ngram-cache"), "--spec-type ngram-map-k,ngram-cache"),
    ],
)
def test_methods_without_a_draft_model(
    fake: Path, cell: Cell, drafter: Drafter, expected: str
) -> None:
    assert expected in " ".join(flags.command(replace(cell, drafter=drafter), binary.find()))


def test_a_draft_model_without_a_method_is_run_as_it_stands(
    engine: ServerEngine, cell: Cell, fake: Path
) -> None:
    speculative = engine.run(
        Case(replace(cell, drafter=ServerSpec("none", model=cell.target)), PROMPT)
    )
    assert "--spec-draft-model" in command_lines(fake)[0]
    assert "--spec-type" not in command_lines(fake)[0]
    verdict = compare(engine.run(Case(cell, PROMPT)), speculative)
    assert (verdict.outcome, verdict.reason) == ("unexercised", "nothing was drafted")


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (ServerSpec("draft-new"), "has no --spec-type draft-new; it has none, draft-simple"),
        (ServerSpec("draft-simple"), "draft-simple needs a draft model"),
        (ServerSpec("draft-mtp"), "draft-mtp needs layers that predict several tokens"),
        (ServerSpec("draft-eagle3"), "draft-eagle3 needs a draft model: an EAGLE-3 head"),
        (ServerSpec("ngram-mod", args=("--spec-brand-new", "1")), "does not know --spec-brand-new"),
        (PromptLookup(), "llama-server has no drafter prompt-lookup"),
    ],
)
def test_methods_that_cannot_run_are_refused(
    fake: Path, cell: Cell, drafter: Drafter, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        flags.command(replace(cell, drafter=drafter), binary.find())


@pytest.mark.parametrize("kind", ["draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"])
def test_an_ordinary_model_is_no_head_of_a_special_method(cell: Cell, kind: str) -> None:
    with pytest.raises(BadInput, match=f"{kind} needs"):
        flags.refuse_special(kind, cell.target, cell.target)


# binaries


@pytest.mark.parametrize(
    ("text", "executable", "says"),
    [
        (None, False, "is no file"),
        ("#!/bin/sh\n", False, "is not executable"),
        ("\x7fELF but not for this machine", True, "does not run on this machine"),
        ("#!/bin/sh\necho hello\n", True, "is no llama-server .*'hello'"),
        (
            "#!/bin/sh\necho missing libggml.so >&2\nexit 127\n",
            True,
            "exit code 127 .missing libggml.so",
        ),
    ],
)
def test_binaries_that_do_not_run_are_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, executable: bool, says: str
) -> None:
    path = tmp_path / "llama-server"
    if text is not None:
        path.write_text(text)
        path.chmod(0o755 if executable else 0o644)
    monkeypatch.setenv(binary.VARIABLE, str(path))
    with pytest.raises(BadInput, match=says) as caught:
        binary.find()
    assert "\n" not in str(caught.value)


def test_a_binary_that_hangs_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path / "llama-server", '#!/bin/sh\nsleep 100 &\necho $! > "$0.pid"\nwait\n')
    monkeypatch.setenv(binary.VARIABLE, str(path))
    monkeypatch.setattr(binary, "_TRY_S", 1.0)
    with pytest.raises(BadInput, match="--version did not end within 1 s"):
        binary.find()
    child = int((tmp_path / "llama-server.pid").read_text())
    deadline = time.monotonic() + PATIENCE_S
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(child)


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked for its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_without_any_binary_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(binary.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="scripts/build_llama_server"):
        binary.find()


# servers that misbehave


@pytest.mark.parametrize(
    ("mode", "stage", "says"),
    [
        (
            "html",
            "request",
            "HTTP 200 with text/html instead of JSON: <html> <body>502 Bad Gateway",
        ),
        ("error", "request", "HTTP 500: Compute error. second line"),
        ("abort", "request", "ended by signal 6; it last printed: ggml.c:123: GGML_ASSERT"),
        ("shape", "request", "answered without what is needed"),
        ("few", "request", "returned 6 tokens, 8 were asked for"),
        ("many", "request", "returned 9 tokens, 8 were asked for"),
        ("miscount", "request", "returned 8 tokens and says it made 9"),
        ("bos", "request", "evaluated 4 prompt tokens, 3 were sent"),
        ("word", "request", "stopped for the reason 'word'"),
        ("start", "load", "exited with code 1; it last printed: error: failed to load model"),
        ("page", "load", "text/html instead of JSON"),
    ],
)
def test_misbehaviour_is_a_fault_with_one_line(
    engine: ServerEngine,
    cell: Cell,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    stage: str,
    says: str,
) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    with pytest.raises(EngineFault, match=says) as caught:
        engine.run(Case(cell, PROMPT))
    assert caught.value.stage == stage
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize(
    ("mode", "limit", "says"),
    [("hang", "ANSWER_S", "did not answer within"), ("loading", "READY_S", "was not ready within")],
)
def test_a_server_that_hangs_is_given_up(
    engine: ServerEngine,
    cell: Cell,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    limit: str,
    says: str,
) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    monkeypatch.setattr(process, limit, 2.0)
    with pytest.raises(EngineFault, match=says) as caught:
        engine.run(Case(cell, PROMPT))
    assert "last printed: srv llama_server: listening on" in caught.value.reason


def test_a_request_that_is_refused_costs_no_server(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "refuse")
    for _ in range(2):
        with pytest.raises(EngineFault, match="HTTP 400: request exceeds the context size$"):
            engine.run(Case(cell, PROMPT))
    assert engine.starts == 1


@pytest.mark.parametrize(
    ("ids", "says"), [((), "has no tokens"), ((5, 999), "token id 999 is not in the")]
)
def test_prompts_that_cannot_be_sent(
    engine: ServerEngine, cell: Cell, ids: tuple[int, ...], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        engine.run(Case(cell, Prompt("p", ids=ids)))


def test_the_run_goes_on_after_a_server_died(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "abort")
    with pytest.raises(EngineFault):
        engine.run(Case(cell, PROMPT))
    monkeypatch.delenv("FAKE_SERVER")
    assert engine.run(Case(cell, PROMPT)).ids


def test_a_server_killed_between_cases_costs_one_case_at_most(
    engine: ServerEngine, cell: Cell, fake: Path
) -> None:
    engine.run(Case(cell, PROMPT))
    os.kill(pids(fake)[0], signal.SIGKILL)
    with contextlib.suppress(EngineFault):
        engine.run(Case(cell, PROMPT))
    assert engine.run(Case(cell, PROMPT)).ids
    assert engine.starts == 2


def test_bytes_that_are_no_text_in_the_log(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "bytes")
    assert len(engine.run(Case(drafting(cell), PROMPT)).cycles) == 3


def test_a_sampler_that_is_not_neutral_makes_the_case_invalid(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "warm")
    trace = engine.run(Case(cell, PROMPT))
    assert trace.unhonoured == ("temperature = 0.0 (got 0.8)",)
    assert compare(trace, trace).outcome == "invalid"


def test_a_drafter_that_does_not_start_is_not_honoured(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "undrafted")
    assert (
        "drafter draft-model (vocab mismatch)"
        in engine.run(Case(drafting(cell), PROMPT)).unhonoured
    )


@pytest.mark.parametrize(("mode", "finish"), [("eog", "eog"), ("context", "length")])
def test_why_it_ended(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch, mode: str, finish: str
) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    assert engine.run(Case(cell, PROMPT)).finish == finish


# what is left behind


def test_a_server_that_ignores_sigterm_is_killed(
    fake: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "stubborn")
    engine = ServerEngine()
    engine.run(Case(cell, PROMPT))
    engine.close()
    engine.close()
    assert_all_gone(fake)


PARENT = """
    import sys, time
    from specbisect.cell import Case, Cell, Model, Prompt
    from specbisect.engines.server import make
    cell = Cell(Model("tiny", "BF16", "sha256:0", sys.argv[1]), engine="server", n_predict=8)
    make().run(Case(cell, Prompt("p", ids=(1, 2))))
    print("ready", flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_server_survives_its_parent(fake: Path, cell: Cell, how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), cell.target.path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        assert any(psutil.pid_exists(p) for p in pids(fake))
        parent.send_signal(how)
        parent.wait()
    assert_all_gone(fake)


def test_a_worker_that_runs_out_of_time_takes_its_server_along(
    fake: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "hang")
    with Workers(1) as workers:
        failure = workers.submit(run_arm, Case(cell, PROMPT), timeout=8).result()
        assert isinstance(failure, Failure)
        assert failure.stage in ("load", "request")
        assert_all_gone(fake)
    assert len(pids(fake)) == 1


def test_a_reaper_that_is_killed_takes_its_server_along(
    engine: ServerEngine, cell: Cell, fake: Path
) -> None:
    engine.run(Case(cell, PROMPT))
    if sys.platform == "linux":
        psutil.Process(pids(fake)[0]).parent().kill()
        assert_all_gone(fake)


# scenarios


def test_companions_fill_the_other_slots(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "slots")
    case = Case(replace(cell, n_parallel=3), PROMPT)
    played = engine.play(case, scenario.Scenario.of(case.cell))
    assert played.trace.prompt_ids == PROMPT.ids
    assert [t.prompt_ids for t in played.companions] == [
        (1, *scenario.canary(i).text.encode()) for i in range(2)
    ]
    assert played.contamination == ()
    assert engine.run(case) == played.trace


def test_companions_that_started_before(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "slots")
    case = Case(replace(cell, n_parallel=2), PROMPT)
    played = engine.play(case, scenario.Scenario(companions=("same",), stagger=4))
    assert played.companions[0].ids == played.trace.ids


def test_more_companions_than_slots(engine: ServerEngine, cell: Cell) -> None:
    with pytest.raises(BadInput, match="n_parallel = 1 has no slot for 1 companions"):
        engine.play(Case(cell, PROMPT), scenario.Scenario(companions=("same",)))


@pytest.mark.parametrize("name", ["ALONE", "COLD", "REPEATED", "INTERLEAVED", "SHORTENED"])
def test_histories_end_with_the_case(engine: ServerEngine, cell: Cell, name: str) -> None:
    assert engine.play(Case(cell, PROMPT), getattr(scenario, name)).trace.prompt_ids == PROMPT.ids


def test_a_cold_server_is_a_new_one(engine: ServerEngine, cell: Cell) -> None:
    for _ in range(2):
        engine.play(Case(cell, PROMPT), scenario.COLD)
    assert engine.starts == 2


def test_canaries_are_seen_in_text() -> None:
    assert scenario.canaries_in(f"and then {scenario.CANARIES[2]}!") == (scenario.CANARIES[2],)


# servers that are there already


@pytest.fixture
def running(fake: Path, cell: Cell) -> Iterator[str]:
    """URL of a fake that was started by hand, with the key ``sesame``."""
    with subprocess.Popen(
        [fake, "--parallel", "4"],
        env=os.environ | {"LLAMA_API_KEY": "sesame"},
        stderr=subprocess.PIPE,
    ) as server:
        assert server.stderr is not None
        url = next(line.split()[-1].decode() for line in server.stderr if b"listening on" in line)
        yield url
        server.terminate()


def test_an_arm_can_use_a_server_by_url(
    engine: ServerEngine, cell: Cell, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in URLS.values():
        monkeypatch.setenv(variable, running)
    monkeypatch.setenv(KEY, "sesame")
    vanilla, speculative = engine.run(Case(cell, PROMPT)), engine.run(Case(drafting(cell), PROMPT))
    assert engine.starts == 0
    assert compare(vanilla, speculative).outcome == "unexercised"
    assert vanilla.provenance["target"] == {"name": "tiny.gguf"}
    assert vanilla.resolved["target"]["n_ctx_seq"] == 2048
    assert "sesame" not in repr(vanilla)
    engine.close()
    assert Client(running, "sesame", seconds=5, loopback=True).healthy()


@pytest.mark.parametrize("mode", ["page", "loading"])
def test_a_url_with_no_usable_server_is_bad_input(
    engine: ServerEngine,
    cell: Cell,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    monkeypatch.setenv(URLS["vanilla"], request.getfixturevalue("running"))
    with pytest.raises(
        BadInput, match=r"http://127\.0\.0\.1:\d+ is (no llama-server|still loading)|still loading"
    ):
        engine.run(Case(cell, PROMPT))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no-url", "http://"])
def test_a_url_where_nothing_answers_is_bad_input(
    engine: ServerEngine, cell: Cell, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv(URLS["vanilla"], url)
    with pytest.raises(BadInput, match="is no llama-server that can be used"):
        engine.run(Case(cell, PROMPT))


# reading logs

LOOKUP = """\
D common_ngram_simple_draft: #tokens = 6: found matching pattern at pos 1, length 2, draft length 3
D slot  handle_last_: id  0 | task 7 | generate_draft: id=9, #tokens=6, #draft=2, pos_next=6
D slot  post_decode: id  0 | task 7 | add accepted tokens: sampled=12, ids.size=2, n_draft=2
"""


def test_ngram_drafts_are_found_where_the_log_says_they_were() -> None:
    prompt, ids = (1, 2, 3, 8, 2, 4), (9, 8, 12)
    found = reading.cycles(LOOKUP.replace("\nD", "\n"), 0, prompt, ids)
    assert [(c.base, c.batch, c.accepted) for c in found] == [(6, (9, 8, 2), 1)]


def test_a_log_that_does_not_explain_the_answer_tells_nothing() -> None:
    assert reading.cycles(LOOKUP, 0, (1, 2, 3, 8, 2, 4), (9, 7, 12)) == ()
    assert reading.cycles(LOOKUP, 1, (1, 2, 3, 8, 2, 4), (9, 8, 12)) == ()


def test_a_memory_that_replays_drafts_tells_nothing() -> None:
    line = "D slot post_decode: id  0 | task 7 | restoring speculative checkpoint (pos_min = 0)\n"
    assert reading.cycles(LOOKUP + line, 0, (1, 2, 3, 8, 2, 4), (9, 8, 12)) == ()
