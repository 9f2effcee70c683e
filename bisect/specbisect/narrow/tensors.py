"""Stage about tensors: which of them must have the type that shows it, and are they the cause?"""

from specbisect.narrow.candidate import Candidate, Weights
from specbisect.narrow.ddmin import cut_by
from specbisect.narrow.result import Shown, Tensors
from specbisect.narrow.search import Search
from specbisect.narrow.settings import safe_weights
from specbisect.narrow.weights import UNQUANTISED, Ladder, group, kind


def tensors(search: Search) -> None:
    """As few tensors as possible left at the type that shows it: parts of the network, then kinds, layers, single ones.

    One tensor may be enough where any of several would be. It is called the cause only if it is gone when these
    tensors alone are made safe; if it is not, the same is tried with all tensors of their type.
    """
    ladder, weights = search.ladder, search.best.weights
    if ladder is None or weights.type in UNQUANTISED:
        return
    with search.step("tensors", "tensors", _left):
        if search.mixing is None and (safe := safe_weights(search, ladder)) is not None:
            search.mixing = weights, safe
        if search.mixing is None:
            return
        unsafe, safe = search.mixing
        best, names = search.best, ladder.tensors(unsafe, safe)
        found = search.reduce(
            names if weights.kept is None else weights.kept,
            lambda kept: best.but(target=ladder.mixed(unsafe, safe, kept)),
            cuts=[cut_by(group), cut_by(kind)],
        )
        if search.tensors is None:
            search.tensors = _cause(search, ladder, unsafe, safe, found.items)


def _cause(
    search: Search, ladder: Ladder, unsafe: Weights, safe: Weights, names: tuple[str, ...]
) -> Tensors:
    """Both runs that make tensors the cause: of those found, or else of all that have their type."""
    found = _runs(search, ladder, unsafe, safe, names)
    types = ladder.types(unsafe, names)
    alike = [n for n in ladder.tensors(unsafe, safe) if ladder.types(unsafe, [n]) <= types]
    if found.causal or len(alike) == len(names):
        return found
    all_of_them = _runs(search, ladder, unsafe, safe, tuple(alike))
    return all_of_them.model_copy(update={"enough": names}) if all_of_them.causal else found


def _runs(
    search: Search, ladder: Ladder, unsafe: Weights, safe: Weights, names: tuple[str, ...]
) -> Tensors:
    others = [name for name in ladder.tensors(unsafe, safe) if name not in names]

    def shown(kept: tuple[str, ...]) -> Shown:
        return search.gate.observe(search.best.but(target=ladder.mixed(unsafe, safe, kept))).label

    recipe = search.best.weights.recipe
    return Tensors(
        names=names,
        unsafe="/".join(sorted(ladder.types(unsafe, names))) or unsafe.type,
        safe="/".join(sorted(ladder.types(safe, names))) or safe.type,
        without=shown(tuple(others)),
        alone=shown(names),
        base_sha256=recipe.base_sha256 if recipe else "",
        overrides=recipe.overrides if recipe else (),
    )


def _left(candidate: Candidate) -> str:
    kept = candidate.weights.kept
    return "all" if kept is None else ", ".join(kept) or "none"
