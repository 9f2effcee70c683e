"""What is kept of a row of logits: the choice, the runner-up, the margin, and a digest of the raw bits."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Row = npt.NDArray[np.float32]


class Choice(NamedTuple):
    """A row of logits in brief. `digest` is 64 bits (hex) of the raw float32 bytes, before anything is masked."""

    token: int
    runner_up: int
    margin: float
    digest: str
    finite: bool


def digest(row: Row) -> str:
    """64 bits of the raw bytes of `row`, as 16 hex digits: equal digests mean equal bits."""
    return xxhash.xxh3_64_hexdigest(row.data)


def best(row: Row) -> int:
    """The greedy choice: the largest logit, the lowest id among equals. A NaN wins, so that it cannot hide."""
    return int(row.argmax())


def choose(row: Row, banned: npt.NDArray[np.intp] | None = None) -> Choice:
    """Read `row` (n_vocab,), which may be llama.cpp's own buffer; ids in `banned` are set to −inf in it first.

    The digest is taken before, so that it stays the digest of what llama.cpp computed.
    """
    mark = digest(row)
    # The sum is finite exactly when every summand is: float32 logits are far from overflowing it.
    finite = bool(np.isfinite(row.sum(dtype=np.float64)))
    if banned is not None:
        row[banned] = -np.inf
    token = best(row)
    top = row[token]
    row[token] = -np.inf
    runner_up = best(row)
    margin = float(top - row[runner_up])
    row[token] = top
    return Choice(token, runner_up, margin, mark, finite)
