"""What every encoder of pictures does around its own processor: decode in blocks, and count patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import torch

from vembed.batch import Image
from vembed.data.images import decode_images

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Item
    from vembed.data.images import Background, ImageLimits

PATCH_MASK = "pixel_attention_mask"
"""Which patches of a picture are its own, (n, patches), from processors that keep a picture's shape."""

DECODED_AT_ONCE = 32
"""Pictures that stand decoded in memory at full size; a photograph takes some 40 MB."""


def pictures_of(items: Sequence[Item]) -> list[Image]:
    """Return items that must be pictures.

    Raises:
        TypeError: One is a text: the caller sorted them wrongly.
    """
    images = [item for item in items if isinstance(item, Image)]
    if len(images) != len(items):
        raise TypeError(f"{len(items) - len(images)} of {len(items)} items are texts where pictures are expected")
    return images


def process_pictures(
    images: Sequence[Image],
    process: Callable[[list[PIL.Image.Image]], dict[str, NDArray[Any]]],
    limits: ImageLimits,
    background: Background = "white",
    *,
    own_mode: bool = False,
) -> dict[str, NDArray[Any]]:
    """Decode pictures and process them, block by block.

    Args:
        process: Turns decoded pictures into arrays by name, each (number of pictures, ...).
        background: What stands behind transparent parts.
        own_mode: Whether `process` converts pictures itself that no background has made RGB.

    Returns:
        The arrays of all pictures, (n, ...), in the order given.

    Raises:
        DataError: A picture can't be decoded or is over the limits.
    """
    parts = []
    for start in range(0, len(images), DECODED_AT_ONCE):
        block = images[start : start + DECODED_AT_ONCE]
        pictures = decode_images(block, limits, torch.get_num_threads(), background)
        parts.append(process(pictures if own_mode else [picture.convert("RGB") for picture in pictures]))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def run_processor(processor: Any, pictures: list[PIL.Image.Image]) -> dict[str, NDArray[Any]]:
    """Run an image processor of transformers; what it makes depends on the model, at least `pixel_values`."""
    made = processor(images=pictures, return_tensors="pt")
    return {name: tensor.numpy() for name, tensor in made.items()}


def picture_lengths(pixel_values: NDArray[Any], patch_size: int) -> NDArray[np.int64]:
    """Return what each picture costs in tokens, (n,): its patches and one more that sums them up.

    Args:
        pixel_values: Pictures (n, 3, height, width), or already cut into patches (n, patches, values).
    """
    if pixel_values.ndim == 3:
        patches = pixel_values.shape[1]
    else:
        patches = (pixel_values.shape[2] // patch_size) * (pixel_values.shape[3] // patch_size)
    return np.full(len(pixel_values), patches + 1, dtype=np.int64)


def own_lengths(arrays: Mapping[str, NDArray[Any]], patch_size: int) -> NDArray[np.int64]:
    """Return what each picture costs in tokens, (n,), where pictures may be cut into unequal numbers of patches.

    Args:
        arrays: What the processor made of n pictures; with a mask of patches where it padded them to one number.
    """
    if PATCH_MASK not in arrays:
        return picture_lengths(arrays["pixel_values"], patch_size)
    return np.asarray(arrays[PATCH_MASK].sum(axis=1), dtype=np.int64) + 1


def without_padding(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut off the patches that no picture of a chunk has: a processor pads each picture to the most that it allows."""
    if PATCH_MASK not in inputs:
        return inputs
    longest = int(inputs[PATCH_MASK].sum(dim=1).max())
    return inputs | {name: inputs[name][:, :longest] for name in (PATCH_MASK, "pixel_values")}


def rows_of(values: NDArray[Any], rows: NDArray[np.int64]) -> Tensor:
    """Return some rows as a tensor. Rows that stand one after the other are seen, not copied.

    Pictures of one length stand so in a chunk: no pixel is copied on the CPU, and memory that is pinned for an
    accelerator stays so.
    """
    if len(rows) and bool((np.diff(rows) == 1).all()):
        return torch.from_numpy(values[int(rows[0]) : int(rows[-1]) + 1])
    return torch.from_numpy(values[rows])


def blank_picture() -> PIL.Image.Image:
    """Return a picture to ask a processor with how large what it makes is."""
    return PIL.Image.new("RGB", (64, 64))
