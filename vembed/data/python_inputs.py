"""Turn what a caller of the Python functions hands over into items: texts, and pictures in any form they come in.

A `str` is always a text; a file is named with `pathlib.Path`. Every picture's header is checked before anything is
encoded, under the limits that training data have.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import PIL.Image
import PIL.ImageOps

from vembed.batch import MODALITY_WORDS, Composed, Image, modality_of, modality_words
from vembed.data.images import ImageError, check_image
from vembed.errors import DataError
from vembed.files import home_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.batch import ImageLimits, Item, Modality

ItemInput: TypeAlias = "str | Path | bytes | PIL.Image.Image | Image | Composed"
"""A text; or a picture as a file, its encoded bytes, a picture of Pillow, or an `Image`; or pictures with a text."""

PICTURE_FORMS = "a pathlib.Path, bytes, or a PIL.Image.Image"
_SAVED_AS = {
    **{mode: mode for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")},
    "PA": "RGBA",
    "RGBX": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
}
"""Mode of a picture of Pillow -> the mode that a PNG keeps it in; of any other mode the range is not known."""


def items_of(rows: Iterable[ItemInput], limits: ImageLimits) -> list[Item]:
    """Return rows as items; pictures are checked by their headers.

    Raises:
        TypeError: The rows are a single text, picture or file, a table of several columns, or a row is none of them.
        ImageError: A picture is missing, broken or over the limits; the message names its file or row.
    """
    if isinstance(rows, (str, bytes, Path, PIL.Image.Image, Image, Composed)):
        what = "text" if isinstance(rows, str) else "picture"
        raise TypeError(f"rows is one {what}; give a list of {what}s, as in encode([{what}], side)")
    if is_table(rows):
        rows = _only_column(rows)
    return [_item(row, f"row {number}", limits) for number, row in enumerate(rows)]


def is_table(rows: object) -> bool:
    """Return whether rows have columns, as those of pandas, polars, Arrow and datasets: iterating may yield names."""
    return hasattr(rows, "column_names") or hasattr(rows, "columns")


def _only_column(table: Any) -> Iterable[ItemInput]:
    names = list(table.column_names if hasattr(table, "column_names") else table.columns)
    if len(names) != 1:
        column = "text" if "text" in names else names[0] if names else "text"
        raise TypeError(
            f"rows is a {type(table).__name__} with the columns {', '.join(map(str, names)) or 'none'}; give one of "
            f"them, as in encode(table[{column!r}], side)"
        )
    column = table[names[0]]
    texts: Iterable[ItemInput] = column.to_pylist() if hasattr(column, "to_pylist") else column
    return texts


def refuse_other_modalities(items: Iterable[Item], taken: frozenset[Modality], name: str) -> None:
    """Refuse items that a model has no tower for.

    Raises:
        DataError: With the first such row.
    """
    for number, item in enumerate(items):
        modality = modality_of(item)
        if modality not in taken:
            hint = f"; a str is a text: give a picture as {PICTURE_FORMS}" if modality == "text" else ""
            what = MODALITY_WORDS[modality][0]
            raise DataError(f"{name} takes {modality_words(taken)}, and row {number} is a {what}{hint}")


def _item(row: object, name: str, limits: ImageLimits) -> Item:
    if isinstance(row, str):
        return row
    if isinstance(row, Composed):
        for image in row.images:
            check_image(image, limits)
        return row
    if isinstance(row, Image):
        image = row
    elif isinstance(row, Path):
        image = Image(str(home_path(row)))
    elif isinstance(row, bytes):
        image = Image(name, row)
    elif isinstance(row, PIL.Image.Image):
        image = Image(name, as_png(row, name, limits))
    else:
        raise TypeError(f"{name} is a {type(row).__name__}; every row is a text (str) or a picture ({PICTURE_FORMS})")
    check_image(image, limits)
    return image


def as_png(picture: PIL.Image.Image, name: str, limits: ImageLimits) -> bytes:
    """Encode a picture of Pillow without loss, turned as its EXIF says, so that it is decoded as a file would be."""
    if picture.mode not in _SAVED_AS:
        raise ImageError(name, f"pixels of mode {picture.mode!r} have no stated range; convert the picture to RGB")
    if not 0 < picture.width * picture.height <= limits.max_pixels:
        size = f"{picture.width:,} x {picture.height:,} pixels"
        raise ImageError(name, f"{size}, and a picture has from 1 to {limits.max_pixels:,}")
    buffer = BytesIO()
    try:
        upright = PIL.ImageOps.exif_transpose(picture)
        upright = upright if upright.mode == _SAVED_AS[picture.mode] else upright.convert(_SAVED_AS[picture.mode])
        upright.save(buffer, "PNG", compress_level=1)
    except (OSError, SyntaxError, ValueError) as error:  # a file behind it that is cut off or broken
        raise ImageError(name, f"the picture can't be read: {error}") from error
    return buffer.getvalue()
