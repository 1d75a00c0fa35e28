"""Documents too similar to a query are no negatives of it, in every streamed loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import plain
from streamed_cases import streamed

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.losses.cells import positive_mask
from vembed.losses.filters import FalseNegativeFilter
from vembed.losses.infonce import InfoNCE
from vembed.losses.streamed import StreamedBatch


def test_a_query_whose_other_documents_are_all_too_similar_loses_nothing() -> None:
    loss = InfoNCE(temperature=0.1, negative_filter=FalseNegativeFilter("threshold", 1.0, relative=False))
    case = plain(4, 9)
    q_QE = torch.nn.functional.normalize(torch.eye(4, 5, dtype=torch.float64) + 0.1, dim=-1)
    found = streamed(loss, case, q_QE, torch.cat([q_QE, q_QE[:1].repeat(5, 1)]))
    assert found.loss == 0
    assert not found.dq_QE.any()


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
    case = replace(plain(24, 72), teacher=True)
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
