"""GGUF files on disk: what is in them and which bytes they are, without loading a model."""

import functools
import hashlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from specbisect.errors import BadInput
from specbisect.llama import header
from specbisect.llama.types import file_type_name

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPECIAL = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")


def cache_dir() -> Path:
    """Where things that can be made again are kept: ``SPECBISECT_CACHE``, else the user's cache directory."""
    named = os.environ.get("SPECBISECT_CACHE")
    return Path(named) if named else user_cache_path("specbisect")


def stem(path: Path) -> str:
    """The file name without ``.gguf`` and without a split's part number."""
    split = _SPLIT.fullmatch(path.name)
    return split["stem"] if split else path.name.removesuffix(".gguf")


def parts(path: Path) -> tuple[Path, ...]:
    """All files of the model whose first (or only) file is `path`.

    Raises `BadInput` when one is missing, or when `path` is a later part.
    """
    split = _SPLIT.fullmatch(path.name)
    found: tuple[Path, ...] = (path,)
    if split:
        if int(split["number"]) != 1:
            first = f"{split['stem']}-00001-of-{split['count']}.gguf"
            raise BadInput(f"{path} is a later part of a split model; give its first part, {first}")
        total = int(split["count"])
        names = [f"{split['stem']}-{i:05}-of-{total:05}.gguf" for i in range(1, total + 1)]
        found = tuple(path.with_name(name) for name in names)
    for part in found:
        if not part.exists():
            mend = "check the path" if part == path else "put all parts beside the first one"
            raise BadInput(f"{part} does not exist; {mend}")
        if not part.is_file():
            raise BadInput(f"{part} is not a file; give the GGUF file itself")
    return found


def sha256(path: Path) -> str:
    """SHA-256 of the file as hex; of a split model, that of its parts one after the other.

    The result is kept in the cache directory under path, size, time of change and inode, so that a large file is
    read once. Raises `BadInput` when the file cannot be read.
    """
    files = parts(path)
    name = hashlib.sha256(repr([_version(part) for part in files]).encode()).hexdigest()
    known = cache_dir() / "sha256" / name[:32]
    if known.exists():
        return known.read_text()
    state = hashlib.sha256()
    for part in files:
        try:
            with part.open("rb") as file:
                while block := file.read(1 << 22):
                    state.update(block)
        except OSError as error:
            raise _unreadable(part, error) from None
    _remember(known, state.hexdigest())
    return state.hexdigest()


def _version(path: Path) -> tuple[str, int, int, int]:
    """Changes whenever the file does."""
    s = path.stat()
    return os.path.realpath(path), s.st_size, s.st_mtime_ns, s.st_ino


def _remember(path: Path, text: str) -> None:
    """Write whole or not at all; a cache that cannot be written only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        return


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"{path} cannot be read ({error.strerror}); check its permissions")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a GGUF says of itself. Sizes in bytes; `tensor_types` counts tensors by type, most frequent first.

    `file_type` is the mixture the file was made as (``Q4_K_M``); what is really in it, `tensor_types` says.
    `special` maps names such as ``bos`` to token ids. `chat_template` is a digest, empty when there is none.
    Numbers that the file does not state are 0.
    """

    path: Path
    size: int
    name: str
    architecture: str
    file_type: str
    n_vocab: int
    n_ctx_train: int
    n_layer: int
    tensor_types: Mapping[str, int]
    tokenizer: str
    pre_tokenizer: str
    special: Mapping[str, int]
    chat_template: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, read when first asked for."""
        return sha256(self.path)

    def to_json(self) -> dict[str, Any]:
        """As a trace records it: plain JSON with the SHA-256 and without the path."""
        stated = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "path"}
        return stated | {
            "sha256": self.sha256,
            "tensor_types": dict(self.tensor_types),
            "special": dict(self.special),
        }


def inspect(path: str | Path) -> ModelFacts:
    """What the GGUF at `path` (its first part, when split) says of itself; reads headers only.

    Raises `BadInput` when it is missing, damaged, cut short, or not a language model.
    """
    path = Path(path)
    try:
        str(path).encode()  # it is written into run directories, which are read elsewhere
    except UnicodeEncodeError:
        raise BadInput(f"{str(path)!a} is no name in UTF-8; rename the file") from None
    return _inspect(path, tuple(_version(part) for part in parts(path)))


@functools.lru_cache
def _inspect(path: Path, _versions: tuple[tuple[str, int, int, int], ...]) -> ModelFacts:
    files = parts(path)
    headers = [_header(part) for part in files]
    metadata = headers[0].metadata
    tensors = [tensor for h in headers for tensor in h.tensors]
    if metadata.get("split.count", 1) not in (len(files), 0):
        raise BadInput(
            f"{path} is one part of a split model; give all parts the names llama.cpp gave them"
        )
    if reason := _not_a_language_model(metadata, len(tensors)):
        raise BadInput(f"{path} {reason}; give the GGUF of a language model")

    def number(key: str) -> int:
        value = metadata.get(key, 0)
        return value if isinstance(value, int) else 0

    arch = str(metadata["general.architecture"])
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.type] += tensor.elements
    stated = (
        file_type_name(number("general.file_type")) if "general.file_type" in metadata else None
    )
    template = metadata.get("tokenizer.chat_template")
    return ModelFacts(
        path=path,
        size=sum(part.stat().st_size for part in files),
        name=str(metadata.get("general.name", stem(path))),
        architecture=arch,
        file_type=stated or elements.most_common(1)[0][0],
        n_vocab=number("tokenizer.ggml.tokens") or number(f"{arch}.vocab_size"),
        n_ctx_train=number(f"{arch}.context_length"),
        n_layer=number(f"{arch}.block_count"),
        tensor_types=dict(Counter(tensor.type for tensor in tensors).most_common()),
        tokenizer=str(metadata["tokenizer.ggml.model"]),
        pre_tokenizer=str(metadata.get("tokenizer.ggml.pre", "")),
        special={m[1]: number(key) for key in metadata if (m := _SPECIAL.fullmatch(key))},
        chat_template=hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "",
    )


def _header(path: Path) -> header.Header:
    try:
        return header.read(path)
    except header.Malformed as reason:
        raise BadInput(
            f"{path} {reason}; it is no GGUF file or a damaged one: fetch it again"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _not_a_language_model(metadata: Mapping[str, header.Value], n_tensors: int) -> str:
    """Why a whole GGUF file is no language model, as a predicate; empty when it is one."""
    kind = metadata.get("general.type", "model")
    arch = metadata.get("general.architecture")
    if kind != "model":
        return f"holds no language model but is of general.type {kind}"
    if arch in ("clip", "controlvector"):
        return (
            f"holds no language model but {'a projector' if arch == 'clip' else 'a control vector'}"
        )
    if arch is None:
        return "names no architecture"
    if not n_tensors:
        return "holds no weights"
    if metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return "holds no vocabulary"
    if metadata.get(f"{arch}.attention.causal") is False:
        return "holds an embedding model"
    return ""
