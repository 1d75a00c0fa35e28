"""A sharded encoder outside the step: its units, its whole weights, clipping and updating its shards."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.ranks import RankPool
from sharded_cases import Sharded, assignment_of, case_of, engine_of, pools_of, sharded, whole_gradients
from test_engine import assert_same_gradients
from test_engine_fsdp import expected_of
from test_engine_losses import make

from vembed.distributed.fsdp import shard_encoder, transformer_blocks
from vembed.distributed.ranks import Ranks
from vembed.distributed.shards import full_tensors
from vembed.errors import MachineError
from vembed.gradcache.chunks import RowAssignment
from vembed.plan.keys import OptimisationKeys
from vembed.plan.problem import Way
from vembed.training.optimizer import Optimizer, Schedule

CPU = torch.device("cpu")


def test_blocks_are_the_layers_of_the_towers() -> None:
    for encoder, name, count in [
        ("bert", "BertLayer", 2),
        ("lora", "BertLayer", 2),
        ("clip", "CLIPEncoderLayer", 4),
        ("open_clip", "ResidualAttentionBlock", 4),
    ]:
        blocks = transformer_blocks(case_of(Sharded(encoder=encoder)).encoder)
        assert [type(block).__name__ for block in blocks] == [name] * count
    convolutions = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    assert transformer_blocks(convolutions) == []
    assert transformer_blocks(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])) == []


def refusals() -> list[str]:
    ranks = Ranks(rank=0, world_size=6)
    messages = []
    for changes in ({"sharding_factor": 4}, {"cpu_offload": True}):
        way = replace(Way("fsdp", mode="fast", sharding_factor=6), **changes)
        with pytest.raises(MachineError) as caught:
            shard_encoder(torch.nn.Linear(2, 2), way, ranks, device=CPU)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_sharded_is_refused_with_the_nearest_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.distributed.fsdp.init_device_mesh", lambda *_, **__: None)
    factor, offload = refusals()
    assert "sharding_factor 4 doesn't divide the 6 processes; set it to 3" in factor
    assert "cpu_offload" in offload
    narrow = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(MachineError, match=r"bfloat16.*fsdp_mode: lean"):
        shard_encoder(narrow, Way("fsdp", mode="sharded"), Ranks(rank=0, world_size=6), device=CPU)
    with pytest.raises(ValueError, match="process group"):
        shard_encoder(narrow, Way("fsdp", mode="lean"), Ranks(), device=CPU)


def weights_on(rank: int, setting: Sharded) -> Any:
    """Evaluate before anything else, then list the whole weights."""
    case = case_of(setting)
    handle = sharded(case, setting)
    assert handle is not None
    [pool] = case.pools
    inputs = pool.collate(pool.features, np.arange(3), int(pool.features.lengths[:3].max()))
    with torch.inference_mode():
        z = case.encoder(inputs)
    handle.begin()
    case.encoder(inputs).square().sum().backward()
    handle.finish()
    shares = [parameter.to_local().numel() for parameter in handle.parameters]
    return z.clone(), list(full_tensors(case.encoder, Ranks.of_this_process())), sum(shares), handle.num_units


def test_whole_weights_come_to_the_first_rank_and_an_evaluation_may_come_first(two_ranks: RankPool) -> None:
    encoder = case_of(Sharded()).encoder
    state = encoder.state_dict()
    [pool] = case_of(Sharded()).pools
    inputs = pool.collate(pool.features, np.arange(3), int(pool.features.lengths[:3].max()))
    for mode in ("fast", "lean"):
        answers = two_ranks.run(weights_on, Sharded(mode))
        for rank, (z, tensors, _, num_units) in enumerate(answers):
            assert torch.allclose(z, encoder(inputs), atol=1e-12)
            assert num_units == 3
            assert [name for name, _ in tensors] == list(state)
            for name, tensor in tensors:
                assert (tensor is None) == (rank == 1)
                assert tensor is None or torch.equal(tensor, state[name]), name
        total = sum(parameter.numel() for parameter in encoder.parameters())
        assert sum(share for _, _, share, _ in answers) == total
        assert max(share for _, _, share, _ in answers) < 0.6 * total


def train_on(rank: int, settings: list[Sharded], loss_scaling: bool) -> list[Any]:
    """Take two steps for each setting; return norms and whole weights."""
    answers = []
    for setting in settings:
        case = case_of(setting)
        loss = make("both directions", 3)
        engine = engine_of(case, setting, loss)
        keys = OptimisationKeys(weight_decay=0.1, adam_beta2=0.99, max_grad_norm=0.05)
        schedule = Schedule(0.01, "constant", 0, 10)
        ranks = Ranks.of_this_process()
        optimizer = Optimizer(case.encoder, loss, keys, schedule, loss_scaling=loss_scaling, ranks=ranks)
        assignment = assignment_of(case, setting.assignment)
        pools = pools_of(case, assignment.slots[rank], spare=True)
        norms = []
        for step in range(2):
            engine.step(pools, case.structure, assignment=assignment, gradient_scale=optimizer.scale.value)
            norms.append(optimizer.clip_gradients())
            optimizer.step(optimizer.schedule.learning_rate(step))
            optimizer.scale.update(overflowed=False)
            optimizer.zero_grad()
        weights = dict(full_tensors(case.encoder, Ranks.of_this_process()))
        answers.append((norms, weights, loss.state_dict()))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("loss_scaling", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_norm_clipping_and_update_are_those_of_the_replicated_encoder(two_ranks: RankPool, loss_scaling: bool) -> None:
    settings = [Sharded(mode, factor=factor) for mode, factor in [(None, None), ("fast", None), ("sharded", 1)]]
    first, second = two_ranks.run(train_on, settings, loss_scaling)
    norms, weights, own = first[0]
    assert norms[0] > 0.1  # so that clipping acts
    before = case_of(Sharded()).encoder.state_dict()
    for of_rank in (first, second):
        for their_norms, their_weights, their_own in of_rank[1:]:
            assert their_norms == pytest.approx(norms, rel=1e-9)
            for name, tensor in own.items():
                assert torch.allclose(their_own[name], tensor, rtol=1e-9), name
            if of_rank is first:
                for name, tensor in weights.items():
                    assert torch.allclose(their_weights[name], tensor, rtol=1e-6, atol=1e-8), name
    assert not torch.allclose(weights["bert.embeddings.word_embeddings.weight"],
                              before["bert.embeddings.word_embeddings.weight"], atol=1e-4)  # fmt: skip


def overflow_on(rank: int) -> tuple[float, bool, float, float]:
    """Let a gradient of the second rank overflow; return the norm, the verdict, and the scale before and after."""
    setting = Sharded("fast")
    case = case_of(setting)
    loss = make("both directions", 3)
    engine = engine_of(case, setting, loss)
    keys = OptimisationKeys(weight_decay=0.1, adam_beta2=0.99)
    schedule, ranks = Schedule(0.01, "constant", 0, 10), Ranks.of_this_process()
    optimizer = Optimizer(case.encoder, loss, keys, schedule, loss_scaling=True, ranks=ranks)
    assignment = assignment_of(case, setting.assignment)
    before = optimizer.scale.value
    pools = pools_of(case, assignment.slots[rank], spare=False)
    engine.step(pools, case.structure, assignment=assignment, gradient_scale=before)
    if rank == 1:
        next(case.encoder.parameters()).grad.to_local().view(-1)[0] = torch.inf
    norm = optimizer.clip_gradients()
    overflowed = optimizer.scale.overflowed(norm)
    optimizer.scale.update(overflowed=overflowed)
    return norm, overflowed, before, optimizer.scale.value


def test_an_overflow_in_the_shard_of_one_rank_halves_the_scale_of_all(two_ranks: RankPool) -> None:
    for norm, overflowed, before, after in two_ranks.run(overflow_on):
        assert not np.isfinite(norm)
        assert overflowed
        assert after == before / 2


def quarter_on(rank: int, settings: list[Sharded]) -> list[Any]:
    """Do a step on one of four ranks, which have unequal shares."""
    answers = []
    for setting in settings:
        case = case_of(setting)
        loss = make("both directions", 3)
        engine = engine_of(case, setting, loss)
        rows = np.arange(case.structure.num_queries + case.structure.num_documents)
        assignment = RowAssignment((rows[:2], rows[2:9], rows[9:10], rows[10:]))
        pools = pools_of(case, assignment.slots[rank], spare=True)
        answers.append((engine.step(pools, case.structure, assignment=assignment), whole_gradients(case.encoder, loss)))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "lean", "sharded"])
def test_groups_of_two_that_replicate_each_other_train_as_one(mode: Any) -> None:
    settings = [replace(Sharded(mode, factor=2), encoder=encoder) for encoder in ("bert", "clip")]
    four = RankPool(4)
    try:
        answers = four.run(quarter_on, settings)
    finally:
        four.close()
    for index, setting in enumerate(settings):
        value, expected = expected_of(setting)
        for answer in answers:
            result, found = answer[index]
            assert result.loss == pytest.approx(value, rel=1e-11)
            assert_same_gradients(found, expected, 1e-10)
