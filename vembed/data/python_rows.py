"""Take what Python callers hand over: rows to train on, and items to encode or to search with.

Rows become a file beside the run, so that all that follows reads, checks and resumes as ever. The file is JSON lines,
row n on line n, and is named after its content: the same rows give the same path, other rows another one. Pictures
stand in it as base64.

Items are texts and pictures in any form they come in. A `str` is always a text; a file is named with `pathlib.Path`.
Every picture's header is checked before anything is encoded, under the limits that training data have.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import PIL.Image
import PIL.ImageOps

from vembed.batch import MODALITY_WORDS, Composed, Image, modality_of, modality_words
from vembed.data.images import ImageError, check_image
from vembed.data.raw_rows import repeated
from vembed.errors import DataError, MachineError
from vembed.files import fsync_path, home_path
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.batch import ImageLimits, Item, Modality

RowsInput: TypeAlias = "Iterable[Mapping[str, Any]] | Any"
"""Dictionaries in any iterable, or a table: `datasets.Dataset`, `pandas.DataFrame`, `pyarrow.Table` and the like."""

ItemInput: TypeAlias = "str | Path | bytes | PIL.Image.Image | Image | Composed"
"""A text; or a picture as a file, its encoded bytes, a picture of Pillow, or an `Image`; or pictures with a text."""

ROWS_FOLDER = "rows"
_TABLE_ROWS = 1_000
"""Rows of a table that are Python objects at once."""

_PICTURES = (Path, bytes, PIL.Image.Image, Image)
PICTURE_FORMS = "a pathlib.Path, bytes, or a PIL.Image.Image"
_SAVED_AS = {
    **{mode: mode for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")},
    "PA": "RGBA",
    "RGBX": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
}
"""Mode of a picture of Pillow -> the mode that a PNG keeps it in; of any other mode the range is not known."""


def write_rows(rows: RowsInput, folder: Path, name: str, limits: ImageLimits) -> Path:
    """Write rows into a file of a folder, one at a time, and return its path.

    Args:
        name: The caller's name of them: messages say `NAME-....jsonl:3` of the third row.

    Raises:
        DataError: There are no rows, one holds what rows can't, or a table names a column twice.
        MachineError: The folder can't be written.
        TypeError: They are no rows at all.
    """
    all_rows = _rows_of(rows, name)
    # The name needs the hash of all rows, so they are written under another one first; the process id keeps two runs
    # that start at once out of each other's file.
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    digest, number = hashlib.sha256(), 0
    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = temporary.open("wb")
    try:
        with file:
            for number, row in enumerate(all_rows, start=1):
                line = json.dumps(_json_value(row, f"{name}: row {number}", limits), ensure_ascii=False) + "\n"
                data = line.encode(errors="surrogatepass")  # half of a pair is refused where the row is checked
                digest.update(data)
                with _disk(folder):
                    file.write(data)
        if not number:
            raise DataError(f"{name} holds no rows")
        path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        with _disk(folder):
            if not path.exists():
                fsync_path(temporary)
                temporary.replace(path)
                fsync_path(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Turn what a disk refuses into an error with the folder's name; what the rows raise is the caller's."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{folder} can't be written: {error}") from error


def _rows_of(rows: RowsInput, name: str) -> Iterable[Any]:
    """Return the rows of whatever holds them; of a table, `_TABLE_ROWS` at a time become Python objects."""
    # Libraries are recognised by the module of the type: none of them is imported for callers that don't use it.
    library = type(rows).__module__.partition(".")[0]
    if library == "pandas" and hasattr(rows, "to_dict"):
        frame: Any = rows
        _refuse_repeated(map(str, frame.columns), name)
        parts = (frame.iloc[start : start + _TABLE_ROWS].astype(object) for start in range(0, len(frame), _TABLE_ROWS))
        # A missing value (NaN, NaT) is null, as in a file.
        return (row for part in parts for row in part.where(part.notna(), None).to_dict("records"))
    if library == "datasets" and hasattr(rows, "with_format"):
        tables = rows.with_format("arrow").iter(batch_size=_TABLE_ROWS)  # pictures stay the bytes that they are
        return (row for table in tables for row in table.to_pylist())
    if hasattr(rows, "__arrow_c_stream__"):
        import pyarrow as pa

        batches = pa.RecordBatchReader.from_stream(rows)
        _refuse_repeated(batches.schema.names, name)
        return (
            row
            for batch in batches
            for start in range(0, batch.num_rows, _TABLE_ROWS)
            for row in batch.slice(start, _TABLE_ROWS).to_pylist()
        )
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        several = isinstance(rows, Mapping) and bool(rows) and hasattr(next(iter(rows.values())), "with_format")
        hint = (
            f"give one split, as in {name}={name}[{next(iter(rows))!r}]" if several else "give a list of dictionaries"
        )
        raise TypeError(f"{name} is of type {type(rows).__name__}, which is not rows; {hint}")
    return rows


def _refuse_repeated(columns: Iterable[str], name: str) -> None:
    """Refuse a table of two columns with one name: rows would hold the last of them alone."""
    if column := repeated(columns):
        raise DataError(f"{name} names the column {quoted(column)} twice")


def _json_value(value: Any, where: str, limits: ImageLimits) -> Any:
    """Return a value of a row as JSON holds it.

    Raises:
        DataError: It is none that a row can hold.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), (bytes, memoryview)):  # a picture as data sets hold it
            return _json_value(value["bytes"], where, limits)
        return {str(key): _json_value(part, where, limits) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(part, where, limits) for part in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, PIL.Image.Image):
        return _json_value(as_png(value, where, limits), where, limits)
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Image):
        return {"path": value.path} if value.data is None else _json_value(value.data, where, limits)
    if hasattr(value, "tolist"):  # an array, a tensor or a number of one
        return _json_value(value.tolist(), where, limits)
    if isinstance(value, Decimal):
        fits = value.is_finite() and abs(value) < 2**63  # as a whole number of 64 bits, which keeps ids exact
        return int(value) if fits and value == int(value) else float(value)
    if isinstance(value, (date, time, timedelta, UUID)):
        return str(value)
    raise DataError(
        f"{where} holds a {type(value).__name__}; a value is a text, a number, a picture, or a list of those"
    )


def items_of(rows: Iterable[ItemInput], limits: ImageLimits) -> list[Item]:
    """Return rows as items; pictures are checked by their headers.

    Raises:
        TypeError: The rows are a single text, picture or file, a table of several columns, or a row is none of them.
        DataError: A text isn't valid UTF-8.
        ImageError: A picture is missing, broken or over the limits; the message names its file or row.
    """
    if isinstance(rows, (str, bytes, Path, PIL.Image.Image, Image, Composed)):
        kind = "text" if isinstance(rows, str) else "picture"
        raise TypeError(f"rows is one {kind}; give a list of {kind}s, as in encode([{kind}], side)")
    if is_table(rows):
        table: Any = rows
        names = list(table.column_names if hasattr(table, "column_names") else table.columns)
        if len(names) != 1:
            column = "text" if "text" in names else names[0] if names else "text"
            raise TypeError(
                f"rows is a {type(table).__name__} with the columns {', '.join(map(str, names)) or 'none'}; give one "
                f"of them, as in encode(table[{column!r}], side)"
            )
        values = table[names[0]]
        rows = values.to_pylist() if hasattr(values, "to_pylist") else values
    return [_item(row, f"row {number}", limits) for number, row in enumerate(rows)]


def is_table(rows: object) -> bool:
    """Return whether rows have columns, as those of pandas, polars, Arrow and datasets: iterating may yield names."""
    return hasattr(rows, "column_names") or hasattr(rows, "columns")


def _item(row: object, name: str, limits: ImageLimits) -> Item:
    if isinstance(row, str):
        if not row.isascii():  # half a surrogate pair, which tokenizers refuse as no text at all
            try:
                row.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{name} is not valid UTF-8 text (character {error.start + 1})") from error
        return row
    if isinstance(row, Composed):
        pictures: tuple[object, ...] = tuple(row.images)
        if unknown := [type(picture).__name__ for picture in pictures if not isinstance(picture, _PICTURES)]:
            raise TypeError(f"{name}: a picture of Composed is {PICTURE_FORMS}, not a {unknown[0]}")
        return Composed(tuple(_image(picture, name, limits) for picture in pictures), row.text)
    if not isinstance(row, _PICTURES):
        raise TypeError(f"{name} is a {type(row).__name__}; every row is a text (str) or a picture ({PICTURE_FORMS})")
    return _image(row, name, limits)


def _image(picture: Any, name: str, limits: ImageLimits) -> Image:
    """Return a picture of any form as ours, checked by its header."""
    if isinstance(picture, Image):
        image = picture
    elif isinstance(picture, Path):
        image = Image(str(home_path(picture)))
    elif isinstance(picture, bytes):
        image = Image(name, picture)
    else:
        image = Image(name, as_png(picture, name, limits))
    check_image(image, limits)
    return image


def refuse_other_modalities(items: Iterable[Item], taken: frozenset[Modality], name: str) -> None:
    """Refuse items that a model has no tower for.

    Raises:
        DataError: With the first such row.
    """
    for number, item in enumerate(items):
        modality = modality_of(item)
        if modality not in taken:
            hint = f"; a str is a text: give a picture as {PICTURE_FORMS}" if modality == "text" else ""
            word = MODALITY_WORDS[modality][0]
            raise DataError(f"{name} takes {modality_words(taken)}, and row {number} is a {word}{hint}")


def as_png(picture: PIL.Image.Image, name: str, limits: ImageLimits) -> bytes:
    """Encode a picture of Pillow without loss, turned as its EXIF says, so that it is decoded as a file would be."""
    if picture.mode not in _SAVED_AS:
        raise ImageError(name, f"pixels of mode {picture.mode!r} have no stated range; convert the picture to RGB")
    # Pillow opens a file without reading its pixels: a bomb is refused here, before the turn decodes it.
    if not 0 < picture.width * picture.height <= limits.max_pixels:
        size = f"{picture.width:,} x {picture.height:,} pixels"
        raise ImageError(name, f"{size}, and a picture has from 1 to {limits.max_pixels:,}")
    buffer = BytesIO()
    try:
        # The pixels are turned, so that nothing depends on whether the PNG keeps the EXIF.
        upright = PIL.ImageOps.exif_transpose(picture)
        upright = upright if upright.mode == _SAVED_AS[picture.mode] else upright.convert(_SAVED_AS[picture.mode])
        upright.save(buffer, "PNG", compress_level=1)  # it is read once or twice: speed counts, not bytes
    except (OSError, SyntaxError, ValueError) as error:  # a file behind it that is cut off or broken
        raise ImageError(name, f"the picture can't be read: {error}") from error
    return buffer.getvalue()
