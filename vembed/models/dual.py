"""CLIP, SigLIP and SigLIP 2 of transformers: two towers, one for texts and one for pictures, that end in one space.

Texts must look as they did in training. CLIP's attention is causal and it pools at the first end-of-text token, so that
padding behind it is never seen. SigLIP was trained with every text padded to its full length, without any mask, and
pools at the last place: a text without that padding would have another vector.

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

import math
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transformers import AutoModel
from typing_extensions import override

from vembed.batch import Features, Ragged
from vembed.models.composed import TwoTowers
from vembed.models.encoder import About
from vembed.models.exportable import Recipe
from vembed.models.formats import (
    GENERAL_FILE,
    Pipeline,
    model_type_of,
    module_kinds,
    read_modules,
    refuse_truncation,
)
from vembed.models.pictures import (
    last_step,
    normalised,
    own_lengths,
    picture_lengths,
    process_pictures,
    refuse_other_size,
    run_processor,
    sample_pixels,
)
from vembed.models.plannable import find_tower, layer_values, picture_inputs, token_inputs
from vembed.models.pooling import unit
from vembed.models.token_rows import count_truncated, token_rows
from vembed.models.vision import TransformersPictures

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Image, Side
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import Tower, TowerInputs, TowerName

PADS_TEXTS = {"clip": False, "siglip": True, "siglip2": True}
"""True for a model_type of config.json whose texts are all padded to the full length, and the padding attended to."""


class DualEncoder(TwoTowers, TransformersPictures):
    """CLIP or SigLIP."""

    about = About(
        models="CLIP, SigLIP, SigLIP 2",
        decides="model_type, or a modules.json with a CLIPModel",
        pooling="each tower's own",
        prompts="none",
        trainable="all, text, vision, projection, last_N_layers",
        writes="transformers, sentence-transformers",
    )
    modes = MappingProxyType({"clip": frozenset({"clip"}), "siglip": frozenset({"siglip", "siglip2"})})

    def __init__(
        self, name: str, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, image_processor: Any
    ) -> None:
        super().__init__()
        config = model.config
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.pads_texts = PADS_TEXTS[config.model_type]
        self.max_length = config.text_config.max_position_embeddings
        # CLIP projects both towers to E, SigLIP ends in the width of its image tower.
        is_clip = config.model_type == "clip"
        self.dimension = int(config.projection_dim if is_clip else config.vision_config.hidden_size)
        pad_id = tokenizer.pad_token_id
        assert isinstance(pad_id, int)
        self.padding_id = pad_id
        self.patch_size = int(config.vision_config.patch_size)
        self.normalisation = last_step(image_processor, name)
        sample = sample_pixels(name, image_processor)  # SigLIP 2's processor pads each picture to the most it allows
        refuse_other_size(name, sample, config.vision_config)
        self.picture_tokens = int(picture_lengths(sample, self.patch_size)[0])
        # The file's temperature belongs to the loss that the model was trained with; here the loss has its own.
        for key in ("logit_scale", "logit_bias"):
            if hasattr(model, key):
                getattr(model, key).requires_grad_(requires_grad=False)

    @classmethod
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        subfolder = _subfolder(files)
        return (files.config(subfolder).model_type if subfolder else model_type_of(files)) in PADS_TEXTS

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> DualEncoder:
        subfolder = _subfolder(files)
        encoder = cls(
            files.name,
            model=files.backbone(subfolder, files.config(subfolder), AutoModel),
            tokenizer=files.tokenizer(subfolder),
            image_processor=files.image_processor(subfolder),
        )
        if not subfolder:
            encoder.pipeline().refuse_other(files)
        elif not files.image_tower:
            refuse_truncation(files.read_json(GENERAL_FILE), files.name)
        return encoder

    @property
    def _towers(self) -> Any:
        """The model, untyped: all families have get_text_features and get_image_features, their base class doesn't."""
        return self.model

    @override
    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        process = partial(run_processor, self.image_processor, in_bytes=self.normalisation is not None)
        arrays = process_pictures(images, process, self.image_limits, self.image_background)
        return Features({}, own_lengths(arrays, self.patch_size), arrays)

    @override
    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        encoded = self.tokenizer(
            [text.strip() for text in texts],
            truncation=True,
            max_length=self.max_length,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        ids = token_rows(encoded["input_ids"], self.padding_id, self.name, self.model.config.text_config.vocab_size)
        num_truncated = count_truncated(encoded, ids.lengths, self.max_length)
        if self.pads_texts:  # SigLIP sees these tokens, at the side where its tokenizer had them in training
            on_left, rows = self.tokenizer.padding_side == "left", []
            for row in encoded["input_ids"]:
                padding = [self.padding_id] * (self.max_length - len(row))
                rows.append(padding + row if on_left else row + padding)
            ids = Ragged.from_rows(rows)
        return Features({"input_ids": ids}, ids.lengths, num_truncated=num_truncated)

    @override
    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        return unit(self._towers.get_text_features(input_ids=inputs["input_ids"].long()).pooler_output)

    @override
    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        # SigLIP 2 takes the shapes and the mask of its patches beside the pixels: they go through as they are.
        pixels = normalised(inputs, self.normalisation).to(self.model.dtype)
        return unit(self._towers.get_image_features(**{**inputs, "pixel_values": pixels}).pooler_output)

    @override
    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    @override
    def facts(self) -> dict[str, str]:
        scale = getattr(self.model, "logit_scale", None)
        facts = {
            "family": f"{self.model.config.model_type} (config.json)",
            "texts": f"padded to {self.max_length} tokens, unmasked" if self.pads_texts else "padded by chunk",
            "max_seq_length": f"{self.max_length} (config.json)",
            "pictures": f"{type(self.image_processor).__name__} (preprocessor_config.json)",
            "similarity": "cosine",
            "attention": str(self.model.config._attn_implementation),
        }
        if scale is not None:
            facts["logit_scale of the model file"] = f"{math.exp(scale.item()):.4g}, not used: the loss has its own"
        return facts

    @override
    def towers(self) -> tuple[Tower, ...]:
        config = self.model.config
        towers: tuple[tuple[TowerName, str, Any], ...] = (
            ("text", "model.text_projection", config.text_config),
            ("vision", "model.visual_projection", config.vision_config),
        )
        return tuple(
            find_tower(
                self,
                name,
                parts=(f"model.{name}_model", projection),
                projection=(projection, f"model.{name}_model.head"),  # CLIP's linear one; SigLIP's pooling heads
                config=tower_config,
            )
            for name, projection, tower_config in towers
        )

    @override
    def adapter_host(self) -> nn.Module:
        return self.model

    @override
    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        return token_inputs(self.max_length, padded=self.pads_texts), picture_inputs(self)

    @override
    def activation_values(self) -> float:
        config = self.model.config
        towers = (config.text_config, self.max_length), (config.vision_config, self.picture_tokens)
        return max(
            layer_values(tower.num_hidden_layers, tower.hidden_size, tower.num_attention_heads, length)
            for tower, length in towers
        )

    @override
    def pipeline(self) -> Pipeline:
        text: dict[str, object] = {"padding_side": "right", "return_attention_mask": False}
        if self.pads_texts:
            side = self.tokenizer.padding_side
            text |= {"padding": "max_length", "max_length": self.max_length, "padding_side": side}
        processing = {"text": text}
        # The processor of SigLIP 2 has sizes of its own that would win over those of the image processor's file.
        sizes = {
            key: value
            for key in ("patch_size", "max_num_patches")
            if (value := getattr(self.image_processor, key, None)) is not None
        }
        if sizes:
            processing["image"] = sizes
        return Pipeline(
            modalities={
                "text": ("get_text_features", "pooler_output"),
                "image": ("get_image_features", "pooler_output"),
            },
            processing=processing,
            needs_processing=self.pads_texts or bool(sizes),
            max_length=self.max_length,
        )

    @override
    def recipe(self) -> Recipe:
        padding: dict[str, object] = {"padding": True, "padding_side": "right"}
        if self.pads_texts:
            side = self.tokenizer.padding_side
            padding = {"padding": "max_length", "padding_side": side, "return_attention_mask": False}
        return Recipe("dual", "AutoModel", "", padding)


def _subfolder(files: ModelFiles) -> str:
    """Return the folder of a CLIPModel of sentence-transformers, as in its clip-ViT-B-32; "" for all other models."""
    modules = read_modules(files)
    return str(modules[0]["path"]) if module_kinds(files) in {("CLIPModel",), ("CLIPModel", "Normalize")} else ""
