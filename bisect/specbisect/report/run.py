"""A whole run in the numbers that a page shows: read once, counted, and sampled where reading all would take long."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbisect import __version__
from specbisect.cell import AXES
from specbisect.compare import Outcome
from specbisect.report.scrub import Scrubber
from specbisect.store import Row, Store, Totals
from specbisect.trace import Trace

DIFFERENT: tuple[Outcome, ...] = ("fork", "length", "degenerate")
"""Outcomes that are a difference between the arms."""
SAMPLE = 200
"""Cases of which traces are read: margins, acceptance by position and times come from these."""
LISTED = 5000
"""Cases a report lists at most, spread over the cells of the matrix."""

UNDIAGNOSED = "not diagnosed"
SEVERITY = (
    "cross-sequence",
    "state",
    "verification",
    "kernel-defect",
    "baseline",
    "nondeterministic",
    "prompt-cache",
    "batch-composition",
    "server-only",
    "binding-only",
    "failed",
    "degenerate",
    "unexplained",
    UNDIAGNOSED,
    "invalid",
    "draft-alignment",
    "batch-width",
    "not-engaged",
    "unexercised",
    "none",
    "agree",
)
"""What a case comes to, worst first: its label; without one, its outcome."""

KINDS = {
    **dict.fromkeys(SEVERITY[:10], "defect"),
    **dict.fromkeys(("failed", "degenerate", "invalid"), "failed"),
    **dict.fromkeys(("unexplained", UNDIAGNOSED, "draft-alignment"), "open"),
    "batch-width": "numeric",
    **dict.fromkeys(("not-engaged", "unexercised"), "void"),
    **dict.fromkeys(("none", "agree"), "same"),
}
"""The colour of each of `SEVERITY`."""

_LABEL = re.compile(r'"label": ?"([a-z-]+)"')  # inside a text the quotes would be escaped


@dataclass(frozen=True, slots=True)
class Entry:
    """One case: its row, what it comes to, and what tables call its target and the axes that vary in the run."""

    row: Row
    verdict: str
    target: str

    @property
    def rank(self) -> int:
        """Place in `SEVERITY`."""
        return SEVERITY.index(self.verdict)


@dataclass(slots=True)
class Group:
    """The cases of one cell of the matrix: a target and a drafter of one width."""

    target: str
    drafter: str
    n_max: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def worst(self) -> str:
        """The worst that any of its cases comes to."""
        return min(self.entries, key=lambda e: e.rank).verdict

    @property
    def counts(self) -> Counter[str]:
        """Cases by what they come to, worst first."""
        found = Counter(e.verdict for e in self.entries)
        return Counter({name: found[name] for name in SEVERITY if found[name]})

    @property
    def different(self) -> int:
        """Cases whose arms differ."""
        return sum(e.row.outcome in DIFFERENT for e in self.entries)

    @property
    def compared(self) -> int:
        """Cases that say something: the arms differ, or agree after something was drafted and accepted."""
        return sum(e.row.outcome in (*DIFFERENT, "agree") for e in self.entries)

    @property
    def rejected(self) -> int:
        """Drafted tokens that were not accepted: without any, rollback was not tested."""
        return sum(e.row.rejected for e in self.entries)

    @property
    def acceptance(self) -> float | None:
        """Accepted among drafted tokens."""
        drafted = sum(e.row.drafted for e in self.entries)
        return sum(e.row.accepted for e in self.entries) / drafted if drafted else None

    def listed(self, limit: int) -> list[Entry]:
        """The worst cases first, at most so many."""
        return sorted(self.entries, key=lambda e: (e.rank, e.row.ordinal))[:limit]


@dataclass(frozen=True, slots=True)
class Arms:
    """Both traces of a sampled case, and its entry; `envelope` is that experiment's data."""

    entry: Entry
    speculative: Trace
    vanilla: Trace | None
    envelope: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """All of a run. `groups` by (target, (drafter, n_max)); `targets` and `drafters` in the order of the plan."""

    name: str
    entries: Sequence[Entry]
    groups: Mapping[tuple[str, tuple[str, int]], Group]
    targets: Sequence[str]
    drafters: Sequence[tuple[str, int]]
    sample: Sequence[Arms]
    totals: Totals
    provenances: Sequence[Mapping[str, Any]]
    version: str = __version__

    @property
    def outcomes(self) -> Counter[str]:
        """Cases by outcome."""
        return Counter(e.row.outcome for e in self.entries)

    @property
    def verdicts(self) -> Counter[str]:
        """Cases by what they come to, worst first."""
        found = Counter(e.verdict for e in self.entries)
        return Counter({name: found[name] for name in SEVERITY if found[name]})

    @property
    def per_group(self) -> int:
        """How many cases of a cell are listed."""
        return max(3, LISTED // max(1, len(self.groups)))

    def axes(self) -> Iterator[tuple[str, Any, int, int]]:
        """(axis, value, cases compared, cases that differ) for every axis with more than one value in this run."""
        for name in AXES:
            seen: dict[Any, list[Entry]] = defaultdict(list)
            for entry in self.entries:
                seen[getattr(entry.row.cell, name)].append(entry)
            if len(seen) > 1:
                for value, entries in seen.items():
                    group = Group("", "", 0, entries)
                    yield name, value, group.compared, group.different

    def failures(self) -> list[tuple[str, int, str]]:
        """(reason, cases, id of one of them) of what failed or could not be compared, most frequent first."""
        seen: dict[str, list[Row]] = defaultdict(list)
        for entry in self.entries:
            if entry.row.outcome in ("failed", "invalid", "unexercised"):
                seen[f"{entry.row.outcome}: {entry.row.reason}"].append(entry.row)
        ordered = sorted(seen.items(), key=lambda item: (-len(item[1]), item[0]))
        return [(reason, len(rows), rows[0].id) for reason, rows in ordered]


def read(store: Store, scrubber: Scrubber | None = None) -> Run:
    """Everything a report on the run in `store` says, scrubbed."""
    clean = scrubber or Scrubber.of_this_machine()
    findings: dict[str, str] = {}
    rows = [_scrubbed(row, clean) for row in store.rows()]
    several = len({row.target for row in rows}) > 1
    axes = [name for name in AXES if len({getattr(row.cell, name) for row in rows}) > 1]
    entries = []
    groups: dict[tuple[str, tuple[str, int]], Group] = {}
    for row in rows:
        if stored := store.findings(row.id):
            findings[row.id] = stored[-1]
        target = f"{row.target} {row.quant}" if several and row.target != row.quant else row.quant
        target = ", ".join([target, *(clean.text(f"{n} {getattr(row.cell, n)}") for n in axes)])
        entry = Entry(row, _verdict(row, findings.get(row.id, "")), target)
        entries.append(entry)
        drafter = row.drafter, row.n_max
        groups.setdefault((target, drafter), Group(target, *drafter)).entries.append(entry)
    return Run(
        name=clean.text(store.path.resolve().name),
        entries=entries,
        groups=groups,
        targets=list(dict.fromkeys(target for target, _ in groups)),
        drafters=sorted({drafter for _, drafter in groups}),
        sample=list(_sampled(store, entries, findings)),
        totals=store.totals(),
        provenances=clean.walk(list(store.provenances())),
    )


def _scrubbed(row: Row, clean: Scrubber) -> Row:
    target, prompt, reason = (clean.text(t) for t in (row.target, row.prompt_id, row.reason))
    if (target, prompt, reason) == (row.target, row.prompt_id, row.reason):
        return row
    return row._replace(target=target, prompt_id=prompt, reason=reason)


def _verdict(row: Row, finding: str) -> str:
    """The label that experiments earned; without one, the outcome."""
    found = _LABEL.search(finding)
    if found and (found[1] != "none" or row.outcome == "agree"):
        return found[1]
    if row.outcome in ("fork", "length"):
        return UNDIAGNOSED
    return row.outcome


def _sampled(store: Store, entries: Sequence[Entry], findings: Mapping[str, str]) -> Iterator[Arms]:
    """Traces of cases spread evenly: half of the sample among those that differ, half among the others."""
    different = [e for e in entries if e.row.outcome in DIFFERENT]
    others = [e for e in entries if e.row.outcome not in (*DIFFERENT, "failed", "invalid")]
    for entry in (*_spread(different, SAMPLE // 2), *_spread(others, SAMPLE // 2)):
        speculative = store.arm(entry.row.id)
        if not isinstance(speculative, Trace):
            continue
        vanilla = store.arm(store.case(entry.row.id).vanilla.key)
        yield Arms(
            entry,
            speculative,
            vanilla if isinstance(vanilla, Trace) else None,
            _envelope(findings.get(entry.row.id, "")),
        )


def _spread(entries: Sequence[Entry], n: int) -> Iterable[Entry]:
    if len(entries) <= n:
        return entries
    return [entries[i * len(entries) // n] for i in range(n)]


def _envelope(finding: str) -> Mapping[str, Any]:
    if not finding:
        return {}
    evidence = json.loads(finding).get("evidence", ())
    found = [e.get("data", {}) for e in evidence if e.get("experiment") == "envelope"]
    return found[0] if found else {}
