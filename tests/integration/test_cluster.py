"""A run on a cluster of two worker processes finds what a run in child processes finds, whatever becomes of workers."""

import json
import os
import random
import shlex
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from distributed import LocalCluster

import fakes
from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.cluster import client, files, node
from specbisect.cluster.client import Cluster
from specbisect.diagnose.finding import Finding
from specbisect.errors import BadInput
from specbisect.narrow.running import Trials
from specbisect.narrow.trial import Look
from specbisect.runner import run
from specbisect.store import Store
from specbisect.trace import Failure
from specbisect.workers import Workers

MATRIX = """
schema = "specbisect.matrix/1"
n_predict = 12
prompts = "prompts.jsonl"
[target]
files = ["target.gguf", "other.gguf"]
[[drafter]]
method = "draft-model"
model = "draft.gguf"
n_max = [1, 7]
[axes]
n_threads = [1]
n_ubatch = [8, 512]
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two worker processes of one thread each, under nannies that replace them when they die."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with LocalCluster(
        env={"SPECBISECT_CACHE": cache},
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=":0",
        resources={"GPU": 1},
        silence_logs=50,
    ) as cluster:
        yield cluster


@pytest.fixture
def workspace(tmp_path, tiny_models) -> Path:
    models = {
        "target": tiny_models("llama", "Q4_K_M"),
        "other": tiny_models("llama", "Q6_K"),
        "draft": tiny_models("llama", "Q4_K_M", noise=0.1),
    }
    for name, path in models.items():
        (tmp_path / f"{name}.gguf").symlink_to(path)
    (tmp_path / "matrix.toml").write_text(MATRIX)
    texts = ["one two three one two", "def f(x):", "4 + 4 = 8, 8 + 8 ="]
    lines = [json.dumps({"id": f"p{i}", "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def command(
    workspace: Path, *words: str, within: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*within, sys.executable, "-m", "specbisect", *words],
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=500,
        env=ENVIRONMENT,
        check=False,
    )


def found(directory: Path):
    """Every verdict and both traces of every case, which compare equal when only times differ."""
    with Store.open(directory, readonly=True) as store:
        return [
            (row, store.arm(row.id), store.arm(store.case(row.id).vanilla.key))
            for row in store.rows()
        ]


def labels(directory: Path):
    with Store.open(directory, readonly=True) as store:
        texts = [store.findings(row.id) for row in store.rows()]
    every = [Finding.model_validate_json(text[-1]) for text in texts if text]
    return [(f.case.key, f.label, f.kind) for f in every]


@contextmanager
def killing(cluster: LocalCluster, seconds: float):
    """Kill one worker process, then another, every so many seconds while the block runs; the pids killed."""
    killed, done = [], threading.Event()
    dice = random.Random(1)

    def kill() -> None:
        while not done.wait(seconds):
            known = cluster.scheduler.workers
            up = [
                n
                for n in cluster.workers.values()
                if n.status.name == "running" and n.worker_address in known
            ]
            if len(up) == 2:  # a nanny whose worker dies while it starts gives up
                killed.append(dice.choice(up).process.pid)
                psutil.Process(killed[-1]).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def test_commands_find_the_same_on_a_cluster_as_here(workspace, workers):
    scheduler = "--scheduler", workers.scheduler_address
    here = command(workspace, "run", "matrix.toml", "-o", "here", "--jobs", "2", "--diagnose")
    there = command(
        workspace, "run", "matrix.toml", "-o", "there", *scheduler, "--resource", "GPU=1"
    )
    assert here.returncode in (0, 1), here.stderr
    assert there.returncode == here.returncode, there.stderr
    assert len(found(workspace / "here")) == 24
    bare = [(row.id, row.outcome, row.fork, a, b) for row, a, b in found(workspace / "here")]
    assert [(r.id, r.outcome, r.fork, a, b) for r, a, b in found(workspace / "there")] == bare
    diagnosed = command(workspace, "diagnose", "there", *scheduler)
    assert diagnosed.returncode in (0, 1), diagnosed.stderr
    assert labels(workspace / "there") == labels(workspace / "here")


def test_a_run_whose_workers_are_killed_again_and_again_finds_the_same(workspace, workers):
    run = "run", "matrix.toml", "--set", "n_predict=200", "-o"
    here = command(workspace, *run, "here", "--jobs", "2")
    assert here.returncode in (0, 1), here.stderr
    expected = found(workspace / "here")
    assert len(expected) == 24
    # A case ends well within 3 s, so that hardly any meets four kills in turn, after which it would count as failed.
    with killing(workers, 3.0) as killed:
        while len(killed) < 3:
            there = f"there-{len(killed)}"
            again = command(workspace, *run, there, "--scheduler", workers.scheduler_address)
            assert again.returncode == here.returncode, again.stderr
            assert found(workspace / there) == expected


def test_the_smallest_case_is_examined_on_a_worker_as_here(tiny_models, workers):
    paths = tiny_models("llama", "Q4_K_M"), tiny_models("llama", "Q4_K_M", noise=0.1)
    target, draft = (
        Model(p.stem, "Q4_K_M", f"sha256:{files.wanted(str(p)).sha256}", str(p)) for p in paths
    )
    cell = Cell(target, DraftModel(draft, 3), n_predict=12, n_threads=1)
    case = Case(cell, Prompt("p", ids=(1, 40, 77, 120)))
    shown = []
    with Workers(1) as processes, Cluster(workers.scheduler_address) as cluster:
        for submit in (processes, cluster):
            finding = Trials(submit, Look("batch-width", reference="")).examine(case)
            shown.append((finding.label, finding.kind, finding.verdict, finding.speculative.ids))
    assert shown[0] == shown[1]


def test_a_crash_is_a_failure_and_the_worker_lives(workers):
    with Cluster(workers.scheduler_address, timeout=30) as cluster:
        before = {*cluster._members.known}
        failure = cluster.submit(fakes.abort).result()
        assert isinstance(failure, Failure)
        assert (failure.stage, failure.reason) == ("verify 12", "aborted (SIGABRT)")
        assert failure.log[-1] == "GGML_ASSERT(n_tokens <= n_batch) failed"
        assert cluster.submit(fakes.hang, timeout=0.5).result().reason == "no answer within 0.5 s"
        with pytest.raises(BadInput, match="shorten it"):
            cluster.submit(fakes.bad_input).result()
        assert cluster.submit(fakes.double, 4).result() == 8
        assert {*cluster._members.known} == before


def test_a_call_that_takes_every_worker_along_is_a_failure_in_the_end(workers):
    with Cluster(workers.scheduler_address) as cluster:
        failure = cluster.submit(fakes.takes_parent_along).result()
        assert isinstance(failure, Failure)
        assert failure.stage == "worker"
        assert cluster.submit(fakes.double, 4).result() == 8


def test_models_that_a_host_lacks_are_sent_once(tmp_path, tiny_models, workers, monkeypatch):
    sent: list[str] = []
    model = tiny_models("llama", "Q4_K_M")
    monkeypatch.chdir(tmp_path)  # which is not the directory of the workers
    os.symlink(model, "only-here.gguf")
    monkeypatch.setattr(files, "PIECE", 10_000)
    with Cluster(workers.scheduler_address, note=sent.append) as cluster:
        places = [cluster.submit(str, "only-here.gguf") for _ in range(4)]
        (place,) = {future.result() for future in places}
    assert Path(place).read_bytes() == model.read_bytes()
    assert place != "only-here.gguf"
    assert len(sent) == 1


def test_a_map_to_a_missing_or_another_model_names_the_worker(tmp_path, tiny_models, workers):
    here, there = tiny_models("llama", "Q4_K_M"), tmp_path / "there"
    there.mkdir()
    maps = ((str(here.parent), str(there)),)
    with Cluster(workers.scheduler_address, maps=maps) as cluster:
        with pytest.raises(BadInput, match=rf"^worker tcp://\S+ {there}/\S+ does not exist"):
            cluster.submit(str, str(here)).result()
        (there / here.name).write_bytes(b"GGUF")
        with pytest.raises(BadInput, match=rf"^worker tcp://\S+ {there}/\S+ is another file than"):
            cluster.submit(str, str(here)).result()


def test_a_worker_with_another_version_is_refused(workers, monkeypatch):
    monkeypatch.setattr(node, "versions", lambda: {"specbisect": "0.0.1"})
    with pytest.raises(
        BadInput, match=r"^worker tcp://\S+ has specbisect .* and this machine 0.0.1"
    ):
        Cluster(workers.scheduler_address)


def test_more_resources_than_any_worker_has_are_refused(workers):
    with pytest.raises(BadInput, match="no worker of .* can take a call with GPU=4"):
        Cluster(workers.scheduler_address, resources={"GPU": 4})


def test_a_scheduler_without_workers_is_refused(monkeypatch):
    monkeypatch.setattr(client, "CONNECT_S", 1.0)
    with (
        LocalCluster(
            n_workers=0, dashboard_address=":0", processes=False, protocol="tcp://"
        ) as empty,
        pytest.raises(BadInput, match="has no worker"),
    ):
        Cluster(empty.scheduler_address)


@contextmanager
def started(*lines: Sequence[str], env: Mapping[str, str] = MappingProxyType({})):
    """Processes with these command lines, and whatever they start, until the block ends."""
    processes = [
        subprocess.Popen(line, env=ENVIRONMENT | env, stderr=subprocess.DEVNULL) for line in lines
    ]
    try:
        yield
    finally:
        for process in reversed(processes):
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()


SCHEDULER = sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"
WORKER = sys.executable, "-m", "distributed.cli.dask_worker", "--no-dashboard", "--nthreads", "1"


@contextmanager
def scheduler_and_workers(address: str, *variables: Mapping[str, str]):
    """A scheduler as people start it, and a worker with each of these environments."""
    port = address.rpartition(":")[2]
    with ExitStack() as all_of_them:
        all_of_them.enter_context(started((*SCHEDULER, "--host", "127.0.0.1", "--port", port)))
        for own in variables:
            all_of_them.enter_context(started((*WORKER, address), env=own))
        yield


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def test_classes_of_hosts_are_kept_to_and_held_against_each_other(workspace, address):
    hosts = [{"SPECBISECT_HOST_CLASS": name, "LLAMA_MARK": name} for name in ("old", "new")]
    settings = "--set", "host_class=old,new", "--set", "n_ubatch=512"
    with scheduler_and_workers(address, *hosts):
        wait_for_workers(2, address)
        ran = command(
            workspace, "run", "matrix.toml", "-o", "there", *settings, "--scheduler", address
        )
    assert ran.returncode in (0, 1), ran.stderr
    rows = found(workspace / "there")
    assert len(rows) == 24
    for row, *arms in rows:
        marks = {arm.provenance["host"]["variables"]["LLAMA_MARK"] for arm in arms}
        assert marks == {row.cell.host_class}
    shown = json.loads(command(workspace, "show", "there", "--json").stdout)
    same = {"prompts": 3, "different": 0, "first": None}
    assert [(p["classes"], p["tokens"], p["rows"]) for p in shown["host_classes"]] == [
        (["old", "new"], same, same)
    ] * 2


def test_a_gate_compares_the_lock_with_the_workers(workspace, address):
    small = "matrix.toml", "--target", "target.gguf", "--set", "n_ubatch=512", "--max-prompts", "1"
    locked = command(workspace, "lock", *small, "-o", "here.lock", "--directory", "locked")
    assert locked.returncode == 0, locked.stderr
    gate = "gate", *small, "--lock", "here.lock", "--scheduler", address

    with scheduler_and_workers(address, {}):
        wait_for_workers(1, address)
        alike = command(workspace, *gate, "--directory", "alike")
        assert alike.returncode in (0, 1, 3), alike.stderr
        assert len(found(workspace / "alike")) == 2
        with started((*WORKER, address), env={"LLAMA_MARK": "other"}):
            wait_for_workers(2, address)
            unlike = command(workspace, *gate, "--directory", "unlike")
    assert (unlike.returncode, unlike.stdout) == (2, "")
    assert "are not alike (machine.variables.LLAMA_MARK: " in unlike.stderr
    with scheduler_and_workers(address, {"LLAMA_MARK": "other"}):
        wait_for_workers(1, address)
        other = command(workspace, *gate, "--directory", "other")
    assert (other.returncode, other.stdout) == (2, "")
    assert "this is not what was locked: machine.variables.LLAMA_MARK: " in other.stderr


def test_a_run_outlives_its_scheduler(tmp_path, address, monkeypatch):
    monkeypatch.setattr(client, "CONNECT_S", 20.0)
    plan = 1, 2, ("",) * 3
    with Store.create(tmp_path / "here", "plan", {}) as store, Workers(1) as processes:
        run(fakes.plan(*plan), store, processes, call=fakes.arm)
    with ExitStack() as stack:
        with scheduler_and_workers(address, {}):
            cluster = stack.enter_context(Cluster(address))
            store = stack.enter_context(Store.create(tmp_path / "there", "plan", {}))
            calls = [cluster.submit(fakes.slower_arm, case) for case in fakes.plan(*plan)]
            calls[0].result(60)
        with scheduler_and_workers(address, {}):
            results = [call.result(120) for call in calls]
            assert results == [fakes.arm(case) for case in fakes.plan(*plan)]
            assert run(fakes.plan(*plan), store, cluster, call=fakes.arm).failures == 0
            stack.close()
    assert fakes.content(tmp_path / "there") == fakes.content(tmp_path / "here")


SOON = {f"DASK_DISTRIBUTED__COMM__TIMEOUTS__{name}": "11s" for name in ("TCP", "CONNECT")}
"""How long Dask holds on to a silent connection: as short as it allows."""


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 192.0.2.1 and 192.0.2.2, joined by a cable called ``cable`` at both ends."""
    one, two = (f"specbisect-{os.getpid()}-{name}" for name in ("one", "two"))
    with ExitStack() as undo:
        try:
            for name in (one, two):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("-n", one, "link", "add", "cable", "type", "veth", "peer", "cable", "netns", two)
            for name, address in ((one, "192.0.2.1/24"), (two, "192.0.2.2/24")):
                ip("-n", name, "address", "add", address, "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"NOT TESTED, a network that is cut: {getattr(error, 'stderr', '') or error}"
            warnings.warn(reason, stacklevel=1)  # a skipped test alone is easily overlooked
            pytest.skip(reason)
        yield one, two


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def test_a_run_outlives_a_cut_between_its_workers(workspace, namespaces):
    run = "run", "matrix.toml", "--set", "n_predict=200", "-o"
    here = command(workspace, *run, "here", "--jobs", "2")
    assert here.returncode in (0, 1), here.stderr

    address, starts = "tcp://192.0.2.1:8786", workspace / "starts"
    one, two = (("ip", "netns", "exec", name) for name in namespaces)
    worker = shlex.join((*WORKER, address, "--host", "192.0.2.2"))
    again = f"while :; do echo >>{starts}; {worker}; done"  # as a service manager does
    done = threading.Event()

    def cut() -> None:
        while not finished(workspace / "there") and not done.wait(0.1):
            pass
        ip("-n", namespaces[1], "link", "set", "cable", "down")
        while len(starts.read_text()) < 2 and not done.wait(0.1):  # until the worker has given up
            pass
        ip("-n", namespaces[1], "link", "set", "cable", "up")

    lines = (
        (*one, *SCHEDULER, "--host", "192.0.2.1"),
        (*one, *WORKER, address, "--host", "192.0.2.1"),
        (*two, "sh", "-c", again),
    )
    with started(*lines, env=SOON):
        wait_for_workers(2, address, within=one)
        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            there = command(workspace, *run, "there", "--scheduler", address, within=one)
        finally:
            done.set()
            cutting.join()
        wait_for_workers(2, address, within=one)
    assert there.returncode == here.returncode, there.stderr
    assert found(workspace / "there") == found(workspace / "here")
    assert len(starts.read_text()) > 1


def spawned() -> set[int]:
    """Every Python process that `multiprocessing` started beneath this one: workers, and what they run calls in."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def test_a_worker_lets_go_of_what_a_killed_coordinator_held(workspace, address):
    run = "run", "matrix.toml", "--set", "n_predict=200", "-o", "there", "--scheduler", address
    with scheduler_and_workers(address, {"SPECBISECT_WORKER_IDLE_S": "1"}):
        wait_for_workers(1, address)
        before = spawned()
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "specbisect", *run], cwd=workspace, env=ENVIRONMENT
        )
        while not finished(workspace / "there"):
            assert coordinator.poll() is None
            time.sleep(0.05)
        assert spawned() > before
        coordinator.kill()
        coordinator.wait()
        end = time.monotonic() + 120
        while spawned() != before:
            assert time.monotonic() < end, "the child processes are still there"
            time.sleep(0.2)


def finished(directory: Path) -> int:
    """How many cases of a run have finished; 0 before it has begun."""
    with suppress(BadInput), Store.open(directory, readonly=True) as store:
        return store.count()
    return 0


def wait_for_workers(n: int, address: str, within: Sequence[str] = ()) -> None:
    """Until so many workers have come to a scheduler, that is reached from `within` a namespace."""
    program = (
        f"from distributed import Client; Client({address!r}, timeout=60).wait_for_workers({n}, 60)"
    )
    subprocess.run([*within, sys.executable, "-c", program], check=True, timeout=120)
