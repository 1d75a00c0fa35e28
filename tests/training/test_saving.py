"""What a run saves and what it may continue from: spread in another way only where the user says so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from saving_cases import Network, Run, gather_what_fails, identity_of, resume, save

from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.training.saving import gather_encoder

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


@pytest.mark.parametrize("change", [{"model_name": "other"}, {"dtype": "bfloat16"}, {"base": "f00d"}])
def test_another_run_is_refused_even_where_the_work_may_be_spread_otherwise(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    save(0, tmp_path, identity_of(base="c0de"), False, False)
    refused = resume(0, tmp_path, identity_of(base="c0de") | {"world_size": 4} | change, False, False, True)
    assert "belongs to another run" in refused
    assert next(iter(change)) in refused
    assert isinstance(resume(0, tmp_path, identity_of(base="c0de"), False, False, True), list)


def test_a_checkpoint_of_before_teachers_were_stamped_is_resumed_and_another_teacher_is_not(tmp_path: Path) -> None:
    taught = {"teacher": {"weights": "c0de", "precision": "torch.float32"}}
    save(0, tmp_path / "old", identity_of(), False, False)
    assert isinstance(resume(0, tmp_path / "old", identity_of(**taught), False, False, False), list)
    save(0, tmp_path / "new", identity_of(**taught), False, False)
    assert isinstance(resume(0, tmp_path / "new", identity_of(**taught), False, False, False), list)
    other = {"teacher": {"weights": "f00d", "precision": "torch.float32"}}
    refused = resume(0, tmp_path / "new", identity_of(**other), False, False, True)
    assert 'teacher.weights: "c0de" in the checkpoint, "f00d" in this run' in refused


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
