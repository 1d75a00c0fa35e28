"""Picture encoders for image-to-image retrieval: ViT, DINOv2, DINOv3 and the image towers of CLIP and SigLIP.

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import AutoModel

from vembed.batch import Features
from vembed.models.encoder import Recipe
from vembed.models.files import transformer_depth, transformer_period
from vembed.models.pictures import (
    blank_picture,
    last_step,
    normalised,
    picture_lengths,
    pictures_of,
    process_pictures,
    rows_of,
    run_processor,
)
from vembed.models.pooling import unit
from vembed.models.sentence_transformers_pictures import (
    Pipeline,
    TransformersPictures,
    model_type_of,
    refuse_other_pipeline,
)
from vembed.models.towers import find_tower, layer_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from typing import Literal

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from vembed.batch import Item, Modality, Side
    from vembed.models.files import ModelFiles
    from vembed.models.towers import Tower

    VisionPooling = Literal["cls", "head", "mean"]


_CLS: tuple[VisionPooling, str] = ("cls", "the first token was trained to sum the picture up")
_HEAD: tuple[VisionPooling, str] = ("head", "the model's own head sums the picture up")
_MEAN: tuple[VisionPooling, str] = (
    "mean",
    "the model has neither a first token nor a head: all patches are averaged",
)

VISION_FAMILIES = {
    "vit": _CLS,
    "dinov2": _CLS,
    "dinov2_with_registers": _CLS,
    "dinov3_vit": _CLS,
    "clip_vision_model": _HEAD,
    "siglip_vision_model": _HEAD,
}
"""How a family sums a picture up, and why, by the model_type of config.json."""


class VisionEncoder(TransformersPictures):
    """A transformer for pictures.

    Args:
        backbone: The transformer, returning `last_hidden_state` and, where it has a head, `pooler_output`.
    """

    modalities: frozenset[Modality] = frozenset({"image"})

    def __init__(self, name: str, *, backbone: PreTrainedModel, image_processor: Any) -> None:
        super().__init__()
        config = backbone.config
        self.name = name
        self.backbone = backbone
        self.image_processor = image_processor
        self.max_length = None
        self.dimension = int(config.hidden_size)
        has_head = getattr(config, "vision_use_head", True)
        self.pooling, self._reason = VISION_FAMILIES[config.model_type] if has_head else _MEAN
        self.normalisation = last_step(image_processor)
        blank = run_processor(image_processor, [blank_picture()])
        self.picture_tokens = int(picture_lengths(blank["pixel_values"], int(config.patch_size))[0])
        for name_of, parameter in backbone.named_parameters():
            if name_of.endswith("mask_token"):
                parameter.requires_grad_(False)  # of pre-training: no picture is masked here

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether config.json names one of the families."""
        return model_type_of(files) in VISION_FAMILIES

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionEncoder:  # noqa: ARG003
        """Load a picture encoder."""
        backbone = files.backbone("", files.config(), AutoModel)
        encoder = cls(files.name, backbone=backbone, image_processor=files.image_processor())
        refuse_other_pipeline(encoder.pipeline(), files)
        return encoder

    def featurize(self, items: Sequence[Item], side: Side) -> Features:  # noqa: ARG002
        """Decode pictures and run the image processor; both sides are read alike."""
        process = partial(run_processor, self.image_processor, in_bytes=self.normalisation is not None)
        arrays = process_pictures(pictures_of(items), process, self.image_limits, self.image_background)
        lengths = picture_lengths(arrays["pixel_values"], int(self.backbone.config.patch_size))
        return Features({}, lengths, {"pixel_values": arrays["pixel_values"]})

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Take the rows; pictures need no padding."""
        return {"pixel_values": rows_of(features.per_row["pixel_values"], rows)}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E) of unit length, at least float32."""
        pixels = normalised(inputs, self.normalisation).to(self.backbone.dtype)
        outputs = self.backbone(pixel_values=pixels)
        if self.pooling == "head":
            return unit(outputs.pooler_output)
        hidden_RTH = outputs.last_hidden_state
        return unit(hidden_RTH[:, 0] if self.pooling == "cls" else hidden_RTH.mean(dim=1))

    def save(self, folder: Path) -> None:
        """Write a folder that transformers and vembed load."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    def describe(self) -> dict[str, str]:
        """Return how pictures are read and summed up."""
        return {
            "family": f"{self.backbone.config.model_type} (config.json)",
            "pooling": f"{self.pooling} ({self._reason})",
            "pictures": f"{type(self.image_processor).__name__} (preprocessor_config.json)",
            "similarity": "cosine",
            "attention": str(self.backbone.config._attn_implementation),
            **self.training_facts(),
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower."""
        config = self.backbone.config
        depth, period = transformer_depth(config), transformer_period(config)
        return (find_tower(self, "vision", parts=("backbone",), depth=depth, period=period),)

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
        return layer_values(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, self.picture_tokens
        )

    def pipeline(self) -> Pipeline:
        """Return what sentence-transformers does: the tokens pooled, or what the model's head makes of them."""
        by_head = self.pooling == "head"
        return Pipeline(
            modalities={"image": ("forward", "pooler_output" if by_head else "last_hidden_state")},
            pooling=None if by_head else self.pooling,
        )

    def usage(self) -> Recipe:
        """Return how transformers alone gives the vectors."""
        return Recipe("vision", "AutoModel", self.pooling)
