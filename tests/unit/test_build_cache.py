"""Things are made once, whole or not at all, however many ask and whoever is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import build_cache

SCRIPTS = Path(build_cache.__file__).parent

MAKER = """
import sys, time
from pathlib import Path
from build_cache import cached

def make(path):
    with open(sys.argv[1] + ".calls", "a") as calls:
        calls.write("x")
    path.mkdir()
    (path / "half").touch()
    time.sleep(float(sys.argv[2]))
    (path / "rest").touch()

print(cached(Path(sys.argv[1]), make))
"""


def maker(target: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", MAKER, str(target), str(seconds)]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def calls(target: Path) -> int:
    path = Path(f"{target}.calls")
    return len(path.read_text()) if path.exists() else 0


def test_two_at_a_time_make_it_once(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    both = [maker(target, 0.3), maker(target, 0.3)]
    assert [process.wait() for process in both] == [0, 0]
    assert calls(target) == 1
    assert sorted(p.name for p in target.iterdir()) == ["half", "rest"]


def test_a_killed_maker_leaves_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    killed = maker(target, 600)
    while not calls(target):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not target.exists()
    assert maker(target, 0).wait() == 0
    assert sorted(p.name for p in target.iterdir()) == ["half", "rest"]
    assert {p.name for p in tmp_path.iterdir()} == {"thing", "thing.calls", ".thing.lock"}


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def make(path: Path) -> None:
        path.touch()
        raise build_cache.Trouble("no")

    with pytest.raises(build_cache.Trouble):
        build_cache.cached(tmp_path / "thing", make)
    assert [p.name for p in tmp_path.iterdir()] == [".thing.lock"]


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(7)"
    with pytest.raises(build_cache.Trouble) as caught:
        build_cache.run([sys.executable, "-c", code], "counting", tmp_path / "log")
    assert str(caught.value).startswith("counting failed, exit code 7")
    assert str(caught.value).endswith("\n98\n99")


def test_the_build_counter_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_cache, "SECONDS_BETWEEN_LINES", 0)
    command = [sys.executable, "-c", "print('  [3/9] g++ …'); print('noise')"]
    build_cache.run(command, "compiling", tmp_path / "log")
    assert "compiling: 3/9, 0 s\n" in capsys.readouterr().err
    assert (tmp_path / "log").read_text().endswith("noise\n")


def test_an_ended_script_ends_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    shell = ["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"]
    code = f"""
import build_cache
from pathlib import Path
build_cache.start(lambda: build_cache.run({shell}, "sleeping", Path({str(tmp_path / "log")!r})))
"""
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    script = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert script.poll() is None
        time.sleep(0.01)
    script.terminate()
    assert script.wait() == 143
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
