"""Pictures: found under one folder, checked from their headers before anything trains, decoded when a batch needs them.

1. `ImageRoot` turns the cell of a row into an `Image`. A path is resolved under one folder, the root, and must lie
   inside it after every `..` and link is followed. Bytes come as they are, or as the {"bytes": ..., "path": ...} of
   Parquet files and hub sets; JSON writes them as base64.
2. The format is told by the first bytes, never by the file's name, and must be one of `FORMATS`.
3. Bytes and pixels are capped from the header: a picture over a cap is never decoded.
4. Decoding takes the first frame, turns it as EXIF says, puts transparency on a background, scales 16 bits to 8, and
   changes the picture as its `Augmentation` says, if it has one.

A picture that can't be decoded is an `ImageError` that names it; no other picture ever stands in for it.
"""

from __future__ import annotations

import base64
import os
import re
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from vembed.batch import Composed, Image, ImageLimits, content_id, pictures_in
from vembed.data.augment import augmented
from vembed.errors import DataError
from vembed.files import home_path, is_file, is_folder, open_regular
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL.ImageFile import ImageFile

    from vembed.batch import Background, Item

# Pillow's own readers, called by name: `PIL.Image.open` would warn or refuse by a process-wide cap instead of ours.
FORMATS: dict[str, Callable[[IO[bytes]], ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
"""Formats that are read, and their readers."""

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
)
_SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
# Modes whose values have a known range. "I" and "F" hold any number: which is white is not written in the file.
_MODES = _SIXTEEN_BIT | {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
NO_SUCH_FILE = "no such file"
_HEADER_BYTES = 32  # the longest signature and the fixed part of every WebP header
_PILLOW_CAPPED = frozenset({"GIF", "TIFF", "WEBP"})
"""Formats whose reader has a ceiling of its own, twice `PIL.Image.MAX_IMAGE_PIXELS`."""

# Pillow's readers raise all of these for bytes that are no picture: they parse without a check of their own.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RuntimeError,
    EOFError,
    struct.error,
    zlib.error,
    PIL.Image.DecompressionBombError,
)


class ImageError(DataError):
    """A picture that can't be used.

    Attributes:
        path: As `Image.path`.
        reason: In words that follow the path.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        """Let it travel between processes: an exception is made anew from its message, and this one has two parts."""
        return ImageError, (self.path, self.reason)


class ImageHeader(NamedTuple):
    """Format and size of a picture."""

    format: str  # a key of `FORMATS`
    width: int  # pixels, as stored: before EXIF turns it
    height: int  # pixels, as stored
    mode: str  # Pillow's name of the pixels' kind ("RGB", "P", "I;16", ...)


def check_image(image: Image, limits: ImageLimits) -> ImageHeader:
    """Check a picture by its header; its pixels are not decoded.

    Raises:
        ImageError: It is missing, empty, no picture of a known format, over a cap, or its header is broken.
    """
    with _opened(image, limits) as handle:
        return _header(image, handle, limits)


def decode_image(image: Image, limits: ImageLimits, background: Background = "white") -> PIL.Image.Image:
    """Decode a picture to 8-bit RGB; with background none to 8 bits of its own mode.

    The first frame of an animation; turned upright by EXIF that can be read; transparency put on the background; grey
    of 16 bits scaled to 8. Colour profiles are not applied. An `Image` with an augmentation is changed by it, in RGB.

    Raises:
        ImageError: As `check_image`, or the pixels are truncated or broken.
    """
    with _opened(image, limits) as handle:
        # The header is checked again: a file may have changed since the data were read.
        header = _header(image, handle, limits)
        handle.seek(0)
        try:
            picture = FORMATS[header.format](handle)
            if header.format == "PNG":
                _scale_transparent_grey(picture)
            picture.load()
            # Cameras store pixels as the sensor lies and an orientation in EXIF. Models see the picture upright; width
            # and height of `header` are those before the turn. Where EXIF is broken, sound pixels stay as they lie: the
            # header said nothing of it, and a run would stop in the middle.
            with suppress(*_BROKEN):
                PIL.ImageOps.exif_transpose(picture, in_place=True)
            decoded = _on_background(picture, background)
        except MemoryError as error:
            reason = f"not enough memory for {header.width:,} x {header.height:,} pixels; lower max_image_pixels"
            raise ImageError(image.path, reason) from error
        except _BROKEN as error:
            raise ImageError(image.path, f"the {header.format} can't be decoded: {_words(error)}") from error
    return decoded if image.augmentation is None else augmented(decoded.convert("RGB"), image.augmentation)


def decode_images(
    images: Sequence[Image], limits: ImageLimits, num_threads: int, background: Background = "white"
) -> list[PIL.Image.Image]:
    """Decode pictures in threads, which helps as Pillow's decoders release Python's lock.

    Returns:
        n pictures in the order of `images`, as `decode_image` gives them.

    Raises:
        ImageError: Of the first picture, in that order, that can't be decoded.
    """
    decode = partial(decode_image, limits=limits, background=background)
    if num_threads <= 1 or len(images) <= 1:
        return [decode(image) for image in images]
    with ThreadPoolExecutor(max_workers=min(num_threads, len(images))) as pool:
        return list(pool.map(decode, images))


def item_id(item: Item) -> int:
    """Return `content_id`, and name a picture that can't be read any more.

    Raises:
        ImageError: A picture's file has gone or can't be read.
    """
    try:
        return content_id(item)
    except OSError as error:
        raise ImageError(str(error.filename or next(pictures_in([item])).path), _system_words(error)) from error


def content_name(item: Item) -> str:
    """Return an item's identity as 16 hexadecimal digits, the id of a document made of rows."""
    return f"{item_id(item) & (2**64 - 1):016x}"


@contextmanager
def _opened(image: Image, limits: ImageLimits) -> Iterator[IO[bytes]]:
    """Open a picture whose size in bytes is within the cap."""
    if image.data is not None:
        _check_bytes(image.path, len(image.data), limits)
        with BytesIO(image.data) as memory:
            yield memory
        return
    try:
        handle = open_regular(image.path)
    except OSError as error:
        raise ImageError(image.path, _system_words(error)) from error
    with handle:
        _check_bytes(image.path, os.fstat(handle.fileno()).st_size, limits)
        yield handle


def _check_bytes(path: str, num_bytes: int, limits: ImageLimits) -> None:
    if not num_bytes:
        raise ImageError(path, "the file is empty")
    if num_bytes > limits.max_bytes:
        raise ImageError(path, f"{num_bytes:,} bytes are over the limit of {limits.max_bytes:,}")


def _header(image: Image, handle: IO[bytes], limits: ImageLimits) -> ImageHeader:
    """Return what the header says, every cap checked before anything of the picture's size is allocated."""
    try:
        start = handle.read(_HEADER_BYTES)
        if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            name: str | None = "WEBP"
        else:
            name = next((name for signature, name in _SIGNATURES if start.startswith(signature)), None)
        if name is None:
            raise ImageError(image.path, f"no picture of a known format ({', '.join(FORMATS)}), whatever its name says")
        if name == "WEBP":
            header = _webp_header(start, handle.seek(0, os.SEEK_END))
        else:
            if name == "GIF":
                # Pillow may allocate a GIF's first frame while it opens the file.
                _check_pixels(image.path, name, _gif_size(handle), limits)
            handle.seek(0)
            picture = FORMATS[name](handle)
            header = ImageHeader(name, picture.width, picture.height, picture.mode)
    except ImageError:
        raise
    except (MemoryError, *_BROKEN) as error:
        raise ImageError(image.path, f"the header can't be read: {_words(error)}") from error
    _check_pixels(image.path, name, (header.width, header.height), limits)
    if header.mode not in _MODES:
        reason = f"pixels of mode {header.mode!r} have no stated range in RGB; save it with 8 or 16 bits a channel"
        raise ImageError(image.path, reason)
    return header


def _webp_header(start: bytes, num_bytes: int) -> ImageHeader:
    """Return the header of a WebP, read by hand: Pillow's reader allocates two frames when it opens a file.

    Source: RFC 9649, sections 2.4 to 2.7 and 3.4.
    """
    if struct.unpack_from("<I", start, 4)[0] + 8 > num_bytes:
        msg = f"the file is truncated at {num_bytes:,} bytes"
        raise ValueError(msg)
    chunk = start[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(start[at : at + 3], "little") + 1 for at in (24, 27))
        return ImageHeader("WEBP", width, height, "RGBA" if start[20] & 0x10 else "RGB")
    if chunk == b"VP8L" and start[20] == 0x2F:
        bits: int = struct.unpack_from("<I", start, 21)[0]
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, "RGBA" if bits >> 28 & 1 else "RGB")
    if chunk == b"VP8 " and start[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", start, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF, "RGB")
    msg = f"not a known kind of WebP: {chunk!r}"
    raise ValueError(msg)


def _gif_size(handle: IO[bytes]) -> tuple[int, int]:
    """Return the size of a GIF as Pillow will have it: its canvas, grown to hold the first frame.

    Source: GIF89a specification, sections 17 to 24.
    """
    handle.seek(6)
    width, height, flags = struct.unpack("<HHBxx", handle.read(7))
    if flags & 0x80:
        handle.seek(6 << (flags & 7), os.SEEK_CUR)  # the global colour table
    # Blocks up to the first frame (","), the end mark (";") or the end of the file; of them only extensions ("!") may
    # be long: a label, and then sub-blocks, whose first byte is their length, until one of length 0.
    while (kind := handle.read(1)) not in {b",", b";", b""}:
        if kind == b"!":
            handle.seek(1, os.SEEK_CUR)
            while (length := handle.read(1)) and length[0]:
                handle.seek(length[0], os.SEEK_CUR)
    left, top, frame_width, frame_height = struct.unpack("<4H", handle.read(8))
    return max(width, left + frame_width), max(height, top + frame_height)


def _check_pixels(path: str, name: str, size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(path, f"{width:,} x {height:,} pixels hold nothing")
    limit, fix = limits.max_pixels, "make it smaller, or raise max_image_pixels if you trust it"
    if name in _PILLOW_CAPPED and PIL.Image.MAX_IMAGE_PIXELS and limit > 2 * PIL.Image.MAX_IMAGE_PIXELS:
        limit, fix = 2 * PIL.Image.MAX_IMAGE_PIXELS, f"make it smaller, or a PNG: Pillow decodes no larger {name}"
    if width * height > limit:
        size_words = f"{width:,} x {height:,} = {width * height:,} pixels"
        raise ImageError(path, f"{size_words} are over the limit of {limit:,}; {fix}")


def _scale_transparent_grey(picture: ImageFile) -> None:
    """Scale the one grey that a PNG of 2 or 4 bits declares transparent, before its pixels are read.

    Pillow scales the pixels to 8 bits and leaves this grey as it is in the file, so that no pixel would be equal to it.
    """
    factor = {"L;2": 255 // 3, "L;4": 255 // 15}.get(str(picture.tile[0].args)) if picture.tile else None
    transparent = picture.info.get("transparency")
    if factor is not None and isinstance(transparent, int) and transparent <= 255 // factor:  # not scaled by Pillow
        picture.info["transparency"] = transparent * factor


def _on_background(picture: PIL.Image.Image, background: Background) -> PIL.Image.Image:
    """Return a picture of one of `_MODES` as RGB, or with no background in its own mode."""
    if picture.mode in _SIXTEEN_BIT:
        # Scale 0..65535 to 0..255, rounded: Pillow's own conversion clips at 255, and nearly all becomes white.
        grey = np.asarray(picture).astype(np.uint32)
        scaled = ((grey * 255 + 32767) // 65535).astype(np.uint8)
        transparent = picture.info.get("transparency")  # the one grey value that a PNG of 16 bits declares transparent
        if isinstance(transparent, int) and background != "none":
            scaled[grey == transparent] = 255 if background == "white" else 0
        return PIL.Image.fromarray(scaled).convert("RGB")
    if background == "none":
        return picture.copy()
    if picture.has_transparency_data:
        transparent = picture.convert("RGBA")
        behind = PIL.Image.new("RGBA", picture.size, background)
        return PIL.Image.alpha_composite(behind, transparent).convert("RGB")
    return picture.convert("RGB")


def _system_words(error: OSError) -> str:
    return NO_SUCH_FILE if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _words(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:", re.ASCII | re.IGNORECASE)
"""Start of an address of any scheme (http:, file:, data:), and of a drive (C:)."""

MAX_SHOWN = 120
"""Characters of a path that a message shows."""

NUM_CACHED = 65_536
"""Paths whose verdict is kept: a picture often stands in several rows."""


class PictureFault(Exception):  # noqa: N818 - a verdict on one cell that never leaves this room
    """A cell that gives no picture.

    Args:
        reason: In words that follow the column's name.
        escapes: The path leads out of the root, or to an address: the source is refused whatever the policy.
    """

    def __init__(self, reason: str, *, escapes: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.escapes = escapes


def joined_pictures(images: Sequence[Image], text: str) -> Image | Composed:
    """Return pictures and a text, possibly empty, as one item."""
    return Composed(tuple(images), text) if text or len(images) > 1 else images[0]


class ImageRoot:
    """The folder that the pictures of one source lie in.

    Args:
        folder: The folder; None for a source that has none, whose pictures must be bytes.

    Raises:
        DataError: The folder doesn't exist.
    """

    def __init__(self, folder: Path | None, limits: ImageLimits) -> None:
        if folder is not None and not is_folder(home_path(folder)):
            msg = f"image_root: {folder} isn't a folder; give the folder that the paths of pictures start from"
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
            if isinstance(data, str):
                try:
                    data = base64.b64decode("".join(data.split()), validate=True)  # often broken into lines
                except ValueError as error:
                    raise PictureFault("expected a picture: 'bytes' is a text that is not base64") from error
            cell = path if data is None else data
        if isinstance(cell, str):
            verdict = self._verdict(cell)
            if isinstance(verdict, PictureFault):
                # A new one for every row: an exception that is raised twice collects the frames of both.
                raise PictureFault(verdict.reason, escapes=verdict.escapes)
            return Image(verdict)
        if isinstance(cell, (bytes, memoryview)):
            image = Image(name, cell)
            try:
                check_image(image, self._limits)
            except ImageError as error:
                raise PictureFault(f"the picture's bytes: {error.reason}") from error
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
            self.image(part, name=f"{name} (picture {number})" if many else name) for number, part in enumerate(cell, 1)
        ]
        return joined_pictures(images, text)

    def _judge(self, path: str) -> str | PictureFault:
        """Return where a path leads if it lies inside the root and its header is sound, else what is wrong with it."""
        shown = quoted(path, MAX_SHOWN)
        if not path.strip():
            return PictureFault("empty path of a picture")
        if "\0" in path:
            return PictureFault(f"{shown}: a path can't hold a NUL byte", escapes=True)
        if "\\" in path:
            return PictureFault(f"{shown}: write the path with / instead of \\", escapes=True)
        if ADDRESS.match(path):
            # Only the scheme is shown: an address may hold a password.
            scheme = path.partition(":")[0]
            return PictureFault(
                f"a path that starts with {scheme}: is an address, and pictures are never fetched; download it and "
                "name the local file",
                escapes=True,
            )
        if self._folder is None:
            return PictureFault(f"{shown}: this source has no folder of its own; set image_root, or store the bytes")
        try:
            resolved = os.path.realpath(Path(self._folder) / path)  # an absolute path replaces the folder
            resolved.encode()
        except (OSError, ValueError) as error:
            return PictureFault(f"{shown}: not a usable path: {error}")
        # Compared after every link was followed: the text of a path says nothing of where it leads.
        if os.path.commonpath((self._folder, resolved)) != self._folder:
            return PictureFault(
                f"{shown} leads out of {self._folder}: pictures must lie in image_root (by default the manifest's "
                "folder), links included; move them there, or set image_root",
                escapes=True,
            )
        try:
            check_image(Image(resolved), self._limits)
        except ImageError as error:
            hint = ""
            if error.reason == NO_SUCH_FILE:  # paths are often relative to the folder above
                above = Path(self._folder).parent
                lies_above = ".." not in Path(path).parts and is_file(above / path)
                hint = f" in {self._folder}; set image_root to the folder that the paths start from"
                if lies_above:
                    hint = f" in {self._folder}; it is in {above}: set image_root: {above}"
            return PictureFault(f"{shown}: {error.reason}{hint}")
        return resolved
