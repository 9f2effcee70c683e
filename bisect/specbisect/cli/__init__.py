"""The command line: the only place that prints, and the only one that turns errors into exit codes.

Each command is a module here with a click command called `command`. A command that finds something out returns a
`Finding`, whose exit code becomes that of the process; any other command returns None.
"""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, Protocol

import click

from specbisect import __version__
from specbisect.errors import BadInput, SpecbisectError, did_you_mean

COMMANDS = {
    name: f"specbisect.cli.{name}"
    for name in (
        "demo",
        "plan",
        "run",
        "show",
        "check",
        "diagnose",
        "narrow",
        "widths",
        "capsule",
        "lock",
        "gate",
        "cost",
        "report",
        "quantize",
        "env",
    )
}
"""Modules by command, in the order of the help page; one is imported when its command is asked for."""

INTERNAL, INTERRUPTED, BROKEN_PIPE = 3, 130, 141


class Finding(Protocol):
    """What a command found out."""

    @property
    def exit_code(self) -> int:
        """0 no difference, 1 difference, 3 inconclusive."""


class Commands(click.Group):
    """Imports a command only when it is needed, so that none waits for what another one imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which people meet them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The command of that name. Raises `BadInput` when there is none."""
        if cmd_name not in COMMANDS:
            raise BadInput(f"there is no command {cmd_name!r}{did_you_mean(cmd_name, COMMANDS)}")
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command


@click.command(
    cls=Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="specbisect")
@click.option("--debug", is_flag=True, help="Print the traceback of an internal error.")
def cli(debug: bool) -> None:
    """Does speculative greedy decoding in llama.cpp give the tokens of vanilla greedy decoding?

    \b
    Exit codes: 0 no difference, 1 a difference, 2 bad input,
    3 engine failure or inconclusive, 130 interrupted.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; the one place where an error becomes a line and an exit code."""
    _open_streams()
    signal.signal(signal.SIGTERM, _interrupt)  # so that child processes are ended, and not lost
    sys.exit(_exit_code(list(sys.argv[1:] if arguments is None else arguments)))


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _open_streams() -> None:
    """Throw away what goes to a stream that the shell has closed, and let no file or child get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115


def _exit_code(arguments: list[str]) -> int:
    try:
        with cli.make_context("specbisect", list(arguments)) as context:
            found: Finding | None = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.ClickException as error:
        usage = isinstance(error, click.UsageError) and error.ctx
        return _fail(
            f"{error.format_message()}{_see_help(error) if usage else ''}", error.exit_code
        )
    except SpecbisectError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort) as interrupt:
        click.echo(f"interrupted{'; ' if interrupt.args else ''}{interrupt}", err=True)
        return INTERRUPTED
    except (
        BrokenPipeError
    ):  # whoever read our output has seen enough; spare Python the flush at its end
        _discard_output()
        return BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and (stream := _unwritable(error)):
            _discard_output()
            return _fail(
                f"{stream}: {error.strerror}; free space, or send it elsewhere", BadInput.exit_code
            )
        return _defect(error, debug="--debug" in arguments)
    return found.exit_code if found else 0


def _unwritable(error: OSError) -> str:
    """The stream that an `OSError` is about, empty when it is about none: it does not say so itself."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is click.echo.__code__:
            return "standard error" if frame.f_locals["err"] else "standard output"
    return ""


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # standard error takes nothing; the exit code still tells
        click.echo(f"error: {' '.join(message.split())}", err=True)
    return code


def _see_help(error: Any) -> str:
    return f" See {error.ctx.command_path} --help."


def _defect(error: Exception, debug: bool) -> int:
    """An exception that nobody raised on purpose."""
    lines = traceback.format_exception(error)
    if debug:
        click.echo("".join(lines), err=True)
        return _fail(
            f"internal error: {_brief(error)}; please report the traceback above", INTERNAL
        )
    with tempfile.NamedTemporaryFile(
        "w", prefix="specbisect-", suffix=".txt", delete=False
    ) as file:
        file.writelines(lines)
    return _fail(
        f"internal error: {_brief(error)}; please report the traceback in {file.name}", INTERNAL
    )


def _brief(error: Exception) -> str:
    last = str(error).strip().splitlines()[-1:]  # of a traceback from a child, what was raised
    return f"{type(error).__name__}{': ' if last else ''}{''.join(last)}"
