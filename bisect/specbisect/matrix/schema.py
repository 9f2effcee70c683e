"""The tables of a matrix file as pydantic models.

The keys of axes and drafters are read off `cell`, so that each is declared once. Wherever settings multiply, a key
takes one value, a range or a list; what is validated here is always a list.
"""

from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from specbisect.cell import AXES, DRAFTERS, INT32, Cell, Model
from specbisect.matrix.values import values

SCHEMA = "specbisect.matrix/1"

Fields = dict[str, Any]


class Table(BaseModel):
    """No unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _table(name: str, doc: str, keys: Fields) -> Any:
    return create_model(name, __base__=Table, __doc__=doc, **keys)


def _optional(hint: Any, description: str | None = None) -> tuple[Any, Any]:
    return hint | None, Field(None, description=description)


def _several(table: Any) -> tuple[Any, Any]:
    return list[table], []


def _axes() -> Fields:
    hints = get_type_hints(Cell)
    made = {}
    for axis in AXES.values():
        kind = hints[axis.name]
        if kind is int:
            kind = Annotated[int, Field(ge=axis.minimum, le=axis.maximum)]
        made[axis.name] = _optional(
            values(kind), f"default {axis.default or repr(axis.default)}: {axis.why}"
        )
    return made


_BOUNDS: dict[Any, Any] = {
    int: Annotated[int, Field(le=INT32)],
    float: Annotated[float, Field(ge=0, le=1)],  # probabilities
}
"""What the parameters of drafters can be, by type."""


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _drafter(kind: type) -> Fields:
    """Keys of a drafter's table: its parameters, where a model is a file or a quantisation of the base."""
    made: Fields = {}
    hints = get_type_hints(kind)
    for f in fields(kind):
        hint = hints[f.name]
        if f.name == "method":
            made["method"] = hint, ...
        elif Model in (hint, *get_args(hint)):
            made["model"] = _optional(values(str), "path of a GGUF, relative to this file")
            made["quant"] = _optional(values(str), "a quantisation of the base")
        elif get_origin(hint) is tuple:  # a parameter that is a list itself does not multiply
            made[f.name] = (
                Annotated[hint, BeforeValidator(_tuples, json_schema_input_type=hint)],
                (),
            )
        else:
            made[f.name] = (
                values(_BOUNDS.get(hint, hint)),
                ... if f.default is MISSING else [f.default],
            )
    return made


_AXES = _axes()
_DRAFTERS = {method: _drafter(kind) for method, kind in DRAFTERS.items()}
_PARAMETERS = {name: hint for keys in _DRAFTERS.values() for name, (hint, _) in keys.items()}
_LISTS = ("drafts", "args")

AXES_TABLE = _table("Axes", "Settings of the target's context.", _AXES)
DRAFTER_TABLES = {
    method: _table(f"Drafter_{method}", DRAFTERS[method].__doc__ or method, keys)
    for method, keys in _DRAFTERS.items()
}
PATTERN = _table(
    "DrafterPattern",
    "Matches drafters that have every value given.",
    {name: _optional(hint) for name, hint in _PARAMETERS.items() if name not in _LISTS}
    | {"method": _optional(values(Literal[tuple(DRAFTERS)]))},
)

_one_drafter: Any = Annotated[Union[tuple(DRAFTER_TABLES.values())], Field(discriminator="method")]  # noqa: UP007
_pattern: Any = Annotated[
    PATTERN,
    BeforeValidator(
        lambda value: value if isinstance(value, dict) else {"method": value},
        json_schema_input_type=str | PATTERN,
    ),
]
_quant = _optional(values(str), "quantisation of the target")

EXCLUDE = _table(
    "Exclude",
    "Drops the cells that match every key given; a key with several values matches any of them.",
    {
        **_AXES,
        "quant": _quant,
        "drafter": _optional(_pattern, "a method, or method and parameters"),
    },
)
INCLUDE = _table(
    "Include",
    "Adds the product of its keys, whatever is excluded. An axis left out has the value in `axes` when that is a "
    "single one, else its default; without `quant` it is for every target, without `drafter` for every drafter.",
    {**_AXES, "quant": _quant, "drafter": _optional(_one_drafter)},
)
TARGET = _table(
    "Target",
    "The models to test: quantisations of a base, made when they are missing, and files.",
    {
        "base": _optional(str, "path of a GGUF, best one that is not quantised"),
        "quants": _optional(values(str), "quantisations of the base, as llama-quantize names them"),
        "files": _optional(values(str), "paths of GGUFs"),
    },
)
MATRIX = _table(
    "Matrix",
    "A matrix file: every target with every drafter and every combination of axes. Paths are relative to the file.",
    {
        "schema_": (Literal["specbisect.matrix/1"], Field(alias="schema")),
        "n_predict": _optional(_AXES["n_predict"][0], "short for n_predict in axes"),
        "prompts": _optional(str, "JSON lines with id, text (or ids) and group"),
        "max_prompts": _optional(Annotated[int, Field(ge=1)], "use only the first so many prompts"),
        "target": (TARGET, TARGET()),
        "drafter": _several(_one_drafter),
        "axes": (AXES_TABLE, AXES_TABLE()),
        "exclude": _several(EXCLUDE),
        "include": _several(INCLUDE),
    },
)
PLACES: dict[str, Any] = {
    "target": TARGET,
    "axes": AXES_TABLE,
    "exclude": EXCLUDE,
    "include": INCLUDE,
    "drafter": PATTERN,
    **DRAFTER_TABLES,
}
"""The table that a word in a validation error's location leads into."""


def json_schema() -> dict[str, Any]:
    """The JSON schema of matrix files."""
    schema: dict[str, Any] = MATRIX.model_json_schema(by_alias=True, mode="validation")
    return schema
