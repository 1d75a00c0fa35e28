"""The small encoder of texts and pictures from scratch: reproducible, cheap to feed, and able to learn."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.picture_models import PICTURES, opened, picture, vectors
from kit.text_models import TEXTS, load_any

from vembed.batch import Augmentation
from vembed.errors import ConfigError
from vembed.models import from_scratch
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder

if TYPE_CHECKING:
    from pathlib import Path


def build(seed: int = 0, **options: Any) -> TinyClip:
    torch.manual_seed(seed)
    encoder = load_any("builtin:tiny-clip", **options)
    assert isinstance(encoder, TinyClip)
    return encoder


def test_the_seed_decides_the_weights() -> None:
    first, again, other = build().state_dict(), build().state_dict(), build(seed=1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_no_layer_depends_on_the_other_rows_of_a_chunk() -> None:
    names = {type(module).__name__ for module in build().modules()}
    assert "GroupNorm" in names
    assert not any("BatchNorm" in name or "Dropout" in name for name in names)


def test_contrast_changes_next_to_nothing() -> None:
    pixels = torch.stack([torch.from_numpy(np.array(each.resize((64, 64)))) for each in opened(PICTURES[:2])])
    faint = (127.5 + 0.5 * (pixels.float() - 127.5)).round().to(torch.uint8)
    encoder = build()
    with torch.no_grad():
        first, second = encoder({"pixels": pixels})
        assert (encoder({"pixels": faint}) @ torch.stack([first, second]).T).diagonal().min() > 0.99
    assert first @ second < 0.95


def test_what_ends_in_a_single_place_still_tells_pictures_apart() -> None:
    torch.manual_seed(0)
    config = TinyClipConfig(dimension=32, image_size=8, patch_size=4, channels=(8, 16), buckets=128)
    assert config.sides[-1] == 1
    assert vectors(TinyClip(config), PICTURES).std(dim=0).mean() > 0.01


def test_an_odd_patch_is_refused() -> None:
    with pytest.raises(ValueError, match="patch_size 5 is odd"):
        TinyClipConfig(patch_size=5)
    TinyClipConfig(patch_size=6)


def test_training_on_pictures_alone_leaves_the_weights_of_the_texts_as_they_are() -> None:
    encoder = build()
    before = {name: weight.clone() for name, weight in encoder.named_parameters()}
    z = vectors_with_gradient(encoder)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3, weight_decay=0.5)
    torch.nn.functional.cross_entropy(10 * z @ z.T, torch.arange(len(z))).backward()
    optimizer.step()
    changed = {name for name, weight in encoder.named_parameters() if not torch.equal(weight, before[name])}
    assert {name for name in before if name.startswith("vision")} == changed


def vectors_with_gradient(encoder: TinyClip) -> torch.Tensor:
    z: torch.Tensor = encoder(encoder.collate(encoder.featurize(PICTURES, "query"), np.arange(len(PICTURES)), 64))
    return z


def test_left_and_right_are_two_things() -> None:
    picture_array = np.full((64, 64, 3), 255, dtype=np.uint8)
    picture_array[24:40, 4:20] = (200, 0, 0)
    encoder = build()
    pixels = torch.from_numpy(np.stack([picture_array, picture_array[:, ::-1]]))
    with torch.no_grad():
        left, right = encoder({"pixels": pixels})
    assert (left @ right).item() < 0.999


def test_pictures_are_resized_with_all_their_pixels() -> None:
    stripes = np.zeros((256, 256, 3), dtype=np.uint8)
    stripes[:, ::4] = 255  # a resize that skips pixels sees black or white only
    resized = build()._resized([PIL.Image.fromarray(stripes)])["pixels"]
    assert resized.shape == (1, 64, 64, 3)
    assert abs(float(resized.mean()) - 255 / 4) < 2
    assert resized.std() < 20


def test_pictures_that_come_back_are_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, decoded = build(), []
    own = encoder._resized
    monkeypatch.setattr(encoder, "_resized", lambda pictures: (decoded.append(len(pictures)), own(pictures))[1])
    first = encoder.featurize([*PICTURES, PICTURES[0]], "query").per_row["pixels"]
    assert decoded == [len(PICTURES)]
    again = encoder.featurize([PICTURES[2], picture(99), PICTURES[0]], "document").per_row["pixels"]
    assert decoded == [len(PICTURES), 1]
    assert np.array_equal(again[0], first[2])
    assert np.array_equal(again[2], first[0])
    assert np.array_equal(first, own(opened([*PICTURES, PICTURES[0]]))["pixels"])


def test_the_kept_pictures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_scratch, "CACHED_PICTURES", 3)
    encoder = build()
    expected = encoder.featurize(PICTURES, "query").per_row["pixels"]
    assert len(encoder._pixels) == 3
    for place, each in enumerate(PICTURES):
        assert np.array_equal(encoder.featurize([each], "query").per_row["pixels"][0], expected[place])
    assert len(encoder._pixels) == 3


def test_a_picture_that_is_changed_takes_no_room_of_those_that_come_back() -> None:
    encoder = build()
    changed = replace(PICTURES[0], augmentation=Augmentation("light", flip=True, seed=1))
    encoder.featurize([PICTURES[1], changed], "query")
    assert list(encoder._pixels) == [PICTURES[1]]


def test_a_text_costs_about_its_words_and_never_more_than_a_long_one() -> None:
    encoder = build()
    lengths = encoder.featurize(["a red circle", "red " * 30, "red " * 500], "query").lengths
    assert 1 <= lengths[0] <= 4
    assert 8 <= lengths[1] <= 40
    assert lengths.max() <= encoder.max_length


def test_a_config_with_other_sides_builds_and_reloads(tmp_path: Any) -> None:
    config = TinyClipConfig(dimension=32, image_size=36, patch_size=4, channels=(8, 16, 24), buckets=128)
    encoder = TinyClip(config)
    encoder.save(tmp_path)
    reloaded = load_encoder(ModelKeys(model_name=str(tmp_path)))
    assert isinstance(reloaded, TinyClip)
    assert reloaded.config == config
    assert torch.equal(vectors(reloaded, [*PICTURES, *TEXTS]), vectors(encoder, [*PICTURES, *TEXTS]))


def test_a_folder_of_another_architecture_is_refused(tmp_path: Path) -> None:
    TinyClip(TinyClipConfig(dimension=16, buckets=64)).save(tmp_path)
    load_encoder(ModelKeys(model_name=str(tmp_path)))
    file = tmp_path / from_scratch.TINY_CLIP_FILE
    content = json.loads(file.read_text())
    del content["architecture"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="the model is of architecture 1, and this version of vembed has 2"):
        load_encoder(ModelKeys(model_name=str(tmp_path)))
