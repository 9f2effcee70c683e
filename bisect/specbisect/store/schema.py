"""What a run directory holds: its tables, and the rows that come out of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from specbisect.cell import Cell
from specbisect.compare import Outcome
from specbisect.trace import Counters

VERSION = 1
APPLICATION_ID = 0x73706273
"""Marks SQLite files as ours: "spbs"."""

TABLES = """
-- What this run is: the digest of its plan, and when and by which version it was begun.
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- JSON that many rows share, once each under its digest: cells, prompts, resolved settings, provenance.
CREATE TABLE shared (digest TEXT PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;

-- Every arm that ran, under the key of its case, with where it ran and what it cost.
CREATE TABLE arms (
    key TEXT PRIMARY KEY, vanilla INTEGER NOT NULL, resolved TEXT REFERENCES shared, provenance TEXT REFERENCES shared,
    model_loads INTEGER NOT NULL, decode_calls INTEGER NOT NULL, decoded_tokens INTEGER NOT NULL,
    decode_s REAL NOT NULL, total_s REAL NOT NULL
) WITHOUT ROWID;

-- What each arm did, as zlib'd JSON of a trace or a failure; apart from `arms` because it is large.
CREATE TABLE results (key TEXT PRIMARY KEY REFERENCES arms, json BLOB NOT NULL);

-- The verdict on every finished case, with all that lists show of it.
CREATE TABLE cases (
    key TEXT PRIMARY KEY, ordinal INTEGER NOT NULL, cell TEXT NOT NULL REFERENCES shared,
    prompt TEXT NOT NULL REFERENCES shared, vanilla TEXT NOT NULL REFERENCES arms, resolved TEXT REFERENCES shared,
    engine TEXT NOT NULL, target TEXT NOT NULL, quant TEXT NOT NULL, drafter TEXT NOT NULL, n_max INTEGER NOT NULL,
    n_batch INTEGER NOT NULL, n_ubatch INTEGER NOT NULL, prompt_id TEXT NOT NULL, prompt_group TEXT NOT NULL,
    outcome TEXT NOT NULL, compared INTEGER NOT NULL, fork INTEGER, reference_token INTEGER,
    speculative_token INTEGER, margin REAL, reason TEXT NOT NULL, drafted INTEGER NOT NULL, accepted INTEGER NOT NULL,
    cycles INTEGER NOT NULL
);
CREATE INDEX cases_in_order ON cases (ordinal);

-- Diagnosed causes of cases, each a finding's JSON as it was at that time.
CREATE TABLE findings (case_key TEXT NOT NULL REFERENCES cases, json TEXT NOT NULL, created TEXT NOT NULL);
CREATE INDEX findings_of_case ON findings (case_key);

-- The journal of searches: a trial is entered before it runs, and has no result until it has ended.
CREATE TABLE trials (
    search TEXT NOT NULL, ordinal INTEGER NOT NULL, candidate TEXT NOT NULL, result TEXT,
    PRIMARY KEY (search, ordinal), UNIQUE (search, candidate)
) WITHOUT ROWID;
"""


LATEST = (
    "LEFT JOIN findings AS latest"
    " ON latest.rowid = (SELECT max(rowid) FROM findings WHERE case_key = cases.key)"
)
"""Joins every case with its latest finding, if it has one."""


class Row(NamedTuple):
    """One finished case as lists show it; names as in `Cell`, `Verdict` and `Trace`, `id` is the case's key.

    `label`, `kind` and `evidence` are those of its latest finding, None when it was not diagnosed. A tuple, because
    making a hundred thousand frozen dataclasses takes longer than reading them.
    """

    id: str
    ordinal: int
    engine: str
    target: str
    quant: str
    drafter: str
    n_max: int
    n_batch: int
    n_ubatch: int
    prompt_id: str
    prompt_group: str
    outcome: Outcome
    compared: int
    fork: int | None
    reference_token: int | None
    speculative_token: int | None
    margin: float | None
    reason: str
    drafted: int
    accepted: int
    cycles: int
    label: str | None
    kind: str | None
    evidence: str | None
    cell: Cell
    resolved: Mapping[str, Any]

    @property
    def rejected(self) -> int:
        """Drafted tokens that the target did not confirm."""
        return self.drafted - self.accepted


COLUMNS = {name: name for name in Row._fields} | {
    "id": "key",
    "label": "json_extract(latest.json, '$.label')",
    "kind": "json_extract(latest.json, '$.kind')",
    "evidence": "json_extract(latest.json, '$.summary')",
}
"""SQL for each field of a row."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What all arms of a run cost together, however often it was interrupted."""

    vanilla_runs: int
    counters: Counters


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One entry of a search's journal; `result` is None when the trial did not live to its end."""

    candidate: str
    result: str | None
