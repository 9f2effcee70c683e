"""Node traces of tiny models: what they say agrees with the logits, for every architecture."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specbisect.errors import BadInput
from specbisect.llama.context import Settings
from specbisect.llama.model import LoadedModel
from specbisect.ops import tensors
from specbisect.ops.clean import CleanState
from specbisect.ops.trace import NODE_TRACE, NodeError, NodeTrace, Tracer, size_of_change

SETTINGS = Settings(n_ctx=256, n_batch=64, n_ubatch=16, n_threads=1)
PROMPT = tuple(range(40, 60))
TOKENS = tuple(range(80, 89))
KINDS = ["llama", "moe", "swa", "recurrent", "hybrid"]


@pytest.fixture(
    params=[(kind, quant) for kind in KINDS for quant in ("BF16", "Q4_K_M")], ids="-".join
)
def model(
    request: pytest.FixtureRequest, tiny_models: Callable[..., Path]
) -> Iterator[LoadedModel]:
    with LoadedModel(tiny_models(*request.param)) as loaded:
        yield loaded


def logits_differ(model: LoadedModel, width: int) -> bool:
    """Whether a batch gives other logits than single rows do; found without a watcher."""
    with CleanState(model, SETTINGS) as state:
        state.read(PROMPT)
        batch = state.batch(TOKENS[:width]).copy()
        single = np.stack([state.step(token).copy() for token in TOKENS[:width]])
    return batch.tobytes() != single.tobytes()


def test_a_trace_says_what_the_logits_say(model: LoadedModel) -> None:
    with Tracer(model, SETTINGS, PROMPT) as tracer:
        traces = tracer.traces(TOKENS, [2, 3, 5, 9])
    for trace in traces:
        assert trace.transparent
        assert trace.position == len(PROMPT)
        assert trace.compared > 0.5 * trace.nodes
        if trace.first is None:
            assert not trace.errors
            assert not logits_differ(model, trace.width)
        else:
            assert trace.first.largest > 0
            assert 0 <= trace.first.row < trace.width
            assert trace.errors[-1].key.name == "result_output"
            if trace.errors[-1].largest:
                assert logits_differ(model, trace.width)


def test_one_width_and_many_say_the_same(model: LoadedModel) -> None:
    with Tracer(model, SETTINGS, PROMPT[:5], PROMPT[5:]) as tracer:
        many = tracer.traces(TOKENS, [4, 9])
        assert [tracer.trace(TOKENS[:4]), tracer.trace(TOKENS)] == many


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_every_layer_is_seen(tiny_models: Callable[..., Path], flash_attn: str) -> None:
    """A node that is wrong from the beginning shows in every layer, and errors are of the size planted."""

    def double(key: tensors.Key, address: int) -> None:
        if key.name == "embd" and tensors.shape(address)[1] == len(TOKENS):
            tensors.write(address, 2 * tensors.values(address))

    settings = Settings(n_ctx=256, n_ubatch=16, n_threads=1, flash_attn=flash_attn)  # type: ignore[arg-type]
    with (
        LoadedModel(tiny_models("swa", "Q8_0")) as model,
        Tracer(model, settings, PROMPT, change=double) as tracer,
    ):
        trace = tracer.trace(TOKENS, row=2)
    assert trace.first
    assert (trace.first.node.key.name, trace.first.node.key.op) == ("embd", "GET_ROWS")
    assert trace.first.relative == pytest.approx(1)
    assert trace.row == 2
    assert [e.layer for e in trace.by_layer()] == [0, 1, 2, 3, None]
    attention = {e.key.op for e in trace.errors if e.layer == 1} & {"FLASH_ATTN_EXT", "SOFT_MAX"}
    assert attention == {"FLASH_ATTN_EXT" if flash_attn == "on" else "SOFT_MAX"}


def test_nodes_are_described(tiny_models: Callable[..., Path]) -> None:
    watcher, nodes = tensors.Watcher(), dict[tensors.Key, tensors.Node]()

    def describe(key: tensors.Key, address: int) -> None:
        nodes[key] = tensors.node(key, address)

    with (
        LoadedModel(tiny_models("moe", "Q8_0"), use_extra_bufts=False) as model,
        CleanState(model, SETTINGS, cb_eval=watcher.callback) as state,
    ):
        state.read(PROMPT)
        with watcher.watching(after=describe):
            state.batch(TOKENS[:2])
    node = nodes[tensors.Key("ffn_moe_gate-1", "MUL_MAT_ID", 0)]
    assert str(node) == "MUL_MAT_ID q8_0×f32, blk.1.ffn_gate_exps"
    assert node.key.layer == 1
    assert node.device == "CPU"
    assert (node.result.type, node.result.ne) == ("f32", (256, 2, 2, 1))
    assert [(s.type, s.ne) for s in node.sources] == [
        ("q8_0", (256, 256, 4, 1)),
        ("f32", (256, 1, 2, 1)),
        ("i32", (2, 2, 1, 1)),
    ]
    attention = nodes[tensors.Key("", "FLASH_ATTN_EXT", 1)]
    assert str(attention) == "FLASH_ATTN_EXT f32×f16, Qcur-1"
    assert attention.key.layer is None


@pytest.mark.parametrize("width", [1, 17])
def test_widths_that_are_no_batch_are_refused(tiny_models: Callable[..., Path], width: int) -> None:
    with (
        LoadedModel(tiny_models("llama")) as model,
        Tracer(model, SETTINGS, PROMPT) as tracer,
        pytest.raises(BadInput, match="choose a width from 2 to"),
    ):
        tracer.trace(range(100, 100 + width))


def test_a_history_that_does_not_fit_is_refused(tiny_models: Callable[..., Path]) -> None:
    with (
        LoadedModel(tiny_models("llama")) as model,
        pytest.raises(BadInput, match="300 tokens do not fit into n_ctx = 256; raise it"),
    ):
        Tracer(model, SETTINGS, [5] * 300)


def test_what_a_look_raises_is_raised(tiny_models: Callable[..., Path]) -> None:
    def fail(_key: tensors.Key, _address: int) -> None:
        raise ZeroDivisionError("planted")

    watcher = tensors.Watcher()
    with (
        LoadedModel(tiny_models("llama")) as model,
        CleanState(model, SETTINGS, cb_eval=watcher.callback) as state,
    ):
        state.read(PROMPT)
        with pytest.raises(ZeroDivisionError, match="planted"), watcher.watching(after=fail):
            state.batch(TOKENS)


def test_a_trace_is_the_same_after_json() -> None:
    errors = (
        NodeError(tensors.Key("a-0", "ADD", 0), 0, 1.0, 0.5),
        NodeError(tensors.Key("b", "MUL", 0), None, 2.0, 1.5),
    )
    trace = NodeTrace(4, 20, None, 3, errors, 10, 12, True)
    assert NODE_TRACE.validate_json(NODE_TRACE.dump_json(trace)) == trace
    assert trace.jumps() == [(errors[1], 3.0)]
    assert trace.by_layer() == list(errors)
    assert [trace.order(e.key) for e in errors] == [0, 1]


def test_masked_values_do_not_count() -> None:
    inf = np.float32("inf")
    one, other = np.array([3, 4, -inf], np.float32), np.array([3, 5, -inf], np.float32)
    largest, relative = size_of_change([(other, one)])
    assert largest == 1
    assert relative == pytest.approx((1 / 3) ** 0.5 / (25 / 2) ** 0.5)
