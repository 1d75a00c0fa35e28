"""Picture encoders for image-to-image retrieval: ViT, DINOv2, DINOv3 and the image towers of CLIP and SigLIP.

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModel

from vembed.batch import Features
from vembed.models.encoder import Encoder
from vembed.models.pictures import (
    blank_picture,
    picture_lengths,
    pictures_of,
    process_pictures,
    rows_of,
    run_processor,
)
from vembed.models.towers import find_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Literal

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from vembed.batch import Item, Modality, Side
    from vembed.data.images import ImageLimits
    from vembed.models.huggingface import ModelFiles, ModelOptions
    from vembed.models.towers import Tower

    VisionPooling = Literal["cls", "head", "mean"]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How a family sums a picture up.

    Attributes:
        pooling: The first token, the model's own head, or the mean over the patches.
        reason: Why, for the plan.
    """

    pooling: VisionPooling
    reason: str


_CLS = VisionFamily("cls", "the first token was trained to sum the picture up")
_HEAD = VisionFamily("head", "the model's own head sums the picture up")
_MEAN = VisionFamily("mean", "the model has neither a first token nor a head: all patches are averaged")

VISION_FAMILIES = {
    "vit": _CLS,
    "dinov2": _CLS,
    "dinov2_with_registers": _CLS,
    "dinov3_vit": _CLS,
    "clip_vision_model": _HEAD,
    "siglip_vision_model": _HEAD,
}
"""Families by the model_type of config.json."""


class VisionEncoder(Encoder):
    """A transformer for pictures.

    Args:
        name: What it was loaded by.
        backbone: The transformer, returning `last_hidden_state` and, where it has a head, `pooler_output`.
        image_processor: Makes its inputs.
        image_limits: What a picture may be.
    """

    modalities: frozenset[Modality] = frozenset({"image"})

    def __init__(
        self, name: str, *, backbone: PreTrainedModel, image_processor: Any, image_limits: ImageLimits
    ) -> None:
        super().__init__()
        config = backbone.config
        self.name = name
        self.backbone = backbone
        self.image_processor = image_processor
        self.image_limits = image_limits
        self.max_length = None
        self.dimension = int(config.hidden_size)
        self.family = VISION_FAMILIES[config.model_type] if getattr(config, "vision_use_head", True) else _MEAN
        blank = run_processor(image_processor, [blank_picture()])
        self.picture_tokens = int(picture_lengths(blank["pixel_values"], int(config.patch_size))[0])
        for name_of, parameter in backbone.named_parameters():
            if name_of.endswith("mask_token"):
                parameter.requires_grad_(False)  # of pre-training: no picture is masked here

    def featurize(self, items: Sequence[Item], side: Side) -> Features:  # noqa: ARG002
        """Decode pictures and run the image processor; both sides are read alike."""
        process = partial(run_processor, self.image_processor)
        arrays = process_pictures(pictures_of(items), process, self.image_limits)
        lengths = picture_lengths(arrays["pixel_values"], int(self.backbone.config.patch_size))
        return Features({}, lengths, {"pixel_values": arrays["pixel_values"]})

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Take the rows; pictures need no padding."""
        return {"pixel_values": rows_of(features.per_row["pixel_values"], rows)}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E) of unit length, at least float32."""
        outputs = self.backbone(pixel_values=inputs["pixel_values"].to(self.backbone.dtype))
        if self.family.pooling == "head":
            x = outputs.pooler_output
        elif self.family.pooling == "cls":
            x = outputs.last_hidden_state[:, 0]
        else:
            x = outputs.last_hidden_state.mean(dim=1)
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers and vembed load."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    def describe(self) -> dict[str, str]:
        """Return how pictures are read and summed up."""
        return {
            "family": f"{self.backbone.config.model_type} (config.json)",
            "pooling": f"{self.family.pooling} ({self.family.reason})",
            "pictures": f"{type(self.image_processor).__name__} (preprocessor_config.json)",
            "similarity": "cosine",
            "attention": str(self.backbone.config._attn_implementation),
            **self.training_facts(),
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower."""
        depth = getattr(self.backbone.config, "num_hidden_layers", None)
        return (find_tower(self, "vision", parts=("backbone",), depth=depth),)

    def adapter_host(self) -> nn.Module:
        """Return the transformer."""
        return self.backbone

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in backward; non-reentrant, as gradient caching needs."""
        if not self.backbone.supports_gradient_checkpointing:
            super().enable_gradient_checkpointing()
        self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def load_vision_encoder(options: ModelOptions, files: ModelFiles, config: PreTrainedConfig) -> VisionEncoder:
    """Load a picture encoder.

    Raises:
        ConfigError: When the model needs something that isn't allowed, or lacks weights.
        MachineError: When the hub can't be reached or a package is missing.
    """
    return VisionEncoder(
        options.name,
        backbone=files.backbone("", config, AutoModel),
        image_processor=files.image_processor(),
        image_limits=options.image_limits,
    )
