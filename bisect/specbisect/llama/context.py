"""A llama.cpp context: rows in, logits out, and a memory that can be rolled back.

Everything that evaluates a model goes through `Context.evaluate`, which counts and times it.
"""

import ctypes
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from specbisect.cell import CacheType, Cell, FlashAttn
from specbisect.errors import EngineFault
from specbisect.llama import library
from specbisect.llama.model import LoadedModel
from specbisect.llama.vocab import Vocab
from specbisect.trace import Counters

Logits = npt.NDArray[np.float32]
Tamper = Callable[[Sequence["Row"], Logits], None]
"""May change the logits of an evaluation in place; planted kernel faults come in here."""

PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent and sliding-window state
_FLASH_ATTN: dict[FlashAttn, int] = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type


class Row(NamedTuple):
    """One row of a batch: a token at a position of a sequence, and whether its logits are wanted.

    It may belong to a second sequence, `also`, at the same position.
    """

    token: int
    position: int
    sequence: int = 0
    wanted: bool = True
    also: int | None = None


def rows_of(
    ids: Sequence[int], start: int, *, sequence: int = 0, last_only: bool = False
) -> list[Row]:
    """Rows of consecutive tokens of one sequence, from position `start`."""
    last = len(ids) - 1
    return [Row(t, start + i, sequence, not last_only or i == last) for i, t in enumerate(ids)]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a context is asked for, in the names of ``llama_context_params``; 0 threads is every core."""

    n_ctx: int = 2048
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    kv_unified: bool = False
    n_threads: int = 0
    n_threads_batch: int = 0
    flash_attn: FlashAttn = "auto"
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"
    swa_full: bool = False
    op_offload: bool = True

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The target's context in `cell`."""
        return cls(
            n_ctx=cell.n_ctx,
            n_batch=cell.n_batch,
            n_ubatch=cell.n_ubatch,
            n_seq_max=cell.n_parallel,
            kv_unified=cell.kv_unified,
            n_threads=cell.n_threads,
            n_threads_batch=cell.n_threads_batch,
            flash_attn=cell.flash_attn,
            type_k=cell.type_k,
            type_v=cell.type_v,
            swa_full=cell.swa_full,
            op_offload=cell.op_offload,
        )


def resolve(ctx: Any, settings: Settings, log: Sequence[str]) -> dict[str, Any]:
    """What llama.cpp made of `settings` in the context `ctx`, whose making printed `log`.

    Read back by call where llama.cpp offers one, else from the log.
    """
    lib, text = library.load(), "\n".join(log)
    asked = asdict(settings)
    stated = dict(re.findall(r"^llama_context: (\w+) += (\S+)", text, re.MULTILINE))
    caches = re.findall(r"K \((\w+)\):.*V \((\w+)\):", text)
    flash = stated.get("flash_attn", asked["flash_attn"])
    if flash == "auto" and (
        found := re.search(r"Flash Attention (enabled|disabled)|flash_attn.* (disabled)", text)
    ):
        flash = found[1] or found[2]
    return asked | {
        "n_ctx": int(lib.llama_n_ctx(ctx)),
        "n_ctx_seq": int(lib.llama_n_ctx_seq(ctx)),
        "n_batch": int(lib.llama_n_batch(ctx)),
        "n_ubatch": int(lib.llama_n_ubatch(ctx)),
        "n_seq_max": int(lib.llama_n_seq_max(ctx)),
        "n_threads": int(lib.llama_n_threads(ctx)),
        "n_threads_batch": int(lib.llama_n_threads_batch(ctx)),
        "flash_attn": {"enabled": "on", "disabled": "off"}.get(flash, flash),
        "kv_unified": stated.get("kv_unified", str(asked["kv_unified"]).lower()) == "true",
        "type_k": caches[0][0] if caches else asked["type_k"],
        "type_v": caches[0][1] if caches else asked["type_v"],
    }


def unhonoured(settings: Settings, resolved: Mapping[str, Any]) -> list[str]:
    """Settings that were asked for and not followed.

    Choosing where the choice was left open is following, and so is what llama.cpp states: n_ctx is rounded up,
    n_batch is at most what n_ctx was before that, n_ubatch at most n_batch.
    """
    asked, got = asdict(settings), resolved
    free = {name for name in ("n_threads", "n_threads_batch", "n_ctx") if not asked[name]}
    free |= {"flash_attn"} if asked["flash_attn"] == "auto" else set()
    free |= {"n_ctx"} if got["n_ctx"] >= asked["n_ctx"] else set()
    follows = asked | {
        "n_batch": min(asked["n_batch"], asked["n_ctx"] or got["n_ctx"]),
        "n_ubatch": min(asked["n_ubatch"], got["n_batch"]),
    }
    return [
        f"{name} = {asked[name]} (got {got[name]})"
        for name, value in follows.items()
        if name not in free and value != got[name]
    ]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The part of a sequence's state that cannot be cut back, and the position it ends at."""

    data: Any
    size: int
    end: int


class Context:
    """One context over a loaded model.

    Raises `EngineFault` with stage ``context`` when it cannot be made, ``decode`` when llama.cpp refuses a batch.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: Settings,
        *,
        tamper: Tamper | None = None,
        cb_eval: Any = None,
    ) -> None:
        self.lib = library.load()
        self.model = model
        self.settings = settings
        self.counters = Counters()
        self._tamper = tamper
        self._cb_eval = cb_eval  # kept alive as long as the context
        with library.listening() as log:
            self._ctx = self.lib.llama_init_from_model(model.handle, self._params())
        if not self._ctx:
            raise EngineFault("context", log[-1] if log else "llama_init_from_model failed")
        model.open_contexts += 1
        self.memory = self.lib.llama_get_memory(self._ctx)
        self.resolved = resolve(self._ctx, self.settings, log)
        self.n_batch = int(self.lib.llama_n_batch(self._ctx))
        self.n_ctx_seq = int(self.lib.llama_n_ctx_seq(self._ctx))
        self._batch = self.lib.llama_batch_init(self.n_batch, 0, 2)

    def _params(self) -> Any:
        s = self.settings
        cp = self.lib.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch = s.n_ctx, s.n_batch, s.n_ubatch
        cp.n_seq_max, cp.kv_unified = s.n_seq_max, s.kv_unified
        cp.n_threads = s.n_threads or library.cores()
        cp.n_threads_batch = s.n_threads_batch or cp.n_threads
        cp.flash_attn_type = _FLASH_ATTN[s.flash_attn]
        cp.type_k, cp.type_v = (GGMLQuantizationType[t.upper()].value for t in (s.type_k, s.type_v))
        cp.swa_full, cp.op_offload = s.swa_full, s.op_offload
        if self._cb_eval is not None:
            cp.cb_eval = ctypes.cast(self._cb_eval, type(cp.cb_eval))
        return cp

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        return self.model.vocab

    @property
    def path(self) -> Path:
        """The model's file."""
        return self.model.path

    def unhonoured(self) -> list[str]:
        """Settings that were asked for and not followed."""
        return unhonoured(self.settings, self.resolved)

    def evaluate(self, rows: Sequence[Row]) -> Logits:
        """Decode `rows` in n_batch pieces; logits of the wanted rows, shape (wanted, n_vocab), float32.

        The result is llama.cpp's own buffer when one piece was enough: use it before the next evaluation.
        """
        if len(rows) <= self.n_batch:
            logits = self._decode(rows)
        else:  # the next piece overwrites the buffer of the one before
            starts = range(0, len(rows), self.n_batch)
            logits = np.concatenate(
                [self._decode(rows[i : i + self.n_batch]).copy() for i in starts]
            )
        if self._tamper is not None:
            self._tamper(rows, logits)
        return logits

    def _decode(self, rows: Sequence[Row]) -> Logits:
        batch, lib = self._batch, self.lib
        batch.n_tokens = len(rows)
        wanted = 0
        for i, row in enumerate(rows):
            batch.token[i], batch.pos[i] = row.token, row.position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row.sequence
            if row.also is not None:
                batch.n_seq_id[i], batch.seq_id[i][1] = 2, row.also
            batch.logits[i] = row.wanted
            wanted += row.wanted
        began = time.perf_counter()
        status = lib.llama_decode(self._ctx, batch)
        lib.llama_synchronize(self._ctx)
        spent = time.perf_counter() - began
        self.counters += Counters(decode_calls=1, decoded_tokens=len(rows), decode_s=spent)
        if status != 0:
            raise EngineFault("decode", _DECODE.get(status, f"llama_decode returned {status}"))
        shape = (wanted, self.model.n_vocab)
        if not wanted:
            return np.empty(shape, np.float32)
        address = ctypes.cast(lib.llama_get_logits(self._ctx), ctypes.c_void_p).value
        if address is None:
            raise EngineFault("decode", "llama.cpp gave no logits")
        buffer = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
        return np.ctypeslib.as_array(buffer).reshape(shape)

    def remove(self, sequence: int, start: int) -> bool:
        """Remove what `sequence` holds from position `start` on (-1: all of it); False when it cannot be cut there."""
        return bool(self.lib.llama_memory_seq_rm(self.memory, sequence, start, -1))

    def copy(self, source: int, target: int) -> None:
        """Let `target` hold all that `source` holds, sharing its cells."""
        self.lib.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def clear(self) -> None:
        """Forget every sequence, data included."""
        self.lib.llama_memory_clear(self.memory, True)

    def end(self, sequence: int = 0) -> int:
        """The largest position `sequence` holds, -1 when empty."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, sequence))

    def checkpoint(self, sequence: int = 0, flags: int = PARTIAL_ONLY) -> Checkpoint:
        """The state that `restore` needs to bring `sequence` back to where it is now."""
        size = self.lib.llama_state_seq_get_size_ext(self._ctx, sequence, flags)
        data = (ctypes.c_uint8 * size)()
        written = self.lib.llama_state_seq_get_data_ext(self._ctx, data, size, sequence, flags)
        if written != size:
            raise EngineFault("checkpoint", f"llama.cpp wrote {written} of {size} bytes of state")
        return Checkpoint(data, size, self.end(sequence))

    def restore(self, saved: Checkpoint, sequence: int = 0, flags: int = PARTIAL_ONLY) -> None:
        """Bring `sequence` back to `saved`: its state set, and what came after removed."""
        lib = self.lib
        read = lib.llama_state_seq_set_data_ext(self._ctx, saved.data, saved.size, sequence, flags)
        if read != saved.size or not self.remove(sequence, saved.end + 1):
            raise EngineFault("rollback", "llama.cpp did not take the checkpoint back")

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._ctx:
            self.lib.llama_batch_free(self._batch)
            self.lib.llama_free(self._ctx)
            self._ctx = None
            self.model.open_contexts -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_DECODE = {
    1: "llama_decode found no room in the memory for the batch; raise n_ctx",
    2: "llama_decode was aborted",
    -1: "llama_decode refused the batch as invalid",
    -2: "llama_decode could not allocate its buffers: out of memory",
    -3: "llama_decode failed to compute",
}
