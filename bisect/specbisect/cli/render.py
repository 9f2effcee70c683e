"""Runs and lists of cases as text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from specbisect.cell import Cell, Drafter
from specbisect.cli.grid import grid
from specbisect.cli.naming import Naming
from specbisect.cli.verdicts import COMPARED, DIFFERENT, Verdicts
from specbisect.store import Row

UNTESTED = "*"
"""Marks cells whose cases never rejected a token."""
ID_LENGTH = 8
LEAST_RESULT = 26


@dataclass(frozen=True)  # no slots, for the cached properties: a run can have very many cells
class CellRows:
    """The finished cases of one cell."""

    cell: Cell
    rows: tuple[Row, ...]

    @cached_property
    def verdicts(self) -> Verdicts:
        """How many cases have which outcome."""
        return Verdicts.of(row.outcome for row in self.rows)

    @cached_property
    def compared(self) -> list[Row]:
        """Cases that say something about the arms."""
        return [row for row in self.rows if row.outcome in COMPARED]

    @property
    def rollback_untested(self) -> bool:
        """Whether cases were compared and no drafted token of any was rejected."""
        return bool(self.compared) and not any(row.rejected for row in self.compared)

    @property
    def different(self) -> int:
        """How many cases differ."""
        return self.verdicts.count(*DIFFERENT)

    @property
    def first(self) -> int | None:
        """The earliest token at which a case differs."""
        return min((row.fork for row in self.compared if row.fork is not None), default=None)

    def words(self) -> list[str]:
        """``3/24, first at 6`` or ``0/24 in 2304 tokens``, then what was not compared."""
        compared, words = self.compared, []
        if compared:
            found = f"{self.different}/{len(compared)}"
            if self.first is not None:
                found += f", first at {self.first}"
            elif not self.different:
                found += f" in {sum(row.compared for row in compared)} tokens"
            words.append(found + UNTESTED * self.rollback_untested)
        for outcome in ("unexercised", "failed", "invalid"):
            if count := self.verdicts.count(outcome):
                words.append(f"{count} {outcome}" if count < len(self.rows) else outcome)
        return words


def by_cell(rows: Sequence[Row]) -> list[CellRows]:
    """Cells in the order in which they first appear."""
    found: dict[Cell, list[Row]] = {}
    for cell, alike in groupby(rows, attrgetter("cell")):
        found.setdefault(cell, []).extend(alike)
    return [CellRows(cell, tuple(of_cell)) for cell, of_cell in found.items()]


def table(cells: Sequence[CellRows], width: int) -> str:
    """Quantisation × drafter × whatever else varies; one line for each cell where that is too wide for `width`."""
    naming = Naming(c.cell for c in cells)
    drafters = {c.cell.drafter: "\n".join(naming.drafter(c.cell)) for c in cells}
    heads = [*naming.headers, *drafters.values()]
    if _width(grid([], heads)) <= width:
        text = grid(_across(cells, naming, drafters), heads)
        if _width(text) <= width:
            return text
    lines = [
        [*naming.settings(c.cell), " ".join(naming.drafter(c.cell)), ", ".join(c.words())]
        for c in cells
    ]
    return grid(lines, [*naming.headers, "drafter", "cases that differ"])


def _across(
    cells: Sequence[CellRows], naming: Naming, drafters: Iterable[Drafter | None]
) -> list[list[str]]:
    found: dict[tuple[str, ...], dict[Drafter | None, str]] = {}
    for c in cells:
        key = (c.cell.target.identity, *naming.settings(c.cell))
        found.setdefault(key, {})[c.cell.drafter] = "\n".join(c.words())
    return [
        [*key[1:], *(line.get(drafter, "") for drafter in drafters)] for key, line in found.items()
    ]


def legend(cells: Sequence[CellRows]) -> Iterator[str]:
    """What the table means, for those who read it the first time; never more than was measured."""
    rows = [row for c in cells for row in c.rows]
    verdicts = Verdicts.of(row.outcome for row in rows)
    yield f"{verdicts}."
    if forked := next((c for c in cells if c.first is not None), None):
        yield (
            f"{forked.words()[0]}: {forked.different} of {len(forked.compared)} cases differ, the earliest at "
            f"generated token {forked.first}, counted from 0."
        )
    if agreeing := [row for row in rows if row.outcome == "agree"]:
        tokens = sum(row.compared for row in agreeing)
        prompts = len({row.prompt_id for row in agreeing})
        yield (
            f"No difference in {tokens} tokens over {prompts} prompt{'s' * (prompts > 1)} where cases agree; "
            "longer or other texts may still differ."
        )
    if causes := Counter(row.label for row in rows if row.label is not None):
        each = ", ".join(f"{count} {label}" for label, count in sorted(causes.items()))
        yield f"Causes, by experiment: {each}."
    if any(c.rollback_untested for c in cells):
        yield f"{UNTESTED} no drafted token was rejected: rollback was not tested."
    if verdicts.count("unexercised"):
        yield "unexercised: nothing was drafted or nothing accepted, so this is no pass."


def cases(rows: Sequence[Row], width: int) -> str:
    """One line for each case, cut to `width` at what is said last."""
    naming = Naming(row.cell for row in rows)
    digits = id_length([row.id for row in rows])
    headers = ["id", *naming.headers, "drafter", "prompt", "accepted"]
    lines = [
        [
            row.id[:digits],
            *naming.settings(row.cell),
            " ".join(naming.drafter(row.cell)),
            row.prompt_id,
            f"{row.accepted}/{row.drafted}",
        ]
        for row in rows
    ]
    left = max(LEAST_RESULT, width - _width(grid(lines, headers)) - 2)
    lines = [[*line, _cut(result(row), left)] for line, row in zip(lines, rows, strict=True)]
    return grid(lines, [*headers, "result"])


def result(row: Row) -> str:
    """The outcome, and where a case differs and by what margin, or how much agrees, or why it says nothing."""
    if row.outcome == "agree":
        found = f"agree, {row.compared} tokens"
    elif row.outcome == "fork":
        margin = "" if row.margin is None else f", margin {row.margin:.2g}"
        found = f"fork at {row.fork}{margin}"
    else:
        found = f"{row.outcome}: {row.reason}"
    return found if row.label is None else f"{found}; {row.label}: {row.evidence}"


def id_length(ids: Sequence[str]) -> int:
    """How many digits tell all `ids` apart."""
    lengths = range(ID_LENGTH, max(map(len, ids), default=ID_LENGTH))
    return next((n for n in lengths if len({i[:n] for i in ids}) == len(ids)), lengths.stop)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _width(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)
