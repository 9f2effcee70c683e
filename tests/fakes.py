"""Calls for worker processes that do what llama.cpp does on a bad day, and an engine without models."""

import ctypes
import os
import signal
import sys
import threading
import time

from specbisect import stage
from specbisect.errors import BadInput, EngineFault


def double(value: int) -> int:
    return 2 * value


def pid() -> int:
    return os.getpid()


def fault() -> None:
    os.write(2, b"cannot find room for a batch\n")
    raise EngineFault("prompt", "llama_decode returned 1")


def bad_input() -> None:
    raise BadInput("the prompt is longer than n_ctx; shorten it")


def bug() -> None:
    raise TimeoutError({}[3])


def abort() -> None:
    for i in range(30):
        sys.stdout.write(f"line {i}\n")
    os.write(2, b"GGML_ASSERT(n_tokens <= n_batch) failed\n")
    stage.report("verify 12")
    os.abort()


def segfault() -> None:
    stage.report("load")
    ctypes.string_at(0)


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def exit_with(code: int) -> None:
    stage.report("draft 3")
    os._exit(code)


def hang() -> None:
    stage.report("verify 7")
    ctypes.CDLL(None).sleep(600)  # in C, where no Python handler runs


def exhaust_memory() -> None:
    stage.report("context")
    bytearray(1 << 60)


def dies_when_idle() -> int:
    """Returns at once; the process is gone a moment later."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return os.getpid()


def with_child() -> int:
    """Starts a process of its own, as the server engine does, and crashes."""
    child = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
    sys.stdout.write(f"{child}\n")
    os.kill(os.getpid(), signal.SIGKILL)
    return child
