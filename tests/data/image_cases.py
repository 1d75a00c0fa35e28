"""Pictures for the data tests."""

from __future__ import annotations

from io import BytesIO

import PIL.Image


def png(colour: str = "red", size: tuple[int, int] = (6, 4)) -> bytes:
    """Return the bytes of a picture of one colour."""
    buffer = BytesIO()
    PIL.Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()
