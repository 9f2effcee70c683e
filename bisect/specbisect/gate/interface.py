"""The interface between a drafter's model and its target, compared before anything runs.

A drafter is fed the target's token ids and answers in them, so both must mean the same by every id and end a text at
the same ids. Drafters that read the target's hidden states (EAGLE-3, DFlash, multi-token prediction) declare in their
GGUF what they expect of it; the rules are those of llama.cpp's common/speculative.cpp, where breaking them aborts,
clamps silently, or drafts nonsense.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from specbisect.cell import Cell, DraftModel, Model, ServerSpec, drafter_label
from specbisect.llama import child, files, header, vocab
from specbisect.llama.vocab import FIRST_COMPARED, SHOWN, Vocab
from specbisect.matrix import Plan

PROBES = ("a", " a", "Hello world, it's 1234 + 5!\n\n\tdef f(x):", "  é 漢字 🙂", "<|im_start|>")
"""Texts whose tokens show pre-tokenizing and the adding of spaces, whatever the metadata says of them."""

BLOCK = 16
"""What llama.cpp takes for the block size of a DFlash model that declares none."""

PRE_TOKENIZER, ADD_SPACE = "tokenizer.ggml.pre", "tokenizer.ggml.add_space_prefix"


@dataclass(frozen=True, slots=True)
class Asked:
    """How a draft model is used: the method, its longest draft, and the context both models share."""

    method: str
    n_max: int
    n_ctx: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A draft model that does not fit a target, and every entry that differs."""

    target: str
    draft: str
    entries: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.draft} does not fit {self.target}: {'; '.join(self.entries)}"


def check(plan: Plan) -> tuple[Mismatch, ...]:
    """Every pair of models of `plan` that does not fit, each compared once in a child process.

    Raises `BadInput` for a file that cannot be read.
    """
    pairs: dict[tuple[Path, Path, str], list[Asked]] = {}
    for cell in plan.cells():
        model = draft_of(cell)
        if model is not None:
            target, draft = _vocabulary(plan, cell.target), _vocabulary(plan, model)
            asked = Asked(drafter_label(cell.drafter), cell.width - 1, cell.n_ctx)
            pairs.setdefault((target, draft, asked.method), []).append(asked)
    found = []
    for (target, draft, method), uses in pairs.items():
        most = Asked(method, max(u.n_max for u in uses), max(u.n_ctx for u in uses))
        if target != draft and (entries := child.call(differences, target, draft, most)):
            found.append(Mismatch(target.name, draft.name, tuple(entries)))
    return tuple(found)


def draft_of(cell: Cell) -> Model | None:
    """The draft model of `cell`, if it has one that is not the target."""
    return cell.drafter.model if isinstance(cell.drafter, DraftModel | ServerSpec) else None


def _vocabulary(plan: Plan, model: Model) -> Path:
    """A file that is there already and has the vocabulary of `model`."""
    recipe = plan.recipes.get(model.identity)
    return recipe.base if recipe else Path(model.path)


def differences(target: Path, draft: Path, asked: Asked) -> list[str]:
    """Why `draft` does not fit `target` when used as `asked`, one phrase each; empty when it does.

    Architectures may differ where the drafter reads tokens only. Call it in a process of its own.
    """
    ours, theirs = _Facts.read(target), _Facts.read(draft)
    found = []
    with vocab.open_vocab(target) as one, vocab.open_vocab(draft) as other:
        found += vocab.differences(one, other)
        found += _marks(one, other)
        found += _tokenizing(one, other, ours, theirs)
    found += _context(ours, theirs, asked)
    found += _conventions(ours, theirs, asked)
    return found


@dataclass(frozen=True, slots=True)
class _Facts:
    """The header of a GGUF; `layers` is what it declares as ``target_layers``."""

    metadata: dict[str, Any]
    tensors: frozenset[str]
    layers: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> "_Facts":
        found = [header.read(part) for part in files.parts(path)]
        metadata = dict(found[0].metadata)
        key = f"{metadata.get('general.architecture')}.target_layers"
        layers: Sequence[Any] = ()
        if key in metadata:  # the header keeps no arrays
            layers = GGUFReader(path).fields[key].contents()
        names = frozenset(tensor.name for part in found for tensor in part.tensors)
        return cls(metadata, names, tuple(map(int, layers)))

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def own(self, key: str, default: Any = None) -> Any:
        """A value that the architecture's name begins the key of."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def _marks(target: Vocab, draft: Vocab) -> Iterator[str]:
    """Tokens that one vocabulary ends texts at, or keeps out of them, and the other does not."""
    if target.eot != draft.eot:
        yield f"EOT {draft.eot} instead of {target.eot}"
    shared = range(min(target.n_tokens, draft.n_tokens))
    for what, is_one in (("ends generation", _ends), ("is a control token", _controls)):
        differing = [t for t in shared if is_one(target, t) != is_one(draft, t)]
        for token in differing[:SHOWN]:
            which = "target" if is_one(target, token) else "drafter"
            yield f"token {token} {what} only in the {which}"
        if len(differing) > SHOWN:
            yield f"{len(differing) - SHOWN} more tokens differ in whether one {what}"


def _ends(own: Vocab, token: int) -> bool:
    return own.is_eog(token)


def _controls(own: Vocab, token: int) -> bool:
    # The first few are left out for the reason vocab.differences leaves them out.
    return token >= FIRST_COMPARED and bool(own.lib.llama_vocab_is_control(own.handle, token))


def _tokenizing(one: Vocab, other: Vocab, ours: _Facts, theirs: _Facts) -> Iterator[str]:
    for key in (PRE_TOKENIZER, ADD_SPACE):
        a, b = (facts.metadata.get(key) for facts in (ours, theirs))
        if a != b:
            yield f"{key} is {b} instead of {a}"
    for text in PROBES:
        a, b = (v.tokenize(text, add_special=False) for v in (one, other))
        if a != b:
            yield f"{text!r} is tokenised as {list(b)} instead of {list(a)}"
            break


def _context(ours: _Facts, theirs: _Facts, asked: Asked) -> Iterator[str]:
    wanted = asked.n_ctx or ours.own("context_length", 0)
    trained = theirs.own("context_length", 0)
    if 0 < trained < wanted <= ours.own("context_length", 0):
        yield f"trained for a context of {trained} tokens, used with {wanted}"


def _conventions(target: _Facts, draft: _Facts, asked: Asked) -> Iterator[str]:
    """What drafters that read hidden states declare, against what the target provides."""
    hidden, n_layer = target.own("embedding_length"), target.own("block_count", 0)
    heads = draft.architecture in ("eagle3", "dflash")
    if heads and asked.method == "draft-model":
        yield f"architecture {draft.architecture} reads hidden states and cannot draft from tokens alone"
    if draft.architecture == "eagle3":
        wanted = draft.own("target_hidden_size")
        if wanted != hidden:
            yield f"made for hidden states of size {wanted}, the target's have {hidden}"
        if len(draft.layers) != 3:
            yield f"declares {len(draft.layers)} target layers instead of 3"
    if draft.architecture == "dflash":
        size = draft.own("embedding_length")
        if size != hidden:
            yield f"made for hidden states of size {size}, the target's have {hidden}"
        yield from _block(draft, asked)
    # EAGLE-3 may also read what the last layer puts out, which counts as one more.
    last = n_layer if draft.architecture == "eagle3" else n_layer - 1
    if beyond := [layer for layer in draft.layers if not 0 <= layer <= last]:
        yield f"reads target layers {beyond}, the target has {n_layer}"
    if asked.method == "draft-mtp":
        out = draft.own("embedding_length_out", draft.own("embedding_length"))
        if out != target.own("embedding_length_out", hidden):
            yield f"its prediction heads take hidden states of size {out}, the target's have {hidden}"
        n_heads = draft.own("nextn_predict_layers", 0)
        if n_heads > 1 and asked.n_max > n_heads:
            yield f"n_max = {asked.n_max} is more than its {n_heads} prediction heads can draft"


def _block(draft: _Facts, asked: Asked) -> Iterator[str]:
    """The query layout: the anchor and masks after it, of which the block holds a trained number."""
    if "tokenizer.ggml.mask_token_id" not in draft.metadata:
        yield "declares no mask token, which its queries are made of"
    size = draft.own("block_size", BLOCK)
    anchor_first = "markov_w1.weight" in draft.tensors and draft.own("sample_from_anchor", True)
    most = size if anchor_first else size - 1
    if asked.n_max > most:
        layout = "drafts from the anchor on" if anchor_first else "drafts after the anchor"
        yield f"n_max = {asked.n_max} is more than {most}: its block of {size} {layout}"
