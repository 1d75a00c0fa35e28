"""Turn what a row says of a picture into a checked `Image`.

A path is resolved under one folder, the root, and must lie inside it after every `..` and link is followed. Bytes come
as they are, or in the {"bytes": ..., "path": ...} form of Parquet files and hub sets; JSON writes them as base64. Every
picture's header is read.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.batch import Composed, Image, ImageLimits
from vembed.data.images import NO_SUCH_FILE, ImageError, check_image
from vembed.errors import DataError
from vembed.files import home_path, is_file, is_folder
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:", re.ASCII | re.IGNORECASE)
"""How an address of any scheme begins (http:, file:, data:), and a drive (C:)."""

MAX_SHOWN = 120
NUM_CACHED = 65_536
"""Paths whose verdict is kept: a picture often stands in several rows."""


def joined_pictures(images: Sequence[Image], text: str = "") -> Image | Composed:
    """Return pictures and a text, possibly empty, as one item."""
    return Composed(tuple(images), text) if text or len(images) > 1 else images[0]


class PictureFault(Exception):  # noqa: N818 - a verdict on one cell that never leaves this room
    """Why a cell gives no picture.

    Args:
        reason: In words that follow the column's name.
        escapes: The path leads out of the root, or to an address: the source is refused whatever the policy.
    """

    def __init__(self, reason: str, *, escapes: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.escapes = escapes


class ImageRoot:
    """The folder that the pictures of one source lie in.

    Args:
        folder: The folder; None for a source that has none, whose pictures must be bytes.

    Raises:
        DataError: The folder doesn't exist.
    """

    def __init__(self, folder: Path | None, limits: ImageLimits) -> None:
        if folder is not None and not is_folder(home_path(folder)):
            msg = f"image_root: {folder} is no folder: give the folder that the pictures' paths start from"
            raise DataError(msg)
        self._folder = None if folder is None else os.path.realpath(home_path(folder))
        self._limits = limits
        self._verdict = lru_cache(maxsize=NUM_CACHED)(self._judge)

    def image(self, cell: object, *, name: str) -> Image:
        """Return the picture of a cell.

        Args:
            cell: A path, the encoded bytes or a view of them, {"bytes", "path"}, or an `Image` that was checked before.
            name: What to call bytes in messages.

        Raises:
            PictureFault: The cell holds no picture, the path is refused, or the header is.
        """
        if isinstance(cell, Image):
            return cell
        if isinstance(cell, Mapping):
            data, path = cell.get("bytes"), cell.get("path")
            if data is None and path is None:
                raise PictureFault("expected a picture: neither 'bytes' nor 'path' holds anything")
            cell = path if data is None else _decoded(data) if isinstance(data, str) else data
        if isinstance(cell, str):
            verdict = self._verdict(cell)
            if isinstance(verdict, PictureFault):
                raise PictureFault(verdict.reason, escapes=verdict.escapes)
            return Image(verdict)
        if isinstance(cell, (bytes, memoryview)):
            image = Image(name, cell)
            self._check(image, "the picture's bytes")
            return image
        kind = "null" if cell is None else type(cell).__name__
        raise PictureFault(f'expected a picture (a path, bytes, or {{"bytes", "path"}}), got {kind}')

    def item(self, cell: object, *, name: str, text: str = "") -> Image | Composed:
        """Return the picture of a cell, or of a list the pictures of one item; with a text beside them or without.

        Raises:
            PictureFault: A picture is refused, or the list is empty.
        """
        if type(cell) is not list:
            return joined_pictures([self.image(cell, name=name)], text)
        if not cell:
            raise PictureFault("expected a picture, got an empty list")
        many = len(cell) > 1
        images = [
            self.image(each, name=f"{name} (picture {number})" if many else name) for number, each in enumerate(cell, 1)
        ]
        return joined_pictures(images, text)

    def _judge(self, path: str) -> str | PictureFault:
        try:
            return self._checked(path)
        except PictureFault as fault:
            return fault

    def _checked(self, path: str) -> str:
        """Return where a path leads, once it was found to lie inside and to be a picture."""
        shown = quoted(path, MAX_SHOWN)
        resolved = self._resolve(path, shown)
        try:
            self._check(Image(resolved), shown)
        except PictureFault as fault:
            missing = fault.reason.endswith(NO_SUCH_FILE)
            raise PictureFault(f"{fault.reason}{self._hint(path) if missing else ''}") from None
        return resolved

    def _resolve(self, path: str, shown: str) -> str:
        if not path.strip():
            raise PictureFault("empty path of a picture")
        if "\0" in path:
            raise PictureFault(f"{shown}: a path can't hold a NUL byte", escapes=True)
        if "\\" in path:
            raise PictureFault(f"{shown}: write the path with / instead of \\", escapes=True)
        if ADDRESS.match(path):
            # Only the scheme is shown: an address may hold a password.
            scheme = path.partition(":")[0]
            raise PictureFault(
                f"a path that starts with {scheme}: is an address, and pictures are never fetched; download it and "
                "name the local file",
                escapes=True,
            )
        if self._folder is None:
            raise PictureFault(f"{shown}: this source has no folder of its own; set image_root, or store the bytes")
        try:
            resolved = os.path.realpath(Path(self._folder) / path)
            resolved.encode()
        except (OSError, ValueError) as error:
            raise PictureFault(f"{shown}: not a usable path: {error}") from error
        if os.path.commonpath((self._folder, resolved)) != self._folder:
            raise PictureFault(
                f"{shown} leads out of {self._folder}: pictures must lie in image_root (by default the manifest's "
                "folder), links included; move them there, or set image_root",
                escapes=True,
            )
        return resolved

    def _check(self, image: Image, shown: str) -> None:
        try:
            check_image(image, self._limits)
        except ImageError as error:
            raise PictureFault(f"{shown}: {error.reason}") from error

    def _hint(self, path: str) -> str:
        """Return where a missing file was sought, and where it lies: paths are often relative to the folder above."""
        assert self._folder is not None, "a path was resolved without a folder"
        above = Path(self._folder).parent
        if ".." not in Path(path).parts and is_file(above / path):
            return f" in {self._folder}; it is in {above}: set image_root: {above}"
        return f" in {self._folder}; set image_root to the folder that the paths start from"


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PictureFault("expected a picture: 'bytes' is a text that is not base64") from error
