"""What happens to a text before the network: prompts, truncation, counting, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from kit.text_models import POSITIONS, edit_json, embed, load, wordpiece_tokenizer, write_model

from vembed.batch import Features
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


def test_only_texts_over_the_maximum_are_counted_as_truncated(bert_folder: Path) -> None:
    encoder = load(bert_folder, max_seq_length=8)  # 6 tokens between [CLS] and [SEP]
    features = encoder.featurize(["abcdef", "abcdefg", "abc", "a" * 90], "query")
    assert features.lengths.tolist() == [8, 8, 5, 8]
    assert features.num_truncated == 2
    assert encoder.featurize(["abcdef"] * 3, "query").num_truncated == 0


def test_a_cut_text_keeps_its_special_tokens_and_its_beginning(bert_folder: Path) -> None:
    encoder = load(bert_folder, max_seq_length=8)
    assert torch.equal(embed(encoder, ["abcdefghi"]), embed(encoder, ["abcdef"]))
    assert not torch.equal(embed(encoder, ["abcdefghi"]), embed(encoder, ["abcdeg"]))


def test_a_prompt_counts_towards_the_length(bert_folder: Path) -> None:
    encoder = load(bert_folder, max_seq_length=8, prompts={"query": "xy"})
    assert encoder.featurize(["abcde"], "query").num_truncated == 1
    assert encoder.featurize(["abcde"], "document").num_truncated == 0


def test_each_side_has_its_own_prompt_before_the_stripped_text(bert_folder: Path) -> None:
    plain = load(bert_folder)
    encoder = load(bert_folder, prompts={"query": "q: ", "document": "d: "})
    assert torch.equal(embed(encoder, ["  sea\n"], side="query"), embed(plain, ["q: sea"]))
    assert torch.equal(embed(encoder, ["  sea\n"], side="document"), embed(plain, ["d: sea"]))
    assert encoder.describe()["query_prompt"] == "'q: '"
    one_sided = load(bert_folder, prompts={"query": "q: "})
    assert torch.equal(embed(one_sided, ["sea"], side="document"), embed(plain, ["sea"]))


def test_tokens_are_those_of_the_tokenizer(gpt2_folder: Path) -> None:
    encoder = load(gpt2_folder)
    features = encoder.featurize(["sea", "a b"], "query")
    assert features.columns["input_ids"].values.tolist() == [
        *encoder.tokenizer("sea")["input_ids"],
        *encoder.tokenizer("a b")["input_ids"],
    ]


def test_rows_are_padded_at_the_right_whatever_the_tokenizer_does(tmp_path: Path) -> None:
    encoder = load(write_model(tmp_path, "qwen3"))
    assert encoder.tokenizer.padding_side == "left"
    inputs = encoder.collate(encoder.featurize(["sea", "s"], "query"), np.arange(2), 6)
    assert inputs["lengths"].tolist() == [4, 2]
    assert inputs["input_ids"][1, 2:].tolist() == [encoder.tokenizer.pad_token_id] * 4


def test_a_chunk_without_padding_carries_no_lengths(bert_folder: Path) -> None:
    encoder = load(bert_folder)
    features = encoder.featurize(["sea", "sun", "s"], "query")
    assert set(encoder.collate(features, np.array([1, 0]), 5)) == {"input_ids"}
    assert set(encoder.collate(features, np.array([1, 2]), 5)) == {"input_ids", "lengths"}


def test_joined_features_encode_as_the_parts_with_prompts_of_unequal_length(bert_folder: Path) -> None:
    encoder = load(bert_folder, prompts={"query": "query: ", "document": "d: "})
    encoder.spec = replace(encoder.spec, include_prompt=False)
    queries, documents = encoder.featurize(["sea", "sun"], "query"), encoder.featurize(["a b"], "document")
    joined = Features.concat([queries, documents])
    assert joined.per_row["prompt_lengths"].tolist() == [7, 7, 3]  # [CLS] and one token for each character
    assert joined.take(np.array([2, 0])).per_row["prompt_lengths"].tolist() == [3, 7]
    with torch.no_grad():
        together = encoder(encoder.collate(joined, np.array([2, 0, 1]), 14))
    expected = torch.cat([embed(encoder, ["a b"], side="document"), embed(encoder, ["sea", "sun"])])
    assert torch.allclose(together, expected, atol=1e-5)


def test_a_prompt_is_measured_as_it_is_encoded_in_lower_case(tmp_path: Path) -> None:
    tokenizer = wordpiece_tokenizer(lower_case=False)
    tokenizer.add_tokens(["QUERY"])  # one token in capitals, five letters otherwise
    encoder = load(
        write_model(tmp_path, "bert", tokenizer=tokenizer, vocab_size=len(tokenizer)), prompts={"query": "QUERY "}
    )
    without = replace(encoder.spec, include_prompt=False)
    encoder.spec = without
    assert encoder.featurize(["sea"], "query").per_row["prompt_lengths"].tolist() == [2]
    encoder.spec = replace(without, lower_case=True)
    encoder._prompt_lengths.clear()
    assert encoder.featurize(["sea"], "query").per_row["prompt_lengths"].tolist() == [6]


def test_a_text_that_its_prompt_fills_up_is_pooled_over_all_of_it(bert_folder: Path) -> None:
    encoder = load(bert_folder, max_seq_length=8, prompts={"query": "abcdefgh"})
    pooled = embed(encoder, ["sea"])
    encoder.spec = replace(encoder.spec, include_prompt=False)
    assert torch.equal(embed(encoder, ["sea"]), pooled)


@pytest.mark.parametrize(("kind", "offset"), [("bert", 0), ("roberta", 2), ("xlm-roberta", 2)])
def test_the_longest_input_fits_the_positions(tmp_path: Path, kind: str, offset: int) -> None:
    from transformers import AutoConfig

    folder = write_model(tmp_path, kind)
    (folder / "tokenizer_config.json").write_text(
        (folder / "tokenizer_config.json").read_text().replace(f'"model_max_length": {POSITIONS}', '"x": 0')
    )
    encoder = load(folder)
    assert encoder.max_length == AutoConfig.from_pretrained(folder).max_position_embeddings - offset == POSITIONS
    assert "config.json" in encoder.describe()["max_seq_length"]
    assert embed(encoder, ["a " * 200]).isfinite().all()


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}


@pytest.mark.parametrize(("rope", "steady"), [("dynamic", 64), ("longrope", 16)])
def test_texts_end_where_positions_would_turn_by_the_longest_neighbour(tmp_path: Path, rope: str, steady: int) -> None:
    folder = tmp_path / "model"
    load(write_model(tmp_path / "bare", "llama", rope_parameters=ROPES[rope])).save(folder)
    edit_json(folder / "sentence_bert_config.json", max_seq_length=100)
    encoder = load(folder)
    assert encoder.max_length == steady
    assert "would change with its neighbours" in encoder.describe()["max_seq_length"]
    short, long = "sea", "a " * 60
    assert torch.allclose(embed(encoder, [short, long])[0], embed(encoder, [short])[0], atol=1e-6)
    encoder.spec = replace(encoder.spec, max_length=steady + 20)
    encoder.max_length = steady + 20
    assert not torch.allclose(embed(encoder, [short, long])[0], embed(encoder, [short])[0], atol=1e-4)
    if rope == "longrope":
        with pytest.raises(ConfigError, match=r"above 16 tokens .* set max_seq_length: 16 or less"):
            load(folder, max_seq_length=17)
    assert load(folder, max_seq_length=steady).max_length == steady


def test_a_model_that_names_no_longest_input_takes_512(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "t5")
    (folder / "tokenizer_config.json").write_text(
        (folder / "tokenizer_config.json").read_text().replace(f'"model_max_length": {POSITIONS}', '"x": 0')
    )
    encoder = load(folder)
    assert encoder.max_length == 512
    assert "no file names one" in encoder.describe()["max_seq_length"]
