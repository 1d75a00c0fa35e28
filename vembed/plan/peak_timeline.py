"""The worst moment of a step: what is alive beside the weights and the optimizer's state.

Activations and gradients don't add up. A tower has no gradients before its first backward; where calls are encoded
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
    from collections.abc import Iterator, Sequence

    from vembed.plan.memory import BytesPerDevice, TowerSize


@dataclass(frozen=True, slots=True)
class Load:
    """The rows of a step that one tower encodes on one device."""

    tower: TowerSize
    rows: float
    width: int  # tokens of each row


@dataclass(frozen=True, slots=True)
class Cut:
    """How the rows are cut into calls, and which graphs are kept."""

    rows: int  # most rows of a call
    tokens: int  # most padded tokens of a call
    retain: float = 0.0  # share of the padded tokens whose graphs are kept
    retain_tokens: int | None = None  # most padded tokens whose graphs are kept, None for no limit
    checkpointed: bool = False  # whether layers are recomputed


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive at one moment of the backward passes."""

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
        return self.copies + int(max([self.kept, *(each.activations for each in self.moments)]))


def activation_moments(loads: Sequence[Load], cut: Cut) -> Activations:
    """Return the activations of a step at its worst moments.

    Args:
        loads: The rows of each tower, in the order in which the towers are called: pictures before texts.
    """
    towers = [_Calls(load, cut) for load in loads if load.rows]
    rows, tokens = (sum(each) for each in zip(*((tower.load.rows, tower.tokens) for tower in towers), strict=True))
    retain, most = cut.retain * tokens, math.inf if cut.retain_tokens is None else cut.retain_tokens
    if rows <= cut.rows and tokens <= cut.tokens:
        retain = most = tokens  # what fits one call is never encoded again
    for tower in reversed(towers):
        tower.retain_last(retain, most)
        retain, most = retain - tower.retained_tokens, most - tower.retained_tokens
        if tower.retained < tower.count:
            break
    kept = alive = sum(tower.kept for tower in towers)
    gradients = _Gradients(towers)
    moments: list[Moment] = []
    for tower in reversed(towers):
        moments += tower.moments_of_retained(alive, gradients)
        alive -= tower.kept
    for tower in towers:
        moments += tower.moments_of_replayed(gradients)
    return Activations(kept, tuple(moments), sum(tower.load.tower.cast_bytes for tower in towers))


class _Gradients:
    """The share of the gradients that is there, growing tower by tower."""

    def __init__(self, towers: Sequence[_Calls]) -> None:
        self._parameters = {tower.load.tower.name: tower.load.tower.num_trainable for tower in towers}
        self._done: set[str] = set()

    def share(self) -> float:
        """Return the share, 0 to 1."""
        return sum(self._parameters.get(name, 0) for name in self._done) / max(1, sum(self._parameters.values()))

    def has(self, tower: TowerSize) -> bool:
        """Return whether those of a tower are there."""
        return tower.name in self._done

    def add(self, tower: TowerSize) -> None:
        """Add those of a tower."""
        self._done |= {tower.name, *tower.through}


class _Calls:
    """The calls of one tower: full ones, and a last one of the rows that are left."""

    def __init__(self, load: Load, cut: Cut) -> None:
        self.load, self._checkpointed = load, cut.checkpointed
        self._full = min(load.rows, max(1, min(cut.rows, cut.tokens // load.width)))
        self.count = math.ceil(load.rows / self._full)
        self._last = load.rows - (self.count - 1) * self._full
        self.retained = 0

    @property
    def tokens(self) -> float:
        """Padded tokens of all calls."""
        return self.load.rows * self.load.width

    @property
    def retained_tokens(self) -> float:
        """Padded tokens of the retained calls."""
        return self._retained_rows * self.load.width

    @property
    def kept(self) -> float:
        """Bytes of the graphs of the retained calls."""
        if not self.retained:
            return 0.0
        cost = self.load.tower.kept(checkpointed=self._checkpointed)
        return cost.of(self._retained_rows, self.load.width) + (self.retained - 1) * cost.per_call

    @property
    def _retained_rows(self) -> float:
        return self._last + (self.retained - 1) * self._full if self.retained else 0.0

    def retain_last(self, wanted: float, most: float) -> None:
        """Keep the graphs of the last calls: up to the one that comes nearest to the tokens wanted, and to the most."""
        last, full = self._last * self.load.width, self._full * self.load.width
        if last / 2 <= wanted and last <= most:
            further = min((wanted - last) / full + 0.5, (most - last) / full)
            self.retained = min(self.count, 1 + max(0, math.floor(further)))

    def moments_of_retained(self, alive: float, gradients: _Gradients) -> Iterator[Moment]:
        """Yield what there is while the retained calls go back, the last one first.

        Args:
            alive: Bytes of all graphs that are there before.
            gradients: Those that are there before; the tower's are added.
        """
        if not self.retained or not self.load.tower.num_trainable:
            return
        saved, extra = self._costs(self._last)
        waiting = self.load.tower.cast_bytes
        yield Moment(alive + extra, gradients.share())
        yield Moment(alive - saved + waiting, gradients.share())
        gradients.add(self.load.tower)
        yield Moment(alive - saved, gradients.share())
        if self.retained > 1:
            full, extra = self._costs(self._full)
            yield Moment(alive - saved + extra, gradients.share())
            yield Moment(alive - saved - full + waiting, gradients.share(), fresh=True)

    def moments_of_replayed(self, gradients: _Gradients) -> Iterator[Moment]:
        """Yield what there is while the other calls are encoded again, the first one first."""
        number = self.count - self.retained
        if not number or not self.load.tower.num_trainable:
            return
        rows = [self._full] * min(2, number)
        if number <= 2 and not self.retained:
            rows[-1] = self._last
        for each in rows:
            saved, extra = self._costs(each)
            yield Moment(saved + extra, gradients.share())
            yield Moment(self.load.tower.cast_bytes, gradients.share(), fresh=gradients.has(self.load.tower))
            gradients.add(self.load.tower)

    def _costs(self, rows: float) -> tuple[float, float]:
        """Return what a call of so many rows keeps, and what its backward takes beyond."""
        tower, width = self.load.tower, self.load.width
        saved = tower.kept(checkpointed=self._checkpointed).of(rows, width)
        return saved, max(0.0, tower.passing(rows, width, checkpointed=self._checkpointed))


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
    behind = replace(states, loss=min(tables, parts.loss), embeddings=0)
    moments = [replace(states, gradients=before, activations=activations.copies + int(activations.kept))]
    moments += [
        replace(
            behind,
            gradients=before + int(parts.gradients * each.gradients),
            activations=activations.copies + int(each.activations) + fresh * each.fresh,
        )
        for each in activations.moments
    ]
    reduced = max(parts.reduction, fresh) if parts.reduction else 0
    moments.append(replace(behind, gradients=before + parts.gradients, reduction=reduced))
    return max(moments, key=lambda moment: moment.total)
