"""The llama.cpp library of this process: loaded once, its log caught, its build and machine described."""

import ctypes
import functools
import os
import platform
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cpuinfo
import llama_cpp
import psutil
import xxhash

from specbisect.trace import host_kind

LOG_LINES = 200
HOST_CLASS = "SPECBISECT_HOST_CLASS"
ENVIRONMENT = re.compile(
    r"^(?!.*(KEY|TOKEN|SECRET|PASS)|GGML_NO_BACKTRACE)(GGML|LLAMA|OMP|CUDA|HIP|ROCR|VK)_[A-Z0-9_]+$"
)
"""Environment variables that can change results; every other one stays out of traces and reports."""

_DEBUG, _CONTINUED = 1, 5  # enum ggml_log_level

_log: deque[str] = deque(maxlen=LOG_LINES)
_listeners: list[list[str]] = []
_partial = ""
_level = _DEBUG


@llama_cpp.llama_log_callback
def _catch(level: int, text: bytes, _user: ctypes.c_void_p) -> None:
    global _partial, _level
    _level = _level if level == _CONTINUED else level
    if _level <= _DEBUG:
        return
    *lines, _partial = (_partial + text.decode("utf-8", "replace")).split("\n")
    for line in lines:
        _log.append(line)
        for heard in _listeners:
            heard.append(line)
        os.write(2, line.encode() + b"\n")


@functools.cache
def load() -> Any:
    """The `llama_cpp` module with its backend started and its log caught. Idempotent.

    What the library prints goes to file descriptor 2 at once, so that a caller that points it at a file (as the
    worker processes do) has the last lines even after an abort.
    """
    llama_cpp.llama_log_set(_catch, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def log_tail(n: int = 20) -> tuple[str, ...]:
    """The last lines the library printed in this process."""
    return tuple(_log)[-n:]


@contextmanager
def listening() -> Iterator[list[str]]:
    """A list that receives every line the library prints inside the block."""
    heard: list[str] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.remove(heard)


@functools.cache
def cores() -> int:
    """Physical cores of this machine; what 0 threads means."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def directory() -> Path:
    """Where the shared libraries of this build lie (``LLAMA_CPP_LIB_PATH`` if set)."""
    return Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib")


@functools.cache
def build() -> str:
    """What identifies this build: version, compiled-in features and a digest of the library files."""
    state = xxhash.xxh3_64()
    for path in sorted(directory().glob("lib*")):
        state.update(path.read_bytes())
    return f"llama-cpp-python {llama_cpp.__version__} {state.hexdigest()}"


@functools.cache
def environment() -> Mapping[str, Any]:
    """Library build and machine, as they go into a trace; no host name, user or path."""
    lib = load()
    return {
        "library": build(),
        "llama_cpp": _commit(),
        "system_info": " ".join(lib.llama_print_system_info().decode().split()),
        "cpu": _cpu(),
        "machine": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": _devices(),
        "variables": {
            k: homeless(v) for k, v in sorted(os.environ.items()) if ENVIRONMENT.match(k)
        },
    }


def host_class() -> str:
    """The class of hosts that this one is of: what ``SPECBISECT_HOST_CLASS`` says, else its `host_kind`."""
    return os.environ.get(HOST_CLASS) or host_kind(environment())


def homeless(text: str) -> str:
    """`text` without the home directory, whose path names the user."""
    return text.replace(str(Path.home()), "~")


def _cpu() -> str:
    """The processor's name. Where the kernel tells it, py-cpuinfo's probing (a second, in a process) is not needed."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return str(cpuinfo.get_cpu_info().get("brand_raw", platform.processor()))


@functools.cache
def _base() -> ctypes.CDLL:
    return ctypes.CDLL(
        next(str(p) for p in directory().glob("*ggml-base*")), mode=ctypes.RTLD_GLOBAL
    )


def _commit() -> str:
    """llama.cpp's commit and ggml's version as compiled into the library; empty where it does not say."""
    try:
        functions = _base().ggml_commit, _base().ggml_version
    except AttributeError:  # older than these functions
        return ""
    for function in functions:
        function.restype = ctypes.c_char_p
    commit, version = (function().decode("utf-8", "replace") for function in functions)
    return f"{commit} (ggml {version})"


def _devices() -> list[str]:
    base = _base()
    ggml = ctypes.CDLL(next(str(p) for p in directory().glob("libggml.*")))
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    base.ggml_backend_dev_description.restype = ctypes.c_char_p
    base.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    count = ggml.ggml_backend_dev_count()
    found = (base.ggml_backend_dev_description(ggml.ggml_backend_dev_get(i)) for i in range(count))
    return [text.decode("utf-8", "replace") for text in found]
