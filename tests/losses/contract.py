"""The contract of every loss: promises that hold for each registered loss and each value of each of its keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import LossCase
from loss_kinds import KINDS, LATE, build, keys_of, structure_for
from references import reference
from streamed_cases import Counts, assert_equal, defined, over_ranks, streamed
from torch import Tensor
from torch.nn.functional import normalize

from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import RowAssignment
from vembed.gradcache.loss_stage import LossStage
from vembed.losses.registry import loss_section
from vembed.losses.streamed import LossGradients, StreamedBatch, StreamedLoss

if TYPE_CHECKING:
    from kit.ranks import RankPool

    from vembed.losses.base import BatchStructure

EVERY_KIND = KINDS | LATE

CASE = LossCase(
    ("q0", "q1", "q2", "again", "again", "its own positive", "q6", "copied"),
    ("a", "a", "c", "s", "t", "its own positive", "far", "copied", "b", "t", "d", "a", "far", "e", "c"),
    ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (5, 10), (7, 2), (7, 13)),
)
"""Every kind of false negative: a positive text that stands twice, among positives and among hard negatives; a query
that stands twice with another positive; a document that repeats a query, and one that is its own positive. Two queries
share a positive, some have two, and one has none."""

UNPAIRED = 6
"""The query without a positive; `NAMED` gives it none either."""

NAMED = torch.tensor([[0, 8], [0, 9], [1, 6], [2, 7], [2, 8], [5, 11], [6, 12], [7, 14]])
"""Hard negatives of the queries' rows; `structure_for` makes the first and every fourth a second positive."""

DIMENSION = 16
TILES = (1, 2, 5, 100)
"""One cell, tiles that end inside rows of unequal positives, and one tile around everything."""

SHARES = ((8,), (3, 0, 5), (2, 3, 3))
"""Queries of each rank; one of three may have none."""

SHARPEST: dict[str, Any] = {
    "temperature": 0.001,
    "learn_temperature": False,
    "cosent_scale": 1000.0,
    "angle_scale": 1000.0,
    "distillation_temperature": 0.01,
}
"""Values at which float32 exponentials of logits overflow wherever no maximum is subtracted."""


@dataclass(frozen=True)
class Batch:
    """A batch whose rows have weights, and its embeddings."""

    structure: BatchStructure
    q_QE: Tensor
    d_DE: Tensor
    counts: Counts = None  # vectors of each row, where a loss takes several

    @property
    def queries(self) -> range:
        return range(self.structure.num_queries)

    @classmethod
    def of(cls, kind: str, dtype: torch.dtype = torch.float64) -> Batch:
        structure = structure_for(kind, replace(CASE.structure, negatives_P2=NAMED))
        counts = None
        if kind in LATE:
            draw = np.random.default_rng(2)
            counts = draw.integers(1, 4, structure.num_queries), draw.integers(1, 5, structure.num_documents)
        numbers = (
            [structure.num_queries, structure.num_documents] if counts is None else [side.sum() for side in counts]
        )
        rows = torch.randn(sum(numbers), DIMENSION, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        rows = normalize(rows + rows[:1], dim=1).to(dtype)  # so near that losses that spread them have something to do
        return cls(structure, *rows.split([int(number) for number in numbers]), counts)


class LossContract:
    """Checks of one row of `KINDS`: a loss and values of its keys."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name, self.values = EVERY_KIND[kind]
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

    def expected(self, batch: Batch | None = None, **changed: Any) -> LossGradients:
        """Return value and gradients of the loops of the definition."""
        if batch is None and not changed:
            return _expected(self.kind)
        return by_loops((self.name, self.values | changed), batch or self.batch)

    def streamed(self, loss: StreamedLoss, batch: Any | None = None) -> LossGradients:
        batch = batch or self.batch
        return streamed(loss, batch, batch.q_QE, batch.d_DE, batch.counts)

    def defined(self, batch: Any) -> LossGradients:
        return defined(self.loss(), batch, batch.q_QE, batch.d_DE, batch.counts)

    def check_definition(self) -> None:
        """The whole matrix in plain autograd has the value and gradients of the loops."""
        expected = self.expected()
        assert expected.loss > 0
        assert expected.dq_QE.abs().max() > 1e-6
        assert_equal(self.defined(self.batch), expected)

    def check_tiles(self) -> None:
        """Streamed in tiles of any size it has the value and gradients of the loops."""
        for tile_size in TILES:
            loss = self.loss(tile_size)
            assert isinstance(loss.streamed, StreamedLoss)
            assert_equal(self.streamed(loss), self.expected())

    def check_ranks(self) -> None:
        """The shares of ranks add up to the whole."""
        batch = self.batch
        for sizes in SHARES:
            result = over_ranks(self.loss(), batch, batch.q_QE, batch.d_DE, sizes, batch.counts)
            assert_equal(result, self.expected())

    def check_processes(self, ranks: RankPool) -> None:
        """The loss stage of two processes gives both the loss of the global batch, and each the gradients of its rows.

        One process gives the same.
        """
        expected = self.expected()
        du_NE, num_queries = torch.cat([expected.dq_QE, expected.dd_DE]), len(expected.dq_QE)
        shares = [loss_stage_on(0, self.kind, Ranks()), *ranks.run(loss_stage_on, self.kind)]
        for (loss, u_VE, own), vectors in zip(shares, [torch.arange(len(du_NE)), *_of_ranks(self.batch)], strict=True):
            sides = int((vectors < num_queries).sum()), int((vectors >= num_queries).sum())
            result = LossGradients(torch.tensor(loss, dtype=torch.float64), *u_VE.split(sides), own)
            assert_equal(result, LossGradients(expected.loss, *du_NE[vectors].split(sides), expected.parameters))

    def check_prefixes(self) -> None:
        """Prefixes are cut and normalised, and the mean of their losses is weighted."""
        cut = {"mrl_dims": [8, 4], "mrl_weights": [3, 1]}
        assert_equal(self.streamed(self.loss(**cut)), self.expected(**cut))

    def check_sharpest(self) -> None:
        """The sharpest temperature overflows nowhere in float32, and the digits stay that its logits have."""
        batch: Any = Batch.of(self.kind, torch.float32)
        sharp = {key: value for key, value in SHARPEST.items() if self.has_key(key)}
        result = self.streamed(self.loss(**sharp).float(), batch)
        assert result.dq_QE.dtype == torch.float32
        # A similarity errs by 1e-7 in float32 and a logit by 1000 times as much, and so do the shares of a softmax.
        exact = replace(batch, q_QE=batch.q_QE.double(), d_DE=batch.d_DE.double())
        assert_equal(result, self.expected(exact, **sharp), 5e-4)

    def check_mask(self) -> None:
        """A document with the text of a positive isn't pushed away where masks are on, and is where they are off."""
        # One query asks, as the other has no weight; the third document repeats its positive.
        case = LossCase(("q0", "q1"), ("a", "b", "a", "c"), ((0, 0), (1, 1)), weights=(1.0, 0.0), teacher=True)
        structure = replace(case.structure, negatives_P2=torch.tensor([[0, 2], [0, 3]]))
        q_QE, d_DE = self.batch.q_QE[:2], self.batch.d_DE[:4].clone()
        d_DE[2] = normalize(q_QE[0] + 0.3 * q_QE[1], dim=0)  # so near that every loss sees it
        counts = None if self.batch.counts is None else (np.ones(2, dtype=np.int64), np.ones(4, dtype=np.int64))
        batch = replace(self.batch, structure=structure, q_QE=q_QE, d_DE=d_DE, counts=counts)
        more = {"false_negative_filter": "identity"} if self.has_key("false_negative_filter") else {}
        for mask in (True, False):
            changed = {"mask_false_negatives": mask, "loss_bidirectional": False, **more}
            result = self.streamed(self.loss(**changed), batch)
            assert_equal(result, self.expected(batch, **changed))
            assert (result.dd_DE[2].abs().max() < 1e-12) == mask, (mask, result.dd_DE)

    def check_masked(self) -> None:
        """A query all of whose other documents are copies of its positive has no loss and no gradient."""
        structure = LossCase(("q0", "q1"), ("a", "a"), ((0, 0), (1, 1)), teacher=True).structure
        counts = None if self.batch.counts is None else (np.ones(2, dtype=np.int64),) * 2
        batch = replace(
            self.batch, structure=structure, q_QE=self.batch.q_QE[:2], d_DE=self.batch.d_DE[:2], counts=counts
        )
        more = {"false_negative_filter": "identity"} if self.has_key("false_negative_filter") else {}
        # Every negative of the one direction is masked; queries and documents among themselves are other directions.
        more |= {"loss_directions": ["query_to_document"]} if "loss_directions" in self.values else {}
        assert_nothing(self.streamed(self.loss(**{"mask_false_negatives": True, **more}), batch))

    def check_weights(self) -> None:
        """Equal weights of any size change nothing, and a batch in which no row counts loses nothing.

        Where only the query counts that has no positive, the definition has the gradients of the tiles.
        """
        ones_Q = torch.ones(len(self.batch.queries), dtype=torch.float64)
        unpaired_Q = torch.zeros_like(ones_Q).index_fill_(0, torch.tensor(UNPAIRED), 1.0)
        one, many, none, unpaired = (
            replace(self.batch, structure=replace(self.batch.structure, weights_Q=weights_Q))
            for weights_Q in (None, 7.0 * ones_Q, 0.0 * ones_Q, unpaired_Q)
        )
        assert_equal(self.streamed(self.loss(), many), self.streamed(self.loss(), one))
        assert_nothing(self.streamed(self.loss(), none))
        assert_nothing(self.defined(none))
        assert_equal(self.streamed(self.loss(), unpaired), self.defined(unpaired))

    def check_not_a_number(self) -> None:
        """Whatever is not a number in the vector of a query or of its positive reaches the loss."""
        for side in ("q_QE", "d_DE"):
            vectors = getattr(self.batch, side).clone()
            vectors[0, 2] = torch.nan
            assert self.streamed(self.loss(), replace(self.batch, **{side: vectors})).loss.isnan()

    def check_half_precision(self) -> None:
        """Vectors of half precision are multiplied and added up in float32."""
        batch: Any = Batch.of(self.kind, torch.bfloat16)
        result = self.streamed(self.loss().float(), batch)
        assert {each.dtype for each in (result.loss, result.dq_QE, result.dd_DE)} == {torch.float32}
        exact = replace(batch, q_QE=batch.q_QE.double(), d_DE=batch.d_DE.double())
        assert_equal(result, self.expected(exact), 1e-4)

    def check_teacher(self) -> None:
        """A batch without a teacher's vectors is refused, as a whole and in tiles."""
        structure = replace(self.batch.structure, teacher_Q=None, teacher_D=None)
        batch = replace(self.batch, structure=structure)
        for compute in (streamed, defined):
            with pytest.raises(ValueError, match="a teacher's vectors"):
                compute(self.loss(), batch, batch.q_QE, batch.d_DE)

    def check_written(self) -> None:
        """Gradients are written where the caller says, and never before the statistics of all ranks are there."""
        loss, expected = self.loss(), self.expected()
        count = len(self.batch.q_QE)
        table = torch.full((count + len(self.batch.d_DE), DIMENSION), 9.0, dtype=torch.float64)
        batch = StreamedBatch(self.batch.q_QE, self.batch.d_DE, self.batch.structure, counts=self.batch.counts)
        if loss.needs_statistics:
            with pytest.raises(ValueError, match="statistics"):
                loss.gradients(batch)
        known = loss.statistics(batch) if loss.needs_statistics else None
        for _ in range(2):  # the same statistics give the same once more
            result = loss.gradients(batch, known, (table[:count], table[count:]))
            assert torch.allclose(table, torch.cat([expected.dq_QE, expected.dd_DE]), rtol=0, atol=1e-10)
            assert torch.allclose(result.loss, expected.loss, rtol=1e-10)


def assert_nothing(result: LossGradients) -> None:
    assert result.loss == 0
    assert not result.dq_QE.any()
    assert not result.dd_DE.any()


@functools.cache
def _expected(kind: str) -> LossGradients:
    return by_loops(EVERY_KIND[kind], Batch.of(kind))


def by_loops(loss: tuple[str, dict[str, Any]], batch: Batch) -> LossGradients:
    """Return value and gradients of a loss and values of its keys from the loops of its definition."""
    name, values = loss
    own = {key: value.detach().requires_grad_() for key, value in build(loss, 5).named_parameters()}
    q_QE, d_DE = batch.q_QE.detach().requires_grad_(), batch.d_DE.detach().requires_grad_()
    rows: list[Any] = [list(q_QE), list(d_DE)]
    if batch.counts is not None:
        rows = [side.split(counts.tolist()) for side, counts in zip((q_QE, d_DE), batch.counts, strict=True)]
    value = reference(name, keys_of(values), batch.structure, *rows, own)
    dq_QE, dd_DE, *rest = torch.autograd.grad(value, [q_QE, d_DE, *own.values()], materialize_grads=True)
    return LossGradients(value.detach(), dq_QE, dd_DE, dict(zip(own, rest, strict=True)))


def _of_ranks(batch: Batch) -> list[Tensor]:
    """Return the vectors of [queries; documents] that each of two processes has: rows in no order of sides."""
    counts = [1] * (batch.structure.num_queries + batch.structure.num_documents)
    if batch.counts is not None:
        counts = np.concatenate(batch.counts).tolist()
    vectors = torch.arange(sum(counts)).split(counts)
    return [torch.cat([vectors[row] for row in rows]) for rows in _slots(len(counts))]


def _slots(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(3).permutation(num_rows)
    return np.sort(rows[: num_rows // 3]), np.sort(rows[num_rows // 3 :])


def loss_stage_on(rank: int, kind: str, ranks: Ranks | None = None) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return the loss, and the gradients of this rank's vectors and of the loss's parameters; all of them on one."""
    batch, ranks = Batch.of(kind), ranks or Ranks.of_this_process()
    z_NE, counts_N = torch.cat([batch.q_QE, batch.d_DE]), None
    num_rows = batch.structure.num_queries + batch.structure.num_documents
    assignment = RowAssignment.alone(num_rows) if ranks.is_one else RowAssignment(_slots(num_rows))
    vectors = slice(None) if ranks.is_one else _of_ranks(batch)[rank]
    if batch.counts is not None:
        counts_N = np.concatenate(batch.counts)
        assignment = assignment.of_vectors(counts_N)
    stage = LossStage(build(kind, 4), ranks)
    result = stage.run(z_NE[vectors], batch.structure, assignment, counts_N=counts_N)
    return result.loss.item(), result.u_VE, result.parameters
