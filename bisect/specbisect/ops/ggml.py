"""The ggml inside llama_cpp: its functions, and the memory layout of its tensors, checked before it is trusted.

This file and `operation.py` need nothing but numpy and llama_cpp, because `op_repro.py` carries their text: a repro
runs the very code that found the difference.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import llama_cpp.llama_cpp
import numpy as np

DIMENSIONS = 4
_MEMORY = 1 << 20  # bytes for the descriptions of one small graph


class Unusable(Exception):
    """This build of ggml cannot do what is asked; the message says why."""


class Tensor(ctypes.Structure):
    """``struct ggml_tensor``. It is private to ggml: `load` compares it with the library before anybody reads one."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * DIMENSIONS),
        ("nb", ctypes.c_size_t * DIMENSIONS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
    ]


class InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class GgufParams(ctypes.Structure):
    """``struct gguf_init_params``."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p))]


_P, _I, _L, _Z, _S = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_char_p,
)
_PROTOTYPES: dict[str, tuple[Any, ...]] = {  # result, arguments
    "ggml_init": (_P, InitParams),
    "ggml_free": (None, _P),
    "ggml_tensor_overhead": (_Z,),
    "ggml_new_tensor": (_P, _P, _I, _I, ctypes.POINTER(_L)),
    "ggml_set_name": (_P, _P, _S),
    "ggml_get_name": (_S, _P),
    "ggml_get_data": (_P, _P),
    "ggml_nbytes": (_Z, _P),
    "ggml_mul_mat": (_P, _P, _P, _P),
    "ggml_scale": (_P, _P, _P, ctypes.c_float),
    "ggml_view_1d": (_P, _P, _P, _L, _Z),
    "ggml_op_name": (_S, _I),
    "ggml_op_desc": (_S, _P),
    "ggml_type_name": (_S, _I),
    "ggml_type_size": (_Z, _I),
    "ggml_blck_size": (_L, _I),
    "ggml_row_size": (_Z, _I, _L),
    "ggml_quantize_chunk": (_Z, _I, _P, _P, _L, _L, _L, _P),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, _I),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_buffer_get_type": (_P, _P),
    "ggml_backend_buft_name": (_S, _P),
    "ggml_backend_buft_get_device": (_P, _P),
    "ggml_backend_dev_by_name": (_P, _S),
    "ggml_backend_dev_name": (_S, _P),
    "ggml_backend_dev_init": (_P, _P, _S),
    "ggml_backend_dev_buffer_type": (_P, _P),
    "ggml_backend_dev_backend_reg": (_P, _P),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, _P, _P),
    "ggml_backend_reg_get_proc_address": (_P, _P, _S),
    "ggml_backend_tensor_get": (None, _P, _P, _Z, _Z),
    "ggml_backend_tensor_set": (None, _P, _P, _Z, _Z),
    "ggml_backend_graph_compute": (_I, _P, _P),
    "ggml_backend_free": (None, _P),
    "ggml_get_tensor": (_P, _P, _S),
    "gguf_init_from_file": (_P, _S, GgufParams),
    "gguf_free": (None, _P),
    "gguf_find_key": (_L, _P, _S),
    "gguf_get_val_str": (_S, _P, _L),
    "gguf_find_tensor": (_L, _P, _S),
    "gguf_get_data_offset": (_Z, _P),
    "gguf_get_tensor_offset": (_Z, _P, _L),
}


@cache
def load() -> Any:
    """The ggml that llama_cpp runs on, with prototypes set and the layout of tensors checked.

    Raises `Unusable` when it lacks a function or lays tensors out in another way. Symbols are looked up through
    libllama: opening the libraries by name would load a second copy of them.
    """
    lib = llama_cpp.llama_cpp._lib
    for name, (result, *arguments) in _PROTOTYPES.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise Unusable(f"the installed llama.cpp has no {name}") from None
        function.restype, function.argtypes = result, arguments
    llama_cpp.llama_backend_init()
    if wrong := layout_errors(lib):
        raise Unusable(
            f"the installed llama.cpp lays out struct ggml_tensor differently ({', '.join(wrong)}); "
            "use the version that pip installs with specbisect"
        )
    return lib


def layout_errors(lib: Any, layout: type[Tensor] = Tensor) -> list[str]:
    """Fields of `layout` that do not show what known tensors of the library hold; empty when it can be trusted."""
    with scratch(lib) as ctx:
        a = new_tensor(lib, ctx, 8, (64, 3, 5, 1))  # 8: q8_0, whose rows are blocks
        b = new_tensor(lib, ctx, 0, (64, 7, 5, 1))
        lib.ggml_set_name(a, b"a name of many letters, such as those of real tensors " + b"x" * 9)
        product, view = lib.ggml_mul_mat(ctx, a, b), lib.ggml_view_1d(ctx, b, 10, 128)
        scaled = lib.ggml_scale(ctx, b, ctypes.c_float(0.5))
        buft = lib.ggml_backend_dev_buffer_type(device_named(lib, "CPU"))
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)
        read = layout.from_address
        half = np.float32(0.5).view(np.int32)
        facts = {
            "size": ctypes.sizeof(layout) <= lib.ggml_tensor_overhead(),
            "type": (read(a).type, read(b).type) == (8, 0),
            "buffer": read(b).buffer == buffer,
            "ne": tuple(read(product).ne) == (3, 7, 5, 1) and tuple(read(a).ne) == (64, 3, 5, 1),
            "nb": tuple(read(a).nb) == (34, 68, 204, 1020),
            "op": 0 < read(product).op < 64 and lib.ggml_op_name(read(product).op) == b"MUL_MAT",
            "op_params": read(scaled).op_params[0] == half,
            "src": list(read(product).src) == [a, b, *[None] * 8],
            "view_src": read(view).view_src == b,
            "view_offs": read(view).view_offs == 128,
            "data": read(b).data is not None and read(b).data == lib.ggml_get_data(b),
            "name": read(a).name == lib.ggml_get_name(a),
        }
        lib.ggml_backend_buffer_free(buffer)
    return [name for name, fine in facts.items() if not fine]


def new_context(lib: Any) -> Any:
    """Room for descriptions of tensors, which get their memory from a backend."""
    return lib.ggml_init(InitParams(_MEMORY, None, True))


@contextmanager
def scratch(lib: Any) -> Iterator[Any]:
    """`new_context`, freed at the end."""
    ctx = new_context(lib)
    try:
        yield ctx
    finally:
        lib.ggml_free(ctx)


def new_tensor(lib: Any, ctx: Any, kind: int, ne: Sequence[int]) -> int:
    """A tensor of type `kind` and shape `ne` (ggml's order) in `ctx`."""
    address: int = lib.ggml_new_tensor(ctx, kind, DIMENSIONS, (_L * DIMENSIONS)(*ne))
    return address


def device_named(lib: Any, name: str) -> int:
    """The device that ggml calls `name`. Raises `Unusable` when there is none."""
    device: int | None = lib.ggml_backend_dev_by_name(name.encode())
    if device is None:
        raise Unusable(f"there is no device {name} here")
    return device


def extra_buffer_types(lib: Any, device: int) -> dict[str, int]:
    """Buffer types of `device` that keep weights in an order of their own, such as ``CPU_REPACK``, by name."""
    reg = lib.ggml_backend_dev_backend_reg(device)
    address = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return {}
    found = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device)
    names: dict[str, int] = {}
    while found and (buft := found[len(names)]):
        names[lib.ggml_backend_buft_name(buft).decode()] = buft
    return names


def item_type(kind: int) -> np.dtype[Any]:
    """What an element of type `kind`, or a block of a quantised type, is to numpy; raw bytes if it has no such type."""
    known = {0: "<f4", 1: "<f2", 24: "i1", 25: "<i2", 26: "<i4", 27: "<i8", 28: "<f8"}
    return np.dtype(known.get(kind, f"V{load().ggml_type_size(kind)}"))
