"""What tiles and ranks find, merged in any order: log-sum-exps that are not finished yet, and the largest logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.losses.tiles import SimilarityTiles


@dataclass(frozen=True, slots=True)
class LogSumExp:
    """Sums of exponentials, each as (max, sum): the sum is exp(max) * sum.

    An empty one is (-inf, 0). `max` need not be the largest logit, only near it: any value works while neither the
    exponentials nor their sum leave the range of the type.
    """

    max: Tensor  # what the logits were lowered by, any shape
    sum: Tensor  # sum of exp(logit - max), same shape

    @classmethod
    def empty(cls, *shape: int, like: Tensor, bounded: bool) -> LogSumExp:
        """Return sums of nothing.

        Args:
            bounded: Whether the logits are so small that exp() of them can't overflow; they aren't lowered then.
        """
        top = like.new_zeros(shape) if bounded else like.new_full(shape, -math.inf)
        return cls(top, like.new_zeros(shape))

    @classmethod
    def of_groups(cls, logits_KP: Tensor, groups_P: Tensor, count: int) -> LogSumExp:
        """Return the sums over each group of logits, shape (K, count).

        Args:
            logits_KP: Logits (K, P).
            groups_P: Group of each of the P, int64.
            count: Number of groups; one without logits comes out empty.
        """
        groups_KP = groups_P.expand(logits_KP.shape)
        top = logits_KP.new_full((len(logits_KP), count), -math.inf)
        top.scatter_reduce_(1, groups_KP, logits_KP, "amax")
        terms = (logits_KP - _finite(top).gather(1, groups_KP)).exp_()
        return cls(top, torch.zeros_like(top).index_add_(1, groups_P, terms))

    @classmethod
    def stack(cls, parts: Sequence[LogSumExp]) -> LogSumExp:
        """Return several of one shape as one, a new first dim."""
        return cls(torch.stack([part.max for part in parts]), torch.stack([part.sum for part in parts]))

    def __getitem__(self, index: int | slice | tuple[int | slice | Tensor, ...]) -> LogSumExp:
        return LogSumExp(self.max[index], self.sum[index])

    def value(self) -> Tensor:
        """Return the log-sum-exps; -inf where empty."""
        return self.max + self.sum.log()

    def without_idle_maxima(self) -> LogSumExp:
        """Return the same with empty sums as (-inf, 0): a maximum of nothing must not outweigh another rank's."""
        return LogSumExp(self.max.masked_fill(self.sum == 0, -math.inf), self.sum)

    def rescaled(self, top: Tensor) -> Tensor:
        """Return `sum` for another `max`, at least as large: what ranks add up after they agreed on the maximum."""
        return self.sum * (self.max - _finite(top)).exp_()

    def merge(self, other: LogSumExp) -> LogSumExp:
        """Return the sums over both."""
        top = torch.maximum(self.max, other.max)
        return LogSumExp(top, self.rescaled(top) + other.rescaled(top))

    def add_logits(self, index: tuple[int, slice], logits_RC: Tensor, *, dim: int, scratch_RC: Tensor) -> None:
        """Add a tile to some of the sums, in place.

        Args:
            dim: What is summed over: 1 for sums per row, 0 per column.
        """
        top = torch.maximum(self.max[index], logits_RC.amax(dim))
        shift = _finite(top)
        terms = torch.sub(logits_RC, shift.unsqueeze(dim), out=scratch_RC).exp_()
        self.sum[index].mul_((self.max[index] - shift).exp_()).add_(terms.sum(dim))
        self.max[index] = top


def _finite(top: Tensor) -> Tensor:
    """Return maxima that can be subtracted: 0 for those of nothing, where -inf - -inf would be NaN."""
    return top.masked_fill(top == -math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Hardest:
    """The k largest logits of each group and where they stand; of equal logits, those at the lowest places count."""

    logits: Tensor  # (..., k), descending; -inf where a group has fewer
    places: Tensor  # (..., k), int32

    @classmethod
    def empty(cls, *shape: int, like: Tensor) -> Hardest:
        """Return a list without entries, which ends with k."""
        return cls(like.new_full(shape, -math.inf), like.new_zeros(shape, dtype=torch.int32))

    @classmethod
    def merged(cls, parts: Sequence[Hardest]) -> Hardest:
        """Return the largest of several lists of one shape."""
        whole = cls(torch.cat([part.logits for part in parts], -1), torch.cat([part.places for part in parts], -1))
        return whole._largest(parts[0].logits.shape[-1])

    def add_logits(self, index: tuple[int, slice], logits_RC: Tensor, first: int) -> None:
        """Add a tile to some of the groups, in place.

        Args:
            first: Place of the tile's first column.
        """
        places_C = torch.arange(first, first + logits_RC.shape[1], dtype=torch.int32, device=logits_RC.device)
        own = Hardest(self.logits[index], self.places[index])
        tile = Hardest(logits_RC, places_C.expand_as(logits_RC))._largest(own.logits.shape[-1])
        both = Hardest(torch.cat([own.logits, tile.logits], -1), torch.cat([own.places, tile.places], -1))
        largest = both._largest(own.logits.shape[-1])
        self.logits[index], self.places[index] = largest.logits, largest.places

    def _largest(self, most: int) -> Hardest:
        """Return the largest `most`. Which of equal logits `topk` takes is left open, so the least ones are redone."""
        count = min(most, self.logits.shape[-1])
        logits, columns = self.logits.topk(count)
        least = logits[..., -1:]
        others = (self.logits < least).logical_or_(self.logits > least)  # NaN counts as equal: its place must be real
        equal = self.places.neg().masked_fill_(others, torch.iinfo(torch.int32).min).topk(count).values.neg_()
        nth = torch.arange(count, device=least.device) - (logits > least).sum(-1, keepdim=True)
        places = torch.where(nth < 0, self.places.gather(-1, columns), equal.gather(-1, nth.clamp_min(0)))
        return Hardest(logits, places)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a loss must know of all ranks' tiles before it can differentiate one."""

    # Sums over each query's negatives (K, Q); K prefixes. Final: a rank sees every document of its queries.
    rows: LogSumExp
    # Sums over this rank's queries only, of any shape: ranks merge them. InfoNCE: over each document's negatives and
    # over its positives (2, K, D); None where it has no document-to-query direction.
    columns: LogSumExp | None
    positive_logits_KP: Tensor  # logits of this rank's positive pairs, in the order of the tiles' cells
    tiles: SimilarityTiles  # what was swept, to be swept again
    # Where only the largest logits are negatives: those of each query (K, Q, k) with their documents, final, and those
    # of each document (K, D, k) with their queries, of this rank's only: ranks merge the latter.
    row_hardest: Hardest | None = None
    column_hardest: Hardest | None = None
    sums: Tensor | None = None  # plain sums over this rank's rows, of any shape: ranks add them up
    parts: tuple[Statistics | None, ...] = ()  # of a sum of losses: those of each part, merged one by one
