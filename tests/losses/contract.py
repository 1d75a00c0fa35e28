"""The contract of every loss: promises that hold for each registered loss and each value of each of its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from engine_cases import random_batch
from loss_cases import LossCase
from loss_kinds import KINDS, build, structure_for
from streamed_cases import assert_equal, defined, over_ranks, streamed
from torch import Tensor
from torch.nn.functional import normalize

from vembed.losses.base import BatchStructure
from vembed.losses.registry import loss_section
from vembed.losses.streamed import LossGradients, StreamedLoss

NUM_QUERIES, NEGATIVES, DIMENSION = 9, [0, 3, 1, 7, 0, 0, 2, 1, 1], 16
TILES = (1, 2, 5, 100)
"""One cell, tiles that end inside rows of unequal positives, and one tile around everything."""

SHARES = ((9,), (4, 0, 5), (3, 3, 3))
"""Queries of each rank; one of three may have none."""

SHARPEST = 0.001
"""Temperature at which float32 exponentials of logits overflow wherever no maximum is subtracted."""


@dataclass(frozen=True)
class Batch:
    """A batch whose rows have weights, some with several positives or a weight of 0, and its embeddings."""

    structure: BatchStructure
    q_QE: Tensor
    d_DE: Tensor

    @property
    def queries(self) -> range:
        return range(self.structure.num_queries)

    @classmethod
    def of(cls, kind: str, dtype: torch.dtype = torch.float64) -> Batch:
        structure = BatchStructure.of(random_batch(NUM_QUERIES, NEGATIVES, np.random.default_rng(1)))
        structure = structure_for(kind, structure)
        draw = torch.Generator().manual_seed(3)
        rows = torch.randn(NUM_QUERIES + structure.num_documents, DIMENSION, generator=draw, dtype=torch.float64)
        rows = normalize(rows + rows[:1], dim=1).to(dtype)  # so near that losses that spread them have something to do
        return cls(structure, rows[:NUM_QUERIES], rows[NUM_QUERIES:])


class LossContract:
    """Checks of one row of `KINDS`: a loss and values of its keys."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name, self.values = KINDS[kind]
        self.batch: Any = Batch.of(kind)  # `streamed_cases` reads the structure and the number of queries of a case

    def loss(self, tile_size: int = 5, **changed: Any) -> Any:
        return build((self.name, self.values | changed), tile_size)

    def has_key(self, key: str) -> bool:
        return key in loss_section(self.name).model_fields

    @property
    def has_masks(self) -> bool:
        """Whether a mask decides alone if a document counts: another part of a sum looks at all of them."""
        is_sum = self.name == "distillation" or "added_losses" in self.values
        return self.has_key("mask_false_negatives") and not is_sum

    @property
    def weighs_by_constants(self) -> bool:
        """Whether it weighs cells or queries by similarities that it doesn't differentiate."""
        return bool(self.values.get("focal_gamma") or self.values.get("hardness_mode"))

    def defined(self, loss: Any | None = None) -> LossGradients:
        return defined(loss or self.loss(), self.batch, self.batch.q_QE, self.batch.d_DE)

    def check_tiles(self) -> None:
        """Streamed in tiles of any size it has the value and gradients of its definition in plain autograd."""
        expected = self.defined()
        assert expected.loss > 0
        assert expected.dq_QE.abs().max() > 1e-6
        for tile_size in TILES:
            loss = self.loss(tile_size)
            assert isinstance(loss.streamed, StreamedLoss)
            assert_equal(streamed(loss, self.batch, self.batch.q_QE, self.batch.d_DE), expected)

    def check_ranks(self) -> None:
        """The shares of ranks add up to the whole."""
        expected = self.defined()
        for sizes in SHARES:
            found = over_ranks(self.loss(), self.batch, self.batch.q_QE, self.batch.d_DE, sizes)
            assert_equal(found, expected)

    def check_differences(self) -> None:
        """The gradient of the definition is the slope of its value."""
        loss, batch = self.loss(), self.batch
        draw = torch.Generator().manual_seed(5)
        step_QE = torch.randn(batch.q_QE.shape, generator=draw, dtype=torch.float64)
        step_DE = torch.randn(batch.d_DE.shape, generator=draw, dtype=torch.float64)
        found, size = self.defined(), 1e-6
        with torch.no_grad():
            ahead, behind = (
                loss(batch.q_QE + sign * size * step_QE, batch.d_DE + sign * size * step_DE, batch.structure)
                for sign in (1, -1)
            )
        slope = ((ahead - behind) / (2 * size)).item()
        expected = ((found.dq_QE * step_QE).sum() + (found.dd_DE * step_DE).sum()).item()
        assert abs(slope - expected) < 1e-5 * max(1.0, abs(expected)), (slope, expected)

    def check_prefixes(self) -> None:
        """A loss of prefixes is the weighted mean of the loss of each, over embeddings that are cut and normalised."""
        total, batch = 0.0, self.batch
        for dim, weight in ((4, 1.0), (8, 3.0)):
            whole = build((self.name, self.values | {"mrl_dims": None, "mrl_weights": None}), 5, dim)
            sides = (normalize(side[:, :dim], dim=1) for side in (batch.q_QE, batch.d_DE))
            total += weight / 4 * whole(*sides, batch.structure).item()
        found = self.defined(self.loss(mrl_dims=[8, 4], mrl_weights=[3, 1])).loss.item()
        assert abs(found - total) < 1e-10 * max(1.0, abs(total)), (found, total)

    def check_sharpest(self) -> None:
        """No exponential overflows in float32 at the sharpest temperature."""
        batch: Any = Batch.of(self.kind, torch.float32)
        loss = self.loss(temperature=SHARPEST, learn_temperature=False).float()
        found = streamed(loss, batch, batch.q_QE, batch.d_DE)
        for tensor in (found.loss, found.dq_QE, found.dd_DE, *found.own.values()):
            assert tensor.isfinite().all()

    def check_mask(self) -> None:
        """A document with the text of a positive isn't pushed away where masks are on, and is where they are off."""
        # One query asks, as the other has no weight; the third document repeats its positive.
        case = LossCase(("q0", "q1"), ("a", "b", "a", "c"), ((0, 0), (1, 1)), weights=(1.0, 0.0), teacher=True)
        structure = replace(case.structure, negatives_P2=torch.tensor([[0, 2], [0, 3]]))
        d_DE = self.batch.d_DE[:4].clone()
        d_DE[2] = normalize(self.batch.q_QE[0] + 0.3 * self.batch.q_QE[1], dim=0)  # so near that every loss sees it
        batch: Any = replace(self.batch, structure=structure, q_QE=self.batch.q_QE[:2], d_DE=d_DE)
        for mask in (True, False):
            loss = self.loss(mask_false_negatives=mask, loss_bidirectional=False, false_negative_filter="identity")
            found = streamed(loss, batch, batch.q_QE, batch.d_DE)
            assert_equal(found, defined(loss, batch, batch.q_QE, batch.d_DE))
            assert (found.dd_DE[2].abs().max() < 1e-12) == mask, (mask, found.dd_DE)
