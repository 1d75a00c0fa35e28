"""Small copies of the pictures of a set, inside the page: no file beside it, and no path of this machine in it.

Each picture is decoded once. How well it is kept depends on how often pictures stand on the page, so that the page
stays small whatever they show; a picture that can't be decoded any more gets a labelled box instead.
"""

from __future__ import annotations

import base64
import io
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from PIL.Image import Resampling

from vembed.data.images import decode_image
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image as Bitmap

    from vembed.batch import Image
    from vembed.data.images import ImageLimits

_log = logging.getLogger(__name__)

THUMBNAIL_PIXELS = 160
"""Longest side of a thumbnail; a smaller picture keeps its size."""

PAGE_CHARACTERS = 1_000_000
"""Characters of the page that all its thumbnails may take together."""

Form: TypeAlias = tuple[int, int | None]

FORMS: tuple[Form, ...] = (
    (THUMBNAIL_PIXELS, None),
    *((THUMBNAIL_PIXELS, quality) for quality in (85, 70, 50)),
    (96, 50),
    (48, 30),
)
"""(longest side, quality) from best to smallest; None is lossless, which drawings often fit in."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small copy of a picture, in pixels as it is to be shown."""

    uri: str  # the copy as a `data:` address
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Thumbnails:
    """The thumbnails of a page."""

    by_picture: dict[Image, Thumbnail]  # of each picture that could be decoded
    num_pictures: int  # pictures that the page shows, each counted once

    @classmethod
    def of(cls, shown: Sequence[Image], limits: ImageLimits, *, forms: Sequence[Form] = FORMS) -> Thumbnails:
        """Make the thumbnails of the pictures of a page, one that stands twice named twice."""
        distinct = dict.fromkeys(shown)
        share = PAGE_CHARACTERS // max(1, len(shown))
        made = {picture: _thumbnail(picture, limits, characters=share, forms=forms) for picture in distinct}
        return cls({picture: copy for picture, copy in made.items() if copy is not None}, len(distinct))

    @property
    def note(self) -> str:
        """What the page says about them; empty without pictures."""
        if not self.num_pictures:
            return ""
        sentence = f"Pictures are small copies, at most {THUMBNAIL_PIXELS} pixels a side; transparent parts are white."
        lost = self.num_pictures - len(self.by_picture)
        if lost:
            sentence += f" {lost} of {self.num_pictures} could not be decoded for this page: a box stands for each."
        return sentence


def picture_name(picture: Image) -> str:
    """Return what a picture is called in a report: its file's name, without the folders of this machine."""
    return re.split(r"[/\\]", picture.path)[-1] or "picture"


def small_copy(picture: Image, limits: ImageLimits) -> Bitmap | None:
    """Return a picture of thumbnail size, or None where there is nothing to copy."""
    try:
        bitmap = decode_image(picture, limits)
        bitmap.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Resampling.LANCZOS)
        return bitmap
    except (DataError, OSError) as error:  # checked before training: the file has changed or gone since
        _log.warning("report: %s gets a box in place of a thumbnail: %s", picture_name(picture), error)
        return None


def _thumbnail(picture: Image, limits: ImageLimits, *, characters: int, forms: Sequence[Form]) -> Thumbnail | None:
    """Return the best copy that takes at most so many characters, or None where there is nothing to copy."""
    bitmap = small_copy(picture, limits)
    return None if bitmap is None else _encoded(bitmap, characters, forms)


def _encoded(bitmap: Bitmap, characters: int, forms: Sequence[Form]) -> Thumbnail:
    """Encode in the first form that is small enough; the last one is taken as it is."""
    uri = ""
    for side, quality in forms:
        copy = bitmap.copy()
        copy.thumbnail((side, side), Resampling.LANCZOS)
        buffer = io.BytesIO()
        copy.save(buffer, "WEBP", lossless=quality is None, quality=quality or 80, method=4)
        uri = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
        if len(uri) <= characters:
            break
    return Thumbnail(uri, bitmap.width, bitmap.height)
