"""Reports leave this machine: what would tell whose machine it was, or open a door, is taken out of them.

Scrubbing works on a finding before anything is made of it, so that no template can forget it. Token ids are numbers
and stay: who does not want to show a prompt redacts it.
"""

import getpass
import os
import re
import socket
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from specbisect.llama.library import ENVIRONMENT

HOME, USER, HOST, SECRET = "~", "USER", "HOST", "[secret]"

GENERIC = frozenset({"root", "user", "admin", "ubuntu", "debian", "runner", "nobody", "localhost"})
"""Names that tell nothing; they are words of their own too often to be replaced."""
SHORTEST = 3
"""A name or secret with fewer characters than this would be found everywhere."""

_END = r"[^/\\\s'\"`:;,)<>]+"
_HOMES = re.compile(
    rf"(?:/[\w.-]+)*/(?:home|Users)/{_END}|/root(?![\w.-])|[A-Za-z]:\\+Users\\+{_END}"
)
_TOKENS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|xox[abpr]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,})"
)
_GIVEN = re.compile(
    r"(?i)((?:\bbearer\s+|(?:api[-_]?key|access[-_]?token|auth[-_]?token|password|passwd|secret)"
    r"(?:[\"']?\s*[:=]\s*|\s+)[\"']?))([^\s\"'&,;]{6,})"
)
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@:]+:[^/\s@]+(?=@)")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE", re.IGNORECASE)
_PLAIN = 8
"""A value of the environment with fewer characters than this is no secret worth the name."""


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Replaces what should not leave this machine. `names` and `values` map exact texts to what stands in for them."""

    names: Mapping[str, str]
    values: Mapping[str, str]

    @classmethod
    def of_this_machine(cls) -> Self:
        """Knows this user, this host and the values of this process's environment."""
        host, home = socket.gethostname(), Path.home()
        names = {host: HOST, host.split(".")[0]: HOST, _user(): USER, home.name: USER}
        kept = {n: r for n, r in names.items() if len(n) >= SHORTEST and n.lower() not in GENERIC}
        values = {
            value: SECRET
            for name, value in os.environ.items()
            if _SECRET_NAME.search(name) and len(value) >= _PLAIN
        }
        return cls(kept, values | ({str(home): HOME} if home.name else {}))

    def text(self, text: str) -> str:
        """`text` without home directories, user and host names, keys, and values of secret variables."""
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, self.values[value])
        text = _CREDENTIALS.sub(SECRET, text)
        text = _TOKENS.sub(SECRET, text)
        text = _GIVEN.sub(rf"\1{SECRET}", text)
        text = _HOMES.sub(HOME, text)
        for name, stand_in in self.names.items():
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", stand_in, text)
        return text

    def walk(self, value: Any, skip: Container[str] = ()) -> Any:
        """`value`, made of dicts, lists and plain values, with every text scrubbed, except below keys in `skip`.

        ``variables`` keeps only the environment variables that can change results.
        """
        match value:
            case str():
                return self.text(value)
            case dict():
                return {
                    key: self._variables(inner)
                    if key == "variables" and isinstance(inner, dict)
                    else inner
                    if key in skip
                    else self.walk(inner, skip)
                    for key, inner in value.items()
                }
            case list() | tuple():
                return [self.walk(inner, skip) for inner in value]
        return value

    def _variables(self, found: Mapping[str, str]) -> dict[str, str]:
        return {name: self.text(value) for name, value in found.items() if ENVIRONMENT.match(name)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as containers have
        return ""
