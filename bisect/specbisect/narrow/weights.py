"""Files of other precision than the target's, and files of mixed types: what a search can put in its place."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specbisect.cell import Model
from specbisect.llama import files, header, quantize
from specbisect.llama.quantize import Recipe
from specbisect.narrow.candidate import PRECISION, Weights, precision

RUNGS = ("BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
"""File types that people use and that llama.cpp makes without an importance matrix."""
UNQUANTISED = ("F32", "F16", "BF16")
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<rest>.+)")

assert set(RUNGS) <= set(PRECISION)


class Ladder(Protocol):
    """Where weights of other types come from. What it gives need not exist before it is made."""

    def above(self, weights: Weights) -> list[Weights]:
        """Weights of more precise types than `weights`, the least precise, which is the cheapest, first."""

    def tensors(self, unsafe: Weights, safe: Weights) -> tuple[str, ...]:
        """Names of the tensors whose types differ between two files, those alike next to each other."""

    def types(self, unsafe: Weights, names: Sequence[str]) -> frozenset[str]:
        """The types that these tensors have in `unsafe`."""

    def mixed(self, unsafe: Weights, safe: Weights, kept: Sequence[str]) -> Weights:
        """`unsafe` with the types of `safe` for all tensors except those `kept`."""


@dataclass(slots=True)
class FromBase:
    """Weights made from one file with llama.cpp's quantiser, into the cache.

    `base` is what the target was made from, or else the target itself: its own weights, rounded once already.
    """

    base: Path
    _types: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def above(self, weights: Weights) -> list[Weights]:
        """See `Ladder`."""
        finer = [name for name in RUNGS if precision(name) < precision(weights.type)]
        return [self._rung(name) for name in reversed(finer)]

    def _rung(self, name: str) -> Weights:
        facts = files.inspect(self.base)
        if facts.file_type == name:
            path = str(self.base.resolve())
            model = Model(files.stem(self.base), name, f"sha256:{facts.sha256}", path)
            return Weights(model, name)
        recipe = quantize.recipe(self.base, name)
        return Weights(_model(recipe, name), name, recipe)

    def tensors(self, unsafe: Weights, safe: Weights) -> tuple[str, ...]:
        """See `Ladder`. Both files must exist."""
        ours, theirs = self._types_of(unsafe), self._types_of(safe)
        return tuple(
            sorted((n for n in ours if n in theirs and ours[n] != theirs[n]), key=_by_kind)
        )

    def types(self, unsafe: Weights, names: Sequence[str]) -> frozenset[str]:
        """See `Ladder`."""
        return frozenset(self._types_of(unsafe)[name] for name in names)

    def mixed(self, unsafe: Weights, safe: Weights, kept: Sequence[str]) -> Weights:
        """See `Ladder`. All of them kept is `unsafe` itself, none is `safe`.

        The quantiser heeds no overrides in types that are not quantised; what is safe is named one by one then.
        """
        names = self.tensors(unsafe, safe)
        if set(kept) == set(names):
            return unsafe
        if not kept:
            return safe
        ours, theirs = self._types_of(unsafe), self._types_of(safe)
        plain = safe.type in UNQUANTISED
        wanted = {n: ours[n] if n in kept else theirs[n] for n in names if plain or n in kept}
        overrides = [(f"^{re.escape(name)}$", kind) for name, kind in wanted.items()]
        recipe = quantize.recipe(self.base, unsafe.type if plain else safe.type, overrides)
        what = f"{kept[0]}={ours[kept[0]]}" if len(kept) == 1 else f"{len(kept)}-tensors"
        label = f"{recipe.type}+{what}" if not plain else f"{recipe.type}+{safe.type}-but-{what}"
        return Weights(_model(recipe, label), unsafe.type, recipe, tuple(kept))

    def _types_of(self, weights: Weights) -> Mapping[str, str]:
        path = weights.model.path
        if path not in self._types:
            parts = files.parts(Path(path))
            found = (tensor for part in parts for tensor in header.read(part).tensors)
            self._types[path] = {tensor.name: tensor.type for tensor in found}
        return self._types[path]


def _model(recipe: Recipe, label: str) -> Model:
    return Model(files.stem(recipe.base), label, recipe.identity, str(recipe.path))


def group(name: str) -> str:
    """Which part of the network a tensor belongs to."""
    if "ffn" in name:
        return "ffn"
    if "attn" in name or "ssm" in name:
        return "attention"
    return "embedding" if name.startswith("token_embd") else "output"


def kind(name: str) -> str:
    """What a tensor is, whatever its layer."""
    return _split(name)[1]


def _by_kind(name: str) -> tuple[str, str, int]:
    layer, rest = _split(name)
    return group(name), rest, layer


def _split(name: str) -> tuple[int, str]:
    found = _NAME.fullmatch(name)
    if found is None:
        return -1, name
    return int(found["layer"] or -1), found["rest"]
