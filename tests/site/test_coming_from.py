"""docs/guides/coming_from.md: what stands on the right is a valid configuration, and the left has the peers' names."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from document_blocks import ROOT

from vembed.config.load import load_config
from vembed.config.messages import key_schemas
from vembed.config.names import ALIASES, OTHER_KEYS, plain_name

if TYPE_CHECKING:
    from pathlib import Path

TEXT = (ROOT / "docs" / "guides" / "coming_from.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


def rows_of(section: str, first_column: str = "") -> list[tuple[str, str]]:
    """Return the rows of a section's tables, without their heads; of one table where its first column is named."""
    tables = re.findall(r"^\| (.*?) \| Here \|\n\|---\|---\|\n((?:\|.*\n)+)", SECTIONS[section], flags=re.MULTILINE)
    lines = [line for head, body in tables if first_column in head for line in body.splitlines()]
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert all(len(each) == 2 for each in cells)
    return [(theirs, ours) for theirs, ours in cells]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


ROWS = [(section, *row) for section in SECTIONS for row in rows_of(section)]


@pytest.mark.parametrize(("section", "theirs", "ours"), ROWS, ids=[f"{row[0]}: {row[1]}" for row in ROWS])
def test_the_right_hand_side_is_a_valid_configuration(section: str, theirs: str, ours: str, tmp_path: Path) -> None:
    keys = [code for code in codes(ours) if ": " in code]
    if ours == "the same names":
        assert [code for code in codes(theirs) if plain_name(code) not in key_schemas()] == []
        return
    if not keys:
        named = [code for code in codes(ours) if re.fullmatch(r"[a-z_]+", code)]
        assert all(code in key_schemas() for code in named)
        assert named or ours.startswith(("nothing", "always", "`vembed")), "it says what to do instead"
        return
    model = [] if any(key.startswith("model_name:") for key in keys) else ["model_name: some/model"]
    config = tmp_path / "config.yaml"
    config.write_text("\n".join([*model, *keys, ""]), "utf-8")
    load_config(config)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_message_about_a_name_on_the_left_names_the_key_on_the_right(section: str) -> None:
    compared = 0
    for theirs, ours in rows_of(section):
        keys = {code.partition(":")[0] for code in codes(ours) if ": " in code}
        for name in map(plain_name, codes(theirs)):
            answers = ALIASES.get(name, (OTHER_KEYS[name],) if name in OTHER_KEYS else ())
            if keys and answers:
                assert keys & set(answers), f"{name}: the message says {answers}, the page {keys}"
                compared += 1
    assert compared > 4


@pytest.mark.slow  # its import takes seconds
def test_the_names_of_sentence_transformers_are_its_own() -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers isn't installed")
    from inspect import signature

    from sentence_transformers import util
    from sentence_transformers.sentence_transformer import evaluation, losses

    arguments = {field.name for field in fields(library.SentenceTransformerTrainingArguments)}
    named = [code for theirs, _ in rows_of("sentence-transformers", "Arguments") for code in codes(theirs)]
    assert len(named) > 25
    assert {name for name in named if name.islower()} <= arguments
    options = set(signature(losses.CachedMultipleNegativesRankingLoss).parameters)
    for theirs, _ in rows_of("sentence-transformers", "Loss"):
        for name in codes(theirs):
            assert name in options or hasattr(losses, name), name
    for theirs, _ in rows_of("sentence-transformers", "Also"):
        for name in codes(theirs):
            owner = name.partition(".")[0]
            assert any(hasattr(place, owner) for place in (library, util, evaluation)), name


def test_the_names_of_open_clip_are_its_own() -> None:
    params = pytest.importorskip("open_clip_train.params", reason="open_clip has no trainer here")
    from pathlib import Path

    source = Path(params.__file__).read_text("utf-8")
    named = [code for theirs, _ in rows_of("open_clip") for code in codes(theirs)]
    assert len(named) > 25
    assert [name for name in named if f'"{name}"' not in source] == []
