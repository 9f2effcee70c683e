"""Names of file types (Q4_K_M: a mixture) and tensor types (Q4_K), as this llama.cpp knows them."""

from collections.abc import Mapping
from typing import Final

import gguf
import llama_cpp

from specbisect.errors import BadInput, did_you_mean


def _constants(prefix: str) -> dict[str, int]:
    return {k.removeprefix(prefix): v for k, v in vars(llama_cpp).items() if k.startswith(prefix)}


FILE_TYPES: Final[dict[str, int]] = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    **_constants("LLAMA_FTYPE_MOSTLY_"),
}
"""``llama_ftype`` by name."""

# Each of the two packages lacks some types of llama.cpp's own list.
TENSOR_TYPES: Final[dict[str, int]] = {
    **{t.name: t.value for t in gguf.GGMLQuantizationType},
    **{k: v for k, v in _constants("GGML_TYPE_").items() if k != "COUNT"},
}
"""``ggml_type`` by name."""

LABELS: Final = tuple(FILE_TYPES | TENSOR_TYPES)
"""What a model file can be labelled as: its file type, or where it states none, the type of most weights."""

_FILE_TYPE_NAMES = {v: k for k, v in FILE_TYPES.items()}
_TENSOR_TYPE_NAMES = {v: k for k, v in TENSOR_TYPES.items()}


def file_type_name(value: int) -> str | None:
    """Name of a ``llama_ftype``, None when unknown; llama.cpp's mark for a guess is ignored."""
    return _FILE_TYPE_NAMES.get(value & ~llama_cpp.LLAMA_FTYPE_GUESSED)


def tensor_type_name(value: int) -> str | None:
    """Name of a ``ggml_type``, None when unknown."""
    return _TENSOR_TYPE_NAMES.get(value)


def tensor_bytes(kind: int, elements: int) -> int:
    """Bytes of a tensor of `elements` values; 0 for a type whose block size is not known here."""
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except ValueError:
        return 0
    return elements // block * size


def file_type(name: str) -> int:
    """``llama_ftype`` of `name`, in any case. Raises `BadInput` with the nearest names when there is none."""
    return _look_up("quantisation", FILE_TYPES, name)


def tensor_type(name: str) -> int:
    """``ggml_type`` of `name`, in any case. Raises `BadInput` with the nearest names when there is none."""
    return _look_up("tensor type", TENSOR_TYPES, name)


def _look_up(what: str, known: Mapping[str, int], name: str) -> int:
    if (value := known.get(name.upper())) is None:
        raise BadInput(f"{what} {name!r} is unknown{did_you_mean(name.upper(), known)}")
    return value
