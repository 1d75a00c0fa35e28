"""Numbers as people read them, one function for each kind of number."""

from __future__ import annotations


def show_bytes(count: float) -> str:
    """Return a number of bytes for people, e.g. "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def show_count(count: float) -> str:
    """Return a number of parameters for people, e.g. "8.14B", "20.9k"."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"
