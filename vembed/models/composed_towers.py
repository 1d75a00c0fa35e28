"""Two towers of different origin: any encoder of texts and any encoder of pictures, projected to one space.

Each tower is an encoder of its own, asked for all that concerns its items; here is what joins them. A projection is a
linear layer, or several with a GELU between two:

    z = unit(P(unit(x) * sqrt(d)))        x: the tower's embedding of d numbers

Scaled so, its inputs are of size one, as behind a layer norm. A single layer from a tower that has the dimension of the
shared space starts as the identity: what was learned of that modality alone stays. All others start uniform within
+-sqrt(3 / d), biases at zero, drawn from a seed that is always the same: a run that is resumed, and every process of
one, finds the same projections without a file.

Inputs and features of a tower are named "text." or "image." and then as the tower names them.

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

import json
import math
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from vembed.batch import Features
from vembed.errors import ConfigError
from vembed.models.checked_files import read_settings
from vembed.models.composed import TwoTowers
from vembed.models.encoder import About
from vembed.models.hub import save_background, save_weights
from vembed.models.keys import MOST_PROJECTION_LAYERS, ModelKeys, renamed
from vembed.models.load import class_of, default_of, in_words, load_from, unread_keys
from vembed.models.names import PAIR_SIGN
from vembed.models.plannable import Tower
from vembed.models.pooling import unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vembed.batch import Background, Image, ImageLimits, Side
    from vembed.models.encoder import Encoder
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import TowerInputs

CONFIG_FILE = "vembed_composed.json"
PROJECTIONS_FILE = "projections.safetensors"

TEXT, IMAGE = "text", "image"
"""Names of the towers' folders, modules and inputs."""

SEEDS = {TEXT: 0, IMAGE: 1}
"""Of the projections' first weights."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """The description of two towers beside their folders."""

    text_model_name: str  # what the towers were called when they were first joined
    image_model_name: str
    projection_dim: Annotated[int, Field(ge=1, le=1 << 24)]
    projection_layers: Annotated[int, Field(ge=1, le=MOST_PROJECTION_LAYERS)]


class ComposedTowers(TwoTowers):
    """An encoder of texts and an encoder of pictures.

    Args:
        names: What both towers were called when they were first joined.
        projections: Linear layers behind each tower, by its name.
    """

    about = About(
        models="Any text encoder beside any image encoder",
        decides="text_model_name and image_model_name",
        pooling="each tower's own, then its projection",
        prompts="the text tower's own",
        trainable="all, text, vision, projection, last_N_layers",
        writes="vembed, with both towers in their own forms",
    )
    marker = CONFIG_FILE
    modes = MappingProxyType({"composed": frozenset()})
    reads = frozenset({*ModelKeys.model_fields, "load_in_4bit"} - {"model_revision"})
    new_modules = (f"projections.{TEXT}", f"projections.{IMAGE}")

    def __init__(
        self,
        name: str,
        *,
        text: Encoder,
        image: Encoder,
        names: tuple[str, str],
        projections: nn.ModuleDict,
    ) -> None:
        super().__init__()
        self.name = name
        self.names = names
        self.text = text
        self.image = image
        self.projections = projections
        linear = [layer for layer in projections[IMAGE].children() if isinstance(layer, nn.Linear)]
        self.dimension, self.projection_layers = linear[-1].out_features, len(linear)
        self.max_length = text.max_length  # type: ignore[assignment]  # an encoder of texts may have no limit
        self.normalisation = image.normalisation
        self.prompts = text.prompts

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether two models are named, or the folder is one that `save` wrote."""
        return files.keys.text_model_name is not None or files.in_folder(CONFIG_FILE)

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> ComposedTowers:
        """Load both towers, and the projections where the folder has some.

        Raises:
            ConfigError: A tower reads something else than it is named for, or none of the two reads a key.
        """
        keys = files.keys
        saved = read_settings(files.folder / CONFIG_FILE, _Saved) if files.folder is not None else None
        dim, layers = keys.projection_dim, keys.projection_layers
        found = {"text_model_name": keys.text_model_name, "image_model_name": keys.image_model_name}
        if saved is not None:
            for key in ("projection_dim", "projection_layers"):
                given = getattr(keys, key)
                if given not in (default_of(key), getattr(saved, key)):
                    raise ConfigError(
                        f"{key} {given}: the projections of {files.name} have {getattr(saved, key)}; leave it out"
                    )
            dim, layers = saved.projection_dim, saved.projection_layers
            found = {f"{part}_model_name": str(Path(files.name, part)) for part in (TEXT, IMAGE)}
        parts = {key: _part_files(files, key, str(name)) for key, name in found.items()}
        _refuse_idle_keys(files, parts.values())
        text, image = (_load_part(key, part, texts) for key, part in parts.items())
        names = (_public(str(keys.text_model_name)), _public(str(keys.image_model_name)))
        if saved is not None:
            names = (saved.text_model_name, saved.image_model_name)
        text.name, image.name = names

        def make() -> nn.ModuleDict:
            width = image.dimension if dim == "auto" else dim
            towers = {TEXT: text, IMAGE: image}
            return nn.ModuleDict(
                {part: _projection(tower.dimension, width, layers, seed=SEEDS[part]) for part, tower in towers.items()}
            )

        # New weights are of float32 at least, as adapters are.
        joined = files.load_module(make, PROJECTIONS_FILE, torch.promote_types(files.dtype, torch.float32))
        return cls(files.name, text=text, image=image, names=names, projections=joined)

    def parts(self) -> Mapping[str, Encoder]:
        """Return both towers."""
        return {TEXT: self.text, IMAGE: self.image}

    @property
    def image_limits(self) -> ImageLimits:
        """What a picture may be: of the image tower, which decodes them."""
        return self.image.image_limits

    @image_limits.setter
    def image_limits(self, limits: ImageLimits) -> None:
        self.image.image_limits = limits

    @property
    def image_background(self) -> Background:
        """What stands behind transparent parts of pictures: of the image tower."""
        return self.image.image_background

    @image_background.setter
    def image_background(self, background: Background) -> None:
        self.image.image_background = background

    def with_prompts(self, prompts: Mapping[Side, str]) -> Self:
        """Return the encoder with other prompts in its text tower."""
        twin = copy(self)
        twin._modules = {**self._modules, "text": self.text.with_prompts(prompts)}
        twin.prompts = twin.text.prompts
        return twin

    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        """Tokenize texts as the text tower does."""
        return _named(TEXT, self.text.featurize(texts, side))

    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        """Decode pictures as the image tower does."""
        return _named(IMAGE, self.image.featurize(images, "document"))

    def why_not_packed(self, device: str, dtype: torch.dtype) -> str:
        """Say why texts can't lie end to end; pictures are rows of one length."""
        return self.text.why_not_packed(device, dtype)

    def pack(self) -> None:
        """Lay texts end to end from now on."""
        self.text.pack()
        self.packs = True

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Let each tower make the inputs of its part of the rows."""
        found = {part: own for part in self.parts() if (own := _unnamed(part, features)) is not None}
        inputs: dict[str, Tensor] = {}
        for part, own in found.items():
            # Beside a picture the width is that of both.
            own_width = width if len(found) == 1 else int(own.lengths[rows].max())
            made = self.parts()[part].collate(own, rows, own_width)
            inputs |= {f"{part}.{name}": tensor for name, tensor in made.items()}
        return inputs

    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the text tower and its projection."""
        return self._projected(TEXT, self.text(inputs))

    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the image tower and its projection."""
        return self._projected(IMAGE, self.image(inputs))

    def _projected(self, part: str, x: Tensor) -> Tensor:
        dtype = next(self.projections.parameters()).dtype
        with torch.autocast(x.device.type, enabled=False):
            return unit(self.projections[part](unit(x).to(dtype) * math.sqrt(x.shape[-1])))

    def split_inputs(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the inputs of the text tower and those of the image tower, as they name them."""
        return tuple(
            {name.removeprefix(f"{part}."): each for name, each in inputs.items() if name.startswith(f"{part}.")}
            for part in (TEXT, IMAGE)
        )  # type: ignore[return-value]

    def save(self, folder: Path) -> None:
        """Write each tower as its own library loads it, and beside them the projections."""
        self.text.save(folder / TEXT)
        self.image.save(folder / IMAGE)
        save_background(self.image, folder / IMAGE)
        save_weights(self.projections, folder, PROJECTIONS_FILE)
        content = {
            "text_model_name": self.names[0],
            "image_model_name": self.names[1],
            "projection_dim": self.dimension,
            "projection_layers": self.projection_layers,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    def facts(self) -> dict[str, str]:
        """Return what both towers are, and how they are joined."""
        layers = f"{self.projection_layers} layers with GELU" if self.projection_layers > 1 else "linear"
        facts = {"towers": f"{self.names[0]} (texts){PAIR_SIGN}{self.names[1]} (pictures)"}
        for part, encoder in self.parts().items():
            facts |= {f"{part} {key}": value for key, value in encoder.facts().items() if key != "similarity"}
        sizes = f"{self.text.dimension} (texts) and {self.image.dimension} (pictures) to {self.dimension} dims"
        return {**facts, "projections": f"{layers}, {sizes}", "similarity": "cosine"}

    def towers(self) -> tuple[Tower, ...]:
        """Return the tower of each part, its projection added behind it."""
        return tuple(
            _with_projection(part, tower) for part, encoder in self.parts().items() for tower in encoder.towers()
        )

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the activations of each tower that can.

        Raises:
            ValueError: None of them can.
        """
        refused = []
        for encoder in self.parts().values():
            try:
                encoder.enable_gradient_checkpointing()
            except ValueError as error:
                refused.append(str(error))
        if len(refused) == len(self.parts()):
            raise ValueError("; ".join(refused))

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return what each tower is measured with."""
        return tuple(
            _named_inputs(part, inputs) for part, encoder in self.parts().items() for inputs in encoder.profile_inputs()
        )

    @property
    def longest_item(self) -> int | None:  # type: ignore[override]
        """Tokens of the longest text or picture; None where texts have no limit."""
        lengths = [encoder.longest_item for encoder in self.parts().values()]
        return None if None in lengths else max(lengths)  # type: ignore[type-var]

    def activation_values(self) -> float:
        """Return the estimate of the tower where a token keeps more."""
        return max(encoder.activation_values() for encoder in self.parts().values())


def _part_files(files: ModelFiles, key: str, name: str) -> ModelFiles:
    """Return the files of a tower; of a model of two towers its image tower alone."""
    unset = {
        each: default_of(each) for each in ("encoder_mode", "freeze_batch_norm", "projection_dim", "projection_layers")
    }
    found = files.of_part(renamed(files.keys, name).model_copy(update=unset))
    half = files.of_part(found.keys)
    half.image_tower = True
    takes_half = key == "image_model_name" and "text" in class_of(found).modalities
    return half if takes_half and class_of(half).modalities == {"image"} else found


def _refuse_idle_keys(files: ModelFiles, parts: Iterable[ModelFiles]) -> None:
    """Refuse a key that is set and that neither tower reads; of each tower reset those that only the other one does."""
    idle = []
    for part in parts:
        own = class_of(part)
        idle.append(set(unread_keys(own, part.keys)))
        part.load_in_4bit = part.load_in_4bit and "load_in_4bit" in own.reads
        part.keys = part.keys.model_copy(update={key: default_of(key) for key in idle[-1]})
    unread = sorted(set.intersection(*idle))
    if unread:
        raise ConfigError(f"{files.name} has no use for {in_words(unread[0])}; leave it out")


def _load_part(key: str, files: ModelFiles, texts: Iterable[str]) -> Encoder:
    """Load a tower."""
    wanted, words = ("text", "texts") if key == "text_model_name" else ("image", "pictures")
    own = class_of(files)
    found = own.modalities
    if found == {wanted} and not own.multi_vector:
        return load_from(files, texts)
    if own.multi_vector:
        raise ConfigError(f"{key}: {files.name} gives several vectors for each row; name a model that gives one")
    read = " and ".join({"text": "texts", "image": "pictures"}[each] for each in ("text", "image") if each in found)
    raise ConfigError(
        f"{key}: {files.name} reads {read}; name a model that reads {words} alone"
        + (", or set it as model_name, without another one" if len(found) > 1 else "")
    )


def _public(name: str) -> str:
    """Return the name of a model without the path of a folder on this machine."""
    return Path(name).resolve().name if Path(name).exists() else name


def _projection(in_features: int, out_features: int, num_layers: int, *, seed: int) -> nn.Sequential:
    """Make a projection on the present device; without values on the meta device."""
    widths = [in_features] + [out_features] * num_layers
    linear = [nn.Linear(before, out_features) for before in widths[:-1]]
    device = linear[0].weight.device
    if device.type != "meta":
        generator = torch.Generator(device).manual_seed(seed)
        for layer in linear:
            bound = math.sqrt(3 / layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.zeros_(layer.bias)
        if widths == [out_features] * 2:
            nn.init.eye_(linear[0].weight)
    return nn.Sequential(linear[0], *(each for layer in linear[1:] for each in (nn.GELU(), layer)))


def _named(part: str, features: Features) -> Features:
    """Return the features of a tower under its name, with the tokens of its own."""
    per_row: dict[str, NDArray[Any]] = {f"{part}.{name}": values for name, values in features.per_row.items()}
    columns = {f"{part}.{name}": column for name, column in features.columns.items()}
    return replace(features, columns=columns, per_row={**per_row, f"{part}.lengths": features.lengths})


def _unnamed(part: str, features: Features) -> Features | None:
    """Return the features of a tower as it names them; None where there are none."""
    prefix = f"{part}."
    per_row = {name.removeprefix(prefix): each for name, each in features.per_row.items() if name.startswith(prefix)}
    columns = {name.removeprefix(prefix): each for name, each in features.columns.items() if name.startswith(prefix)}
    return Features(columns, per_row.pop("lengths"), per_row) if "lengths" in per_row else None


def _with_projection(part: str, tower: Tower) -> Tower:
    def named(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{part}.{name}" for name in names)

    own = (f"projections.{part}",)
    layers = None if tower.layers is None else f"{part}.{tower.layers}"
    behind = named(tower.behind or tower.projection)
    return Tower(
        tower.name, named(tower.parts) + own, named(tower.projection) + own, layers, behind + own, tower.period
    )


def _named_inputs(part: str, inputs: TowerInputs) -> TowerInputs:
    def make() -> dict[str, Tensor]:
        return {f"{part}.{name}": tensor for name, tensor in inputs.make().items()}

    return replace(inputs, make=make)
