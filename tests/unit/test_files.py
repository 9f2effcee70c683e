"""Model files on disk: facts without loading, hashes read once, and one line for every broken file."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbisect.errors import BadInput
from specbisect.llama import files, types

Tiny = Callable[..., Path]
Change = Callable[[Path, Path], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, *, tensors: int = 1, **metadata: str | bool) -> None:
    """A small GGUF with these metadata; dots in keys are written as two underscores."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(key.replace("__", "."), value)  # type: ignore[operator]
    for i in range(tensors):
        writer.add_tensor(f"{i}.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split(source: Path, directory: Path, stem: str = "model") -> list[Path]:
    """The tensors of `source` in two parts, as llama-gguf-split names them; metadata in the first."""
    reader = gguf.GGUFReader(source)
    paths = [directory / f"{stem}-0000{i}-of-00002.gguf" for i in (1, 2)]
    middle = len(reader.tensors) // 2
    for i, (path, tensors) in enumerate(
        zip(paths, (reader.tensors[:middle], reader.tensors[middle:]), strict=True)
    ):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for name, f in reader.fields.items():
            if i == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                kind, sub = f.types[0], f.types[1] if len(f.types) > 1 else None
                writer.add_key_value(name, f.contents(), kind, sub)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.mark.parametrize("kind", ["llama", "swa", "recurrent"])
@pytest.mark.parametrize("quant", ["BF16", "Q4_K_M"])
def test_facts_are_those_of_the_reference_reader(tiny_models: Tiny, kind: str, quant: str) -> None:
    path = tiny_models(kind, quant)
    reader = gguf.GGUFReader(path)

    def field(key: str) -> object:
        found = reader.get_field(key)
        return found and found.contents()

    facts = files.inspect(path)
    assert facts.architecture == field("general.architecture")
    assert facts.name == (field("general.name") or path.stem)
    assert facts.file_type == quant
    assert facts.n_vocab == len(reader.fields["tokenizer.ggml.tokens"].data)
    assert facts.n_ctx_train == field(f"{facts.architecture}.context_length")
    assert facts.n_layer == field(f"{facts.architecture}.block_count")
    assert facts.tensor_types == Counter(t.tensor_type.name for t in reader.tensors)
    assert facts.tokenizer == field("tokenizer.ggml.model")
    assert facts.special["bos"] == field("tokenizer.ggml.bos_token_id")
    assert facts.size == path.stat().st_size
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_json_of_facts_has_the_hash_and_no_path(tiny_models: Tiny) -> None:
    facts = files.inspect(tiny_models())
    stated = facts.to_json()
    assert stated["sha256"] == facts.sha256
    assert str(tiny_models().parent) not in repr(stated)


def test_file_type_not_stated_is_that_of_most_weights(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tokenizer__ggml__model="llama")
    assert files.inspect(tmp_path / "m.gguf").file_type == "F32"


def test_hash_is_read_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    assert files.sha256(path) == hashlib.sha256(b"one").hexdigest()
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files.sha256(path) == hashlib.sha256(b"one").hexdigest(), (
        "read although nothing says it changed"
    )
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert files.sha256(path) == hashlib.sha256(b"two").hexdigest()


def test_hash_does_not_need_a_cache_that_can_be_written(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    (tmp_path / "m.gguf").write_bytes(b"one")
    assert files.sha256(tmp_path / "m.gguf") == hashlib.sha256(b"one").hexdigest()


def test_split_model_is_read_whole(tiny_models: Tiny, tmp_path: Path) -> None:
    whole, paths = files.inspect(tiny_models()), split(tiny_models(), tmp_path)
    facts = files.inspect(paths[0])
    assert facts.tensor_types == whole.tensor_types
    assert facts.n_vocab == whole.n_vocab
    assert facts.size == sum(p.stat().st_size for p in paths)
    assert facts.sha256 == hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()
    assert files.stem(paths[0]) == "model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda one, two: two.unlink(),
            "-00002-of-00002.gguf does not exist; put all parts beside the first",
        ),
        (lambda one, two: one.write_bytes(two.read_bytes()), "holds no vocabulary"),
        (
            lambda one, two: one.rename(one.with_name("renamed.gguf")),
            "is one part of a split model",
        ),
        (lambda one, two: one.unlink(), "give its first part, model-00001-of-00002.gguf"),
        (
            lambda one, two: os.truncate(two, two.stat().st_size - 99),
            "00002.gguf ends [0-9]+ bytes before the end",
        ),
    ],
    ids=["part missing", "second part twice", "renamed", "later part", "second part cut"],
)
def test_split_model_with_a_defect(
    tiny_models: Tiny, tmp_path: Path, change: Change, message: str
) -> None:
    change(*split(tiny_models(), tmp_path))
    given = sorted(tmp_path.glob("renamed.gguf")) or sorted(tmp_path.glob("model-*.gguf"))
    with pytest.raises(BadInput, match=message):
        files.inspect(given[0])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__type": "adapter"}, "is of general.type adapter"),
        ({"general__type": "imatrix"}, "is of general.type imatrix"),
        ({"general__type": "mmproj"}, "is of general.type mmproj"),
        ({}, "holds no vocabulary"),
        ({"tokenizer__ggml__model": "no_vocab"}, "holds no vocabulary"),
        (
            {"tokenizer__ggml__model": "bert", "llama__attention__causal": False},
            "holds an embedding model",
        ),
    ],
)
def test_not_a_language_model(
    tmp_path: Path, metadata: dict[str, str | bool], message: str
) -> None:
    write(tmp_path / "m.gguf", **metadata)
    with pytest.raises(BadInput, match=f"{message}; give the GGUF of a language model$"):
        files.inspect(tmp_path / "m.gguf")


def test_vocabulary_only(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tensors=0, tokenizer__ggml__model="llama")
    with pytest.raises(BadInput, match="holds no weights; give the GGUF of a language model"):
        files.inspect(tmp_path / "m.gguf")


@pytest.mark.parametrize("arch", [b"clip", b"controlvector"])
def test_projector_and_control_vector(tmp_path: Path, arch: bytes) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch.decode())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(BadInput, match="holds no language model but a"):
        files.inspect(tmp_path / "m.gguf")


def test_missing_directory_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=re.escape(f"{tmp_path}/m.gguf does not exist; check the path")
    ):
        files.inspect(tmp_path / "m.gguf")
    with pytest.raises(BadInput, match="is not a file; give the GGUF file itself"):
        files.inspect(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with the letters GGUF"),
        (b"PK\x03\x04", "does not begin with the letters GGUF"),
        (b"GGUF", "ends inside its header, after 4 bytes"),
        (b"GGUF\x01\x00\x00\x00", "has GGUF version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "big-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "ends inside its header"),
    ],
)
def test_not_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(
        BadInput, match=f"{message}.*; it is no GGUF file or a damaged one: fetch it again"
    ):
        files.inspect(path)


@pytest.mark.parametrize("part", [0.001, 0.01, 0.1, 0.5, 0.999])
def test_cut_short(tiny_models: Tiny, tmp_path: Path, part: float) -> None:
    content = tiny_models().read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(
        BadInput, match="ends (inside its header|[0-9]+ bytes before the end of tensor)"
    ):
        files.inspect(path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_noticed_or_harmless(
    tiny_models: Tiny, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(tiny_models().read_bytes())
    header = min(len(content), 1 << 14)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header - 9))
        content[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with suppress(BadInput):
        assert files.inspect(path).size == len(content)


def test_every_type_of_the_library_has_a_name() -> None:
    assert types.file_type("q4_k_m") == types.FILE_TYPES["Q4_K_M"]
    assert types.tensor_type("bf16") == gguf.GGMLQuantizationType.BF16
    assert types.file_type_name(types.FILE_TYPES["Q8_0"] | 1024) == "Q8_0"
    assert types.tensor_type_name(9999) is None
    with pytest.raises(BadInput, match="tensor type 'q4_kk' is unknown; did you mean Q4_K"):
        types.tensor_type("q4_kk")
