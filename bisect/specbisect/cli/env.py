"""``specbisect env``: what this machine, library and installation are."""

import platform
from typing import Any

import click

from specbisect import __version__
from specbisect.cli import options, output
from specbisect.errors import BadInput


@click.command("env")
@options.as_json
def command(as_json: bool) -> None:
    """Describe the environment for a bug report.

    Names no user, no host and no home directory.
    """
    facts = environment()
    if as_json:
        output.emit({"schema": "specbisect.environment/1"} | facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.replace('_', ' '):<{width}}  {_plain(value)}")


def environment() -> dict[str, Any]:
    """Versions, library build, machine, the cache, and the llama-server that would be used."""
    from specbisect.llama import child, files, library

    cache = files.cache_dir()
    models = list((cache / "models").glob("**/*.gguf"))
    size = sum(path.stat().st_size for path in models)
    return {
        "specbisect": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **child.call(_machine),
        "cache": f"{library.homeless(str(cache))} ({len(models)} models, {output.mebibytes(size)})",
        "llama_server": _server(),
    }


def _machine() -> dict[str, Any]:
    from specbisect.llama import library

    return {**library.environment(), "host_class": library.host_class()}


def _server() -> str:
    from specbisect.engines.server import binary
    from specbisect.llama import library

    try:
        found = binary.find()
    except BadInput as error:
        return library.homeless(f"none: {error}")
    return library.homeless(f"{found.version} at {found.path}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return ", ".join(value) if isinstance(value, list) else str(value)
