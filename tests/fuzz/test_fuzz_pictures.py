"""Whatever the bytes of a picture are, they are refused in our own words or decoded to the pixels that were written."""

from __future__ import annotations

import os
import struct
import zlib
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz_bytes import bent, check_message
from fuzz_limits import fuzzed, within_limits
from hypothesis import example, given
from hypothesis import strategies as st

from vembed.batch import Image, ImageLimits
from vembed.data.images import ImageError, check_image, decode_image
from vembed.data.read import DataSource
from vembed.errors import VembedError

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = ImageLimits(max_pixels=4_000_000)


def picture(mode: str, size: tuple[int, int] = (7, 5)) -> PIL.Image.Image:
    """Return a picture of some mode with noise in it."""
    noise = np.random.default_rng(7).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return PIL.Image.fromarray(noise, "RGBA").convert("RGB").convert(mode)


def encoded(shown: PIL.Image.Image, form: str, **options: Any) -> bytes:
    buffer = BytesIO()
    shown.save(buffer, form, **options)
    return buffer.getvalue()


def rotated() -> PIL.Image.Exif:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    return exif


FRAMES = {"save_all": True, "append_images": [picture("RGB"), picture("L").convert("RGB")]}
SEEDS = {
    "PNG": [
        *(encoded(picture(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        encoded(picture("P"), "PNG", transparency=3),
        encoded(picture("RGB"), "PNG", exif=rotated()),
        encoded(picture("RGB"), "PNG", **FRAMES),
    ],
    "JPEG": [
        *(encoded(picture(mode), "JPEG") for mode in ("L", "RGB", "CMYK")),
        encoded(picture("RGB"), "JPEG", progressive=True, exif=rotated(), icc_profile=b"x" * 200),
    ],
    "WEBP": [
        encoded(picture("RGB"), "WEBP"),
        encoded(picture("RGBA"), "WEBP", lossless=True),
        encoded(picture("RGB"), "WEBP", **FRAMES),
    ],
    "GIF": [encoded(picture("P"), "GIF"), encoded(picture("RGB"), "GIF", **FRAMES)],
    "BMP": [encoded(picture(mode), "BMP") for mode in ("1", "L", "P", "RGB")],
    "TIFF": [
        *(encoded(picture(mode), "TIFF") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F")),
        *(encoded(picture("RGB"), "TIFF", compression=each) for each in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")),
        encoded(picture("1"), "TIFF", compression="group4"),
        encoded(picture("RGB"), "TIFF", **FRAMES),
    ],
}
TOKENS = [
    b"IHDR", b"IDAT", b"IEND", b"acTL", b"tRNS", b"VP8X", b"VP8L", b"ANMF", b"EXIF", b"II*\0", b"MM\0*", b"\xff\xd8",
]  # fmt: skip


def decoded(data: bytes, limits: ImageLimits = LIMITS) -> PIL.Image.Image | None:
    """Return the pixels of a picture within the limits, None where it is refused by name."""
    with within_limits():
        try:
            header = check_image(Image("p", data), limits)
            shown = decode_image(Image("p", data), limits)
        except ImageError as error:
            check_message(error)
            return None
    assert shown.mode == "RGB"
    assert shown.size in {(header.width, header.height), (header.height, header.width)}  # EXIF may turn it
    return shown


@fuzzed(0.4)
@given(st.data())
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", SEEDS)
def test_a_bent_picture_is_decoded_or_refused(form: str, data: st.DataObject) -> None:
    decoded(data.draw(bent(SEEDS[form], TOKENS)))


def png_of_size(width: int, height: int, depth: int, colour: int, interlaced: bool) -> bytes:
    """Return a PNG that claims a size and holds two megabytes of zeros, in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    palette = chunk(b"PLTE", bytes(768)) if colour == 3 else b""
    pixels = chunk(b"IDAT", zlib.compress(bytes(2 * 10**6)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + pixels + chunk(b"IEND", b"")


def bmp_of_size(width: int, height: int, depth: int) -> bytes:
    head = struct.pack("<2sIHHI", b"BM", 54, 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, depth, 0, 0, 0, 0, 0, 0)


def gif_of_size(width: int, height: int) -> bytes:
    frame = struct.pack("<BHHHHB", 0x2C, 0, 0, width, height, 0)
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame + b"\x02\x02D\x01\x00;"


sides = st.integers(0, 2**31 - 1) | st.sampled_from([1, 1999, 2000, 2001, 65_535, 2**31 - 1])


@fuzzed(1)
@given(sides, sides, st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([0, 2, 3, 4, 6]), st.booleans())
@example(2000, 2000, 16, 6, False)
@example(4_000_000, 1, 16, 6, True)
@pytest.mark.filterwarnings("ignore")
def test_a_picture_that_claims_a_size_is_decoded_within_the_limits_or_refused(
    width: int, height: int, depth: int, colour: int, interlaced: bool
) -> None:
    small = (width % 65_536, height % 65_536)
    claims = [
        (width, height, png_of_size(width, height, depth, colour, interlaced)),
        (width, height, bmp_of_size(width, height, depth)),
        (*small, gif_of_size(*small)),
    ]
    for wide, high, data in claims:
        shown = decoded(data)
        assert shown is None or wide * high <= LIMITS.max_pixels


@fuzzed(1)
@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False), st.sampled_from(["1", "L", "RGB"]))
def test_pixels_are_decoded_as_they_were_written(width: int, height: int, random: Any, mode: str) -> None:
    noise = np.frombuffer(random.randbytes(3 * width * height), dtype=np.uint8).reshape(height, width, 3)
    shown = PIL.Image.fromarray(noise, "RGB").convert(mode)
    expected = np.asarray(shown.convert("RGB"))
    files = [
        encoded(shown, "PNG"),
        encoded(shown, "BMP"),
        encoded(shown, "TIFF"),
        encoded(shown, "TIFF", compression="tiff_adobe_deflate"),
        encoded(shown.convert("RGB"), "WEBP", lossless=True),
        encoded(shown.convert("RGBA"), "PNG"),
        encoded(shown.convert("L"), "GIF") if mode != "RGB" else encoded(shown, "PNG", compress_level=0),
    ]
    for data in files:
        read = decoded(data)
        assert read is not None
        assert np.array_equal(np.asarray(read), expected)


cells = st.one_of(
    st.text(st.characters() | st.sampled_from("./\\:\0\x1b\ud800"), max_size=20),
    st.sampled_from(["ok.png", "./ok.png", "../ok.png", "x" * 300, "a/" * 2500, "/dev/zero", ".", "pipe"]),
    bent(SEEDS["PNG"]),
)


@fuzzed(1)
@given(cells, st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_cell_of_a_picture_holds_it_is_read_or_refused(
    tmp_path: Path, cell: str | bytes, is_nested: bool
) -> None:
    (tmp_path / "ok.png").write_bytes(SEEDS["PNG"][4])
    if not (tmp_path / "pipe").exists():
        os.mkfifo(tmp_path / "pipe")
    value: Any = {"bytes": cell, "path": None} if isinstance(cell, bytes) else {"bytes": None, "path": cell}
    try:
        table = pa.table({"caption": ["c"], "image": [value if is_nested else cell]})
    except UnicodeEncodeError:  # Parquet holds no half of a pair
        return
    pq.write_table(table, tmp_path / "t.parquet")
    with within_limits():
        try:
            (record,) = DataSource(str(tmp_path / "t.parquet"), "train").records().table
        except VembedError as error:
            check_message(error)
        else:
            (found,) = record.positives
            assert found.read() == (cell if isinstance(cell, bytes) else (tmp_path / "ok.png").read_bytes())
        try:
            list(DataSource(str(tmp_path / "t.parquet"), "test").documents())
        except VembedError as error:
            check_message(error)
