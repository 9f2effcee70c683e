"""Whether the llama-servers that a command line names are there, and of any use to its cases."""

from typing import TYPE_CHECKING

import click

from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.matrix import Plan

_URLS = ("vanilla_url", "speculative_url")


def check(plan: "Plan") -> None:
    """Raise `BadInput` when `plan` needs a llama-server and there is none, or when a URL is given that it never asks.

    A URL in the environment alone may be meant for other commands.
    """
    from specbisect.engines import server

    if any("server" in block.axes["engine"] for block in plan.blocks):
        server.ready()
        return
    context = click.get_current_context(silent=True)
    for name in _URLS:
        if context is not None and context.params.get(name):
            raise BadInput(
                f"--{name.replace('_', '-')} is about the engine server, which no case uses; leave it out, or add "
                "--set engine=server"
            )
