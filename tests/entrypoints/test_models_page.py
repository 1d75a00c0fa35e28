"""docs/models.md is what the encoder classes state and what the plan predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

import vembed
from vembed.registry import ENCODERS
from vembed.training.models_page import MEMORY, render_classes, render_models

PAGE = Path(vembed.__file__).parents[1] / "docs" / "models.md"


def test_the_page_is_what_the_classes_say() -> None:
    assert PAGE.read_text("utf-8").partition(MEMORY)[0].strip() == render_classes().strip()


def test_every_class_of_ours_is_on_the_page() -> None:
    lines = [line for line in render_classes().splitlines() if line.startswith("| ")]
    own = [ENCODERS.load(name) for name in ENCODERS.names() if name not in ENCODERS.plugins()]
    for each in own:
        assert "about" in vars(each), each
        assert sum(line.startswith(f"| {each.about.models} |") for line in lines) == 1


@pytest.mark.slow
def test_the_memory_on_the_page_is_what_the_plan_predicts() -> None:
    assert PAGE.read_text("utf-8") == render_models()
