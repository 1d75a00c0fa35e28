"""Encoders from scratch: reproducible, padded or packed alike, and able to tell texts apart."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.text_models import TEXTS, embed

from vembed.errors import ConfigError
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


def tiny_transformer(texts: list[str] = CORPUS) -> Any:
    """Build one after seeding torch."""
    torch.manual_seed(7)
    return load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), texts)


def test_the_same_texts_and_seed_build_the_same_tiny_transformer() -> None:
    first, second = tiny_transformer(), tiny_transformer()
    assert first.tokenizer.backend_tokenizer.to_str() == second.tokenizer.backend_tokenizer.to_str()
    for (name, ours), theirs in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
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


def test_the_seed_decides_the_weights() -> None:
    name = "backbone.embeddings.word_embeddings.weight"
    first = tiny_transformer().state_dict()[name]
    torch.manual_seed(8)
    assert not torch.equal(
        first, load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), CORPUS).state_dict()[name]
    )


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
