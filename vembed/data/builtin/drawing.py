"""Draw coloured shapes: what `builtin:shapes` is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import PIL.Image
import PIL.ImageDraw

if TYPE_CHECKING:
    from collections.abc import Iterable

SIDE = 64
"""Width and height of a picture, in pixels."""

OVERSAMPLING = 2
"""Pixels drawn for each pixel of a side: edges come out smooth."""

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
COLOURS = {
    "red": (214, 39, 40),
    "orange": (255, 140, 0),
    "yellow": (240, 210, 20),
    "green": (44, 150, 50),
    "blue": (30, 90, 220),
    "purple": (130, 50, 170),
    "pink": (245, 130, 190),
    "black": (20, 20, 20),
}
BACKGROUNDS = {"white": (255, 255, 255), "grey": (190, 190, 190), "beige": (238, 222, 190), "mint": (190, 240, 215)}
SIZES = {"small": 7, "large": 12}
"""Radius in pixels of the circle around a shape."""


@dataclass(frozen=True, slots=True)
class Spot:
    """One shape to draw: its centre and radius in pixels."""

    shape: str
    colour: str
    x: int
    y: int
    radius: int


def draw(spots: Iterable[Spot], background: str) -> PIL.Image.Image:
    """Return an RGB picture of `SIDE` x `SIDE` pixels.

    Args:
        spots: What to draw, the first one first.
        background: A key of `BACKGROUNDS`.
    """
    side = SIDE * OVERSAMPLING
    canvas = PIL.Image.new("RGB", (side, side), BACKGROUNDS[background])
    pen = PIL.ImageDraw.Draw(canvas)
    for spot in spots:
        _draw_shape(pen, spot, BACKGROUNDS[background])
    return canvas.reduce(OVERSAMPLING)


def _draw_shape(pen: PIL.ImageDraw.ImageDraw, spot: Spot, behind: tuple[int, int, int]) -> None:
    x, y, radius = (value * OVERSAMPLING for value in (spot.x, spot.y, spot.radius))
    fill = COLOURS[spot.colour]
    if spot.shape in {"circle", "ring"}:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        if spot.shape == "ring":
            hole = radius // 2
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=behind)
    elif spot.shape == "square":
        half = round(radius * 0.85)
        pen.rectangle((x - half, y - half, x + half, y + half), fill=fill)
    elif spot.shape == "cross":
        arm = radius // 3
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=fill)
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=fill)
    elif spot.shape == "triangle":
        pen.polygon(_corners(x, y, [radius] * 3), fill=fill)
    else:
        assert spot.shape == "star", spot.shape
        pen.polygon(_corners(x, y, [radius, round(radius * 0.4)] * 5), fill=fill)


def _corners(x: int, y: int, radii: list[int]) -> list[tuple[float, float]]:
    """Return corners at equal angles, the first one on top."""
    angles = (2 * math.pi * corner / len(radii) for corner in range(len(radii)))
    return [
        (x + radius * math.sin(angle), y - radius * math.cos(angle))
        for angle, radius in zip(angles, radii, strict=True)
    ]
