"""What one arm did on one case: a value that comes out of an engine, kept on disk and compared later.

Token ids and raw-row digests carry the meaning; times and counters take no part in equality, so two traces are
equal exactly when the two arms did the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from specbisect.cell import digest

ArmName = Literal["vanilla", "speculative"]
Finish = Literal["length", "eog", "context"]


@dataclass(frozen=True, slots=True)
class Cycle:
    """One draft → verify → accept → roll back round.

    `base` is the position of the last committed token, `batch` is that token and the draft (so its width is
    ``len(batch)``), `accepted` how many drafted tokens the target confirmed. `redecoded` rows were evaluated again
    because the memory was rolled back by checkpoint. Times in seconds.
    """

    base: int
    batch: tuple[int, ...]
    accepted: int
    redecoded: int = 0
    draft_s: float = field(default=0.0, compare=False)
    verify_s: float = field(default=0.0, compare=False)
    rest_s: float = field(default=0.0, compare=False)

    @property
    def width(self) -> int:
        """Rows in the verify batch."""
        return len(self.batch)

    @property
    def drafted(self) -> int:
        """Tokens the drafter proposed."""
        return len(self.batch) - 1


@dataclass(frozen=True, slots=True)
class Counters:
    """The cost of an arm: what this tool is paid in."""

    model_loads: int = 0
    decode_calls: int = 0
    decoded_tokens: int = 0
    decode_s: float = 0.0
    total_s: float = 0.0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            self.model_loads + other.model_loads,
            self.decode_calls + other.decode_calls,
            self.decoded_tokens + other.decoded_tokens,
            self.decode_s + other.decode_s,
            self.total_s + other.total_s,
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """What one arm did.

    Per generated token, in order: `ids`, `pieces` (its bytes, one latin-1 character each), and where the engine can
    give them, read off the token's own row of logits whatever the arm made of it: `digests` (64 bits of the raw
    float32 row, as hex), `best` (its argmax, which greedy decoding must emit), `runners_up` (id of the second-best
    logit) and `margins` (best minus second-best logit). Engines that cannot see logits leave those four empty.

    `nonfinite` lists the indices whose row held a NaN or infinity. `cycles` is empty for a vanilla arm and where an
    engine does not show them; `drafted` and `accepted` are totals all the same. `resolved` is what the engine made of
    the settings asked for, `unhonoured` names those it did not follow, `provenance` says which library, machine and
    model files produced this.
    """

    arm: ArmName
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish: Finish
    pieces: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    best: tuple[int, ...] = ()
    runners_up: tuple[int, ...] = ()
    margins: tuple[float, ...] = ()
    nonfinite: tuple[int, ...] = ()
    cycles: tuple[Cycle, ...] = ()
    drafted: int = 0
    accepted: int = 0
    resolved: Mapping[str, Any] = field(default_factory=dict)
    unhonoured: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    counters: Counters = field(default=Counters(), compare=False)

    def text(self, start: int = 0, stop: int | None = None) -> str:
        """The generated text between two token indices; only ever shown, never compared."""
        return "".join(self.pieces[start:stop]).encode("latin-1").decode("utf-8", "replace")

    @property
    def host_kind(self) -> str:
        """`host_kind` of where this ran; empty where that is not known."""
        return host_kind(self.provenance.get("host", {}))


HOST_PARTS = "library", "cpu", "cores", "devices"
"""What hosts have in common that compute the same bits."""


def host_kind(host: Mapping[str, Any]) -> str:
    """Names hosts that compute the same bits: by library build, processor, cores and devices, not by host name."""
    known = {name: host[name] for name in HOST_PARTS if name in host}
    return digest(known) if known else ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that gave no result: where it stopped, why, and the last lines the library printed."""

    stage: str
    reason: str
    log: tuple[str, ...] = field(default=(), compare=False)


ArmResult = Trace | Failure
TRACE = TypeAdapter(Trace)
"""JSON both ways."""
