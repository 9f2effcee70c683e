"""Plots of a run as inline SVG.

Colours are written as placeholders that become CSS variables, so that a plot follows the page into the dark. Nothing
depends on the time or on the order of anything that has none: the same run gives the same bytes.
"""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import CensoredData, ecdf

from specbisect.gate.acceptance import Acceptance, total
from specbisect.report.run import DIFFERENT, KINDS, Arms, Entry, Run
from specbisect.store import Row

T = TypeVar("T")
Draw = Callable[[Axes, Run], bool]

INK, GRID, SURFACE = "#010101", "#010102", "#010103"
SERIES = tuple(f"#0102{i:02d}" for i in range(1, 9))
KIND_COLOURS = {kind: f"#0103{i:02d}" for i, kind in enumerate(dict.fromkeys(KINDS.values()), 1)}
VARIABLES = {
    INK: "var(--ink)",
    GRID: "var(--grid)",
    SURFACE: "var(--surface)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)},
    **{colour: f"var(--kind-{kind})" for kind, colour in KIND_COLOURS.items()},
}
MARKERS = "os^Dv<>P"
MOST = len(SERIES)
"""Lines in a plot; more cannot be told apart."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "figure.facecolor": "none",
}
_UNREFERENCED = re.compile(
    r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|LineCollection'
    r'|PathCollection|PolyCollection|FillBetweenPolyCollection)_\d+"'
)
_HEADER = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)


def svg(name: str, draw: Draw, run: Run, title: str, height: float = 3.0) -> str:
    """The plot as an ``<svg>`` element that takes the width of what it stands in; empty when there is nothing to draw.

    `name` keeps the ids of several plots on a page apart, `title` is for those who cannot see it.
    """
    with style.context(["default", _STYLE | {"svg.hashsalt": name}]):
        figure = Figure(figsize=(5.4, height), layout="constrained")
        if not draw(figure.subplots(), run):
            return ""
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), title)


def _inline(document: str, title: str) -> str:
    text = _METADATA.sub("", _HEADER.sub("", document))
    text = _UNREFERENCED.sub("", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    opening, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None
    return f'<svg {box[0]} role="img" xmlns:xlink="http://www.w3.org/1999/xlink"><title>{title}</title>{rest}'.strip()


def survival(axes: Axes, run: Run) -> bool:
    """Kaplan–Meier curves per target: the share of cases without a difference after so many tokens.

    A case that agrees to its end is censored there: no difference yet.
    """
    shown = _most_cases(run.targets, ((e.target, e) for e in run.entries if _compared(e)))
    for i, (name, entries) in enumerate(shown):
        times = np.array(
            [e.row.fork if e.row.fork is not None else e.row.compared for e in entries]
        )
        event = np.array([e.row.outcome in DIFFERENT and e.row.fork is not None for e in entries])
        curve = ecdf(CensoredData(uncensored=times[event], right=times[~event])).sf
        x = np.concatenate([[0], curve.quantiles, [times.max()]])
        y = np.concatenate([[1.0], curve.probabilities, curve.probabilities[-1:]])
        label = f"{name} ({int(event.sum())} of {len(entries)})"
        axes.step(x, y, where="post", color=SERIES[i], label=label)
        ends = np.unique(times[~event])
        axes.plot(ends, curve.evaluate(ends), "|", color=SERIES[i], markersize=7)
    axes.set(
        xlabel="generated tokens",
        ylabel="cases without a difference yet",
        ylim=(None, 1.02),
        xlim=(0, None),
    )
    if shown:
        axes.legend(loc="lower left", title="target (differ, of)", title_fontsize=9)
        low, high = axes.get_ylim()
        axes.set_ylim(max(-0.02, low - 0.4 * (high - low)), high)  # room for the legend
    return bool(shown)


def positions(axes: Axes, run: Run) -> bool:
    """Acceptance by draft position, a line per drafter."""
    shown = _most_cases(
        _drafters(run), ((_drafter(a.entry.row), a) for a in run.sample if a.speculative.cycles)
    )
    longest = 1
    for i, (name, arms) in enumerate(shown):
        found = total(Acceptance.of(a.speculative) for a in arms).by_position
        if found:
            y = [accepted / drafted for drafted, accepted in found]
            axes.plot(
                range(1, len(y) + 1),
                y,
                color=SERIES[i],
                marker=MARKERS[i],
                markersize=4,
                label=name,
            )
            longest = max(longest, len(found))
    axes.set(
        xlabel="position in the draft", ylabel="accepted, of drafted there", ylim=(-0.02, 1.05)
    )
    axes.set_xticks(range(1, longest + 1, max(1, longest // 12)))
    if shown:
        axes.legend(loc="upper right")
    return bool(shown)


def margins(axes: Axes, run: Run) -> bool:
    """Per target: margins at forks, all margins of the vanilla arms, and how much widths move the two best logits."""
    shown = _most_cases(
        run.targets, ((a.entry.target, a) for a in run.sample if a.vanilla is not None)
    )
    names = [name for name, _ in shown]
    found = False
    for y, (_, arms) in enumerate(shown):
        usual = [
            m
            for a in arms
            if a.vanilla is not None
            for m in a.vanilla.margins
            if m > 0 and np.isfinite(m)
        ]
        if usual:
            low, middle, high = np.quantile(usual, [0.05, 0.5, 0.95])
            axes.plot([low, high], [y, y], color=GRID, linewidth=9, solid_capstyle="butt", zorder=1)
            axes.plot([middle], [y], "|", color=INK, markersize=9, zorder=2)
            found = True
        moved = [
            (a.envelope["median"], a.envelope["largest"]) for a in arms if "largest" in a.envelope
        ]
        if moved:
            low, high = np.median([m for m, _ in moved]), max(m for _, m in moved)
            axes.plot(
                [max(low, 1e-4), high], [y + 0.24] * 2, color=SERIES[0], linewidth=3, zorder=2
            )
        _dots(axes, y, arms)
    axes.set(
        xscale="log",
        xlabel="difference of the two best logits",
        yticks=range(len(names)),
        yticklabels=names,
        ylim=(max(0.6, len(names) - 0.4), -0.6),
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    _legend(axes, [a for _, arms in shown for a in arms])
    return found


def _dots(axes: Axes, y: int, arms: Sequence[Arms]) -> None:
    forks = [
        (a.entry.row.margin, KINDS[a.entry.verdict]) for a in arms if a.entry.row.outcome == "fork"
    ]
    for kind, colour in KIND_COLOURS.items():
        of_kind = [margin for margin, of in forks if margin and of == kind]
        spread = [y - 0.14 - 0.06 * (i % 3) for i in range(len(of_kind))]
        axes.plot(
            of_kind,
            spread,
            "o",
            color=colour,
            markersize=4,
            markeredgecolor=SURFACE,
            markeredgewidth=0.4,
            zorder=3,
        )


def _legend(axes: Axes, arms: Sequence[Arms]) -> None:
    axes.plot([], [], color=GRID, linewidth=9, label="vanilla margins, 5–95 %")
    if any("largest" in a.envelope for a in arms):
        axes.plot([], [], color=SERIES[0], linewidth=3, label="envelope, median to largest")
    kinds = {KINDS[a.entry.verdict] for a in arms if a.entry.row.outcome == "fork"}
    words = {
        "defect": "defect",
        "open": "no cause yet",
        "numeric": "batch-width",
        "failed": "failed",
    }
    for kind, word in words.items():
        if kind in kinds:
            axes.plot([], [], "o", color=KIND_COLOURS[kind], markersize=4, label=f"fork: {word}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def times(axes: Axes, run: Run) -> bool:
    """Milliseconds per generated token by drafter, split into drafting, verifying and the rest."""
    timed = (a for a in run.sample if any(c.verify_s for c in a.speculative.cycles))
    shown = _most_cases(_drafters(run), ((_drafter(a.entry.row), a) for a in timed))
    bars = [(name, _split(arms)) for name, arms in shown]
    vanilla = [a.vanilla for _, arms in shown for a in arms if a.vanilla is not None]
    tokens = sum(len(t.ids) for t in vanilla)
    if tokens and bars:
        bars.append(
            ("vanilla", (0.0, 1000 * sum(t.counters.decode_s for t in vanilla) / tokens, 0.0))
        )
    left = np.zeros(len(bars))
    for i, part in enumerate(("draft", "verify", "rest")):
        widths = np.array([values[i] for _, values in bars])
        axes.barh(range(len(bars)), widths, left=left, height=0.62, color=SERIES[i], label=part)
        left += widths
    axes.set(
        xlabel="ms per generated token",
        yticks=range(len(bars)),
        yticklabels=[name for name, _ in bars],
    )
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    if bars:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return bool(bars)


def _split(arms: Sequence[Arms]) -> tuple[float, float, float]:
    cycles = [c for a in arms for c in a.speculative.cycles]
    tokens = max(1, sum(len(a.speculative.ids) for a in arms))
    sums = (sum(getattr(c, part) for c in cycles) for part in ("draft_s", "verify_s", "rest_s"))
    draft, verify, rest = (1000 * total / tokens for total in sums)
    return draft, verify, rest


def _compared(entry: Entry) -> bool:
    return (
        entry.row.outcome in (*DIFFERENT, "agree")
        and entry.row.compared + (entry.row.fork or 0) > 0
    )


def _drafter(row: Row) -> str:
    return f"{row.drafter} {row.n_max}"


def _drafters(run: Run) -> list[str]:
    return [f"{name} {n_max}" for name, n_max in run.drafters]


def _most_cases(order: Sequence[str], items: Iterable[tuple[str, T]]) -> list[tuple[str, list[T]]]:
    """Items by name, in the given order of names; when those are too many to draw, the ones with most items."""
    groups: dict[str, list[T]] = defaultdict(list)
    for name, item in items:
        groups[name].append(item)
    kept = sorted(groups, key=lambda name: -len(groups[name]))[:MOST]
    return [(name, groups[name]) for name in order if name in kept]
