"""A float32 reference: the target with its weights dequantised, evaluated on the same prefix in one go.

It has none of the target's re-quantised activations, so the distance of a row from it measures the size of that row's
error; a wrong kernel stands out where a merely different order of summation does not.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specbisect.cell import Case
from specbisect.diagnose.lab import Lab
from specbisect.engines.libllama import LibLlama
from specbisect.errors import BadInput, EngineFault
from specbisect.llama import quantize
from specbisect.llama.context import Logits

LIMIT = 8 << 30
"""Largest float32 copy of a target that is made, in bytes."""
RATIO = 4.0
"""A row whose error is this many times that of the rows at other widths is out of line with reordering."""


def dequantised(target: str | Path) -> str:
    """Path of a float32 copy of the file `target`, made at need; "" when it is too large or cannot be made."""
    try:
        (size,) = quantize.sizes([quantize.recipe(target, "F32")])
        return str(quantize.quantize(target, "F32")) if size <= LIMIT else ""
    except (BadInput, EngineFault):
        return ""


def reference_row(engine: LibLlama, case: Case, path: str, prefix: Sequence[int]) -> Logits:
    """The row after `prefix` by the dequantised target at `path`, (n_vocab,)."""
    identity = f"dequantised:{case.cell.target.identity}"
    target = replace(case.cell.target, path=path, quant="F32", identity=identity)
    cell = replace(case.cell, target=target, type_k="f16", type_v="f16")
    lab = Lab(engine, replace(case, cell=cell, fault=None), tuple(prefix))
    with lab.bench() as bench:
        return bench.prompt_row


def error(row: Logits, reference: Logits) -> float:
    """RMS difference between a row and the reference."""
    return float(np.sqrt(np.mean((row.astype(np.float64) - reference) ** 2)))
