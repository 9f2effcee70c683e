"""The run directory: everything a run has found out so far, in one SQLite file that only one process writes.

Beside ``run.sqlite`` lie ``matrix.json``, the matrix as it was resolved, and ``run.lock``, held by whoever writes.
Each transaction is on disk, as far as a killed process is concerned, when its block is left; readers are never
blocked and never block.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter

from specbisect import __version__
from specbisect.cell import Case, Cell, Prompt, digest, drafter_label
from specbisect.compare import Outcome, Verdict
from specbisect.errors import BadInput
from specbisect.store import directory, schema
from specbisect.store.schema import COLUMNS, LATEST, Row, Totals, TrialRecord
from specbisect.trace import ArmResult, Counters, Failure, Trace

_LEVEL = 1  # most of a trace is hexadecimal noise, on which higher levels spend time for nothing

_CELL = TypeAdapter(Cell)
_PROMPT = TypeAdapter(Prompt)
_RESULT: TypeAdapter[ArmResult] = TypeAdapter(
    ArmResult, config=ConfigDict(ser_json_inf_nan="constants")
)


class Store:
    """An open run directory. One process may write it, any number may read it meanwhile.

    Whatever is wrong with the directory itself (not one, damaged, no space, not permitted) is raised as `BadInput`.
    """

    def __init__(self, path: Path, database: sqlite3.Connection, opened: ExitStack) -> None:
        self.path = path
        self._database = database
        self._opened = opened

    @classmethod
    def create(
        cls, path: Path, plan: str, resolved: Mapping[str, Any], *, fresh: bool = False
    ) -> Self:
        """The run directory at `path` for the plan with this digest: a new one, or the one that is there.

        `resolved` is the matrix as JSON. A directory of another plan is refused with what differs; `fresh` discards
        what it holds, whatever that is.
        """
        directory.check(path)
        with directory.faults(path), ExitStack() as opened:
            path.mkdir(parents=True, exist_ok=True)
            opened.enter_context(directory.acquire(path))
            if fresh:
                directory.clear(path)
            database = opened.enter_context(closing(directory.connect(path)))
            store = cls(path, database, opened)
            begun = store._begun()
            if begun:
                store._refuse_other(plan, resolved)
            directory.write(path / directory.MATRIX, json.dumps(resolved, indent=1))
            if not begun:
                store._begin(plan)
            store._opened = opened.pop_all()
        return store

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Self:
        """The run directory at `path` as it is; `readonly` works while another process writes it."""
        if not directory.is_run(path):
            raise BadInput(
                f"{path} is not a run directory (it has no {directory.DATABASE}); `specbisect run` makes one"
            )
        with directory.faults(path), ExitStack() as opened:
            if not readonly:
                opened.enter_context(directory.acquire(path))
            database = opened.enter_context(closing(directory.connect(path, readonly=readonly)))
            store = cls(path, database, opened)
            if not store._begun():
                raise BadInput(f"the run in {path} was never begun; start it with `specbisect run`")
            directory.matrix(path)  # said before anything is shown
            store._opened = opened.pop_all()
        return store

    def close(self) -> None:
        """Let others write. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is saved in this block is on disk when it is left, or nothing of it."""
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._database.rollback()
            raise

    # Arms

    def save_arm(self, key: str, result: ArmResult) -> None:
        """Keep what the arm of the case with this key did, in place of an earlier failure."""
        resolved = provenance = None
        counters, vanilla, leave_out = Counters(), False, set()
        if isinstance(result, Trace):
            resolved, provenance = self._share(result.resolved), self._share(result.provenance)
            counters, vanilla = result.counters, result.arm == "vanilla"
            leave_out = {"resolved", "provenance"}
        text = _RESULT.dump_json(result, exclude=leave_out)
        self._upsert(
            "arms",
            key=key,
            vanilla=vanilla,
            resolved=resolved,
            provenance=provenance,
            **asdict(counters),
        )
        self._upsert("results", key=key, json=zlib.compress(text, _LEVEL))

    def arm(self, key: str) -> ArmResult | None:
        """What the arm of the case with this key did; None when it has not run."""
        found = self._one(
            "SELECT results.json, r.json, p.json FROM results JOIN arms USING (key)"
            " LEFT JOIN shared AS r ON r.digest = resolved LEFT JOIN shared AS p ON p.digest = provenance"
            " WHERE key = ?",
            key,
        )
        if found is None:
            return None
        with directory.faults(self.path):
            result = _RESULT.validate_json(zlib.decompress(found[0]))
            if isinstance(result, Failure):
                return result
            return replace(result, resolved=json.loads(found[1]), provenance=json.loads(found[2]))

    def totals(self) -> Totals:
        """What everything stored here cost."""
        names = [f.name for f in fields(Counters)]
        sums = ", ".join(f"coalesce(sum({name}), 0)" for name in names)
        values = self._one(f"SELECT coalesce(sum(vanilla), 0), {sums} FROM arms")
        return Totals(values[0], Counters(**dict(zip(names, values[1:], strict=True))))

    def matrix(self) -> Mapping[str, Any]:
        """The matrix as it was resolved when the run was begun, or last went on."""
        with directory.faults(self.path):
            return directory.matrix(self.path)

    def provenances(self) -> tuple[Mapping[str, Any], ...]:
        """Every library, machine and set of models that traces here come from."""
        found = self._rows(
            "SELECT json FROM shared WHERE digest IN (SELECT provenance FROM arms) ORDER BY digest"
        )
        return tuple(json.loads(text) for (text,) in found)

    # Cases

    def save_case(
        self, ordinal: int, case: Case, verdict: Verdict, speculative: ArmResult | None
    ) -> None:
        """Keep the verdict on a case whose arms are saved already; `speculative` is None when that arm did not run.

        `ordinal` is the case's place in the plan.
        """
        cell, prompt = case.cell, case.prompt
        trace = speculative if isinstance(speculative, Trace) else None
        self._upsert(
            "cases",
            key=case.key,
            ordinal=ordinal,
            cell=self._share_text(cell.key, _CELL.dump_json(cell).decode()),
            prompt=self._share_text(digest(asdict(prompt)), _PROMPT.dump_json(prompt).decode()),
            vanilla=case.vanilla.key,
            resolved=self._share(trace.resolved) if trace else None,
            engine=cell.engine,
            target=cell.target.name,
            quant=cell.target.quant,
            drafter=drafter_label(cell.drafter),
            n_max=cell.width - 1,
            n_batch=cell.n_batch,
            n_ubatch=cell.n_ubatch,
            prompt_id=prompt.id,
            prompt_group=prompt.group,
            drafted=trace.drafted if trace else 0,
            accepted=trace.accepted if trace else 0,
            cycles=len(trace.cycles) if trace else 0,
            **asdict(verdict),
        )

    def outcome(self, key: str) -> Outcome | None:
        """The outcome of the case with this key; None when it is not finished."""
        found = self._one("SELECT outcome FROM cases WHERE key = ?", key)
        return found[0] if found else None

    def reopen(self, vanilla: str) -> list[tuple[int, Case, Outcome]]:
        """Forget the verdicts, and findings, on all cases of the vanilla arm with this key.

        They are returned with their places in the plan and what their outcomes were.
        """
        found = list(
            self._rows("SELECT key, ordinal, outcome FROM cases WHERE vanilla = ?", vanilla)
        )
        cases = [(ordinal, self.case(key), outcome) for key, ordinal, outcome in found]
        with self.transaction():
            self._execute(
                "DELETE FROM findings WHERE case_key IN (SELECT key FROM cases WHERE vanilla = ?)",
                vanilla,
            )
            self._execute("DELETE FROM cases WHERE vanilla = ?", vanilla)
        return cases

    def case(self, key: str) -> Case:
        """The case with this key, or the only one whose key begins so."""
        found = list(
            self._rows(
                "SELECT c.json, p.json FROM cases JOIN shared AS c ON c.digest = cell"
                " JOIN shared AS p ON p.digest = prompt WHERE key >= ? AND key < ? || 'g' LIMIT 2",
                key,
                key,
            )
        )
        if len(found) != 1:
            wrong = "more than one case begins with" if found else "no finished case is called"
            raise BadInput(
                f"{wrong} {key!r} in {self.path}; `specbisect show {self.path} --cases` lists them"
            )
        ((cell, prompt),) = found
        with directory.faults(self.path):
            return Case(_CELL.validate_json(cell), _PROMPT.validate_json(prompt))

    def count(self) -> int:
        """How many cases have finished."""
        (found,) = self._one("SELECT count(*) FROM cases")
        return int(found)

    def rows(self, **equal: object) -> Iterator[Row]:
        """Finished cases in the order of the plan; `equal` names columns of `Row` and the value each must have.

        A tuple or list of values allows any of them: ``rows(quant="Q8_0", outcome=("fork", "length"))``.
        """
        where, options = [], []
        for name, wanted in equal.items():
            allowed = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
            where.append(f"{COLUMNS[name]} IN ({', '.join('?' * len(allowed))})")
            options += allowed
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        cells: dict[str, Cell] = {}
        settings: dict[str | None, Mapping[str, Any]] = {None: {}}
        for values in self._rows(
            f"SELECT {', '.join(COLUMNS.values())} FROM cases {LATEST}{condition} ORDER BY ordinal",
            *options,
        ):
            *_, cell, resolved = values
            if cell not in cells:
                with directory.faults(self.path):
                    cells[cell] = _CELL.validate_json(self._shared(cell))
            if resolved not in settings:
                settings[resolved] = json.loads(self._shared(resolved))
            yield Row._make((*values[:-2], cells[cell], settings[resolved]))

    # Findings and searches

    def save_finding(self, key: str, text: str) -> None:
        """Add a finding (JSON) to those of the case with this key."""
        self._execute("INSERT INTO findings VALUES (?, ?, ?)", key, text, _now())

    def findings(self, key: str) -> tuple[str, ...]:
        """The findings (JSON) of the case with this key, the latest last."""
        found = self._rows("SELECT json FROM findings WHERE case_key = ? ORDER BY rowid", key)
        return tuple(text for (text,) in found)

    def keep(self, key: str, text: str) -> None:
        """Keep a measurement under a key of its own (an envelope, a profile)."""
        with self.transaction():
            self._share_text(key, text)

    def kept(self, key: str) -> str | None:
        """A measurement kept before, or None."""
        found = self._one("SELECT json FROM shared WHERE digest = ?", key)
        return None if found is None else str(found[0])

    def begin_trial(self, search: str, candidate: str) -> None:
        """Enter a trial before it runs; one that was entered before is entered again as not ended."""
        self._execute(
            "INSERT INTO trials SELECT ?1, count(*), ?2, NULL FROM trials WHERE search = ?1"
            " ON CONFLICT (search, candidate) DO UPDATE SET result = NULL",
            search,
            candidate,
        )

    def end_trial(self, search: str, candidate: str, result: str) -> None:
        """Enter the result (JSON) of a trial that has begun."""
        sql = "UPDATE trials SET result = ? WHERE search = ? AND candidate = ?"
        self._execute(sql, result, search, candidate)

    def trials(self, search: str) -> tuple[TrialRecord, ...]:
        """The journal of a search, in the order in which its trials were first begun."""
        found = self._rows(
            "SELECT candidate, result FROM trials WHERE search = ? ORDER BY ordinal", search
        )
        return tuple(TrialRecord(*values) for values in found)

    # SQL

    def _execute(self, sql: str, *values: object) -> None:
        with directory.faults(self.path):
            self._database.execute(sql, values)

    def _rows(self, sql: str, *values: object) -> Iterator[Any]:
        with directory.faults(self.path):
            yield from self._database.execute(sql, values)

    def _one(self, sql: str, *values: object) -> Any:
        return next(self._rows(sql, *values), None)

    def _upsert(self, table: str, **values: object) -> None:
        key, *others = values
        changes = ", ".join(f"{name} = excluded.{name}" for name in others)
        self._execute(
            f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
            f" ON CONFLICT ({key}) DO UPDATE SET {changes}",
            *values.values(),
        )

    def _share(self, value: Mapping[str, Any]) -> str:
        return self._share_text(digest(value), json.dumps(value))

    def _share_text(self, key: str, text: str) -> str:
        # Keys leave paths out: models that were moved keep their key and change the text.
        self._execute(
            "INSERT INTO shared VALUES (?, ?) ON CONFLICT (digest) DO UPDATE SET json = excluded.json"
            " WHERE json <> excluded.json",
            key,
            text,
        )
        return key

    def _shared(self, key: str) -> str:
        (text,) = self._one("SELECT json FROM shared WHERE digest = ?", key)
        return str(text)

    def _begun(self) -> bool:
        (application,) = self._one("PRAGMA application_id")
        (version,) = self._one("PRAGMA user_version")
        if (application, version) == (schema.APPLICATION_ID, schema.VERSION):
            return True
        if application == schema.APPLICATION_ID:
            raise BadInput(
                f"{self.path} was written by a specbisect with schema {version}, this one has {schema.VERSION};"
                " use that version, or --fresh to discard what it holds"
            )
        if self._one("SELECT 1 FROM sqlite_schema"):
            raise BadInput(
                f"{self.path / directory.DATABASE} is another program's database; choose another directory"
            )
        return False

    def _begin(self, plan: str) -> None:
        facts = {"plan": plan, "created": _now(), "specbisect": __version__}
        # A page holds several traces, or half of it would stay empty.
        self._database.executescript(
            f"PRAGMA page_size = 16384; PRAGMA journal_mode = WAL; BEGIN IMMEDIATE; {schema.TABLES}"
        )
        for item in facts.items():
            self._execute("INSERT INTO meta VALUES (?, ?)", *item)
        self._execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        self._execute(f"PRAGMA user_version = {schema.VERSION}")
        self._execute("COMMIT")

    def _refuse_other(self, plan: str, resolved: Mapping[str, Any]) -> None:
        (stored,) = self._one("SELECT value FROM meta WHERE name = 'plan'")
        if stored == plan:
            return
        changes = directory.changes(self.matrix(), json.loads(json.dumps(resolved)))
        count, reason = self.count(), changes or "it makes other cases of the same settings"
        raise BadInput(
            f"{self.path} holds {count} case{'s' if count != 1 else ''} of another matrix ({reason});"
            " choose another directory, or --fresh to discard them"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
