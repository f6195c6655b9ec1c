"""Numbers as people read them, in reports and in terminals."""

from __future__ import annotations

import math

Number = int | float
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def short_number(value: Number) -> str:
    """A number for people: 3 digits or so, thousands separated, powers of ten past 100,000."""
    if not math.isfinite(value):
        return "∞" if value > 0 else ("−∞" if value < 0 else "n/a")
    size = abs(value)
    if size >= 1e5:
        exponent = math.floor(math.log10(size))
        return f"{value / 10**exponent:.1f}·10{str(exponent).translate(SUPERSCRIPTS)}"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def count(value: Number) -> str:
    """A count with a unit prefix: 950, 6.1K, 24M, 16.8B, 1.2T."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 100 or scaled == int(scaled) else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def size_text(size: Number) -> str:
    """10.2 GB, in decimal units."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def percent(fraction: Number) -> str:
    """An accuracy as a percentage; a decimal only below 10 and above 0."""
    if not math.isfinite(fraction):
        return "n/a"
    value = 100 * fraction
    return f"{value:.1f}%" if 0.05 <= value < 9.95 or 99.5 <= value < 99.95 else f"{value:.0f}%"


def times(factor: Number) -> str:
    """A length factor: 1×, 1.5×, 8×."""
    return f"{factor:g}×"


def duration(seconds: Number) -> str:
    """Wall-clock time: 48 s, 7 min 12 s, 3 h 5 min, 2 d 4 h."""
    whole = round(seconds)
    for size, unit, smaller, small_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"


def listing(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def shortened(text: str, limit: int = 48) -> str:
    """A text of at most `limit` characters: a longer one keeps its beginning and its end."""
    tail = limit // 3
    return text if len(text) <= limit else f"{text[: limit - tail - 1]}…{text[-tail:]}"
