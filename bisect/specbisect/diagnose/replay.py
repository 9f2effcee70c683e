"""Exact-width replay: every verify batch once more, in a fresh context, with no drafter and no rollback.

Committed rows go to sequence 0. Rejected rows ride along on a scratch sequence, so the width, and with it every
kernel, is the same; the scratch sequence is removed after each batch. There are two forms of this: the rejected rows
alone on the scratch sequence, and the scratch sequence sharing the history, so that they also compute what they
computed before (a mixture of experts needs that; a sliding window may need the other, which takes fewer cells).
Where the arm rolled back by checkpoint and re-decode, and where a memory holds states that split a batch by sequence,
the whole batch is tried out on a copy of the sequence, and after a rejection the committed rows are decoded once more
at the width they were re-decoded at. Sequence 0 only ever grows. If one form gives the speculative arm's rows bit for
bit, that arm's memory held exactly what it should have held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbisect.diagnose.lab import Lab
from specbisect.llama.context import Logits
from specbisect.llama.logits import digest
from specbisect.trace import Cycle, Trace


@dataclass(frozen=True, slots=True)
class Replay:
    """What came out. `digests` holds, per cycle, those of rows 0…accepted; `kept` the rows of the cycles asked for.

    `differing` lists cycles with a row that is not the speculative arm's, bit for bit; `prompt_equal` says whether
    the row after the prompt is. `shared` is the form that was taken.
    """

    digests: tuple[tuple[str, ...], ...]
    prompt_equal: bool
    differing: tuple[int, ...]
    kept: dict[int, Logits] = field(repr=False)
    shared: bool = False

    @property
    def equal(self) -> bool:
        """Whether every row is the same."""
        return self.prompt_equal and not self.differing


def replay(lab: Lab, trace: Trace, keep: Sequence[int] = ()) -> Replay:
    """Replay the cycles of a speculative `trace`; rows (width, n_vocab) of the cycles in `keep` are kept.

    The second form is tried only where the first differs, and taken only where it goes on longer.
    """
    first = replay_as(lab, trace, keep, shared=False)
    if first.equal or lab.model.keeps_states:
        return first
    second = replay_as(lab, trace, keep, shared=True)
    return max(first, second, key=lambda found: (found.equal, min(found.differing, default=0)))


def replay_as(lab: Lab, trace: Trace, keep: Sequence[int] = (), *, shared: bool) -> Replay:
    """Replay in one of the two forms."""
    digests: list[tuple[str, ...]] = []
    kept: dict[int, Logits] = {}
    with lab.bench() as bench:
        prompt_equal = digest(bench.prompt_row) == trace.digests[0]
        for number, cycle in enumerate(trace.cycles):
            rejected = cycle.accepted < cycle.drafted
            apart = rejected and (cycle.redecoded > 0 or lab.model.keeps_states)
            if apart:
                rows = bench.try_out(cycle.batch, cycle.base)
            else:
                rows = bench.verify(
                    cycle.batch, cycle.base, cycle.accepted, shared=shared and rejected
                )
            digests.append(tuple(digest(rows[i]) for i in range(cycle.accepted + 1)))
            if number in keep:
                kept[number] = rows.copy()
            if apart:
                bench.commit(cycle.batch[: cycle.accepted + 1], cycle.base)
    differing = tuple(
        c for c, rows in enumerate(digests) if not _same(trace, trace.cycles[c], rows)
    )
    return Replay(tuple(digests), prompt_equal, differing, kept, shared)


def first_token(trace: Trace, cycle: Cycle) -> int:
    """Index of the generated token that row 0 of `cycle` gives."""
    return cycle.base - len(trace.prompt_ids) + 1


def cycle_of(trace: Trace, token: int) -> tuple[int, int] | None:
    """(cycle, row) that gave the generated token of that index; None for the first, which the prompt gives."""
    for number, cycle in enumerate(trace.cycles):
        row = token - first_token(trace, cycle)
        if 0 <= row <= cycle.accepted:
            return number, row
    return None


def _same(trace: Trace, cycle: Cycle, digests: Sequence[str]) -> bool:
    start = first_token(trace, cycle)
    seen = trace.digests[
        start : start + cycle.accepted + 1
    ]  # shorter where the answer ended inside the batch
    return tuple(digests[: len(seen)]) == seen


def positive_control(lab: Lab, trace: Trace) -> bool:
    """Whether a deliberately wrong row is told from the right one: cycle 0 again, with one wrong token in it."""
    cycle = trace.cycles[0]
    wrong = [(cycle.batch[0] + 1) % lab.model.n_vocab, *cycle.batch[1:]]
    with lab.bench() as bench:
        rows = bench.try_out(wrong, cycle.base)
    return digest(rows[0]) != trace.digests[first_token(trace, cycle)]
