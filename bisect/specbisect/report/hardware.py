"""Library and machine, in the words of llama.cpp's issue form."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbisect.report.subject import Subject

SYSTEMS = {
    "Linux": "Linux",
    "Darwin": "Mac",
    "Windows": "Windows",
    "FreeBSD": "BSD",
    "OpenBSD": "BSD",
}
_BACKEND = re.compile(r"(?:^|\|)\s*([A-Za-z]+) :")
_NAMES = {"METAL": "Metal", "VULKAN": "Vulkan", "OPENCL": "OpenCL", "WEBGPU": "WebGPU"}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the form asks for, and what changes results beside it. `devices` are those beside the processor."""

    library: str
    system: str
    system_detail: str
    backends: tuple[str, ...]
    machine: str
    devices: tuple[str, ...]
    system_info: str
    variables: tuple[tuple[str, str], ...]


def of(about: Subject) -> Hardware:
    """Read off the arms' traces; empty where no arm got so far."""
    host = about.host
    info = str(host.get("system_info", ""))
    named = str(host.get("os", ""))
    cores = f"{host['cores']} cores" if host.get("cores") else ""
    memory = f"{host['memory_gib']} GiB" if host.get("memory_gib") else ""
    return Hardware(
        library=_library(host),
        system=SYSTEMS.get(named.partition(" ")[0], "Other"),
        system_detail=named,
        backends=tuple(dict.fromkeys(_NAMES.get(b, b) for b in _BACKEND.findall(info))) or ("CPU",),
        machine=", ".join(filter(None, (host.get("cpu"), host.get("machine"), cores, memory))),
        devices=tuple(d for d in host.get("devices", ()) if d != host.get("cpu")),
        system_info=info,
        variables=tuple(sorted(host.get("variables", {}).items())),
    )


def _library(host: Mapping[str, Any]) -> str:
    """The library, behind the llama.cpp that is in it where it says that."""
    library, commit = str(host.get("library", "not known")), host.get("llama_cpp", "")
    return library if not commit or commit in library else f"llama.cpp {commit}, in {library}"
