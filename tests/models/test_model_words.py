"""What is said of models is refused in words where it can't hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kit.picture_models import picture
from kit.text_models import load_any
from vision_language_cases import write_vision_language

import vembed
from vembed.batch import Composed
from vembed.errors import ConfigError
from vembed.models.load import encoder_classes
from vembed.models.vision_language import VisionLanguageEncoder
from vembed.models.vision_language_families import UNTRAINED
from vembed.registry import BUILTIN_MODELS, ENCODERS, FAMILIES

if TYPE_CHECKING:
    from pathlib import Path


def test_prompts_and_limits_that_a_picture_cannot_keep_are_refused(tmp_path: Path) -> None:
    qwen, idefics = (write_vision_language(tmp_path / kind, kind) for kind in ("qwen2_vl", "idefics3"))
    with pytest.raises(ConfigError, match=r"query_prompt holds <\|image_pad\|>, which stands for a picture"):
        load_any(qwen, prompts={"query": "See <|image_pad|>"})
    with pytest.raises(ConfigError, match="max_image_size 15: a picture takes at least 16"):
        load_any(idefics, max_image_size=15)
    assert vembed.load(qwen, device="cpu", image_tokens=9, max_image_size=40).options["image_tokens"] == 9


def test_a_composed_item_holds_a_tuple_of_pictures() -> None:
    for images in (picture(0), ()):
        with pytest.raises(TypeError, match=r"Composed takes a tuple of at least one picture"):
            Composed(images, "in red")  # type: ignore[arg-type]


def test_names_of_classes_are_no_builtin_models() -> None:
    known = {each.builtin for each in encoder_classes() if each.builtin}
    assert set(BUILTIN_MODELS) == known - ENCODERS.plugins().keys()
    assert set().union(*VisionLanguageEncoder.modes.values()) <= set(FAMILIES.names()) | UNTRAINED
    assert "colbert" not in BUILTIN_MODELS
