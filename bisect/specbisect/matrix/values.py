"""Values of axes and parameters as people write them: one, a list of them, or a range of integers."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

MOST = 100_000
"""More values than this on one axis are a slip of the keyboard."""

_RANGE = r"(-?\d+)\.\.(-?\d+)(?:([+*])(\d+))?"
Range = Annotated[str, Field(pattern=f"^{_RANGE}$")]


def expand(value: object) -> list[Any]:
    """`value` as a list: ranges inside it spelt out, a lone value alone, doubles kept.

    A range is ``first..last``, ``first..last+step`` or ``first..last*factor``, both ends included, as in
    llama-bench (which writes ``-`` for ``..``). Raises `ValueError` for a range that never ends or never begins.
    """
    if isinstance(value, list):
        return [item for part in value for item in expand(part)]
    if isinstance(value, str) and (found := re.fullmatch(_RANGE, value)):
        first, last, op, by = found.groups()
        return _range(value, int(first), int(last), op or "+", int(by or 1))
    return [value]


def _range(text: str, first: int, last: int, op: str, by: int) -> list[int]:
    if first > last:
        raise ValueError(f"range {text} is empty: its last value is below its first")
    if op == "*" and (by < 2 or first < 1):
        raise ValueError(f"range {text} never ends: multiply a positive number by 2 or more")
    if by < 1:
        raise ValueError(f"range {text} never ends: add 1 or more")
    values = []
    while first <= last:
        values.append(first)
        first = first + by if op == "+" else first * by
        if len(values) > MOST:
            raise ValueError(f"range {text} has more than {MOST} values")
    return values


def values(kind: Any) -> Any:
    """The pydantic type of one value of `kind` or several, validated into a list."""
    written: Any = kind | Range if _counts(kind) else kind
    return Annotated[
        list[kind],
        Field(min_length=1),
        BeforeValidator(expand, json_schema_input_type=written | list[written]),
    ]


def _counts(kind: Any) -> bool:
    return kind is int or getattr(kind, "__origin__", None) is int


def parse_flag(text: str) -> list[Any]:
    """Values as a command-line flag gives them: separated by commas, integers and booleans recognised."""
    words: dict[str, Any] = {"true": True, "false": False}
    return [
        int(part) if re.fullmatch(r"-?\d+", part) else words.get(part, part)
        for part in text.split(",")
    ]
