"""The page of a run: one file of HTML that asks for nothing else and works without JavaScript."""

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from specbisect.report import plots, render
from specbisect.report.run import DIFFERENT, KINDS, LISTED, SAMPLE, Group, Run

KIND_WORDS = {
    "defect": "a defect: label earned by experiments",
    "failed": "an arm failed, or gave what is no text",
    "open": "no cause yet",
    "numeric": "batch-width numerics",
    "void": "nothing was tested",
    "same": "no difference in the tokens tested",
}

FIGURES = (
    ("survival", plots.survival, "No difference yet, by generated token"),
    ("margins", plots.margins, "Margins of forks against the envelope"),
    ("positions", plots.positions, "Acceptance by draft position"),
    ("times", plots.times, "Where the time goes"),
)


def page(run: Run) -> str:
    """The HTML of the page; the same text for the same run."""
    figures = [
        (title, Markup(drawn))
        for name, draw, title in FIGURES
        if (drawn := plots.svg(name, draw, run, title))
    ]
    numbers = {key: i for i, key in enumerate(run.groups)}
    return (
        render.html()
        .get_template("page.html.j2")
        .render(
            run=run,
            kinds=[(kind, words) for kind, words in KIND_WORDS.items() if kind in _kinds(run)],
            tiles=list(_tiles(run)),
            columns=[f"{name} {n_max}" for name, n_max in run.drafters],
            table=[
                (target, [_cell(run, numbers, target, d) for d in run.drafters])
                for target in run.targets
            ],
            groups=[
                (numbers[key], group, _listed(run, group)) for key, group in run.groups.items()
            ],
            figures=figures,
            sampled=len(run.sample),
            sample_limit=SAMPLE,
            listed_limit=LISTED,
            axes=[(*row, _percent(row[3], row[2])) for row in run.axes()],
            failures=run.failures(),
            untested=[g for g in run.groups.values() if g.compared and not g.rejected],
            environments=list(dict.fromkeys(map(_environment, run.provenances))),
            models=sorted(_models(run)),
            kind_of=KINDS,
            different=DIFFERENT,
        )
    )


def _kinds(run: Run) -> set[str]:
    return {KINDS[verdict] for verdict in run.verdicts}


def _tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """(number, words, kind)."""
    outcomes = run.outcomes
    different = sum(outcomes[o] for o in DIFFERENT)
    yield str(len(run.entries)), "cases", ""
    yield str(different), "differ", "defect" if different else "same"
    yield str(outcomes["agree"]), "no difference", "same"
    yield str(outcomes["unexercised"]), "not exercised", "void"
    yield str(outcomes["failed"] + outcomes["invalid"]), "failed or invalid", "failed"
    drafted = sum(e.row.drafted for e in run.entries)
    accepted = sum(e.row.accepted for e in run.entries)
    yield f"{accepted / drafted:.0%}" if drafted else "–", "of drafts accepted", ""


def _cell(
    run: Run, numbers: dict[Any, int], target: str, drafter: tuple[str, int]
) -> dict[str, Any] | None:
    group = run.groups.get((target, drafter))
    if group is None:
        return None
    counts = ", ".join(f"{n} {name}" for name, n in group.counts.items())
    return {
        "number": numbers[target, drafter],
        "rate": _percent(group.different, group.compared),
        "of": f"{group.different} of {group.compared}",
        "worst": group.worst,
        "kind": KINDS[group.worst],
        "title": f"{target}, {drafter[0]} {drafter[1]}: {counts}",
    }


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _listed(run: Run, group: Group) -> list[Any]:
    return group.listed(run.per_group)


def _environment(provenance: Any) -> tuple[tuple[str, str], ...]:
    host = provenance.get("host", {})
    named = {
        "library": host.get("library"),
        "CPU": host.get("cpu"),
        "devices": ", ".join(host.get("devices", ())),
        "system": host.get("os"),
        "cores": host.get("cores"),
        "memory": f"{host['memory_gib']} GiB" if host.get("memory_gib") else None,
        "llama.cpp's system_info": host.get("system_info"),
        "environment": ", ".join(f"{k}={v}" for k, v in host.get("variables", {}).items()),
    }
    return tuple((name, str(value)) for name, value in named.items() if value)


def _models(run: Run) -> Iterator[tuple[str, ...]]:
    """(role, name, type, bytes, tokenizer, SHA-256), each file once."""
    seen = set()
    for provenance in run.provenances:
        for role in ("target", "draft"):
            facts = provenance.get(role, {})
            if (key := (role, facts.get("sha256"))) in seen or not facts.get("sha256"):
                continue
            seen.add(key)
            tokenizer = f"{facts.get('tokenizer', '')} {facts.get('pre_tokenizer', '')}".strip()
            yield (
                role,
                str(facts.get("name", "")),
                str(facts.get("file_type", "")),
                f"{facts.get('size', 0):,}",
                tokenizer,
                facts["sha256"],
            )
