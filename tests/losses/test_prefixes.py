"""Matryoshka prefixes: each is the plain loss of cut and normalised embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from loss_cases import CASES

from vembed.config.schema import Config
from vembed.losses.base import LossCommon
from vembed.losses.infonce import InfoNCE
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.tiles import Prefixes

if TYPE_CHECKING:
    from vembed.losses.streamed import StreamedLoss


def test_lengths_are_sorted_with_their_weights_and_weights_become_shares() -> None:
    assert Prefixes.of([8, 2, 4], [1, 3, 4]) == Prefixes((2, 4, 8), (3 / 8, 4 / 8, 1 / 8))
    assert Prefixes.of([8, 2]) == Prefixes((2, 8), (0.5, 0.5))


@pytest.mark.parametrize(
    ("dims", "weights"), [([], None), ([2, 2], None), ([0, 2], None), ([2, 4], [1.0]), ([2, 4], [1.0, 0.0])]
)
def test_what_cannot_be_trained_is_refused(dims: list[int], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match="prefixes"):
        Prefixes.of(dims, weights)


@pytest.mark.parametrize("kind", ["infonce", "sigmoid"])
def test_the_loss_is_the_weighted_mean_of_the_losses_of_cut_embeddings(kind: str) -> None:
    prefixes = Prefixes.of([2, 3, 5], [1, 2, 5])

    def make(prefixes: Prefixes | None) -> StreamedLoss:
        if kind == "infonce":
            return InfoNCE(temperature=0.3, bidirectional=True, dtype=torch.float64, prefixes=prefixes)
        return SigmoidLoss(init_logit_scale=1.0, init_logit_bias=-1.0, dtype=torch.float64, prefixes=prefixes)

    for case in CASES.values():
        q_QE, d_DE = case.embeddings()
        parts = [
            make(None)(*(torch.nn.functional.normalize(each[:, :dim], dim=-1) for each in (q_QE, d_DE)), case.structure)
            for dim in (2, 3, 5)
        ]
        expected = (1 * parts[0] + 2 * parts[1] + 5 * parts[2]) / 8
        assert make(prefixes)(q_QE, d_DE, case.structure).item() == pytest.approx(expected.item(), rel=1e-12)
    assert len({round(part.item(), 6) for part in parts}) == 3, "the prefixes must differ, or weights can't be seen"


def test_of_unit_vectors_the_whole_length_alone_is_the_plain_loss() -> None:
    case = CASES["hard negatives"]
    plain, whole = InfoNCE(temperature=0.3), InfoNCE(temperature=0.3, prefixes=Prefixes.of([5]))
    value = plain(*case.embeddings(), case.structure)
    assert whole(*case.embeddings(), case.structure).item() == pytest.approx(value.item(), rel=1e-6)


def made(values: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    config = Config.model_validate({"model_name": "m", **values})
    return config.run_loss().build(config, LossCommon(dtype, dimension=5, tile_size=7))


def test_the_registry_passes_every_key_on() -> None:
    both = {"mask_false_negatives": False, "mrl_dims": [2]}
    infonce = made({"temperature": 0.5, "learn_temperature": True, "loss_bidirectional": True, **both})
    sigmoid = made({"loss_type": "sigmoid", "init_logit_scale": 1.5, "init_logit_bias": -3.0, **both})
    assert isinstance(infonce, InfoNCE)
    assert isinstance(sigmoid, SigmoidLoss)
    assert (infonce.bidirectional, infonce.temperature) == (True, pytest.approx(0.5))
    assert [name for name, _ in infonce.named_parameters()] == ["log_scale"]
    assert (sigmoid.log_scale.item(), sigmoid.bias.item()) == (1.5, -3.0)
    for loss in (infonce, sigmoid):
        assert (loss.mask_false_negatives, loss.prefixes, loss.tile_size) == (False, Prefixes.of([2]), 7)
        assert loss.log_scale.dtype == torch.float64
    fixed = made({"temperature": 0.5}, torch.float32)
    assert isinstance(fixed, InfoNCE)
    assert (fixed.bidirectional, fixed.mask_false_negatives, fixed.prefixes) == (False, True, None)
    assert list(fixed.parameters()) == []
