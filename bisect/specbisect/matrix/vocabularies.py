"""Checks that need vocabularies: that prompts fit, and that draft models speak the target's tokens.

Vocabularies are loaded without weights, in a process of their own.
"""

from pathlib import Path

from specbisect.cell import Cell, Model
from specbisect.errors import BadInput
from specbisect.llama import child, files, vocab
from specbisect.matrix.plan import Plan


def validate_prompts(plan: Plan) -> None:
    """Raise `BadInput` for the first prompt that is empty, has ids the model lacks, or does not fit some cell.

    A prompt fits when its tokens and n_predict are at most n_ctx; sequences share n_ctx unless it is unified.
    """
    tightest: dict[Path, Cell] = {}
    for group in plan.groups():
        cell = group[0]
        path = _vocabulary(plan, cell.target)
        if path not in tightest or _room(cell, path) < _room(tightest[path], path):
            tightest[path] = cell
    texts = [prompt.text for prompt in plan.prompts]
    for path, cell in tightest.items():
        lengths = child.call(vocab.token_counts, path, texts)
        facts = files.inspect(path)
        for prompt, counted in zip(plan.prompts, lengths, strict=True):
            if prompt.ids and not 0 <= min(prompt.ids) <= max(prompt.ids) < facts.n_vocab:
                raise BadInput(
                    f"prompt {prompt.id!r} has ids outside 0..{facts.n_vocab - 1} of {path.name}; mend its ids"
                )
            n = len(prompt.ids) if prompt.ids else counted
            if n == 0:
                raise BadInput(f"prompt {prompt.id!r} has no tokens in {path.name}; give it text")
            if n > _room(cell, path):
                raise BadInput(
                    f"prompt {prompt.id!r} has {n} tokens, which with n_predict = {cell.n_predict} is more than the "
                    f"{_room(cell, path) + cell.n_predict} of a context with n_ctx = {cell.n_ctx}; "
                    "raise n_ctx, lower n_predict or drop the prompt"
                )


def _room(cell: Cell, path: Path) -> int:
    """Tokens a prompt may have."""
    n_ctx = cell.n_ctx or files.inspect(path).n_ctx_train
    return (n_ctx if cell.kv_unified else n_ctx // cell.n_parallel) - cell.n_predict


def validate_drafters(plan: Plan) -> None:
    """Raise `BadInput` for the first draft model whose vocabulary is not a target's, naming what differs."""
    drafts = dict.fromkeys(m for d in plan.drafters if (m := getattr(d, "model", None)) is not None)
    pairs = dict.fromkeys(
        (_vocabulary(plan, target), _vocabulary(plan, draft))
        for target in plan.targets
        for draft in drafts
    )
    for target, draft in pairs:
        if target != draft and (found := child.call(vocab.file_differences, target, draft)):
            raise BadInput(
                f"{draft.name} cannot draft for {target.name}: {'; '.join(found)}; "
                "choose a draft model with the same vocabulary"
            )


def _vocabulary(plan: Plan, model: Model) -> Path:
    """A file that exists and has the vocabulary of `model`."""
    recipe = plan.recipes.get(model.identity)
    return recipe.base if recipe else Path(model.path)
