"""A cell as a llama-server command line.

Every axis becomes a flag even at its default, so that no version's own default, configuration file or environment
decides; names are those of llama.cpp's common/arg.cpp.
"""

from collections.abc import Iterator
from pathlib import Path

from specbisect.cell import Cell, DraftModel, Model, NgramSimple, SelfDraft, ServerSpec
from specbisect.engines.server.binary import Binary
from specbisect.errors import BadInput
from specbisect.llama import header
from specbisect.llama.files import parts
from specbisect.llama.library import cores

VERBOSITY = 5
"""From here on the log holds every cycle's draft."""

QUIET: tuple[tuple[str, ...], ...] = (
    ("--no-warmup",),  # one evaluation less to wait for; it leaves nothing behind
    ("--offline",),
    ("--fit", "off"),  # would change settings that were not given
    ("--no-context-shift",),
    ("--cache-ram", "0"),  # a second prompt cache, which cache_prompt does not switch off
    ("--ctx-checkpoints", "0"),  # would evaluate the end of a prompt apart from the rest
    ("--slot-prompt-similarity", "0"),
    ("--no-webui",),
)
"""What would disturb the experiment, switched off. A binary that does not know one of these has nothing to disturb."""

NOTHING = "none"
"""The ``--spec-type`` that drafts nothing, and the value that leaves the flag out: ``-md`` alone never speculates."""


def command(cell: Cell, binary: Binary) -> tuple[str, ...]:
    """Command line of the server that runs `cell`, without host, port and key.

    Raises `BadInput` for a method or flag this binary does not know, and for a method whose model lacks what it needs.
    """
    asked = (*_axes(cell), *_drafter(cell, binary))
    unknown = [flag for flag in asked if _is_flag(flag) and flag not in binary.flags]
    if unknown:
        mend = "take a newer one, or leave out what needs it"
        raise BadInput(f"llama-server {binary.version} does not know {', '.join(unknown)}; {mend}")
    quiet = [word for group in QUIET if group[0] in binary.flags for word in group]
    return (str(binary.path), *asked, "--verbosity", str(VERBOSITY), *quiet)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _axes(cell: Cell) -> Iterator[str]:
    n_threads = cell.n_threads or cores()
    values = {
        "--model": cell.target.path,
        "--ctx-size": cell.n_ctx,
        "--batch-size": cell.n_batch,
        "--ubatch-size": cell.n_ubatch,
        "--parallel": cell.n_parallel,
        "--threads": n_threads,
        "--threads-batch": cell.n_threads_batch or n_threads,
        "--flash-attn": cell.flash_attn,
        "--cache-type-k": cell.type_k,
        "--cache-type-v": cell.type_v,
        "--split-mode": cell.split_mode,
        "--seed": cell.seed,
    }
    for flag, value in values.items():
        yield from (flag, str(value))
    if cell.n_gpu_layers >= 0:
        yield from ("--n-gpu-layers", str(cell.n_gpu_layers))
    yield "--kv-unified" if cell.kv_unified else "--no-kv-unified"
    if cell.swa_full:
        yield "--swa-full"
    if not cell.op_offload:
        yield "--no-op-offload"
    if not cell.use_extra_bufts:
        yield "--no-repack"


def _drafter(cell: Cell, binary: Binary) -> Iterator[str]:
    match cell.drafter:
        case None:
            return
        case DraftModel() as spec:
            yield from _draft_model(spec.model, spec.n_max)
            yield from (
                "--spec-draft-n-min",
                str(spec.n_min),
                "--spec-draft-p-min",
                str(spec.p_min),
            )
            yield from ("--spec-draft-type-k", spec.type_k, "--spec-draft-type-v", spec.type_v)
            kind = "draft-simple"
        case SelfDraft() as spec:
            yield from _draft_model(cell.target, spec.n_max)
            yield from ("--spec-draft-type-k", cell.type_k, "--spec-draft-type-v", cell.type_v)
            kind = "draft-simple"
        case NgramSimple() as spec:
            yield from ("--spec-ngram-simple-size-n", str(spec.size_n))
            yield from ("--spec-ngram-simple-size-m", str(spec.size_m))
            yield from ("--spec-ngram-simple-min-hits", str(spec.min_hits))
            kind = "ngram-simple"
        case ServerSpec() as spec:
            if spec.model is not None:
                yield from ("--spec-draft-model", spec.model.path)
            if "draft-" in spec.spec_type and "--spec-draft-n-max" not in spec.args:
                yield from ("--spec-draft-n-max", str(spec.n_max))
            yield from spec.args
            kind = spec.spec_type
            refuse_special(kind, cell.target, spec.model)
        case spec:
            raise BadInput(f"llama-server has no drafter {spec.method}; choose another engine")
    yield from _spec_type(kind, binary)


def _draft_model(model: Model, n_max: int) -> Iterator[str]:
    yield from ("--spec-draft-model", model.path, "--spec-draft-n-max", str(n_max))


def _spec_type(kind: str, binary: Binary) -> Iterator[str]:
    names = kind.split(",")
    unknown = [n for n in names if binary.spec_types and n not in binary.spec_types]
    if unknown and kind != NOTHING:
        known = ", ".join(binary.spec_types)
        raise BadInput(
            f"llama-server {binary.version} has no --spec-type {unknown[0]}; it has {known}"
        )
    if kind != NOTHING:
        yield from ("--spec-type", kind)


def refuse_special(spec_type: str, target: Model, draft: Model | None) -> None:
    """Raise `BadInput` when a method of `spec_type` (a comma-separated list) needs a model it has not got.

    The marks are those llama.cpp goes by (``common_speculative_types_from_gguf`` in common/speculative.cpp).
    """
    for kind in spec_type.split(","):
        if kind == "draft-simple" and draft is None:
            raise BadInput(
                "draft-simple needs a draft model; give one, with the target's vocabulary"
            )
        if kind == "draft-mtp":
            model = draft or target
            if not any(name.endswith(".nextn.eh_proj.weight") for name in _tensors(model)):
                raise BadInput(
                    f"draft-mtp needs layers that predict several tokens (nextn), and {model.name} has none; "
                    "choose a model that was trained with them, or another method"
                )
        if kind in _HEADS:
            architecture, tensor, words = _HEADS[kind]
            if draft is None:
                raise BadInput(
                    f"{kind} needs a draft model: {words}; give one made for {target.name}"
                )
            if not _is_head(draft, architecture, tensor):
                raise BadInput(f"{kind} needs {words} as its draft model, and {draft.name} is none")


_HEADS = {
    "draft-eagle3": ("eagle3", None, "an EAGLE-3 head (architecture eagle3)"),
    "draft-dflash": ("dflash", False, "a DFlash model (architecture dflash)"),
    "draft-dspark": ("dflash", True, "a DSpark model (architecture dflash with a Markov head)"),
}
"""Per method: the draft's architecture, whether it has a Markov head (None: no matter), and what to call it."""


def _is_head(draft: Model, architecture: str, markov: bool | None) -> bool:
    if _header(draft).metadata.get("general.architecture") != architecture:
        return False
    return markov is None or markov == ("markov_w1.weight" in _tensors(draft))


def _tensors(model: Model) -> set[str]:
    return {tensor.name for tensor in _header(model).tensors}


def _header(model: Model) -> header.Header:
    try:
        return header.read(parts(Path(model.path))[0])
    except (header.Malformed, OSError) as error:
        raise BadInput(f"{model.path} cannot be read as GGUF: {error}") from None
