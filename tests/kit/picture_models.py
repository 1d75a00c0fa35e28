"""Tiny models with an image tower, built from their configs and written as ordinary folders; pictures to feed them."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import timm
import torch
from safetensors.torch import save_file
from timm.models import register_model
from transformers import (
    BitImageProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    DINOv3ConvNextConfig,
    DINOv3ConvNextModel,
    DINOv3ViTConfig,
    DINOv3ViTImageProcessor,
    DINOv3ViTModel,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    TimmWrapperConfig,
    TimmWrapperModel,
    ViTConfig,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from kit.text_models import POSITIONS, wordpiece_tokenizer
from vembed.batch import Features, Image
from vembed.gradcache.engine import Pool
from vembed.models.from_scratch import TinyClipConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vembed.batch import ContrastiveBatch, Item
    from vembed.models.encoder import Encoder

SIDE, PATCH = 32, 8

_LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "attention_dropout": 0.1,
}
_TEXT = {
    **_LAYERS,
    "vocab_size": 192,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_VISION = {**_LAYERS, "image_size": SIDE, "patch_size": PATCH}
_SQUARE = {"height": SIDE, "width": SIDE}


def _clip() -> tuple[Any, Any]:
    text = {**_TEXT, "projection_dim": 16}
    config = CLIPConfig(text_config=text, vision_config={**_VISION, "projection_dim": 16}, projection_dim=16)
    return CLIPModel(config), CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=_SQUARE)


def _siglip() -> tuple[Any, Any]:
    config = SiglipConfig(text_config={**_TEXT, "projection_size": 32}, vision_config=_VISION)
    return SiglipModel(config), SiglipImageProcessor(size=_SQUARE)


def _siglip2() -> tuple[Any, Any]:
    vision = {**_LAYERS, "num_patches": 16, "patch_size": PATCH}
    config = Siglip2Config(text_config={**_TEXT, "projection_size": 32}, vision_config=vision)
    return Siglip2Model(config), Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=16)


DUAL_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {"clip": _clip, "siglip": _siglip, "siglip2": _siglip2}


def _vit() -> tuple[Any, Any]:
    shape = {key: value for key, value in _VISION.items() if key != "attention_dropout"}
    config = ViTConfig(**shape, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return ViTModel(config), ViTImageProcessor(size=_SQUARE)


def _dinov2() -> tuple[Any, Any]:
    shape = {key: value for key, value in _VISION.items() if key not in ("attention_dropout", "intermediate_size")}
    config = Dinov2Config(**shape, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, drop_path_rate=0.1)
    return Dinov2Model(config), BitImageProcessor(size={"shortest_edge": SIDE}, crop_size=_SQUARE)


def _dinov3() -> tuple[Any, Any]:
    return DINOv3ViTModel(DINOv3ViTConfig(**_VISION, num_register_tokens=2)), DINOv3ViTImageProcessor(size=_SQUARE)


def _mae() -> tuple[Any, Any]:
    shape = {key: value for key, value in _VISION.items() if key != "attention_dropout"}
    config = ViTMAEConfig(**shape, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return ViTMAEModel(config), ViTImageProcessor(size=_SQUARE)


def _dinov3_convnext() -> tuple[Any, Any]:
    config = DINOv3ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], layer_scale_init_value=0.5)
    return DINOv3ConvNextModel(config), DINOv3ViTImageProcessor(size={"height": 64, "width": 64})


def _timm(architecture: str, **shape: Any) -> tuple[Any, Any]:
    from transformers.models.timm_wrapper.image_processing_timm_wrapper import TimmWrapperImageProcessor

    how = {"input_size": [3, SIDE, SIDE], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 1.0}
    config = TimmWrapperConfig(
        architecture=architecture,
        pretrained_cfg={**how, "interpolation": "bicubic", "crop_mode": "center"},
        model_args={"img_size": SIDE, "patch_size": PATCH, "embed_dim": 32, "depth": 2, "num_heads": 2, **shape},
    )
    return TimmWrapperModel(config), TimmWrapperImageProcessor(config.pretrained_cfg)


def _clip_vision() -> tuple[Any, Any]:
    processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=_SQUARE)
    return CLIPVisionModel(CLIPVisionConfig(**_VISION)), processor


def _siglip_vision(*, use_head: bool = True) -> tuple[Any, Any]:
    config = SiglipVisionConfig(**_VISION, vision_use_head=use_head)
    return SiglipVisionModel(config), SiglipImageProcessor(size=_SQUARE)


VISION_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "vit": _vit,
    "dinov2": _dinov2,
    "dinov3": _dinov3,
    "dinov3 convnext": _dinov3_convnext,
    "mae": _mae,
    "timm eva02": lambda: _timm("eva02_tiny_patch14_224"),
    "timm naflex": lambda: _timm("vit_tiny_patch16_224", use_naflex=True),
    "clip vision": _clip_vision,
    "siglip vision": _siglip_vision,
    "siglip vision without a head": lambda: _siglip_vision(use_head=False),
}


def write_picture_model(folder: Path, kind: str) -> Path:
    """Write a bare transformers folder with seeded weights, wide enough that items differ."""
    torch.manual_seed(0)
    model, processor = (DUAL_BUILDERS | VISION_BUILDERS)[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "logit" not in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if kind in DUAL_BUILDERS:
        tokenizer = wordpiece_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "[CLS]", "eos_token": "[SEP]"})
        tokenizer.save_pretrained(folder)
    return folder


TINY = TinyClipConfig(dimension=16, image_size=16, patch_size=2, channels=(8, 16), buckets=512)

OPEN_CLIP_CONFIG: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": SIDE, "layers": 2, "width": 32, "head_width": 16, "patch_size": PATCH},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


@register_model
def small_eva02(pretrained: bool = False, **options: Any) -> Any:
    """Return timm's EVA-02 of 2 layers x 32, as a tower that open_clip builds by its name."""
    shape = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.create_model("eva02_tiny_patch14_224", **shape, **options)


EVA_CONFIG: dict[str, Any] = {
    **OPEN_CLIP_CONFIG,
    "vision_cfg": {
        "image_size": SIDE, "timm_model_name": "small_eva02", "timm_pool": "token", "timm_proj": None,
    },
    "custom_text": True,
}  # fmt: skip
"""An EVA-CLIP: timm's picture tower, open_clip's text tower."""


RESNET_CONFIG: dict[str, Any] = {
    **OPEN_CLIP_CONFIG,
    "vision_cfg": {"image_size": SIDE, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
}
"""With batch normalisation."""


def write_open_clip(folder: Path, config: dict[str, Any] = OPEN_CLIP_CONFIG) -> Path:
    """Write a folder in open_clip's own form; batch normalisation has statistics that aren't those of any batch."""
    import open_clip
    from open_clip.push_to_hf_hub import save_config_for_hf

    torch.manual_seed(0)
    shape = copy.deepcopy(config)
    model = (open_clip.CustomTextCLIP if shape.pop("custom_text", False) else open_clip.CLIP)(**shape)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)  # open_clip begins the last one of each block with zeros
    open_clip.set_model_preprocess_cfg(model, {"size": SIDE, "mean": (0.5,) * 3, "std": (0.5,) * 3})
    folder.mkdir(exist_ok=True)
    save_config_for_hf(model, folder / "open_clip_config.json", config)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


def picture(seed: int, size: tuple[int, int] = (40, 36)) -> Image:
    """Return coloured squares as PNG bytes in memory."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(colours).resize(size, PIL.Image.Resampling.NEAREST).save(buffer, "PNG")
    return Image(f"picture-{seed}.png", buffer.getvalue())


PICTURES = (picture(0), picture(1, (64, 64)), picture(2, (30, 70)), picture(3, (32, 32)), picture(4))


def opened(images: Sequence[Image]) -> list[PIL.Image.Image]:
    """Decode pictures with Pillow alone."""
    return [PIL.Image.open(io.BytesIO(image.read())).convert("RGB") for image in images]


@torch.no_grad()
def vectors(encoder: Encoder, items: Sequence[Item]) -> Any:
    """Encode items of any modality, each modality in one chunk, in the order given."""
    z = None
    for _, places in encoder.by_modality(items):
        features = encoder.featurize([items[place] for place in places], "query")
        inputs = encoder.collate(features, np.arange(len(places)), int(features.lengths.max()))
        found = encoder(inputs)
        z = found.new_empty(len(items), found.shape[1]) if z is None else z
        z[torch.from_numpy(places)] = found
    return z


def pools_of(encoder: Encoder, batch: ContrastiveBatch) -> list[Pool]:
    """Make a pool for each modality of a batch."""
    items = (*batch.queries, *batch.documents)
    pools = []
    for _, slots in encoder.by_modality(items):
        features = encoder.featurize([items[slot] for slot in slots], "query")
        pools.append(Pool(encoder, encoder.collate, Features.concat([features]), slots, encoder.num_vectors(features)))
    return pools
