"""What an arm did in this process, as a trace."""

from collections.abc import Sequence
from typing import Any

from specbisect.cell import Case
from specbisect.engines.decoding import Place, Recorder
from specbisect.errors import BadInput
from specbisect.llama import files, library
from specbisect.llama.vocab import Vocab
from specbisect.trace import Cycle, Trace


def prompt_ids(case: Case, vocab: Vocab) -> tuple[int, ...]:
    """The prompt as given, or tokenised by the target; never empty."""
    prompt = case.prompt
    ids = prompt.ids if prompt.ids is not None else vocab.tokenize(prompt.text)
    if not ids:
        raise BadInput(f"prompt {prompt.id} has no tokens; give it some text")
    bad = [i for i in ids if not 0 <= i < vocab.n_tokens]
    if bad:
        raise BadInput(
            f"prompt {prompt.id}: token id {bad[0]} is not in the vocabulary of {vocab.n_tokens}"
        )
    return tuple(ids)


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
