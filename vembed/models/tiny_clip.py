"""A small encoder of texts and pictures, trained from scratch on a CPU in a minute or two.

Pictures go through a few convolutions, each followed by a pool that halves the side, and one linear layer that sees
where things are; texts through the bag of hashed n-grams. Both end in one space. Groups of channels are normalised,
never batches: a batch norm would see chunks instead of batches, and gradient caching would no longer be exact.

Shape legend: R rows of a chunk, C channels, S side in pixels, E embedding dim.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import PIL.Image
import torch
from pydantic import Field
from torch import Tensor, nn

from vembed.batch import Features
from vembed.errors import ConfigError
from vembed.models.checked_files import read_json, read_settings
from vembed.models.composed import TwoTowers
from vembed.models.encoder import About
from vembed.models.hub import save_weights
from vembed.models.pictures import process_pictures, rows_of
from vembed.models.plannable import Tower, TowerInputs, picture_inputs
from vembed.models.pooling import unit
from vembed.models.tables import SAMPLE_PIECES, NgramBag, NgramBagConfig, Size, grams_without_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Image, Side
    from vembed.models.hub import ModelFiles

CONFIG_FILE = "vembed_tiny_clip.json"

PATCH_SIDE = 8
"""A picture costs one token for each square of so many pixels a side."""

GRAMS_PER_TOKEN = 16
"""A text costs one token for so many n-grams, about those of one word."""

NORM_GROUPS = 8
"""Groups of channels that are normalised together."""

ARCHITECTURE = 2
"""Written beside the weights; grows when the same weights would no longer mean the same."""

CACHED_PICTURES = 8192
"""Resized pictures that are kept from one epoch to the next: 100 MB at 64 pixels a side."""

VALUES_PER_OUTPUT = 7
"""Values that backward keeps for each output of a block: the four that were pooled, the largest of them and its place,
and what is behind the activation."""


@dataclass(frozen=True, slots=True)
class TinyClipConfig:
    """Shape of the encoder."""

    dimension: Size = 256
    image_size: Annotated[int, Field(ge=1, le=1 << 12)] = 64  # side to which pictures are resized, in pixels
    # Side of the squares that become one place each in the first block, in pixels; even.
    patch_size: Annotated[int, Field(ge=2, le=1 << 12)] = 4
    # Of each block; the side halves in each but the first.
    channels: Annotated[tuple[Size, ...], Field(min_length=1, max_length=16)] = (32, 96, 192)
    buckets: Size = 1 << 14  # rows of the n-gram table
    max_words: Size = 64  # words of a text that count; the rest is cut

    def __post_init__(self) -> None:
        if self.patch_size % 2:
            raise ValueError(f"patch_size {self.patch_size} is odd; the pool of the first block halves it")

    @property
    def sides(self) -> tuple[int, ...]:
        """Side of what comes out of each block."""
        first = self.image_size // self.patch_size
        return tuple(math.ceil(first / 2**index) for index in range(len(self.channels)))


class TinyClip(TwoTowers):
    """The encoder."""

    about = About(
        models="A small CLIP, from scratch",
        decides="builtin:tiny-clip",
        pooling="each tower's own",
        prompts="none",
        trainable="all, text, vision",
        writes="vembed",
    )
    builtin = "tiny-clip"
    marker = CONFIG_FILE
    modes = MappingProxyType({"clip": frozenset()})
    reads = frozenset({"image_background"})
    text_inputs = frozenset({"grams", "offsets", "rows"})

    def __init__(self, config: TinyClipConfig, *, name: str = "builtin:tiny-clip") -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.dimension = config.dimension
        self.max_length = config.max_words
        self.picture_tokens = math.ceil(config.image_size / PATCH_SIDE) ** 2
        bag = NgramBagConfig(dimension=config.dimension, buckets=config.buckets, max_words=config.max_words)
        self.text = NgramBag(bag, name=name)
        self.vision = _vision_tower(config)
        self._pixels: OrderedDict[Image, NDArray[np.uint8]] = OrderedDict()

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> TinyClip:  # noqa: ARG003
        """Load what `save` wrote, or build a new one.

        Raises:
            ConfigError: Another version of vembed wrote it.
        """
        config = TinyClipConfig() if files.folder is None else _read_config(files.folder / CONFIG_FILE)
        return files.load_module(lambda: cls(config, name=files.name))

    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        """Hash the n-grams of texts; what a word makes costs a token."""
        features = self.text.featurize(texts, side)
        tokens = np.ceil(features.lengths / GRAMS_PER_TOKEN).astype(np.int64)
        return replace(features, lengths=np.minimum(tokens, self.config.max_words))

    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        """Decode and resize pictures."""
        lengths = np.full(len(images), self.picture_tokens, dtype=np.int64)
        return Features({}, lengths, {"pixels": self._pixels_of(images)})

    def activation_values(self) -> float:
        """Share what backward keeps of a picture out over its tokens. A text's token keeps far less."""
        outputs = sum(
            channels * side**2 for channels, side in zip(self.config.channels, self.config.sides, strict=True)
        )
        values = 3 * self.config.image_size**2 + VALUES_PER_OUTPUT * outputs
        return math.ceil(values / self.picture_tokens)

    def _pixels_of(self, images: Sequence[Image]) -> NDArray[np.uint8]:
        """Return the resized pictures, (n, S, S, 3). Those that came lately are kept: they come back in every epoch."""
        found = {image: self._pixels[image] for image in dict.fromkeys(images) if image in self._pixels}
        missing = [image for image in dict.fromkeys(images) if image not in found]
        if missing:
            made = process_pictures(missing, self._resized, self.image_limits, self.image_background)
            found |= dict(zip(missing, made["pixels"], strict=True))
        for image, pixels in found.items():
            if image.augmentation is None:  # one that is changed doesn't come back
                self._pixels[image] = pixels
                self._pixels.move_to_end(image)
        while len(self._pixels) > CACHED_PICTURES:
            self._pixels.popitem(last=False)
        return np.stack([found[image] for image in images])

    def _resized(self, pictures: list[PIL.Image.Image]) -> dict[str, NDArray[Any]]:
        """Resize pictures; Pillow averages over what it leaves out."""
        size = (self.config.image_size, self.config.image_size)
        resized = [np.asarray(picture.resize(size, PIL.Image.Resampling.BICUBIC)) for picture in pictures]
        return {"pixels": np.stack(resized)}

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Pack the rows of texts one after the other, or take the rows of pictures, or both; neither is padded."""
        inputs = {name: rows_of(values, rows) for name, values in features.per_row.items()}
        return inputs | self.text.collate(features, rows, width) if features.columns else inputs

    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean of each row's n-grams."""
        x: Tensor = self.text(inputs)
        return x

    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return what the convolutions make of pixels (R, S, S, 3), 0 to 255."""
        pixels_RSS3 = inputs["pixels"].to(next(self.vision.parameters()).dtype)
        x = (pixels_RSS3 / 127.5 - 1).permute(0, 3, 1, 2)
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            x = x.contiguous()  # channels last is faster in float32 but takes half as long again in bfloat16
        return unit(self.vision(x))

    def save(self, folder: Path) -> None:
        """Write shape and weights; only vembed loads this family."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"architecture": ARCHITECTURE, **asdict(self.config)}
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        save_weights(self, folder)

    def facts(self) -> dict[str, str]:
        """Return its shape."""
        return {
            "pictures": f"{self.config.image_size} x {self.config.image_size} pixels",
            "channels": ", ".join(map(str, self.config.channels)),
            "buckets": str(self.config.buckets),
            "max_words": str(self.config.max_words),
            "similarity": "cosine",
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the bag of n-grams and the image tower, whose last layer is a projection."""
        projection = f"vision.{len(self.vision) - 1}"
        return Tower("text", parts=("text",)), Tower("vision", parts=("vision",), projection=(projection,))

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return rows of n-grams, so many for each token, and a picture."""

        def make() -> dict[str, Tensor]:
            return grams_without_values(SAMPLE_PIECES * GRAMS_PER_TOKEN)

        return TowerInputs("text", self.max_length, SAMPLE_PIECES, fixed=False, make=make), picture_inputs(self)


def _read_config(path: Path) -> TinyClipConfig:
    architecture = read_json(path).get("architecture", 1)
    if architecture != ARCHITECTURE:
        raise ConfigError(
            f"{path}: the model is of architecture {architecture}, and this version of vembed has "
            f"{ARCHITECTURE}, which computes otherwise; train it again, or load it with the version that wrote it"
        )
    return read_settings(path, TinyClipConfig, beside=frozenset({"architecture"}))


def _vision_tower(config: TinyClipConfig) -> nn.Sequential:
    """Build the blocks; the last layer sees each place on its own, so that left and right are two things."""
    layers: list[nn.Module] = []
    before = 3
    for channels in config.channels:
        half = config.patch_size // 2
        convolution = (
            nn.Conv2d(before, channels, 3, padding=1, bias=False)
            if layers
            else nn.Conv2d(before, channels, 2 * half + 1, stride=half, padding=half, bias=False)
        )
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        # Pooled first, the rest has a quarter of the work.
        layers += [convolution, nn.MaxPool2d(2, ceil_mode=True), nn.GroupNorm(NORM_GROUPS, channels), nn.ReLU()]
        before = channels
    projection = nn.Linear(before * config.sides[-1] ** 2, config.dimension)
    nn.init.orthogonal_(projection.weight)
    nn.init.zeros_(projection.bias)
    return nn.Sequential(*layers, nn.Flatten(), projection)
