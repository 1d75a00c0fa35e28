"""Read a JSON file that is one list of objects, one object and one piece of the file in memory at a time."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from vembed.data import lines  # the module, not its limit: tests lower `lines.MAX_LINE_BYTES`
from vembed.data.json_lines import jsonl_rows, unique_keys
from vembed.data.lines import first_visible_byte, numbered_lines, pieces, too_long
from vembed.data.raw_rows import row_of
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vembed.data.raw_rows import RawRow


def json_rows(path: Path) -> Iterator[RawRow]:
    """Yield the objects of a JSON list, each with the line that it begins on; read a file that is no list as JSONL.

    One object and one piece of the file are in memory at a time, so that a list may be longer than memory.
    """
    if first_visible_byte(path) != b"[":
        yield from jsonl_rows(numbered_lines(path))
        return
    text = _JsonText(path)
    text.skip(1)
    while text.peek() != "]":
        line = text.line
        yield line, row_of(text.value())
        following = text.peek()
        if following == ",":
            text.skip(1)
            if text.peek() == "]":
                raise text.broken("a comma before the end of the list")
        elif following != "]":
            raise text.broken("expected ',' or ']' after an object")
    text.skip(1)
    if text.peek():
        raise text.broken("text after the end of the list")


class _JsonText:
    """The text of a JSON file from one position on, of which as many pieces are held as the next value needs."""

    NEAR_END = 12
    """Characters before the end in which a token may have been cut: `-Infinity`, an escape of a surrogate pair."""

    _SPACE = re.compile(r"\s*")

    def __init__(self, path: Path) -> None:
        self._name, self._pieces = path.name, pieces(path)
        self._decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
        self._text, self._at = "", 0
        self._line, self._counted = 1, 0  # the line of the character at `_counted`, which only moves on
        self.peek()

    @property
    def line(self) -> int:
        """Line of the position, counted from 1."""
        return self._line_at(self._at)

    def peek(self) -> str:
        """Skip white space, and return the character behind it without going on; "" at the end."""
        while True:
            match = self._SPACE.match(self._text, self._at)
            self._at = self._at if match is None else match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def skip(self, count: int) -> None:
        """Go on by some characters of those that are held."""
        self._at += count

    def value(self) -> Any:
        """Read one value, and go behind it.

        Raises:
            DataError: There is none, or it is too long.
        """
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # An error near the end of what is held may only say that the value goes on in the next piece.
                was_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - self.NEAR_END
                if was_cut and self._read_more():
                    continue
                raise self.broken(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise self.broken(reason) from error
            if end == len(self._text) and isinstance(value, (int, float)) and self._read_more():
                continue  # a number may go on as well
            self._at = end
            return value

    def broken(self, reason: str, position: int | None = None) -> DataError:
        """Return the error for what stands at a position."""
        line = self._line_at(self._at if position is None else position)
        return DataError(f"{self._name}:{line}: bad JSON: {reason}")

    def _read_more(self) -> bool:
        """Let go of what was read and add as much text as is left, at least one piece; return whether there was any."""
        rest = self._text[self._at :]
        if len(rest) > lines.MAX_LINE_BYTES:
            raise too_long(f"{self._name}:{self.line}", "JSON object")
        added: list[str] = []
        num_wanted = max(1, len(rest))  # doubles: a long object is not decoded anew for every piece
        while num_wanted > 0 and (piece := next(self._pieces, "")):
            added.append(piece)
            num_wanted -= len(piece)
        if added:
            self._line_at(self._at)  # counts the lines of the text that is let go
            self._text, self._at, self._counted = "".join((rest, *added)), 0, 0
        return bool(added)

    def _line_at(self, position: int) -> int:
        """Return the line of a position that is not before the last one asked for."""
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line
