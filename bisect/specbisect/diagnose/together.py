"""Requests as a server treats them, over the C API alone: after each other in one memory, or together in one batch.

Both follow llama-server (update_slots): a request keeps the prefix it shares with what its slot holds, all but the last
token, and evaluates the rest; requests that run together have their prompts in one batch and then a row each.
"""

from collections.abc import Sequence
from dataclasses import replace

from specbisect.diagnose.lab import Lab
from specbisect.engines.faults import tamper_of
from specbisect.llama.context import Context, Row, Settings, rows_of
from specbisect.llama.logits import best, digest

Ids = tuple[int, ...]


def after_each_other(lab: Lab, prompts: Sequence[Ids]) -> Ids:
    """What the last of `prompts` is answered, greedily, when all go through one sequence with prefix reuse."""
    held: list[int] = []
    answer: Ids = ()
    with _context(lab, 1) as context:
        for prompt in prompts:
            shared = _common(held, prompt)
            if len(held) > shared and not context.remove(0, shared):
                context.clear()
                shared = 0
            row = context.evaluate(rows_of(prompt[shared:], shared, last_only=True))[-1]
            answer = _greedy(lab, context, best(row), len(prompt))
            held = [*prompt, *answer[:-1]]
        lab.counters += context.counters
    return answer


def _common(held: Sequence[int], prompt: Ids) -> int:
    limit = len(prompt) - 1  # the last token is always evaluated: its row is needed
    return next((i for i in range(limit) if i >= len(held) or held[i] != prompt[i]), limit)


def _greedy(lab: Lab, context: Context, token: int, start: int) -> Ids:
    ids = [token]
    while len(ids) < lab.case.cell.n_predict and not _ends(lab, ids[-1]):
        row = context.evaluate(rows_of(ids[-1:], start + len(ids) - 1))[0]
        ids.append(best(row))
    return tuple(ids)


def _ends(lab: Lab, token: int) -> bool:
    return not lab.case.cell.ignore_eos and token in lab.model.vocab.end_tokens


def in_one_batch(lab: Lab, prompts: Sequence[Ids]) -> tuple[list[Ids], tuple[str, ...]]:
    """What every prompt is answered when all are decoded together.

    And digests of the rows of the first, as long as all are at it: after that the shape of the batch depends on what
    the others say.
    """
    digests: list[str] = []
    with _context(lab, len(prompts)) as context:
        rows = [
            row for s, p in enumerate(prompts) for row in rows_of(p, 0, sequence=s, last_only=True)
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        running = list(range(len(prompts)))
        while running:
            logits = context.evaluate(rows)
            for s, row in zip(running, logits, strict=True):
                answers[s].append(best(row))
                if s == 0 and len(running) == len(prompts):
                    digests.append(digest(row))
            running = [
                s
                for s in running
                if len(answers[s]) < lab.case.cell.n_predict and not _ends(lab, answers[s][-1])
            ]
            rows = [Row(answers[s][-1], len(prompts[s]) + len(answers[s]) - 1, s) for s in running]
        lab.counters += context.counters
    return [tuple(ids) for ids in answers], tuple(digests)


def _context(lab: Lab, sequences: int) -> Context:
    cell = lab.case.cell
    settings = replace(Settings.of(cell), n_seq_max=max(sequences, cell.n_parallel))
    return Context(lab.model, settings, tamper=tamper_of(lab.case.fault))
