"""Prompt files: JSON lines, each with an id and either text or token ids."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from specbisect.cell import Prompt, digest
from specbisect.errors import BadInput
from specbisect.matrix.reading import validate
from specbisect.matrix.schema import Table


class PromptLine(Table):
    """One line of a prompt file."""

    id: Annotated[str, Field(min_length=1)]
    group: str = "default"
    text: str = ""
    ids: list[int] | None = None

    @model_validator(mode="after")
    def _one_of_text_and_ids(self) -> Self:
        if bool(self.text) == bool(self.ids):
            raise ValueError("give either text or ids, and not an empty one")
        return self

    @field_validator("id", "group", "text")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if bad := unencodable(value):
            raise ValueError(f"{bad} is half of a character: no text can be made of it")
        return value


def unencodable(text: str) -> str:
    """The first lone surrogate of `text`, escaped, which stands for bytes that are no UTF-8; empty without one."""
    return next((ascii(c)[1:-1] for c in text if "\ud800" <= c <= "\udfff"), "")


def read(path: Path, limit: int | None = None) -> tuple[Prompt, ...]:
    """The first `limit` prompts of the file at `path`; empty lines are skipped.

    Raises `BadInput` naming the line for whatever is wrong with it, also beyond `limit`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give a prompts file with --prompts") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; save it as UTF-8") from None
    prompts: dict[str, Prompt] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}:{number}")
        if prompt.id in prompts:
            raise BadInput(
                f"{path}:{number}: id {prompt.id!r} is used on line {lines[prompt.id]} already; rename one"
            )
        prompts[prompt.id], lines[prompt.id] = prompt, number
    if not prompts:
        raise BadInput(f'{path} holds no prompt; add lines such as {{"id": "a", "text": "Once"}}')
    return tuple(prompts.values())[:limit]


def _parse(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: broken JSON ({error}); mend the line") from None
    if not isinstance(value, dict):
        raise BadInput(f'{where}: not a JSON object; write {{"id": …, "text": …}}')
    made: PromptLine = validate(PromptLine, value, where)
    ids = None if made.ids is None else tuple(made.ids)
    return Prompt(made.id, made.text, made.group, ids)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """16 hex digits over ids, texts and order of `prompts`."""
    return digest([asdict(prompt) for prompt in prompts])
