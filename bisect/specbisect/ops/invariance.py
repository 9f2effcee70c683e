"""The batch-invariance table: one product of a matrix with a batch, in every type that ggml can store the matrix in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import gguf
import numpy as np

from specbisect.llama.types import TENSOR_TYPES
from specbisect.ops import tensors
from specbisect.ops.ggml import Unusable, item_type
from specbisect.ops.operation import Bench, Operation, Source, differences

TYPES = (
    *(
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "Q6_K",
        "Q5_K",
        "Q5_1",
        "Q5_0",
        "Q4_K",
        "Q4_1",
        "Q4_0",
        "Q3_K",
        "Q2_K",
    ),
    *("IQ4_XS", "IQ4_NL", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
    *("TQ2_0", "TQ1_0", "MXFP4", "NVFP4"),
)
"""Types that ``ggml_quantize_chunk`` writes; it aborts on others."""


@dataclass(frozen=True, slots=True)
class Invariance:
    """One type of the matrix: at which `widths` (of those tried) a batch departs from single rows, and how far.

    `relative` is the largest difference over the largest result. `buffer` is where the matrix lies, empty for the plain
    order.
    """

    type: str
    buffer: str
    widths: tuple[int, ...]
    relative: float


def table(product: Operation, types: Sequence[str] = TYPES) -> list[Invariance]:
    """`product` with its matrix in each of `types`, plain and in every order that this build repacks it into.

    Left out: types whose blocks do not fit the matrix's rows, and those this build cannot multiply.
    """
    widths = range(2, product.width + 1)
    rows: list[Invariance] = []
    for name in types:
        for buffer in ["", *sorted(tensors.extra_buffers())]:
            try:
                found = differences(retyped(product, name, buffer), widths)
            except Unusable:
                continue
            departs = tuple(d.width for d in found if d.values)
            rows.append(Invariance(name, buffer, departs, max(d.relative for d in found)))
    return rows


def retyped(product: Operation, name: str, buffer: str | None = None) -> Operation:
    """`product` with its matrix as type `name`, in `buffer`; None is where llama.cpp would put it.

    Raises `Unusable` when its rows are no whole number of blocks of that type.
    """
    matrix, *others = product.sources
    if matrix is None or name not in TENSOR_TYPES:
        raise Unusable(f"this build has no type {name}")
    changed = replace(product, sources=(_retyped(matrix, name), *others))
    if buffer is not None:
        return _placed(changed, buffer)
    for extra in sorted(tensors.extra_buffers()):
        try:
            Bench(_placed(changed, extra)).close()
        except Unusable:
            continue
        return _placed(changed, extra)
    return _placed(changed, "")


def _placed(product: Operation, buffer: str) -> Operation:
    matrix, *others = product.sources
    return replace(product, sources=(matrix and replace(matrix, buffer=buffer), *others))


def _retyped(matrix: Source, name: str) -> Source:
    lib, kind = tensors.library(), TENSOR_TYPES[name]
    columns = matrix.ne[0]
    if columns % lib.ggml_blck_size(kind):
        raise Unusable(f"rows of {columns} values are no whole number of blocks of {name}")
    raw = np.ascontiguousarray(matrix.data)
    as_bytes = raw.view(np.uint8).reshape(*raw.shape[:-1], -1)
    values = gguf.dequantize(as_bytes, gguf.GGMLQuantizationType(matrix.type))
    values = np.ascontiguousarray(values, np.float32)
    rows = values.size // columns
    out = np.empty(rows * lib.ggml_row_size(kind, columns), np.uint8)
    weights = np.ones(columns, np.float32)  # some types ask for the importance of each column
    importance = weights.ctypes.data if lib.ggml_quantize_requires_imatrix(kind) else None
    lib.ggml_quantize_chunk(kind, values.ctypes.data, out.ctypes.data, 0, rows, columns, importance)
    data = out.view(item_type(kind)).reshape(*values.shape[:-1], -1)
    return replace(matrix, type=kind, data=data)
