"""Encoders from scratch: reproducible, cheap to feed, and able to tell texts and pictures apart."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.picture_models import PICTURES, opened, picture, vectors
from kit.text_models import TEXTS, edit_json, embed, load_any

from vembed.batch import Augmentation
from vembed.errors import ConfigError
from vembed.models import from_scratch
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig

if TYPE_CHECKING:
    from pathlib import Path


CORPUS = [f"{text} {number} lorem{number % 7} ipsum{number % 5}" for number in range(60) for text in TEXTS]

BUILD_SCRIPT = """
import hashlib, sys
from vembed.models.from_scratch import bert_tokenizer
tokenizer = bert_tokenizer(sys.stdin.read().splitlines())
print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""


def tiny_transformer(texts: list[str] = CORPUS, *, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), texts)


def test_texts_and_seed_build_the_same_tiny_transformer_again_and_others_another() -> None:
    first, second, unseeded = tiny_transformer(), tiny_transformer(), tiny_transformer(seed=8)
    assert first.tokenizer.backend_tokenizer.to_str() == second.tokenizer.backend_tokenizer.to_str()
    for (name, ours), theirs in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    name = "backbone.embeddings.word_embeddings.weight"
    assert not torch.equal(first.state_dict()[name], unseeded.state_dict()[name])
    other = tiny_transformer(["a b", "b c"])
    assert other.tokenizer.backend_tokenizer.to_str() != first.tokenizer.backend_tokenizer.to_str()


@pytest.mark.slow
def test_another_process_trains_the_same_tokenizer() -> None:
    built = [
        subprocess.run(
            [sys.executable, "-c", BUILD_SCRIPT], input="\n".join(CORPUS), capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert built[0] == built[1] != ""


def test_a_tiny_transformer_knows_every_character_and_no_capitals() -> None:
    tokenizer = tiny_transformer().tokenizer
    ids = tokenizer("Sea 日本 😀")["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["sea", "日", "本", "😀"]


@pytest.fixture(scope="module")
def bag() -> NgramBag:
    torch.manual_seed(0)
    bag = NgramBag(NgramBagConfig(dimension=16, buckets=4096, max_words=4)).double()
    torch.nn.init.normal_(bag.weight.weight)
    return bag


def test_a_bag_is_the_weighted_mean_of_its_ngrams(bag: NgramBag) -> None:
    features = bag.featurize(["the big seaTurtle"], "query")
    grams = torch.from_numpy(features.columns["grams"].values).long()
    weights = bag.weight.weight[grams, 0].exp()
    expected = (bag.table.weight[grams] * weights[:, None]).sum(0)
    assert torch.allclose(embed(bag, ["the big seaTurtle"])[0], expected / expected.norm())


def test_a_bag_in_bfloat16_takes_weights_that_mixed_precision_made_wider() -> None:
    # On CUDA autocast computes an exponential in float32, whatever the table's type.
    narrow = NgramBag(NgramBagConfig(dimension=16, buckets=4096)).to(torch.bfloat16)
    narrow.weight.float()
    exact = copy.deepcopy(narrow).float()
    assert torch.allclose(embed(narrow, TEXTS), embed(exact, TEXTS), atol=0.02)


def test_a_bag_cuts_identifiers_into_their_parts(bag: NgramBag) -> None:
    def words(text: str) -> set[int]:
        return set(bag.featurize([text], "query").columns["grams"].values.tolist())

    assert words("parse") < words("parse_httpHeader")
    assert words("http") < words("parse_httpHeader")
    assert words("header") < words("parse_httpHeader")


def test_a_bag_counts_texts_over_its_words(bag: NgramBag) -> None:
    features = bag.featurize(["one two three four", "one two three four five", ""], "query")
    assert features.num_truncated == 1
    cut, whole = (features.take(np.array([row])).columns["grams"].values for row in (1, 0))
    assert np.array_equal(cut, whole)
    assert features.lengths[2] == 1


def test_a_bag_is_read_back_with_its_whole_shape(tmp_path: Path) -> None:
    config = NgramBagConfig(dimension=16, buckets=512, max_words=7, longest=4)
    NgramBag(config).save(tmp_path)
    assert load_encoder(ModelKeys(model_name=str(tmp_path))).config == config


def test_a_bag_refuses_gradient_checkpointing_and_the_transformer_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"builtin:ngram-bag has no gradient checkpointing; set .*: false"):
        load_encoder(ModelKeys(model_name="builtin:ngram-bag", gradient_checkpointing=True))
    encoder = load_encoder(ModelKeys(model_name="builtin:tiny-transformer", gradient_checkpointing=True), CORPUS)
    assert any(getattr(module, "gradient_checkpointing", False) for module in encoder.modules())


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
    z = encoder(encoder.collate(encoder.featurize(PICTURES, "query"), np.arange(len(PICTURES)), 64))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3, weight_decay=0.5)
    torch.nn.functional.cross_entropy(10 * z @ z.T, torch.arange(len(z))).backward()
    optimizer.step()
    changed = {name for name, weight in encoder.named_parameters() if not torch.equal(weight, before[name])}
    assert {name for name in before if name.startswith("vision")} == changed


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


def test_as_many_pictures_as_there_is_room_for_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, decoded = build(), []
    own = encoder._resized
    monkeypatch.setattr(encoder, "_resized", lambda pictures: (decoded.append(len(pictures)), own(pictures))[1])
    first = encoder.featurize([*PICTURES, PICTURES[0]], "query").per_row["pixels"]
    again = encoder.featurize([PICTURES[2], picture(99), PICTURES[0]], "document").per_row["pixels"]
    assert decoded == [len(PICTURES), 1]
    assert np.array_equal(first, own(opened([*PICTURES, PICTURES[0]]))["pixels"])
    assert np.array_equal(again[::2], first[[2, 0]])
    monkeypatch.setattr(from_scratch, "CACHED_PICTURES", 3)
    encoder = build()
    for _ in range(2):
        assert np.array_equal(encoder.featurize(PICTURES, "query").per_row["pixels"], first[:-1])
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


def test_a_config_with_other_sides_is_read_back_and_another_architecture_refused(tmp_path: Path) -> None:
    config = TinyClipConfig(dimension=32, image_size=36, patch_size=4, channels=(8, 16, 24), buckets=128)
    encoder = TinyClip(config)
    encoder.save(tmp_path)
    reloaded: Any = load_encoder(ModelKeys(model_name=str(tmp_path)))
    assert reloaded.config == config
    assert torch.equal(vectors(reloaded, [*PICTURES, *TEXTS]), vectors(encoder, [*PICTURES, *TEXTS]))
    edit_json(tmp_path / from_scratch.TINY_CLIP_FILE, architecture=None)
    with pytest.raises(ConfigError, match="the model is of architecture 1, and this version of vembed has 2"):
        load_encoder(ModelKeys(model_name=str(tmp_path)))
