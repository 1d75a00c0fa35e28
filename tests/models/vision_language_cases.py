"""Tiny vision-language models, built from their real configs, processors and chat templates, written as folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from model_cases import byte_tokenizer
from transformers import (
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ColQwen2Processor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLModel,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
"""Of the square of pixels that a token stands for."""

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What Qwen's template makes of a system message and a user's pictures and texts."""

_LAYERS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_VISION: dict[str, Any] = {
    **_LAYERS,
    "depth": 3,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}


def qwen_tokenizer() -> Any:
    """Return a byte-level tokenizer with Qwen's special tokens."""
    tokenizer = byte_tokenizer(pad=False, additional_special_tokens=list(SPECIALS), pad_token="<|endoftext|>")
    tokenizer.model_max_length = 4096
    return tokenizer


def _text(tokenizer: Any, sections: tuple[int, int, int]) -> dict[str, Any]:
    return {
        **_LAYERS,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)},
    }


def _ids(tokenizer: Any) -> dict[str, int]:
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return {f"{name}_id": tokenizer.convert_tokens_to_ids(each) for name, each in zip(names, tokens, strict=True)}


def _images(**means: Any) -> Any:
    sizes = {"shortest_edge": 4 * SIDE**2, "longest_edge": 64 * SIDE**2}
    return Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=sizes, **means)


def _qwen2() -> tuple[Any, Any]:
    tokenizer = qwen_tokenizer()
    vision = {**_VISION, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    vision.pop("intermediate_size")
    config = Qwen2VLConfig(text_config=_text(tokenizer, (2, 3, 3)), vision_config=vision, **_ids(tokenizer))
    return Qwen2VLModel(config), Qwen2VLProcessor(_images(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT)


def _qwen2_5() -> tuple[Any, Any]:
    tokenizer = qwen_tokenizer()
    vision = {**_VISION, "out_hidden_size": 32, "window_size": 2 * SIDE, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=_text(tokenizer, (2, 3, 3)), vision_config=vision, **_ids(tokenizer))
    processor = Qwen2_5_VLProcessor(_images(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT)
    return Qwen2_5_VLModel(config), processor


def _qwen3() -> tuple[Any, Any]:
    tokenizer = qwen_tokenizer()
    vision = {**_VISION, "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    config = Qwen3VLConfig(text_config=_text(tokenizer, (4, 2, 2)), vision_config=vision, **_ids(tokenizer))
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = Qwen3VLProcessor(_images(**halves), tokenizer, Qwen3VLVideoProcessor(), chat_template=CHAT)
    return Qwen3VLModel(config), processor


def _colqwen2() -> tuple[Any, Any]:
    network, processor = _qwen2()
    config = ColQwen2Config(vlm_config=network.config.to_dict(), embedding_dim=12)
    return ColQwen2ForRetrieval(config), ColQwen2Processor(_images(), processor.tokenizer)


RETRIEVAL_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {"colqwen2": _colqwen2}
"""Models of late interaction."""

VISION_LANGUAGE_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
}


def write_vision_language(folder: Path, kind: str) -> Path:
    """Write a folder with seeded weights, wide enough that items differ."""
    torch.manual_seed(0)
    model, processor = (VISION_LANGUAGE_BUILDERS | RETRIEVAL_BUILDERS)[kind]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
