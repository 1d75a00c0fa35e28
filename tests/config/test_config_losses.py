"""The keys of the loss: values, and which of them act together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vembed.config.load import load_config
from vembed.config.record import dump_config
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def load(*overrides: str) -> object:
    return load_config(None, ["model_name=m", *overrides]).config


@pytest.mark.parametrize(
    ("bad", "part", "good"),
    [
        ("loss_type=siglip", "did you mean", "loss_type=sigmoid"),
        ("mrl_dims=64", "must be a list [an integer >= 1, ...] or null, got 64", "mrl_dims=[64]"),
        ("mrl_dims=[]", "must be a list [an integer >= 1, ...] or null, got []", "mrl_dims=null"),
        ("mrl_dims=[64, 0]", "must be >= 1, got [64, 0]", "mrl_dims=[64, 1]"),
        ("mrl_dims=[64, a]", "must be a list", "mrl_dims=[64, 32]"),
        ("mrl_dims=[64, 64]", "holds a number twice; write [64]", "mrl_dims=[64, 32]"),
        ("loss_tile_size=0", "must be auto or an integer >= 1, got 0", "loss_tile_size=auto"),
        ("loss_tile_size=1.5", "must be auto or an integer >= 1, got 1.5", "loss_tile_size=1"),
    ],
)
def test_a_wrong_value_is_named_with_what_fits_and_its_neighbour_passes(bad: str, part: str, good: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(bad)
    assert part in str(refused.value)
    assert load(good)


@pytest.mark.parametrize(
    ("keys", "part", "mended"),
    [
        (["mrl_weights=[1, 2]"], "no effect without mrl_dims; remove it", ["mrl_weights=[1, 2]", "mrl_dims=[8, 4]"]),
        (["mrl_dims=[8, 4]", "mrl_weights=[1]"], "mrl_dims has 2", ["mrl_dims=[8, 4]", "mrl_weights=[1, 0.5]"]),
        (["loss_type=sigmoid", "temperature=0.1"], "set init_logit_scale to 2.303", ["temperature=0.1"]),
        (["loss_type=sigmoid", "learn_temperature=true"], "always learns its scale", ["learn_temperature=true"]),
        (["loss_type=sigmoid", "loss_bidirectional=true"], "judges each pair once", ["loss_bidirectional=true"]),
        (["init_logit_scale=3.0"], "set temperature to 0.04979", ["init_logit_scale=3.0", "loss_type=sigmoid"]),
        (["init_logit_bias=-5.0"], "loss_type to sigmoid", ["init_logit_bias=-5.0", "loss_type=sigmoid"]),
        (["loss_type=sigmoid", "init_logit_scale=10"], "must be <= 4.605", ["loss_type=sigmoid", "init_logit_scale=4"]),
        (["learn_temperature=true", "temperature=0.009"], "starts between 0.01 and 1.0, got", ["temperature=0.009"]),
        (["learn_temperature=true", "temperature=1.01"], "starts between 0.01 and 1.0, got", ["temperature=1.01"]),
        (["loss_type=sigmoid", "batch_size=1"], "sigmoid loss learns nothing", ["loss_type=sigmoid", "batch_size=2"]),
    ],
)  # fmt: skip
def test_a_key_that_would_do_nothing_is_refused_with_the_fix(keys: list[str], part: str, mended: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*keys)
    assert part in str(refused.value)
    assert load(*mended)


def test_lists_survive_the_configuration_of_the_output_folder(tmp_path: Path) -> None:
    config = load_config(None, ["model_name=m", "mrl_dims=[64, 16]", "mrl_weights=[1, 0.5]"]).config
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    again = load_config(path).config
    assert (again.mrl_dims, again.mrl_weights) == ([64, 16], [1, 0.5])
    assert again == config
