"""Documents too similar to a query are no negatives of it, in every streamed loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import CASES, LossCase, plain
from streamed_cases import defined, streamed
from test_weights import make

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.losses.cells import positive_mask
from vembed.losses.filters import FalseNegativeFilter
from vembed.losses.infonce import InfoNCE
from vembed.losses.streamed import StreamedBatch

FILTERS = {
    "threshold": FalseNegativeFilter("threshold", 0.3, relative=False),
    "teacher": FalseNegativeFilter("teacher", 0.05, relative=True),
    "teacher far": FalseNegativeFilter("teacher", -0.4, relative=False),
}


def taught(case: LossCase) -> LossCase:
    return replace(case, teacher=True)


@pytest.mark.parametrize("margin", [0.0, 0.2, -0.1])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("by", ["threshold", "teacher"])
def test_what_is_found_equals_brute_force(by: Any, relative: bool, margin: float) -> None:
    rule = FalseNegativeFilter(by, margin, relative)
    num_found = 0
    for case in map(taught, CASES.values()):
        q_QE, d_DE = (each.detach() for each in case.embeddings())
        structure = case.structure
        similarity_QD = q_QE @ d_DE.T
        judged = similarity_QD
        if by == "teacher":
            assert structure.teacher_Q is not None
            assert structure.teacher_D is not None
            judged = structure.teacher_Q @ structure.teacher_D.T
        found_QD = rule.false_negatives(structure, similarity_QD, positive_mask(structure))
        for i in range(len(case.queries)):
            best = max(judged[i, j].item() for query, j in case.positives if query == i)
            limit = best - (abs(best) * margin if relative else margin)
            for j in range(len(case.documents)):
                expected = judged[i, j].item() > limit and (i, j) not in case.positives
                assert found_QD[i, j].item() == expected
                num_found += expected
    assert num_found


def test_a_query_whose_other_documents_are_all_too_similar_loses_nothing() -> None:
    loss = InfoNCE(temperature=0.1, negative_filter=FalseNegativeFilter("threshold", 1.0, relative=False))
    case = plain(4, 9)
    q_QE = torch.nn.functional.normalize(torch.eye(4, 5, dtype=torch.float64) + 0.1, dim=-1)
    found = streamed(loss, case, q_QE, torch.cat([q_QE, q_QE[:1].repeat(5, 1)]))
    assert found.loss == 0
    assert not found.dq_QE.any()


def test_a_batch_without_a_teacher_is_refused_in_words() -> None:
    case, loss = plain(3, 3), make("one direction", negative_filter=FILTERS["teacher"])
    for compute in (streamed, defined):
        with pytest.raises(ValueError, match="false_negative_filter: teacher needs a teacher's vectors"):
            compute(loss, case, *case.embeddings())


def test_named_negatives_are_not_filtered() -> None:
    with pytest.raises(ConfigError, match="set triplet_negatives to all or hardest"):
        load_config(
            None,
            ["model_name=m", "loss_type=triplet", "triplet_negatives=listed", "false_negative_filter=threshold"],
        )


@pytest.mark.parametrize("by", ["threshold", "teacher"])
def test_rounding_does_not_decide_about_copies_of_the_positive(by: Any) -> None:
    """At a margin of 0 a document as similar as the positive stays a negative, whatever tile its product falls into."""
    torch.manual_seed(0)
    case = taught(plain(24, 72))
    rows = torch.nn.functional.normalize(torch.randn(24, 384), dim=-1)
    d_DE = torch.cat([rows, rows, torch.nn.functional.normalize(torch.randn(24, 384), dim=-1)])
    q_QE = torch.nn.functional.normalize(rows + 0.2 * torch.randn(24, 384), dim=-1)
    structure = replace(case.structure, teacher_Q=q_QE, teacher_D=d_DE)
    rule = FalseNegativeFilter(by, 0.0, relative=True)
    assert not rule.false_negatives(structure, q_QE @ d_DE.T, positive_mask(structure)).any()
    losses = []
    for options in ({}, *({"negative_filter": rule, "tile_size": size} for size in (5, 7, 64))):
        loss, batch = InfoNCE(temperature=0.05, **options), StreamedBatch(q_QE, d_DE, structure)
        statistics = loss.statistics(batch) if loss.needs_statistics else None
        losses += [float(loss(q_QE, d_DE, structure)), float(loss.gradients(batch, statistics).loss)]
    assert max(losses) - min(losses) < 1e-5
    assert min(losses) > 0.6, "each query has a copy of its positive among its negatives"
