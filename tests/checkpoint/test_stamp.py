"""The comparison of two runs' stamps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vembed.checkpoint.stamp import ABSENT, StampDifference, check_stamp

if TYPE_CHECKING:
    from vembed.checkpoint.format import JSON

RUN: dict[str, Any] = {
    "strategy": "ddp",
    "world_size": 2,
    "config": {"learning_rate": 1e-5, "mrl_dims": (64, 128), "lora": {}, "deterministic": True},
    "parameters": None,
}


def test_a_stamp_equals_itself_after_json() -> None:
    assert check_stamp(json.loads(json.dumps(RUN)), RUN) == []


def test_each_difference_is_named_with_both_values_however_deep() -> None:
    saved = json.loads(json.dumps(RUN))
    current = RUN | {"world_size": 4, "config": RUN["config"] | {"learning_rate": 2e-5, "mrl_dims": (64,)}}
    assert check_stamp(saved, current) == [
        StampDifference("world_size", 2, 4),
        StampDifference("config.learning_rate", 1e-5, 2e-5),
        StampDifference("config.mrl_dims", [64, 128], [64]),
    ]
    assert str(check_stamp(saved, current)[0]) == "world_size: 2 in the checkpoint, 4 in this run"


def test_keys_that_only_one_side_has_are_differences() -> None:
    saved: dict[str, JSON] = {"a": 1, "gone": None}
    current: dict[str, JSON] = {"a": 1, "new": {"deep": "x"}}
    assert check_stamp(saved, current) == [
        StampDifference("gone", None, ABSENT),
        StampDifference("new.deep", ABSENT, "x"),
    ]
    assert str(check_stamp(saved, current)[1]) == 'new.deep: (absent) in the checkpoint, "x" in this run'


def test_an_empty_mapping_differs_from_a_full_one_and_true_from_1() -> None:
    assert [d.key for d in check_stamp({"lora": {}}, {"lora": {"r": 16}})] == ["lora", "lora.r"]
    assert [d.key for d in check_stamp({"flag": True}, {"flag": 1})] == ["flag"]
    assert check_stamp({"number": 1}, {"number": 1.0}) == []
