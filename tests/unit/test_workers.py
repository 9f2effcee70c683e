import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import wait

import psutil
import pytest

import fakes
from specbisect.errors import BadInput
from specbisect.trace import Failure
from specbisect.workers import LOG_LINES, WorkerBug, Workers


@pytest.fixture(scope="module")
def workers():
    with Workers(jobs=1) as made:
        yield made


def gone(pid: int) -> bool:
    """Whether the process ends; waits for it, because a signal takes its time."""
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_value_comes_back(workers):
    assert workers.submit(fakes.double, 21).result() == 42


def test_the_process_is_reused(workers):
    assert workers.submit(fakes.pid).result() == workers.submit(fakes.pid).result() != os.getpid()


@pytest.mark.parametrize(
    ("call", "args", "stage", "reason"),
    [
        (fakes.fault, (), "prompt", "llama_decode returned 1"),
        (fakes.abort, (), "verify 12", "aborted (SIGABRT)"),
        (fakes.segfault, (), "load", "killed by SIGSEGV"),
        (fakes.end_by, (signal.SIGKILL,), "start", "killed (SIGKILL; out of memory?)"),
        (fakes.end_by, (signal.SIGRTMIN + 1,), "start", f"killed by signal {signal.SIGRTMIN + 1}"),
        (fakes.exit_with, (3,), "draft 3", "exited with code 3"),
        (fakes.exit_with, (0,), "draft 3", "exited with code 0"),
        (fakes.exhaust_memory, (), "context", "out of memory"),
    ],
)
def test_a_call_that_fails_is_a_failure_and_the_next_call_runs(workers, call, args, stage, reason):
    failed = workers.submit(call, *args)
    after = [workers.submit(fakes.double, i) for i in range(3)]
    assert failed.result() == Failure(stage, reason)
    assert [future.result() for future in after] == [0, 2, 4]


def test_a_call_past_its_time_is_a_failure_even_deep_in_c(workers):
    assert workers.submit(fakes.hang, timeout=0.3).result() == Failure(
        "verify 7", "no answer within 0.3 s"
    )
    assert workers.submit(fakes.double, 1).result() == 2


def test_the_last_lines_printed_are_kept_and_only_those_of_this_call(workers):
    log = workers.submit(fakes.abort).result().log
    assert len(log) == LOG_LINES
    assert log[-2:] == ("line 29", "GGML_ASSERT(n_tokens <= n_batch) failed")
    assert workers.submit(fakes.fault).result().log == ("cannot find room for a batch",)
    assert workers.submit(fakes.fault).result().log == ("cannot find room for a batch",)


def test_bad_input_is_raised_as_it_is(workers):
    with pytest.raises(BadInput, match=r"^the prompt is longer than n_ctx; shorten it$"):
        workers.submit(fakes.bad_input).result()


def test_our_own_defects_are_raised_with_the_traceback_of_the_child(workers):
    with pytest.raises(WorkerBug, match=r"in bug(.|\n)*KeyError: 3"):
        workers.submit(fakes.bug).result()


def test_a_worker_that_dies_between_calls_is_replaced(workers):
    first = workers.submit(fakes.dies_when_idle).result()
    assert gone(first)
    assert workers.submit(fakes.double, 4).result() == 8


def test_a_death_leaves_the_other_calls_alone():
    with Workers(jobs=2) as workers:
        calls = [
            workers.submit(fakes.abort) if i % 4 == 1 else workers.submit(fakes.double, i)
            for i in range(12)
        ]
        assert [future.result() for future in calls] == [
            Failure("verify 12", "aborted (SIGABRT)") if i % 4 == 1 else 2 * i for i in range(12)
        ]


def test_leaving_stops_calls_that_hang_and_those_that_wait():
    with Workers(jobs=1) as workers:
        child = workers.submit(fakes.pid).result()
        calls = [workers.submit(fakes.hang) for _ in range(3)]
        assert not wait(calls, timeout=0.2).done
    assert gone(child)


def test_what_a_dead_worker_started_goes_with_it(workers):
    failure = workers.submit(fakes.with_child).result()
    assert failure.reason == "killed (SIGKILL; out of memory?)"
    assert gone(int(failure.log[-1]))


PARENT = textwrap.dedent(
    """
    import sys
    from contextlib import suppress
    import fakes
    from specbisect.workers import Workers

    if __name__ == "__main__":
        with Workers(jobs=2) as workers:
            calls = [workers.submit(fakes.pid) for _ in range(8)]
            print(*{call.result() for call in calls}, flush=True)
            calls = [workers.submit(fakes.hang) for _ in range(4)]
            while True:  # a signal that comes just before a thread begins to wait is only seen when it has waited
                with suppress(TimeoutError):
                    calls[0].result(0.1)
    """
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_its_parent(tmp_path, number):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    children = [int(pid) for pid in parent.stdout.readline().split()]
    os.killpg(parent.pid, number)  # as a terminal does it: the whole foreground group
    errors = parent.communicate(timeout=120)[1]
    assert parent.returncode == -number
    assert children
    assert all(gone(pid) for pid in children)
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1  # the parent's own; no child prints one
