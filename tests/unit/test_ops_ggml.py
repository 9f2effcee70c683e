"""The layout of tensors is trusted only after a look, and one operation computes what it says."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from specbisect.errors import EngineFault
from specbisect.ops import ggml, operation, tensors
from specbisect.ops.operation import Bench, Difference, Operation, Source

F32, Q8_0 = 0, 8
K, M, WIDTH = 256, 32, 6


def shifted(before: str) -> type[ggml.Tensor]:
    """The layout with eight more bytes in front of the field `before`."""
    fields = list(ggml.Tensor._fields_)
    at = [name for name, *_ in fields].index(before)
    fields.insert(at, ("added", ctypes.c_int64))
    return type("Shifted", (ctypes.Structure,), {"_fields_": fields})  # type: ignore[return-value]


def matrix(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 1, n, k), dtype=np.float32)


def number_of(op: str) -> int:
    lib = ggml.load()
    return next(i for i in range(100) if lib.ggml_op_name(i) == op.encode())


def product(weight: Source, rows: np.ndarray) -> Operation:
    """A matrix of `M` rows times a batch."""
    x = Source("x", F32, (K, rows.shape[2], 1, 1), rows, rows=1)
    ne = (weight.ne[1], rows.shape[2], 1, 1)
    return Operation("MUL_MAT", number_of("MUL_MAT"), (0,) * 16, (weight, x), F32, ne, rows=1)


@pytest.fixture
def plain() -> Operation:
    weight = Source("w", F32, (K, M, 1, 1), matrix(M, K, seed=1))
    return product(weight, matrix(WIDTH, K))


def test_the_layout_is_that_of_the_library() -> None:
    assert ggml.layout_errors(ggml.load()) == []


@pytest.mark.parametrize("field", [name for name, *_ in ggml.Tensor._fields_ if name != "extra"])
def test_a_layout_that_is_off_shows_in_the_field_where_it_begins(field: str) -> None:
    if field == "flags":  # nothing that can be set from outside stands there; what follows shows
        assert "src" in ggml.layout_errors(ggml.load(), shifted(field))
    else:
        assert field in ggml.layout_errors(ggml.load(), shifted(field))


def test_a_library_with_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "layout_errors", lambda _lib: ["src", "data"])
    ggml.load.cache_clear()
    with pytest.raises(EngineFault, match=r"lays out struct ggml_tensor differently \(src, data\)"):
        tensors.library()


def test_a_product_is_what_numpy_makes_of_it(plain: Operation) -> None:
    weight, x = (source.data[0, 0] for source in plain.sources if source)
    with Bench(plain) as bench:
        result = bench.rows(0, WIDTH)
        part = bench.rows(2, 5)
    np.testing.assert_allclose(result[:, 0, 0], x @ weight.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(part[:, 0, 0], (x @ weight.T)[2:5], rtol=1e-4, atol=1e-4)


def test_blocks_of_a_quantised_weight_keep_their_place() -> None:
    values = matrix(M, K, seed=2)
    blocks = gguf.quantize(values[0, 0], gguf.GGMLQuantizationType.Q8_0)
    exact = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    data = blocks.view(ggml.item_type(Q8_0)).reshape(1, 1, M, -1)
    what = product(Source("w", Q8_0, (K, M, 1, 1), data), matrix(WIDTH, K))
    with Bench(what) as bench:
        result = bench.rows(0, WIDTH)[:, 0, 0]
    np.testing.assert_allclose(result, matrix(WIDTH, K)[0, 0] @ exact.T, rtol=0.02, atol=0.5)


def test_any_order_in_memory_is_right() -> None:
    heads, shape = 4, (M, WIDTH, 4, 1)
    weight = Source("w", F32, (K, M, heads, 1), matrix(M * heads, K).reshape(1, heads, M, K))
    x = matrix(WIDTH * heads, K, seed=1).reshape(1, heads, WIDTH, K)
    batch = Source("x", F32, (K, WIDTH, heads, 1), x, rows=1)
    expected = np.einsum("hnk,hmk->nhm", x[0, :, 1:], weight.data[0])
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):  # kernels may differ, and so may the last bits
        sources = (replace(weight, order=order), replace(batch, order=order))
        what = Operation("MUL_MAT", number_of("MUL_MAT"), (0,) * 16, sources, F32, shape, 1)
        with Bench(what) as bench:
            result = bench.rows(1, WIDTH)[:, 0]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_differences_are_those_of_the_rows(plain: Operation) -> None:
    with Bench(plain) as bench:
        singles = bench.singles()
        batch = bench.rows(0, 4)
    (found,) = operation.differences(plain, [4, WIDTH + 1])
    assert found == Difference.between(batch, singles)
    assert found.values == int((batch != singles[:4]).sum())


def test_bits_are_compared_not_values() -> None:
    nan, zero = np.float32("nan"), np.float32(0)
    singles = np.array([[1, nan, zero], [4, 5, 6]], np.float32)
    assert Difference.between(singles[:1].copy(), singles) == Difference(1, 0, 0.0, 0.0)
    assert Difference.between(np.array([[1, nan, -zero]], np.float32), singles).values == 1
    assert Difference.between(np.array([[3, nan, zero]], np.float32), singles) == Difference(
        1, 1, 2.0, 2.0
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NPU7"}, "there is no device NPU7 here"),
        ({"op": "MUL_MOT"}, "operation [0-9]+ is not MUL_MOT"),
    ],
)
def test_what_this_build_cannot_do_is_refused(
    plain: Operation, change: dict[str, str], reason: str
) -> None:
    with pytest.raises(ggml.Unusable, match=reason):
        Bench(replace(plain, **change))  # type: ignore[arg-type]


def test_a_weight_that_cannot_be_repacked_is_refused(plain: Operation) -> None:
    for name in tensors.extra_buffers():
        weight, x = plain.sources
        assert weight
        repacked = replace(plain, sources=(replace(weight, buffer=name), x))
        with pytest.raises(ggml.Unusable, match="CPU cannot do this MUL_MAT"):
            Bench(repacked)


def test_tensors_of_a_file_are_those_of_the_reference_reader(
    tiny_models: Callable[..., Path],
) -> None:
    path = tiny_models("moe", "Q4_K_M")
    reference = gguf.GGUFReader(path)
    with operation.Gguf(str(path)) as file:
        assert file.text("general.architecture") == "llama"
        assert file.text("general.nothing") == ""
        assert file.tensor("nothing") is None
        for tensor in reference.tensors:
            found = file.tensor(tensor.name)
            assert found
            assert found.type == tensor.tensor_type
            assert [n for n in found.ne if n > 1] == [n for n in tensor.shape if n > 1]
            assert found.packed().tobytes() == tensor.data.tobytes()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("nonsense")
    with pytest.raises(ggml.Unusable, match="is not a GGUF file"):
        operation.Gguf(str(path))
