"""Losses by the name that `loss_type` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.losses.infonce import InfoNCE

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vembed.losses.base import ContrastiveLoss


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Everything that a loss can be told.

    Attributes:
        temperature: Starting (or fixed) temperature.
        learn_temperature: Whether it is learned.
        bidirectional: Whether both directions are trained.
        mask_false_negatives: Whether copies of positives are left out of the negatives.
        dtype: Type of the loss's own parameters.
    """

    temperature: float
    learn_temperature: bool
    bidirectional: bool
    mask_false_negatives: bool
    dtype: torch.dtype


def _infonce(options: LossOptions) -> ContrastiveLoss:
    return InfoNCE(
        temperature=options.temperature,
        learn_temperature=options.learn_temperature,
        bidirectional=options.bidirectional,
        mask_false_negatives=options.mask_false_negatives,
        dtype=options.dtype,
    )


LOSSES: dict[str, Callable[[LossOptions], ContrastiveLoss]] = {"infonce": _infonce}
"""`loss_type` -> how to build it."""
