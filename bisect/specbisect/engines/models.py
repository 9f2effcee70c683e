"""Models that an engine of this process keeps loaded, and the contexts in which they draft."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import psutil

from specbisect import stage
from specbisect.cell import Cell, DraftModel, Model, SelfDraft
from specbisect.errors import BadInput
from specbisect.llama import files
from specbisect.llama.context import Context, Settings
from specbisect.llama.model import LoadedModel

MEMORY_SHARE = 0.6
"""Models stay loaded while they fit into this share of the memory that is free."""


class Models:
    """Models loaded in this process, by file and placement; the least recently used go when memory is short.

    A model with an open context stays: a draft model is loaded while its target decodes.
    """

    def __init__(self) -> None:
        self._loaded: OrderedDict[tuple[Any, ...], LoadedModel] = OrderedDict()
        self.loads = 0

    def get(self, model: Model, cell: Cell) -> LoadedModel:
        """`model` as `cell` places it, loaded if need be."""
        key = (model.path, cell.n_gpu_layers, cell.split_mode, cell.use_extra_bufts)
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        self.make_room(model)
        stage.report("load")
        loaded = LoadedModel(
            model.path,
            n_gpu_layers=cell.n_gpu_layers,
            split_mode=cell.split_mode,
            use_extra_bufts=cell.use_extra_bufts,
        )
        self.loads += 1
        self._loaded[key] = loaded
        return loaded

    def make_room(self, model: Model) -> None:
        """Free what must go for `model` to be loaded. Raises `BadInput` when its file is not the one planned with."""
        facts = files.inspect(model.path)
        if model.identity.startswith("sha256:") and model.identity != f"sha256:{facts.sha256}":
            raise BadInput(
                f"{model.path} changed since the run was planned; start a new run with --fresh"
            )
        idle = [key for key, loaded in self._loaded.items() if not loaded.open_contexts]
        while idle and facts.size > MEMORY_SHARE * psutil.virtual_memory().available:
            self._loaded.pop(idle.pop(0)).close()

    def draft_context(self, cell: Cell, spec: DraftModel | SelfDraft) -> Context:
        """A context for the model of `spec` to draft in: the target's settings, but for a draft model's own cache."""
        settings = Settings.of(cell)
        if isinstance(spec, SelfDraft):
            return Context(self.get(cell.target, cell), settings)
        settings = replace(settings, type_k=spec.type_k, type_v=spec.type_v)
        return Context(self.get(spec.model, cell), settings)

    def close(self) -> None:
        """Free every model."""
        while self._loaded:
            self._loaded.popitem()[1].close()
