"""The comparison of two runs' stamps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vembed.training.saving import stamp_differences

if TYPE_CHECKING:
    from vembed.checkpoint.format import JSON

RUN: dict[str, Any] = {
    "strategy": "ddp",
    "world_size": 2,
    "config": {"learning_rate": 1e-5, "mrl_dims": (64, 128), "lora": {}, "deterministic": True},
    "parameters": None,
}


def test_a_stamp_equals_itself_after_json() -> None:
    assert stamp_differences(json.loads(json.dumps(RUN)), RUN) == {}


def test_each_difference_is_named_with_both_values_however_deep() -> None:
    saved = json.loads(json.dumps(RUN))
    current = RUN | {"world_size": 4, "config": RUN["config"] | {"learning_rate": 2e-5, "mrl_dims": (64,)}}
    assert stamp_differences(saved, current) == {
        "world_size": "world_size: 2 in the checkpoint, 4 in this run",
        "config.learning_rate": "config.learning_rate: 1e-05 in the checkpoint, 2e-05 in this run",
        "config.mrl_dims": "config.mrl_dims: [64, 128] in the checkpoint, [64] in this run",
    }


def test_keys_that_only_one_side_has_are_differences() -> None:
    saved: dict[str, JSON] = {"a": 1, "gone": None}
    current: dict[str, JSON] = {"a": 1, "new": {"deep": "x"}}
    assert stamp_differences(saved, current) == {
        "gone": "gone: null in the checkpoint, (absent) in this run",
        "new.deep": 'new.deep: (absent) in the checkpoint, "x" in this run',
    }


def test_an_empty_mapping_differs_from_a_full_one_and_true_from_1() -> None:
    assert list(stamp_differences({"lora": {}}, {"lora": {"r": 16}})) == ["lora", "lora.r"]
    assert list(stamp_differences({"flag": True}, {"flag": 1})) == ["flag"]
    assert stamp_differences({"number": 1}, {"number": 1.0}) == {}
