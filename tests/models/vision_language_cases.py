"""Tiny vision-language models, built from their real configs, processors and chat templates, written as folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from kit.text_models import byte_tokenizer
from transformers import (
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ColQwen2Processor,
    Gemma3Config,
    Gemma3ImageProcessor,
    Gemma3Model,
    Gemma3Processor,
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ImageProcessor,
    Idefics3Model,
    Idefics3Processor,
    InternVLConfig,
    InternVLModel,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionModel,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PaliGemmaConfig,
    PaliGemmaModel,
    PaliGemmaProcessor,
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
    SiglipImageProcessor,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMModel,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

processing_smolvlm.num2words = processing_smolvlm.num2words or str  # a package that counts the frames of videos

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


_GEMMA: dict[str, Any] = {
    **_LAYERS,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 1,  # of the tokenizer: the row of this token never trains
}
_SIGLIP: dict[str, Any] = {
    **_LAYERS,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
SQUARE = {"height": 16, "width": 16}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PLAIN_CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The form of a template; IMAGE stands for the family's placeholder."""


def _tokenizer(*specials: str, **named: str) -> Any:
    tokenizer = byte_tokenizer(additional_special_tokens=list(specials), **named)
    tokenizer.model_max_length = 4096
    return tokenizer


def _paligemma_network(tokenizer: Any) -> PaliGemmaConfig:
    return PaliGemmaConfig(
        text_config={**_GEMMA, "model_type": "gemma", "vocab_size": len(tokenizer)},
        vision_config={**_SIGLIP, "model_type": "siglip_vision_model", "projection_dim": 32},
        projection_dim=32,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )


def _paligemma() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    images = SiglipImageProcessor(size=SQUARE, image_seq_length=16, **HALVES)
    processor = PaliGemmaProcessor(images, tokenizer)  # adds tokens
    return PaliGemmaModel(_paligemma_network(tokenizer)), processor


def _colpali() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    processor = ColPaliProcessor(SiglipImageProcessor(size=SQUARE, image_seq_length=16, **HALVES), tokenizer)
    config = ColPaliConfig(vlm_config=_paligemma_network(tokenizer).to_dict(), embedding_dim=12)
    return ColPaliForRetrieval(config), processor


def _gemma3() -> tuple[Any, Any]:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(*named.values(), extra_special_tokens=named)
    text = {**_GEMMA, "vocab_size": len(tokenizer), "sliding_window": 16, "query_pre_attn_scalar": 16}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(
        text_config=text | layers,
        vision_config={**_SIGLIP, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_id=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_id=tokenizer.convert_tokens_to_ids("<end_of_image>"),
    )
    chat = PLAIN_CHAT.replace("IMAGE", "<start_of_image>")
    images = Gemma3ImageProcessor(size=SQUARE, image_seq_length=4, **HALVES)
    network = Gemma3Model(config)
    torch.nn.init.normal_(network.multi_modal_projector.mm_input_projection_weight, std=0.2)  # which begins at zero
    return network, Gemma3Processor(images, tokenizer, chat_template=chat, image_seq_length=4)


def _idefics3() -> tuple[Any, Any]:
    places = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places)
    config = Idefics3Config(
        text_config={**_GEMMA, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=_SIGLIP,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    images = Idefics3ImageProcessor(size={"longest_edge": 48}, max_image_size={"longest_edge": 16}, **HALVES)
    chat = PLAIN_CHAT.replace("IMAGE", "<image>")
    return Idefics3Model(config), Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=chat)


def _smolvlm() -> tuple[Any, Any]:
    network, processor = _idefics3()
    config = SmolVLMConfig(**{name: value for name, value in network.config.to_dict().items() if name != "model_type"})
    images = SmolVLMImageProcessor(size={"longest_edge": 48}, max_image_size={"longest_edge": 16}, **HALVES)
    videos = SmolVLMVideoProcessor(size={"longest_edge": 16}, max_image_size={"longest_edge": 16})
    template = processor.chat_template
    own = SmolVLMProcessor(images, processor.tokenizer, videos, image_seq_len=4, chat_template=template)
    return SmolVLMModel(config), own


def _llava_onevision() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>", "<video>")
    shapes = [[16, 16], [16, 32], [32, 16], [32, 32], [16, 48]]
    config = LlavaOnevisionConfig(
        text_config={**_GEMMA, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config={**_SIGLIP, "model_type": "siglip_vision_model"},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=shapes,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
    )
    images = LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=shapes, **HALVES)
    processor = LlavaOnevisionProcessor(
        images,
        tokenizer,
        LlavaOnevisionVideoProcessor(size=SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=PLAIN_CHAT.replace("IMAGE", "<image>"),
    )
    return LlavaOnevisionModel(config), processor


FAMILY_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
}
"""Models of the families that transformers runs by its own forward."""


def _colqwen2() -> tuple[Any, Any]:
    network, processor = _qwen2()
    config = ColQwen2Config(vlm_config=network.config.to_dict(), embedding_dim=12)
    return ColQwen2ForRetrieval(config), ColQwen2Processor(_images(), processor.tokenizer)


RETRIEVAL_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {"colpali": _colpali, "colqwen2": _colqwen2}
"""Models of late interaction."""


def _internvl() -> tuple[Any, Any]:
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    named |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = _tokenizer(*named.values(), extra_special_tokens=named)
    config = InternVLConfig(
        text_config={**_GEMMA, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config={**_LAYERS, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    images = GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, **HALVES)
    videos, chat = InternVLVideoProcessor(size=SQUARE), PLAIN_CHAT.replace("IMAGE", "<IMG_CONTEXT>")
    return InternVLModel(config), InternVLProcessor(images, tokenizer, videos, image_seq_length=4, chat_template=chat)


PLUGIN_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {"internvl": _internvl}
"""Models of a family that is none of ours: CONTRIBUTING.md's recipe trains it."""

VISION_LANGUAGE_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
}


def write_vision_language(folder: Path, kind: str) -> Path:
    """Write a folder with seeded weights, wide enough that items differ."""
    torch.manual_seed(0)
    builders = VISION_LANGUAGE_BUILDERS | FAMILY_BUILDERS | RETRIEVAL_BUILDERS | PLUGIN_BUILDERS
    model, processor = builders[kind]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
