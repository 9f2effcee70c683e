"""Text of unknown origin, made safe to show: in Markdown, in a terminal, in a comment of a script.

Prompts and answers may hold anything: control characters, marks that reverse the reading direction, halves of
surrogate pairs, Markdown, HTML. Whatever a reader could not see is written out, whatever would act is escaped.
"""

import re
from collections.abc import Iterable, Sequence

_RUNS = re.compile("`+")
_ACTIVE = re.compile(r"[\\`*\[\]{}<>|~$&]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_LAYER = re.compile(r"(.*?\bblk\.)(\d+)(\..*)")
_CALLS = re.compile(r"@(?=\w)|#(?=\d)")  # GitHub would notify a user, or link to an issue
_ENTITIES = re.compile(r"[^0-9A-Za-z \u0080-\U0010ffff]")


def visible(text: str, keep: str = "") -> str:
    """`text` with every character that has no glyph, and every uncommon space, as an escape, except those in `keep`."""
    return "".join(_shown(c) if c not in keep else c for c in text)


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    code = ord(char)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def piece(latin: str) -> str:
    """The bytes of a token (one latin-1 character each) as text; bytes that are no UTF-8 are written out."""
    return latin.encode("latin-1").decode("utf-8", "backslashreplace")


def quoted(text: str) -> str:
    """`text` between quotes, with backslashes, quotes and everything invisible escaped."""
    return '"' + visible(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def shortened(text: str, limit: int) -> tuple[str, int]:
    """`text` with its middle left out when it is longer than `limit` characters, and how many were left out."""
    left_out = max(0, len(text) - limit)
    if not left_out:
        return text, 0
    head = limit // 2
    return (
        f"{text[:head]}\n[… {left_out} characters …]\n{text[len(text) - (limit - head) :]}",
        left_out,
    )


class Markdown(str):
    """Text that is Markdown already; everything else a template shows is escaped."""

    __slots__ = ()


def escape(value: object) -> Markdown:
    """Any value as Markdown that shows just its text, on one line; `Markdown` as it is."""
    if isinstance(value, Markdown):
        return value
    text = _ACTIVE.sub(_escaped, visible("" if value is None else str(value)))
    return Markdown(_CALLS.sub(lambda m: f"<span>{m[0]}</span>", text))


def _escaped(found: re.Match[str]) -> str:
    return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(found[0], f"\\{found[0]}")


def code(value: object) -> Markdown:
    """`value` as inline code, on one line, also inside a table."""
    text = visible(str(value))
    if not text:
        return Markdown("")
    if "`" in text or "|" in text or text != text.strip():
        return Markdown(f"<code>{_ENTITIES.sub(lambda m: f'&#{ord(m[0])};', text)}</code>")
    return Markdown(f"`{text}`")


def fenced(text: str, language: str = "text") -> Markdown:
    """`text` as a code block that nothing inside can end."""
    shown = visible(text.replace("\r\n", "\n"), keep="\n\t")
    longest = max(map(len, _RUNS.findall(shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown(f"{fence}{language}\n{shown}\n{fence}")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: str = "") -> Markdown:
    """A Markdown table; `numbers` names the columns whose values are aligned to the right, by their letters a, b…"""
    marks = ["--:" if chr(ord("a") + i) in numbers else "---" for i in range(len(head))]
    cells = [[escape(value) for value in row] for row in rows]
    lines: list[Sequence[str]] = [[escape(name) for name in head], marks, *cells]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def number(value: object) -> str:
    """A number with four digits; anything else as it is."""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def ranges(names: Iterable[str]) -> str:
    """Names of tensors, those of several layers as one: ``blk.{0-3,7}.ffn_up.weight``."""
    layers: dict[str, list[int]] = {}
    for name in names:
        found = _LAYER.fullmatch(name)
        before, number, after = found.groups() if found else (name, None, "")
        layers.setdefault(f"{before}\0{after}", []).extend([int(number)] if number else [])
    return ", ".join(
        name.replace("\0", f"{{{_runs(sorted(n))}}}" if len(n) > 1 else "".join(map(str, n)))
        for name, n in layers.items()
    )


def _runs(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def comment(text: str) -> str:
    """`text` for a comment or docstring of a script: one line, plain, unable to end either."""
    return visible(text).replace("\\", "/").replace('"""', "'''").strip()
