"""The worst moment of a step: which activations, gradients and copies are alive at the same time.

Activations and gradients don't add up: a tower has no gradients before its first backward, and where calls are encoded
again no retained graph is left. What counts is the largest of these moments:

1. The loss: the graphs of all retained calls, and the blocks of the similarity matrix.
2. The backward of retained calls, tower after tower: what is left of the graphs, what the backward takes beyond, and
   the gradients that are there by then.
3. Each call that is encoded again: its own graph, its backward, and the gradients that are there by then.
4. The end of a backward: the table of a vocabulary gets a fresh gradient as large as itself, and the gradients of all
   copies of weights wait to be added to those of the weights.
5. The reduction over ranks: all gradients, and a copy of those that one collective takes.

Embeddings and their gradients are there from the loss to the end of the last backward, and the copies of weights that
mixed precision makes to the end of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.plan.chunks import ChunkPlan
    from vembed.plan.memory import BytesPerDevice, TowerSize


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the backward passes: activations and gradients that are alive."""

    activations: float  # bytes of graphs, and of what a backward takes beyond
    gradients: float  # share of the gradients that are there, 0 to 1
    fresh: bool = False  # the largest tensor that trains has a fresh gradient beside the accumulated one


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations of a step."""

    kept: float  # bytes of the graphs of all retained calls, as the loss finds them
    moments: tuple[Moment, ...]  # those of the backward passes
    copies: int  # bytes of copies of weights; they are there at every moment

    @property
    def most(self) -> int:
        """Bytes that are alive at once, at most."""
        return self.copies + int(max([self.kept, *(moment.activations for moment in self.moments)]))


def activation_moments(
    loads: Sequence[tuple[TowerSize, float, int]], chunks: ChunkPlan, *, checkpointed: bool
) -> Activations:
    """Return the activations of a step at its worst moments.

    Args:
        loads: Each tower, the rows that it encodes on one device, and the tokens of a row; in the order in which the
            towers are called: pictures before texts.
        chunks: Of these the limits of a call and of what keeps its graph.
        checkpointed: Whether layers are recomputed.
    """
    towers = [_Calls(tower, rows, width, chunks, checkpointed=checkpointed) for tower, rows, width in loads if rows]
    rows, tokens = sum(calls.rows for calls in towers), sum(calls.tokens for calls in towers)
    retain, most = chunks.retain * tokens, math.inf if chunks.retain_tokens is None else chunks.retain_tokens
    if rows <= chunks.rows and tokens <= chunks.tokens:
        retain = most = tokens  # what fits one call is never encoded again
    for calls in reversed(towers):  # the last calls are kept, up to the first that isn't
        calls.retain_last(retain, most)
        retain, most = retain - calls.retained_tokens, most - calls.retained_tokens
        if calls.retained < calls.count:
            break

    trainable = {calls.tower.name: calls.tower.num_trainable for calls in towers}
    with_gradients: set[str] = set()  # towers that have theirs

    def share() -> float:
        return sum(trainable.get(name, 0) for name in with_gradients) / max(1, sum(trainable.values()))

    # Retained graphs go back first, the last call of the last tower first: its graph is freed as gradients come.
    # Further calls are full ones and differ only in what is left of the graphs, so that the first of them is the worst.
    kept = alive = sum(calls.kept for calls in towers)
    moments: list[Moment] = []
    for calls in reversed(towers):
        tower = calls.tower
        if calls.retained and tower.num_trainable:
            saved, beyond = calls.costs(calls.last)
            moments += [Moment(alive + beyond, share()), Moment(alive - saved + tower.cast_bytes, share())]
            with_gradients |= {tower.name, *tower.through}
            moments.append(Moment(alive - saved, share()))
            if calls.retained > 1:
                full, beyond = calls.costs(calls.full)
                moments.append(Moment(alive - saved + beyond, share()))
                moments.append(Moment(alive - saved - full + tower.cast_bytes, share(), fresh=True))
        alive -= calls.kept

    # The others are encoded again from the first one on, each with its graph alone. Two are enough: the first meets no
    # gradients of its tower, every other one meets them.
    for calls in towers:
        tower, number = calls.tower, calls.count - calls.retained
        if not number or not tower.num_trainable:
            continue
        replayed = [calls.full] * min(2, number)
        if number <= 2 and not calls.retained:
            replayed[-1] = calls.last
        for rows in replayed:
            saved, beyond = calls.costs(rows)
            moments.append(Moment(saved + beyond, share()))
            moments.append(Moment(tower.cast_bytes, share(), fresh=tower.name in with_gradients))
            with_gradients |= {tower.name, *tower.through}
    return Activations(kept, tuple(moments), sum(calls.tower.cast_bytes for calls in towers))


class _Calls:
    """The calls of one tower: full ones, and a last one of the rows that are left."""

    def __init__(self, tower: TowerSize, rows: float, width: int, chunks: ChunkPlan, *, checkpointed: bool) -> None:
        self.tower, self.rows, self._width, self._checkpointed = tower, rows, width, checkpointed
        self.full = min(rows, max(1, min(chunks.rows, chunks.tokens // width)))  # rows of a full call
        self.count = math.ceil(rows / self.full)
        self.last = rows - (self.count - 1) * self.full  # rows of the last call
        self.retained = 0  # calls

    @property
    def tokens(self) -> float:
        """Padded tokens of all calls."""
        return self.rows * self._width

    @property
    def retained_tokens(self) -> float:
        """Padded tokens of the retained calls."""
        return self._retained_rows * self._width

    @property
    def kept(self) -> float:
        """Bytes of the graphs of the retained calls."""
        if not self.retained:
            return 0.0
        cost = self.tower.kept(checkpointed=self._checkpointed)
        return cost.of(self._retained_rows, self._width) + (self.retained - 1) * cost.per_call

    @property
    def _retained_rows(self) -> float:
        return self.last + (self.retained - 1) * self.full if self.retained else 0.0

    def retain_last(self, wanted: float, most: float) -> None:
        """Keep the graphs of the last calls: up to the one that comes nearest to the tokens wanted, and to the most."""
        last, full = self.last * self._width, self.full * self._width
        if last / 2 <= wanted and last <= most:
            further = min((wanted - last) / full + 0.5, (most - last) / full)
            self.retained = min(self.count, 1 + max(0, math.floor(further)))

    def costs(self, rows: float) -> tuple[float, float]:
        """Return the bytes that a call of so many rows keeps, and what its backward takes beyond."""
        saved = self.tower.kept(checkpointed=self._checkpointed).of(rows, self._width)
        return saved, max(0.0, self.tower.passing(rows, self._width, checkpointed=self._checkpointed))


def peak_of_step(
    parts: BytesPerDevice, activations: Activations, *, tables: int, fresh: int, held: bool = False
) -> BytesPerDevice:
    """Return what is alive at the worst moment of a step, by part.

    Args:
        parts: Each part at its own worst, activations left out.
        activations: Those at the moments of the step.
        tables: Of `loss`, the embeddings and their gradients: they stay until the last backward.
        fresh: Bytes of the fresh gradient of the largest tensor that trains.
        held: Whether the gradients of earlier batches are there from the start, as with accumulation.
    """
    states = replace(parts, gradients=0, activations=activations.copies, reduction=0)
    before = parts.gradients if held else 0
    # The loss: all of it, and the retained graphs.
    moments = [replace(states, gradients=before, activations=activations.copies + int(activations.kept))]
    # Behind it, its blocks and the gathered embeddings are gone.
    behind = replace(states, loss=min(tables, parts.loss), embeddings=0)
    moments += [
        replace(
            behind,
            gradients=before + int(parts.gradients * moment.gradients),
            activations=activations.copies + int(moment.activations) + fresh * moment.fresh,
        )
        for moment in activations.moments
    ]
    # A tensor is never split over buckets, so that one of them has room for the largest.
    reduced = max(parts.reduction, fresh) if parts.reduction else 0
    moments.append(replace(behind, gradients=before + parts.gradients, reduction=reduced))
    return max(moments, key=lambda moment: moment.total)
