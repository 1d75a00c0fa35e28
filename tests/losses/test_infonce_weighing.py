"""Hardness, focal weights and positives with a loss of their own: InfoNCE's terms weighed in other ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import CASES, masked_cells, plain
from streamed_cases import assert_equal, defined, over_ranks, random_case, streamed, unit_rows
from test_triplet import named
from test_weights import weighted

from vembed.losses.infonce import Hardness, InfoNCE, SupCon
from vembed.losses.tiles import Prefixes

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


@pytest.mark.parametrize("prefixes", [None, Prefixes.of([5, 1, 3], [3, 1, 2])], ids=["whole", "prefixes"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_equal_the_definition_on_any_ranks(
    kind: str, bidirectional: bool, prefixes: Prefixes | None
) -> None:
    loss = make(kind, bidirectional=bidirectional, prefixes=prefixes, tile_size=4)
    case = weighted(named(random_case(3, num_queries=13, num_documents=29, texts=25)))
    q_QE, d_DE = case.embeddings()
    expected = defined(loss, case, q_QE, d_DE)
    plainly = InfoNCE(temperature=0.2, dtype=torch.float64, bidirectional=bidirectional, prefixes=prefixes)
    assert abs(expected.loss - plainly(q_QE, d_DE, case.structure)) > 1e-4, "it weighs something"
    assert_equal(streamed(loss, case, q_QE, d_DE), expected)
    for sizes in ((7, 6), (5, 0, 8)):
        assert_equal(over_ranks(loss, case, q_QE, d_DE, sizes), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_cold_temperatures_and_every_kind_of_mask_equal_the_definition(kind: str) -> None:
    loss = make(kind, temperature=0.012, bidirectional=True, tile_size=2)
    for case in map(named, CASES.values()):
        q_QE, d_DE = case.embeddings()
        assert_equal(streamed(loss, case, q_QE, d_DE), defined(loss, case, q_QE, d_DE))


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


def test_focal_weights_have_no_gradient_and_leave_out_what_is_learned() -> None:
    case = plain(4, 6)
    q_QE, d_DE = case.embeddings()
    scale = torch.tensor(5.0, dtype=torch.float64)
    shares_Q = (scale * q_QE @ d_DE.T).softmax(dim=1).diagonal()
    expected = (-shares_Q.log() * (1 - shares_Q.detach()).pow(0.5)).mean()
    dq, dd = torch.autograd.grad(expected, [q_QE, d_DE])
    found = streamed(InfoNCE(temperature=0.2, dtype=torch.float64, focal_gamma=0.5), case, q_QE, d_DE)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(found.dq_QE, dq, rtol=0, atol=1e-12)
    assert torch.allclose(found.dd_DE, dd, rtol=0, atol=1e-12)


def test_float32_is_near() -> None:
    case = named(random_case(7, num_queries=64, num_documents=100, texts=400))
    q_QE, d_DE = (unit_rows(count, 16, seed=count, dtype=torch.float32) for count in (64, 100))
    for kind in KINDS:
        loss = make(kind, dtype=torch.float32, bidirectional=True, tile_size=32)
        assert_equal(streamed(loss, case, q_QE, d_DE), defined(loss, case, q_QE.double(), d_DE.double()), 2e-5)
