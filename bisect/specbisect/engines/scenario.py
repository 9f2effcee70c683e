"""What surrounds a case: the requests before it and the requests beside it.

A server that decodes a case differently after other requests, or together with them, does so because of what is left
of them, because of the shape of the batch, or because their content got in. The prompts made up here carry words that
no model writes by itself, so that the last of the three shows in the text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from specbisect.cell import Cell, Prompt
from specbisect.trace import Trace

CANARIES = (
    "zanquiport",
    "vorblexity",
    "mithrendal",
    "quopandrix",
    "glimvarosk",
    "tresquilop",
    "yubandriff",
    "kelphorast",
)
"""Invented words; seen in the answer to a case, they come from another request."""

Beside = Prompt | Literal["same", "longer"]
"""A request around a case: a prompt, the case's own one, or the case's own one with a canary's after it."""


def ids_of(
    beside: Beside, prompt: tuple[int, ...], tokenize: Callable[[str], tuple[int, ...]]
) -> tuple[int, ...]:
    """The token ids of a request around the case whose own are `prompt`."""
    if beside == "same":
        return prompt
    if beside == "longer":
        return prompt + tokenize(canary(0).text)
    return beside.ids if beside.ids is not None else tokenize(beside.text)


def canary(number: int) -> Prompt:
    """A prompt that makes a model repeat the canary of that number."""
    word = CANARIES[number % len(CANARIES)] + str(number // len(CANARIES) or "")
    text = f"The secret word is {word}. Remember it well: the secret word is {word}. Once more, the secret word is"
    return Prompt(f"canary-{number}", text=text)


def canaries_in(text: str) -> tuple[str, ...]:
    """The canaries that occur in `text`, which should be none."""
    return tuple(word for word in CANARIES if word in text)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests around a case.

    `history` is sent before it, one after the other, in the same slot; `companions` fill the other slots. They are
    handed over in one request with the case, or first, the case following when each has generated `stagger` tokens.
    `fresh` asks for a server that has answered nothing yet.
    """

    history: tuple[Beside, ...] = ()
    companions: tuple[Beside, ...] = ()
    stagger: int = 0
    fresh: bool = False

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """What `n_parallel` asks for: a companion of its own in every other slot."""
        return cls(companions=tuple(canary(i) for i in range(cell.n_parallel - 1)))


ALONE = Scenario()
COLD = Scenario(fresh=True)
REPEATED = Scenario(history=("same", "same"))
INTERLEAVED = Scenario(history=("same", canary(0)))
SHORTENED = Scenario(history=("longer",))
"""What the case's own prompt begins was answered before, so that a prompt cache holds more than it needs."""


@dataclass(frozen=True, slots=True)
class Played:
    """The trace of the case, and of every companion in the order of the scenario."""

    trace: Trace
    companions: tuple[Trace, ...] = ()

    @property
    def contamination(self) -> tuple[str, ...]:
        """Canaries in the case's own answer."""
        return canaries_in(self.trace.text())
