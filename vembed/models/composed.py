"""Encoders of two towers, one for texts and one for pictures, that end in one space.

`TwoTowers` is what all of them have in common. An item that is a picture and a text goes through both:

1. Features of both parts share a row: the columns of the texts and the arrays of the pictures, side by side.
2. Each tower sees its own part of a chunk and ends in unit length.
3. The embedding is the sum of the two, brought to unit length: the direction halfway between them.

It needs no parameter of its own, so that a model that was never trained on such items takes them too.

`ComposedTowers` joins any encoder of texts and any encoder of pictures, each asked for all that concerns its items. A
projection is a linear layer, or several with a GELU between two:

    z = unit(P(unit(x) * sqrt(d)))        x: the tower's embedding of d numbers

Scaled so, its inputs are of size one, as behind a layer norm. A single layer from a tower that has the dimension of the
shared space starts as the identity: what was learned of that modality alone stays. All others start uniform within
+-sqrt(3 / d), biases at zero, drawn from a seed that is always the same: a run that is resumed, and every process of
one, finds the same projections without a file.

Source: the "image + text" baselines of Liu et al., 2021 (CIRR) and Saito et al., 2023 (Pic2Word).

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from vembed.batch import Features, modality_of, parts_of, texts_of
from vembed.errors import ConfigError
from vembed.models.checked_files import read_settings
from vembed.models.encoder import About, Encoder
from vembed.models.hub import save_background, save_weights
from vembed.models.keys import MOST_PROJECTION_LAYERS, ModelKeys, renamed
from vembed.models.load import class_of, default_of, in_words, load_from, unread_keys
from vembed.models.names import PAIR_SIGN
from vembed.models.pictures import pictures_of, rows_of, without_padding
from vembed.models.plannable import Tower
from vembed.models.pooling import unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vembed.batch import Background, Image, ImageLimits, Item, Modality, Side
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import TowerInputs

Value = TypeVar("Value")

CONFIG_FILE = "vembed_composed.json"
PROJECTIONS_FILE = "projections.safetensors"

TEXT, IMAGE = "text", "image"
"""Names of a composed model's folders and modules; each input and feature begins with the one of its tower."""

SEEDS = {TEXT: 0, IMAGE: 1}
"""Of the projections' first weights."""


class TwoTowers(Encoder):
    """An encoder of texts, of pictures, and of items that are both."""

    modalities: frozenset[Modality] = frozenset({"text", "image", "image+text"})
    text_inputs: ClassVar[frozenset[str]] = frozenset({"input_ids"})  # of `collate`; all others are of pictures
    max_length: int
    picture_tokens: int  # what a picture costs; the most where they differ
    padding_id: int  # fills rows of token ids at the right

    @abstractmethod
    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        """Tokenize texts into ragged columns."""

    @abstractmethod
    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        """Decode pictures into arrays with one entry per picture."""

    @abstractmethod
    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the embeddings of texts, (R, E), of unit length, at least float32."""

    @abstractmethod
    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the embeddings of pictures, (R, E), of unit length, at least float32."""

    @override
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        modality = modality_of(items[0])
        if modality == "text":
            return self.featurize_texts(texts_of(items), side)
        if modality == "image":
            return self.featurize_pictures(pictures_of(items))
        images, texts = parts_of(items)
        return join_features(self.featurize_pictures(images), self.featurize_texts(texts, side))

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        # Pictures of unequal numbers of patches are padded to the longest of the chunk, texts never past the last
        # position that their tower has.
        inputs = without_padding({name: rows_of(values, rows) for name, values in features.per_row.items()})
        if "input_ids" in features.columns:
            ids = features.columns["input_ids"].take(rows)
            # Beside a picture the width is that of both.
            width = int(ids.lengths.max()) if inputs else min(width, self.max_length)
            inputs["input_ids"] = torch.from_numpy(ids.padded(width, self.padding_id))
        return inputs

    @override
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        texts, pictures = self.split_inputs(inputs)
        if not texts:
            return self.embed_pictures(pictures)
        text_RE = self.embed_texts(texts)
        if not pictures:
            return text_RE
        # The direction halfway between two unit vectors, and the zero vector of two opposite ones.
        return F.normalize(self.embed_pictures(pictures) + text_RE, dim=-1)

    def split_inputs(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the inputs of the text tower and those of the image tower."""
        texts = {name: tensor for name, tensor in inputs.items() if name in self.text_inputs}
        return texts, {name: tensor for name, tensor in inputs.items() if name not in texts}

    @property
    @override
    def longest_item(self) -> int:
        return max(self.max_length, self.picture_tokens)


def join_features(pictures: Features, texts: Features) -> Features:
    """Return features of n rows that hold a picture and a text each; a row costs the tokens of both.

    Raises:
        ValueError: A column or an array would be both.
    """
    shared = (pictures.columns.keys() & texts.columns.keys()) | (pictures.per_row.keys() & texts.per_row.keys())
    if shared or len(pictures) != len(texts):
        raise ValueError(f"{len(pictures)} pictures and {len(texts)} texts share the inputs {sorted(shared)}")
    return Features(
        columns={**pictures.columns, **texts.columns},
        lengths=pictures.lengths + texts.lengths,
        per_row={**pictures.per_row, **texts.per_row},
        num_truncated=pictures.num_truncated + texts.num_truncated,
    )


@dataclass(frozen=True, slots=True)
class _Saved:
    """The description of two towers beside their folders."""

    text_model_name: str  # what the towers were called when they were first joined
    image_model_name: str
    projection_dim: Annotated[int, Field(ge=1, le=1 << 24)]
    projection_layers: Annotated[int, Field(ge=1, le=MOST_PROJECTION_LAYERS)]


class ComposedTowers(TwoTowers):
    """An encoder of texts and an encoder of pictures of any origin, projected to one space.

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
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        return files.keys.text_model_name is not None or files.in_folder(CONFIG_FILE)

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> ComposedTowers:
        keys = files.keys
        text_name, image_name = str(keys.text_model_name), str(keys.image_model_name)
        names = (_public(text_name), _public(image_name))
        dim, layers = keys.projection_dim, keys.projection_layers

        # A folder that `save` wrote has its towers in subfolders, and projections whose shape no key can change.
        saved = read_settings(files.folder / CONFIG_FILE, _Saved) if files.folder is not None else None
        if saved is not None:
            for key in ("projection_dim", "projection_layers"):
                wanted = getattr(keys, key)
                if wanted not in (default_of(key), getattr(saved, key)):
                    raise ConfigError(
                        f"{key} {wanted}: the projections of {files.name} have {getattr(saved, key)}; leave it out"
                    )
            dim, layers = saved.projection_dim, saved.projection_layers
            text_name, image_name = (str(Path(files.name, part)) for part in (TEXT, IMAGE))
            names = (saved.text_model_name, saved.image_model_name)

        # A key that is set must be read by one tower at least. The other one is loaded as if it weren't set.
        towers = {TEXT: _tower_files(files, TEXT, text_name), IMAGE: _tower_files(files, IMAGE, image_name)}
        idle: list[set[str]] = []
        for tower in towers.values():
            tower_class = class_of(tower)
            idle.append(set(unread_keys(tower_class, tower.keys)))
            tower.load_in_4bit = tower.load_in_4bit and "load_in_4bit" in tower_class.reads
            tower.keys = tower.keys.model_copy(update={key: default_of(key) for key in idle[-1]})
        unread = sorted(set.intersection(*idle))
        if unread:
            raise ConfigError(f"{in_words(unread[0])} has no effect with {files.name}; remove it")

        encoders = {part: _load_tower(part, tower, texts) for part, tower in towers.items()}
        encoders[TEXT].name, encoders[IMAGE].name = names
        width = encoders[IMAGE].dimension if dim == "auto" else dim

        def make() -> nn.ModuleDict:
            return nn.ModuleDict(
                {part: _projection(one.dimension, width, layers, seed=SEEDS[part]) for part, one in encoders.items()}
            )

        # New weights are of float32 at least, as adapters are.
        joined = files.load_module(make, PROJECTIONS_FILE, torch.promote_types(files.dtype, torch.float32))
        return cls(files.name, text=encoders[TEXT], image=encoders[IMAGE], names=names, projections=joined)

    @override
    def parts(self) -> Mapping[str, Encoder]:
        return {TEXT: self.text, IMAGE: self.image}

    @property
    def image_limits(self) -> ImageLimits:
        """Limits of the image tower, which decodes pictures."""
        return self.image.image_limits

    @image_limits.setter
    def image_limits(self, limits: ImageLimits) -> None:
        self.image.image_limits = limits

    @property
    def image_background(self) -> Background:
        """Background of transparent parts of pictures, of the image tower."""
        return self.image.image_background

    @image_background.setter
    def image_background(self, background: Background) -> None:
        self.image.image_background = background

    @override
    def with_prompts(self, prompts: Mapping[Side, str]) -> Self:
        twin = copy(self)
        # A shallow copy shares the dictionary of modules: the twin gets one of its own before a tower is exchanged.
        twin._modules = {**self._modules, "text": self.text.with_prompts(prompts)}
        twin.prompts = twin.text.prompts
        return twin

    @override
    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        return _named(TEXT, self.text.featurize(texts, side))

    @override
    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        return _named(IMAGE, self.image.featurize(images, "document"))

    @override
    def why_not_packed(self, device: str, dtype: torch.dtype) -> str:
        return self.text.why_not_packed(device, dtype)  # pictures are rows of one length

    @override
    def pack(self) -> None:
        self.text.pack()
        self.packs = True

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        # Take apart what `_named` put under the names of the towers; a chunk may be of one tower alone.
        of_towers: dict[str, Features] = {}
        for part in self.parts():
            per_row = _belonging_to(part, features.per_row)
            if "lengths" in per_row:
                of_towers[part] = Features(_belonging_to(part, features.columns), per_row.pop("lengths"), per_row)
        inputs: dict[str, Tensor] = {}
        for part, tower_features in of_towers.items():
            # Beside a picture the width is that of both.
            tower_width = width if len(of_towers) == 1 else int(tower_features.lengths[rows].max())
            made = self.parts()[part].collate(tower_features, rows, tower_width)
            inputs |= {f"{part}.{name}": tensor for name, tensor in made.items()}
        return inputs

    @override
    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        return self._projected(TEXT, self.text(inputs))

    @override
    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        return self._projected(IMAGE, self.image(inputs))

    def _projected(self, part: str, x: Tensor) -> Tensor:
        dtype = next(self.projections.parameters()).dtype
        with torch.autocast(x.device.type, enabled=False):
            return unit(self.projections[part](unit(x).to(dtype) * math.sqrt(x.shape[-1])))

    @override
    def split_inputs(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return _belonging_to(TEXT, inputs), _belonging_to(IMAGE, inputs)

    @override
    def save(self, folder: Path) -> None:
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

    @override
    def facts(self) -> dict[str, str]:
        layers = f"{self.projection_layers} layers with GELU" if self.projection_layers > 1 else "linear"
        facts = {"towers": f"{self.names[0]} (texts){PAIR_SIGN}{self.names[1]} (pictures)"}
        for part, encoder in self.parts().items():
            facts |= {f"{part} {key}": value for key, value in encoder.facts().items() if key != "similarity"}
        sizes = f"{self.text.dimension} (texts) and {self.image.dimension} (pictures) to {self.dimension} dims"
        return {**facts, "projections": f"{layers}, {sizes}", "similarity": "cosine"}

    @override
    def towers(self) -> tuple[Tower, ...]:
        towers = []
        for part, encoder in self.parts().items():
            projection = (f"projections.{part}",)
            for tower in encoder.towers():
                parts, within, behind = (
                    tuple(f"{part}.{name}" for name in names)
                    for names in (tower.parts, tower.projection, tower.behind or tower.projection)
                )
                layers = None if tower.layers is None else f"{part}.{tower.layers}"
                towers.append(
                    Tower(
                        tower.name,
                        parts + projection,
                        within + projection,
                        layers,
                        behind + projection,  # the new projection runs last
                        tower.period,
                    )
                )
        return tuple(towers)

    @override
    def enable_gradient_checkpointing(self) -> None:
        # One tower that can is enough: a table of n-grams beside a transformer has nothing to recompute.
        refused = []
        for encoder in self.parts().values():
            try:
                encoder.enable_gradient_checkpointing()
            except ValueError as error:
                refused.append(str(error))
        if len(refused) == len(self.parts()):
            raise ValueError("; ".join(refused))

    @override
    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        def under(part: str, make: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
            return lambda: {f"{part}.{name}": tensor for name, tensor in make().items()}

        return tuple(
            replace(inputs, make=under(part, inputs.make))
            for part, encoder in self.parts().items()
            for inputs in encoder.profile_inputs()
        )

    @property
    @override
    def longest_item(self) -> int | None:  # type: ignore[override]
        lengths = [encoder.longest_item for encoder in self.parts().values()]
        return None if None in lengths else max(lengths)  # type: ignore[type-var]

    @override
    def activation_values(self) -> float:
        return max(encoder.activation_values() for encoder in self.parts().values())


def _tower_files(files: ModelFiles, part: str, name: str) -> ModelFiles:
    """Return the files of a tower; of a model of two towers that is named for pictures its image tower alone."""
    joint = ("encoder_mode", "freeze_batch_norm", "projection_dim", "projection_layers")  # say nothing of one tower
    unset = {key: default_of(key) for key in joint}
    tower = files.of_part(renamed(files.keys, name).model_copy(update=unset))
    if part == IMAGE and "text" in class_of(tower).modalities:
        half = files.of_part(tower.keys)
        half.image_tower = True
        if class_of(half).modalities == {"image"}:
            return half
    return tower


def _load_tower(part: str, files: ModelFiles, texts: Iterable[str]) -> Encoder:
    """Load a tower, unless it reads something else than it is named for."""
    key, tower_class = f"{part}_model_name", class_of(files)
    modalities = tower_class.modalities
    if tower_class.multi_vector:
        raise ConfigError(f"{key}: {files.name} gives several vectors for each row; name a model that gives one")
    if modalities != {part}:
        words = {TEXT: "texts", IMAGE: "pictures"}
        read = " and ".join(word for modality, word in words.items() if modality in modalities)
        raise ConfigError(
            f"{key}: {files.name} reads {read}; name a model that reads {words[part]} alone"
            + (", or set it as model_name, without another one" if len(modalities) > 1 else "")
        )
    return load_from(files, texts)


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
    return nn.Sequential(linear[0], *(module for layer in linear[1:] for module in (nn.GELU(), layer)))


def _named(part: str, features: Features) -> Features:
    """Return the features of a tower under its name, with the tokens of its own, which `collate` pads by."""
    per_row: dict[str, NDArray[Any]] = {f"{part}.{name}": values for name, values in features.per_row.items()}
    columns = {f"{part}.{name}": column for name, column in features.columns.items()}
    return replace(features, columns=columns, per_row={**per_row, f"{part}.lengths": features.lengths})


def _belonging_to(part: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return what belongs to a tower, by the names that the tower itself gave."""
    return {name.removeprefix(f"{part}."): value for name, value in values.items() if name.startswith(f"{part}.")}
