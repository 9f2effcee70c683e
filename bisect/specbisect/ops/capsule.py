"""An op capsule: the node that departs, taken out of its model, with its weight and the activations of the case.

Small enough to attach to an issue, and ggml alone shows the difference. What is left of the weight is the smallest
block of rows that departs at exactly the widths at which all of it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specbisect.errors import EngineFault
from specbisect.llama import files
from specbisect.ops import tensors
from specbisect.ops.clean import Trial
from specbisect.ops.ggml import DIMENSIONS, Tensor, Unusable
from specbisect.ops.operation import (
    Array,
    Bench,
    Difference,
    Gguf,
    Operation,
    Source,
    differences,
)
from specbisect.ops.tensors import Key, Node, rows_axis
from specbisect.ops.trace import Tracer, same_bits

PLACES = 8
"""Rows of the weight around which blocks of each size are tried."""

_PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")


@dataclass(frozen=True, slots=True)
class Capsule:
    """One departing node by itself.

    `differences` says for every width how the batch differs from single rows. `faithful` is whether the whole node
    gives the very bits here that it gave inside the model, as a batch and as every single row that read the same there.
    `block` names the rows of the weight that are kept, None when all are.
    """

    node: Node
    operation: Operation
    differences: tuple[Difference, ...]
    faithful: bool
    block: range | None = None

    @property
    def departs(self) -> list[int]:
        """Widths at which bits differ."""
        return [d.width for d in self.differences if d.values]

    @property
    def is_product(self) -> bool:
        """Whether it multiplies a matrix with the rows of the batch."""
        return self.operation.op in _PRODUCTS

    @property
    def size(self) -> int:
        """Bytes of data."""
        return sum(s.data.nbytes for s in self.operation.sources if s is not None)

    def described(self) -> str:
        """The operation as ``test-backend-ops`` writes it, at the smallest width that departs."""
        return described(self.operation, min(self.departs, default=self.operation.width))


def take(tracer: Tracer, tokens: Sequence[int], key: Key) -> Capsule:
    """The node `key` of the batch `tokens` that follows the tracer's history, with the whole of its weight.

    Raises `EngineFault` with stage ``capsule`` when it has an input that cannot be read, or that changes its shape with
    the width unlike a batch does, or when ggml cannot compute it alone.
    """
    with tracer.state.trial() as trial:
        one = _Caught(tracer, trial, tokens[:1], key)
    with tracer.state.trial() as trial:
        many = _Caught(tracer, trial, tokens, key)
    with tracer.state.trial() as trial:
        singles = [_Caught(tracer, trial, [token], key) for token in tokens]
    operation = many.operation(one)
    try:
        with Bench(operation) as bench:
            faithful = same_bits(bench.rows(0, operation.width), many.rows(operation.rows))
            for row, single in enumerate(singles):
                if single.read(operation, row):
                    alone = bench.rows(row, row + 1)
                    faithful &= same_bits(alone, single.rows(operation.rows))
        found = differences(operation, range(2, operation.width + 1))
    except Unusable as reason:
        raise EngineFault("capsule", str(reason)) from None
    return Capsule(many.node, operation, tuple(found), faithful)


def smallest(whole: Capsule) -> Capsule:
    """The capsule with the smallest block of weight rows that departs at the same widths; `whole` if none does."""
    if not whole.is_product or not whole.departs:
        return whole
    block = _smallest_block(whole.operation, whole.departs)
    if block is None:
        return whole
    part = rows_of_weight(whole.operation, block)
    found = differences(part, [d.width for d in whole.differences])
    return replace(whole, operation=part, differences=tuple(found), block=block)


class _Caught:
    """A node in one evaluation: what it read, seen before it was computed, and its result."""

    def __init__(
        self,
        tracer: Tracer,
        trial: Trial,
        tokens: Sequence[int],
        key: Key,
    ) -> None:
        self.context = tracer.state.context
        self.width = len(tokens)
        self.sources: list[Source | None] = []
        found: list[tuple[Node, Tensor, Array]] = []

        def before(seen: Key, address: int) -> None:
            if seen == key:
                self.sources = [self._source(at) if at else None for at in tensors.sources(address)]

        def after(seen: Key, address: int) -> None:
            if seen == key:
                copy = Tensor.from_buffer_copy(Tensor.from_address(address))
                found.append((tensors.node(key, address), copy, tensors.values(address)))

        with tracer.watcher.watching(before, after):
            trial.decode(tokens)
        if not found:
            raise EngineFault(
                "capsule", f"no node {key.name or key.op} in a batch of {len(tokens)}"
            )
        self.node, self.fields, self.result = found[0]

    def _source(self, address: int) -> Source:
        about = tensors.operand(address)
        buffer = about.buffer if about.repacked else ""
        if (stored := self._in_file(address)) is not None:
            return replace(stored, buffer=buffer)
        if about.repacked:
            raise EngineFault("capsule", f"{about.name} is repacked, and the model's file lacks it")
        return Source(
            about.name,
            Tensor.from_address(address).type,
            about.ne,
            tensors.values(address),
            order=tensors.memory_order(address),
        )

    def _in_file(self, address: int) -> Source | None:
        """The tensor as the model's file has it: what a kernel has repacked cannot be read back."""
        tensor = Tensor.from_address(address)
        for path in files.parts(self.context.model.path):
            with Gguf(str(path)) as file:
                found = file.tensor(tensor.name.decode())
            if found and (found.type, found.ne) == (tensor.type, tuple(tensor.ne)):
                return found
        return None

    def rows(self, axis: int) -> Array:
        """The result with ggml's `axis` first."""
        return np.moveaxis(self.result, DIMENSIONS - 1 - axis, 0)

    def read(self, operation: Operation, row: int) -> bool:
        """Whether this single row read just what that row of `operation` reads; a weight from the file is the same."""
        pairs = zip(self.sources, operation.sources, strict=True)
        return all(
            mine is not None and same_bits(mine.data, its.part(row, row + 1).data)
            for mine, its in pairs
            if its is not None and not isinstance(its.data, np.memmap)
        )

    def operation(self, one: "_Caught") -> Operation:
        """This node by itself; `one` is the same node at width 1, which shows what grows with the batch."""
        sources: list[Source | None] = []
        for source, single in zip(self.sources, one.sources, strict=True):
            if source is None or single is None or source.ne == single.ne:
                sources.append(source)
                continue
            rows = rows_axis(single.ne, source.ne, self.width)
            if rows is None:
                raise EngineFault("capsule", f"{source.name} does not grow with the batch by rows")
            sources.append(replace(source, rows=rows))
        rows = rows_axis(tuple(one.fields.ne), tuple(self.fields.ne), self.width)
        if rows is None:
            raise EngineFault("capsule", f"{self.node} has no row for every token")
        return Operation(
            op=tensors.library().ggml_op_name(self.fields.op).decode(),
            number=self.fields.op,
            params=tuple(self.fields.op_params),
            sources=tuple(sources),
            type=self.fields.type,
            ne=tuple(self.fields.ne),
            rows=rows,
            device=self.node.device,
            n_threads=self.context.resolved["n_threads"],
            n_threads_batch=self.context.resolved["n_threads_batch"],
        )


def rows_of_weight(operation: Operation, block: range) -> Operation:
    """A matrix product with only these rows of its matrix, and so only these values of every result."""
    weight, *others = operation.sources
    assert weight is not None
    part = weight.cut(1, block.start, block.stop)
    ne = (len(block), *operation.ne[1:])
    return replace(operation, sources=(part, *others), ne=ne)


def _smallest_block(operation: Operation, wanted: list[int]) -> range | None:
    """Sizes are powers of two; blocks are tried around the rows that depart at most widths."""
    with Bench(operation) as bench:
        singles = bench.singles()
        counts = np.zeros(operation.ne[0], np.int64)
        for width in wanted:
            counts += (bench.rows(0, width) != singles[:width]).any(axis=(0, 1, 2))
    places = np.argsort(-counts, kind="stable")[:PLACES]
    whole = operation.ne[0]
    for size in (1 << i for i in range((whole - 1).bit_length())):
        for start in dict.fromkeys(int(place) // size * size for place in places):
            block = range(start, min(start + size, whole))
            try:
                part = differences(rows_of_weight(operation, block), range(2, operation.width + 1))
            except Unusable:  # such as rows that cannot be repacked by themselves
                continue
            if [d.width for d in part if d.values] == wanted:
                return block
    return None


def described(operation: Operation, n: int) -> str:
    """The operation for `n` rows as ``test-backend-ops`` writes it, as far as that names such operations."""
    name, a, b = operation.op, *(*operation.sources, None, None)[:2]
    if operation.op == "MUL_MAT" and a and b:
        batches = f"bs=[{a.ne[2]},{a.ne[3]}],nr=[{b.ne[2] // a.ne[2]},{b.ne[3] // a.ne[3]}]"
        sizes = f"m={operation.ne[0]},n={n},k={a.ne[0]},{batches}"
        return f"{name}(type_a={_type(a)},type_b={_type(b)},{sizes})"
    if operation.op == "MUL_MAT_ID" and a and b:
        sizes = f"n_mats={a.ne[2]},n_used={operation.ne[1]},b={int(b.ne[1] == 1)},m={operation.ne[0]},n={n},k={a.ne[0]}"
        return f"{name}(type_a={_type(a)},type_b={_type(b)},{sizes})"
    if operation.op == "FLASH_ATTN_EXT" and a and b:
        v = operation.sources[2] or b
        heads = f"nh={b.ne[2]},nr23=[{a.ne[2] // b.ne[2]},{a.ne[3] // b.ne[3]}]"
        sizes = f"hsk={b.ne[0]},hsv={v.ne[0]},{heads},kv={b.ne[1]},nb={n},mask={int(len(operation.sources) > 3)}"
        return f"{name}({sizes},type_K={_type(b)},type_V={_type(v)})"
    ne = [*operation.ne[: operation.rows], n, *operation.ne[operation.rows + 1 :]]
    kind = tensors.library().ggml_type_name(operation.type).decode()
    return f"{name}(type={kind},ne=[{','.join(map(str, ne))}])"


def _type(source: Source) -> str:
    name: bytes = tensors.library().ggml_type_name(source.type)
    return name.decode()
