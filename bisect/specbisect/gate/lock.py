"""Lock files: the identity of a run that was good, and the acceptance its drafters had."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from specbisect import __version__
from specbisect.cell import Cell
from specbisect.errors import BadInput
from specbisect.gate.acceptance import Acceptance
from specbisect.gate.identity import Identity, Part, changes, draft_models, settings_key
from specbisect.gate.interface import draft_of
from specbisect.matrix import Plan
from specbisect.matrix.schema import Table
from specbisect.store.directory import faults, write

SCHEMA = "specbisect.lock/1"


class Locked(Table):
    """The acceptance of one cell on one prompt group.

    `target` and `drafter` are places in the identity's lists, so that a swapped model is held against what it
    replaces; `drafter` is None where no draft model is.
    """

    target: int
    drafter: int | None
    settings: str
    group: str
    counts: Acceptance


class Lock(Table):
    """A lock file."""

    schema_: Literal["specbisect.lock/1"] = Field(alias="schema")
    specbisect: str
    matrix: str
    identity: Identity
    acceptance: list[Locked]

    @classmethod
    def make(
        cls, plan: Plan, identity: Identity, counts: Mapping[tuple[Cell, str], Acceptance]
    ) -> "Lock":
        """The lock of a finished run of `plan`."""
        places = Places(plan)
        found = [
            Locked(
                target=target,
                drafter=drafter,
                settings=settings,
                group=group,
                counts=accepted,
            )
            for (cell, group), accepted in counts.items()
            for target, drafter, settings in [places.of(cell)]
        ]
        return cls.model_validate(
            {
                "schema": SCHEMA,
                "specbisect": __version__,
                "matrix": Path(plan.source).name,
                "identity": identity,
                "acceptance": found,
            }
        )

    def baseline(self, plan: Plan) -> "Baseline":
        """The locked acceptance, for cells of `plan`."""
        entries = {(x.target, x.drafter, x.settings, x.group): x.counts for x in self.acceptance}
        return Baseline(Places(plan), entries)

    def write(self, path: Path) -> None:
        """Write the file at `path`, whole or not at all. Raises `BadInput` when it cannot be written."""
        with faults(path):
            write(path, self.model_dump_json(by_alias=True, indent=1) + "\n")


class Places:
    """Where the models of cells stand in their plan."""

    def __init__(self, plan: Plan) -> None:
        self._targets = {model: at for at, model in enumerate(plan.targets)}
        self._drafts = {model: at for at, model in enumerate(draft_models(plan.cells()))}

    def of(self, cell: Cell) -> tuple[int, int | None, str]:
        """The places of the target and of the draft model, and what is asked for beside them."""
        draft = draft_of(cell)
        at = None if draft is None else self._drafts[draft]
        return self._targets[cell.target], at, settings_key(cell)


class Baseline:
    """The locked acceptance of a cell on a prompt group; None where the lock has none."""

    def __init__(
        self, places: Places, entries: Mapping[tuple[int, int | None, str, str], Acceptance]
    ) -> None:
        self._places = places
        self._entries = entries

    def __call__(self, cell: Cell, group: str) -> Acceptance | None:
        """The counts, if they are known."""
        return self._entries.get((*self._places.of(cell), group))


def load(path: Path) -> Lock:
    """The lock file at `path`. Raises `BadInput` when it is none."""
    try:
        return Lock.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror}); make one with `specbisect lock`"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"{path} is no lock file of this version ({where or 'file'}: {first['msg']}); "
            "make one with `specbisect lock`"
        ) from None


def compare(locked: Identity, now: Identity, accept: Sequence[Part]) -> tuple[str, ...]:
    """The changes that were meant, one line each. Raises `BadInput` when there are others."""
    found = changes(locked, now)
    other = [part for part in found if part not in accept]
    if other:
        lines = [line for part in other for line in found[part]]
        raise BadInput(
            f"this is not what was locked: {'; '.join(_few(lines))}. If that is meant, give "
            f"{' '.join(f'--accept {part}' for part in other)}, or make a new lock"
        )
    return tuple(line for lines in found.values() for line in lines)


def _few(lines: Iterable[str], shown: int = 6) -> list[str]:
    lines = list(lines)
    more = [f"and {len(lines) - shown} more"] if len(lines) > shown else []
    return [*lines[:shown], *more]


def json_schema() -> dict[str, Any]:
    """The JSON schema of lock files."""
    return Lock.model_json_schema(by_alias=True, mode="validation")
