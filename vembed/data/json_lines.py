"""Decode JSON: rows of JSONL line by line, or a block of lines that are all alike at once; or a file of one object."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from vembed.data import lines  # the module, not its limit: tests lower `lines.MAX_LINE_BYTES`
from vembed.data.lines import pieces
from vembed.data.raw_rows import MAX_COLUMNS, Unreadable, repeated, row_of
from vembed.errors import DataError
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from vembed.data.lines import LineBlock
    from vembed.data.raw_rows import RawRow

MAX_OBJECT_CHARACTERS = 512 * 2**20
"""Longest file that is one JSON object: it is read as a whole."""


def jsonl_rows(numbered: Iterable[tuple[int, bytes]]) -> Iterator[RawRow]:
    """Yield one row per numbered line that is not blank."""
    decode = json.JSONDecoder(object_pairs_hook=unique_keys).decode
    for number, line in numbered:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield number, Unreadable(f"invalid UTF-8 at byte {error.start + 1} of the line")
            continue
        if not text.strip():
            continue
        try:
            yield number, row_of(decode(text))
        except json.JSONDecodeError as error:
            yield number, Unreadable(f"bad JSON: {error.msg} at character {error.pos + 1}")
        except ValueError as error:
            yield number, Unreadable(f"bad JSON: {error}")
        except RecursionError:
            yield number, Unreadable("bad JSON: nested too deeply")


def rows_alike(block: LineBlock) -> list[dict[str, Any]] | None:
    """Return a row of JSONL for each line of a block where all can be read and have the same columns in the same order.

    None leaves the block to `jsonl_rows`, which decodes it a second time, line by line, and words the errors: a file
    whose rows don't all have the same keys, or that has blank lines, pays for both.
    """
    if len(block.data) > lines.MAX_LINE_BYTES:
        return None
    rows: list[dict[str, Any]] = []
    # The C scanner itself, without the two regular expressions for white space that `decode` runs on every line.
    at, scan = 0, cast("Any", json.JSONDecoder(object_pairs_hook=unique_keys)).scan_once
    try:
        text = block.data.decode()
        text += "" if text.endswith("\n") else "\n"
        while at < len(text):
            row, at = scan(text, at)
            rows.append(row)
            # The line has to end right behind its object: a line with anything there, even a space, sends the block
            # to `jsonl_rows`.
            if text[at] != "\n":
                if text[at : at + 2] != "\r\n":
                    return None
                at += 1
            at += 1
    except (ValueError, RecursionError, StopIteration):
        return None
    num_lines = block.num_ends + (not block.data.endswith(b"\n"))
    if {*map(type, rows)} != {dict} or len(rows) != num_lines:  # a row may span lines
        return None
    return rows if len({*map(tuple, rows)}) == 1 and len(rows[0]) <= MAX_COLUMNS else None


def json_object(path: Path) -> dict[str, Any]:
    """Return the one JSON object that a file holds, read as a whole.

    Raises:
        DataError: It is no JSON, no object, too long, or can't be read on (bad UTF-8, broken gzip).
        MachineError: The system refuses to read it, or it is no regular file.
    """
    parts, left = [], MAX_OBJECT_CHARACTERS
    for piece in pieces(path):
        parts.append(piece)
        left -= len(piece)
        if left < 0:
            raise DataError(f"{path.name}: over {MAX_OBJECT_CHARACTERS:,} characters in one JSON object")
    try:
        value = json.JSONDecoder(object_pairs_hook=unique_keys).decode("".join(parts))
    except json.JSONDecodeError as error:
        raise DataError(f"{path.name}:{error.lineno}: bad JSON: {error.msg} at character {error.colno}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{path.name}: bad JSON: {reason}") from error
    if type(value) is not dict:
        raise DataError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary.

    Raises:
        ValueError: A key is given twice; Python's own decoder would keep the last value without a word.
    """
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError(f"the key {quoted(repeated(key for key, _ in pairs))} is given twice in one object")
    return row
