"""Pictures as files: what a header is refused for, and what pixels become. Every file here is written by Pillow."""

import os
import pickle
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from PIL import ImageFile
from PIL.PngImagePlugin import PngInfo

from vembed.batch import Image, ImageLimits, content_id
from vembed.data.images import FORMATS, ImageError, ImageHeader, check_image, decode_image, decode_images
from vembed.errors import DataError

LIMITS = ImageLimits()
RNG = np.random.default_rng(0)
NOISE = PIL.Image.fromarray(RNG.integers(0, 256, (40, 50, 3), dtype=np.uint8))


def encoded(picture: PIL.Image.Image, kind: str, **options: Any) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def image(data: bytes) -> Image:
    return Image("some.png", data)


def decoded(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    picture = decode_image(image(data), LIMITS)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that says it has a size, with a few bytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def webp_header(width: int, height: int) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + bytes(4) + sizes + bytes(20)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_header(width: int, height: int) -> bytes:
    data = bytearray(encoded(PIL.Image.new("P", (2, 2)), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def bmp_header(width: int, height: int) -> bytes:
    data = bytearray(encoded(PIL.Image.new("RGB", (2, 2)), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def gif_frame(width: int, height: int) -> bytes:
    """Return a GIF whose canvas is small, whose first frame is not, and which asks for that frame to be disposed of."""
    data = bytearray(encoded(PIL.Image.new("P", (2, 2)), "GIF", disposal=2, transparency=0))
    frame = data.index(b",", 13 + 3 * 2 ** ((data[10] & 7) + 1))
    assert struct.unpack_from("<4H", data, frame + 1) == (0, 0, 2, 2)
    struct.pack_into("<HH", data, frame + 5, width, height)
    return bytes(data)


def jpeg_header(width: int, height: int) -> bytes:
    data = bytearray(encoded(PIL.Image.new("RGB", (2, 2)), "JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def tiff_header(width: int, height: int) -> bytes:
    data = bytearray(encoded(PIL.Image.new("RGB", (2, 2)), "TIFF"))
    for tag, value in ((256, width), (257, height)):
        struct.pack_into("<HHII", data, data.index(struct.pack("<H", tag), 8), tag, 4, 1, value)
    return bytes(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_gives_its_header_and_its_pixels(kind: str, tmp_path: Path) -> None:
    # The name lies on purpose: the format is in the bytes.
    path = tmp_path / "picture.txt"
    options = {"lossless": True} if kind == "WEBP" else {}
    path.write_bytes(encoded(NOISE, kind, **options))
    file = Image(str(path))
    header = check_image(file, LIMITS)
    assert (header.format, header.width, header.height) == (kind, 50, 40)
    assert check_image(image(path.read_bytes()), LIMITS) == header
    pixels = np.asarray(decode_image(file, LIMITS))
    assert pixels.shape == (40, 50, 3)
    if kind in {"PNG", "WEBP", "BMP", "TIFF"}:
        assert (pixels == np.asarray(NOISE)).all()


@pytest.mark.parametrize(
    ("options", "mode"),
    [({}, "RGB"), ({"lossless": True}, "RGB"), ({"alpha": True, "lossless": True}, "RGBA"), ({"alpha": True}, "RGBA")],
)
def test_a_webp_header_read_by_hand_says_what_pillow_says(options: dict[str, bool], mode: str) -> None:
    picture = PIL.Image.new("RGBA", (300, 17), (1, 2, 3, 100)) if options.pop("alpha", False) else NOISE
    data = encoded(picture, "WEBP", **options)
    with PIL.Image.open(BytesIO(data)) as reference:
        expected = ImageHeader("WEBP", *reference.size, reference.mode)
    assert check_image(image(data), LIMITS) == expected
    assert expected.mode == mode


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture of a known format (PNG, JPEG, WEBP, GIF, BMP,"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no picture of a known format"),
        (b"\0" * 100, "no picture of a known format"),
        (encoded(NOISE, "ICO"), "no picture of a known format"),
        (encoded(NOISE, "PNG")[:20], "the header can't be read"),
        (encoded(NOISE, "JPEG")[:30], "the header can't be read"),
        (encoded(NOISE, "WEBP")[:60], "the header can't be read: the file is truncated at 60 bytes"),
        (encoded(NOISE, "WEBP")[:14], "the header can't be read"),
        (encoded(NOISE, "GIF")[:9], "the header can't be read"),
        (encoded(NOISE, "BMP")[:20], "the header can't be read"),
        (encoded(NOISE, "TIFF")[:10], "the header can't be read"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "the header can't be read"),
        (encoded(PIL.Image.new("F", (4, 4)), "TIFF"), "pixels of mode 'F' have no stated range"),
    ],
)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning")
def test_bytes_that_are_no_picture_are_refused_from_the_header(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "some.png"
    path.write_bytes(data)
    for broken in (image(data), Image(str(path))):
        for read in (check_image, decode_image):
            with pytest.raises(ImageError) as caught:
                read(broken, LIMITS)
            assert str(caught.value).startswith(f"{broken.path}: ")
            assert words in caught.value.reason
            assert isinstance(caught.value, DataError)
    assert check_image(image(encoded(NOISE, "PNG")), LIMITS).format == "PNG"


def test_a_path_that_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("none.png", "no such file"), ("", "not a regular file"), ("pipe", "not a regular file")):
        with pytest.raises(ImageError, match=words):
            check_image(Image(str(tmp_path / name)), LIMITS)


def test_caps_are_inclusive() -> None:
    data = encoded(NOISE, "PNG")
    decode_image(image(data), ImageLimits(max_pixels=2000, max_bytes=len(data)))
    with pytest.raises(ImageError, match=r"50 x 40 = 2,000 pixels are over the limit of 1,999.*max_image_pixels"):
        check_image(image(data), ImageLimits(max_pixels=1999))
    with pytest.raises(ImageError, match=rf"{len(data):,} bytes are over the limit of {len(data) - 1:,}"):
        check_image(image(data), ImageLimits(max_bytes=len(data) - 1))


BOMB = """
import resource, sys
from pathlib import Path
from vembed.batch import Image
from vembed.batch import ImageLimits
from vembed.data.images import ImageError, check_image, decode_image
check_image(Image(sys.argv[1]), ImageLimits())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    for read in (check_image, decode_image):
        try:
            read(Image(path), ImageLimits())
        except ImageError as error:
            assert "pixels are over the limit" in str(error), error
        else:
            raise AssertionError(path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_huge_picture_is_refused_from_its_header_with_flat_memory(tmp_path: Path) -> None:
    bombs = {
        "a.png": png_header(100_000, 100_000), "b.webp": webp_header(60_000, 60_000),
        "c.gif": gif_header(65_535, 65_535), "d.bmp": bmp_header(100_000, 100_000), "e.gif": gif_frame(13_000, 13_000),
        "f.jpg": jpeg_header(65_500, 65_500), "g.tif": tiff_header(100_000, 100_000),
    }  # fmt: skip
    for name, data in {**bombs, "small.png": encoded(NOISE, "PNG")}.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in ("small.png", *bombs)]
    done = subprocess.run([sys.executable, "-c", BOMB, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 * 1024, f"{done.stdout} KiB; one such picture has 10^10 pixels"


def test_a_cap_above_pillows_own_is_kept_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    data = png_header(20_000, 10_000)
    assert check_image(image(data), ImageLimits(max_pixels=200_000_000)).width == 20_000
    assert not recwarn.list
    with pytest.raises(ImageError, match="over the limit"):
        check_image(image(data), LIMITS)
    with pytest.raises(ImageError, match=r"over the limit of 178,956,970; make it smaller, or a PNG"):
        check_image(image(webp_header(20_000, 10_000)), ImageLimits(max_pixels=200_000_000))
    assert check_image(image(webp_header(10_000, 10_000)), ImageLimits(max_pixels=200_000_000)).height == 10_000


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_pixels_are_an_error_that_names_the_file(kind: str, tmp_path: Path) -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    data = encoded(NOISE, kind)
    path = tmp_path / "cut.png"
    for keep in (0.5, 0.9):
        path.write_bytes(data[: int(len(data) * keep)])
        with pytest.raises(ImageError) as caught:
            decode_image(Image(str(path)), LIMITS)
        assert str(caught.value).startswith(f"{path}: the ")
    path.write_bytes(data)
    assert decode_image(Image(str(path)), LIMITS).size == (50, 40)


def test_transparency_is_put_on_white() -> None:
    clear_red = PIL.Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half_red = PIL.Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert (decoded(encoded(clear_red, "PNG")) == 255).all()
    assert tuple(decoded(encoded(half_red, "PNG"))[0, 0]) == (255, 127, 127)
    assert (decoded(encoded(PIL.Image.new("LA", (4, 4), (0, 0)), "PNG")) == 255).all()
    palette = PIL.Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert tuple(decoded(encoded(palette, "PNG"))[0, 0]) == (10, 20, 30)
    assert (decoded(encoded(palette, "PNG", transparency=1)) == 255).all()
    assert (decoded(encoded(palette, "PNG", transparency=0)) == (10, 20, 30)).all()
    assert (decoded(encoded(PIL.Image.new("RGB", (4, 4), (9, 8, 7)), "PNG", transparency=(9, 8, 7))) == 255).all()
    assert (decoded(encoded(clear_red, "WEBP", lossless=True, exact=True)) == 255).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_clipped(kind: str) -> None:
    values = np.array([[0, 255, 257, 32_768, 65_278, 65_535]], dtype=np.uint16)
    data = encoded(PIL.Image.fromarray(values), kind)
    assert check_image(image(data), LIMITS).mode == "I;16"
    pixels = decoded(data)
    assert pixels[0, :, 0].tolist() == [0, 1, 1, 128, 254, 255]
    assert (pixels[..., 0] == pixels[..., 1]).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_grey_that_a_file_declares_transparent_is_white_in_every_depth(bits: int) -> None:
    """Written by hand: Pillow writes no grey of 2 or 4 bits. Source: PNG specification, 11.3.2.1 and 13.12."""
    top = 2**bits - 1
    greys = sorted({0, 1, top // 2, top})
    digits = "".join(f"{grey:0{bits}b}" for grey in greys)
    digits += "0" * (-len(digits) % 8)
    row = bytes([0]) + int(digits, 2).to_bytes(len(digits) // 8, "big")  # 0: the row isn't filtered

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", len(greys), 1, bits, 0, 0, 0, 0))
    for transparent in greys:
        body = chunk(b"tRNS", struct.pack(">H", transparent)) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
        pixels = decoded(b"\x89PNG\r\n\x1a\n" + header + body)[0, :, 0].tolist()
        assert pixels == [255 if grey == transparent else round(grey * 255 / top) for grey in greys], transparent


def test_a_picture_that_is_written_over_has_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "some.bmp"  # without compression: both have one size
    for colour in ("red", "blue"):
        PIL.Image.new("RGB", (8, 8), colour).save(path)
        os.utime(path, ns=(0, len(colour)))
        assert content_id(Image(str(path))) == content_id(Image("in memory", path.read_bytes()))


def test_transparent_grey_of_sixteen_bits_is_white() -> None:
    values = np.array([[0, 40_000]], dtype=np.uint16)
    data = encoded(PIL.Image.fromarray(values), "PNG", transparency=0)
    assert decoded(data)[0, :, 0].tolist() == [255, 156]


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
    ],
)
def test_other_kinds_of_pixels_become_rgb(mode: str, value: Any, expected: tuple[int, int, int]) -> None:
    data = encoded(PIL.Image.new(mode, (4, 4), value), "TIFF")
    assert check_image(image(data), LIMITS).mode == mode
    assert (decoded(data) == expected).all()


def test_a_cmyk_jpeg_has_its_colours() -> None:
    data = encoded(PIL.Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert check_image(image(data), LIMITS).mode == "CMYK"
    assert np.abs(decoded(data).astype(int) - (255, 0, 0)).max() < 12


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_turns_a_picture_upright(kind: str) -> None:
    upright = PIL.Image.new("RGB", (32, 16), "white")
    upright.paste("black", (0, 0, 16, 16))  # the left half
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # stored turned: to be shown, turn 90 degrees clockwise
    data = encoded(upright.transpose(PIL.Image.Transpose.ROTATE_90), kind, exif=exif)
    pixels = decoded(data)
    assert pixels.shape == (16, 32, 3)
    assert pixels[:, :12].mean() < 20
    assert pixels[:, 20:].mean() > 235


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_with_broken_exif_is_shown_as_it_is_stored(kind: str) -> None:
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(NOISE, kind, exif=b"Exif\0\0no header of EXIF", **lossless)
    assert (decoded(data) == decoded(encoded(NOISE, kind, **lossless))).all()
    if kind == "PNG":  # broken pixels are still refused
        with pytest.raises(ImageError, match="can't be decoded: image file is truncated"):
            decoded(data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_is_taken(kind: str) -> None:
    frames = [PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with PIL.Image.open(BytesIO(data)) as reference:
        assert getattr(reference, "n_frames", 1) == 3
    assert np.abs(decoded(data).astype(int) - (255, 0, 0)).max() < 3


def test_a_text_bomb_in_a_picture_is_refused() -> None:
    info = PngInfo()
    info.add_text("comment", "x" * 80_000_000, zip=True)
    data = encoded(NOISE, "PNG", pnginfo=info)
    assert len(data) < 200_000
    with pytest.raises(ImageError, match="the header can't be read"):
        check_image(image(data), LIMITS)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_many_pictures_keep_their_order_and_the_first_error_names_its_file(num_threads: int) -> None:
    images = [Image(f"{n}.png", encoded(PIL.Image.new("RGB", (n + 1, 300 - n)), "PNG")) for n in range(40)]
    assert [picture.width for picture in decode_images(images, LIMITS, num_threads)] == list(range(1, 41))
    assert decode_images([], LIMITS, num_threads) == []
    images[30] = Image("later.png", b"")
    images[7] = Image("first.png", encoded(NOISE, "PNG")[:-300])
    with pytest.raises(ImageError, match=r"first\.png: the PNG can't be decoded"):
        decode_images(images, LIMITS, num_threads)


def test_a_picture_in_memory_goes_to_other_processes() -> None:
    image = Image("shapes/0", memoryview(b"encoded"))
    assert pickle.loads(pickle.dumps(image)) == Image("shapes/0", b"encoded")
