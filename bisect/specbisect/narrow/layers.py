"""Stages about how much of the stack a case needs."""

from collections.abc import Iterator

from specbisect.cell import AXES, Scripted
from specbisect.diagnose.finding import Label
from specbisect.narrow.candidate import FILLER, Candidate, Drafts, script, widths_only
from specbisect.narrow.search import Search

ABOUT_DRAFTER: frozenset[Label] = frozenset({"not-engaged", "draft-alignment"})
"""Labels that say something of the drafter, which therefore stays."""


def descend(search: Search) -> None:
    """From the server or the binding down to libllama, and from a drafter to what it drafted.

    Best of all without speculation: the vanilla arm's own tokens in batches. There, every row of every batch can
    show the same thing again when something else is changed; a script fits one text only.
    """
    with search.step("layer", "stack", lambda c: c.layer):
        if search.best.cell.engine != "libllama":
            search.gate.consider(_in_libllama(search.best))
        if search.best.layer == "drafter" and search.wanted.label not in ABOUT_DRAFTER:
            width = search.best.cell.width
            below = [search.best.but(drafter=widths_only(width)), *_scripts(search)]
            search.first(below)


def single_batch(search: Search) -> None:
    """From the vanilla arm's tokens, or several drafts, to one batch after a history of width 1.

    Tried with the row that departs as the first of the batch and nothing that matters behind it, then with what was
    drafted there, then at the place where it was drafted; else all drafts up to there stay.
    """
    if search.best.layer not in ("widths", "drafts"):
        return
    with search.step("batch", "drafts", lambda c: c.layer):
        search.first([search.best.but(drafter=Scripted(drafts)) for drafts in _batches(search)])


def _in_libllama(candidate: Candidate) -> Candidate:
    foreign = {n: a.default for n, a in AXES.items() if "libllama" not in a.engines}
    return candidate.but(engine="libllama", **foreign)


def _scripts(search: Search) -> Iterator[Candidate]:
    """What the drafter drafted in the whole original run, where that is known, else up to the fork."""
    recorded = search.recorded or search.gate.shown.drafts
    if recorded:
        yield search.best.but(drafter=Scripted(script(recorded)))


def _batches(search: Search) -> Iterator[Drafts]:
    seen, width = search.gate.shown, search.best.cell.width
    if search.wanted.label != "state" and search.wanted.kind != "accumulated":
        # Those two show in batches after the one that is to blame.
        there = next((ids for start, ids in seen.drafts if start == seen.start), ())
        behind = (there[seen.row :] + (FILLER,) * width)[: width - 1]
        yield ((seen.start + seen.row, (FILLER,) * (width - 1)),)
        yield ((seen.start + seen.row, behind),)
        if there:
            yield ((seen.start, there),)
    if seen.drafts:
        yield script(seen.drafts)
