"""A run with rows end to end is the run with padded rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import vembed
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("undrawn")

WORDS = ["sea", "river", "stone", "lamp", "bird", "house", "boat", "hat", "tree", "fox"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two steps on forty pairs of unequal length, without dropout."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("packing")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **shape, **dropout)).save_pretrained(
        folder
    )
    rows = [
        {"query": " ".join(WORDS[: 1 + row % 7]), "positive": " ".join(WORDS[row % 10 :] * (1 + row % 3))}
        for row in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "id": str(n)}) + "\n" for n, row in enumerate(rows)))
    return {
        "model_name": str(folder),
        "data_path": str(folder / "rows.jsonl"),
        "val_data_path": str(folder / "rows.jsonl"),
        "torch_dtype": "float64",
        "batch_size": 12,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "gradient_cache_chunk_tokens": 40,
        "retain": 0.3,
        "num_workers": 0,
        "report_to": "none",
    }


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.mark.slow
def test_losses_and_the_verdict_are_those_of_padded_rows(keys: dict[str, Any], tmp_path: Path) -> None:
    results = {}
    for packing in (False, True):
        result = vembed.train(keys, packing=packing, output_dir=str(tmp_path / str(packing)))
        results[packing] = result, steps(tmp_path / str(packing))
    padded, packed = results[False][1], results[True][1]
    assert [row["loss"] for row in packed] == pytest.approx([row["loss"] for row in padded], rel=1e-10)
    assert [row["grad_norm"] for row in packed] == pytest.approx([row["grad_norm"] for row in padded], rel=1e-8)
    assert {row["padding_ratio"] for row in packed} == {1.0}
    assert min(row["padding_ratio"] for row in padded) > 1.0
    assert {row["replay_drift"] for row in packed} == {0.0}
    plan = json.loads((tmp_path / "True" / "plan.json").read_text())
    assert plan["packing"] is True
    assert plan["model"]["attention"] == "sdpa, rows end to end"
    assert results[True][0].verdict == results[False][0].verdict


def test_a_model_whose_rows_cannot_lie_end_to_end_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packing true: this encoder doesn't support it"):
        vembed.train(
            {"model_name": "builtin:ngram-bag", "data_path": keys["data_path"], "val_data_path": keys["data_path"]},
            packing=True,
            output_dir=str(tmp_path),
        )
