"""Engines run one arm of one case: a case goes in, a trace comes out."""

import functools
from importlib import import_module
from typing import Protocol

from specbisect.cell import Case, EngineName
from specbisect.trace import Trace

_MODULES: dict[EngineName, str] = {
    "libllama": "specbisect.engines.libllama",
    "binding": "specbisect.engines.binding",
    "server": "specbisect.engines.server",
}


class Engine(Protocol):
    """Keeps models (or servers) loaded between arms; lives in one process."""

    def run(self, case: Case) -> Trace:
        """One arm: the speculative one, or the vanilla one when the cell has no drafter.

        Raises `EngineFault` when llama.cpp fails, `BadInput` when the case cannot be run as asked.
        """

    def close(self) -> None:
        """Free models, contexts and processes. Idempotent."""


@functools.cache
def engine(name: EngineName) -> Engine:
    """The engine of that name in this process, made at first use."""
    made: Engine = import_module(_MODULES[name]).make()
    return made


def run_arm(case: Case) -> Trace:
    """One arm of one case in this process; what worker processes are asked to call."""
    return engine(case.cell.engine).run(case)
