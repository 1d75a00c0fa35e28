"""The tables of docs/models.md are what the encoder classes state and what the plan predicts."""

from __future__ import annotations

import pytest

from vembed.registry import ENCODERS
from vembed.training.models_page import END, PAGE, TABLES, class_table, render_page

QUICK = [name for name in TABLES if name != "memory"]


def test_the_tables_of_the_page_are_what_the_classes_say() -> None:
    page = PAGE.read_text("utf-8")
    assert render_page(page, QUICK) == page
    assert page.count(END) == len(TABLES)


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table between <!-- table of prompts -->"):
        render_page("# Models\n", ["prompts"])


def test_every_class_of_ours_is_on_the_page() -> None:
    lines = [line for line in class_table().splitlines() if line.startswith("| ")]
    own = [ENCODERS.load(name) for name in ENCODERS.names() if name not in ENCODERS.plugins()]
    for each in own:
        assert "about" in vars(each), each
        assert sum(line.startswith(f"| {each.about.models} |") for line in lines) == 1


@pytest.mark.slow
def test_the_memory_on_the_page_is_what_the_plan_predicts() -> None:
    page = PAGE.read_text("utf-8")
    assert render_page(page, ["memory"]) == page
