"""Stages about tokens: of the prompt, of the answer, of the history before the batch, and drafted ones."""

from collections.abc import Sequence

from specbisect.cell import Scripted
from specbisect.narrow.candidate import FILLER, Candidate, Drafts, script
from specbisect.narrow.ddmin import Cut, cut_after
from specbisect.narrow.search import Search

SINGLE = 6
"""Tokens of the prompt that are tried alone before it is taken apart."""
FOLDED = 24
"""Longest history that is made part of the prompt: each of its tokens costs a trial to prove that it is needed."""


def prompt(search: Search) -> None:
    """The prompt to one of its tokens, if any will do; else by lines and sentences, then by tokens.

    It does not matter where the arms part then.
    """
    cuts: list[Cut[int]] = [cut_after(search.line_ends.__contains__)] if search.line_ends else []
    with search.step("prompt", "prompt", _tokens):
        search.first(search.best.but(prompt=ids) for ids in search.prompts(1, SINGLE))
        best = search.best
        search.reduce(best.prompt, lambda kept: best.but(prompt=kept), cuts)


def length(search: Search) -> None:
    """The answer to just after the token that differs, if the batch that decides it still fits before its end.

    A drafter never drafts beyond the end of the answer, so a shorter answer may make the batch narrower. Where no
    token differs, nothing says how long the answer must be, and lengths are tried.
    """
    with search.step("length", "n_predict", lambda c: c.cell.n_predict):
        seen, longest = search.gate.shown, search.best.cell.n_predict
        if seen.fork is None and search.wanted.label != "state":
            search.least(1, longest, lambda n: search.best.but(n_predict=n))
            return
        shortest = seen.start + 1 if seen.fork is None else seen.fork + 1
        tried = sorted(n for n in {shortest, seen.needed} if n < longest)
        search.first(search.best.but(n_predict=n) for n in tried)


def history(search: Search) -> None:
    """What was generated before the only batch, given as part of the prompt instead; then that by ddmin.

    An answer of one batch says more than one that has to come out right first. Only a short history is folded in.
    """
    seen, best = search.gate.shown, search.best
    if best.layer != "batch" or not 0 < len(seen.history) <= FOLDED:
        return
    ((start, ids),) = best.drafts
    n = len(seen.history)
    if start != n + 1:
        return
    with search.step("history", "history", lambda c: f"{_tokens(c)} of {c.cell.n_predict}"):
        folded = best.but(
            prompt=best.prompt + seen.history,
            drafter=Scripted(((1, ids),)),
            n_predict=best.cell.n_predict - n,
        )
        search.first([folded])


def drafts(search: Search) -> None:
    """The scripted drafts that matter, each as short as it can be, its other tokens replaced by the simplest one."""
    if search.best.layer not in ("batch", "drafts"):
        return
    with search.step("drafts", "drafts", lambda c: len(c.drafts)):
        best = search.best
        search.reduce(best.drafts, lambda kept: _drafting(best, kept))
    with search.step("drafts", "drafted tokens", lambda c: sum(len(ids) for _, ids in c.drafts)):
        for start, ids in search.best.drafts:
            shorter = (ids[:n] for n in range(1, len(ids)))
            search.first(_with_draft(search.best, start, cut) for cut in shorter)
    with search.step("drafts", "tokens that matter", lambda c: len(_that_matter(c.drafts))):
        best = search.best
        search.reduce(_that_matter(best.drafts), lambda kept: _filled(best, kept))


def _tokens(candidate: Candidate) -> str:
    return f"{len(candidate.prompt)} tokens"


def _drafting(candidate: Candidate, kept: Sequence[tuple[int, tuple[int, ...]]]) -> Candidate:
    return candidate.but(drafter=Scripted(tuple(kept)))


def _with_draft(candidate: Candidate, start: int, ids: tuple[int, ...]) -> Candidate:
    others = (entry for entry in candidate.drafts if entry[0] != start)
    return _drafting(candidate, script([(start, ids), *others]))


def _that_matter(drafts: Drafts) -> tuple[tuple[int, int], ...]:
    """(start of the draft, place in it) of every token that is not the filler."""
    return tuple((s, i) for s, ids in drafts for i, token in enumerate(ids) if token != FILLER)


def _filled(candidate: Candidate, kept: Sequence[tuple[int, int]]) -> Candidate:
    """Every token replaced by the filler, except those `kept`."""
    filled = (
        (s, tuple(t if (s, i) in kept else FILLER for i, t in enumerate(ids)))
        for s, ids in candidate.drafts
    )
    return _drafting(candidate, tuple(filled))
