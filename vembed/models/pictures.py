"""Steps of every encoder of pictures around its model's own processor: decode in blocks, normalise, count patches.

1. Files are decoded and converted block by block, so that few pictures stand in memory at full size.
2. The processor resizes and crops them. Its last steps, from bytes to float32, are left out where they can be.
3. Pixels are bytes until they are on the device, a quarter of the float32 that the processor would make of them. There
   `normalised` makes the same float32.

Shape legend: n pictures, S side in pixels, P patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import torch

from vembed.batch import modality_of, pictures_in
from vembed.data.images import decode_images
from vembed.errors import ConfigError
from vembed.models.checked_files import unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Background, Image, ImageLimits, Item

PATCH_MASK = "pixel_attention_mask"
"""Which patches of a picture are its own, (n, patches), from processors that keep a picture's shape."""

ASSUMED_PATCH_SIZE = 16
"""In pixels, for image towers that don't say one, as convolutional ones."""

SAME_PIXELS = 1e-6
"""Most that two ways to normalise a pixel differ by where only rounding does: some float32 steps of values up to 3."""

DECODED_AT_ONCE = 32
"""Pictures that stand decoded in memory at full size; a photograph takes some 40 MB."""


def pictures_of(items: Sequence[Item]) -> list[Image]:
    """Return items that must be one picture each.

    Raises:
        TypeError: One has a text, or several pictures: the caller sorted them wrongly.
    """
    pictures = [list(pictures_in([item])) for item in items if modality_of(item) == "image"]
    images = [several[0] for several in pictures if len(several) == 1]
    if len(images) != len(items):
        raise TypeError(f"{len(items) - len(images)} of {len(items)} items aren't one picture, as expected")
    return images


def process_pictures(
    images: Sequence[Image],
    process: Callable[[list[PIL.Image.Image]], dict[str, NDArray[Any]]],
    limits: ImageLimits,
    background: Background,
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
    num_blocks = -(-len(images) // DECODED_AT_ONCE)
    # Of equal sizes, so that none of several pictures is alone: LLaVA-OneVision cuts a single one up.
    for indices in np.array_split(np.arange(len(images)), num_blocks):
        block = [images[index] for index in indices]
        pictures = decode_images(block, limits, torch.get_num_threads(), background)
        parts.append(process(pictures if own_mode else [picture.convert("RGB") for picture in pictures]))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True, slots=True)
class Normalisation:
    """The step from bytes to float32: (value / divisor - mean) / std for each channel, in this order."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    divisor: float = 1.0

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the float32 of pixels in one of three layouts.

        Args:
            pixels: Pictures (n, channels, S, S), their patches (n, P, values), or those of all end to end, (P, values).
        """
        x = pixels.to(torch.float32)  # a tensor of its own: all that follows works in place
        if self.divisor != 1.0:
            x.div_(self.divisor)
        # The numbers of a channel are scalars of the operations: as a tensor they would have to be sent to the device.
        if len(set(self.mean)) == len(set(self.std)) == 1:
            return x.sub_(self.mean[0]).div_(self.std[0])
        by_channel, dim = x, 1
        if x.ndim == 2:  # Qwen's patches hold one channel after the other
            by_channel = x.unflatten(-1, (len(self.mean), -1))
        elif x.ndim == 3:  # in SigLIP 2's the channels of a pixel stand side by side
            by_channel, dim = x.unflatten(-1, (-1, len(self.mean))), -1
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            by_channel.select(dim, channel).sub_(mean).div_(std)
        return x


def normalised(inputs: Mapping[str, Tensor], normalisation: Normalisation | None) -> Tensor:
    """Return the pixels of a call as the processor alone makes them; what isn't bytes is so already."""
    pixels = inputs["pixel_values"]
    if normalisation is None or pixels.is_floating_point():
        return pixels
    x = normalisation(pixels)
    # A processor pads with zeros after it has normalised: padding that was normalised here is put back to zero.
    return x.mul_(inputs[PATCH_MASK].unsqueeze(-1)) if PATCH_MASK in inputs else x


def last_step(processor: Any, name: str) -> Normalisation | None:
    """Return the last step of a processor of transformers, to pixels that are bytes; None where they aren't.

    It is tried on a picture of noise: only a step that gives the processor's own pixels is returned.

    Raises:
        ConfigError: The processor of the model `name` can read no picture.
    """
    names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    if any(getattr(processor, name, None) is None for name in names) or getattr(processor, "do_pad", False):
        return None
    # (x * factor - mean) / std = (x - mean / factor) / (std / factor): two operations in place of three, and the
    # products in float32 and in this order, as torchvision's processors fuse them.
    rescale = torch.tensor(1.0 / processor.rescale_factor if processor.do_rescale else 1.0)
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
    fused = [tuple((torch.tensor(numbers).expand(3) * rescale).tolist()) for numbers in (mean, std)]
    step = Normalisation(mean=fused[0], std=fused[1])
    noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    try:
        wanted, made = (
            run_processor(processor, [PIL.Image.fromarray(noise)], in_bytes=in_bytes) for in_bytes in (False, True)
        )
    except Exception as error:  # of the library, about a setting in the model's files
        raise unreadable(name, "image", error) from error
    # DINOv3's rescales before it resizes: its pixels are never whole numbers, and rounding would change them. The same
    # holds for one that pads pictures after all else.
    if made["pixel_values"].dtype != np.uint8:
        return None
    tensors = {name: torch.from_numpy(values) for name, values in made.items()}
    expected = torch.from_numpy(wanted["pixel_values"]).float()
    return step if torch.allclose(normalised(tensors, step), expected, rtol=0, atol=SAME_PIXELS) else None


def until_bytes(preprocess: Any) -> tuple[Callable[[PIL.Image.Image], Any], Normalisation | None]:
    """Return a pipeline of torchvision up to bytes (3, side, side) and its last step; else the whole and None."""
    from torchvision.transforms import Compose, Normalize, ToTensor

    steps: Sequence[Any] = getattr(preprocess, "transforms", ())
    if len(steps) < 2 or not isinstance(steps[-2], ToTensor) or not isinstance(steps[-1], Normalize):
        return preprocess, None
    before, last = Compose(steps[:-2]), steps[-1]

    def in_bytes(picture: PIL.Image.Image) -> NDArray[np.uint8]:
        return np.asarray(before(picture)).transpose(2, 0, 1)

    return in_bytes, Normalisation(tuple(last.mean), tuple(last.std), divisor=255.0)


def run_processor(
    processor: Any, pictures: list[PIL.Image.Image], *, in_bytes: bool = False
) -> dict[str, NDArray[Any]]:
    """Run an image processor of transformers; what it makes depends on the model, at least `pixel_values`.

    Args:
        in_bytes: Whether the last step, from bytes to float32, is left to the device.
    """
    options = {"do_rescale": False, "do_normalize": False} if in_bytes else {}
    made = processor(images=pictures, return_tensors="pt", **options)
    return {name: tensor.numpy() for name, tensor in made.items()}


def picture_lengths(pixel_values: NDArray[Any], patch_size: int) -> NDArray[np.int64]:
    """Return what each picture costs in tokens, (n,): its patches and one more that sums them up.

    Args:
        pixel_values: Pictures (n, 3, height, width), or already cut into patches (n, patches, values).
    """
    if pixel_values.ndim == 3:  # cut already, as SigLIP 2's
        patches = pixel_values.shape[1]
    else:  # what is left over at the edges makes no patch
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
    # Of the chunk, on the CPU: rows are sorted by length, so that a chunk's pictures have about as many patches.
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


def side_of(size: Any) -> int:
    """Return the side of a square, in pixels, that a config states as a number or as a pair."""
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def blank_picture() -> PIL.Image.Image:
    """Return a picture to ask a processor with how large what it makes is."""
    return PIL.Image.new("RGB", (64, 64))


def sample_pixels(name: str, processor: Any) -> NDArray[Any]:
    """Return what an image processor of transformers makes of a blank picture, and of any other in the same size.

    Raises:
        ConfigError: The size depends on the shape of a picture.
    """
    square, wide = (
        run_processor(processor, [PIL.Image.new("RGB", size)])["pixel_values"] for size in ((64, 64), (64, 32))
    )
    if square.shape != wide.shape:
        sizes = [" x ".join(map(str, pixels.shape[2:])) for pixels in (square, wide)]
        raise ConfigError(
            f"{name}: by its preprocessor_config.json a square picture becomes {sizes[0]} pixels and a wide one "
            f"{sizes[1]}, but the pictures of a batch must have one size; set do_center_crop: true there, or a size "
            f"of height and width"
        )
    return square


def blank_png() -> bytes:
    """Return such a picture as the bytes of a file."""
    buffer = BytesIO()
    blank_picture().save(buffer, "PNG")
    return buffer.getvalue()


def refuse_less_than_a_patch(name: str, pixel_values: NDArray[Any], vision_config: Any) -> None:
    """Refuse pictures that a tower can't cut a single patch out of.

    Args:
        pixel_values: What a processor makes of a picture.

    Raises:
        ConfigError: A side is shorter than a patch.
    """
    patch = getattr(vision_config, "patch_size", None)
    if isinstance(patch, int) and pixel_values.ndim == 4 and min(pixel_values.shape[2:]) < patch:
        made = " x ".join(map(str, pixel_values.shape[2:]))
        raise ConfigError(
            f"{name}: its preprocessor_config.json makes pictures of {made} pixels, less than one of its patches of "
            f"{patch}: it is damaged or of another model. Copy the folder again"
        )


def refuse_other_size(name: str, pixel_values: NDArray[Any], vision_config: Any) -> None:
    """Refuse pictures of another size than a tower has positions for.

    Args:
        pixel_values: What a processor makes of a picture.

    Raises:
        ConfigError: They don't fit together.
    """
    side = getattr(vision_config, "image_size", None)
    wanted = (side, side) if isinstance(side, int) else tuple(side or ())
    if pixel_values.ndim == 4 and wanted and pixel_values.shape[2:] != wanted:
        made = " x ".join(map(str, pixel_values.shape[2:]))
        raise ConfigError(
            f"{name}: its preprocessor_config.json makes pictures of {made} pixels, and its config.json says "
            f"{' x '.join(map(str, wanted))}: one is damaged or of another model. Copy the folder again"
        )
