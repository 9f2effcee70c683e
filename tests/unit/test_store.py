import math
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbisect.cell import Case, Cell, DraftModel, Model, NgramSimple, Prompt, Scripted
from specbisect.compare import Verdict, compare
from specbisect.errors import BadInput
from specbisect.store import Store, TrialRecord
from specbisect.trace import Counters, Cycle, Failure, Trace

TARGET = Model("smol", "Q4_K_M", "sha256:aa", "/models/smol-Q4_K_M.gguf")
DRAFT = Model("smol", "Q2_K", "sha256:bb", "/models/smol-Q2_K.gguf")
CELL = Cell(TARGET, DraftModel(DRAFT, n_max=7), n_batch=512, n_ubatch=8)
CASE = Case(CELL, Prompt("code/1", "def f(x):\n", "code"))
VANILLA = Trace(
    "vanilla",
    (1, 2, 3),
    (5, 6, 7),
    "length",
    pieces=("a", "\xc3", "\xa9"),
    digests=("00ff", "0a", "0b"),
    runners_up=(6, 7, 8),
    margins=(0.5, 1e-9, 1 / 3),
    resolved={"flash_attn": "on", "n_ctx": 2048},
    provenance={"library": "0.3.36", "models": ["sha256:aa"]},
    counters=Counters(1, 4, 6, 0.5, 0.75),
)
SPECULATIVE = replace(
    VANILLA,
    arm="speculative",
    ids=(5, 6, 9),
    cycles=(Cycle(2, (3, 5, 6, 8), 2), Cycle(5, (6, 9), 1)),
    drafted=4,
    accepted=3,
    counters=Counters(2, 2, 6, 0.25, 0.5),
)
MATRIX = {"n_predict": 96, "target": {"quants": ["BF16", "Q8_0"]}}


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "run", "plan-1", MATRIX) as made:
        yield made


def save(store, ordinal, case=CASE, speculative=SPECULATIVE):
    with store.transaction():
        store.save_arm(case.vanilla.key, VANILLA)
        store.save_arm(case.key, speculative)
        store.save_case(ordinal, case, compare(VANILLA, speculative), speculative)


def test_arms_come_back_as_they_were(store):
    save(store, 0)
    assert store.arm(CASE.vanilla.key) == VANILLA
    assert store.arm(CASE.key) == SPECULATIVE
    assert store.arm(CASE.key).counters == SPECULATIVE.counters
    assert store.arm("0" * 16) is None


def test_a_failure_comes_back_with_its_log_and_gives_way_to_a_trace(store):
    failure = Failure("verify 3", "aborted (SIGABRT)", ("GGML_ASSERT failed",))
    store.save_arm("k", failure)
    assert store.arm("k") == failure
    assert store.arm("k").log == failure.log
    store.save_arm("k", VANILLA)
    assert store.arm("k") == VANILLA


def test_numbers_that_json_does_not_know_come_back(store):
    store.save_arm("k", replace(VANILLA, margins=(math.inf, -math.inf, math.nan)))
    margins = store.arm("k").margins
    assert margins[:2] == (math.inf, -math.inf)
    assert math.isnan(margins[2])


numbers = st.integers(-(2**31), 2**31 - 1)


@given(
    st.builds(
        Trace,
        st.sampled_from(["vanilla", "speculative"]),
        st.lists(numbers).map(tuple),
        st.lists(numbers).map(tuple),
        st.sampled_from(["length", "eog", "context"]),
        pieces=st.lists(st.binary().map(lambda b: b.decode("latin-1"))).map(tuple),
        margins=st.lists(st.floats(allow_nan=False)).map(tuple),
        cycles=st.lists(
            st.builds(Cycle, numbers, st.lists(numbers, min_size=1).map(tuple), numbers)
        ).map(tuple),
        resolved=st.dictionaries(st.text(), st.none() | st.booleans() | numbers | st.text()),
        provenance=st.dictionaries(st.text(), st.lists(st.text())),
    )
)
def test_any_trace_comes_back_as_it_was(any_store, trace):
    any_store.save_arm("k", trace)
    assert any_store.arm("k") == trace


@pytest.fixture(scope="module")
def any_store(tmp_path_factory):
    with Store.create(tmp_path_factory.mktemp("any") / "run", "plan", {}) as made:
        yield made


def test_a_row_shows_the_case_its_verdict_and_its_drafts(store):
    save(store, 4)
    (row,) = store.rows()
    assert (row.id, row.ordinal) == (CASE.key, 4)
    assert (row.engine, row.target, row.quant, row.drafter) == (
        "libllama",
        "smol",
        "Q4_K_M",
        "draft-model",
    )
    assert (row.n_max, row.n_batch, row.n_ubatch) == (7, 512, 8)
    assert (row.prompt_id, row.prompt_group) == ("code/1", "code")
    assert (row.outcome, row.fork, row.reference_token, row.speculative_token) == ("fork", 2, 7, 9)
    assert (row.compared, row.margin, row.reason) == (2, 1 / 3, "")
    assert (row.drafted, row.accepted, row.rejected, row.cycles) == (4, 3, 1, 2)
    assert row.resolved == {"flash_attn": "on", "n_ctx": 2048}
    assert row.cell == CELL


def test_a_case_whose_vanilla_arm_failed_has_a_row_without_its_speculative_arm(store):
    failure = Failure("load", "killed by SIGSEGV")
    store.save_arm(CASE.vanilla.key, failure)
    store.save_case(0, CASE, compare(failure, failure), None)
    (row,) = store.rows()
    assert (row.outcome, row.reason) == ("failed", "vanilla arm, load: killed by SIGSEGV")
    assert (row.drafted, row.cycles, row.resolved) == (0, 0, {})


def test_rows_come_in_the_order_of_the_plan_and_can_be_filtered(store):
    quants = ["Q8_0", "BF16", "Q6_K", "Q5_0"]
    for ordinal in (2, 0, 3, 1):
        target = Model("smol", quants[ordinal], f"sha256:{ordinal}")
        save(store, ordinal, replace(CASE, cell=replace(CELL, target=target)))
    assert [row.quant for row in store.rows()] == quants
    assert [row.quant for row in store.rows(quant=("BF16", "Q5_0"), outcome="fork")] == [
        "BF16",
        "Q5_0",
    ]
    assert list(store.rows(quant="BF16", outcome=("agree", "length"))) == []
    assert list(store.rows(quant=())) == []


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, cell=replace(CELL, drafter=NgramSimple(3, 8))),
        replace(CASE, cell=replace(CELL, drafter=Scripted(((0, (1, 2)), (5, ()))))),
        replace(CASE, prompt=Prompt("ids", ids=(1, 2, 3))),
    ],
)
def test_a_case_comes_back_whole_by_the_beginning_of_its_key(store, case):
    save(store, 0, case)
    for key in (case.key, case.key[:6]):
        assert store.case(key) == case
        assert store.case(key).cell.target.path == TARGET.path
    with pytest.raises(BadInput, match=r"no finished case is called 'zz' in .*specbisect show"):
        store.case("zz")


def test_an_ambiguous_beginning_of_a_key_is_refused(store):
    for n in range(17):
        save(store, n, replace(CASE, prompt=Prompt(str(n))))
    with pytest.raises(BadInput, match="more than one case begins with ''"):
        store.case("")


def test_a_model_that_was_moved_is_found_where_it_is_now(store):
    save(store, 0)
    moved = replace(CASE, cell=replace(CELL, target=replace(TARGET, path="/elsewhere.gguf")))
    assert moved.key == CASE.key
    save(store, 0, moved)
    assert store.case(CASE.key).cell.target.path == "/elsewhere.gguf"


def test_the_outcome_of_a_case_is_known_once_it_is_saved(store):
    assert store.outcome(CASE.key) is None
    save(store, 0)
    assert store.outcome(CASE.key) == "fork"


def test_totals_add_up_and_count_shared_vanilla_arms_once(store):
    assert store.totals().counters == Counters()
    for n_max in (3, 7):
        save(store, n_max, replace(CASE, cell=replace(CELL, drafter=DraftModel(DRAFT, n_max))))
    assert store.totals().vanilla_runs == 1
    assert store.totals().counters == Counters(5, 8, 18, 1.0, 1.75)


def test_provenance_is_kept_once(store):
    for n in range(5):
        save(store, n, replace(CASE, prompt=Prompt(str(n))))
    assert store.provenances() == (VANILLA.provenance,)


def test_findings_of_a_case_are_kept_in_order(store):
    save(store, 0)
    store.save_finding(CASE.key, '{"label": "unexplained"}')
    store.save_finding(CASE.key, '{"label": "state"}')
    assert store.findings(CASE.key) == ('{"label": "unexplained"}', '{"label": "state"}')
    assert store.findings("other") == ()


def test_the_journal_shows_which_trial_did_not_end(store):
    for candidate in ("a", "b", "c"):
        store.begin_trial("search", candidate)
        if candidate != "b":
            store.end_trial("search", candidate, '"still"')
    store.begin_trial("another search", "a")
    assert store.trials("search") == (
        TrialRecord("a", '"still"'),
        TrialRecord("b", None),
        TrialRecord("c", '"still"'),
    )
    store.begin_trial("search", "b")
    store.end_trial("search", "b", '"different"')
    assert store.trials("search")[1] == TrialRecord("b", '"different"')


def test_a_transaction_is_saved_whole_or_not_at_all(store):
    def half_a_case():
        with store.transaction():
            store.save_arm(CASE.vanilla.key, VANILLA)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half_a_case()
    assert store.arm(CASE.vanilla.key) is None
    save(store, 0)
    assert store.outcome(CASE.key) == "fork"


# The directory


def test_the_matrix_comes_back_as_it_was_resolved(store):
    assert store.matrix() == MATRIX


def test_the_same_plan_goes_on_where_it_was(tmp_path):
    with Store.create(tmp_path / "run", "plan-1", MATRIX) as store:
        save(store, 0)
    with Store.create(tmp_path / "run", "plan-1", MATRIX) as store:
        assert store.outcome(CASE.key) == "fork"


def test_another_plan_is_refused_with_what_differs_unless_fresh(tmp_path):
    with Store.create(tmp_path, "plan-1", MATRIX) as store:
        save(store, 0)
    changed = {"n_predict": 64, "target": {"quants": ["BF16"]}}
    with pytest.raises(BadInput) as refused:
        Store.create(tmp_path, "plan-2", changed)
    assert str(refused.value) == (
        f"{tmp_path} holds 1 case of another matrix (n_predict: 96 → 64; target.quants:"
        ' ["BF16", "Q8_0"] → ["BF16"]); choose another directory, or --fresh to discard them'
    )
    with Store.create(tmp_path, "plan-1", MATRIX) as store:
        assert store.outcome(CASE.key) == "fork"
    with Store.create(tmp_path, "plan-2", changed, fresh=True) as store:
        assert store.outcome(CASE.key) is None
        assert '"n_predict": 64' in (tmp_path / "matrix.json").read_text()


def test_a_second_writer_is_refused_and_readers_are_not(store):
    path = store.path
    message = f"is being written by process {os.getpid()}; wait for its end"
    with pytest.raises(BadInput, match=message):
        Store.open(path)
    with pytest.raises(BadInput, match=message):
        Store.create(path, "plan-2", MATRIX, fresh=True)
    with Store.open(path, readonly=True) as reader, store.transaction():
        store.save_arm("k", VANILLA)
        assert reader.arm("k") is None
    with Store.open(path, readonly=True) as reader:
        assert reader.arm("k") == VANILLA
        save(store, 0)
        assert reader.outcome(CASE.key) == "fork"


def test_a_reader_cannot_write(store):
    with (
        Store.open(store.path, readonly=True) as reader,
        pytest.raises(BadInput, match="cannot use .*readonly"),
    ):
        reader.save_arm("k", VANILLA)


def test_a_killed_writer_leaves_all_it_had_saved_and_no_lock(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from specbisect.store import Store\n"
        "from specbisect.trace import Failure\n"
        "store = Store.create(Path(sys.argv[1]), 'plan', {})\n"
        "store.save_arm('k', Failure('load', 'no'))\n"
        "with store.transaction():\n"
        "    store.save_arm('half', Failure('load', 'no'))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writer.stdout.readline() == b"ready\n"
    writer.kill()
    writer.communicate()
    with Store.create(tmp_path, "plan", {}) as store:
        assert store.arm("k") == Failure("load", "no")
        assert store.arm("half") is None


def test_a_directory_that_may_not_be_written_can_be_read(tmp_path, monkeypatch):
    with Store.create(tmp_path, "plan", {}) as store:
        save(store, 0)
    tmp_path.chmod(0o555)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anyway
    with Store.open(tmp_path, readonly=True) as store:
        assert store.outcome(CASE.key) == "fork"
    assert {path.name for path in tmp_path.iterdir()} == {"matrix.json", "run.lock", "run.sqlite"}
    tmp_path.chmod(0o755)


def nothing(path):
    return path / "missing"


def empty(path):
    return path


def a_file(path):
    (path / "file").write_text("")
    return path / "file"


def full_of_other_things(path):
    (path / "thesis.tex").write_text("")
    return path


def half_begun(path):
    sqlite3.connect(path / "run.sqlite").execute("PRAGMA journal_mode = WAL").connection.close()
    return path


def not_a_database(path):
    (path / "run.sqlite").write_text("No database. " * 100)
    return path


def truncated(path):
    Store.create(path, "plan", MATRIX).close()
    database = path / "run.sqlite"
    database.write_bytes(database.read_bytes()[:8192])
    return path


def of_another_program(path):
    sqlite3.connect(path / "run.sqlite").execute("CREATE TABLE t (x)").connection.close()
    return path


def of_another_version(path):
    Store.create(path, "plan", MATRIX).close()
    database = sqlite3.connect(path / "run.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    return path


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nothing, r"is not a run directory \(it has no run.sqlite\); `specbisect run` makes one"),
        (empty, "is not a run directory"),
        (a_file, "is not a run directory"),
        (full_of_other_things, "is not a run directory"),
        (half_begun, "was never begun; start it with"),
        (not_a_database, r"is damaged \(file is not a database\); restore it"),
        (truncated, r"is damaged \(database disk image is malformed\)"),
        (of_another_program, "is another program's database; choose another directory"),
        (of_another_version, "with schema 99, this one has 1; use that version"),
    ],
)
@pytest.mark.parametrize("readonly", [True, False])
def test_what_is_no_run_is_not_opened(tmp_path, spoil, message, readonly):
    path = spoil(tmp_path)
    with pytest.raises(BadInput, match=message) as refused:
        list(Store.open(path, readonly=readonly).rows())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (a_file, "is a file; choose a directory"),
        (full_of_other_things, r"is not a run directory \(it holds thesis.tex\); choose an empty"),
        (not_a_database, "is damaged"),
        (of_another_program, "is another program's database"),
        (of_another_version, "with schema 99"),
    ],
)
def test_what_is_something_else_is_not_overwritten(tmp_path, spoil, message):
    path = spoil(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.name in ("file", "run.sqlite")}
    with pytest.raises(BadInput, match=message):
        Store.create(path, "plan", MATRIX)
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("spoil", [nothing, empty, half_begun])
def test_a_run_begins_where_nothing_is_yet(tmp_path, spoil):
    with Store.create(spoil(tmp_path), "plan", MATRIX) as store:
        save(store, 0)


@pytest.mark.parametrize("spoil", [not_a_database, truncated, of_another_version])
def test_fresh_mends_what_is_damaged(tmp_path, spoil):
    with Store.create(spoil(tmp_path), "plan", MATRIX, fresh=True) as store:
        save(store, 0)


def test_a_damaged_trace_is_damage_not_a_traceback(store):
    save(store, 0)
    with sqlite3.connect(store.path / "run.sqlite") as database:
        database.execute("UPDATE results SET json = x'00'")
    with pytest.raises(BadInput, match="is damaged"):
        store.arm(CASE.key)


@pytest.mark.parametrize(
    ("text", "says"), [("{", r"is damaged \(Expecting"), ("[]", "is damaged"), (None, "is missing")]
)
def test_a_damaged_matrix_is_named_and_written_anew_by_the_same_plan(tmp_path, text, says):
    with Store.create(tmp_path, "plan", MATRIX) as store:
        save(store, 0)
    file = tmp_path / "matrix.json"
    file.write_text(text) if text else file.unlink()
    for attempt in (
        lambda: Store.open(tmp_path, readonly=True),
        lambda: Store.create(tmp_path, "other plan", MATRIX),
    ):
        with pytest.raises(BadInput, match=f"matrix.json {says}.*writes it anew, without --fresh"):
            attempt()
    with Store.create(tmp_path, "plan", MATRIX) as store:
        assert store.outcome(CASE.key) == "fork"
    with Store.open(tmp_path) as store:
        assert store.matrix() == MATRIX


def fill(store, cases=10_000):
    for n in range(cases):
        save(store, n, replace(CASE, prompt=Prompt(str(n), "x" * 500)))


def test_a_full_disk_is_said_in_one_line_and_loses_nothing(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def on_a_small_disk(*args, **kwargs):
        database = connect(*args, **kwargs)
        database.execute("PRAGMA max_page_count = 60")
        return database

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", on_a_small_disk)
        with Store.create(tmp_path, "plan", MATRIX) as store:
            with pytest.raises(BadInput) as full:
                fill(store)
            saved = len(list(store.rows()))
    assert saved > 0
    assert str(full.value) == (
        f"no disk space at {tmp_path}; free some and run the same command again"
    )
    with Store.create(tmp_path, "plan", MATRIX) as store:
        assert [row.ordinal for row in store.rows()] == list(range(saved))
        fill(store, 50)


def test_a_verdict_of_every_outcome_is_kept(store):
    for ordinal, outcome in enumerate(("agree", "unexercised", "length", "degenerate", "invalid")):
        case = replace(CASE, prompt=Prompt(outcome))
        store.save_arm(case.vanilla.key, VANILLA)
        store.save_case(ordinal, case, Verdict(outcome, 3, reason="so"), SPECULATIVE)
        assert store.outcome(case.key) == outcome
