"""Columns that are recognised by how data sets tend to call them, where no column has a name of ours.

A guess never takes the place of a column that is named or mapped, and the plan tells each one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PICTURE_FILES = ("file_name", "filename", "filepath", "file_path", "path")
"""Names of the path of a picture, as in metadata.csv of an image folder."""

TITLED = frozenset({"text", "passage", "document"})
"""Names of a document that a title belongs to, as in BEIR: the title beside an answer may be that of the question."""

_NEGATIVE = re.compile(
    "((hard_)?neg(ative)?s?|(bad|wrong)(?=_))"
    "(_?(text|passage|document|doc|answer|sentence|context|response)s?)?"
    r"(_?\d+|_[a-z])?"
)
"""Names of hard negatives; a column with another word after the prefix may hold a score, a vote or a reason."""


def guess(
    targets: Mapping[str, str | None], columns: Collection[str], free: Collection[str], where: str
) -> dict[str, str]:
    """Return column -> our name for it, of the columns that nobody named.

    Args:
        targets: Every column of a row -> what it is by its name or by the user's mapping, None where it is dropped.
        columns: Our columns that the row has by name.
        free: The columns that have no name of ours and aren't mapped.
        where: `file:line`, for the error.

    Raises:
        DataError: Two columns may be the picture.
    """
    found = {}
    if not {"negatives", "negative_images"} & {*columns}:
        found = {name: "negatives" for name in free if looks_like_negative(name)}
    asked = {target for target in targets.values() if target is not None}
    has_picture = bool({"positive_image", "query_image"} & {*columns})
    is_titled = "title" in free and "title" not in asked - {"title"}
    # A caption, or what will be one beside a picture, with nothing yet that it could search.
    lacks_picture = ("query" in columns and "positive" not in columns) or (
        "query" not in columns and ("text" in asked if "positive" in columns else is_titled)
    )
    files = [name for name in free if name in PICTURE_FILES]
    if files and lacks_picture and not has_picture:
        if len(files) > 1:
            raise DataError(
                f"{where}: columns {files[0]!r} and {files[1]!r} may both name the picture: say which with "
                f"column_mapping: {{{files[0]}: positive_image}}"
            )
        found[files[0]] = "image"
        has_picture = True
    if is_titled and has_picture and not {"query", "query_image"} & {*columns} and "text" not in asked:
        found["title"] = "query"
    elif is_titled and not has_picture and asked & TITLED:
        found["title"] = "title"
    return found


def looks_like_negative(name: str) -> bool:
    """Return whether a column seems to hold a text that is no answer, by its name."""
    return _NEGATIVE.fullmatch(name) is not None
