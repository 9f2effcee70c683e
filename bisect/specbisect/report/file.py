"""``finding.json``: everything that is known about a case, for programs. The only file with a timestamp in it."""

import json
import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specbisect.diagnose.finding import Finding
from specbisect.narrow.result import Narrowed
from specbisect.report.subject import Subject, is_prompt


class FindingFile(BaseModel):
    """The file's content.

    `case` is the key of the case in its run, `created` when the report was made. Numbers that are not finite are the
    texts "NaN" and "Infinity". In a `redacted` file prompts have neither text nor ids; `prompt_sha256` stands for the
    ids, written in decimal with commas between them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["specbisect.report/1"] = Field(default="specbisect.report/1", alias="schema")
    created: str
    specbisect: str
    case: str
    redacted: bool = False
    prompt_sha256: str
    finding: Finding
    narrowed: Narrowed | None = None


def dump(original: Subject, minimal: Subject, created: str, prompt_sha256: str) -> str:
    """The JSON of a report on a finding and, where `minimal` has been narrowed, on what came of that."""
    content = FindingFile(
        created=created,
        specbisect=original.version,
        case=original.case_id,
        redacted=original.redacted,
        prompt_sha256=prompt_sha256,
        finding=original.finding,
        narrowed=minimal.narrowed,
    )
    return json.dumps(_plain(content.model_dump(by_alias=True), original.redacted), indent=1) + "\n"


def load(text: str) -> FindingFile:
    """The content of a ``finding.json``; pydantic's own reader of JSON refuses halves of surrogate pairs."""
    return FindingFile.model_validate(json.loads(text))


def _plain(value: Any, redacted: bool) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
        case dict():
            if redacted:
                value = value | ({"ids": None} if is_prompt(value) else {})
                value = value | ({"prompt_ids": []} if "prompt_ids" in value else {})
            return {k: _plain(v, redacted) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v, redacted) for v in value]
    return value
