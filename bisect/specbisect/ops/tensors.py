"""Nodes of a running graph: watched one by one, described, and read wherever they lie."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from specbisect.errors import EngineFault
from specbisect.ops import ggml
from specbisect.ops.ggml import DIMENSIONS, Tensor
from specbisect.ops.operation import Array, Shape

MOVES = frozenset({"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"})
"""Operations that compute nothing: what they show is compared where it was computed."""

_UNNAMED = re.compile(r"((node|leaf)_\d+)?")
_LAYER = re.compile(r"-(\d+)$")


class Key(NamedTuple):
    """What one node is recognised by in another graph: its name, its operation, and which of those alike it is.

    A name that ggml made up from the node's place in the graph is empty here: the place may shift.
    """

    name: str
    op: str
    occurrence: int

    @property
    def layer(self) -> int | None:
        """The layer in the name (``ffn_out-3``), if it has one."""
        found = _LAYER.search(self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a node reads or makes: its name, type, shape (ggml's order) and the buffer type it lies in."""

    name: str
    type: str
    ne: Shape
    buffer: str

    @property
    def repacked(self) -> bool:
        """Whether its values were put into another order for a kernel of their own."""
        return self.buffer in extra_buffers()


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph. `device` is ggml's name of where its result lies."""

    key: Key
    result: Operand
    sources: tuple[Operand, ...]
    device: str

    @property
    def weight(self) -> str | None:
        """The name of the model's tensor that it applies, if it does."""
        return next((s.name for s in self.sources if s.name.endswith((".weight", ".bias"))), None)

    @property
    def place(self) -> str:
        """What people call it: its weight, else its own name, else that of what it reads."""
        name = self.weight or self.key.name or next((s.name for s in self.sources), "")
        return name.removesuffix(".weight").partition(" (")[0]

    def __str__(self) -> str:
        types = "×".join(s.type for s in self.sources[:2])
        repacked = " (repacked)" if any(s.repacked for s in self.sources) else ""
        return f"{self.key.op} {types}{repacked}, {self.place}"


def library() -> Any:
    """ggml, checked. Raises `EngineFault` when its tensors cannot be read safely."""
    try:
        return ggml.load()
    except ggml.Unusable as reason:
        raise EngineFault("trace", str(reason)) from None


@cache
def extra_buffers() -> frozenset[str]:
    """Names of all buffer types on the CPU that keep weights in an order of their own."""
    lib = library()
    return frozenset(ggml.extra_buffer_types(lib, ggml.device_named(lib, "CPU")))


def operand(address: int) -> Operand:
    """The tensor at `address`, described."""
    lib, tensor = library(), Tensor.from_address(address)
    buft = _buffer_type(address)
    return Operand(
        tensor.name.decode("utf-8", "replace"),
        lib.ggml_type_name(tensor.type).decode(),
        tuple(tensor.ne),
        lib.ggml_backend_buft_name(buft).decode() if buft else "",
    )


def _buffer_type(address: int) -> int | None:
    tensor = Tensor.from_address(address)
    if tensor.view_src:
        tensor = Tensor.from_address(tensor.view_src)
    if not tensor.buffer:
        return None
    found: int = library().ggml_backend_buffer_get_type(tensor.buffer)
    return found


def sources(address: int) -> list[int | None]:
    """Addresses of what the node at `address` reads, by slot, without the empty slots at the end."""
    slots: list[int | None] = list(Tensor.from_address(address).src)
    while slots and slots[-1] is None:
        slots.pop()
    return slots


def node(key: Key, address: int) -> Node:
    """The node at `address`, described."""
    lib, buft = library(), _buffer_type(address)
    device = lib.ggml_backend_buft_get_device(buft) if buft else None
    return Node(
        key,
        operand(address),
        tuple(operand(s) for s in sources(address) if s),
        lib.ggml_backend_dev_name(device).decode() if device else "CPU",
    )


def shape(address: int) -> Shape:
    """The shape of the tensor, in ggml's order."""
    return tuple(Tensor.from_address(address).ne)


def values(address: int) -> Array:
    """A copy of the tensor's values: numpy's order of axes (the last is ggml's first), gaps and permutation undone."""
    lib, tensor = library(), Tensor.from_address(address)
    raw = np.empty(lib.ggml_nbytes(address), np.uint8)
    lib.ggml_backend_tensor_get(address, raw.ctypes.data, 0, raw.nbytes)
    ne = list(tensor.ne)[::-1]
    ne[-1] //= lib.ggml_blck_size(tensor.type)
    return np.ndarray(ne, ggml.item_type(tensor.type), raw, strides=list(tensor.nb)[::-1])


def memory_order(address: int) -> tuple[int, ...]:
    """ggml's axes of the tensor, from the one that lies closest in memory."""
    tensor = Tensor.from_address(address)
    return tuple(
        sorted(range(DIMENSIONS), key=lambda axis: (tensor.ne[axis] == 1, tensor.nb[axis]))
    )


def rows_axis(one: Shape, many: Shape, width: int) -> int | None:
    """ggml's axis along which a tensor of shape `one` at width 1 has `width` rows in shape `many`; None without one."""
    axes = [axis for axis in range(DIMENSIONS) if one[axis] != many[axis]]
    if len(axes) == 1 and (one[axes[0]], many[axes[0]]) == (1, width):
        return axes[0]
    return None


Visit = Callable[[Key, int], None]


def _pass(_key: Key, _address: int) -> None:
    """Look at nothing."""


class Watcher:
    """A `cb_eval` that shows every node that computes something, before and after it is computed.

    Outside `watching` it asks for nothing, and llama.cpp computes whole graphs as it does without a callback. `change`,
    if given, sees every node after it is computed and before anybody else does; planted faults come in there.
    """

    def __init__(self, change: Visit | None = None) -> None:
        self._lib = library()
        self._change = change
        self._before: Visit = _pass
        self._after: Visit = _pass
        self._watching = change is not None
        self._seen: Counter[tuple[str, str]] = Counter()
        self._key = Key("", "", 0)
        self._error: BaseException | None = None
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._call)

    @contextmanager
    def watching(self, before: Visit = _pass, after: Visit = _pass) -> Iterator[None]:
        """Inside the block, which is to evaluate one micro-batch, `before` and `after` are called for every node.

        Raises what they raised.
        """
        self._before, self._after, self._watching = before, after, True
        self._seen.clear()
        try:
            yield
        except EngineFault:
            if self._error is None:
                raise
        finally:
            self._before = self._after = _pass
            self._watching = self._change is not None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self, address: int, asking: bool, _user: int | None) -> bool:
        if not self._watching:
            return False
        try:
            return self._visit(address, asking)
        except BaseException as error:  # ctypes would print it and go on
            self._error = self._error or error
            return False

    def _visit(self, address: int, asking: bool) -> bool:
        if asking:
            name = Tensor.from_address(address).name.decode("utf-8", "replace")
            op = self._lib.ggml_op_desc(address).decode()
            if op in MOVES:
                return False
            name = "" if _UNNAMED.fullmatch(name.partition(" (")[0]) else name
            self._key = Key(name, op, self._seen[name, op])
            self._seen[name, op] += 1
            self._before(self._key, address)
        else:
            if self._change is not None:
                self._change(self._key, address)
            self._after(self._key, address)
        return True


def write(address: int, data: Array) -> None:
    """Overwrite the values of a contiguous tensor."""
    packed = np.ascontiguousarray(data)
    library().ggml_backend_tensor_set(address, packed.ctypes.data, 0, packed.nbytes)
