"""How the items of a vision-language model are read: by the user's word, else by its folder, else by its family."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError
from vembed.models.hub import PICTURE_SIDE, tokenizer_facts
from vembed.models.text_spec import asked_pooling
from vembed.models.vision_language_siglip import square_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from vembed.batch import Side
    from vembed.models.hub import ModelFiles
    from vembed.models.pooling import PoolingMode
    from vembed.models.vision_language_family import VisionLanguageFamily

SETTINGS_FILE = "vembed_vision_language.json"
"""Holds what transformers' own files have no place for: instructions, longest row, tokens of a picture, pooling."""

MOST_TOKENS = 8192
"""Of a row, unless the user or the model's files say less: Qwen3-VL-Embedding's own."""

USUAL_SQUARES = 4
"""Squares along a side of the largest picture, as Idefics3's and SmolVLM's own processors cut it."""


@dataclass(frozen=True, slots=True)
class VisionLanguageSpec:
    """How items are read; each value from the user, else from the model's folder, else from its family."""

    instructions: Mapping[Side, str]  # system message of each side's items; empty for none
    max_length: int  # tokens of a row, those of pictures included
    image_tokens: int  # most tokens of a picture
    pooling: PoolingMode


def load_processor(
    files: ModelFiles, config: PreTrainedConfig, family: VisionLanguageFamily
) -> tuple[Any, VisionLanguageSpec]:
    """Load tokenizer, image processor and chat template, and decide how items are read.

    Raises:
        ConfigError: There is no chat template, or a picture wouldn't fit a row.
    """
    processor = _stand_in(config) if files.shape else files.processor()
    if family.wording is None and not getattr(processor, "chat_template", None):
        raise ConfigError(
            f"{files.name} has no chat template, by which its items are put into words: its chat_template.jinja is "
            f"missing"
        )
    most = files.read_json(SETTINGS_FILE).get("image_tokens", family.most_image_tokens)
    wanted = most if files.keys.image_tokens == "auto" else files.keys.image_tokens
    image_tokens = family.limit_images(processor, wanted, files.keys.max_image_size)
    return processor, decide_spec(files, config, processor.tokenizer, family, image_tokens)


def decide_spec(
    files: ModelFiles,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    family: VisionLanguageFamily,
    image_tokens: int,
) -> VisionLanguageSpec:
    """Decide how items are read: by the user's word, else by the model's folder, else by its family.

    Raises:
        ConfigError: A picture wouldn't fit a row, or a prompt holds what stands for one.
    """
    keys, saved = files.keys, files.read_json(SETTINGS_FILE)
    said = saved.get("instructions", {})
    given: dict[Side, str | None] = {"query": keys.query_prompt, "document": keys.document_prompt}
    instructions = {
        side: _ended(said.get(side, family.instruction) if own is None else own, family) for side, own in given.items()
    }
    network = getattr(config, "vlm_config", config)  # ColPali's and ColQwen2's is within theirs
    placeholder = str(tokenizer.convert_ids_to_tokens(network.image_token_id))
    for side, own in given.items():
        if placeholder in (own or ""):
            raise ConfigError(f"{side}_prompt holds {placeholder}, which stands for a picture; leave it out")
    limits = (tokenizer.model_max_length, getattr(config.get_text_config(), "max_position_embeddings", MOST_TOKENS))
    known = min(int(saved.get("max_seq_length", MOST_TOKENS)), *limits)
    max_length = known if keys.max_seq_length == "auto" else keys.max_seq_length
    if image_tokens >= max_length:
        raise ConfigError(
            f"{files.name}: a picture of {image_tokens} tokens doesn't fit rows of {max_length}, and none is cut; "
            f"set max_seq_length above it, or image_tokens to at most {max_length // 2}"
        )
    pooling: PoolingMode = asked_pooling(keys) or saved.get("pooling", family.pooling)
    return VisionLanguageSpec(instructions, max_length, image_tokens, pooling)


def _ended(instruction: str, family: VisionLanguageFamily) -> str:
    """Return an instruction with a full stop where the family wants punctuation at its end."""
    instruction = instruction.strip()
    ends = not instruction or unicodedata.category(instruction[-1]).startswith("P")
    return instruction if ends or not family.ends_instruction else f"{instruction}."


def _stand_in(config: PreTrainedConfig) -> Any:
    """Return what encoders and families read of a processor, for the shape of a model."""
    network: Any = getattr(config, "vlm_config", config)
    vision, tokenizer = network.vision_config, tokenizer_facts(MOST_TOKENS)
    tokenizer.all_special_ids, tokenizer.convert_ids_to_tokens = (), str
    side = getattr(vision, "image_size", PICTURE_SIDE)  # Qwen's have none: they take any
    tokens = square_tokens(network) if hasattr(vision, "image_size") else 0
    images = SimpleNamespace(
        patch_size=vision.patch_size,
        merge_size=getattr(vision, "spatial_merge_size", 1),
        size={"height": side, "longest_edge": USUAL_SQUARES * side},
        max_image_size={"longest_edge": side},
        do_image_splitting=True,
        image_grid_pinpoints=getattr(network, "image_grid_pinpoints", ()),
    )
    return SimpleNamespace(
        tokenizer=tokenizer,
        image_processor=images,
        chat_template="none is read",
        image_seq_length=tokens,
        image_seq_len=tokens,
        num_image_tokens=tokens,
        vision_aspect_ratio=getattr(network, "vision_aspect_ratio", ""),
    )
