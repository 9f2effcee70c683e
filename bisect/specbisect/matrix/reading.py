"""Reading a matrix file, and one line for the first thing that is wrong with it: file, line, key, value, mend."""

import re
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specbisect.errors import BadInput, did_you_mean
from specbisect.matrix import schema

Loc = tuple[int | str, ...]

_HEADER = re.compile(r"\s*\[\[?\s*([\w.-]+)\s*\]\]?\s*(?:#.*)?$")
_WANTED = {
    "int_type": "an integer (or a range such as 1..8)",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def read(path: Path) -> tuple[dict[str, Any], str]:
    """The tables of a TOML file, not validated, and its text. Raises `BadInput` when it is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text), text
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not TOML: {error}") from None


def validate(table: Any, data: Mapping[str, Any], source: str, text: str = "") -> Any:
    """`data` as an instance of the pydantic model `table`.

    `source` names the file or flag in messages, `text` is its text, to find lines in. Raises `BadInput` for the
    first error.
    """
    try:
        return table.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        loc: Loc = first["loc"]
        line = _line(text, loc)
        where = f"{source}:{line}" if line else source
        raise BadInput(f"{where}: {_explain(table, loc, first)}") from None


def dotted(loc: Loc) -> str:
    """``drafter[0].n_max`` of a location, without the tag of a union, and without the place in a list of values."""
    if len(loc) > 1 and isinstance(loc[-1], int) and loc[-2] not in schema.PLACES:
        loc = loc[:-1]  # a lone value is a list too by now
    words = [
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for i, part in enumerate(loc)
        if not (part in schema.DRAFTER_TABLES and i + 1 < len(loc))
    ]
    return "".join(words).removeprefix(".")


def _explain(table: Any, loc: Loc, error: Any) -> str:
    key, value, context = dotted(loc), error["input"], error.get("ctx", {})
    shown = f"{key} = {reprlib.repr(value)}"
    match error["type"]:
        case "extra_forbidden":
            text = f"unknown key {key}{did_you_mean(str(loc[-1]), _keys(table, loc))}"
        case "missing":
            value = f'schema = "{schema.SCHEMA}"' if key == "schema" else "it"
            text = f"{key} is missing; add {value}"
        case "union_tag_not_found":
            text = f"{key}.method is missing; choose one of {', '.join(schema.DRAFTER_TABLES)}"
        case "union_tag_invalid":
            tag = context["tag"]
            text = f"{key}.method = {tag!r} is unknown{did_you_mean(tag, schema.DRAFTER_TABLES)}"
        case "literal_error":
            known = re.findall(r"'([^']*)'", context["expected"])
            text = f"{shown} is unknown{did_you_mean(str(value), known)}"
        case "greater_than_equal":
            text = f"{shown} is below {context['ge']}; raise it"
        case "less_than_equal":
            text = f"{shown} is above {context['le']}; lower it"
        case "too_short":
            text = f"{shown} leaves no cell; give at least one value"
        case "value_error":
            text = f"{shown}: {context['error']}" if loc else str(context["error"])
        case "list_type" if isinstance(value, dict):
            text = f"{shown} has the wrong type; give a list of tables, [[{key}]]"
        case kind if kind in _WANTED:
            text = f"{shown} has the wrong type; give {_WANTED[kind]}"
        case _:
            text = f"{shown}: {error['msg']}"
    return text


def _keys(table: Any, loc: Loc) -> list[str]:
    """What could stand in the place of the last word of `loc`."""
    for word in loc[:-1]:
        table = schema.PLACES.get(str(word), table)
    return [field.alias or name for name, field in table.model_fields.items()]


def _line(text: str, loc: Loc) -> int | None:
    """The line of a key, or that of its table's header; None where the text does not show it plainly."""
    words = [part for part in loc if isinstance(part, str) and part not in schema.DRAFTER_TABLES]
    if not words:
        return None
    is_table = words[0] in schema.PLACES
    section = words[0] if is_table else ""
    nth = loc[1] if is_table and len(loc) > 1 and isinstance(loc[1], int) else 0
    key = words[1] if is_table and len(words) > 1 else words[0]
    current, seen, header_line = "", 0 if not section else -1, None
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            current = header[1]
            seen += current == section
            if current == section and seen == nth:
                header_line = number
        elif current == section and seen == nth and re.match(rf"\s*{re.escape(key)}\s*[.=]", line):
            return number
    return header_line
