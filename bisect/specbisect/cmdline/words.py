"""A pasted shell line, taken apart: variables, program, arguments.

Understands continued lines (``\\``, cmd's ``^``, PowerShell's backtick), prompt signs and what stands in front of a
program (``sudo``, ``env``, ``docker run``), and stops where the shell goes on to something else (``|``, ``;``, ``>``).
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specbisect.errors import BadInput

PROGRAM = re.compile(r"^(?:llama(?:-[a-z0-9]+)*|server|main|speculative)(?:\.exe)?$", re.IGNORECASE)
_IMAGE = re.compile(
    r"llama\.?cpp[^\s:]*:[\w.-]*"
)  # a container image whose entry point is the program
_PROMPT_SIGN = re.compile(r"^\s*(?:[\w.@~:/-]*[$#%]|PS [^>\n]*>|[A-Za-z]:\\[^>\n]*>|>)\s+(?=\S)")
_CONTINUED = re.compile(r"[\\^`][ \t]*\r?\n[ \t]*>?[ \t]*")
_WINDOWS = re.compile(r"(?:^|[\s\"'])[A-Za-z]:\\|\.exe\b|\.\\")
_ASSIGNMENT = re.compile(r"^(?:\$env:)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
_STOP = frozenset(";&|<>()")

Shell = Literal["posix", "windows"]


@dataclass(frozen=True, slots=True)
class Words:
    """A command: the variables set for it, the program's own name, and its arguments."""

    variables: tuple[tuple[str, str], ...]
    program: str
    arguments: tuple[str, ...]


def split(text: str) -> Words:
    """The llama.cpp command in `text`; where no program is named, the arguments of a llama-server.

    Raises `BadInput` when quotes do not close, or when there is no such command.
    """
    joined = _CONTINUED.sub(" ", text.strip())
    joined = _PROMPT_SIGN.sub("", joined)
    words = _lex(joined, windows=bool(_WINDOWS.search(joined)))
    start = next((i for i, word in enumerate(words) if _is_program(word)), None)
    if start is None and words and words[0].startswith("-"):
        return Words((), "llama-server", _until_stop(words))
    if start is None:
        raise BadInput(
            f"no llama.cpp program in {_shown(joined)}; paste a line such as llama-server -m X.gguf"
        )
    variables = [_ASSIGNMENT.match(word) for word in words[:start]]
    name = _program_name(words[start])
    arguments = words[start + 1 :]
    if name == "llama" and arguments and not arguments[0].startswith("-"):
        name, arguments = f"llama-{arguments[0].removeprefix('serve') or 'server'}", arguments[1:]
    return Words(tuple((v[1], v[2]) for v in variables if v), name, _until_stop(arguments))


def _lex(text: str, windows: bool) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="".join(_STOP))
    lexer.whitespace_split = True
    lexer.commenters = ""
    if windows:  # a backslash separates directories there
        lexer.escape = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise BadInput(
            f"the quotes in {_shown(text)} do not match ({error}); paste it whole"
        ) from None


def _is_program(word: str) -> bool:
    return bool(PROGRAM.match(_base(word)) or _IMAGE.search(word))


def _program_name(word: str) -> str:
    name = _base(word).lower().removesuffix(".exe")
    if not PROGRAM.match(name):
        name = "llama-server" if "server" in word else "llama-cli"
    return {"server": "llama-server", "main": "llama-cli", "speculative": "llama-speculative"}.get(
        name, name
    )


def _base(word: str) -> str:
    return re.split(r"[/\\]", word)[-1]


def _until_stop(words: Sequence[str]) -> tuple[str, ...]:
    """The words up to the first shell operator; a number before a redirection belongs to it."""
    for i, word in enumerate(words):
        if word and set(word) <= _STOP:
            redirected = i > 0 and word[0] in "<>" and words[i - 1] in ("1", "2")
            return tuple(words[: i - 1 if redirected else i])
    return tuple(words)


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:59] + "…")


def unescape(text: str) -> str:
    """`text` with ``\\n``, ``\\t``, ``\\xHH``… replaced as llama.cpp does with prompts (``string_process_escapes``)."""
    plain = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}

    def replaced(found: re.Match[str]) -> str:
        sign, code = found[1], found[2]
        return chr(int(code, 16)) if code else plain.get(sign, found[0])

    return re.sub(r"\\(x([0-9A-Fa-f]{2})|.)", replaced, text, flags=re.DOTALL)
