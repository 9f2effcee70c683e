"""The header of a GGUF file: metadata and the list of tensors, without the weights.

The format is llama.cpp's ``docs/gguf.md``. The `gguf` package's own reader makes Python objects of every element of
every array, which takes seconds for a vocabulary; here arrays are stepped over and only their length is kept.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specbisect.llama.types import tensor_bytes, tensor_type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

Value = int | float | bool | str


class Malformed(Exception):
    """The bytes are not a whole GGUF file; the message is a phrase that says why."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the tensor list: its type's name and its number of values."""

    name: str
    type: str
    elements: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata (for an array: its length) and tensors of one file."""

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]


def read(path: Path) -> Header:
    """The header of `path`. Raises `Malformed` when it is cut short or not GGUF, `OSError` when it cannot be read."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise Malformed("does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header()
            except (struct.error, OverflowError):
                raise Malformed(f"ends inside its header, after {len(data)} bytes") from None
            except UnicodeDecodeError:
                raise Malformed("holds a name that is not text") from None


class _Reader:
    """Walks over the bytes; `struct.error` where they end too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = len(MAGIC)

    def header(self) -> Header:
        version = self.scalar("I")
        if version not in VERSIONS:
            raise Malformed(f"has GGUF version {version} (or is big-endian), not {VERSIONS[-1]}")
        n_tensors, n_metadata = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Value] = {}
        for _ in range(n_metadata):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise Malformed(f"has general.alignment = {alignment!r}")
        start = -(-self.at // alignment) * alignment
        for tensor, end in infos:
            if start + end > len(self.data):
                missing = start + end - len(self.data)
                raise Malformed(f"ends {missing} bytes before the end of tensor {tensor.name}")
        return Header(metadata, tuple(tensor for tensor, _ in infos))

    def scalar(self, code: str) -> int:
        """One value of that `struct` code; annotated as what it mostly is."""
        value: int
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def skip(self, n: int) -> None:
        self.at += n
        if self.at > len(self.data):
            raise struct.error

    def string(self) -> str:
        n = self.scalar("Q")
        self.skip(n)
        return self.data[self.at - n : self.at].decode()

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise Malformed(f"holds a value of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, kind: int, length: int) -> int:
        if kind == _STRING:
            size, at = struct.Struct("<Q").unpack_from, self.at
            for _ in range(length):  # of every token of a vocabulary
                at += 8 + size(self.data, at)[0]
            self.skip(at - self.at)
        elif kind in _SCALARS:
            self.skip(struct.calcsize("<" + _SCALARS[kind]) * length)
        else:
            raise Malformed(f"holds an array of the unknown type {kind}")
        return length

    def tensor(self) -> tuple[Tensor, int]:
        """A tensor, and where its bytes end, counted from the beginning of the data."""
        name = self.string()
        elements = 1
        for _ in range(self.scalar("I")):
            elements *= self.scalar("Q")
        kind, offset = self.scalar("I"), self.scalar("Q")
        type_name = tensor_type_name(kind)
        if type_name is None:
            raise Malformed(
                f"holds tensor {name} of type {kind}, which this llama.cpp does not know"
            )
        return Tensor(name, type_name, elements), offset + tensor_bytes(kind, elements)
