"""Runs with other losses: they train, tiles change nothing, and prefixes must fit the model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import Site, run_keys

if TYPE_CHECKING:
    from pathlib import Path

EXACT: dict[str, Any] = {
    "torch_dtype": "float64",
    "max_steps": 4,
    "eval_steps": 4,
    "gradient_cache_chunk_size": 6,
    "retain": 0,
}
LOSSES: dict[str, dict[str, Any]] = {
    "infonce": {},
    "both directions": {"loss_bidirectional": True, "learn_temperature": True},
    "prefixes": {"mrl_dims": [8, 32, 16], "mrl_weights": [1, 2, 1]},
    "sigmoid": {"loss_type": "sigmoid", "temperature": None, "init_logit_bias": -5.0},
}


QUICK = ("both directions",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LOSSES]
)
def test_the_trajectory_is_one_whatever_the_tiles(site: Site, tmp_path: Path, name: str) -> None:
    keys = site.keys(model_name=str(site.bert_without_dropout), **EXACT | LOSSES[name])
    auto = run_keys(tmp_path / "auto", keys)
    small = run_keys(tmp_path / "small", keys | {"loss_tile_size": 5})
    assert (auto.code, small.code) == (0, 0), auto.err + small.err
    sizes = [json.loads((run.folder / "plan.json").read_text())["loss_tile_size"] for run in (auto, small)]
    assert sizes == [1024, 5]
    assert small.losses == pytest.approx(auto.losses, abs=1e-10)
    assert auto.losses[-1] < auto.losses[0]


def test_prefixes_of_more_dims_than_the_model_has_are_refused_before_training(site: Site, tmp_path: Path) -> None:
    refused = run_keys(tmp_path, site.keys(mrl_dims=[64, 16]), "--plan")
    assert refused.code == 2
    assert "mrl_dims: 64 is more than the 32 dims of" in refused.err
    assert "write [32, 16]" in refused.err
    fits = run_keys(tmp_path, site.keys(mrl_dims=[32, 16]), "--plan")
    assert fits.code == 0, fits.err
    assert "mrl_dims" not in fits.out + fits.err
    partly = run_keys(tmp_path, site.keys(mrl_dims=[16]), "--plan", "--details")
    assert partly.code == 0
    assert "only its first 16 are trained" in partly.flat
