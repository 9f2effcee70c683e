"""A run as one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specbisect import __version__
from specbisect.cell import without
from specbisect.cli import hosts
from specbisect.store import Row, Store

SCHEMA = "specbisect.run/1"


def document(store: Store, rows: Sequence[Row]) -> dict[str, Any]:
    """`rows` of `store`, with where they come from, what the whole run cost, and how far classes of hosts agree."""
    totals = store.totals()
    return {
        "schema": SCHEMA,
        "environment": _environment(store),
        "counters": {"vanilla_runs": totals.vanilla_runs, **asdict(totals.counters)},
        "cases": [case(row) for row in rows],
        "host_classes": [pair.document() for pair in hosts.pairs(store, rows)],
    }


def case(row: Row) -> dict[str, Any]:
    """A case as lists show it, and its whole cell."""
    return row._asdict() | {"rejected": row.rejected, "cell": row.cell.to_json()}


def _environment(store: Store) -> dict[str, Any]:
    """The machines and libraries that ran the cases, and the models; usually one machine."""
    hosts: list[Any] = []
    models: dict[str, Any] = {}
    for provenance in store.provenances():
        host = provenance.get("host", {})
        if host not in hosts:
            hosts.append(host)
        for name in ("target", "draft"):
            facts = provenance.get(name, {})
            if "sha256" in facts:
                models[facts["sha256"]] = without(facts, "sha256")
    return {"specbisect": __version__, "hosts": hosts, "models": models}
