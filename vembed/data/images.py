"""Pictures: checked from their headers before anything trains, decoded to RGB when a batch needs them.

1. The format is told by the first bytes, never by the file's name, and must be one of `FORMATS`.
2. Bytes and pixels are capped from the header: a picture over a cap is never decoded.
3. Decoding takes the first frame, turns it as EXIF says, puts transparency on a background, scales 16 bits to 8, and
   changes the picture as its `Augmentation` says, if it has one.

A picture that can't be decoded is an `ImageError` that names it; no other picture ever stands in for it.
"""

from __future__ import annotations

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
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

from vembed.batch import content_id, pictures_in
from vembed.data.augment import augmented
from vembed.errors import DataError
from vembed.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL.ImageFile import ImageFile

    from vembed.batch import Background, Image, ImageLimits, Item

# Pillow's own readers, called by name: `PIL.Image.open` would warn or refuse by a process-wide cap instead of ours.
FORMATS: dict[str, Callable[[IO[bytes]], ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
"""Formats that are read, each with its reader."""

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
_MODES = _SIXTEEN_BIT | {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
NO_SUCH_FILE = "no such file"
_HEADER_BYTES = 32
_PILLOW_CAPPED = frozenset({"GIF", "TIFF", "WEBP"})
"""Formats whose reader has a ceiling of its own, twice `PIL.Image.MAX_IMAGE_PIXELS`."""

# What Pillow's readers raise for bytes that are no picture.
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
        path: Which, as `Image.path`.
        reason: Why, in words that follow the path.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        """Let it travel between processes: an exception is made anew from its message, and this one has two parts."""
        return ImageError, (self.path, self.reason)


class ImageHeader(NamedTuple):
    """What a picture's header says."""

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

    The first frame of an animation; turned upright by EXIF; transparency put on the background; grey of 16 bits scaled
    to 8. Colour profiles are not applied. An `Image` with an augmentation is changed by it, in RGB.

    Raises:
        ImageError: As `check_image`, or the pixels are truncated or broken.
    """
    with _opened(image, limits) as handle:
        header = _header(image, handle, limits)
        handle.seek(0)
        try:
            picture = FORMATS[header.format](handle)
            PIL.ImageOps.exif_transpose(picture, in_place=True)
            decoded = _on_background(picture, background)
        except MemoryError as error:
            reason = f"not enough memory for {header.width:,} x {header.height:,} pixels; lower max_image_pixels"
            raise ImageError(image.path, reason) from error
        except _BROKEN as error:
            raise ImageError(image.path, f"the {header.format} can't be decoded: {_words(error)}") from error
    return decoded if image.augmentation is None else augmented(decoded.convert("RGB"), image.augmentation)


def decode_images(
    images: Sequence[Image], limits: ImageLimits, num_threads: int = 1, background: Background = "white"
) -> list[PIL.Image.Image]:
    """Decode pictures in threads: Pillow's decoders release Python's lock.

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
        name = _format_of(start)
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


def _format_of(start: bytes) -> str | None:
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    return next((name for signature, name in _SIGNATURES if start.startswith(signature)), None)


def _webp_header(start: bytes, num_bytes: int) -> ImageHeader:
    """Read a WebP header by hand: Pillow's reader allocates two frames when it opens a file.

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


def _on_background(picture: PIL.Image.Image, background: Background) -> PIL.Image.Image:
    """Return a picture of one of `_MODES` as RGB, or with no background in its own mode."""
    if picture.mode in _SIXTEEN_BIT:
        return _sixteen_bit_to_rgb(picture, background)
    if background == "none":
        return picture.copy()
    if picture.has_transparency_data:
        transparent = picture.convert("RGBA")
        behind = PIL.Image.new("RGBA", picture.size, background)
        return PIL.Image.alpha_composite(behind, transparent).convert("RGB")
    return picture.convert("RGB")


def _sixteen_bit_to_rgb(picture: PIL.Image.Image, background: Background) -> PIL.Image.Image:
    """Scale 0..65535 to 0..255, which Pillow's own conversion clips."""
    grey = np.asarray(picture).astype(np.uint32)
    scaled = ((grey * 255 + 32767) // 65535).astype(np.uint8)
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int) and background != "none":
        scaled[grey == transparent] = 255 if background == "white" else 0
    return PIL.Image.fromarray(scaled).convert("RGB")


def _system_words(error: OSError) -> str:
    return NO_SUCH_FILE if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _words(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
