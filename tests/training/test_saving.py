"""What a run saves and what it may continue from: spread in another way only where the user says so."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from saving_cases import Network, Run, gather_what_fails, identity_of, resume, save
from torch import nn

from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError, NonFiniteError
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.training.model import refuse_nonfinite_weights
from vembed.training.saving import RunState, gather_encoder, load_module, module_tensors
from vembed.training.stamp import stamp_differences

if TYPE_CHECKING:
    from pathlib import Path

    from kit.ranks import RankPool
    from torch import Tensor

ALONE = identity_of(strategy="single", mode=None, sharding_factor=1, world_size=1)
REPLICATED = identity_of(strategy="ddp", mode=None, sharding_factor=1)


def assert_equal(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        assert here.keys() == there.keys()
        assert here
        assert all(torch.equal(here[name], there[name]) for name in there)


@pytest.mark.parametrize("keeps_base", [False, True])
def test_a_sharded_run_goes_on_sharded_replicated_and_alone_with_the_same_weights(
    two_ranks: RankPool, tmp_path: Path, keeps_base: bool
) -> None:
    saved, nothing = two_ranks.run(save, tmp_path, identity_of(), True, keeps_base)
    assert nothing == [{}, {}], "only the first rank holds all weights"
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert torch.equal(saved[0]["first.weight"], saved[1]["first.weight"]) == keeps_base
    for identity, sharded in ((identity_of(), True), (REPLICATED, False)):
        assert_equal(two_ranks.run(resume, tmp_path, identity, sharded, keeps_base, True)[0], saved)
    assert_equal(resume(0, tmp_path, ALONE, False, keeps_base, True), saved)


def test_a_checkpoint_of_one_process_goes_on_sharded(two_ranks: RankPool, tmp_path: Path) -> None:
    saved = save(0, tmp_path, ALONE, False, False)
    assert_equal(two_ranks.run(resume, tmp_path, identity_of(), True, False, True)[0], saved)


def test_what_stays_as_it_was_loaded_is_in_no_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    for name, keeps_base in (("part", True), ("all", False)):
        two_ranks.run(save, tmp_path / name, identity_of(), True, keeps_base)
    for name, expected in (("part", {"head.weight", "head.bias"}), ("all", set(Network().state_dict()))):
        loaded = Run(tmp_path / name, identity_of(), sharded=False).checkpoints.manager.load("auto")
        assert loaded is not None
        assert loaded.tensors["model"].keys() == expected


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"world_size": 4}, "world_size: 2 in the checkpoint, 4 in this run"),
        ({"strategy": "ddp"}, 'strategy: "fsdp" in the checkpoint, "ddp" in this run'),
        ({"mode": "lean"}, 'mode: "fast" in the checkpoint, "lean" in this run'),
        ({"sharding_factor": 1}, "sharding_factor: 2 in the checkpoint, 1 in this run"),
    ],
)
def test_work_that_is_spread_otherwise_is_refused_with_the_key_that_allows_it_and_then_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], shown: str
) -> None:
    saved = save(0, tmp_path, identity_of(), False, False)
    refused = resume(0, tmp_path, identity_of(**change), False, False, False)
    assert shown in refused
    assert "resume_elastic=true" in refused
    with caplog.at_level(logging.INFO):
        assert_equal(resume(0, tmp_path, identity_of(**change), False, False, True), saved)
    assert f"resume_elastic: {shown}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert_equal(resume(0, tmp_path, identity_of(), False, False, False), saved)
    assert "resume_elastic" not in caplog.text


TEACHER = {"weights": "c0de", "precision": "torch.float32"}


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"model_name": "other"}, 'model_name: "net" in the checkpoint, "other" in this run'),
        ({"dtype": "bfloat16"}, "dtype: "),
        ({"base": "f00d"}, "base: "),
        ({"teacher": TEACHER | {"weights": "f00d"}}, 'teacher.weights: "c0de" in the checkpoint, "f00d" in this run'),
    ],
)
def test_another_run_is_refused_even_where_the_work_may_be_spread_otherwise(
    tmp_path: Path, change: dict[str, Any], shown: str
) -> None:
    mine = identity_of(base="c0de", teacher=TEACHER)
    save(0, tmp_path / "new", mine, False, False)
    refused = resume(0, tmp_path / "new", mine | {"world_size": 4} | change, False, False, True)
    assert "belongs to another run" in refused
    assert shown in refused
    assert isinstance(resume(0, tmp_path / "new", mine, False, False, False), list)
    save(0, tmp_path / "old", identity_of(base="c0de"), False, False)  # of before teachers were stamped
    assert isinstance(resume(0, tmp_path / "old", mine, False, False, False), list)


def test_an_encoder_that_is_not_sharded_is_gathered_as_it_is() -> None:
    network: Any = Network()

    def unused() -> Any:
        raise ConfigError("never built anew")

    assert gather_encoder(network, Ranks(), unused) is network
    assert gather_encoder(network, Ranks(1, 2), unused) is None


def test_an_encoder_that_the_first_rank_can_not_build_is_the_same_error_on_all(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    assert two_ranks.run(gather_what_fails, tmp_path) == ["ConfigError: the hub is gone"] * 2


def test_the_best_is_the_first_of_equals_and_the_state_comes_back_from_json_as_it_was() -> None:
    state = RunState(skipped_steps=2, num_truncated=3)
    seen = []
    for step, value in [(0, 0.5), (2, 0.7), (4, 0.7), (6, 0.6), (8, 1 / 3 + 0.5)]:
        state.step = step
        seen.append((state.record({"ndcg@10": value, "mrr@10": -value}, "ndcg@10"), state.stale_evaluations))
    assert seen == [(False, 0), (True, 0), (False, 1), (False, 2), (True, 0)], "the untrained model is no candidate"
    assert (state.best_step, state.best_metric, state.evaluated_step) == (8, 1 / 3 + 0.5, 8)
    assert [step for step, _ in state.evaluations] == [0, 2, 4, 6, 8]
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state
    with pytest.raises(KeyError):
        RunState.from_json({"step": 7})


class Tied(nn.Module):
    """Two names for one parameter, a buffer that is saved and one that isn't."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2, bias=False)
        self.second = nn.Linear(width, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def test_tied_tensors_are_saved_once_and_come_back_in_both_places() -> None:
    one, other = Tied(), Tied()
    one.count += 5
    tensors = module_tensors(one)
    assert tensors.keys() == {"first.weight", "count"}
    load_module(other, tensors)
    assert torch.equal(other.second.weight, one.first.weight)
    assert other.count.item() == 5
    with pytest.raises(ConfigError, match=r"another model: 1 tensors differ, the first is first\.weight"):
        load_module(Tied(width=4), tensors)


def test_weights_that_are_not_finite_are_named() -> None:
    bag = NgramBag(NgramBagConfig(dimension=4, buckets=8))
    refuse_nonfinite_weights(bag)
    with torch.no_grad():
        bag.weight.weight[2] = torch.inf
    with pytest.raises(NonFiniteError, match=r"1 weights are NaN or infinite as loaded, the first is weight\.weight"):
        refuse_nonfinite_weights(bag)


def test_each_difference_of_two_stamps_is_named_with_both_values_however_deep() -> None:
    saved: dict[str, Any] = {
        "gone": None,
        "size": 2,
        "deep": {"rate": 1e-5, "dims": [64, 128]},
        "lora": {},
        "flag": True,
    }
    now = {"size": 4, "deep": {"rate": 2e-5, "dims": (64,)}, "lora": {"r": 16}, "flag": 1, "new": "x"}
    assert stamp_differences(saved, now) == {
        "gone": "gone: null in the checkpoint, (absent) in this run",
        "size": "size: 2 in the checkpoint, 4 in this run",
        "deep.rate": "deep.rate: 1e-05 in the checkpoint, 2e-05 in this run",
        "deep.dims": "deep.dims: [64, 128] in the checkpoint, [64] in this run",
        "lora": "lora: {} in the checkpoint, (absent) in this run",
        "flag": "flag: true in the checkpoint, 1 in this run",
        "lora.r": "lora.r: (absent) in the checkpoint, 16 in this run",
        "new": 'new: (absent) in the checkpoint, "x" in this run',
    }
    assert stamp_differences({"number": 1, "dims": [64], "lora": {}}, {"number": 1.0, "dims": (64,), "lora": {}}) == {}
