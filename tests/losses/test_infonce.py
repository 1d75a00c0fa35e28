"""What InfoNCE and its relatives promise beside their definition: temperatures, ties, joined directions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import CASES, LossCase, plain
from streamed_cases import assert_equal, defined, over_ranks, random_case, streamed

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.losses.base import BatchStructure, LossCommon
from vembed.losses.in_batch_hard import InBatchHard
from vembed.losses.infonce import Hardness, InfoNCE, SupCon
from vembed.losses.joint import JointInfoNCE
from vembed.losses.keys import InfoNCEKeys
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.streamed import Hardest
from vembed.section import rules_of

TEMPERATURE = 0.2
LOG_SCALE, BIAS = 1.3, -2.5
DIRECTIONS = ("query_to_document", "query_to_query", "document_to_query", "document_to_document")


def infonce(**options: Any) -> InfoNCE:
    return InfoNCE(**{"temperature": TEMPERATURE, "dtype": torch.float64, **options})


def sigmoid(**options: Any) -> SigmoidLoss:
    given = {"init_logit_scale": LOG_SCALE, "init_logit_bias": BIAS, "dtype": torch.float64, **options}
    return SigmoidLoss(**given)


def test_a_fixed_temperature_has_no_parameter_and_is_not_saved() -> None:
    loss = infonce()
    assert list(loss.parameters()) == []
    assert loss.state_dict() == {}
    assert loss.temperature == pytest.approx(TEMPERATURE)
    loss.constrain()
    assert loss.temperature == pytest.approx(TEMPERATURE)
    assert list(infonce(learn_temperature=True).state_dict()) == ["log_scale"]


def test_scale_and_bias_are_trained_and_saved() -> None:
    loss = sigmoid()
    assert sorted(loss.state_dict()) == ["bias", "log_scale"]
    assert all(parameter.requires_grad for parameter in loss.parameters())
    assert loss.temperature == pytest.approx(math.exp(-LOG_SCALE))
    single = SigmoidLoss(init_logit_scale=1.0, init_logit_bias=-10.0, dtype=torch.bfloat16)
    assert (single.log_scale.dtype, single.bias.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("make", [lambda: infonce(learn_temperature=True), sigmoid], ids=["infonce", "sigmoid"])
@pytest.mark.parametrize(("pushed_to", "expected"), [(-3.0, 1.0), (9.0, 0.01), (math.log(7.0), 1 / 7)])
def test_constrain_clamps_the_logit_scale_to_1_and_100_and_nothing_else(
    make: Any, pushed_to: float, expected: float
) -> None:
    loss = make()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.fill_(-40.0)
        loss.log_scale.fill_(pushed_to)
    loss.constrain()
    assert loss.temperature == pytest.approx(expected, rel=1e-12)
    assert {each.item() for name, each in loss.named_parameters() if name != "log_scale"} <= {-40.0}


@pytest.mark.parametrize("temperature", [0.009, 1.01])
def test_a_learned_temperature_outside_its_bounds_is_refused_and_a_fixed_one_is_not(temperature: float) -> None:
    keys = InfoNCEKeys(temperature=temperature, learn_temperature=True)
    broken = [text for rule in rules_of(InfoNCEKeys) if (text := rule.violation(keys))]
    assert len(broken) == 1
    assert f"starts between 0.01 and 1.0, got {temperature}" in broken[0]
    assert infonce(temperature=temperature).temperature == pytest.approx(temperature)


def test_a_learned_temperature_is_at_least_float32() -> None:
    assert InfoNCE(temperature=0.05, learn_temperature=True, dtype=torch.bfloat16).log_scale.dtype == torch.float32
    assert infonce(learn_temperature=True).log_scale.dtype == torch.float64


@pytest.mark.parametrize("scale", [1e-30, 0.0])
def test_vanishing_embeddings_give_the_loss_of_chance(scale: float) -> None:
    case = plain(4, 4)
    q_QE, d_DE = (each.detach() * scale for each in case.embeddings())
    assert infonce()(q_QE, d_DE, case.structure).item() == pytest.approx(math.log(4))


def test_logits_far_out_give_finite_loss_and_gradients() -> None:
    case = plain(3, 4)
    q_QE, d_DE = (each.detach().float().requires_grad_() for each in case.embeddings())
    for bias in (-100.0, 100.0):
        loss = SigmoidLoss(init_logit_scale=math.log(100), init_logit_bias=bias)
        value = loss(q_QE, d_DE, case.structure)
        assert value.isfinite()
        assert all(each.isfinite().all() for each in torch.autograd.grad(value, [q_QE, d_DE]))


def test_positives_with_losses_of_their_own_refuse_a_focal_weight() -> None:
    with pytest.raises(AssertionError, match="focal_gamma"):
        SupCon(temperature=0.1, focal_gamma=0.5)


def test_lists_of_the_hardest_refuse_hardness() -> None:
    hardness = Hardness("all_negatives", 0.5)
    with pytest.raises(AssertionError, match="without hardness"):
        InBatchHard(temperature=0.1, hard_topk=2, hardness=hardness)
    InBatchHard(temperature=0.1, hard_topk=None, hardness=hardness)


def test_the_structure_of_a_batch() -> None:
    case = CASES["a positive known by way of the other row"]
    structure = BatchStructure.of(case.batch, torch.device("cpu"))
    assert (structure.num_queries, structure.num_documents) == (3, 5)
    assert structure.positives_P2.tolist() == [list(pair) for pair in case.positives]
    assert structure.query_ids_Q.tolist() == case.batch.query_ids_Q.tolist()
    assert structure.document_ids_D.tolist() == case.batch.document_ids_D.tolist()
    for groups, texts in ((structure.query_groups_Q, case.queries), (structure.document_groups_D, case.documents)):
        assert groups.dtype == torch.int64
        assert sorted(set(groups.tolist())) == list(range(len(set(texts))))
        for a, first in enumerate(texts):
            for b, second in enumerate(texts):
                assert (groups[a] == groups[b]).item() == (first == second)


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (1, 0, 5)])
def test_of_equal_logits_the_first_rows_count_whatever_the_tiles_and_ranks(sizes: tuple[int, ...]) -> None:
    case = plain(6, 9)
    rng = torch.Generator().manual_seed(0)
    q_QE, d_DE = (torch.randint(-1, 2, (rows, 4), generator=rng).double() for rows in (6, 9))
    logits_QD = q_QE @ d_DE.T
    assert max(len(row) - len(row.unique()) for row in logits_QD) > 5, "many are equal"
    for most in (1, 2, 3, 5):
        whole = InBatchHard(hard_topk=most, temperature=1.0, bidirectional=True, dtype=torch.float64, tile_size=100)
        expected = defined(whole, case, q_QE, d_DE)
        for tile_size in (1, 2, 4, 100):
            whole.tile_size = tile_size
            assert_equal(over_ranks(whole, case, q_QE, d_DE, sizes), expected)
    moved = defined(whole, case, q_QE, d_DE + 1e-6 * torch.randn(9, 4, generator=rng, dtype=torch.float64))
    assert (moved.dd_DE - expected.dd_DE).abs().max() > 1e-3, "another choice among equal ones gives another gradient"


def test_enough_of_them_are_infonce() -> None:
    case = random_case(5, num_queries=9, num_documents=17, texts=20)
    q_QE, d_DE = case.embeddings()
    options = {"temperature": 0.1, "learn_temperature": True, "bidirectional": True, "dtype": torch.float64}
    expected = defined(InfoNCE(**options), case, q_QE, d_DE)
    for most in (17, 100, None):
        assert_equal(streamed(InBatchHard(hard_topk=most, tile_size=4, **options), case, q_QE, d_DE), expected)
    fewer = InBatchHard(hard_topk=2, **options)
    assert streamed(fewer, case, q_QE, d_DE).loss < expected.loss - 0.05


def test_lists_keep_the_first_of_equal_numbers_and_let_not_a_number_through() -> None:
    numbers = torch.tensor([[2.0, 1.0, 2.0, 0.0, 1.0, 1.0], [0.0, -0.0, 0.0, 0.0, -0.0, 0.0]])
    found = Hardest.empty(1, 2, 4, like=numbers)
    for first in (0, 1, 3):
        last = {0: 1, 1: 3, 3: 6}[first]
        found.add_logits((0, slice(0, 2)), numbers[:, first:last].contiguous(), first)
    assert [sorted(row) for row in found.positions[0].tolist()] == [[0, 1, 2, 4], [0, 1, 2, 3]]
    found.add_logits((0, slice(1, 2)), torch.full((1, 6), torch.nan), 6)
    assert found.logits[0, 1].isnan().all()
    assert 0 <= found.positions.min() <= found.positions.max() < 12


@pytest.mark.slow
def test_rows_of_one_class_are_joined_without_following_each_other_s_lists() -> None:
    size = 300  # following them would take 27 million steps
    pairs = tuple((i, j) for i in range(size) for j in range(size))
    case = LossCase(tuple(f"q{i}" for i in range(size)), tuple(f"d{j}" for j in range(size)), pairs)
    options = {"temperature": TEMPERATURE, "dtype": torch.float64, "tile_size": 64}
    found = streamed(JointInfoNCE(directions=DIRECTIONS, **options), case, *case.embeddings())
    assert found.loss.item() == pytest.approx(np.log(2), rel=1e-9), "only the positives, counted once more, compete"


def test_keys_choose_the_directions_and_contradictions_are_refused() -> None:
    common = ["model_name=m", "loss_directions=[query_to_document, query_to_query]"]
    config = load_config(None, common).config
    made = config.run_loss().build(config, LossCommon(torch.float32, 8, 128))
    assert isinstance(made, JointInfoNCE)
    assert (made.queries_too, made.columns_too, made.documents_too) == (True, False, False)
    for more, words in (
        ("loss_bidirectional=true", "set one of them"),
        ("false_negative_filter=threshold", "set false_negative_filter to identity"),
        ("loss_directions=[query_to_query]", "names query_to_document"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(None, [*common, more] if "directions" not in more else ["model_name=m", more])
