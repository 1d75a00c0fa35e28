"""Sizes of a model and of a loss, and how many bytes of a training step they take. Pure arithmetic.

All bytes are of one process. A model is measured elsewhere (models/profile.py) and described here by its towers; a loss
says in its section of keys (losses/keys.py) how much of the similarity matrix it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vembed.batch import Modality

ADAM_STATES = 2
"""AdamW keeps two moments for each trainable parameter."""

LOSS_STRIP_TILES = 10
"""Tiles that the loss keeps at most to save a matrix product, where one direction is trained."""

WHOLE_COPIES = 4
"""Matrices that autograd keeps for a loss over the whole matrix: similarities, logits, exponentials and a gradient."""

GRAM_COPIES = 6
"""Matrices of E x E that a loss over the products of all dims holds: sums of both sides, slopes and products of one."""


# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallCost:
    """Cost of an encoder call of R rows of width w: R * (per_token * w + per_pair * w * w) + per_call."""

    per_token: float  # for each padded token
    per_pair: float = 0.0  # for each pair of tokens of a row: attention that stores its weights
    per_call: float = 0.0  # whatever the rows, e.g. copies of frozen weights in the type that the call computes in

    def of(self, rows: float, width: float) -> float:
        """Return the cost of a call of so many rows of so many tokens."""
        return rows * (self.per_token * width + self.per_pair * width * width) + self.per_call


@dataclass(frozen=True, slots=True)
class TowerSize:
    """One stack of blocks that encodes items of one kind. A model has one, or one for texts and one for pictures."""

    name: str  # for people: "text", "vision", "language"
    max_tokens: int | None  # tokens of the longest item, None where there is no limit
    num_parameters: int
    num_trainable: int
    largest_block: int  # its parameters; sharding gathers one block at a time
    saved: CallCost  # bytes that the forward pass of a call keeps for its backward pass, parameters left out
    transient: CallCost  # bytes beyond that at the worst moment of the call's two passes
    saved_checkpointed: CallCost  # `saved` with gradient checkpointing
    transient_checkpointed: CallCost  # the same: the largest block's activations and more
    forward_flops: CallCost  # of a call
    items: Literal["all", "texts", "pictures"] = "all"  # which items pass through it
    through: tuple[str, ...] = ()  # towers that its items pass through too, in the same call: its costs are of both
    cuts: bool = True  # whether longer items are cut: texts are, pictures never
    # Parameters of the largest tensor that trains, usually the table of a vocabulary. Its fresh gradient stands beside
    # the accumulated one when the activations are gone; `transient` leaves it out.
    largest_tensor: int = 0
    outside_blocks: int = 0  # its other parameters, which sharding gathers for a whole pass, in their own type
    # Copies of trainable weights in the type that calls compute in: a step makes them once. Their gradients, as large,
    # wait for the end of a backward pass, when its activations are gone.
    cast_bytes: int = 0

    def kept(self, *, checkpointed: bool) -> CallCost:
        """Return what a call keeps for its backward pass."""
        return self.saved_checkpointed if checkpointed else self.saved

    def passing(self, rows: float, width: float, *, checkpointed: bool) -> float:
        """Return the bytes that a call takes beyond what it keeps."""
        return (self.transient_checkpointed if checkpointed else self.transient).of(rows, width)

    def peak(self, rows: float, width: float, *, checkpointed: bool) -> float:
        """Return the bytes of a call at its worst moment, copies of weights left out."""
        kept = self.kept(checkpointed=checkpointed).of(rows, width)
        return kept + self.passing(rows, width, checkpointed=checkpointed)

    def sharded(self, compute_bytes: int) -> TowerSize:
        """Return the same tower where sharding gathers blocks in the type that they compute in: nothing is copied.

        Args:
            compute_bytes: Of a value of that type.
        """
        # What a call keeps whatever its rows may be such copies, of frozen weights; what is no copy stays.
        copies = (self.num_parameters - self.outside_blocks) * compute_bytes
        saved = replace(self.saved, per_call=max(0.0, self.saved.per_call + self.cast_bytes - copies))
        return replace(self, saved=saved, cast_bytes=0)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes and costs of an encoder."""

    num_parameters: int  # also those outside of the towers
    num_trainable: int
    bytes_per_value: int  # of stored weights; adapters, their gradients and optimizer state take at least 4
    dimension: int  # of an embedding
    towers: tuple[TowerSize, ...]  # at least one
    estimated: bool = True  # activations come from a formula, not from the model's own operations
    narrowed: int = 0  # frozen parameters that mixed precision rounds once, and not in each call
    adapted: ModelSize | None = None  # with LoRA adapters beside a frozen base; None where it can't have any
    checkpointable: bool = True  # it can recompute activations in the backward pass
    picture_bytes: int = 0  # host memory of one picture as the encoder takes it; 0 for an encoder of texts
    why_not_packed: str = "this encoder doesn't support it"  # rows that lie end to end; empty where it takes them
    vectors: tuple[float, float] = (1.0, 0.0)  # embeddings of a row: so many, and so many more for each of its tokens
    most_of_query: int = 0  # embeddings of a query, where they have a limit of their own; 0: as many as a document
    modalities: frozenset[Modality] = frozenset()  # of the items that it reads

    @classmethod
    def by_formula(
        cls,
        *,
        num_parameters: int,
        num_trainable: int,
        bytes_per_value: int,
        dimension: int,
        max_length: int | None,
        activation_bytes_per_token: int,
    ) -> ModelSize:
        """Return the size of a model of which only one number per token is known."""
        cost = CallCost(float(activation_bytes_per_token))
        tower = TowerSize(
            name="encoder",
            max_tokens=max_length,
            num_parameters=num_parameters,
            num_trainable=num_trainable,
            largest_block=num_parameters,
            saved=cost,
            transient=CallCost(0.0),
            saved_checkpointed=cost,
            transient_checkpointed=CallCost(0.0),
            forward_flops=CallCost(2.0 * num_parameters),  # a multiplication and an addition for each weight
        )
        return cls(num_parameters, num_trainable, bytes_per_value, dimension, (tower,), checkpointable=False)

    @property
    def outside_blocks(self) -> int:
        """Parameters that no block holds."""
        return self.num_parameters - sum(tower.num_parameters - tower.outside_blocks for tower in self.towers)

    @property
    def cast_bytes(self) -> int:
        """Copies of weights that a step makes."""
        return sum(tower.cast_bytes for tower in self.towers)

    @property
    def max_length(self) -> int | None:
        """Longest item in tokens over all towers, None where one has no limit."""
        lengths = [tower.max_tokens for tower in self.towers]
        return None if None in lengths else max(length for length in lengths if length is not None)

    @property
    def row_vectors(self) -> int:
        """Embeddings of the longest item."""
        per_row, per_token = self.vectors
        return max(1, math.ceil(per_row + per_token * (self.max_length or 0)))

    @property
    def query_vectors(self) -> int:
        """Embeddings of the longest query."""
        return self.most_of_query or self.row_vectors

    def values_of(self, num_queries: float, num_documents: float) -> int:
        """Return the numbers of all embeddings of so many of the longest items."""
        return round((num_queries * self.query_vectors + num_documents * self.row_vectors) * self.dimension)

    def kept_bytes_per_token(self, *, checkpointed: bool, call_tokens: float = math.inf) -> int:
        """Return what one token of the longest item keeps for backward, in the tower where it keeps most.

        Args:
            call_tokens: Tokens of a call, which share what the call keeps whatever its size.
        """
        most = 1
        for tower in self.towers:
            cost, width = tower.kept(checkpointed=checkpointed), tower.max_tokens or 1
            of_rows = (cost.of(1, width) - cost.per_call) / width
            most = max(most, int(of_rows + cost.per_call / call_tokens))
        return most

    def call_bytes_per_token(self, *, checkpointed: bool) -> int:
        """Return the same at the worst moment of a call, without what the call takes whatever its size."""
        worst = 1
        for tower in self.towers:
            width = tower.max_tokens or 1
            fixed = tower.peak(0, width, checkpointed=checkpointed)
            worst = max(worst, int((tower.peak(1, width, checkpointed=checkpointed) - fixed) / width))
        return worst

    def call_bytes(self, tokens: float, *, checkpointed: bool) -> int:
        """Return the bytes of a call of so many padded tokens, in rows of the longest item, at its worst moment.

        The copies of weights that all calls share are in it.
        """
        # At the end of a backward pass the gradients of the copies wait, as large as these, in place of activations.
        peaks = [max(float(tower.cast_bytes) for tower in self.towers)]
        for tower in self.towers:
            width = min(tower.max_tokens or 1, tokens)
            peaks.append(tower.peak(tokens / max(1, width), width, checkpointed=checkpointed))
        return self.cast_bytes + int(max(peaks))

    def limited(self, max_tokens: int) -> ModelSize:
        """Return the same model for texts of at most so many tokens."""
        towers = tuple(
            replace(tower, max_tokens=min(tower.max_tokens, max_tokens)) if tower.cuts and tower.max_tokens else tower
            for tower in self.towers
        )
        adapted = None if self.adapted is None else self.adapted.limited(max_tokens)
        return replace(self, towers=towers, adapted=adapted)


# A step ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BytesPerDevice:
    """Peak memory of a step on one device, in bytes."""

    parameters: int  # weights, those that are whole during the step or this device's shards
    gradients: int  # of what trains; with accumulation also those of earlier batches
    optimizer: int  # AdamW's two moments
    activations: int  # of the encoder calls whose graphs live at once
    loss: int  # this device's embeddings, their gradients, and blocks of the similarity matrix
    embeddings: int = 0  # those gathered from other devices, and their gradients
    reduction: int = 0  # buckets in which replicated gradients are added up
    sharding: int = 0  # what sharding holds beside: shards under a whole copy, or the blocks that are gathered for use
    apart: int = 0  # what of all that is never there at the same time: gradients come when graphs go

    @property
    def total(self) -> int:
        """The worst moment: the parts, less what is apart."""
        states = self.parameters + self.gradients + self.optimizer
        others = self.loss + self.embeddings + self.reduction + self.sharding
        return states + self.activations + others - self.apart


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows of a step."""

    num_queries: int  # of one device
    num_documents: int  # of one device, positives and hard negatives
    all_queries: int  # of all devices
    all_documents: int

    @property
    def local(self) -> int:
        """Rows of one device."""
        return self.num_queries + self.num_documents

    @property
    def all(self) -> int:
        """Rows of all devices."""
        return self.all_queries + self.all_documents


# The loss -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossTiles:
    """Similarities that a loss holds: in blocks, or all of them at once."""

    size: int  # rows and columns of a block, at most
    count: int  # blocks that live at once
    memory: str = "tiles"  # as the loss's facts say: blocks, the whole "matrix", listed "pairs", or "tokens"
    strip: int = LOSS_STRIP_TILES  # most blocks of a strip of rows that is kept beside them; 0 where none is
    listed: tuple[int, int] = (0, 0)  # numbers that live on for each query of the device, and each document of all
    parts: tuple[LossTiles, ...] = ()  # of several losses: each one's; nothing else counts then
    at_once: bool = True  # whether they are parts of a sum; else each batch has one of them, and the largest counts
    teacher: int = 0  # dims of a teacher's vectors, which every device has of all rows
    copies: int = 0  # of the embeddings of the device's queries


def loss_bytes(size: ModelSize, rows: BatchRows, tiles: LossTiles) -> int:
    """Return the memory of the loss stage: embeddings, their gradients, and what it holds of the similarities."""
    embeddings = 2 * size.values_of(rows.num_queries, rows.num_documents)
    # The loss computes in float32 at least, whatever the encoder does.
    computed = (embeddings + similarity_values(size, rows, tiles)) * max(4, size.bytes_per_value)
    return computed + 4 * tiles.teacher * rows.all


def similarity_values(size: ModelSize, rows: BatchRows, tiles: LossTiles) -> int:
    """Return how many numbers the loss holds at once; one that doesn't stream is computed whole on every device."""
    if tiles.parts and not tiles.at_once:
        return max(similarity_values(size, rows, part) for part in tiles.parts)
    if tiles.parts:  # what one holds between its two sweeps waits for the others, and so does a gradient
        waiting = size.values_of(rows.num_queries, rows.all_documents)
        return waiting + sum(similarity_values(size, rows, part) for part in tiles.parts)
    if tiles.memory == "pairs":
        return WHOLE_COPIES * rows.all
    if tiles.memory == "gram":
        return GRAM_COPIES * size.dimension**2
    if tiles.memory in ("matrix", "tokens"):
        vectors = size.query_vectors * size.row_vectors if tiles.memory == "tokens" else 1
        return WHOLE_COPIES * rows.all_queries * rows.all_documents * vectors
    # Tiles: this device's queries against the documents of all. A block is one of vectors, where rows have several.
    height = min(tiles.size, rows.num_queries * size.query_vectors)
    tile = height * min(tiles.size, rows.all_documents * size.row_vectors)
    strip = min(tiles.strip * tiles.size**2, height * rows.all_documents)
    listed = tiles.listed[0] * rows.num_queries + tiles.listed[1] * rows.all_documents
    return tiles.count * tile + strip + listed + tiles.copies * size.values_of(rows.num_queries, 0)


def gathered_bytes(size: ModelSize, rows: BatchRows) -> int:
    """Return the memory of the embeddings of all devices and of their gradients; none on a single device."""
    values = size.values_of(rows.all_queries, rows.all_documents)
    return 0 if rows.all == rows.local else 2 * values * max(4, size.bytes_per_value)
