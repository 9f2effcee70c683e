"""Where one number stands among others, the same wherever it is told."""

from collections.abc import Sequence


def percentile_of(value: float, values: Sequence[float]) -> float:
    """Share of `values` that are at most `value`, in percent."""
    return 100.0 * sum(v <= value for v in values) / len(values)


def ordinal(percentile: float) -> str:
    """A percentile in words: 1st, 2nd, 3rd, 11th, …"""
    n = round(percentile)
    teen = 10 < n % 100 < 20
    return f"{n}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"
