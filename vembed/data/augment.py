"""Change pictures at random for training: each in its own way in each epoch, and always in the same one.

1. `augmented_record` gives every picture of a record an `Augmentation`, whose seed is a function of the run's seed, the
   epoch, the record's row and the picture's place in the record: never of the batch, the process or the worker.
2. Resumed runs and any number of workers so see the same pictures: a seed is a hash of (seed, epoch, row, slot), and no
   generator is shared. A further picture of one item adds its number, so that the first has the seed of an item alone.
3. `decode_image` calls `augmented` on the decoded picture, before the model's own processor sees it. An `Augmentation`
   is part of an `Image`'s equality, so nothing that is kept by `Image` mixes two of them up.

A window is cut out of the picture, turned about its middle, and its colours go through one matrix. What the window
shows beyond the edge gets the median colour of the edge: white stays white behind a drawing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageFilter
import PIL.ImageStat

from vembed.batch import Composed

if TYPE_CHECKING:
    from vembed.batch import Augmentation, Image, Item, Strength
    from vembed.data.table import Record

LEAST_SIDE = 640
"""Pixels that the shorter side of a large picture keeps at least when it is reduced by a whole factor, before anything
else: what follows costs time by the pixel, and no processor makes more of it than that."""

SMALL_SIDE = 256
"""Shorter side of a window, in pixels, up to which a turned one is sampled with care."""

_GREY = np.tile([0.213, 0.715, 0.072], (3, 1))
"""Makes each channel the luminance."""

_QUARTER_TURN = np.array([[-0.213, -0.715, 0.928], [0.143, 0.140, -0.283], [-0.787, 0.715, 0.072]])
"""Turns the hue by 90 degrees, once the luminance is taken away."""


class _Ranges(NamedTuple):
    """Ranges from which an augmentation draws evenly."""

    area: tuple[float, float] = (1.0, 1.0)  # least and most area of the window, in areas of the picture
    overhang: float = 0.0  # most that the window stands over an edge, in sides of the window
    degrees: float = 0.0  # most that it is turned, to either side
    brightness: float = 0.0  # most that the factor of brightness differs from 1
    contrast: float = 0.0  # the same of contrast
    saturation: float = 0.0  # the same of saturation
    hue: float = 0.0  # most that the hue is turned, to either side, in parts of the circle
    grey: float = 0.0  # share of pictures that lose all colour
    blur: float = 0.0  # share of pictures that are blurred
    blur_radius: float = 0.0  # most standard deviation of the blur, in shorter sides of the window


_RANGES: dict[Strength, _Ranges] = {
    "light": _Ranges(area=(0.8, 1.0), overhang=0.04),
    "strong": _Ranges(
        area=(0.6, 1.2),
        overhang=0.08,
        degrees=15.0,
        brightness=0.3,
        contrast=0.3,
        saturation=0.5,
        hue=0.05,
        grey=0.1,
        blur=0.2,
        blur_radius=0.01,
    ),
}


def augmented_record(record: Record, augmentation: Augmentation, *, row: int, epoch: int) -> Record:
    """Return a record whose pictures are changed when they are decoded.

    Args:
        augmentation: That of the run.
        row: Number of the record in the training records.
    """
    if not augmentation.acts:
        return record

    def changed(image: Image, *place: int) -> Image:
        path = [augmentation.seed, epoch, row, *place]
        seed = np.random.SeedSequence(path).generate_state(1, np.uint64)[0]
        return replace(image, augmentation=replace(augmentation, seed=int(seed)))

    items: list[Item] = []
    for slot, item in enumerate((record.query, *record.positives, *record.negatives)):
        if isinstance(item, Composed):
            first, *more = item.images
            further = [changed(image, slot, number) for number, image in enumerate(more, start=1)]
            items.append(replace(item, images=(changed(first, slot), *further)))
        else:
            items.append(item if isinstance(item, str) else changed(item, slot))
    query, *documents = items
    num_positives = len(record.positives)
    return replace(
        record,
        query=query,
        positives=tuple(documents[:num_positives]),
        negatives=tuple(documents[num_positives:]),
    )


def augmented(picture: PIL.Image.Image, augmentation: Augmentation) -> PIL.Image.Image:
    """Change an RGB picture; the result may have another size.

    The seed fixes every draw, and draws are made in a fixed order: a new kind of change draws last, or the pictures of
    resumed runs would change.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(augmentation.seed)))
    # Without `flip` nothing is drawn for it: the same seed then gives another window.
    if augmentation.flip and generator.random() < 0.5:
        picture = picture.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    if augmentation.strength == "none":
        return picture
    ranges = _RANGES[augmentation.strength]
    factor = min(picture.size) // LEAST_SIDE
    window = _window(picture.reduce(factor) if factor > 1 else picture, ranges, generator)
    return _recoloured(window, ranges, generator)


def _window(picture: PIL.Image.Image, ranges: _Ranges, generator: np.random.Generator) -> PIL.Image.Image:
    """Cut a window out of a picture, turned about its own middle, without changing the scale."""
    scale = math.sqrt(generator.uniform(*ranges.area))
    angle = math.radians(generator.uniform(-ranges.degrees, ranges.degrees))
    offsets = generator.uniform(-1, 1, size=2).tolist()
    width, height = (max(1, round(side * scale)) for side in picture.size)
    # Its left and upper edge: inside as far as the window fits, and beyond by the overhang.
    left, top = (
        (side - extent) / 2 + offset * (abs(side - extent) / 2 + ranges.overhang * extent)
        for side, extent, offset in zip(picture.size, (width, height), offsets, strict=True)
    )
    # The median, not the mean, of the outermost pixels: a line that touches the edge doesn't tint a white background.
    pixels = np.asarray(picture)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    red, green, blue = (int(value) for value in np.median(edge, axis=0))
    fill = red, green, blue
    if not angle:  # whole pixels need no sampling
        window = PIL.Image.new("RGB", (width, height), fill)
        window.paste(picture, (-round(left), -round(top)))
        return window
    # Pillow asks which point of the picture a point of the window shows: the one turned about the window's middle.
    cosine, sine = math.cos(angle), math.sin(angle)
    matrix = (
        cosine,
        sine,
        left + width / 2 - (cosine * width + sine * height) / 2,
        -sine,
        cosine,
        top + height / 2 - (cosine * height - sine * width) / 2,
    )
    # Bicubic takes twice the time; the processor will shrink what is large, and then the two look alike.
    resample = PIL.Image.Resampling.BICUBIC if min(width, height) <= SMALL_SIDE else PIL.Image.Resampling.BILINEAR
    return picture.transform((width, height), PIL.Image.Transform.AFFINE, matrix, resample=resample, fillcolor=fill)


def _recoloured(picture: PIL.Image.Image, ranges: _Ranges, generator: np.random.Generator) -> PIL.Image.Image:
    """Blur a picture or not, and change its colours by one matrix.

    Source: the matrices `saturate` and `hueRotate` of W3C Filter Effects Module Level 1, section 9.6; brightness and
    contrast (about the mean grey) as factors on top.
    """
    # All is drawn, and then used or not: which changes a strength has doesn't move the draws of the others.
    brightness, contrast, saturation, hue = generator.uniform(-1, 1, size=4).tolist()
    blur, blur_radius, grey = generator.random(3).tolist()
    if blur < ranges.blur:
        picture = picture.filter(PIL.ImageFilter.GaussianBlur(blur_radius * ranges.blur_radius * min(picture.size)))
    if not any((ranges.brightness, ranges.contrast, ranges.saturation, ranges.hue, ranges.grey)):
        return picture
    factor = 0.0 if grey < ranges.grey else 1 + ranges.saturation * saturation
    angle = 2 * math.pi * ranges.hue * hue
    colour = factor * (math.cos(angle) * (np.eye(3) - _GREY) + math.sin(angle) * _QUARTER_TURN)
    about = PIL.ImageStat.Stat(picture.convert("L")).mean[0]
    contrast = 1 + ranges.contrast * contrast
    matrix = np.concatenate([contrast * (_GREY + colour), np.full((3, 1), (1 - contrast) * about)], axis=1)
    return picture.convert("RGB", tuple(((1 + ranges.brightness * brightness) * matrix).ravel().tolist()))
