"""How many bytes a training step takes, part by part. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

ADAM_STATES = 2
"""AdamW keeps two moments for each trainable parameter."""

LOSS_STRIP_TILES = 10
"""Tiles that the loss keeps at most to save a matrix product, where one direction is trained."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the plan must know of an encoder.

    Attributes:
        num_parameters: All parameters.
        num_trainable: Those that get gradients.
        bytes_per_value: Of weights, gradients and optimizer state.
        dimension: Embedding dim.
        max_length: Longest input in tokens, None where there is no limit.
        activation_bytes_per_token: Estimate of what one token keeps for backward, at the longest input.
    """

    num_parameters: int
    num_trainable: int
    bytes_per_value: int
    dimension: int
    max_length: int | None
    activation_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class BytesPerDevice:
    """Peak memory of a step on one device, in bytes. `activations` is an estimate by formula, the rest is counted."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.loss


@dataclass(frozen=True, slots=True)
class LossTiles:
    """The blocks in which the similarity matrix is computed.

    Attributes:
        size: Rows and columns of a block, at most.
        count: Blocks that live at once.
    """

    size: int
    count: int


def step_bytes(
    size: ModelSize, *, chunk_tokens: int, num_queries: int, num_documents: int, tiles: LossTiles
) -> BytesPerDevice:
    """Return the memory of one step.

    Args:
        size: The encoder.
        chunk_tokens: Padded tokens whose activations live at once.
        num_queries: Queries of the batch.
        num_documents: Documents of the batch, positives and hard negatives.
        tiles: Of the loss.
    """
    tile = min(tiles.size, num_queries) * min(tiles.size, num_documents)
    strip = min(LOSS_STRIP_TILES * tiles.size**2, num_queries * num_documents)
    table = (num_queries + num_documents) * size.dimension * size.bytes_per_value
    return BytesPerDevice(
        parameters=size.num_parameters * size.bytes_per_value,
        gradients=size.num_trainable * size.bytes_per_value,
        optimizer=size.num_trainable * size.bytes_per_value * ADAM_STATES,
        activations=chunk_tokens * size.activation_bytes_per_token,
        loss=2 * table + (tiles.count * tile + strip) * size.bytes_per_value,
    )


def show_bytes(count: float) -> str:
    """Return a number of bytes for people, e.g. "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
