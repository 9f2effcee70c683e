"""What a run is of: models, tokenizers, library, machine, settings and prompts, each by what it is and not by name."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from specbisect.cell import AXES, Cell, Model, digest, drafter_label, without
from specbisect.engines.server import URLS, binary
from specbisect.errors import BadInput
from specbisect.gate.interface import draft_of
from specbisect.llama import child, files, library, vocab
from specbisect.matrix import Plan
from specbisect.matrix.prompts import prompts_digest
from specbisect.matrix.schema import Table
from specbisect.store import Row
from specbisect.store.directory import differences

Part = Literal["target", "drafter", "library", "machine", "settings", "prompts"]
PARTS: tuple[Part, ...] = get_args(Part)

DRIVERS = tuple(
    map(
        Path,
        ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version"),
    )
)
_MACHINE = ("cpu", "machine", "system_info", "devices", "variables")
_RESOLVED = {"target": None, "draft": None, "server": ("spec_types", "slots")}
"""Parts of a trace's resolved settings that are settings, and which of their entries (all, where None)."""


class ModelPin(Table):
    """A model file. `tokenizer` is what its vocabulary is and does; `chat_template` is a digest."""

    name: str
    quant: str
    sha256: str
    size: int
    architecture: str
    tensor_types: dict[str, int]
    tokenizer: dict[str, Any]
    special: dict[str, int]
    chat_template: str


class SettingPin(Table):
    """The settings of the cells that differ in their models only: as asked for, and all ways they were resolved."""

    key: str
    drafter: dict[str, Any]
    axes: dict[str, Any]
    resolved: list[dict[str, Any]] = Field(default_factory=list)


class Identity(Table):
    """Everything that a run's results depend on. Models and settings stand in the order of the plan."""

    target: list[ModelPin]
    drafter: list[ModelPin]
    library: dict[str, str]
    machine: dict[str, Any]
    settings: list[SettingPin]
    prompts: dict[str, str]


def identify(plan: Plan, ask: Callable[..., Any] = child.call) -> Identity:
    """The identity of `plan` before it runs, so without resolved settings. Its files must have been made.

    `ask` calls a function where the cases will run. Raises `BadInput` when part of it cannot be told: a file that
    cannot be read, a server that is somebody else's.
    """
    cells = list(plan.cells())
    settings = {settings_key(cell): cell for cell in reversed(cells)}
    models = (*plan.targets, *draft_models(cells))
    tokenizers = child.call(_tokenizers, tuple(model.path for model in models))
    host = ask(host_of, sorted({cell.engine for cell in cells}))
    pins = [pin(*one) for one in zip(models, tokenizers, strict=True)]
    n = len(plan.targets)
    return Identity(
        target=pins[:n],
        drafter=pins[n:],
        library=host["library"],
        machine=host["machine"],
        settings=[_setting(key, cell) for key, cell in reversed(settings.items())],
        prompts={"digest": prompts_digest(plan.prompts)}
        | {prompt.id: digest(asdict(prompt)) for prompt in plan.prompts},
    )


def resolve(identity: Identity, rows: Iterable[Row]) -> Identity:
    """`identity` with the settings that the finished cases `rows` were resolved to."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        known = found.setdefault(settings_key(row.cell), [])
        resolved = _settings_of(row.resolved)
        if resolved and resolved not in known:
            known.append(resolved)
    settings = [s.model_copy(update={"resolved": found.get(s.key, [])}) for s in identity.settings]
    return identity.model_copy(update={"settings": settings})


def changes(locked: Identity, now: Identity) -> dict[Part, tuple[str, ...]]:
    """What is not as it was locked, one line each, by part; parts that are the same are left out.

    Settings that are not resolved yet are compared as they were asked for.
    """
    old, new = locked.model_dump(), now.model_dump()
    if not any(setting["resolved"] for setting in new["settings"]):
        old, new = without(old, "resolved"), without(new, "resolved")
        for setting in old["settings"] + new["settings"]:
            setting["resolved"] = []
    found = {part: tuple(differences(old[part], new[part], part)) for part in PARTS}
    return {part: lines for part, lines in found.items() if lines}


def draft_models(cells: Iterable[Cell]) -> list[Model]:
    """The draft models of `cells`, each once."""
    return list(dict.fromkeys(model for cell in cells if (model := draft_of(cell)) is not None))


def settings_key(cell: Cell) -> str:
    """16 hex digits of everything about `cell` but its models."""
    return digest(without(asdict(cell), "target", "model"))


def _setting(key: str, cell: Cell) -> SettingPin:
    drafter = without(asdict(cell.drafter), "model") if cell.drafter else {}
    return SettingPin(
        key=key,
        drafter={"method": drafter_label(cell.drafter)} | _plain(drafter),
        axes={name: getattr(cell, name) for name in AXES},
    )


def _plain(drafter: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in drafter.items() if k != "method"}


def _settings_of(resolved: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for part, entries in _RESOLVED.items():
        values = resolved.get(part)
        if isinstance(values, dict):
            found[part] = {k: v for k, v in values.items() if entries is None or k in entries}
    return found


def host_of(engines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The parts of an identity that this host has: library and machine; for a process of its own."""
    environment = library.environment()
    return {
        "library": _library(engines, environment["library"]),
        "machine": {name: environment[name] for name in _MACHINE} | {"drivers": list(drivers())},
    }


def _tokenizers(paths: Sequence[str]) -> list[dict[str, Any]]:
    """What llama.cpp says of the vocabularies of `paths`; for a process of its own."""
    return [tokenizer(path) for path in paths]


def pin(model: Model, tokenizer: Mapping[str, Any]) -> ModelPin:
    """What `model` is, from its file. Raises `BadInput` when that cannot be read."""
    facts = files.inspect(model.path)
    return ModelPin(
        name=model.name,
        quant=model.quant,
        sha256=facts.sha256,
        size=facts.size,
        architecture=facts.architecture,
        tensor_types=dict(facts.tensor_types),
        tokenizer={"model": facts.tokenizer, "pre": facts.pre_tokenizer} | dict(tokenizer),
        special=dict(facts.special),
        chat_template=facts.chat_template,
    )


def tokenizer(path: str) -> dict[str, Any]:
    """A vocabulary in brief: a digest of every token's text and attributes, and how texts begin and end."""
    with vocab.open_vocab(path) as own:
        state = hashlib.sha256()
        for token in range(own.n_tokens):
            attributes = int(own.lib.llama_vocab_get_attr(own.handle, token))
            state.update(own.text(token) + b"\0" + attributes.to_bytes(4, "little"))
        return {
            "tokens": own.n_tokens,
            "digest": state.hexdigest()[:16],
            "bos": own.bos,
            "add_bos": own.add_bos,
            "eos": own.eos,
            "add_eos": own.add_eos,
            "eot": own.eot,
            "ends": list(own.end_tokens),
        }


def _library(engines: Iterable[str], build: str) -> dict[str, str]:
    found = {}
    for engine in engines:
        if engine != "server":
            found["llama.cpp"] = build
        elif urls := [name for name in URLS.values() if os.environ.get(name)]:
            raise BadInput(
                f"a server that somebody else started ({urls[0]}) cannot be pinned; let specbisect start one"
            )
        else:
            found["llama-server"] = binary.find().version
    return found


def drivers() -> Iterator[str]:
    """The drivers of this machine's accelerators that say which they are, one line each."""
    for path in DRIVERS:
        if path.is_file():
            yield f"{path.parent.name} {' '.join(path.read_text().split())}"
