"""A stranger's vision-language family in one file, the one that CONTRIBUTING.md prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.picture_models import opened
from kit.text_models import load_any
from transformers import AutoModel, AutoProcessor
from vision_language_cases import write_vision_language

import vembed
from vembed.batch import Composed, Image
from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.evaluation.card_facts import model_facts
from vembed.models.keys import ModelKeys
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model
from vembed.models.vision_language import VisionLanguageEncoder
from vembed.models.vision_language_families import VisionLanguageFamily
from vembed.registry import FAMILIES, plugin_lines
from vembed.testing.encoders import (
    assert_all_trainable_move,
    assert_same_gradients,
    embed,
    engine_step,
    items_of,
    plain_step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.batch import Item

ROOT = Path(vembed.__file__).parents[1]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Add a vision-language family")[2]
RECIPE = RECIPE.partition("\n## ")[0]
(CODE,) = re.findall(r"```python\n(.*?)```", RECIPE, flags=re.DOTALL)
(SETTINGS,) = re.findall(r"```yaml\n(.*?)```", RECIPE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_language(tmp_path_factory.mktemp("internvl") / "model", "internvl")


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recipe as a module of the current folder; what it registers is forgotten with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for table in ("_entries", "_plugins"):
        monkeypatch.setattr(FAMILIES, table, dict(getattr(FAMILIES, table)))
    (tmp_path / "internvl.py").write_text(CODE, "utf-8")
    (tmp_path / "config.yaml").write_text(SETTINGS, "utf-8")
    load_config(tmp_path / "config.yaml")
    yield
    sys.modules.pop("internvl", None)


def load(model: Path, **keys: Any) -> VisionLanguageEncoder:
    encoder = load_any(model, dtype=torch.float64, **keys).eval()
    assert isinstance(encoder, VisionLanguageEncoder)
    return encoder


@torch.no_grad()
def by_transformers(model: Path, items: tuple[Item, ...]) -> torch.Tensor:
    """Return the vectors of items by transformers' own processor and forward."""
    network = AutoModel.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    processor = AutoProcessor.from_pretrained(model)
    rows = []
    for item in items:
        images = item.images if isinstance(item, Composed) else [item] if isinstance(item, Image) else []
        text = item if isinstance(item, str) else item.text if isinstance(item, Composed) else ""
        words = f"<user>{'<IMG_CONTEXT>' * len(images)}{text}<end><assistant>"
        call = processor(text=[words], images=opened(images) or None, crop_to_patches=False, return_tensors="pt")
        inputs = {name: tensor.double() if name == "pixel_values" else tensor for name, tensor in call.items()}
        rows.append(torch.nn.functional.normalize(network(**inputs).last_hidden_state[0, -1], dim=0))
    return torch.stack(rows)


def test_the_recipe_gives_the_vectors_of_transformers_and_trains_exactly(model: Path) -> None:
    encoder = load(model)
    items = items_of(encoder)
    vectors = torch.cat(embed(encoder, items))
    torch.testing.assert_close(vectors, by_transformers(model, items), rtol=0, atol=1e-5)
    assert torch.pdist(vectors).min() > 1e-3, "different items have different vectors"
    loss, expected = plain_step(encoder.train())
    assert_all_trainable_move(encoder, expected, but="mask_token")
    assert {name.split(".")[1] for name in expected} == {"vision_tower", "multi_modal_projector", "language_model"}
    result, gradients = engine_step(encoder)
    assert result.num_chunks >= 3
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_same_gradients(gradients, expected, near=1e-10)


def test_it_is_planned_told_and_read_back_like_ours(model: Path, tmp_path: Path) -> None:
    encoder = load(model, query_prompt="Find it")
    assert encoder.facts()["family"] == "InternVL (config.json)"
    size = profile_model(ModelKeys(model_name=str(model)), ProfileTarget("cpu"))
    assert not size.estimated
    assert {tower.name for tower in size.towers} == {"text", "vision"}
    [line] = plugin_lines(["internvl"])
    assert line.endswith("registers vision-language family internvl")
    assert model_facts(encoder, "transformers").plugin == "internvl"
    encoder.save(tmp_path / "saved")
    items = items_of(encoder)
    assert torch.equal(torch.cat(embed(load(tmp_path / "saved"), items)), torch.cat(embed(encoder, items)))


def test_a_family_that_lacks_a_fact_or_has_a_type_of_ours_is_refused() -> None:
    family = type("Nameless", (FAMILIES.load("internvl"),), {"model_type": ""})
    with pytest.raises(ConfigError, match="family Nameless: state model_type in the class"):
        vembed.register_family(family)
    with pytest.raises(ConfigError, match="family Bare: state model_type, name, hidden_states in the class"):
        vembed.register_family(type("Bare", (VisionLanguageFamily,), {}))
    family.model_type = "qwen3_vl"
    with pytest.raises(ConfigError, match=r"vision-language family 'qwen3_vl' of .* is already that of vembed"):
        vembed.register_family(family)


def test_a_refused_type_that_a_plugin_knows_is_loaded_by_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ConfigError, match=r"type llava don't train here; take one of .*, PaliGemma, InternVL"):
        load(tmp_path)
    vembed.register_family(type("Llava", (FAMILIES.load("internvl"),), {"model_type": "llava"}))
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path)  # its files are missing
    assert "don't train here" not in str(refusal.value)
