"""Policy files: which departures a release may have, how sure one must be, and how much acceptance may move."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from scipy.stats import binomtest

from specbisect.cell import drafter_label
from specbisect.errors import BadInput, did_you_mean
from specbisect.matrix import shipped as matrices
from specbisect.matrix.reading import dotted, read
from specbisect.matrix.schema import Table
from specbisect.store import Row

SCHEMA = "specbisect.gate/1"
MOST_PROMPTS = 1_000_000

Allowable = Literal[
    "batch-width",
    "kernel-defect",
    "baseline",
    "prompt-cache",
    "batch-composition",
    "server-only",
    "binding-only",
    "unexplained",
]
"""Causes that a policy may allow for; the others (state, verification, cross-sequence…) no release may have."""

Several = Annotated[
    list[str],
    BeforeValidator(
        lambda v: [v] if isinstance(v, str) else v, json_schema_input_type=str | list[str]
    ),
]


class Scope(Table):
    """Which cases a rule is about: those that have a value of every key given."""

    quant: Several | None = Field(None, description="quantisations of the target")
    group: Several | None = Field(None, description="prompt groups")
    drafter: Several | None = Field(None, description="methods of drafting")

    def fits(self, row: Row) -> bool:
        """Whether `row` is meant."""
        return (
            (self.quant is None or row.quant in map(str.upper, self.quant))
            and (self.group is None or row.prompt_group in self.group)
            and (self.drafter is None or drafter_label(row.cell.drafter) in self.drafter)
        )


class Allow(Scope):
    """How many of the prompts of a cell may depart with one cause; where nothing is said, none may."""

    label: Allowable
    rate: Annotated[float, Field(ge=0, le=1, description="share of prompts that may depart")] = 0.0
    confidence: Annotated[
        float, Field(gt=0, lt=1, description="of the one-sided bound of the share")
    ] = 0.95
    not_before: Annotated[
        int, Field(ge=0, description="index of the first token that may depart")
    ] = 0


class Acceptance(Scope):
    """How far the share of accepted tokens may be from the locked one, in either direction.

    A fall costs time. A rise nobody can explain is as suspicious: something may accept what it should not.
    """

    tolerance: Annotated[
        float, Field(gt=0, le=1, description="largest difference of the shares")
    ] = 0.05
    positions: Annotated[
        int, Field(ge=0, description="places in the draft that are judged one by one, too")
    ] = 0
    min_drafted: Annotated[
        int, Field(ge=1, description="drafted tokens below which a share says too little")
    ] = 50
    at_least: Annotated[float, Field(ge=0, le=1, description="a floor that needs no lock")] = 0.0


class Policy(Table):
    """A policy file. Of several rules that fit a case, the last one counts."""

    schema_: Literal["specbisect.gate/1"] = Field(alias="schema")
    audit: bool = Field(
        True, description="also examine cases that agree, for states silently wrong"
    )
    min_exercised: Annotated[
        float,
        Field(ge=0, le=1, description="share of a cell's prompts that must exercise its drafter"),
    ] = 1.0
    allow: list[Allow] = Field(default_factory=list)
    acceptance: list[Acceptance] = Field(default_factory=list)

    def allowed(self, cause: str, row: Row) -> Allow | None:
        """The rule about departures of `row` with that cause."""
        fitting = [rule for rule in self.allow if rule.label == cause and rule.fits(row)]
        return fitting[-1] if fitting else None

    def floor(self, row: Row) -> Acceptance | None:
        """The rule about the acceptance of `row`."""
        fitting = [rule for rule in self.acceptance if rule.fits(row)]
        return fitting[-1] if fitting else None


def shipped() -> dict[str, Path]:
    """The policies that come with specbisect, by name."""
    folder = next(iter(matrices().values())).parent / "policies"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(name: str) -> Path:
    """The policy file at the path `name`, else the shipped one of that name. Raises `BadInput` when there is none."""
    if Path(name).exists():
        return Path(name)
    if name in shipped():
        return shipped()[name]
    raise BadInput(
        f"policy {name!r} is neither a file nor a shipped policy{did_you_mean(name, shipped())}"
    )


_TABLES: dict[str, type[BaseModel]] = {"allow": Allow, "acceptance": Acceptance}


def load(path: Path) -> Policy:
    """The policy in the TOML file at `path`. Raises `BadInput`, one line, for anything wrong in it."""
    tables, _ = read(path)
    try:
        return Policy.model_validate(tables)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BadInput(f"{path}: {_explain(first['loc'], first)}") from None


def _explain(loc: tuple[int | str, ...], error: Any) -> str:
    key, last = dotted(loc), str(loc[-1]) if loc else ""
    table = _TABLES.get(str(loc[0]), Policy) if len(loc) > 1 else Policy
    match error["type"]:
        case "extra_forbidden":
            known = [f.alias or name for name, f in table.model_fields.items()]
            return f"unknown key {key}{did_you_mean(last, known)}"
        case "missing":
            given = f'schema = "{SCHEMA}"' if last == "schema" else last
            return f"{key} is missing; add {given}"
        case "literal_error" if last == "label":
            hint = did_you_mean(str(error["input"]), get_args(Allowable))
            return f"{key} = {error['input']!r} cannot be allowed{hint}"
        case "literal_error":
            return f"{key} = {error['input']!r} is another kind of file; a policy has {SCHEMA}"
        case _:
            return f"{key} = {error['input']!r}: {error['msg']}; mend the value"


def upper_bound(events: int, n: int, confidence: float) -> float:
    """The largest rate that `events` in `n` trials do not rule out, one-sided (Clopper & Pearson 1934)."""
    return float(binomtest(events, n, alternative="less").proportion_ci(confidence, "exact").high)


def lower_bound(events: int, n: int, confidence: float) -> float:
    """The smallest rate that `events` in `n` trials do not rule out, one-sided (Clopper & Pearson 1934)."""
    return float(binomtest(events, n, alternative="greater").proportion_ci(confidence, "exact").low)


def prompts_needed(events: int, rate: float, confidence: float) -> int:
    """Trials after which `events` and no more show a rate of at most `rate`; at most `MOST_PROMPTS`."""
    trials: Sequence[int] = range(max(1, events), MOST_PROMPTS)
    at = bisect_left(trials, True, key=lambda n: upper_bound(events, n, confidence) <= rate)
    return trials[0] + at


def json_schema() -> dict[str, Any]:
    """The JSON schema of policy files."""
    return Policy.model_json_schema(by_alias=True, mode="validation")
