"""From the tables of a matrix file to a plan: models found, drafters multiplied, blocks put together."""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from specbisect.cell import AXES, DRAFTERS, Drafter, Model, Prompt
from specbisect.errors import BadInput, did_you_mean
from specbisect.llama import files, quantize, types
from specbisect.matrix import prompts, reading, schema
from specbisect.matrix.plan import Plan
from specbisect.matrix.product import Block, Exclusion, check
from specbisect.matrix.values import expand, parse_flag


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line puts in place of parts of a matrix.

    `targets` replace all targets, `base` and `quants` those of ``[target]``; `draft` is the model of every
    ``draft-model`` drafter, `drafters` (tables) replace all drafters; `axes` maps names to values as text
    (``8``, ``1..8``, ``on,off``). Paths are relative to the working directory.
    """

    base: Path | None = None
    quants: tuple[str, ...] = ()
    targets: tuple[Path, ...] = ()
    draft: Path | None = None
    drafters: tuple[Mapping[str, Any], ...] = ()
    prompts: Path | tuple[Prompt, ...] | None = None
    max_prompts: int | None = None
    axes: Mapping[str, str] = field(default_factory=dict)
    only: str | None = None


NOTHING = Overrides()


def load(path: str | Path, overrides: Overrides = NOTHING) -> Plan:
    """The plan of the matrix file at `path`. Raises `BadInput`, one line, for anything wrong in it or beside it."""
    path = Path(path)
    tables, text = reading.read(path)
    return build(tables, overrides, source=str(path), text=text, folder=path.parent)


def build(
    tables: Mapping[str, Any],
    overrides: Overrides = NOTHING,
    *,
    source: str = "matrix",
    text: str = "",
    folder: Path = Path(),
) -> Plan:
    """The plan of a matrix given as tables.

    `source` is what messages call it, `text` its text to find lines in, `folder` what its paths are relative to.
    """
    matrix = reading.validate(schema.MATRIX, tables, source, text)
    return _Builder(matrix, overrides, source, folder).plan()


@contextmanager
def _blaming(where: str) -> Iterator[None]:
    """Say which key names the thing that is wrong."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


class _Builder:
    def __init__(self, matrix: Any, overrides: Overrides, source: str, folder: Path) -> None:
        self.matrix = matrix
        self.overrides = overrides
        self.source = source
        self.folder = folder
        self.recipes: dict[str, quantize.Recipe] = {}
        self.models: dict[tuple[str, ...], Model] = {}
        self.base = self._base()

    def plan(self) -> Plan:
        axes = self._axes()
        targets = self._targets()
        drafters = self._drafters()
        blocks = [_block(targets, axes, drafters, self._exclusions())]
        for i, table in enumerate(self.matrix.include):
            where = f"{self.source}: include[{i}]"
            blocks.append(
                _block(
                    [self._quantised(q, f"{where}.quant") for q in table.quant]
                    if table.quant
                    else targets,
                    self._values(table, {n: v for n, v in axes.items() if len(v) == 1}),
                    self._multiply(table.drafter, where) if table.drafter else drafters,
                )
            )
        return Plan(
            source=self.source,
            blocks=tuple(blocks),
            prompts=self._prompts(),
            recipes=self.recipes,
            counts=check(blocks, self.source),
            only=self.overrides.only,
        )

    # Models

    def _base(self) -> Path | None:
        if self.overrides.base:
            return self.overrides.base
        if self.overrides.targets:  # a drafter that is a quantisation is one of the only target
            return self.overrides.targets[0] if len(self.overrides.targets) == 1 else None
        table = self.matrix.target
        if table.base is not None:
            return self._path(table.base)
        return self._path(table.files[0]) if table.files and len(table.files) == 1 else None

    def _path(self, text: str) -> Path:
        return self.folder / Path(text).expanduser()

    def _targets(self) -> list[Model]:
        table, given = self.matrix.target, self.overrides
        if given.targets:
            return [self._file(path, "--target") for path in given.targets]
        found = []
        if given.base or table.base is not None:
            quants = given.quants or table.quants
            where = f"{self.source}: target.quants"
            if quants:
                found = [self._quantised(q, where) for q in quants]
            elif self.base:
                found = [
                    self._file(self.base, "--base" if given.base else f"{self.source}: target.base")
                ]
        if not given.base:
            where = f"{self.source}: target.files"
            found += [self._file(self._path(name), where) for name in table.files or ()]
        if not found:
            raise BadInput(f"{self.source} names no target; give --base FILE or --target FILE")
        return found

    def _file(self, path: Path, where: str) -> Model:
        key = "file", str(path)
        if key not in self.models:
            with _blaming(where):
                facts = files.inspect(path)
                identity = f"sha256:{facts.sha256}"
            self.models[key] = Model(
                files.stem(path), facts.file_type, identity, str(path.resolve())
            )
        return self.models[key]

    def _quantised(self, quant: str, where: str) -> Model:
        """The base as `quant`; the base itself when it is that already."""
        if self.base is None:
            raise BadInput(
                f"{where} = {quant!r} is a quantisation of a base, and there is none; give --base FILE"
            )
        base = self._file(
            self.base, "--base" if self.overrides.base else f"{self.source}: target.base"
        )
        if base.quant == quant.upper():
            return base
        key = "quantised", quant.upper()
        if key not in self.models:
            with _blaming(where):
                recipe = quantize.recipe(Path(base.path), quant)
            self.recipes[recipe.identity] = recipe
            self.models[key] = Model(
                base.name, recipe.type, recipe.identity, str(recipe.path.absolute())
            )
        return self.models[key]

    # Drafters

    def _drafters(self) -> list[Drafter]:
        tables, where = self.matrix.drafter, f"{self.source}: "
        if self.overrides.drafters:
            given = {
                "schema": schema.SCHEMA,
                "drafter": [_from_here(table) for table in self.overrides.drafters],
            }
            tables, where = reading.validate(schema.MATRIX, given, "--drafter").drafter, "--"
        made = [
            d
            for i, table in enumerate(tables)
            for d in self._multiply(table, f"{where}drafter[{i}]")
        ]
        if self.overrides.draft and not any(d.method == "draft-model" for d in made):
            raise BadInput(f"--draft: {self.source} has no drafter of method draft-model; add one")
        return made

    def _multiply(self, table: Any, where: str) -> list[Drafter]:
        """Every combination of a drafter table's values."""
        kind = DRAFTERS[table.method]
        hints = get_type_hints(kind)
        choices: dict[str, list[Any]] = {}
        for f in fields(kind):
            if f.name == "method":
                continue
            if Model in (hints[f.name], *get_args(hints[f.name])):
                models = self._draft_models(table, where)
                choices[f.name] = models or [None]
                if not models and f.default is not None:
                    raise BadInput(
                        f"{where} names no model; add model or quant, or give --draft FILE"
                    )
            else:
                value = getattr(table, f.name)
                choices[f.name] = value if isinstance(value, list) else [value]
        return [
            kind(**dict(zip(choices, combination, strict=True)))
            for combination in itertools.product(*choices.values())
        ]

    def _draft_models(self, table: Any, where: str) -> list[Model]:
        if self.overrides.draft and table.method == "draft-model":
            return [self._file(self.overrides.draft, "--draft")]
        return [
            *(self._file(self._path(name), f"{where}.model") for name in table.model or ()),
            *(self._quantised(quant, f"{where}.quant") for quant in table.quant or ()),
        ]

    # Axes and the rest

    def _axes(self) -> dict[str, list[Any]]:
        matrix, given = self.matrix, self.overrides.axes
        if matrix.n_predict and matrix.axes.n_predict:
            raise BadInput(
                f"{self.source}: n_predict is given twice; keep one of n_predict and axes.n_predict"
            )
        written = {"n_predict": matrix.n_predict} if matrix.n_predict else {}
        axes = self._values(matrix.axes, written)
        named = {axis.name for axis in AXES.values() if isinstance(axis.default, str)}
        parsed = {
            name: value.split(",") if name in named else parse_flag(value)
            for name, value in given.items()
        }
        flags = reading.validate(schema.AXES_TABLE, parsed, "--set")
        return axes | {name: getattr(flags, name) for name in given}

    def _values(self, table: Any, otherwise: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Values for every axis: those in `table`, else those in `otherwise`, else the default."""
        return {
            axis.name: getattr(table, axis.name) or otherwise.get(axis.name) or [axis.default]
            for axis in AXES.values()
        }

    def _exclusions(self) -> list[Exclusion]:
        made = []
        for i, table in enumerate(self.matrix.exclude):
            for quant in table.quant or ():
                if quant.upper() not in types.LABELS:
                    hint = did_you_mean(quant.upper(), types.LABELS)
                    raise BadInput(
                        f"{self.source}: exclude[{i}].quant = {quant!r} is unknown{hint}"
                    )
            made.append(
                Exclusion(
                    name=f"exclude[{i}]",
                    axes=_given(table, AXES),
                    quants=frozenset(map(str.upper, table.quant)) if table.quant else None,
                    drafter=_pattern(table.drafter) if table.drafter else None,
                )
            )
        return made

    def _prompts(self) -> tuple[Prompt, ...]:
        given, limit = self.overrides.prompts, self.overrides.max_prompts or self.matrix.max_prompts
        if isinstance(given, tuple):
            for prompt in given:
                if bad := prompts.unencodable(prompt.text):
                    raise BadInput(
                        f"prompt {prompt.id} holds {bad}, which is no UTF-8; mend its text"
                    )
            return given[:limit]
        if given is None and self.matrix.prompts is None:
            raise BadInput(
                f'{self.source} names no prompts; add prompts = "FILE" or give --prompts FILE'
            )
        return prompts.read(given or self._path(self.matrix.prompts), limit)


def _from_here(table: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's table whose models are found from the working directory."""
    if "model" not in table:
        return dict(table)
    return {**table, "model": [str(Path(name).absolute()) for name in expand(table["model"])]}


def _given(table: Any, names: Any) -> dict[str, frozenset[Any]]:
    """The keys of a table that have values."""
    return {name: frozenset(value) for name in names if (value := getattr(table, name)) is not None}


def _pattern(table: Any) -> dict[str, frozenset[Any]]:
    given = _given(table, schema.PATTERN.model_fields)
    if "model" in given:
        given["model"] = frozenset(files.stem(Path(name)) for name in given["model"])
    if "quant" in given:
        given["quant"] = frozenset(map(str.upper, given["quant"]))
    return given


def _block(
    targets: list[Model],
    axes: Mapping[str, list[Any]],
    drafters: list[Drafter],
    exclusions: list[Exclusion] | None = None,
) -> Block:
    return Block(
        targets=tuple(dict.fromkeys(targets)),
        axes={name: tuple(dict.fromkeys(values)) for name, values in axes.items()},
        drafters=tuple(dict.fromkeys(drafters)),
        asked=math.prod([len(targets), len(drafters), *map(len, axes.values())]),
        exclusions=tuple(exclusions or ()),
    )
