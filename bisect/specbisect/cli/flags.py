"""Options of `check` for every axis and every parameter of a drafter, read off their declarations.

Each has the name it has in matrix files and, where there is one, llama.cpp's own.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import click

from specbisect.cell import AXES, DRAFTERS

LLAMA_CPP: Mapping[str, tuple[str, ...]] = {
    "n_batch": ("-b", "--batch-size"),
    "n_ubatch": ("-ub", "--ubatch-size"),
    "n_parallel": ("-np", "--parallel"),
    "n_ctx": ("-c", "--ctx-size"),
    "n_threads": ("-t", "--threads"),
    "n_threads_batch": ("-tb", "--threads-batch"),
    "flash_attn": ("-fa",),
    "type_k": ("-ctk", "--cache-type-k"),
    "type_v": ("-ctv", "--cache-type-v"),
    "n_gpu_layers": ("-ngl", "--gpu-layers"),
    "split_mode": ("-sm",),
    "n_predict": ("-n", "--predict"),
    "seed": ("-s",),
    "use_extra_bufts": ("--repack",),
}
"""llama.cpp's options for axes; those of switches have a ``--no-`` form too."""

METHODS = tuple(method for method in DRAFTERS if method != "scripted")
"""Drafters that flags can describe; no flag can hold the drafts of a scripted one."""

_OWN = ("method", "model", "args")
_AXIS, _PARAMETER = "axis_", "parameter_"


def flag(name: str) -> str:
    """``--n-batch`` for ``n_batch``."""
    return f"--{name.replace('_', '-')}"


def of_drafter(name: str) -> str:
    """The option for a parameter of a drafter; for a cache type of the draft model, ``--draft-type-k``."""
    return "-md" if name == "model" else flag(f"draft_{name}" if name in AXES else name)


def in_flags(text: str) -> str:
    """A message about a matrix that was made of flags, with the flag in the place of the key that it blames."""
    text = re.sub(r"^check: drafter\[0\]\.(\w+)", lambda found: of_drafter(found[1]), text)
    return re.sub(r"^--set: (\w+)(?= = )", lambda found: flag(found[1]), text)


def axes(command: Any) -> Any:
    """An option for each axis."""
    for axis in reversed(AXES.values()):
        names = [flag(axis.name), *LLAMA_CPP.get(axis.name, ())]
        told = f"{axis.why}; default {plain(axis.default) or 'none'}"
        if isinstance(axis.default, bool):
            long = [n for n in names if n.startswith("--")]
            option = click.option(
                f"{long[0]}/--no-{long[0][2:]}",
                *(f"{n}/--no-{n[2:]}" for n in long[1:]),
                f"{_AXIS}{axis.name}",
                default=None,
                help=told,
            )
        else:
            kind = "NAME" if isinstance(axis.default, str) else "N"
            metavar = "|".join(map(str, axis.values)) if axis.values else kind
            option = click.option(*names, f"{_AXIS}{axis.name}", metavar=metavar, help=told)
        command = option(command)
    return command


def parameters(command: Any) -> Any:
    """An option for each parameter of a drafter."""
    known: dict[str, tuple[Any, list[str]]] = {}
    for method in METHODS:
        kind = DRAFTERS[method]
        for f in fields(kind):
            if f.name not in _OWN:
                known.setdefault(f.name, (get_type_hints(kind)[f.name], []))[1].append(method)
    for name, (kind, methods) in reversed(known.items()):
        option = click.option(
            of_drafter(name),
            f"{_PARAMETER}{name}",
            type=kind if kind in (int, float) else str,
            help=f"Of drafter {', '.join(methods)}.",
        )
        command = option(command)
    return command


def taken(given: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Axes (as text) and parameters that were given, removed from `given`."""
    found = {
        prefix: {
            name.removeprefix(prefix): given.pop(name)
            for name in list(given)
            if name.startswith(prefix)
        }
        for prefix in (_AXIS, _PARAMETER)
    }
    axes = {name: plain(value) for name, value in found[_AXIS].items() if value is not None}
    return axes, {name: value for name, value in found[_PARAMETER].items() if value is not None}


def plain(value: Any) -> str:
    """A value of an axis as ``--set`` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
