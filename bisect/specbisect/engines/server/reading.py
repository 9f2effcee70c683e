"""What can be read off a llama-server's log: how it resolved its settings, and every draft–verify cycle.

The lines are those of llama.cpp's tools/server/server-context.cpp, common/speculative.cpp, common/ngram-map.cpp and
src/llama-context.cpp at verbosity 5. A line that is not there is a fact that is not known, never an error.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from specbisect.trace import Cycle

_CONTEXT = re.compile(r"^llama_context: (\w+) += (\S+)$", re.MULTILINE)
_CONSTRUCTED = "constructing llama_context"
_CACHE = re.compile(r"K \((\w+)\):.*V \((\w+)\):")
_FLASH = re.compile(r"Flash Attention (enabled|disabled)|flash_attn\b.*\b(disabled)")
_DEVICE = re.compile(r"^\S+ +common_param\w*: +- \S+ *: (.*) \(\d+ MiB", re.MULTILINE)
_THREADS = re.compile(r"n_threads = (\d+) \(n_threads_batch = (\d+)\)")
_SYSTEM = re.compile(r"^.*system_info: (.*)$", re.MULTILINE)
_PER_POSITION = re.compile(r"acc per pos = \(([^)]*)\)")
_INIT_FAILED = re.compile(r"failed to initialize speculative decoding context: (.*)")
_CONFIG_FILE = "using config file:"

_SLOT = re.compile(r"slot +\S+: id +(\d+) \| task -?\d+ \| (.*)")
_CANDIDATE = re.compile(r"seq_id (\d+), draft candidate +0, pos +(\d+): +(\d+) ")
_CACHED = re.compile(r"^ - draft candidate: token=(\d+)")
_MATCH = re.compile(
    r"common_ngram_simple_draft: .* pattern at pos (\d+), length (\d+), draft length (\d+)"
)
_SINGLE = re.compile(r"slot decode token, id=(\d+), n_ctx = \d+, n_tokens = (\d+)")
_BATCH = re.compile(r"generate_draft: id=(\d+), #tokens=\d+, #draft=(\d+), pos_next=(\d+)")
_ACCEPTED = re.compile(r"add accepted tokens: sampled=\d+, ids.size=(\d+), n_draft=\d+")
_REPLAYED = "restoring speculative checkpoint"

_INTEGERS = {"n_seq_max", "n_ctx", "n_ctx_seq", "n_batch", "n_ubatch"}


def contexts(log: str) -> list[dict[str, Any]]:
    """What llama.cpp made of the settings of each context, the target's first; names as in ``llama_context_params``."""
    return [_context(block) for block in log.split(_CONSTRUCTED)[1:]]


def _context(block: str) -> dict[str, Any]:
    stated = dict(_CONTEXT.findall(block))
    found: dict[str, Any] = {name: int(stated[name]) for name in _INTEGERS & stated.keys()}
    if "kv_unified" in stated:
        found["kv_unified"] = stated["kv_unified"] == "true"
    flash = stated.get("flash_attn", "")
    if flash == "auto" and (resolved := _FLASH.search(block)):
        flash = resolved[1] or resolved[2]
    if flash:
        found["flash_attn"] = {"enabled": "on", "disabled": "off"}.get(flash, flash)
    if cache := _CACHE.search(block):
        found["type_k"], found["type_v"] = cache[1], cache[2]
    return found


def threads(log: str) -> dict[str, int]:
    """The thread counts in use."""
    found = _THREADS.search(log)
    return {"n_threads": int(found[1]), "n_threads_batch": int(found[2])} if found else {}


def system_info(log: str) -> str:
    """llama.cpp's own line about CPU features and backends, empty when it is not there."""
    found = _SYSTEM.search(log)
    return " ".join(found[1].split()) if found else ""


def devices(log: str) -> list[str]:
    """The devices llama.cpp found, as it names them."""
    return _DEVICE.findall(log)


def without_drafter(log: str) -> str:
    """Why the server goes on without its drafter although it was asked for one; empty when it does not."""
    found = _INIT_FAILED.search(log)
    return found[1].strip() if found else ""


def reads_config_file(log: str) -> bool:
    """Whether a llama.cpp configuration file of this machine changed the server's defaults."""
    return _CONFIG_FILE in log


def acceptance_per_position(log: str, slot: int) -> tuple[float, ...]:
    """The share of verify batches in which the draft's 1st, 2nd… token was accepted, as the slot last printed it."""
    found = [m[1] for text in _of_slot(log, slot) if (m := _PER_POSITION.search(text))]
    return tuple(float(share) for share in found[-1].split(",")) if found and found[-1] else ()


def finished(log: str, slot: int) -> bool:
    """Whether `slot` has printed everything about its request."""
    return any(text.startswith("stop processing") for text in _of_slot(log, slot))


def _of_slot(log: str, slot: int) -> Iterator[str]:
    for line in log.splitlines():
        if (found := _SLOT.search(line)) and int(found[1]) == slot:
            yield found[2]


def cycles(log: str, slot: int, prompt: Sequence[int], ids: Sequence[int]) -> tuple[Cycle, ...]:
    """The cycles of one request, with the drafted ids; empty when the log does not tell all of them.

    Draft models and ``ngram-cache`` print what they draft; ``ngram-simple`` prints where it found it, which with the
    request's own ids says the same. Other methods do not, and a memory that rolls back by checkpoint verifies a draft
    twice: nothing is made up for them.
    """
    history = (*prompt, *ids)
    found: list[Cycle] = []
    draft: list[int] = []
    for line in log.splitlines():
        if candidate := _CANDIDATE.search(line):
            if int(candidate[1]) == slot:
                draft[int(candidate[2]) :] = [int(candidate[3])]
        elif cached := _CACHED.search(line):
            draft.append(int(cached[1]))
        elif match := _MATCH.search(line):
            start = int(match[1]) + int(match[2])
            draft = list(history[start : start + int(match[3])])
        elif (line_of := _SLOT.search(line)) and int(line_of[1]) == slot:
            text = line_of[2]
            if _REPLAYED in text:
                return ()
            if single := _SINGLE.match(text):
                found.append(Cycle(int(single[2]), (int(single[1]),), 0))
                draft = []
            elif batch := _BATCH.match(text):
                wanted = int(batch[2])
                if len(draft) < wanted:
                    return ()
                found.append(Cycle(int(batch[3]), (int(batch[1]), *draft[:wanted]), 0))
                draft = []
            elif (accepted := _ACCEPTED.match(text)) and found:
                found[-1] = Cycle(found[-1].base, found[-1].batch, int(accepted[1]) - 1)
    return tuple(found) if _explain(found, prompt, ids) else ()


def _explain(found: Sequence[Cycle], prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether the cycles, one after the other, commit exactly `ids`."""
    at = 0
    for cycle in found:
        committed = cycle.batch[: cycle.accepted + 1]
        there = tuple(ids[at : at + len(committed)])
        if cycle.base != len(prompt) + at or committed[: len(there)] != there or not there:
            return False
        at += len(committed)
    return at + 1 >= len(ids)
