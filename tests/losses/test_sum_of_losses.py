"""Sums of losses: their keys, bounds and refusals; and the spread-out regulariser where rows are far apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_cases import plain
from pydantic import ValidationError
from streamed_cases import streamed

from vembed.config.load import load_config
from vembed.config.schema import Config
from vembed.errors import ConfigError
from vembed.losses.base import LossCommon
from vembed.losses.combined import SumLoss
from vembed.losses.in_batch_hard import InBatchHard
from vembed.losses.infonce import InfoNCE
from vembed.losses.listed import CosineMseLoss
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.spread_out import SpreadOutLoss
from vembed.losses.tiles import Prefixes


def test_rows_further_apart_than_random_ones_are_left_alone() -> None:
    found = streamed(SpreadOutLoss(mean=0.0), plain(4, 4), torch.eye(4), torch.eye(4))
    assert found.loss == 0
    assert (found.dq_QE == 0).all()


def parts(tile_size: int = 3) -> list[tuple[float, Any]]:
    common: dict[str, Any] = {"dtype": torch.float64, "tile_size": tile_size}
    infonce = {"temperature": 0.2, "learn_temperature": True, **common}
    return [
        (1.0, InfoNCE(**infonce, bidirectional=True, prefixes=Prefixes.of([4, 2]))),
        (0.3, SpreadOutLoss(tile_size=tile_size)),
        (2.0, CosineMseLoss(tile_size=tile_size)),
        (0.5, SigmoidLoss(init_logit_scale=2.0, init_logit_bias=-3.0, **common)),
        (0.7, InBatchHard(**infonce, hard_topk=3, bidirectional=True)),
    ]


def test_a_sum_with_a_part_that_does_not_stream_is_computed_whole_and_keeps_bounds_of_all() -> None:
    class Whole(SpreadOutLoss):
        @property
        def streamed(self) -> None:
            return None

    total = SumLoss(parts())
    assert total.streamed is total
    assert total.temperature == pytest.approx(0.2)
    assert SumLoss([*parts(), (1.0, Whole())]).streamed is None
    with torch.no_grad():
        for parameter in total.parameters():
            parameter.fill_(1e6)
    total.constrain()
    assert total.temperature == pytest.approx(0.01)


def problem(*keys: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model_name=m", *keys])
    return str(caught.value)


def test_the_configuration_makes_a_sum_with_the_keys_of_each_part() -> None:
    keys = ["added_losses={spread_out: 0.1, cosent: 2}", "cosent_scale=5", "temperature=0.1", "label_kind=grade"]
    config = load_config(None, ["model_name=m", *keys, "spread_out_mean=0.5"]).config
    chosen = config.run_loss()
    loss: Any = chosen.build(config, LossCommon(torch.float32, 8, 16))
    assert loss.weights == (1.0, 0.1, 2.0)
    assert [type(part).__name__ for part in loss.parts] == ["InfoNCE", "SpreadOutLoss", "CosentLoss"]
    assert (loss.parts[1].mean, loss.parts[2].scale) == (0.5, 5.0)
    needs = chosen.needs()
    assert (needs.name, needs.takes) == ("infonce + spread_out + cosent", ("positives", "pairs"))
    assert [column.name for column in needs.columns] == ["weight"]


def test_what_can_not_be_added_is_refused() -> None:
    assert "'triplett' is no loss; name one of sigmoid" in problem("added_losses={triplett: 1}")
    assert "'infonce' is loss_type itself" in problem("added_losses={infonce: 1}")
    assert "takes other embeddings than infonce" in problem("added_losses={colbert: 1}")
    assert "must be > 0, got 0" in problem("added_losses={cosent: 0}")
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValidationError):
            Config(model_name="m", added_losses={"cosent": value})
    assert "spread_out alone learns nothing from the rows" in problem("loss_type=spread_out")
    assert "angle learns from listed pairs; set label_kind" in problem("added_losses={angle: 1}")
    assert "cosent_scale has no effect" in problem("added_losses={spread_out: 1}", "cosent_scale=5")
    assert "a learned temperature starts" in problem(
        "loss_type=sigmoid", "added_losses={infonce: 1}", "learn_temperature=true", "temperature=5"
    )
