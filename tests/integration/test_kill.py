"""Whatever is killed, and whenever: after resuming, a run has found what an undisturbed one finds."""

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
