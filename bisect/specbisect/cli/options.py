"""Options that several commands have, and what they become."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.cell import Case
    from specbisect.store import Row

PATH = click.Path(path_type=Path)
"""Whether it exists, and is what it should be, is said by whoever reads it."""

as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, and nothing else there."
)

jobs = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Cases that run at the same time, each with n_threads threads.",
)


class Finite(click.FloatRange):
    """A number in a range, which infinity and NaN never are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number that `value` is."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


timeout = click.option(
    "--timeout",
    type=Finite(min=0, min_open=True),
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="Time after which an arm of a case counts as hanging.",
)

only = click.option(
    "--only",
    metavar="PATTERN",
    help="Take only cases in whose name this shell pattern is found, such as q4_k_m*n_max=7.",
)


def check_only(pattern: str | None, cases: "Iterable[Case]") -> None:
    """Raises `BadInput` when ``--only`` leaves none of the cases that there are."""
    from specbisect.matrix import label, matches

    if pattern is None:
        return
    first = None
    for case in cases:
        first = first or case
        if matches(case, pattern):
            return
    named = f"; the first is called {label(first, whole=True)}" if first else ""
    raise BadInput(f"--only {pattern} fits no case{named}")


def named(row: "Row") -> "Case":
    """The case of a row as far as ``--only`` looks at it."""
    from specbisect.cell import Case, Prompt

    return Case(row.cell, Prompt(row.prompt_id))


settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="AXIS=VALUE",
    help="Set an axis, such as n_ubatch=8, n_ubatch=8,512 or n_ubatch=1..8.",
)


def _split(_ctx: click.Context, _option: click.Parameter, given: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for text in given for word in text.split(","))


def listed(*names: str, metavar: str, help: str) -> Callable[[Any], Any]:
    """An option that takes several values, repeated or separated by commas."""
    return click.option(*names, multiple=True, callback=_split, metavar=f"{metavar},…", help=help)


_MATRIX = (
    click.option("--base", type=PATH, help="Model whose quantisations are tested."),
    listed("--quant", "quants", metavar="TYPE", help="Test these quantisations of the base."),
    click.option(
        "--target", "targets", type=PATH, multiple=True, help="Test these files, as they are."
    ),
    click.option("--draft", type=PATH, help="Draft model of every draft-model drafter."),
    click.option("--prompts", type=PATH, help="Prompt file (JSON lines)."),
    click.option(
        "--max-prompts", type=click.IntRange(min=1), help="Use only the first so many prompts."
    ),
    settings,
)
_SERVERS = {
    "llama_server": "SPECBISECT_LLAMA_SERVER",
    "vanilla_url": "SPECBISECT_VANILLA_URL",
    "speculative_url": "SPECBISECT_SPECULATIVE_URL",
}
"""Options about llama-servers, and the variables through which engines, in whatever process, learn of them."""

_SERVER = (
    click.option(
        "--llama-server", type=PATH, help="The llama-server binary.  [default: the one on PATH]"
    ),
    click.option("--vanilla-url", metavar="URL", help="A running server for the vanilla arm."),
    click.option(
        "--speculative-url", metavar="URL", help="A running server for the speculative arm."
    ),
)

_REPLACED = ("base", "quants", "targets", "draft", "prompts", "max_prompts")


def matrix(command: Callable[..., Any]) -> Any:
    """Options that replace parts of a matrix; the command gets them as `overrides`."""

    @functools.wraps(command)
    def with_overrides(*, settings: tuple[str, ...], **given: Any) -> Any:
        from specbisect.matrix import Overrides

        replaced = {name: given.pop(name) for name in _REPLACED}
        return command(overrides=Overrides(axes=axes(settings), **replaced), **given)

    return _with(_MATRIX, with_overrides)


def server(command: Callable[..., Any]) -> Any:
    """Options for the engine `server`."""

    @functools.wraps(command)
    def with_servers(**given: Any) -> Any:
        asked = {variable: given.pop(option) for option, variable in _SERVERS.items()}
        with _environment({variable: str(value) for variable, value in asked.items() if value}):
            return command(**given)

    return _with(_SERVER, with_servers)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables set for one command, and put back after it: another command in this process does not inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _with(options: Iterable[Callable[[Any], Any]], command: Callable[..., Any]) -> Any:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def axes(settings: Iterable[str]) -> dict[str, str]:
    """Values of axes, as text, from ``name=value`` words. Raises `BadInput` for a word that is none."""
    pairs = [setting.partition("=") for setting in settings]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise BadInput(f"--set {name}{sign}: write AXIS=VALUE, such as --set n_ubatch=8")
    return {name: value for name, _, value in pairs}
