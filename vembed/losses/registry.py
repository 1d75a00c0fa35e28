"""Losses by the name that `loss_type` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.losses.infonce import InfoNCE
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.tiles import DEFAULT_TILE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vembed.losses.base import ContrastiveLoss
    from vembed.losses.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Everything that a loss can be told; each takes what it knows.

    Attributes:
        temperature: Starting (or fixed) temperature.
        learn_temperature: Whether it is learned.
        bidirectional: Whether both directions are trained.
        mask_false_negatives: Whether copies of positives are left out of the negatives.
        init_logit_scale: Starting log of the sigmoid loss's scale.
        init_logit_bias: Starting bias of the sigmoid loss.
        dtype: Type of the loss's own parameters.
        prefixes: Prefixes to train, or None for the embeddings as they are.
        tile_size: Rows and columns of a tile of the similarity matrix.
    """

    temperature: float
    learn_temperature: bool
    bidirectional: bool
    mask_false_negatives: bool
    init_logit_scale: float
    init_logit_bias: float
    dtype: torch.dtype
    prefixes: Prefixes | None = None
    tile_size: int = DEFAULT_TILE_SIZE


def _infonce(options: LossOptions) -> ContrastiveLoss:
    return InfoNCE(
        temperature=options.temperature,
        learn_temperature=options.learn_temperature,
        bidirectional=options.bidirectional,
        mask_false_negatives=options.mask_false_negatives,
        dtype=options.dtype,
        prefixes=options.prefixes,
        tile_size=options.tile_size,
    )


def _sigmoid(options: LossOptions) -> ContrastiveLoss:
    return SigmoidLoss(
        init_logit_scale=options.init_logit_scale,
        init_logit_bias=options.init_logit_bias,
        mask_false_negatives=options.mask_false_negatives,
        dtype=options.dtype,
        prefixes=options.prefixes,
        tile_size=options.tile_size,
    )


LOSSES: dict[str, Callable[[LossOptions], ContrastiveLoss]] = {"infonce": _infonce, "sigmoid": _sigmoid}
"""`loss_type` -> how to build it."""
