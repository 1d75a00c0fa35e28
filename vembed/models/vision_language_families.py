"""The families of vision-language models, by the model_type of config.json.

A row says how an item is put into words, how large pictures may be, what a call needs beside the pixels, and how the
network is run; all else is `VisionLanguageEncoder`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.models.vision_language_qwen import qwen
from vembed.models.vision_language_siglip import gemma3, idefics3, llava_onevision, paligemma

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.models.vision_language_family import VisionLanguageFamily

FAMILIES: Mapping[str, VisionLanguageFamily] = {
    "qwen2_vl": qwen("Qwen2-VL", merger=("visual.merger",), most_image_tokens=1280),
    "qwen2_5_vl": qwen("Qwen2.5-VL", merger=("visual.merger",), most_image_tokens=1280),
    "qwen3_vl": qwen(
        "Qwen3-VL",
        merger=("visual.merger", "visual.deepstack_merger_list"),
        taps="deepstack_visual_indexes",
        most_image_tokens=1800,
        instruction="Represent the user's input.",
        ends_instruction=True,
    ),
    "idefics3": idefics3("Idefics3"),
    "smolvlm": idefics3("SmolVLM"),
    "llava_onevision": llava_onevision("LLaVA-OneVision"),
    "gemma3": gemma3("Gemma3"),
    "paligemma": paligemma("PaliGemma"),
}
"""A new family's row goes here, made by the file of those that it is like."""

UNTRAINED = frozenset({"llava", "llava_next"})
"""Types of models that are refused by name: the text encoder would take them for one of texts."""


def refuse_untrained(name: str, kind: str) -> None:
    """Refuse a model of such a type, and say which ones train.

    Raises:
        ConfigError: It is of one.
    """
    if kind in UNTRAINED:
        families = ", ".join(family.name for family in FAMILIES.values())
        raise ConfigError(f"{name}: models of type {kind} don't train here; take one of {families}")
