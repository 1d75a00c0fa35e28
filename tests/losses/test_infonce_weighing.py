"""Hardness, focal weights and positives with a loss of their own: InfoNCE's terms weighed in other ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import CASES, masked_cells, plain
from streamed_cases import assert_equal, defined, random_case, streamed, unit_rows
from test_triplet import named

from vembed.losses.infonce import Hardness, InfoNCE, SupCon

if TYPE_CHECKING:
    from vembed.losses.streamed import StreamedLoss

MODES = ["in_batch_negatives", "hard_negatives", "all_negatives"]
KINDS: dict[str, dict[str, Any]] = {
    **{mode: {"hardness": Hardness(mode, 3.0)} for mode in MODES},  # type: ignore[arg-type]
    "focal": {"focal_gamma": 0.5},
    "focal and hard": {"focal_gamma": 2.0, "hardness": Hardness("all_negatives", 9.0)},
    "supcon": {"supcon": True},
}


def make(kind: str, **options: Any) -> StreamedLoss:
    given = {"temperature": 0.2, "learn_temperature": True, "dtype": torch.float64, **KINDS[kind], **options}
    return SupCon(**given) if given.pop("supcon", False) else InfoNCE(**given)


@pytest.mark.parametrize("name", CASES)
def test_supcon_is_the_mean_over_positives_by_loops(name: str) -> None:
    case = CASES[name]
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    logits_QD, masked = (5.0 * q_QE @ d_DE.T).numpy(), masked_cells(case)
    terms = []
    for i in range(len(case.queries)):
        total = sum(np.exp(logits_QD[i, j]) for j in range(len(case.documents)) if (i, j) not in masked)
        positives = [j for query, j in case.positives if query == i]
        terms.append(np.mean([-np.log(np.exp(logits_QD[i, p]) / total) for p in positives]))
    found = SupCon(temperature=0.2, dtype=torch.float64)(q_QE, d_DE, case.structure)
    assert found.item() == pytest.approx(np.mean(terms), rel=1e-12)


def test_with_one_positive_each_supcon_is_infonce() -> None:
    case, options = plain(5, 9), {"temperature": 0.1, "dtype": torch.float64, "bidirectional": True}
    q_QE, d_DE = case.embeddings()
    assert_equal(streamed(SupCon(**options), case, q_QE, d_DE), streamed(InfoNCE(**options), case, q_QE, d_DE), 1e-12)


def test_float32_is_near() -> None:
    case = named(random_case(7, num_queries=64, num_documents=100, texts=400))
    q_QE, d_DE = (unit_rows(count, 16, seed=count, dtype=torch.float32) for count in (64, 100))
    for kind in KINDS:
        loss = make(kind, dtype=torch.float32, bidirectional=True, tile_size=32)
        assert_equal(streamed(loss, case, q_QE, d_DE), defined(loss, case, q_QE.double(), d_DE.double()), 2e-5)


def test_positives_with_losses_of_their_own_refuse_a_focal_weight() -> None:
    with pytest.raises(AssertionError, match="focal_gamma"):
        SupCon(temperature=0.1, focal_gamma=0.5)
