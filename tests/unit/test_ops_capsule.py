"""Operations taken out of tiny models compute what they computed inside, and their programs say what was found."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specbisect.errors import EngineFault
from specbisect.llama.context import Settings
from specbisect.llama.model import LoadedModel
from specbisect.ops import invariance, tensors
from specbisect.ops.capsule import Capsule, described, rows_of_weight, smallest, take
from specbisect.ops.ggml import Unusable
from specbisect.ops.operation import Bench, Gguf, Operation, differences
from specbisect.ops.tensors import Key
from specbisect.ops.trace import Tracer
from specbisect.report import capsule as files

SETTINGS = Settings(n_ctx=256, n_batch=64, n_ubatch=16, n_threads=1)
PROMPT, TOKENS = tuple(range(40, 60)), tuple(range(80, 92))
KINDS_OF_NODES = [
    ("llama", "on", Key("ffn_out-1", "MUL_MAT", 0)),
    ("llama", "on", Key("Qcur-0", "ROPE", 0)),
    ("llama", "on", Key("", "FLASH_ATTN_EXT", 1)),
    ("llama", "off", Key("kq-1", "MUL_MAT", 0)),
    ("llama", "off", Key("kq_soft_max-0", "SOFT_MAX", 0)),
    ("moe", "on", Key("ffn_moe_down-1", "MUL_MAT_ID", 0)),
    ("moe", "on", Key("ffn_moe_swiglu-0", "SWIGLU", 0)),
    ("swa", "on", Key("norm-2", "RMS_NORM", 0)),
]


def taken(path: Path, key: Key, flash_attn: str = "on") -> Capsule:
    settings = replace(SETTINGS, flash_attn=flash_attn)
    with LoadedModel(path) as model, Tracer(model, settings, PROMPT) as tracer:
        return take(tracer, TOKENS, key)


@pytest.mark.parametrize("quant", ["BF16", "Q4_K_M"])
@pytest.mark.parametrize(("kind", "flash_attn", "key"), KINDS_OF_NODES)
def test_a_node_alone_gives_the_bits_it_gave_inside(
    tiny_models: Callable[..., Path], kind: str, flash_attn: str, key: Key, quant: str
) -> None:
    capsule = taken(tiny_models(kind, quant), key, flash_attn)
    assert capsule.faithful
    assert capsule.node.key == key
    assert capsule.operation.width == len(TOKENS)
    assert [d.width for d in capsule.differences] == list(range(2, len(TOKENS) + 1))


@pytest.fixture(params=["BF16", "Q6_K", "Q4_K_M"])
def product(request: pytest.FixtureRequest, tiny_models: Callable[..., Path]) -> Capsule:
    return taken(tiny_models("llama", request.param), Key("ffn_out-0", "MUL_MAT", 0))


def test_the_smallest_block_departs_where_the_whole_does(product: Capsule) -> None:
    small = smallest(product)
    assert small.departs == product.departs
    if product.departs:
        assert small.block is not None
        assert len(small.block) == small.operation.ne[0] < product.operation.ne[0]
        assert small.size < product.size
    else:
        assert small == product


def test_a_block_computes_its_part(product: Capsule) -> None:
    with (
        Bench(product.operation) as whole,
        Bench(rows_of_weight(product.operation, range(16, 48))) as part,
    ):
        np.testing.assert_allclose(
            part.rows(0, 5)[..., :], whole.rows(0, 5)[..., 16:48], rtol=1e-4, atol=1e-4
        )


def test_a_capsule_is_the_same_on_disk(product: Capsule, tmp_path: Path) -> None:
    data, _ = files.write(product, tmp_path / "new")
    with Gguf(str(data)) as file:
        stored = Operation.read(file)
        assert stored.to_json() == product.operation.to_json()
        assert differences(stored, range(2, 13)) == list(product.differences)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a clean process that cannot see specbisect."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_program_shows_what_was_found(product: Capsule, tmp_path: Path) -> None:
    small = smallest(product)
    _, program = files.write(small, tmp_path, ["Model: tiny."])
    assert "specbisect." not in program.read_text().replace("specbisect.operation", "")
    done = run(program)
    assert done.returncode == int(bool(small.departs)), done.stdout
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [int(row[0]) for row in rows] == list(range(2, 13))
    assert [int(row[0]) for row in rows if row[1] != "none"] == small.departs


def test_the_program_says_when_it_cannot_test(product: Capsule, tmp_path: Path) -> None:
    data, program = files.write(product, tmp_path)
    foreign = replace(product, operation=replace(product.operation, device="NPU7"))
    other, _ = files.write(foreign, tmp_path / "foreign")
    for path, reason in ((tmp_path / "gone.gguf", "is not a GGUF file"), (other, "no device NPU7")):
        done = run(program, str(path))
        assert done.returncode == 125
        assert reason in done.stdout
    data.write_bytes(data.read_bytes()[:2000])
    assert run(program).returncode == 125


def test_operations_as_upstream_names_them(tiny_models: Callable[..., Path]) -> None:
    model, moe = tiny_models("llama", "Q8_0"), tiny_models("moe", "Q8_0")
    assert described(taken(model, Key("ffn_out-1", "MUL_MAT", 0)).operation, 4) == (
        "MUL_MAT(type_a=q8_0,type_b=f32,m=256,n=4,k=512,bs=[1,1],nr=[1,1])"
    )
    assert described(taken(moe, Key("ffn_moe_gate-1", "MUL_MAT_ID", 0)).operation, 2) == (
        "MUL_MAT_ID(type_a=q8_0,type_b=f32,n_mats=4,n_used=2,b=1,m=256,n=2,k=256)"
    )
    assert described(taken(model, Key("", "FLASH_ATTN_EXT", 0)).operation, 3) == (
        "FLASH_ATTN_EXT(hsk=64,hsv=64,nh=2,nr23=[2,1],kv=256,nb=3,mask=1,type_K=f16,type_V=f16)"
    )
    assert (
        described(taken(model, Key("Qcur-0", "ROPE", 0)).operation, 7)
        == "ROPE(type=f32,ne=[64,4,7,1])"
    )


def test_nodes_that_are_no_batch_are_refused(tiny_models: Callable[..., Path]) -> None:
    path = tiny_models("llama")
    with pytest.raises(EngineFault, match="no node nothing in a batch of"):
        taken(path, Key("nothing", "MUL_MAT", 0))
    with pytest.raises(EngineFault, match="has no row for every token"):
        taken(path, Key("cache_k_l0 (view)", "SET_ROWS", 0))


def test_the_table_agrees_with_the_node_itself(product: Capsule) -> None:
    own = product.node.sources[0]
    rows = invariance.table(product.operation, ["F32", "Q8_0", own.type.upper()])
    assert {row.type for row in rows} >= {"F32", "Q8_0"}
    (same,) = (
        row
        for row in rows
        if row.type == own.type.upper()
        and (row.buffer or "plain") == (own.buffer if own.repacked else "plain")
    )
    assert list(same.widths) == product.departs


def test_types_that_do_not_fit_are_refused(tiny_models: Callable[..., Path]) -> None:
    capsule = taken(tiny_models("llama", "Q8_0"), Key("kq-0", "MUL_MAT", 0), "off")
    with pytest.raises(Unusable, match="rows of 64 values are no whole number of blocks of Q4_K"):
        invariance.retyped(capsule.operation, "Q4_K")
    with pytest.raises(Unusable, match="no type Q9_9"):
        invariance.retyped(capsule.operation, "Q9_9")


def test_a_type_goes_where_llama_cpp_would_put_it(product: Capsule) -> None:
    for name in ("Q4_0", "F32"):
        placed = invariance.retyped(product.operation, name).sources[0]
        assert placed
        assert placed.buffer in {"", *tensors.extra_buffers()}
        tried = [row.buffer for row in invariance.table(product.operation, [name])]
        assert placed.buffer == max(tried)
