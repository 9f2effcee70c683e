"""Making quantised files with llama.cpp's own quantiser, once each, into a cache that all runs share.

A file is named by what it is made from: the SHA-256 of the base, the type, the tensor overrides and the build of the
library. The quantiser runs in a process of its own, since it may abort, and writes to a temporary name first.
"""

import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbisect import stage
from specbisect.cell import digest
from specbisect.errors import BadInput, EngineFault
from specbisect.llama import child, files, library, types

Progress = Callable[["Recipe", Literal["started", "finished"]], None]

_MIB = 1 << 20
_SIZE = re.compile(r"quant size\s+=\s+([0-9.]+) MiB")
_UNQUANTISED = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a quantised file is made from.

    `base` is the file to quantise and `base_sha256` its content, `type` a file type such as ``Q4_K_M``. `overrides`
    are pairs of a regular expression (ECMAScript, searched in tensor names) and a tensor type: the first that matches
    wins over the mixture. `build` is the library's. Make one with `recipe`, which checks the names.
    """

    base: Path
    base_sha256: str
    type: str
    overrides: tuple[tuple[str, str], ...]
    build: str

    @property
    def identity(self) -> str:
        """Names the content of the file before it exists."""
        extra = f"+{digest(self.overrides)}" if self.overrides else ""
        return f"quantize:{self.base_sha256}:{self.type}{extra}:{self.build}"

    @property
    def path(self) -> Path:
        """Where the file is, or will be, in the cache."""
        key = digest(self.identity)[:12]
        models = files.cache_dir() / "models"
        name = files.stem(self.base)
        made_as_copy = next(models.glob(f"*-{key}/*.gguf"), None)
        return made_as_copy or models / f"{name}-{key}" / f"{name}.{self.type}.gguf"


def recipe(base: str | Path, type: str, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """The checked recipe of `base` as `type`. Raises `BadInput` for a bad file or an unknown type."""
    base = Path(base)
    types.file_type(type)
    for _, tensor_type in overrides:
        types.tensor_type(tensor_type)
    if overrides and type.upper() in _UNQUANTISED:
        raise BadInput(
            f"tensor overrides have no effect on {type}: name a quantised type and override the other tensors"
        )
    sha = files.inspect(base).sha256
    pairs = tuple((pattern, name.upper()) for pattern, name in overrides)
    return Recipe(base, sha, type.upper(), pairs, library.build())


def quantize(
    base: str | Path,
    type: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> Path:
    """The file of `base` as `type`, made if it is not in the cache; 0 threads is every core.

    `base` itself when that is its type already and there are no overrides. A base that is quantised already is
    quantised again. Raises `BadInput` for a bad file, an unknown type, a type that needs an importance matrix, or no
    disk space; `EngineFault` with stage ``quantize`` when llama.cpp fails.
    """
    if not overrides and files.inspect(base).file_type == type.upper():
        return Path(base)
    return make(recipe(base, type, overrides), n_threads=n_threads, progress=progress)


def make(wanted: Recipe, *, n_threads: int = 0, progress: Progress | None = None) -> Path:
    """The file of a recipe, made if it is not in the cache; raises as `quantize` does."""
    path = wanted.path
    if path.exists():
        return path
    if progress:
        progress(wanted, "started")
    child.call(_make, wanted, path, n_threads)
    if progress:
        progress(wanted, "finished")
    return path


def sizes(recipes: Sequence[Recipe]) -> list[int]:
    """Bytes of each recipe's weights, as the quantiser itself reckons them without writing anything."""
    return child.call(_sizes, tuple(recipes)) if recipes else []


def check_space(needed: int) -> None:
    """Raise `BadInput` when fewer than `needed` bytes are free where the cache is, or will be."""
    where = files.cache_dir().absolute()
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    if needed > free:
        raise BadInput(
            f"no disk space: needs {needed / _MIB:.0f} MiB, has {free / _MIB:.0f} MiB at {where}; "
            "free space or set SPECBISECT_CACHE"
        )


def _sizes(recipes: Sequence[Recipe]) -> list[int]:
    return [_dry_run(wanted) for wanted in recipes]


def _make(wanted: Recipe, path: Path, n_threads: int) -> None:
    """In the child process, which holds the lock: it may outlive the process that asked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if path.exists():
                return
            if files.sha256(wanted.base) != wanted.base_sha256:
                raise BadInput(f"{wanted.base} changed while the run was planned; start again")
            check_space(_dry_run(wanted))
            partial = path.with_suffix(".partial")
            try:
                _run(wanted, partial, n_threads)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            f"{path.parent}: {error.strerror}; mend that or set SPECBISECT_CACHE"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _dry_run(wanted: Recipe) -> int:
    log = _run(wanted, Path(os.devnull), 0, dry_run=True)
    if "will require an imatrix" in log:
        raise BadInput(
            f"{wanted.type} of {wanted.base.name} needs an importance matrix; choose another type, or make the file "
            "with llama-quantize and give it as a target"
        )
    if not (found := _SIZE.search(log)):
        raise EngineFault("quantize", "llama.cpp's dry run named no size")
    return int(float(found[1]) * _MIB)


def _run(wanted: Recipe, out: Path, n_threads: int, *, dry_run: bool = False) -> str:
    """Run the quantiser in this process; what it printed."""
    stage.report("quantize")
    lib = library.load()
    params = lib.llama_model_quantize_default_params()
    params.ftype = types.file_type(wanted.type)
    params.nthread, params.allow_requantize, params.dry_run = n_threads, True, dry_run
    overrides = _overrides(lib, wanted.overrides)
    params.tt_overrides = overrides
    with library.listening() as log:
        status = lib.llama_model_quantize(
            os.fsencode(wanted.base), os.fsencode(out), ctypes.byref(params)
        )
    if status != 0:
        raise EngineFault(
            "quantize", f"{wanted.base.name} as {wanted.type}: llama.cpp returned {status}"
        )
    return "\n".join(log)


def _overrides(lib: Any, pairs: Sequence[tuple[str, str]]) -> Any:
    """A C array that ends with an empty entry, as the library wants it."""
    array = (lib.llama_model_tensor_override * (len(pairs) + 1))()
    for entry, (pattern, name) in zip(array, pairs, strict=False):
        entry.pattern, entry.type = pattern.encode(), types.tensor_type(name)
    return array


def place(file: Path, directory: Path) -> Path:
    """A copy of `file` in `directory`, which is made if need be: whole or not at all.

    Raises `BadInput` when it cannot be put there.
    """
    wanted = directory / file.name
    partial = directory / f".{file.name}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, partial)
        os.replace(partial, wanted)
    except OSError as error:
        raise BadInput(
            f"cannot write {wanted}: {error.strerror}; choose another directory"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return wanted
