"""One ggml operation by itself: made anew from its description and data, and computed for any number of rows."""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from specbisect.ops.ggml import (
    DIMENSIONS,
    GgufParams,
    Tensor,
    Unusable,
    device_named,
    extra_buffer_types,
    item_type,
    load,
    new_context,
    new_tensor,
    scratch,
)

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """An input of an operation.

    `data` has the axes of the tensor in numpy's order (the last is ggml's first) and counts blocks along it. `order`
    names ggml's axes from the one that lies closest in memory; `rows` is the axis (ggml's) that grows with the
    batch, None for a weight or a cache. `buffer` is the buffer type it lies in.
    """

    name: str
    type: int
    ne: Shape
    data: Array
    rows: int | None = None
    order: tuple[int, ...] = (0, 1, 2, 3)
    buffer: str = ""

    def part(self, start: int, stop: int) -> "Source":
        """The source for rows `start` to `stop` of the batch."""
        return self if self.rows is None else self.cut(self.rows, start, stop)

    def cut(self, axis: int, start: int, stop: int) -> "Source":
        """Only what lies between `start` and `stop` along ggml's `axis`."""
        at = [slice(None)] * DIMENSIONS
        at[DIMENSIONS - 1 - axis] = slice(start, stop)
        ne = (*self.ne[:axis], stop - start, *self.ne[axis + 1 :])
        return replace(self, ne=ne, data=self.data[tuple(at)])

    def packed(self) -> Array:
        """The bytes as they are to lie in memory, without gaps."""
        axes = [DIMENSIONS - 1 - axis for axis in reversed(self.order)]
        return np.ascontiguousarray(self.data.transpose(axes))


class Gguf:
    """Texts and tensors of a GGUF file, found by ggml's own reader; a context manager."""

    def __init__(self, path: str) -> None:
        self.lib = load()
        self.path = path
        ctx = ctypes.c_void_p()
        params = GgufParams(True, ctypes.pointer(ctx))
        self._file = self.lib.gguf_init_from_file(path.encode(), params)
        if not self._file:
            raise Unusable(f"{path} is not a GGUF file")
        self._ctx = ctx

    def text(self, key: str) -> str:
        """The string at `key`; empty when there is none."""
        index = self.lib.gguf_find_key(self._file, key.encode())
        return self.lib.gguf_get_val_str(self._file, index).decode() if index >= 0 else ""

    def tensor(self, name: str) -> Source | None:
        """The tensor of that name, None when there is none; its data are read when they are used."""
        lib = self.lib
        index = lib.gguf_find_tensor(self._file, name.encode())
        if index < 0:
            return None
        known = Tensor.from_address(lib.ggml_get_tensor(self._ctx, name.encode()))
        ne, dtype = tuple(known.ne), item_type(known.type)
        start = lib.gguf_get_data_offset(self._file) + lib.gguf_get_tensor_offset(self._file, index)
        shape = (*ne[:0:-1], ne[0] // lib.ggml_blck_size(known.type))
        return Source(name, known.type, ne, np.memmap(self.path, dtype, "r", start, shape))

    def __enter__(self) -> "Gguf":
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.gguf_free(self._file)
        self.lib.ggml_free(self._ctx)


KEY = "specbisect.operation"
_FACTS = ("op", "number", "params", "type", "ne", "rows", "device", "n_threads", "n_threads_batch")


@dataclass(frozen=True)
class Operation:
    """One node of a graph with its inputs: all that ggml needs to compute it again.

    `sources` stand in the slots of the node; None is an empty slot. `type`, `ne` and `rows` describe the result as
    in `Source`. `device` is ggml's name of where it ran; if that is a CPU, a single row on `n_threads` threads and
    more rows on `n_threads_batch`.
    """

    op: str
    number: int
    params: tuple[int, ...]
    sources: tuple[Source | None, ...]
    type: int
    ne: Shape
    rows: int
    device: str = "CPU"
    n_threads: int = 1
    n_threads_batch: int = 1

    @property
    def width(self) -> int:
        """Rows in the batch."""
        return self.ne[self.rows]

    def to_json(self) -> str:
        """Everything but the data of the sources."""
        facts = {name: getattr(self, name) for name in _FACTS} | {"sources": []}
        for source in self.sources:
            about = source and {n: getattr(source, n) for n in ("name", "rows", "order", "buffer")}
            facts["sources"].append(about)
        return json.dumps(facts)

    @classmethod
    def read(cls, file: "Gguf") -> "Operation":
        """The operation in a capsule: a file with its JSON at `KEY` and the data of slot i as tensor ``source.i``."""
        text = file.text(KEY)
        if not text:
            raise Unusable(f"{file.path} holds no operation")
        facts = json.loads(text)
        sources: list[Source | None] = []
        for slot, about in enumerate(facts["sources"]):
            found = about and file.tensor(f"source.{slot}")
            if about and not found:
                raise Unusable(f"{file.path} lacks source {slot} of its operation")
            order = about and tuple(about["order"])
            sources.append(found and replace(found, **(about | {"order": order})))
        shapes = {name: tuple(facts[name]) for name in ("params", "ne")}
        return cls(**(facts | shapes | {"sources": tuple(sources)}))


class Bench:
    """A device set up for one operation; computes it for any of its rows. A context manager.

    Raises `Unusable` when this build numbers operations differently, or the device cannot do the operation.
    """

    def __init__(self, operation: Operation) -> None:
        self.lib = lib = load()
        self.operation = operation
        if lib.ggml_op_name(operation.number) != operation.op.encode():
            raise Unusable(f"this build's operation {operation.number} is not {operation.op}")
        self._device = device_named(lib, operation.device)
        self._plain = lib.ggml_backend_dev_buffer_type(self._device)
        self._backend = lib.ggml_backend_dev_init(self._device, None)
        if not self._backend:
            raise Unusable(f"device {operation.device} does not start")
        self._contexts: list[Any] = []
        self._buffers: list[Any] = []
        self._sources = {i: s for i, s in enumerate(operation.sources) if s is not None}
        try:
            fixed = {i: s for i, s in self._sources.items() if s.rows is None}
            self._constants = {slot: self._constant(source) for slot, source in fixed.items()}
            with scratch(
                lib
            ) as ctx:  # asked before the data go in: repacking aborts where it cannot
                node, _ = self._node(ctx, 0, 1)
                if not lib.ggml_backend_dev_supports_op(self._device, node):
                    raise Unusable(f"{operation.device} cannot do this {operation.op}")
            for slot, source in fixed.items():
                self._fill(self._constants[slot], source)
        except BaseException:
            self.close()
            raise

    def _set_threads(self, n: int) -> None:
        reg = self.lib.ggml_backend_dev_backend_reg(self._device)
        address = self.lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_set_n_threads")
        if address:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(self._backend, n)

    def _constant(self, source: Source) -> int:
        extra = extra_buffer_types(self.lib, self._device)
        ctx = new_context(self.lib)
        self._contexts.append(ctx)
        tensor = self._describe(ctx, source)
        self._allocate(ctx, extra.get(source.buffer, self._plain), self._buffers)
        return tensor

    def _describe(self, ctx: Any, source: Source) -> int:
        """A tensor like `source`, without memory yet."""
        tensor = new_tensor(self.lib, ctx, source.type, source.ne)
        self.lib.ggml_set_name(tensor, source.name.encode()[:63])
        block, size = self.lib.ggml_blck_size(source.type), self.lib.ggml_type_size(source.type)
        for axis in source.order:
            Tensor.from_address(tensor).nb[axis] = size
            size *= source.ne[axis] // (block if axis == 0 else 1)
        return tensor

    def _allocate(self, ctx: Any, buft: int, buffers: list[Any]) -> None:
        buffer = self.lib.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)
        if not buffer:
            raise Unusable("out of memory")
        buffers.append(buffer)

    def _fill(self, tensor: int, source: Source) -> None:
        data = source.packed()
        self.lib.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def _node(self, ctx: Any, start: int, stop: int) -> tuple[int, dict[int, int]]:
        """The operation on rows `start` to `stop`, and its tensors that grow with the batch, by slot."""
        what = self.operation
        varying = {
            slot: self._describe(ctx, source.part(start, stop))
            for slot, source in self._sources.items()
            if slot not in self._constants
        }
        ne = (*what.ne[: what.rows], stop - start, *what.ne[what.rows + 1 :])
        node = new_tensor(self.lib, ctx, what.type, ne)
        fields = Tensor.from_address(node)
        fields.op = what.number
        fields.op_params[:] = what.params
        for slot, tensor in (self._constants | varying).items():
            fields.src[slot] = tensor
        return node, varying

    def rows(self, start: int, stop: int) -> Array:
        """The result for rows `start` to `stop` of the batch, computed as one batch; the first axis counts rows."""
        lib, what = self.lib, self.operation
        self._set_threads(what.n_threads if stop - start == 1 else what.n_threads_batch)
        buffers: list[Any] = []
        with scratch(lib) as ctx:
            node, varying = self._node(ctx, start, stop)
            graph = lib.ggml_new_graph(ctx)
            lib.ggml_build_forward_expand(graph, node)
            try:
                self._allocate(ctx, self._plain, buffers)
                for slot, tensor in varying.items():
                    self._fill(tensor, self._sources[slot].part(start, stop))
                if lib.ggml_backend_graph_compute(self._backend, graph) != 0:
                    raise Unusable(f"ggml failed to compute {what.op}")
                shape = tuple(Tensor.from_address(node).ne)[::-1]
                result = np.empty(shape, item_type(what.type))
                lib.ggml_backend_tensor_get(node, result.ctypes.data, 0, result.nbytes)
            finally:
                for buffer in buffers:
                    lib.ggml_backend_buffer_free(buffer)
        return np.ascontiguousarray(np.moveaxis(result, DIMENSIONS - 1 - what.rows, 0))

    def singles(self) -> Array:
        """The result of every row computed by itself."""
        return np.concatenate([self.rows(i, i + 1) for i in range(self.operation.width)])

    def close(self) -> None:
        """Free everything. Idempotent."""
        while self._buffers:
            self.lib.ggml_backend_buffer_free(self._buffers.pop())
        while self._contexts:
            self.lib.ggml_free(self._contexts.pop())
        if self._backend:
            self.lib.ggml_backend_free(self._backend)
            self._backend = None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Difference:
    """How the rows of one batch differ from the same rows computed singly; all 0 when bit for bit the same.

    `values` counts the results that differ, `largest` is the largest absolute difference, `relative` that over the
    largest absolute result.
    """

    width: int
    values: int
    largest: float
    relative: float

    @classmethod
    def between(cls, batch: Array, singles: Array) -> "Difference":
        """Of results whose first axis counts rows. Bits count: equal NaNs are equal, 0 and −0 are not."""
        ones = singles[: len(batch)]
        bits = np.dtype((np.void, ones.itemsize))
        values = int((batch.view(bits) != ones.view(bits)).sum())
        if not values or ones.dtype.kind not in "fi":
            return cls(len(batch), values, 0.0, 0.0)
        exact = ones.astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            largest = float(np.fmax.reduce(np.abs(batch - exact), axis=None))
        return cls(
            len(batch),
            values,
            largest,
            largest / (float(np.fmax.reduce(np.abs(exact), axis=None)) or 1.0),
        )


def differences(operation: Operation, widths: Sequence[int]) -> list[Difference]:
    """The first w rows as one batch against each by itself, for every w of `widths` that the operation has rows for."""
    with Bench(operation) as bench:
        singles = bench.singles()
        return [
            Difference.between(bench.rows(0, w), singles) for w in widths if w <= operation.width
        ]
