"""Two towers, one for texts and one for pictures: CLIP, SigLIP and SigLIP 2 from Hugging Face.

Texts must look as they did in training. CLIP's attention is causal and it pools at the first end-of-text token, so that
padding behind it is never seen. SigLIP was trained with every text padded to its full length, without any mask, and
pools at the last place: a text without that padding would have another vector.

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModel

from vembed.batch import Features, Ragged, modality_of, parts_of, texts_of
from vembed.models.composed import join_features, sum_of_units
from vembed.models.encoder import Encoder
from vembed.models.pictures import (
    blank_picture,
    own_lengths,
    picture_lengths,
    pictures_of,
    process_pictures,
    rows_of,
    run_processor,
    without_padding,
)
from vembed.models.text import count_truncated
from vembed.models.towers import find_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Image, Item, Modality, Side
    from vembed.data.images import ImageLimits
    from vembed.models.huggingface import ModelFiles, ModelOptions
    from vembed.models.towers import Tower, TowerName

TEMPERATURE_PARAMETERS = ("logit_scale", "logit_bias")
"""Parameters of the model file that belong to the loss that it was trained with; here the loss has its own."""


@dataclass(frozen=True, slots=True)
class DualFamily:
    """How a family reads texts.

    Attributes:
        pads_texts: Whether every text is padded to the full length, unmasked.
    """

    pads_texts: bool


DUAL_FAMILIES = {
    "clip": DualFamily(pads_texts=False),
    "siglip": DualFamily(pads_texts=True),
    "siglip2": DualFamily(pads_texts=True),
}
"""Families by the model_type of config.json."""


@dataclass(frozen=True, slots=True)
class DualParts:
    """What a model of two towers consists of.

    Attributes:
        model: Both towers with their projections.
        tokenizer: Makes the inputs of one.
        image_processor: Makes the inputs of the other.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    image_processor: Any


class DualEncoder(Encoder):
    """A text tower and an image tower that end in one space.

    Args:
        name: What it was loaded by.
        parts: Model, tokenizer and image processor.
        image_limits: What a picture may be.
    """

    modalities: frozenset[Modality] = frozenset({"text", "image", "image+text"})

    def __init__(self, name: str, *, parts: DualParts, image_limits: ImageLimits) -> None:
        super().__init__()
        config = parts.model.config
        self.name = name
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.image_processor = parts.image_processor
        self.image_limits = image_limits
        self.family = DUAL_FAMILIES[config.model_type]
        self.max_length: int = config.text_config.max_position_embeddings
        self.dimension = _dimension(config)
        pad_id = self.tokenizer.pad_token_id
        assert isinstance(pad_id, int)
        self._pad_id = pad_id
        blank = run_processor(self.image_processor, [blank_picture()])
        self.picture_tokens = int(picture_lengths(blank["pixel_values"], self.patch_size)[0])
        for key in TEMPERATURE_PARAMETERS:
            if hasattr(self.model, key):
                getattr(self.model, key).requires_grad_(requires_grad=False)

    @property
    def patch_size(self) -> int:
        """Side of a patch, in pixels."""
        return int(self.model.config.vision_config.patch_size)

    @property
    def _towers(self) -> Any:
        return self.model  # every dual family has get_text_features and get_image_features; their base class doesn't

    def featurize(self, items: Sequence[Item], side: Side) -> Features:  # noqa: ARG002
        """Tokenize texts, or decode pictures and run the image processor, or both; both sides are read alike."""
        modality = modality_of(items[0])
        if modality == "text":
            return self._tokenized(texts_of(items))
        if modality == "image":
            return self._processed(pictures_of(items))
        images, texts = parts_of(items)
        return join_features(self._processed(images), self._tokenized(texts))

    def _processed(self, images: Sequence[Image]) -> Features:
        process = partial(run_processor, self.image_processor)
        arrays = process_pictures(images, process, self.image_limits)
        return Features({}, own_lengths(arrays, self.patch_size), arrays)

    def _tokenized(self, texts: list[str]) -> Features:
        encoded = self.tokenizer(
            [text.strip() for text in texts],
            truncation=True,
            max_length=self.max_length,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        # A tokenizer without special tokens makes nothing of an empty text; a row needs one token.
        ids = Ragged.from_rows([row or [self._pad_id] for row in encoded["input_ids"]])
        num_truncated = count_truncated(encoded, ids.lengths, self.max_length)
        if self.family.pads_texts:
            ids = Ragged.from_rows([self._to_full_length(row) for row in encoded["input_ids"]])
        return Features({"input_ids": ids}, ids.lengths, num_truncated=num_truncated)

    def _to_full_length(self, row: list[int]) -> list[int]:
        padding = [self._pad_id] * (self.max_length - len(row))
        return padding + row if self.tokenizer.padding_side == "left" else row + padding

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Take the rows of pictures, or pad those of texts at the right, never past the last position, or both.

        Pictures of unequal numbers of patches are padded to the longest of the chunk.
        """
        inputs = without_padding({name: rows_of(values, rows) for name, values in features.per_row.items()})
        if "input_ids" in features.columns:
            ids = features.columns["input_ids"].take(rows)
            # Beside a picture the width is that of both.
            width = int(ids.lengths.max()) if inputs else min(width, self.max_length)
            inputs["input_ids"] = torch.from_numpy(ids.padded(width, self._pad_id)).long()
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E) of texts, of pictures or of both, of unit length, at least float32."""
        pictures = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
        if "input_ids" not in inputs:
            return self._embed_pictures(pictures)
        text_RE = _unit(self._towers.get_text_features(input_ids=inputs["input_ids"]).pooler_output)
        return sum_of_units(self._embed_pictures(pictures), text_RE) if pictures else text_RE

    def _embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        pixels = inputs["pixel_values"].to(self.model.dtype)
        return _unit(self._towers.get_image_features(**{**inputs, "pixel_values": pixels}).pooler_output)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers and vembed load."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    def describe(self) -> dict[str, str]:
        """Return how texts and pictures are read, and what the model file says of its own temperature."""
        scale = getattr(self.model, "logit_scale", None)
        facts = {
            "family": f"{self.model.config.model_type} (config.json)",
            "texts": f"padded to {self.max_length} tokens, unmasked" if self.family.pads_texts else "padded by chunk",
            "max_seq_length": f"{self.max_length} (config.json)",
            "pictures": f"{type(self.image_processor).__name__} (preprocessor_config.json)",
            "similarity": "cosine",
            "attention": str(self.model.config._attn_implementation),
            **self.training_facts(),
        }
        if scale is not None:
            facts["logit_scale of the model file"] = f"{math.exp(scale.item()):.4g}, not used: the loss has its own"
        return facts

    def towers(self) -> tuple[Tower, ...]:
        """Return the text tower and the image tower; where a tower has a projection, it is a part of it."""
        config = self.model.config
        towers: tuple[tuple[TowerName, str, int], ...] = (
            ("text", "model.text_projection", config.text_config.num_hidden_layers),
            ("vision", "model.visual_projection", config.vision_config.num_hidden_layers),
        )
        return tuple(
            find_tower(
                self,
                name,
                parts=(f"model.{name}_model", projection),
                projection=(projection, f"model.{name}_model.head"),  # CLIP's linear one; SigLIP's pooling heads
                depth=depth,
            )
            for name, projection, depth in towers
        )

    def adapter_host(self) -> nn.Module:
        """Return the network of both towers."""
        return self.model

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer of both towers in backward; non-reentrant, as gradient caching needs."""
        if not self.model.supports_gradient_checkpointing:
            super().enable_gradient_checkpointing()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _unit(x: Tensor) -> Tensor:
    """Return x in at least float32, of unit length."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def _dimension(config: PreTrainedConfig) -> int:
    """Return E: CLIP projects both towers to it, SigLIP ends in the width of its image tower."""
    return int(config.projection_dim if config.model_type == "clip" else config.vision_config.hidden_size)


def load_dual_encoder(options: ModelOptions, files: ModelFiles, config: PreTrainedConfig) -> DualEncoder:
    """Load both towers.

    Raises:
        ConfigError: When the model needs something that isn't allowed, or lacks weights.
        MachineError: When the hub can't be reached or a package is missing.
    """
    parts = DualParts(
        model=files.backbone("", config, AutoModel),
        tokenizer=files.tokenizer(""),
        image_processor=files.image_processor(),
    )
    return DualEncoder(options.name, parts=parts, image_limits=options.image_limits)
