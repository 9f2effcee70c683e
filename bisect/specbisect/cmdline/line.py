"""A pasted llama.cpp command line as a cell, with an account of every word in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from specbisect.cell import (
    CacheType,
    Cell,
    Drafter,
    DraftModel,
    EngineName,
    Model,
    NgramSimple,
    ServerSpec,
    SplitMode,
)
from specbisect.cmdline import mistakes, table
from specbisect.cmdline.given import Given, Note, Option, read
from specbisect.cmdline.words import split, unescape
from specbisect.errors import BadInput

INTEGERS: Mapping[str, str] = {
    "--ctx-size": "n_ctx",
    "--batch-size": "n_batch",
    "--ubatch-size": "n_ubatch",
    "--parallel": "n_parallel",
    "--threads": "n_threads",
    "--threads-batch": "n_threads_batch",
    "--predict": "n_predict",
    "--seed": "seed",
}
SWITCHES: Mapping[str, str] = {
    "--kv-unified": "kv_unified",
    "--swa-full": "swa_full",
    "--op-offload": "op_offload",
    "--repack": "use_extra_bufts",
    "--cache-prompt": "cache_prompt",
    "--ignore-eos": "ignore_eos",
}
CHOICES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "--cache-type-k": ("type_k", get_args(CacheType)),
    "--cache-type-v": ("type_v", get_args(CacheType)),
    "--split-mode": ("split_mode", get_args(SplitMode)),
}
UNLIMITED: Mapping[str, str] = {
    "n_threads": "0 or less is every core",
    "n_threads_batch": "0 or less is every core",
    "n_predict": "no limit; a case needs one",
    "n_parallel": "left to llama-server",
    "seed": "random; greedy decoding draws no random numbers",
}
"""Axes whose flag may be negative, and what that means."""
FLASH_ATTN = {"on": "1 true enabled", "off": "0 false disabled", "auto": "-1"}
GPU_LAYERS = {"auto": -1, "all": 999}

TARGET = ("--model", "--hf-repo", "--model-url")
DRAFT = ("--spec-draft-model", "--spec-draft-hf")
SPEC = ("--spec-type", "--spec-default", "--lookup-cache-static", "--lookup-cache-dynamic")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line asks for.

    `target` and `draft` are paths after mapping (or a repository, where no path is given), empty when there is none;
    `settings` are axes of `Cell` by name. `notes` has every word of the line; `warnings` name mistakes that people
    make, one sentence each; `missing` what is needed besides. `given` are the flags as they stand in the line.
    """

    program: str
    target: str
    draft: str
    settings: Mapping[str, Any]
    spec_types: tuple[str, ...]
    prompt: str | None
    prompt_file: str | None
    environment: Mapping[str, str]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]
    given: Given

    @property
    def engine(self) -> EngineName:
        """Upstream's own server for what only it can do, else the engine with the fewest layers."""
        return "server" if isinstance(self.drafter_without_model, ServerSpec) else "libllama"

    @property
    def drafter_without_model(self) -> Drafter | None:
        """The drafter, with a stand-in where it needs a model."""
        return self.drafter(Model("draft", "", "") if self.draft else None)

    def drafter(self, draft: Model | None) -> Drafter | None:
        """The drafter that the line asks for, around the model that `draft` names; None for a vanilla line.

        A draft model without a method is a `ServerSpec` of type ``none``: it shows that nothing is drafted.
        """
        return _drafter(self.given, self.spec_types, draft)

    def cell(self, target: Model, draft: Model | None = None) -> Cell:
        """The cell: settings that the line does not give are at their defaults."""
        return Cell(target, self.drafter(draft), engine=self.engine, **self.settings)


def parse(text: str, maps: Sequence[tuple[str, str]] = ()) -> CommandLine:
    """What the llama.cpp command line in `text` asks for.

    `maps` are pairs of a path prefix or repository there, and a path here. Raises `BadInput`, with one line, when the
    text holds no llama.cpp command or when a value is not of its flag's kind.
    """
    given = read(split(text))
    settings: dict[str, Any] = {}
    notes = list(given.notes)
    for option in given.options.values():
        notes.append(_account(option, given, settings))
    target, draft = (_model(given, names, maps) for names in (TARGET, DRAFT))
    types = _spec_types(given)
    _drafter(given, types, Model("draft", "", "") if draft else None)  # a bad value shows here
    prompt = given.options.get("--prompt")
    escaped = given.has("--escape") or "--escape" not in given.options
    return CommandLine(
        program=given.program,
        target=target,
        draft=draft,
        settings=settings,
        spec_types=types,
        prompt=(unescape(prompt.value) if escaped else prompt.value) if prompt else None,
        prompt_file=given.value("--file") or None,
        environment=given.environment,
        notes=tuple(notes),
        warnings=tuple(mistakes.find(given, types, settings)),
        missing=tuple(_missing(given, target, draft)),
        given=given,
    )


def _account(option: Option, given: Given, settings: dict[str, Any]) -> Note:
    """What becomes of one option; axes go into `settings`."""
    name, value = option.name, option.value
    if name in INTEGERS:
        axis = INTEGERS[name]
        number = given.integer(name, 0)
        if axis in UNLIMITED and (
            number < 0 or (number == 0 and axis in ("n_threads", "n_threads_batch"))
        ):
            return Note(option.shown, "irrelevant", UNLIMITED[axis])
        settings[axis] = number
        return _used(option, f"{axis} = {number}")
    if name in SWITCHES:
        settings[SWITCHES[name]] = not option.negated
        return _used(option, f"{SWITCHES[name]} = {str(not option.negated).lower()}")
    if name in CHOICES:
        axis, allowed = CHOICES[name]
        if value.lower() not in allowed:
            return Note(option.shown, "not understood", f"{axis} is one of {', '.join(allowed)}")
        settings[axis] = value.lower()
        return _used(option, f"{axis} = {value.lower()}")
    if name == "--flash-attn":
        settings["flash_attn"] = _flash_attn(option)
        return _used(option, f"flash_attn = {settings['flash_attn']}")
    if name == "--gpu-layers":
        settings["n_gpu_layers"] = GPU_LAYERS.get(value) or given.integer(name, 0)
        return _used(option, f"n_gpu_layers = {settings['n_gpu_layers']}")
    return _account_of_the_rest(option)


def _account_of_the_rest(option: Option) -> Note:
    name = option.name
    if name in TARGET:
        return _used(option, "the target")
    if name in DRAFT:
        return _used(option, "the draft model")
    if name in ("--prompt", "--file", "--escape"):
        return _used(option, "the prompt")
    if option.renamed and name.startswith("--spec-ngram-simple"):
        why = f"llama.cpp removed it for one flag per n-gram method; taken as {name}"
        return Note(option.shown, "used", why)
    if option.renamed:
        return Note(option.shown, "used", f"llama.cpp removed it; taken as {name}")
    if name in table.IRRELEVANT:
        return Note(option.shown, "irrelevant", table.IRRELEVANT[name])
    if name in SPEC or name.startswith(("--spec-draft-", "--spec-ngram-")):
        return _used(option, "the drafter")
    why = "llama.cpp knows it, but no axis stands for it and it may change what is computed"
    return Note(option.shown, "not understood", why)


def _used(option: Option, what: str) -> Note:
    return Note(option.shown, "used", what)


def _flash_attn(option: Option) -> str:
    for choice, words in FLASH_ATTN.items():
        if option.value in (choice, *words.split()):
            return choice
    raise BadInput(f"{option.shown}: flash attention is on, off or auto; correct it")


def _spec_types(given: Given) -> tuple[str, ...]:
    """The methods asked for, in order; none when drafting is off."""
    names = [name for name in given.value("--spec-type").split(",") if name]
    if "none" in names:  # as in llama.cpp, where it takes the others with it
        names = []
    if given.has("--spec-default"):
        names.append("ngram-mod")
    if given.program == "llama-speculative" and not names:  # this program knows only one method
        names = ["draft-simple"]
    return tuple(dict.fromkeys(names))


def _drafter(given: Given, types: tuple[str, ...], draft: Model | None) -> Drafter | None:
    n_max = given.integer("--spec-draft-n-max", 3)
    if types == ("draft-simple",) and draft is not None:
        return DraftModel(
            draft,
            n_max=n_max,
            n_min=given.integer("--spec-draft-n-min", 0),
            p_min=given.real("--spec-draft-p-min", 0.0),
            type_k=_cache_type(given, "--spec-draft-type-k"),
            type_v=_cache_type(given, "--spec-draft-type-v"),
        )
    if types == ("ngram-simple",) and draft is None:
        return NgramSimple(
            size_n=given.integer("--spec-ngram-simple-size-n", 12),
            size_m=given.integer("--spec-ngram-simple-size-m", 48),
            min_hits=given.integer("--spec-ngram-simple-min-hits", 1),
        )
    if not types and draft is None:
        return None
    return ServerSpec(
        spec_type=",".join(types) or "none",
        n_max=max(mistakes.longest_draft(given, kind) for kind in types) if types else n_max,
        args=tuple(_arguments(given)),
        model=draft,
    )


def _cache_type(given: Given, name: str) -> CacheType:
    value = given.value(name, "f16").lower()
    for known in get_args(CacheType):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise BadInput(
        f"{given.options[name].shown}: a cache type is one of {', '.join(get_args(CacheType))}"
    )


def _arguments(given: Given) -> Iterator[str]:
    """The drafter's own flags, under their names of today."""
    for name, option in given.options.items():
        own = name.startswith(("--spec-draft-", "--spec-ngram-", "--lookup-cache-"))
        if own and name not in DRAFT and name not in table.IRRELEVANT:
            yield from (name, option.value)


def _model(given: Given, names: tuple[str, ...], maps: Sequence[tuple[str, str]]) -> str:
    for name in names:
        if there := given.value(name):
            file = given.value("--hf-file") if name == "--hf-repo" else ""
            return mapped(f"{there}/{file}" if file else there, maps)
    return ""


def mapped(path: str, maps: Sequence[tuple[str, str]]) -> str:
    """`path` with the longest prefix that `maps` knows replaced; ``from`` and ``to`` of a whole path too."""
    for there, here in sorted(maps, key=lambda pair: len(pair[0]), reverse=True):
        if path == there:
            return here
        if path.startswith(there.rstrip("/\\") + "/") or path.startswith(
            there.rstrip("/\\") + "\\"
        ):
            rest = path[len(there.rstrip("/\\")) :].replace("\\", "/")
            return here.rstrip("/") + rest
    return path


def _missing(given: Given, target: str, draft: str) -> Iterator[str]:
    if not target:
        yield "the target model: add -m X.gguf"
    for what, path in (("target", target), ("draft model", draft)):
        remote = path in [given.value(n) for n in ("--hf-repo", "--model-url", "--spec-draft-hf")]
        if path and remote:
            name = " ".join(path.split())
            yield f"a file for the {what} {name}: add --map {name}=X.gguf"
    if not given.value("--prompt") and not given.value("--file"):
        yield "a prompt"
