"""What a cluster adds, without one: which worker takes a call, hosts that compute different bits, files by content."""

import hashlib
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fakes
from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.cli import hosts
from specbisect.cluster import client, files, placing
from specbisect.cluster.placing import Job, Worker
from specbisect.compare import compare
from specbisect.diagnose.conclusion import Options
from specbisect.errors import BadInput
from specbisect.runner import MAX_MOVES, run
from specbisect.store import Store
from specbisect.trace import Failure, Trace, host_kind


class Inline:
    """Calls run in this process, at once."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def submit(self, call, *args, timeout=None):
        future = Future()
        future.set_result(call(*args))
        return future


def on(host: str, case: Case) -> Trace:
    """The arm of a case on a host whose library build has that name, which takes part in its tokens."""
    trace = fakes.arm(case)
    ids = tuple(i + len(host) for i in trace.ids)
    return replace(trace, ids=ids, provenance=dict(trace.provenance) | {"host": {"library": host}})


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "run", "plan", {}) as made:
        yield made


def arms(store: Store) -> list[tuple[str, Trace, Trace]]:
    return [
        (row.outcome, store.arm(store.case(row.id).vanilla.key), store.arm(row.id))
        for row in store.rows()
    ]


def test_cases_start_over_when_their_kind_of_host_is_gone(tmp_path, store):
    calls = []

    def first_one_then_the_other(case: Case) -> Trace:
        calls.append(case)
        return on("old" if len(calls) <= 9 else "newer", case)

    summary = run(fakes.plan(), store, Inline(3), call=first_one_then_the_other)
    assert summary.done == len(list(store.rows())) == 24
    assert sum(summary.outcomes.values()) == sum(1 for _ in store.rows())
    used = {(v.host_kind, s.host_kind) for _, v, s in arms(store)}
    assert all(vanilla == speculative for vanilla, speculative in used)
    with Store.create(tmp_path / "quiet", "plan", {}) as quiet:
        run(fakes.plan(), quiet, Inline(3), call=fakes.arm)
        assert [row.outcome for row in store.rows()] == [row.outcome for row in quiet.rows()]


def test_a_resumed_run_on_another_kind_of_host_starts_its_open_groups_over(store):
    run(fakes.plan(1, 2), store, Inline(2), call=lambda case: on("old", case))
    run(fakes.plan(1, 4), store, Inline(2), call=lambda case: on("newer", case))
    assert [row.outcome for row in store.rows()].count("invalid") == 0
    newer = host_kind({"library": "newer"})
    assert {arm.host_kind for _, *both in arms(store) for arm in both} == {newer}
    assert len(arms(store)) == 16


def test_arms_that_never_meet_on_one_kind_of_host_are_invalid_in_the_end(store):
    calls = []

    def apart(case: Case) -> Trace:
        calls.append(case)
        return on("one" if case.cell.drafter is None else "another", case)

    run(fakes.plan(1, 1, ("",)), store, Inline(1), call=apart)
    assert len(calls) == 2 + 2 * MAX_MOVES
    ((outcome, vanilla, speculative),) = arms(store)
    assert outcome == "invalid"
    assert "different bits" in compare(vanilla, speculative).reason


def members(*workers: Worker) -> placing.Members:
    return placing.Members(known={worker.address: worker for worker in workers})


def job(model: str = "m", group: str = "g", kind: str = "", host_class: str = "") -> Job:
    return Job(fakes.arm, (), None, (), kind, host_class, group, model)


def test_calls_go_where_their_model_is_loaded_then_where_none_is():
    found = members(Worker("a", 1, "x"), Worker("b", 1, "x"))
    first = found.take(job("m1"))
    found.give_back(first)
    other = found.take(job("m2"))
    found.give_back(other)
    assert first is not other
    for model, worker in [("m2", other), ("m1", first), ("m1", first), ("m2", other)]:
        taken = found.take(job(model))
        assert taken is worker
        found.give_back(taken)


def test_a_busy_worker_is_not_waited_for_when_another_one_is_free():
    found = members(Worker("a", 1, "x"), Worker("b", 1, "x"))
    assert found.take(job()) is not found.take(job())


def test_a_group_stays_on_hosts_of_one_class_while_there_are_any(monkeypatch):
    monkeypatch.setattr(placing, "GRACE_S", 0.0)
    monkeypatch.setattr(placing, "POLL_S", 0.01)
    found = members(Worker("a", 1, "x"), Worker("b", 1, "y"))
    first = found.take(job(group="g"))
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(found.take, job(group="g"))
        assert found.take(job(group="h")) is not first  # though that one was asked for later
        assert not second.done()
        found.give_back(first)
        assert second.result(5) is first
    found.give_back(first)
    del found.known[first.address]
    found.give_back(next(iter(found.known.values())))
    assert found.take(job(group="g")).address in found.known


def test_what_was_seen_on_one_kind_of_host_is_not_examined_on_another(monkeypatch):
    monkeypatch.setattr(placing, "GRACE_S", 0.0)
    monkeypatch.setattr(placing, "POLL_S", 0.01)
    refused = members(Worker("a", 1, "x")).take(job(kind="z"))
    assert isinstance(refused, Failure)
    assert refused.stage == "host"


def test_a_class_of_hosts_is_kept_to():
    found = members(Worker("a", 2, "x", "old"), Worker("b", 2, "y", "new"))
    for group in "ghi":
        taken = [
            found.take(job(group=f"{group}{name}", host_class=name)) for name in ("new", "old")
        ]
        assert [worker.address for worker in taken] == ["b", "a"]
        for worker in taken:
            found.give_back(worker)
    assert {found.take(job(group=group)).address for group in "ab"} == {"a", "b"}


def test_a_call_that_waits_for_its_class_keeps_no_other_from_a_free_host(monkeypatch):
    monkeypatch.setattr(placing, "POLL_S", 0.01)
    found = members(Worker("a", 1, "x", "old"), Worker("b", 1, "y", "new"))
    first = found.take(job(host_class="old"))
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(found.take, job(host_class="old"))
        while not found.waiting:
            time.sleep(0.01)
        assert found.take(job(group="h", host_class="new")).address == "b"
        found.give_back(first)
        assert second.result(5) is first
    assert found.waiting == 0


def test_a_class_that_is_nowhere_is_one_line(monkeypatch):
    monkeypatch.setattr(placing, "GRACE_S", 0.0)
    monkeypatch.setattr(placing, "POLL_S", 0.01)
    found = members(Worker("a", 1, "x", "old"), Worker("b", 1, "y", "new"))
    with pytest.raises(BadInput, match="no worker is of host_class 'newest', only of new, old; "):
        found.take(job(host_class="newest"))


def test_a_class_that_was_there_is_waited_for(monkeypatch):
    monkeypatch.setattr(placing, "GRACE_S", 0.0)
    monkeypatch.setattr(placing, "POLL_S", 0.01)
    gone = Worker("b", 1, "y", "new")
    found = members(Worker("a", 1, "x", "old"), gone)
    found.greet(time.monotonic())
    del found.known["b"]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(found.take, job(host_class="new"))
        while not found.waiting:
            time.sleep(0.01)
        time.sleep(0.1)
        with found.changed:
            found.known["b"] = gone
        assert waiting.result(5) is gone
    monkeypatch.setattr(placing, "PATIENCE_S", 0.0)
    del found.known["b"]
    with pytest.raises(BadInput, match="no worker is of host_class 'new'"):
        found.take(job(host_class="new"))


def test_a_job_asks_for_the_class_of_its_cell():
    case = Case(Cell(Model("m", "Q8_0", "sha256:1"), host_class="avx2"), Prompt("p", "x"))
    found = Job.of(fakes.arm, (case,), None)
    assert (found.host_class, found.group) == ("avx2", case.vanilla.key)
    assert Job.of(fakes.arm, (case.prompt,), None).host_class == ""


def of_classes(*names: str) -> list[Case]:
    return [
        replace(case, cell=replace(case.cell, host_class=name))
        for name in names
        for case in fakes.plan(1, 2)
    ]


def on_its_class(case: Case) -> Trace:
    """Tokens of the second prompt depend on the host from the third one on, and the bits of every row."""
    plain = fakes.arm(replace(case, cell=replace(case.cell, host_class="")))
    ids = list(plain.ids)
    if case.prompt.id == "1" and case.cell.host_class == "avx512":
        ids[2] += 5000
    digests = tuple(f"{case.cell.host_class}{i}" for i in ids)
    return replace(plain, ids=tuple(ids), digests=digests)


def test_the_difference_between_classes_of_hosts_is_shown(store):
    run(enumerated := of_classes("avx2", "avx512", "amx"), store, Inline(1), call=on_its_class)
    rows = list(store.rows())
    assert len(rows) == len(enumerated)
    first, second = hosts.pairs(store, rows)
    assert (first.classes, second.classes) == (("avx2", "avx512"), ("avx2", "amx"))
    assert (first.tokens, second.tokens) == ((None, 2, None, None), (None,) * 4)
    assert first.rows == second.rows == (0, 0, 0, 0)
    assert [re.split(r"\s{2,}", line) for line in hosts.table([first, second]).splitlines()] == [
        ["quant", "hosts", "vanilla arms that differ", "rows with other bits"],
        ["-" * 5, "-" * 13, "-" * 24, "-" * 20],
        ["Q0", "avx2 : avx512", "1/4, first at 2", "4/4, first at 0"],
        ["Q0", "avx2 : amx", "0/4 in 32 tokens", "4/4, first at 0"],
    ]
    document = first.document()
    assert document["tokens"] == {"prompts": 4, "different": 1, "first": 2}
    assert document["cell"]["host_class"] == ""


def test_nothing_is_said_of_hosts_where_there_is_one_class(store):
    run(of_classes("avx2"), store, Inline(1), call=on_its_class)
    assert list(hosts.pairs(store, list(store.rows()))) == []


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "here" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(bytes(range(256)) * 100)
    return path


def send(path: Path, wanted: files.Wanted, piece: int) -> None:
    data = path.read_bytes()
    for offset in range(0, len(data), piece):
        files.receive(wanted, "me", path.name, offset, data[offset : offset + piece])


def test_a_model_is_found_at_its_path_by_a_map_or_after_it_was_sent(model, tmp_path):
    wanted = files.wanted(str(model))
    assert wanted.sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    assert files.find(wanted, ()) == str(model)
    there = tmp_path / "there"
    there.mkdir()
    (there / "model.gguf").write_bytes(model.read_bytes())
    maps = ((str(model.parent), str(there)),)
    assert files.find(wanted, maps) == str(there / "model.gguf")

    elsewhere = replace(wanted, path="/nowhere/model.gguf")
    assert files.find(elsewhere, ()) is None
    send(model, elsewhere, 1000)
    assert files.find(elsewhere, ()) is None
    files.accept(elsewhere, "me")
    assert Path(files.find(elsewhere, ())).read_bytes() == model.read_bytes()


def test_another_file_at_the_same_path_is_not_taken(model):
    wanted = files.wanted(str(model))
    model.write_bytes(b"something else")
    assert files.find(wanted, ()) is None


def test_a_map_to_no_file_or_to_another_one_is_bad_input(model, tmp_path):
    wanted = files.wanted(str(model))
    maps = ((str(model.parent), str(tmp_path / "there")),)
    with pytest.raises(BadInput, match="does not exist"):
        files.find(wanted, maps)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "model.gguf").write_bytes(b"another")
    with pytest.raises(BadInput, match="another file than"):
        files.find(wanted, maps)


def test_what_did_not_arrive_whole_is_not_kept(model):
    wanted = files.wanted(str(model))
    model_there = replace(wanted, path="/nowhere/model.gguf")
    files.receive(model_there, "me", "model.gguf", 0, b"only the beginning")
    with pytest.raises(BadInput, match="did not arrive whole"):
        files.accept(model_there, "me")
    assert files.find(model_there, ()) is None


def test_arguments_are_told_where_their_models_lie(model, tmp_path):
    other = tmp_path / "draft"  # no suffix: files of other stores have none
    other.write_bytes(b"draft")
    target = Model("m", "Q8_0", "sha256:1", str(model))
    cell = Cell(target, DraftModel(Model("d", "Q2_K", "sha256:2", str(other))))
    case = Case(cell, Prompt("p", str(model)))
    options = Options(reference=str(model))
    trace = fakes.arm(case)
    assert {*files.named(case)} == {str(model), str(other)}
    places = {str(model): "/a", str(other): "/b"}
    moved = files.replaced(case, places)
    assert (moved.cell.target.path, moved.cell.drafter.model.path) == ("/a", "/b")
    assert moved == case
    assert moved.prompt.text == str(model)
    assert files.replaced(options, places).reference == "/a"
    assert files.replaced(str(model), places) == "/a"
    assert files.replaced(trace, places) is trace
    assert Job.of(fakes.arm, (case, trace), None).model == "sha256:1"


def test_an_address_where_nobody_listens_is_one_line():
    with pytest.raises(BadInput, match="no Dask scheduler answers at tcp://127.0.0.1:9 "):
        client.Cluster("tcp://127.0.0.1:9")
    with pytest.raises(BadInput, match="no Dask scheduler answers at nonsense://x"):
        client.Cluster("nonsense://x")
