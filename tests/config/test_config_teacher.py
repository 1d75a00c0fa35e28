"""When a teacher's scores stand in for those that data may list."""

from __future__ import annotations

from typing import Any

import pytest

from vembed.config.schema import Config
from vembed.vectors.keys import teacher_gives_scores


@pytest.mark.parametrize(
    ("keys", "gives"),
    [
        ({"loss_type": "margin_mse"}, True),
        ({"loss_type": "kl"}, True),
        ({"loss_type": "cosent"}, True),
        ({"loss_type": "cosent", "false_negative_filter": "teacher"}, False),
        ({"added_losses": {"cosent": 0.1}, "false_negative_filter": "teacher"}, False),
        ({"added_losses": {"margin_mse": 0.1}, "false_negative_filter": "teacher"}, True),
        ({"loss_type": "distillation"}, False),
    ],
)
def test_a_loss_that_learns_from_positives_keeps_to_them_beside_another_use_of_the_teacher(
    keys: dict[str, Any], gives: bool
) -> None:
    assert teacher_gives_scores(Config.model_validate({"model_name": "m", "teacher_model_name": "t", **keys})) == gives
