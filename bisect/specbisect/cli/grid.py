"""Tables of texts."""

from collections.abc import Sequence

import tabulate

tabulate.MIN_PADDING = 0  # its two more columns for each header would push tables past 80


def grid(lines: Sequence[Sequence[str]], heads: Sequence[str], style: str = "simple") -> str:
    """A table of texts."""
    return tabulate.tabulate(lines, heads, tablefmt=style, disable_numparse=True)
