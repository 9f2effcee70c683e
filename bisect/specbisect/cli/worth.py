"""What drafters are worth, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from specbisect import __version__
from specbisect.cell import Cell
from specbisect.cli.grid import grid
from specbisect.cli.naming import Naming
from specbisect.cli.output import mebibytes
from specbisect.gate.cost import Interval, Worth
from specbisect.gate.decision import EVERYTHING, Decision
from specbisect.gate.load import PERCENTILES, Load
from specbisect.gate.study import Costs, Study
from specbisect.gate.timing import steps

SCHEMA = "specbisect.cost/1"


def document(costs: Costs) -> dict[str, Any]:
    """Everything, as JSON; times in seconds."""
    return {
        "schema": SCHEMA,
        "specbisect": __version__,
        "exit_code": costs.exit_code,
        "rounds": costs.rounds,
        "price_per_hour": costs.price,
        "forced": costs.forced,
        "targets": [_study(study, costs) for study in costs.studies],
        "loads": [asdict(load) | {"arm": load.arm.to_json()} for load in costs.loads],
    }


def _study(study: Study, costs: Costs) -> dict[str, Any]:
    deepest = study.deepest(costs.barred, costs.identical)
    return {
        "target": study.vanilla.to_json()["target"],
        "vanilla": study.vanilla.key,
        "deepest": None if deepest is None else {"cell": deepest.cell.key, "k": deepest.k},
        "cells": {cell.key: cell.to_json() for cell in study.cells},
        "decisions": [
            {
                "cell": one.cell.key,
                "group": group,
                "action": decision.action,
                "k": decision.k,
                "reason": decision.reason,
                "worth": None if one.worth is None else _worth(one.worth),
            }
            for group in study.groups()
            for one, decision in study.judged(group, costs.barred)
        ],
        "bit_identical": {c.key: costs.identical.get(c, False) for c in study.cells},
        "arms": {cell.key: _arm(study, cell, costs) for cell in (study.vanilla, *study.cells)},
        "widths": [asdict(cost) for cost in study.widths],
        "pairs": {cell.key: [asdict(p) for p in pairs] for cell, pairs in study.pairs.items()},
        "failures": {cell.key: reason for cell, reason in study.failures.items()},
    }


def _worth(found: Worth) -> dict[str, Any]:
    return asdict(found) | {
        "per_token": found.per_token,
        "speed_up": found.speed_up,
        "misfit": found.misfit,
    }


def _arm(study: Study, cell: Cell, costs: Costs) -> dict[str, Any]:
    arm, spent, footprint = study.arm(cell), study.spent.get(cell), study.footprints.get(cell)
    price = None if costs.price is None or spent is None else spent.price(costs.price)
    return {
        "first_s": arm.first_s / arm.runs if arm.runs else None,
        "end_to_end_s": arm.total_s / arm.runs if arm.runs else None,
        "load_s": footprint and footprint.load_s,
        "peak_bytes": footprint and footprint.peak_bytes,
        "spent": spent and asdict(spent),
        "price_per_million_tokens": price,
    }


def plain(costs: Costs) -> str:
    """For people; times in milliseconds."""
    parts = [f"! forced, and every result is marked: {text}" for text in costs.forced]
    for study in costs.studies:
        parts += _sections(study, costs)
    if costs.loads:
        parts.append(_loads(costs.loads))
    return "\n\n".join(parts)


def _sections(study: Study, costs: Costs) -> Iterator[str]:
    naming = Naming(cell for one in costs.studies for cell in one.cells)
    names = {cell: " ".join(naming.drafter(cell)) for cell in study.cells}
    names[study.vanilla] = "vanilla"
    where = " ".join(naming.settings(study.vanilla))
    n = max(map(len, study.pairs.values()), default=0)
    yield f"{where}: {n} prompts, {costs.rounds} rounds, times in ms"
    judged = {group: list(study.judged(group, costs.barred)) for group in study.groups()}
    yield grid(
        [[names[one.cell], *_times(one.worth)] for one, _ in judged[EVERYTHING]],
        ["drafter", "T", "D", "V", "H", "M", "M(α)", "α", "needed", "per token"],
    )
    yield grid(
        [
            [names[one.cell], group, *_speed(one.worth), _action(decision), decision.reason]
            for group, found in judged.items()
            for one, decision in found
        ],
        ["drafter", "prompts", "speed-up", "", "decision", "why"],
    )
    if study.widths:
        yield _widths(study)
    yield _arms(study, names, costs)
    for cell, reason in study.failures.items():
        yield f"failed: {names[cell]}, {reason}"
    deepest = study.deepest(costs.barred, costs.identical)
    yield (
        f"{where}: no draft length is bit-identical and pays"
        if deepest is None
        else f"{where}: the deepest draft that is bit-identical and pays is {names[deepest.cell]}"
    )


def _times(found: Worth | None) -> list[str]:
    if found is None:
        return ["–"] * 9
    ms = [found.baseline, found.draft, found.verify, found.rest]
    return [
        *(f"{1000 * seconds:.1f}" for seconds in ms),
        f"{found.per_cycle:.2f}",
        _number(found.fitted),
        _number(found.alpha),
        _number(found.needed),
        f"{1000 * found.per_token:.1f}",
    ]


def _speed(found: Worth | None) -> list[str]:
    if found is None:
        return ["–", ""]
    return [f"{found.speed_up:.2f}", _interval(found.interval)]


def _interval(found: Interval | None) -> str:
    return "" if found is None else f"{found.low:.2f}–{found.high:.2f}"


def _action(decision: Decision) -> str:
    return f"tune to {decision.k}" if decision.action == "tune" else decision.action


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _widths(study: Study) -> str:
    """The time of a verify batch by width; ``+`` marks a row that adds much, ``≠`` bits that change there."""
    one = study.widths[0].seconds
    lines = [["1", f"{1000 * one:.1f}", "", ""]]
    for step in steps(study.widths):
        marks = f"{'+' * step.step}{'≠' * step.changed}"
        cost, share = step.cost, 100 * step.added / one
        lines.append([str(cost.width), f"{1000 * cost.seconds:.1f}", f"{share:+.0f} %", marks])
    return grid(lines, ["width", "V", "last row", ""])


def _arms(study: Study, names: dict[Cell, str], costs: Costs) -> str:
    lines = []
    for cell in (study.vanilla, *study.cells):
        found = _arm(study, cell, costs)
        line = [names[cell], *(_ms(found[key]) for key in ("load_s", "first_s", "end_to_end_s"))]
        line.append("–" if found["peak_bytes"] is None else mebibytes(found["peak_bytes"]))
        if costs.price is not None:
            line.append(_number(found["price_per_million_tokens"]))
        lines.append(line)
    heads = ["arm", "load", "first token", "end to end", "peak memory"]
    return grid(lines, heads + ["per 10⁶ tokens"] * (costs.price is not None))


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f}"


def _loads(loads: Sequence[Load]) -> str:
    """Percentiles of the times of requests that arrive whether or not others are done."""
    naming = Naming(load.arm for load in loads if load.arm.drafter)
    lines = []
    for load in loads:
        words = naming.drafter(load.arm) if load.arm.drafter else ("vanilla",)
        quant = load.arm.target.quant
        lines.append([quant, str(load.slots), " ".join(words), *_percentiles(load), *_rest(load)])
    heads = ["target", "slots", "arm", "first token", "gap", "done", "goodput", "refused"]
    return f"under load, {'/'.join(map(str, PERCENTILES))} % in ms\n{grid(lines, heads)}"


def _percentiles(load: Load) -> list[str]:
    times = (load.first_s, load.gap_s, load.done_s)
    return ["/".join(_ms(seconds) for seconds in values) or "–" for values in times]


def _rest(load: Load) -> list[str]:
    goodput = "–" if load.goodput is None else f"{load.goodput:.2f}/s"
    return [goodput, f"{len(load.refusals)}/{load.requests}"]
