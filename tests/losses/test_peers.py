"""Losses held against other libraries' own code: open_clip's sigmoid, and Matryoshka around three losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import plain
from streamed_cases import streamed, unit_rows
from test_cosent import GradedCase

from vembed.losses.angle import AngleLoss
from vembed.losses.cosent import CosentLoss
from vembed.losses.infonce import InfoNCE
from vembed.losses.prefixes import Prefixes
from vembed.losses.sigmoid import SigmoidLoss

COUNT, NUMBERS = 12, 8


@pytest.mark.slow
def test_the_sigmoid_loss_is_open_clips() -> None:
    library = pytest.importorskip("open_clip.loss")
    q_QE, d_DE = (unit_rows(COUNT, NUMBERS, seed=seed).requires_grad_() for seed in (0, 1))
    ours = SigmoidLoss(init_logit_scale=2.0, init_logit_bias=-5.0, dtype=torch.float64, tile_size=5)
    own = dict(ours.named_parameters())
    log_scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (2.0, -5.0))
    expected = library.SigLipLoss()(q_QE, d_DE, log_scale.exp(), bias)
    slopes = torch.autograd.grad(expected, [q_QE, d_DE, log_scale, bias])
    found = streamed(ours, plain(COUNT, COUNT), q_QE, d_DE)
    assert len(own) == len(found.own) == 2
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for each, slope in zip((found.dq_QE, found.dd_DE, *found.own.values()), slopes, strict=True):
        assert torch.allclose(each, slope, rtol=1e-6, atol=1e-9)


class Columns(torch.nn.Module):
    """A model whose embeddings are given."""

    def get_embedding_dimension(self) -> int:
        return NUMBERS

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {"sentence_embedding": features["given"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["infonce", "cosent", "angle"])
def test_prefixes_are_those_of_sentence_transformers(kind: str) -> None:
    library, model = pytest.importorskip("sentence_transformers.losses"), Columns()
    grades = np.random.default_rng(0).uniform(size=COUNT)
    case: Any = plain(COUNT, COUNT)
    if kind != "infonce":
        listed = tuple((row, row, float(grade)) for row, grade in enumerate(grades))
        case = GradedCase(case.queries, case.documents, case.positives, listed)
    inner, make = {
        "infonce": (library.MultipleNegativesRankingLoss(model), lambda: InfoNCE(temperature=0.05, **options)),
        "cosent": (library.CoSENTLoss(model), lambda: CosentLoss(scale=20.0, **options)),
        "angle": (library.AnglELoss(model), lambda: AngleLoss(scale=20.0, **options)),
    }[kind]
    dims, weights = [8, 4, 2], [1.0, 0.5, 0.25]
    options: dict[str, Any] = {"prefixes": Prefixes.of(dims, weights), "tile_size": 5}
    theirs = library.MatryoshkaLoss(model, inner, matryoshka_dims=dims, matryoshka_weights=weights)
    leaves = [unit_rows(COUNT, NUMBERS, seed=seed).requires_grad_() for seed in (0, 1)]
    value = theirs([{"given": leaf} for leaf in leaves], torch.from_numpy(grades)) / sum(weights)
    slopes = torch.autograd.grad(value, leaves)
    found = streamed(make(), case, *leaves)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-6)
    for leaf, own, slope in zip(leaves, (found.dq_QE, found.dd_DE), slopes, strict=True):
        along = (leaf * own).sum(dim=1, keepdim=True)  # theirs normalises the whole vector, which takes this part out
        assert torch.allclose(
            own - leaf * along, slope - leaf * (leaf * slope).sum(dim=1, keepdim=True), rtol=1e-6, atol=1e-9
        )
