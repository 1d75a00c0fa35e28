"""A small Qwen3-VL from scratch, with a tokenizer trained on the data it will see.

Network, processor and chat template are those of the large models, so that a configuration for one of them is tried
anywhere. What it writes is an ordinary folder of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from vembed.models.encoder import About
from vembed.models.hub import prepare_backbone
from vembed.models.tiny_transformer import train_bpe
from vembed.models.vision_language import VisionLanguageEncoder
from vembed.models.vision_language_families import FAMILIES
from vembed.models.vision_language_spec import VisionLanguageSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.models.hub import ModelFiles

_PADDING, _IMAGE, _VIDEO, _SEEN = (
    "<|endoftext|>",
    "<|image_pad|>",
    "<|video_pad|>",
    ("<|vision_start|>", "<|vision_end|>"),
)
SPECIAL_TOKENS = (_PADDING, "<|im_start|>", "<|im_end|>", *_SEEN, _IMAGE, _VIDEO)
VOCABULARY_SIZE = 4096
MAX_LENGTH, IMAGE_TOKENS = 512, 64
PATCH, MERGE = 8, 2
SPREAD = 0.2
"""Of initial weights: the usual 0.02 is for layers a hundred times as wide, and gives all items nearly one vector."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of a system message and one of the user with pictures and texts, the same as Qwen3-VL's own."""


class TinyVisionLanguage(VisionLanguageEncoder):
    """How the built-in vision-language model comes to be; once saved, its folder is that of any Qwen3-VL."""

    about = About(
        models="A tiny Qwen3-VL, from scratch",
        decides="builtin:tiny-qwen3-vl",
        pooling="last token",
        prompts="the instruction of each side",
        trainable="all, text, vision, projection, last_N_layers",
        writes="transformers",
    )
    builtin = "tiny-qwen3-vl"
    reads = frozenset({"image_background"})

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:  # noqa: ARG003
        """Return False: it has no folders of its own."""
        return False

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionLanguageEncoder:
        """Train a tokenizer on the texts and initialise both stacks; weights follow torch's global generator."""
        processor = _processor(texts if files.has_weights else ())
        tokenizer = processor.tokenizer
        vocabulary_size = len(tokenizer) if files.has_weights else VOCABULARY_SIZE  # few texts give a smaller one
        with files.device:
            backbone = Qwen3VLModel(_config(tokenizer, vocabulary_size))
        if not files.has_weights:
            prepare_backbone(backbone)  # or transformers warns of what no encoder does
        family = FAMILIES["qwen3_vl"]
        family.limit_images(processor, IMAGE_TOKENS, None)
        spec = VisionLanguageSpec(
            {"query": family.instruction, "document": family.instruction}, MAX_LENGTH, IMAGE_TOKENS, family.pooling
        )
        return VisionLanguageEncoder(files.name, backbone=backbone, processor=processor, family=family, spec=spec).to(
            files.dtype
        )


def _config(tokenizer: Any, vocabulary_size: int) -> Qwen3VLConfig:
    named = {"image_token": _IMAGE, "video_token": _VIDEO, "vision_start_token": _SEEN[0], "vision_end_token": _SEEN[1]}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": vocabulary_size,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "initializer_range": SPREAD,
            "max_position_embeddings": MAX_LENGTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]},
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "initializer_range": SPREAD,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()},
    )


def _processor(texts: Iterable[str]) -> Any:
    """Train the tokenizer on texts, and put the image processor and the chat template beside it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(texts, VOCABULARY_SIZE, SPECIAL_TOKENS),
        model_max_length=MAX_LENGTH,
        pad_token=_PADDING,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    halves = [0.5] * 3
    images = Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, image_mean=halves, image_std=halves)
    return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=CHAT_TEMPLATE)
