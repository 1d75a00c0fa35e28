"""What programs that know transformers 4 look for in a folder is there, under the names that they have for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.text_models import embed, load, write_model

from vembed.models.formats import add_older_names

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return loaded


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen3", {"rope_theta": 10_000.0}),
        ("mistral", {"rope_theta": 10_000.0}),
        ("modernbert", {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 2}),
        ("bidirectional gemma3", {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}),
        ("bert", {}),
    ],
)
def test_a_saved_model_names_its_rotary_positions_twice_and_reads_back(
    tmp_path: Path, kind: str, expected: dict[str, Any]
) -> None:
    encoder = load(write_model(tmp_path / "bare", kind))
    encoder.save(tmp_path / "saved")
    config = read(tmp_path / "saved" / "config.json")
    assert {name: config.get(name) for name in expected} == expected
    tokenizer = read(tmp_path / "saved" / "tokenizer_config.json")
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    assert torch.equal(embed(load(tmp_path / "saved")), embed(encoder))


def test_scaled_positions_periods_and_added_tokens_are_told_as_they_are(tmp_path: Path) -> None:
    scaled = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"rope_parameters": scaled}, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ({"rope_parameters": scaled, "rope_theta": 1.0}, {"rope_theta": 1.0}),
        ({"model_type": "gemma3_text", "rope_parameters": by_layer, "layer_types": kinds},
         {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ({"model_type": "gemma3_text", "layer_types": kinds[1:]}, {"sliding_window_pattern": None}),
        ({"model_type": "modernbert", "layer_types": kinds[::-1]}, {"global_attn_every_n_layers": 3}),
        ({"model_type": "modernbert", "layer_types": ["sliding_attention"]}, {"global_attn_every_n_layers": None}),
    ]  # fmt: skip
    for config, expected in cases:
        (tmp_path / "config.json").write_text(json.dumps(config))
        add_older_names(tmp_path)
        found = read(tmp_path / "config.json")
        assert {name: found.get(name) for name in expected} == expected, config
        assert config.items() <= found.items()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "extra_special_tokens": ["[Q] "]})
    )
    add_older_names(tmp_path)
    assert read(tmp_path / "tokenizer_config.json") == {
        "tokenizer_class": "BertTokenizer",
        "additional_special_tokens": ["[Q] "],
    }
