"""Which node of the graph departs first between a batch and single rows, and how its error grows.

Both start from the same clean state. A first pass over each keeps 64 bits per node and row, so that equality is known
for all of them at once; a second keeps the values of the one row that ends furthest off. So no more of a large model
is ever held than a few rows of every node. The same single rows serve batches of all widths.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import numpy as np
import xxhash
from pydantic import TypeAdapter

from specbisect.errors import BadInput, EngineFault
from specbisect.llama.context import Logits, Settings, Tamper
from specbisect.llama.model import LoadedModel
from specbisect.ops import tensors
from specbisect.ops.clean import CleanState
from specbisect.ops.ggml import DIMENSIONS
from specbisect.ops.operation import Array, Shape
from specbisect.ops.tensors import Key, Node, Visit, Watcher, rows_axis


@dataclass(frozen=True, slots=True)
class NodeError:
    """How one node's row differs between the batch and the single row.

    `largest` is the largest absolute difference; `relative` the root mean square of the difference over that of the
    single row's values. `layer` is None before and after the layers.
    """

    key: Key
    layer: int | None
    largest: float
    relative: float


@dataclass(frozen=True, slots=True)
class Departure:
    """The first node, in the order of computation, whose result departs, with the first row where it does.

    `largest` and `relative` are as in `NodeError`, over all rows of the node.
    """

    node: Node
    row: int
    largest: float
    relative: float

    def __str__(self) -> str:
        return f"{self.node}, relative {self.relative:.0e}".replace("e-0", "e-")


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """One batch of `width` rows from position `position` on, node by node against single rows.

    `first` is None when every node is bit for bit the same. `errors` follows row `row` of the batch through all nodes,
    in the order of computation. `compared` counts nodes that have a row for every token, out of `nodes`. `transparent`
    says whether the logits are the same without a watcher; if not, fused kernels that it takes apart play a part.
    """

    width: int
    position: int
    first: Departure | None
    row: int
    errors: tuple[NodeError, ...]
    compared: int
    nodes: int
    transparent: bool

    def order(self, node: Key) -> int:
        """Where `node` comes in the computation, counted over `errors`; past the end for one that is not there."""
        return next((i for i, e in enumerate(self.errors) if e.key == node), len(self.errors))

    def by_layer(self) -> list[NodeError]:
        """The last node of every layer, then the last of all: how the error grows."""
        last = {e.layer: e for e in self.errors if e.layer is not None}
        tail = [e for e in self.errors[-1:] if e.layer is None]
        return [*last.values(), *tail]

    def jumps(self, n: int = 5) -> list[tuple[NodeError, float]]:
        """The nodes where the relative error grows most against the node before, with the factor; largest first."""
        pairs = zip(self.errors, self.errors[1:], strict=False)
        grown = [(b, b.relative / a.relative) for a, b in pairs if a.relative > 0]
        return sorted(grown, key=lambda pair: -pair[1])[:n]


NODE_TRACE = TypeAdapter(NodeTrace)
"""JSON both ways."""


class Tracer:
    """Traces batches that follow one history: `prompt` in batches, then `then` one by one. A context manager.

    `change` plants a fault in a node, `tamper` one in the logits that shows only when nobody watches. Raises
    `EngineFault` when tensors cannot be read, or when the backend gives other bits every time.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: Settings,
        prompt: Sequence[int],
        then: Sequence[int] = (),
        *,
        tamper: Tamper | None = None,
        change: Visit | None = None,
    ) -> None:
        self.watcher = Watcher(change)
        self.state = CleanState(model, settings, cb_eval=self.watcher.callback)
        self._plain = self.state if change else CleanState(model, settings, tamper=tamper)
        for state in {self.state, self._plain}:
            state.read(prompt, then)

    def trace(self, tokens: Sequence[int], row: int | None = None) -> NodeTrace:
        """Compare the batch `tokens` with the same tokens one by one; see `traces`."""
        return self.traces(tokens, [len(tokens)], row)[0]

    def traces(
        self, tokens: Sequence[int], widths: Sequence[int], row: int | None = None
    ) -> list[NodeTrace]:
        """Compare batches of the first w of `tokens`, for each w of `widths`, with the same tokens one by one.

        The errors follow `row`, or the row whose logits end furthest off. Raises `BadInput` for widths below 2, and
        for those that are split into several micro-batches: each of those is a batch of its own.
        """
        n_ubatch = self.state.context.resolved["n_ubatch"]
        limit = min(n_ubatch, len(tokens))
        if bad := [w for w in widths if not 1 < w <= limit]:
            raise BadInput(
                f"a batch of {bad[0]} rows cannot be traced with {len(tokens)} tokens and n_ubatch = {n_ubatch}; "
                f"choose a width from 2 to {limit}"
            )
        tokens = tokens[: max(widths)]
        axes = self._axes(tokens)
        # A product of a query with all keys also has those it must not attend to, which are masked afterwards. For
        # these to be equal too, the cells ahead have to hold the same keys: a round of single rows puts them there.
        self._singly(tokens)
        prints = [_Prints(axes) for _ in tokens]
        logits = self._singly(tokens, prints)
        batches = [_Batch(axes, prints[:width]) for width in widths]
        for batch in batches:
            batch.logits = self._batch(tokens[: batch.width], batch)
            batch.row = batch.worst(logits) if row is None else row
        rows = {batch.row for batch in batches if batch.first}
        nodes = {batch.first for batch in batches if batch.first}
        values = [_Values(axes, axes.keys() if i in rows else nodes) for i in range(len(tokens))]
        if nodes:
            self._singly(tokens, values)
        return [self._result(tokens, batch, values) for batch in batches]

    def widest_product(self, tokens: Sequence[int]) -> Key:
        """The product of a layer's weight with the batch `tokens` that adds up the longest rows."""
        found: dict[Key, int] = {}

        def look(key: Key, address: int) -> None:
            if key.op == "MUL_MAT":
                node = tensors.node(key, address)
                if node.weight and key.layer is not None:
                    found[key] = node.sources[0].ne[0]

        self._batch(tokens, look)
        if not found:
            raise EngineFault("trace", "no layer multiplies a weight with a batch")
        return max(found, key=lambda key: found[key])

    def _axes(self, tokens: Sequence[int]) -> dict[Key, int]:
        """ggml's axis that counts rows, of every node that has one."""
        one, many = _Shapes(), _Shapes()
        for shapes, ids in ((one, tokens[:1]), (many, tokens)):
            self._batch(ids, shapes)
        axes = {
            k: rows_axis(one.ne[k], ne, len(tokens)) for k, ne in many.ne.items() if k in one.ne
        }
        return {key: axis for key, axis in axes.items() if axis is not None}

    def _batch(self, tokens: Sequence[int], look: Visit) -> Logits:
        """Decode `tokens` in one batch, showing every node to `look`; a copy of their logits."""
        with self.state.trial() as trial, self.watcher.watching(after=look):
            return trial.decode(tokens).copy()

    def _singly(self, tokens: Sequence[int], looks: Sequence[Visit] = ()) -> Logits:
        """Decode `tokens` one by one, showing every node to the `looks` of its row; a copy of their logits."""
        rows = []
        with self.state.trial() as trial:
            for token, look in zip_longest(tokens, looks):
                with self.watcher.watching(after=look) if look else nullcontext():
                    rows.append(trial.decode([token]).copy())
        return np.concatenate(rows)

    def _result(
        self, tokens: Sequence[int], batch: "_Batch", singles: Sequence["_Values"]
    ) -> NodeTrace:
        tokens = tokens[: batch.width]
        first: Departure | None = None
        errors: tuple[NodeError, ...] = ()
        if batch.first:
            measured = _Measured(batch, singles)
            if not same_bits(self._batch(tokens, measured), batch.logits):
                raise EngineFault("trace", "this backend gives other bits each time for one batch")
            first, errors = measured.first, tuple(measured.errors)
        return NodeTrace(
            width=batch.width,
            position=self.state.position,
            first=first,
            row=batch.row,
            errors=errors,
            compared=len(batch.axes),
            nodes=batch.nodes,
            transparent=same_bits(self._plain.batch(tokens), batch.logits),
        )

    def close(self) -> None:
        """Free the contexts. Idempotent."""
        self.state.close()
        self._plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Shapes:
    """Shapes of all nodes, in the order of computation."""

    def __init__(self) -> None:
        self.ne: dict[Key, Shape] = {}

    def __call__(self, key: Key, address: int) -> None:
        self.ne[key] = tensors.shape(address)


class _Prints:
    """Of one single row: shape and fingerprint of every node that has rows."""

    def __init__(self, axes: Mapping[Key, int]) -> None:
        self.axes = axes
        self.found: dict[Key, tuple[Shape, int]] = {}

    def __call__(self, key: Key, address: int) -> None:
        if key in self.axes:
            found = tensors.values(address)
            self.found[key] = found.shape, fingerprint(found)


class _Batch:
    """Of one batch: the nodes that depart from the single rows, each with its first such row."""

    def __init__(self, axes: Mapping[Key, int], prints: Sequence[_Prints]) -> None:
        self.axes = axes
        self.prints = prints
        self.width = len(prints)
        self.nodes = 0
        self.departed: dict[Key, int] = {}
        self.logits: Logits = np.empty((0, 0), np.float32)
        self.row = 0

    def __call__(self, key: Key, address: int) -> None:
        self.nodes += 1
        if key not in self.axes:
            return
        rows = tensors.values(address)
        for row in range(self.width):
            one = row_of(rows, self.axes[key], row)
            # A row whose attention reaches into another block of cells has another shape: nothing to compare.
            shape, single = self.prints[row].found.get(key, ((), 0))
            if one.shape == shape and fingerprint(one) != single:
                self.departed.setdefault(key, row)

    @property
    def first(self) -> Key | None:
        """The first node that departs; nodes are seen in the order of computation."""
        return next(iter(self.departed), None)

    def worst(self, singles: Logits) -> int:
        """The row whose logits are furthest off."""
        change = np.abs(self.logits - singles[: self.width])
        return int(np.nan_to_num(change, nan=np.inf).max(axis=1).argmax())


class _Values:
    """Of one single row: the values of `nodes`."""

    def __init__(self, axes: Mapping[Key, int], nodes: Collection[Key]) -> None:
        self.axes = axes
        self.nodes = nodes
        self.found: dict[Key, Array] = {}

    def __call__(self, key: Key, address: int) -> None:
        if key in self.nodes:
            self.found[key] = tensors.values(address)


class _Measured:
    """Of one batch: how its row departs in every node, and how the node that departs first does in all rows."""

    def __init__(self, batch: _Batch, singles: Sequence[_Values]) -> None:
        self.batch = batch
        self.singles = singles
        self.errors: list[NodeError] = []
        self.first: Departure | None = None
        self._layer: int | None = None

    def __call__(self, key: Key, address: int) -> None:
        if key not in self.batch.axes:
            return
        rows = tensors.values(address)
        # A nameless node belongs to the layer of the node before it.
        self._layer = key.layer if key.name else self._layer
        if pairs := self._pairs(key, rows, [self.batch.row]):
            self.errors.append(NodeError(key, self._layer, *size_of_change(pairs)))
        if key == self.batch.first:
            change = size_of_change(self._pairs(key, rows, range(self.batch.width)))
            node, row = tensors.node(key, address), self.batch.departed[key]
            self.first = Departure(node, row, *change)

    def _pairs(self, key: Key, rows: Array, wanted: Iterable[int]) -> list[tuple[Array, Array]]:
        """Rows of the batch with the single ones, where both have one of the same shape."""
        ones = [
            (row_of(rows, self.batch.axes[key], i), self.singles[i].found.get(key)) for i in wanted
        ]
        return [(a, b) for a, b in ones if b is not None and a.shape == b.shape]


def row_of(rows: Array, axis: int, row: int) -> Array:
    """Row `row` along ggml's `axis`, which stays, with length 1."""
    at = [slice(None)] * DIMENSIONS
    at[DIMENSIONS - 1 - axis] = slice(row, row + 1)
    return rows[tuple(at)]


def fingerprint(data: Array) -> int:
    """64 bits of the values, however they lie in memory."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays hold the same bits: equal NaNs are equal."""
    return a.shape == b.shape and fingerprint(a) == fingerprint(b)


def size_of_change(pairs: Sequence[tuple[Array, Array]]) -> tuple[float, float]:
    """Largest absolute difference, and its root mean square over that of the second of each pair.

    NaN for a type that numpy does not know: there, only equality was compared.
    """
    if pairs[0][0].dtype.kind not in "fi":
        return float("nan"), float("nan")
    many, exact = (np.concatenate([p[i].ravel() for p in pairs]).astype(np.float64) for i in (0, 1))
    with np.errstate(invalid="ignore"):  # masked values are infinite
        change = np.where(many == exact, 0.0, many - exact)
    finite = exact[np.isfinite(exact)]
    scale = np.sqrt(np.mean(finite**2)) if finite.size else 0.0
    return float(np.abs(change).max()), float(np.sqrt(np.mean(change**2)) / (scale or 1.0))
