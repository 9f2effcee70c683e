"""What an arm did in this process, as a trace."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specbisect.cell import Case, Prompt
from specbisect.engines.decoding import Place, Recorder
from specbisect.errors import BadInput
from specbisect.llama import files, library
from specbisect.llama.vocab import Vocab
from specbisect.trace import Cycle, Trace


def prompt_ids(case: Case, vocab: Vocab) -> tuple[int, ...]:
    """The prompt as given, or tokenised by the target; never empty."""
    return ids_as_asked(case.prompt, vocab.tokenize, vocab.n_tokens)


def ids_as_asked(
    prompt: Prompt, tokenize: Callable[[str], Iterable[int]], n_vocab: int
) -> tuple[int, ...]:
    """The ids of `prompt`, or those of its text. Raises `BadInput` when there are none, or one no vocabulary of this
    size has.
    """
    ids = tuple(tokenize(prompt.text) if prompt.ids is None else prompt.ids)
    if not ids:
        raise BadInput(f"prompt {prompt.id} has no tokens; give it some text")
    if bad := [i for i in ids if not 0 <= i < n_vocab]:
        raise BadInput(
            f"prompt {prompt.id}: token id {bad[0]} is not in the vocabulary of {n_vocab}"
        )
    return ids


def trace_of(
    case: Case,
    prompt: Sequence[int],
    recorder: Recorder,
    cycles: Sequence[Cycle],
    draft: Place | None = None,
) -> Trace:
    """What the arm did, with what was resolved and where it ran; `draft` is where its draft model is evaluated."""
    choices, target = recorder.choices, recorder.place
    resolved: dict[str, Any] = {"target": target.resolved}
    provenance: dict[str, Any] = {"host": library.environment(), "target": facts_of(target)}
    unhonoured = target.unhonoured()
    if draft is not None:
        resolved["draft"] = draft.resolved
        provenance["draft"] = facts_of(draft)
        unhonoured += [f"draft {name}" for name in draft.unhonoured()]
    return Trace(
        arm="vanilla" if case.cell.drafter is None else "speculative",
        prompt_ids=tuple(prompt),
        ids=tuple(recorder.ids),
        finish=recorder.finish or "length",
        pieces=tuple(target.vocab.piece(token).decode("latin-1") for token in recorder.ids),
        digests=tuple(c.digest for c in choices),
        best=tuple(c.token for c in choices),
        runners_up=tuple(c.runner_up for c in choices),
        margins=tuple(c.margin for c in choices),
        nonfinite=tuple(i for i, c in enumerate(choices) if not c.finite),
        cycles=tuple(cycles),
        drafted=sum(c.drafted for c in cycles),
        accepted=sum(c.accepted for c in cycles),
        resolved=resolved,
        unhonoured=tuple(unhonoured),
        provenance=provenance,
    )


def facts_of(place: Place) -> dict[str, Any]:
    """What a trace says about a model file; no path."""
    return files.inspect(place.path).to_json()
