"""Candidates of a search: the original case and a patch, and which of two candidates is simpler.

Patches are values: they combine, the later one winning, and have a size. What a candidate is recognised by is the
content of the case it comes to, so that two ways to the same case are one candidate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from specbisect.cell import AXES, ENGINES, Case, Cell, Drafter, Model, NgramSimple, Prompt, Scripted
from specbisect.llama.quantize import Recipe

FILLER = 0
"""What a drafted token is replaced by when it does not matter which one it is."""

PRECISION = (
    *("F32", "BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_1", "Q4_K_M"),
    *("Q4_K_S", "IQ4_NL", "Q4_0", "IQ4_XS", "Q3_K_L", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S"),
    *("IQ3_XS", "IQ3_XXS", "Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M"),
)
"""File types from the most precise on: what shows with less rounding has fewer things that could be to blame."""

Layer = Literal["server", "binding", "drafter", "widths", "drafts", "batch"]
LAYERS: tuple[Layer, ...] = ("batch", "drafts", "widths", "drafter", "binding", "server")
"""How much of the stack a case needs, from the least on.

A single verify batch on a history of width 1; several scripted drafts; the vanilla arm's own tokens in batches of one
width; a drafter that decides for itself; the binding; the server.
"""

Drafts = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """A target: the file, how it is made where a search makes it, and what it counts as.

    `type` is the file type whose kernels it has; of a file of mixed types, `kept` names the tensors that have them.
    """

    model: Model
    type: str
    recipe: Recipe | None = field(default=None, compare=False)
    kept: tuple[str, ...] | None = None

    @classmethod
    def of(cls, model: Model) -> Self:
        """A file as it is."""
        return cls(model, model.quant)


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for parts of a case: `target` (`Weights`), `prompt` (ids), `drafter`, and axes by name."""

    parts: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, **parts: Any) -> Self:
        """A patch of these parts."""
        return cls(tuple(sorted(parts.items())))

    def __or__(self, later: "Patch") -> "Patch":
        return Patch.of(**(dict(self.parts) | dict(later.parts)))

    def __len__(self) -> int:
        return len(self.parts)

    def get(self, part: str) -> Any:
        """The new value of `part`; None when it stays."""
        return dict(self.parts).get(part)

    def apply(self, case: Case) -> Case:
        """`case` with the new values in it."""
        changes = dict(self.parts)
        if (ids := changes.pop("prompt", None)) is not None:
            case = replace(case, prompt=Prompt(case.prompt.id, group=case.prompt.group, ids=ids))
        if (weights := changes.pop("target", None)) is not None:
            changes["target"] = weights.model
        return replace(case, cell=replace(case.cell, **changes))


@dataclass(frozen=True, slots=True)
class Candidate:
    """The original case with a patch on it."""

    original: Case
    patch: Patch = Patch()

    def but(self, **parts: Any) -> "Candidate":
        """The same with these parts changed too."""
        return Candidate(self.original, self.patch | Patch.of(**parts))

    @property
    def case(self) -> Case:
        """The case it comes to."""
        return self.patch.apply(self.original)

    @property
    def cell(self) -> Cell:
        """The cell of that case."""
        return self.case.cell

    @property
    def key(self) -> str:
        """Names the case by content."""
        return self.case.key

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's ids; a search has no prompts that are given as text."""
        return self.case.prompt.ids or ()

    @property
    def drafts(self) -> Drafts:
        """The scripted drafts; none for any other drafter."""
        drafter = self.cell.drafter
        return drafter.drafts if isinstance(drafter, Scripted) else ()

    @property
    def weights(self) -> Weights:
        """The target, and how it is made."""
        return self.patch.get("target") or Weights.of(self.original.cell.target)

    @property
    def layer(self) -> Layer:
        """How much of the stack the case needs."""
        cell = self.cell
        if cell.engine != "libllama":
            return cell.engine
        if not isinstance(cell.drafter, Scripted):
            return "drafter"
        if compares_widths(cell.drafter):
            return "widths"
        return "batch" if len(cell.drafter.drafts) == 1 else "drafts"

    @property
    def complexity(self) -> tuple[Any, ...]:
        """Sort key, the simplest first; of two candidates, every earlier part counts more than all later ones.

        The layer, because each one above libllama has to be installed, and each way to draft to be understood; the
        precision of the weights; the width, which is what kernels depend on; settings by number, then each by its own
        declared order; the length of the answer, then of the prompt, which is what a reader has to wait for and to
        read; drafted tokens; tensors that have to be of the type in question.
        """
        cell, drafts = self.cell, self.drafts
        changed = tuple(AXES[name].rank(getattr(cell, name)) for name in SETTINGS)
        kept = self.weights.kept
        return (
            LAYERS.index(self.layer),
            precision(self.weights.type),
            cell.width,
            sum(rank > 0 for rank, _ in changed),
            changed,
            cell.n_predict,
            len(self.prompt),
            len(drafts),
            sum(len(ids) for _, ids in drafts),
            sum(token != FILLER for _, ids in drafts for token in ids),
            (1, 0) if kept is None else (0, len(kept)),
        )

    def changed(self) -> tuple[str, ...]:
        """The settings that are not at their default."""
        return tuple(n for n in SETTINGS if getattr(self.cell, n) != AXES[n].default)


SETTINGS = tuple(name for name in AXES if name not in ("engine", "n_predict"))
"""The axes that a search puts to their defaults; the two others have places of their own in the order."""

assert set(LAYERS) >= {*ENGINES} - {"libllama"}


def precision(file_type: str) -> int:
    """The place of a file type in `PRECISION`; behind it when it has none."""
    return PRECISION.index(file_type) if file_type in PRECISION else len(PRECISION)


def widths_only(width: int) -> Scripted:
    """Not speculation but the vanilla arm's own tokens, evaluated in batches of `width` rows.

    Written as a script without drafts: what they are is known only when the vanilla arm has run.
    """
    return Scripted(limit=width - 1)


def compares_widths(drafter: Drafter | None) -> bool:
    """Whether `drafter` is one of `widths_only`."""
    return isinstance(drafter, Scripted) and not drafter.drafts and drafter.limit > 0


def own_tokens(ids: tuple[int, ...], width: int) -> Drafts:
    """An answer cut into drafts for batches of `width` rows, the first token being given by the prompt."""
    starts = range(1, len(ids), width)
    drafts = ((start, ids[start : start + width - 1]) for start in starts)
    return tuple((start, draft) for start, draft in drafts if draft)


def in_width(drafter: Drafter, width: int) -> Drafter:
    """The same drafter, its batches at most `width` rows.

    A scripted draft that is too long goes on in the batch that follows if all of it is accepted.
    """
    if isinstance(drafter, Scripted):
        if compares_widths(drafter):
            return widths_only(width)
        pieces = (piece for start, ids in drafter.drafts for piece in _pieces(start, ids, width))
        return Scripted(script(pieces))
    if isinstance(drafter, NgramSimple):
        return replace(drafter, size_m=width - 1)
    return replace(drafter, n_max=width - 1)


def padded(drafts: Drafts, width: int) -> Scripted:
    """Every draft made as long as a batch of `width` rows takes, by cutting it or by `FILLER`."""
    n = width - 1
    return Scripted(tuple((at, (ids + (FILLER,) * n)[:n]) for at, ids in drafts))


def script(drafts: Iterable[tuple[int, tuple[int, ...]]]) -> Drafts:
    """Drafts in order, one for each place, the first named."""
    found: dict[int, tuple[int, ...]] = {}
    for start, ids in drafts:
        if ids:
            found.setdefault(start, ids)
    return tuple(sorted(found.items()))


def _pieces(start: int, ids: tuple[int, ...], width: int) -> Iterable[tuple[int, tuple[int, ...]]]:
    return ((start + at, ids[at : at + width - 1]) for at in range(0, len(ids), width))
