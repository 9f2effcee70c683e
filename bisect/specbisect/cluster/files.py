"""Model files on the hosts of a cluster: named by content, found where they are, sent where they are missing."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from specbisect.cell import Model
from specbisect.errors import BadInput
from specbisect.llama import files
from specbisect.trace import Trace

PIECE = 4 << 20
"""Bytes of a file that travel in one message."""

Maps = tuple[tuple[str, str], ...]
"""Pairs (path here, path on the workers); whatever begins with the first is looked for under the second."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that a call needs: where it lies on the coordinator, its SHA-256, and the names of its parts."""

    path: str
    sha256: str
    parts: tuple[str, ...]


def wanted(path: str) -> Wanted:
    """The model at `path` of this machine. Raises `BadInput` when it cannot be read."""
    parts = tuple(part.name for part in files.parts(Path(path)))
    return Wanted(path, files.sha256(Path(path)), parts)


def named(value: Any) -> Iterator[str]:
    """Paths of the model files that an argument of a call names: of its models, of a float32 reference, or itself."""
    if isinstance(value, str):
        if value.endswith(".gguf") and Path(value).is_file():
            yield value
    elif isinstance(value, Model):
        if value.path:
            yield value.path
    elif _nested(value):
        for f in fields(value):
            inner = getattr(value, f.name)
            if not isinstance(inner, str) or f.name == "reference":
                yield from named(inner)


def replaced(value: Any, places: Mapping[str, str]) -> Any:
    """`value` with each path that `named` finds in it where `places` has it."""
    if isinstance(value, str):
        return places.get(value, value)
    if isinstance(value, Model):
        return replace(value, path=places.get(value.path, value.path))
    if not _nested(value):
        return value
    changes = {}
    for f in fields(value):
        inner = getattr(value, f.name)
        if not isinstance(inner, str) or f.name == "reference":
            new = replaced(inner, places)
            if new is not inner:
                changes[f.name] = new
    return replace(value, **changes) if changes else value


def _nested(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, (type, Trace))


def find(model: Wanted, maps: Maps) -> str | None:
    """Where `model` lies on this host: where a map says, at the same path, or among those that were sent; else None.

    Raises `BadInput` when a map leads to no file, or to another one.
    """
    for here, there in maps:
        if model.path.startswith(here):
            place = there + model.path.removeprefix(here)
            if not Path(place).exists():
                raise BadInput(f"{place} does not exist; put {model.path} there, or drop its --map")
            if (found := files.sha256(Path(place))) != model.sha256:
                raise BadInput(
                    f"{place} is another file than {model.path} (SHA-256 {found[:16]}… instead of "
                    f"{model.sha256[:16]}…); copy the right one there, or drop its --map"
                )
            return place
    for place in (model.path, str(_kept(model) / model.parts[0])):
        if _is(model, Path(place)):
            return place
    return None


def _is(model: Wanted, path: Path) -> bool:
    try:
        return files.sha256(path) == model.sha256
    except BadInput:
        return False


def _kept(model: Wanted) -> Path:
    return files.cache_dir() / "models" / model.sha256


def _arriving(model: Wanted, sender: str) -> Path:
    return files.cache_dir() / "models" / f"{model.sha256}.{sender}"


def receive(model: Wanted, sender: str, part: str, offset: int, piece: bytes) -> None:
    """Take a piece of a part of `model` that begins at byte `offset`. Raises `BadInput` when it cannot be kept."""
    path = _arriving(model, sender) / part
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise BadInput(
            f"{model.path} cannot be kept in {files.cache_dir()} ({error.strerror}); "
            "make room there, or give the model's place with --map"
        ) from None


def accept(model: Wanted, sender: str) -> None:
    """Let `find` find what has arrived. Raises `BadInput` when that is not `model`."""
    arrived, kept = _arriving(model, sender), _kept(model)
    try:
        if not _is(model, arrived / model.parts[0]):
            raise BadInput(
                f"{model.path} did not arrive whole (another SHA-256); run the command again"
            )
        shutil.rmtree(kept, ignore_errors=True)  # a damaged one
        os.rename(arrived, kept)
    finally:
        shutil.rmtree(arrived, ignore_errors=True)
