"""Pictures of balls, and a tiny model of texts and pictures that knows them by heart."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

import PIL.Image
import PIL.ImageDraw
import torch
import torch.nn.functional as F  # noqa: N812

from vembed.batch import Image
from vembed.models.from_scratch import TinyClip, TinyClipConfig

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {"red": (210, 40, 40), "green": (40, 160, 70), "blue": (40, 70, 210), "yellow": (235, 200, 50)}


def caption(colour: str) -> str:
    return f"a {colour} ball"


def ball(colour: str, kind: str = "PNG", size: tuple[int, int] = (96, 64)) -> bytes:
    """Draw a ball on white."""
    picture = PIL.Image.new("RGB", size, "white")
    PIL.ImageDraw.Draw(picture).ellipse((size[0] // 4, 4, size[0] * 3 // 4, size[1] - 4), fill=COLOURS[colour])
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def bomb() -> bytes:
    """Return a PNG whose header promises 10^10 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + ball("red")[33:]


def write_balls(folder: Path) -> Path:
    """Write a ball of each colour: red.png, ..."""
    folder.mkdir(parents=True)
    for colour in COLOURS:
        (folder / f"{colour}.png").write_bytes(ball(colour))
    return folder


def make_clip(folder: Path) -> Path:
    """Write a model of texts and pictures that knows the balls by heart, so that the right one is certain."""
    torch.manual_seed(0)
    encoder = TinyClip(TinyClipConfig(dimension=32, image_size=32, channels=(16, 32), buckets=1024))
    texts = encoder.featurize([caption(colour) for colour in COLOURS], "query")
    pictures = encoder.featurize([Image(colour, ball(colour)) for colour in COLOURS], "document")
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)

    def scores() -> torch.Tensor:
        sides = []
        for features in (texts, pictures):
            rows = torch.arange(len(features)).numpy()
            sides.append(encoder(encoder.collate(features, rows, int(features.lengths.max()))))
        return sides[0] @ sides[1].T

    targets = torch.arange(len(COLOURS))
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(scores() * 20, targets).backward()
        optimizer.step()
    encoder.eval()
    with torch.no_grad():
        margins = scores().diagonal() - (scores() - 9 * torch.eye(len(COLOURS))).amax(dim=1)
    assert margins.min() > 0.2, f"the model knows each ball: {margins}"
    encoder.save(folder)
    return folder
