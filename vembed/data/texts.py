"""Why a value is no usable text or id, in words that follow the name of its column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.batch import Composed, Image
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Container


def text_fault(value: object) -> str | None:
    """Return why a value is no usable text, or None when it is one."""
    if type(value) is not str:
        return f"expected text, got {describe(value)}"
    if not value or value.isspace():
        return "blank text" if value else "empty text"
    if value.isascii():
        return "holds a NUL byte" if "\0" in value else None
    return encoding_fault(value)


def encoding_fault(text: str) -> str | None:
    """Return why a text can't be stored as UTF-8 or holds a NUL, or None; it may be empty."""
    if "\0" in text:
        return "holds a NUL byte"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Half a surrogate pair: a JSON escape cut in two, or bytes of a CSV cell that are not UTF-8.
        return f"not valid UTF-8 text (character {error.start + 1})"
    return None


def id_fault(value: object, known: Container[str]) -> str | None:
    """Return why a value is no new id, or None when it is one: a text or a whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        return "missing, or neither a text nor a whole number"
    return encoding_fault(str(value)) or (f"{quoted(str(value))} stands twice" if str(value) in known else None)


def part_fault(value: object, *, needed: bool) -> str | None:
    """Return why a value can't be a document's title or text, or None; it may be empty, and missing unless needed."""
    if value is None:
        return "missing" if needed else None
    return encoding_fault(value) if isinstance(value, str) else f"expected text, got {type(value).__name__}"


def title_and_text(title: str | None, text: str | None) -> str:
    """Return a document as one text: its title, one space, its text."""
    return f"{title or ''} {text or ''}".strip()


def describe(value: object) -> str:
    """Return a value's type and beginning in a JSON writer's words."""
    if value is None:
        return "null"
    if isinstance(value, (Image, Composed)):
        return "a picture"
    if isinstance(value, bool):
        return str(value).lower()
    names = {
        int: "the number",
        float: "the number",
        list: "a list",
        dict: "an object",
        bytes: "bytes",
        memoryview: "a picture",
    }
    name = names.get(type(value), type(value).__name__)
    return f"{name} {value!r:.40}" if isinstance(value, (int, float)) else name
