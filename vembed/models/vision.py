"""Picture encoders for image-to-image retrieval: ViT, MAE, DINOv2, DINOv3, the image towers of CLIP and SigLIP, timm.

A pooling that isn't the family's own is written as sentence-transformers' description beside the transformers files,
and read back from there. MAE sees all patches, in their own order: nothing is masked and nothing is drawn at random.

Shape legend: R rows of a chunk, T tokens of a picture, E embedding dim.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel

from vembed.batch import Features
from vembed.errors import ConfigError
from vembed.models.encoder import About, Encoder
from vembed.models.exportable import Recipe
from vembed.models.formats import MODULES_FILE, Pipeline, model_type_of, read_modules
from vembed.models.pictures import (
    ASSUMED_PATCH_SIZE,
    blank_picture,
    last_step,
    normalised,
    picture_lengths,
    pictures_of,
    process_pictures,
    refuse_less_than_a_patch,
    refuse_other_size,
    rows_of,
    run_processor,
)
from vembed.models.plannable import find_tower, layer_values
from vembed.models.pooling import unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Literal

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from vembed.batch import Item, Modality, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import Tower

    VisionPooling = Literal["cls", "head", "mean"]

_FIRST = "the first token was trained to sum the picture up"
_HEAD = "the model's own head sums the picture up"

VISION_FAMILIES: dict[str, tuple[tuple[VisionPooling, ...], str]] = {
    "vit": (("cls", "mean", "head"), _FIRST),
    "vit_mae": (("mean", "cls"), "nothing trained the first token to sum the picture up: all tokens are averaged"),
    "dinov2": (("cls", "mean"), _FIRST),
    "dinov2_with_registers": (("cls", "mean"), _FIRST),
    "dinov3_vit": (("cls", "mean"), _FIRST),
    "dinov3_convnext": (("cls", "mean"), "the first token is the average of all places"),
    "clip_vision_model": (("head",), _HEAD),
    "siglip_vision_model": (("head", "mean"), _HEAD),
    "timm_wrapper": (("head",), "timm's own pooling sums the picture up"),
}
"""How a family can sum a picture up, what suits it first, and why that does, by the model_type of config.json.

The mean is one over all tokens, as sentence-transformers has it: the first one and registers included.
"""


ONE_SIZE = frozenset({"vit", "vit_mae", "clip_vision_model", "siglip_vision_model"})
"""Families that take pictures of one size; the others interpolate their positions."""


class TransformersPictures(Encoder):
    """A model of transformers with an image tower, which sentence-transformers (5.4 and later) runs too."""

    marker = "config.json"
    reads = frozenset({"attn_implementation", "model_revision", "load_in_4bit", "image_background"})

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return the steps by which sentence-transformers gives the encoder's vectors."""

    def forms(self) -> Mapping[Form, str]:
        """Return transformers and sentence-transformers."""
        return {"transformers": "", "sentence-transformers": ""}

    def write_form(self, form: Form, folder: Path) -> None:
        """Write a folder of transformers, with sentence-transformers' description where it is for that."""
        self.save(folder)
        if form == "sentence-transformers":
            self.pipeline().write(folder, dimension=self.dimension, prompts=self.prompts)


class VisionEncoder(TransformersPictures):
    """A transformer for pictures.

    Args:
        backbone: The transformer, returning `last_hidden_state` and, where it has a head, `pooler_output`.
        pooling: How it sums a picture up, and why; None for what suits its family.
    """

    about = About(
        models="ViT, DINOv2, DINOv3, MAE, image towers of CLIP and SigLIP, timm",
        decides="model_type",
        pooling="cls, mean or the model's head, by family; pooling_method chooses another",
        prompts="none",
        trainable="all, vision, last_N_layers",
        writes="transformers, sentence-transformers",
    )
    modalities: frozenset[Modality] = frozenset({"image"})
    modes = MappingProxyType(
        {
            "vit": frozenset({"vit"}),
            "dino": frozenset({"vit", "dinov2", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext"}),
            "dinov2": frozenset({"dinov2", "dinov2_with_registers"}),
            "dinov3": frozenset({"dinov3_vit", "dinov3_convnext"}),
            "mae": frozenset({"vit_mae"}),
            "clip": frozenset({"clip_vision_model"}),
            "siglip": frozenset({"siglip_vision_model"}),
        }
    )

    reads = TransformersPictures.reads | {"pooling_method"}
    projections: ClassVar[tuple[str, ...]] = ()  # modules behind the transformer

    def __init__(
        self,
        name: str,
        *,
        backbone: PreTrainedModel,
        image_processor: Any,
        pooling: tuple[VisionPooling, str] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.backbone = backbone
        self.image_processor = image_processor
        self.max_length = None
        self.dimension = _width(backbone)
        self.pooling, self._reason = pooling or _own_pooling(backbone.config)
        self._patch_size = _patch_size(backbone)
        self.normalisation = last_step(image_processor, name)
        blank = run_processor(image_processor, [blank_picture()])
        if backbone.config.model_type in ONE_SIZE:
            refuse_other_size(name, blank["pixel_values"], backbone.config)
        refuse_less_than_a_patch(name, blank["pixel_values"], backbone.config)
        self.picture_tokens = int(picture_lengths(blank["pixel_values"], self._patch_size)[0])
        pooler = getattr(backbone, "pooler", None)
        if self.pooling == "head" and isinstance(pooler, nn.Module):
            pooler.requires_grad_(requires_grad=True)
        # A mask token is of pre-training: no picture is masked here. MAE's positions are sines that its class never
        # trains, which loading forgets.
        still = ("mask_token", "position_embeddings") if backbone.config.model_type == "vit_mae" else ("mask_token",)
        for name_of, parameter in backbone.named_parameters():
            if name_of.endswith(still):
                parameter.requires_grad_(False)

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether config.json names one of the families."""
        return model_type_of(files) in VISION_FAMILIES

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionEncoder:  # noqa: ARG003
        """Load a picture encoder."""
        config = files.config()
        pooling = _decide_pooling(files, config)
        if config.model_type == "vit_mae":
            config.mask_ratio = 0.0  # also what is written: transformers alone would hide most of each picture
        if config.model_type == "siglip_vision_model":
            config.vision_use_head = pooling[0] == "head"
        backbone = files.backbone("", config, AutoModel)
        if pooling[0] == "head" and getattr(backbone, "pooler", backbone) is None:
            raise ConfigError(f"{files.name}: pooling_method head: its files hold no such layer")
        return cls(files.name, backbone=backbone, image_processor=files.image_processor(), pooling=pooling)

    def featurize(self, items: Sequence[Item], side: Side) -> Features:  # noqa: ARG002
        """Decode pictures and run the image processor; both sides are read alike."""
        process = partial(run_processor, self.image_processor, in_bytes=self.normalisation is not None)
        arrays = process_pictures(pictures_of(items), process, self.image_limits, self.image_background)
        lengths = picture_lengths(arrays["pixel_values"], self._patch_size)
        return Features({}, lengths, {"pixel_values": arrays["pixel_values"]})

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Take the rows; pictures need no padding."""
        return {"pixel_values": rows_of(features.per_row["pixel_values"], rows)}

    def outputs(self, inputs: dict[str, Tensor]) -> Any:
        """Run the transformer."""
        pixels = normalised(inputs, self.normalisation).to(self.backbone.dtype)
        return self.backbone(pixel_values=pixels, **self._in_order(len(pixels)))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E) of unit length, at least float32."""
        outputs = self.outputs(inputs)
        if self.pooling == "head":
            return unit(outputs.pooler_output)
        hidden_RTH = outputs.last_hidden_state
        return unit(hidden_RTH[:, 0] if self.pooling == "cls" else hidden_RTH.mean(dim=1))

    def _in_order(self, num_rows: int) -> dict[str, Tensor]:
        """Return what keeps MAE from shuffling the patches: the numbers by which it would sort them, in order."""
        if self.backbone.config.model_type != "vit_mae":
            return {}
        order_T = torch.arange(self.picture_tokens - 1, device=self.backbone.device)
        return {"noise": order_T.expand(num_rows, -1)}

    def save(self, folder: Path) -> None:
        """Write a folder that transformers and vembed load; sentence-transformers' description says another pooling."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)
        if self.backbone.config.model_type != "timm_wrapper":  # its preprocessing stands in config.json
            self.image_processor.save_pretrained(folder)
        if self.pooling != _own_pooling(self.backbone.config)[0]:
            self.pipeline().write(folder, dimension=self.dimension, prompts=self.prompts)

    def facts(self) -> dict[str, str]:
        """Return how pictures are read and summed up."""
        return {
            "family": f"{self.backbone.config.model_type} (config.json)",
            "pooling": f"{self.pooling} ({self._reason})",
            "pictures": f"{type(self.image_processor).__name__} (preprocessor_config.json)",
            "similarity": "cosine",
            "attention": str(self.backbone.config._attn_implementation),
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower."""
        parts = ("backbone", *self.projections)
        return (find_tower(self, "vision", parts=parts, projection=self.projections, config=self.backbone.config),)

    def adapter_host(self) -> nn.Module:
        """Return the transformer."""
        return self.backbone

    @property
    def longest_item(self) -> int:
        """Tokens of a picture."""
        return self.picture_tokens

    def activation_values(self) -> float:
        """Estimate by the number and the width of the layers."""
        config = self.backbone.config
        if getattr(config, "num_hidden_layers", None) is None:
            return super().activation_values()
        return layer_values(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, self.picture_tokens
        )

    def pipeline(self) -> Pipeline:
        """Return what sentence-transformers does: the tokens pooled, or what the model's head makes of them."""
        return _pipeline(self.pooling)

    def recipe(self) -> Recipe | None:
        """Return how transformers alone gives the vectors."""
        return Recipe("vision", "AutoModel", self.pooling)


def _own_pooling(config: Any) -> tuple[VisionPooling, str]:
    """Return the pooling that suits a model by its config, and why."""
    if not getattr(config, "vision_use_head", True):
        return "mean", "the model has neither a first token nor a head: all patches are averaged"
    possible, reason = VISION_FAMILIES[config.model_type]
    return possible[0], reason


def _decide_pooling(files: ModelFiles, config: Any) -> tuple[VisionPooling, str]:
    """Decide how pictures are summed up: the user's word, else sentence-transformers' files, else the family.

    Raises:
        ConfigError: This family has no such pooling, or the files describe what vembed doesn't run.
    """
    own, reason = _own_pooling(config)
    described = _described_pooling(files)
    _pipeline(described or own).refuse_other(files)
    wanted: str = own
    if files.keys.pooling_method != "auto":
        wanted, reason = files.keys.pooling_method, "pooling_method"
    elif described:
        wanted, reason = described, MODULES_FILE
    possible = VISION_FAMILIES[config.model_type][0]
    found = next((each for each in possible if each == wanted), None)
    if found is None:
        raise ConfigError(
            f"{files.name}: pooling {wanted} ({reason}) is none of those for {config.model_type}: {', '.join(possible)}"
        )
    return found, reason


def _described_pooling(files: ModelFiles) -> str | None:
    """Return the pooling that sentence-transformers' description of a model names; None where there is none."""
    if files.read(MODULES_FILE) is None:
        return None
    path = next((each["path"] for each in read_modules(files) if each["type"].endswith(".Pooling")), None)
    return "head" if path is None else str(files.read_json(f"{path}/config.json").get("pooling_mode"))


def _pipeline(pooling: str) -> Pipeline:
    output = "pooler_output" if pooling == "head" else "last_hidden_state"
    return Pipeline({"image": ("forward", output)}, pooling=None if pooling == "head" else pooling)


def _width(backbone: PreTrainedModel) -> int:
    """Return the dimension of what is pooled."""
    config: Any = backbone.config
    if config.model_type == "timm_wrapper":
        timm_model: Any = backbone.timm_model
        return int(timm_model.head_hidden_size)
    return int(config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size)


def _patch_size(backbone: PreTrainedModel) -> int:
    """Return the side of a patch in pixels, the usual one for towers that have none."""
    config: Any = backbone.config
    patches = config
    if config.model_type == "timm_wrapper":
        patches = getattr(backbone.timm_model, "patch_embed", None)
    size = getattr(patches, "patch_size", ASSUMED_PATCH_SIZE)
    return int(size[0] if isinstance(size, (list, tuple)) else size)
