"""Jinja2, set up once: HTML escapes by itself, Markdown escapes by itself, scripts are given literals only."""

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specbisect.report import text

_LOADER = PackageLoader("specbisect.report")


def _environment(**options: Any) -> Environment:
    return Environment(
        loader=_LOADER,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )


@functools.cache
def html() -> Environment:
    """For pages: everything shown is escaped, and what has no glyph is written out."""
    return _environment(autoescape=True, finalize=_seen)


@functools.cache
def markdown() -> Environment:
    """For issues: everything shown is escaped, unless it is `text.Markdown` already."""
    made = _environment(autoescape=False, finalize=text.escape)
    made.filters |= {"code": text.code, "fenced": text.fenced, "plain": _plain}
    made.globals["table"] = text.table
    return made


@functools.cache
def script() -> Environment:
    """For programs: nothing is escaped, so everything shown must be a literal or plain by itself."""
    return _environment(autoescape=False)


def _plain(value: str) -> text.Markdown:
    """For a comment or a code block of the template's own: nothing that could end either."""
    return text.Markdown(text.visible(value).replace("-->", "--&gt;").replace("`", "'"))


def _seen(value: Any) -> Any:
    return text.visible(value, keep="\n\t") if type(value) is str else value
