"""Models that an engine keeps loaded: which of them go when memory is short."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from specbisect.cell import Cell, Model
from specbisect.engines.models import Models
from specbisect.llama import files
from specbisect.llama.context import Context, Settings


def test_a_model_in_use_stays_when_memory_is_short(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(path: Path) -> Model:
        return Model(path.stem, "BF16", f"sha256:{files.sha256(path)}", str(path))

    target, draft, other = (model(tiny_models(seed=seed)) for seed in (0, 1, 2))
    cell = Cell(target, n_ctx=256, n_predict=8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    models = Models()
    with Context(models.get(target, cell), Settings.of(cell)) as context:
        idle = models.get(draft, cell)
        models.get(other, cell)
        assert idle.handle is None
        assert context.model.handle is not None
        assert models.get(target, cell) is context.model
    models.get(draft, cell)
    assert context.model.handle is None
    assert models.loads == 4
    models.close()
