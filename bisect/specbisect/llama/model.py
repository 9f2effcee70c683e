"""A model loaded into this process."""

import time
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from specbisect.cell import SplitMode
from specbisect.errors import EngineFault
from specbisect.llama import library
from specbisect.llama.vocab import Vocab

_SPLIT_MODE: dict[SplitMode, int] = {"none": 0, "layer": 1, "row": 2}  # enum llama_split_mode


class LoadedModel:
    """A GGUF with its weights in memory.

    Raises `EngineFault` with stage ``load`` and llama.cpp's own last words when it cannot be loaded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_gpu_layers: int = -1,
        split_mode: SplitMode = "layer",
        use_extra_bufts: bool = True,
    ) -> None:
        self.lib = library.load()
        self.path = Path(path)
        mp = self.lib.llama_model_default_params()
        mp.n_gpu_layers, mp.split_mode = n_gpu_layers, _SPLIT_MODE[split_mode]
        mp.use_extra_bufts = use_extra_bufts
        began = time.perf_counter()
        with library.listening() as log:
            self.handle: Any = self.lib.llama_model_load_from_file(str(path).encode(), mp)
        if not self.handle:
            reasons = [line for line in log if "error" in line.lower()] or [
                "llama.cpp could not load it"
            ]
            raise EngineFault("load", f"{self.path.name}: {reasons[0]}")
        self.load_s = time.perf_counter() - began
        self.open_contexts = 0  # the weights must stay while there are any
        self.vocab = Vocab(self.lib.llama_model_get_vocab(self.handle))
        self.n_vocab = self.vocab.n_tokens
        self.can_cut: bool | None = (
            None  # whether a sequence can be cut; found out when first asked
        )

    @cached_property
    def n_swa(self) -> int:
        """Length of the sliding attention window, 0 without one."""
        return int(self.lib.llama_model_n_swa(self.handle))

    @cached_property
    def keeps_states(self) -> bool:
        """Whether the memory holds recurrent states, which split a batch by sequence and cannot be cut."""
        return bool(
            self.lib.llama_model_is_recurrent(self.handle)
            or self.lib.llama_model_is_hybrid(self.handle)
        )

    def close(self) -> None:
        """Free the weights. Idempotent; no context may be open on them."""
        if self.handle:
            self.lib.llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
