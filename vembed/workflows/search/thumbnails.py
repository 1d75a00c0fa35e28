"""Small copies of an index's pictures: a search shows them when the originals have long gone.

All copies stand one after the other in one file; another holds where each starts. A document without a picture takes
no bytes. Making them holds one decoded picture per thread, reading them one copy.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
from PIL.Image import Resampling

from vembed.batch import Image, ImageLimits, pictures_in
from vembed.data.images import ImageError, check_image, decode_image
from vembed.errors import ConfigError
from vembed.files import BROKEN_ARRAY
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from PIL.Image import Image as Bitmap

    from vembed.batch import Item

THUMBNAIL_PIXELS = 256  # longest side of a copy; a smaller picture keeps its size
THUMBNAIL_BYTES = 16_384  # most bytes of a copy
FORMS = ((256, 78), (256, 55), (192, 50), (96, 40))  # (longest side, quality); the last one always fits
DRAWING_COLOURS = 256  # a picture of so few is kept without loss where that fits: edges of drawings stay sharp
_OFFSETS_DTYPE = np.dtype("<i8")


def make_thumbnail(images: Sequence[Image], limits: ImageLimits) -> bytes:
    """Return a small WebP copy of pictures side by side, without anything that their files hold beside the pixels.

    Raises:
        ImageError: One can't be decoded.
    """
    bitmaps = []
    for image in images:
        decoded = decode_image(image, limits)
        decoded.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Resampling.LANCZOS, reducing_gap=2.0)
        bitmaps.append(decoded)
    bitmap = bitmaps[0]
    if len(bitmaps) > 1:  # in a row, on white
        bitmap = PIL.Image.new(
            "RGB", (sum(part.width for part in bitmaps), max(part.height for part in bitmaps)), "white"
        )
        left = 0
        for part in bitmaps:
            bitmap.paste(part, (left, 0))
            left += part.width
    bitmap.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Resampling.LANCZOS)
    if bitmap.getcolors(DRAWING_COLOURS) is not None:
        drawing = _webp(bitmap, lossless=True)
        if len(drawing) <= THUMBNAIL_BYTES:
            return drawing
    copy = b""
    # Each form shrinks what the last one left, as no form is larger than the one before.
    for side, quality in FORMS:
        bitmap.thumbnail((side, side), Resampling.LANCZOS)
        copy = _webp(bitmap, quality=quality)
        if len(copy) <= THUMBNAIL_BYTES:
            break
    return copy


def _webp(bitmap: Bitmap, *, quality: int = 80, lossless: bool = False) -> bytes:
    buffer = io.BytesIO()
    bitmap.save(buffer, "WEBP", quality=quality, lossless=lossless, method=4)
    return buffer.getvalue()


def make_thumbnails(items: Iterable[Item], limits: ImageLimits, num_threads: int) -> Iterator[bytes]:
    """Yield the copy of each item's pictures, no bytes for a text, in order; Pillow works outside of Python's lock.

    Raises:
        ImageError: One can't be decoded.
    """

    def copy_of(item: Item) -> bytes:
        return b"" if isinstance(item, str) else make_thumbnail(tuple(pictures_in([item])), limits)

    # In blocks of some pictures per thread: pool.map would else read the whole corpus before the first copy.
    remaining = iter(items)
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        while block := list(islice(remaining, 4 * max(1, num_threads))):
            yield from pool.map(copy_of, block)


class ThumbnailReader:
    """Read copies back, from several threads.

    Args:
        check: Raises where the bytes of the copies from one place to another are damaged.

    Raises:
        ConfigError: The offsets are broken, or of another number of documents.
    """

    def __init__(
        self,
        copies: Path,
        offsets: Path,
        *,
        num_documents: int | None = None,
        check: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._path = copies
        self._check = check
        try:
            self._offsets = np.load(offsets, mmap_mode="r", allow_pickle=False)
        except BROKEN_ARRAY as error:
            raise ConfigError(
                f"{offsets} is broken: {first_line(error)}; encode the corpus again with --overwrite"
            ) from error
        num_documents = len(self._offsets) - 1 if num_documents is None else num_documents
        if self._offsets.shape != (num_documents + 1,) or self._offsets.dtype != _OFFSETS_DTYPE:
            raise ConfigError(f"{offsets} is broken: it isn't for {num_documents:,} documents; encode the corpus again")
        self._file = copies.open("rb")

    def first(self) -> int:
        """Return the first document that has a picture; 0 where none has."""
        return int(np.argmax(np.diff(self._offsets) > 0))

    def read(self, row: int) -> bytes:
        """Return a document's copy; no bytes where it has no picture.

        Raises:
            ConfigError: What stands there is no picture.
        """
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        # Offsets may be damaged: nothing before the file is read, and no more than a copy may have.
        length = min(max(0, stop - start), THUMBNAIL_BYTES)
        self._check(max(0, start), max(0, start) + length)
        copy = os.pread(self._file.fileno(), length, max(0, start))
        if start != stop:
            try:
                thumbnail_size(copy)
            except ImageError as error:
                where = f"{self._path} is broken at document {row} ({error.reason})"
                raise ConfigError(f"{where}; encode the corpus again with --overwrite") from error
        return copy


def thumbnail_size(copy: bytes) -> tuple[int, int]:
    """Return width and height of a copy, in pixels.

    Raises:
        ImageError: It is no picture.
    """
    limits = ImageLimits(max_pixels=THUMBNAIL_PIXELS**2, max_bytes=THUMBNAIL_BYTES)
    header = check_image(Image("thumbnail", copy), limits)
    return header.width, header.height
