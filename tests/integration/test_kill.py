"""Whatever is killed, and whenever: after resuming, a run has found what an undisturbed one finds."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil

import fakes
from specbisect.errors import BadInput
from specbisect.runner import run
from specbisect.store import Store
from specbisect.workers import Workers

KILLED = 3, 6, ("",) * 6


def undisturbed(path: Path):
    """What a store holds after a run in which nothing was killed."""
    with Store.create(path, "plan", {}) as store, Workers(jobs=1) as workers:
        run(fakes.plan(*KILLED), store, workers, call=fakes.arm)
    return fakes.content(path)


def spawned(pid: int) -> list[psutil.Process]:
    """The worker processes of a process."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("spawn_main" in word for word in child.cmdline()):
                found.append(child)
    return found


def test_after_workers_were_killed_a_resumed_run_finds_what_an_undisturbed_one_finds(tmp_path):
    dice = random.Random(1)
    kills = 0

    def kill_some(summary):
        nonlocal kills
        if summary.done - summary.resumed == next_kill[0]:
            next_kill[0] += dice.randint(1, 6)
            time.sleep(dice.uniform(0, 0.004))
            if children := spawned(os.getpid()):
                dice.choice(children).kill()
                kills += 1

    with Store.create(tmp_path / "run", "plan", {}) as store, Workers(jobs=2) as workers:
        failures = 1
        while failures:
            next_kill = [dice.randint(1, 6)]
            last = kills >= 12
            failures = run(
                fakes.plan(*KILLED),
                store,
                workers,
                call=fakes.slow_arm,
                progress=(lambda _: None) if last else kill_some,
                retry_failed=True,
            ).failures
            if not last:
                reasons = {row.reason.partition(": ")[2] for row in store.rows(outcome="failed")}
                assert reasons <= {
                    "killed (SIGKILL; out of memory?)",
                    "no worker process lives long enough to take the call",
                }
    assert kills >= 12
    assert fakes.content(tmp_path / "run") == undisturbed(tmp_path / "undisturbed")


PARENT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import fakes
    from specbisect.runner import run
    from specbisect.store import Store
    from specbisect.workers import Workers

    if __name__ == "__main__":
        plan = fakes.plan(*map(int, sys.argv[2:4]), ("",) * int(sys.argv[4]))
        with Store.create(Path(sys.argv[1]), "plan", {}) as store, Workers(jobs=2) as workers:
            run(
                plan,
                store,
                workers,
                call=fakes.slow_arm,
                progress=lambda summary: print(summary.resumed, summary.done, flush=True),
            )
    """
)


def test_after_the_parent_was_killed_a_resumed_run_finds_what_an_undisturbed_one_finds(tmp_path):
    script, directory = tmp_path / "parent.py", tmp_path / "run"
    script.write_text(PARENT)
    dice = random.Random(2)
    saved = 0
    for kill in range(11):
        parent = subprocess.Popen(
            [sys.executable, script, directory, *map(str, (KILLED[0], KILLED[1], len(KILLED[2])))],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if kill == 10:
            assert parent.communicate()[0].endswith(" 108\n")
            break
        wanted = dice.randint(1, 8)
        for line in parent.stdout:
            resumed, done = map(int, line.split())
            if done - resumed >= wanted:
                break
        time.sleep(dice.uniform(0, 0.01))
        children = spawned(parent.pid)
        parent.send_signal(dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        parent.communicate()
        assert children
        assert psutil.wait_procs(children, timeout=10)[1] == []
        with Store.open(directory, readonly=True) as store:
            assert len(list(store.rows())) >= done
            saved = done
    assert saved > 10
    assert parent.returncode == 0
    assert fakes.content(directory) == undisturbed(tmp_path / "undisturbed")


MATRIX = """
schema = "specbisect.matrix/1"
n_predict = 16
prompts = "prompts.jsonl"
[target]
files = ["target.gguf", "other.gguf"]
[[drafter]]
method = "draft-model"
model = "draft.gguf"
n_max = [1, 3, 7]
[axes]
n_threads = [1]
n_ubatch = [8, 512]
"""


def found(directory: Path):
    """Every verdict and both traces of every case, which compare equal when only times differ."""
    with Store.open(directory, readonly=True) as store:
        return [
            (row, store.arm(row.id), store.arm(store.case(row.id).vanilla.key))
            for row in store.rows()
        ]


def command(directory: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "specbisect", "run", "matrix.toml", "-o", directory, *options],
        cwd=directory.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_the_command_goes_on_after_every_kill_and_finds_the_same(tmp_path, tiny_models):
    models = {
        "target": tiny_models("llama", "Q4_K_M"),
        "other": tiny_models("llama", "Q6_K"),
        "draft": tiny_models("llama", "Q4_K_M", noise=0.1),
    }
    for name, path in models.items():
        (tmp_path / f"{name}.gguf").symlink_to(path)
    (tmp_path / "matrix.toml").write_text(MATRIX)
    texts = ["one two three one two", "def f(x):", "a", "4 + 4 = 8, 8 + 8 =", "Viele Wege"] * 2
    lines = [json.dumps({"id": f"p{i}", "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))

    undisturbed = command(tmp_path / "undisturbed")
    said = undisturbed.communicate()[1]
    assert undisturbed.returncode in (0, 1), said
    expected = found(tmp_path / "undisturbed")
    assert len(expected) == 120

    dice = random.Random(3)
    directory, ended = tmp_path / "disturbed", 0
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        run = command(directory, "--jobs", "2")
        wanted = ended + dice.randint(1, 8)
        while ended < wanted:
            assert run.poll() is None, run.stderr.read()
            with suppress(BadInput), Store.open(directory, readonly=True) as store:
                ended = sum(1 for _ in store.rows())
            time.sleep(dice.uniform(0, 0.02))
        children = spawned(run.pid)
        run.send_signal(number)
        said = run.communicate()[1]
        assert run.returncode == (-number if number == signal.SIGKILL else 130)
        assert "Traceback" not in said
        assert psutil.wait_procs(children, timeout=10)[1] == []
        so_far = found(directory)
        assert so_far == [case for case in expected if case in so_far]
        ended = len(so_far)
    last = command(directory, "--jobs", "2")
    last.communicate()
    assert last.returncode == undisturbed.returncode
    assert found(directory) == expected
