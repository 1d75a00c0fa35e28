"""Read the objects of a JSON list one by one, so that a list may be longer than memory."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from vembed.data import lines
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE = re.compile(r"\s*")
_NEAR_END = 12
"""Characters before the end in which a token may have been cut: `-Infinity`, an escape of a surrogate pair."""


class JsonList:
    """A list whose text comes in pieces; only one object and one piece of it are in memory.

    Args:
        pieces: The text from its start.
        name: The file, for messages.
    """

    def __init__(self, pieces: Iterator[str], decoder: json.JSONDecoder, name: str) -> None:
        self._pieces = pieces
        self._decoder = decoder
        self._name = name
        self._text, self._at = "", 0
        self._line, self._counted = 1, 0  # the line of the character at `_counted`

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (line that it begins on, value).

        Raises:
            DataError: What follows is no list of JSON.
        """
        if self._next() != "[":
            raise self._broken("expected a list", self._at)
        self._at += 1
        while self._next() != "]":
            line = self._line_of(self._at)
            yield line, self._value()
            following = self._next()
            if following == ",":
                self._at += 1
                if self._next() == "]":
                    raise self._broken("a comma before the end of the list", self._at)
            elif following != "]":
                raise self._broken("expected ',' or ']' after an object", self._at)
        self._at += 1
        if self._next():
            raise self._broken("text after the end of the list", self._at)

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                was_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _NEAR_END
                if was_cut and self._more():
                    continue
                raise self._broken(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self._broken(str(error), self._at) from error
            if end == len(self._text) and isinstance(value, (int, float)) and self._more():
                continue  # a number may continue
            self._at = end
            return value

    def _next(self) -> str:
        """Go to the next character that is no white space, and return it; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = self._at if match is None else match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Let go of what was read and add as much text as is left, at least one piece; return whether there was any."""
        rest = self._text[self._at :]
        if len(rest) > lines.MAX_LINE_BYTES:
            raise lines.too_long(f"{self._name}:{self._line_of(self._at)}", "JSON object")
        added: list[str] = []
        num_wanted = max(1, len(rest))  # as much as there is: a long object is not read anew for every piece
        while num_wanted > 0 and (piece := next(self._pieces, "")):
            added.append(piece)
            num_wanted -= len(piece)
        if added:
            self._line_of(self._at)
            self._text, self._at, self._counted = "".join((rest, *added)), 0, 0
        return bool(added)

    def _line_of(self, position: int) -> int:
        """Return the line of a position that is not before the last one asked for."""
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def _broken(self, reason: str, position: int) -> DataError:
        return DataError(f"{self._name}:{self._line_of(position)}: bad JSON: {reason}")
