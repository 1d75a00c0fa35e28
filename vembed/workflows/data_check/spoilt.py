"""Traces that an export or a wrong encoding leaves in texts: markup, entities, mojibake, lost characters, no value."""

from __future__ import annotations

import re
from typing import NamedTuple


class Trace(NamedTuple):
    """One kind of trace."""

    kind: str  # of the finding
    pattern: re.Pattern[str]
    phrase: str  # after "text" or "texts"
    advice: str


_TAGS = "p|br|div|span|a|b|i|u|em|strong|ul|ol|li|table|tr|td|th|h[1-6]|img|script|style|html|body"

TRACES = (
    Trace(
        "html_in_texts",
        re.compile(rf"</?(?:{_TAGS})(?:\s[^<>]*)?/?>", re.IGNORECASE),
        "with HTML tags",
        "A model learns the tags as words; take the text out of the HTML.",
    ),
    Trace(
        "entities_in_texts",
        re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#[0-9]{1,7}|#x[0-9a-f]{1,6});", re.IGNORECASE),
        "with HTML entities",
        "&amp; stands for &, &quot; for a quote: html.unescape of Python puts the characters back.",
    ),
    Trace(  # the bytes of accents, quotes, signs and emoji in UTF-8, read as Latin-1 or Windows-1252
        "mojibake",
        re.compile("[\u00c2\u00c3][\u0080-\u00bf\u0152-\u0192\u2013-\u2122]|\u00e2[\u0080\u20ac]|\u00f0[\u009f\u0178]"),
        "read in a wrong encoding",
        "UTF-8 was read as Latin-1 or Windows-1252 somewhere before; export the data anew as UTF-8.",
    ),
    Trace(
        "lost_characters",
        re.compile("\ufffd"),
        "with U+FFFD in place of a character",
        "The character was lost when the text was decoded; export the data anew in the right encoding.",
    ),
    Trace(
        "missing_values",
        re.compile(r"\s*(?:nan|none|null|n/a|undefined)\s*\Z", re.IGNORECASE),
        "in place of a missing value",
        '"NaN", "None" and "null" are what programs write where there is nothing; leave such rows out.',
    ),
)


def traces_of(text: str) -> int:
    """Return which of `TRACES` a text has, a bit for each."""
    return sum(1 << place for place, trace in enumerate(TRACES) if _has(trace, text))


def _has(trace: Trace, text: str) -> bool:
    find = trace.pattern.match if trace.kind == "missing_values" else trace.pattern.search
    return find(text) is not None
