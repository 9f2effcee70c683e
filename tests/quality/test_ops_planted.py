"""One node is made wrong at one width: a trace has to name it, every time, wherever in the graph it is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from specbisect.llama.context import Settings
from specbisect.llama.model import LoadedModel
from specbisect.ops import tensors
from specbisect.ops.clean import CleanState
from specbisect.ops.tensors import Key, Visit, Watcher, rows_axis
from specbisect.ops.trace import Tracer

PROMPT, TOKENS = tuple(range(40, 52)), (80, 90, 100)
WIDTH = len(TOKENS)
KINDS = ["llama", "moe", "swa", "recurrent", "hybrid"]
PLACES = 12
"""Nodes of each graph that are tried, spread over all of it."""


@dataclass(frozen=True)
class Graph:
    """Nodes of a model that may be made wrong, in the order of computation, with the axis that counts rows.

    Only those before the first node that departs by itself: what departs first is to be the planted one.
    """

    path: Path
    nodes: list[tuple[Key, int]]


def settings(flash_attn: str = "on") -> Settings:
    return Settings(n_ctx=256, n_batch=64, n_ubatch=16, n_threads=1, flash_attn=flash_attn)  # type: ignore[arg-type]


def graph(path: Path) -> Graph:
    watcher = Watcher()
    shapes: list[dict[Key, tuple[int, ...]]] = []
    floats: set[Key] = set()

    def note(key: Key, address: int) -> None:
        shapes[-1][key] = tensors.shape(address)
        if tensors.operand(address).type == "f32":
            floats.add(key)

    with (
        LoadedModel(path) as model,
        CleanState(model, settings(), cb_eval=watcher.callback) as state,
        Tracer(model, settings(), PROMPT) as tracer,
    ):
        state.read(PROMPT)
        for ids in (TOKENS[:1], TOKENS):
            shapes.append({})
            with watcher.watching(after=note):
                state.batch(ids)
        first = tracer.trace(TOKENS).first
    axes = [(key, rows_axis(shapes[0][key], ne, WIDTH)) for key, ne in shapes[1].items()]
    nodes = [(key, axis) for key, axis in axes if axis is not None and key in floats]
    keys = [key for key, _ in nodes]
    return Graph(path, nodes[: keys.index(first.node.key)] if first else nodes)


@pytest.fixture(params=KINDS)
def lively(request: pytest.FixtureRequest, tiny_models: Callable[..., Path]) -> Graph:
    """The model of that kind, in the type in which least of it departs by itself on this machine."""
    graphs = [graph(tiny_models(request.param, quant)) for quant in ("Q8_0", "Q4_0", "Q6_K")]
    return max(graphs, key=lambda g: len(g.nodes))


def wrong(wanted: Key, axis: int, rows: int) -> Visit:
    """Adds a little to one value of that node when it has that many rows."""

    def change(key: Key, address: int) -> None:
        if key == wanted and tensors.shape(address)[axis] == rows:
            values = tensors.values(address).copy()
            values.reshape(-1)[-1] += np.float32(0.5)
            tensors.write(address, values)

    return change


@pytest.mark.parametrize("rows", [WIDTH, 1], ids=["batch", "single"])
def test_the_wrong_node_is_named(lively: Graph, rows: int) -> None:
    step = max(1, len(lively.nodes) // PLACES)
    places = lively.nodes[::step]
    named = []
    with LoadedModel(lively.path) as model:
        for key, axis in places:
            with Tracer(model, settings(), PROMPT, change=wrong(key, axis, rows)) as tracer:
                first = tracer.trace(TOKENS).first
            named.append(first and first.node.key)
    assert places
    assert named == [key for key, _ in places]


def test_another_width_is_not_blamed(lively: Graph) -> None:
    key, axis = lively.nodes[0]
    with (
        LoadedModel(lively.path) as model,
        Tracer(model, settings(), PROMPT, change=wrong(key, axis, WIDTH)) as tracer,
    ):
        at_two, at_three = tracer.traces(TOKENS, [2, WIDTH])
    assert at_three.first
    assert at_three.first.node.key == key
    assert at_two.first is None or at_two.first.node.key != key
