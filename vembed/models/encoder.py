"""What every encoder can do; the rest of the program knows no more than this.

An encoder works in three steps, so that each can run where it is cheapest: `featurize` (CPU, once per item: a
tokenizer), `collate` (CPU, once per chunk: padding) and `forward` (device: the network).

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import numpy as np
from torch import Tensor, nn

from vembed.batch import MODALITY_WORDS, modality_of
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Modality, Side
    from vembed.data.images import ImageLimits
    from vembed.models.towers import Tower

Similarity: TypeAlias = Literal["cosine", "dot"]
"""How two embeddings are compared. Both are inner products: those of cosine models have unit length."""


class Encoder(nn.Module, ABC):
    """A network that turns items into embeddings, with everything that it needs around it.

    Attributes:
        name: What the model was loaded by, for people.
        dimension: E.
        max_length: Longest text in tokens, special tokens included; None where there is no limit, or no text tower.
        modalities: What it takes: texts, pictures, and items that are both.
        eval_only: Modules that run in evaluation mode while the rest trains: what is frozen drops nothing out.
        keeps_base: Whether some weights stay those of the files that it was loaded from, so that checkpoints leave
            them out.
        base: Fingerprint of those weights, taken when the encoder was built; None where there are none.
        trains: What of it trains, for people; empty until that is decided.
    """

    name: str
    dimension: int
    max_length: int | None
    modalities: frozenset[Modality] = frozenset({"text"})
    image_limits: ImageLimits
    eval_only: tuple[nn.Module, ...] = ()
    keeps_base: bool = False
    base: str | None = None
    trains: str = ""
    multi_vector: bool = False  # whether `forward` gives several vectors for each row

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but those that rest."""
        super().train(mode)
        for module in self.eval_only:
            module.eval()
        return self

    @abstractmethod
    def towers(self) -> tuple[Tower, ...]:
        """Return what it consists of, one tower for each modality."""

    def adapter_host(self) -> nn.Module | None:
        """Return the network whose layers may get low-rank adapters; None where there is none."""
        return None

    def training_facts(self) -> dict[str, str]:
        """Return what trains, for `describe`."""
        return {"trains": self.trains} if self.trains else {}

    def by_modality(self, items: Sequence[Item]) -> list[tuple[Modality, NDArray[np.int64]]]:
        """Return the places of the items of each modality that occurs.

        Raises:
            DataError: An item is of a modality that this encoder doesn't take.
        """
        places: dict[Modality, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(modality_of(item), []).append(place)
        strange = sorted(places.keys() - self.modalities)
        if strange:
            raise DataError(
                f"{self.name} takes {' and '.join(sorted(self.modalities))}, and {len(places[strange[0]])} items of "
                f"the data are {MODALITY_WORDS[strange[0]][1]}: choose a model for both, or map other columns"
            )
        return [(modality, np.array(places[modality], dtype=np.int64)) for modality in sorted(places)]

    @property
    def similarity(self) -> Similarity:
        """How embeddings of this encoder are compared."""
        return "cosine"

    @property
    def prompts(self) -> dict[Side, str]:
        """Text that is put before each side's items."""
        return {"query": "", "document": ""}

    @abstractmethod
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Tokenize texts (prompts added, over-long ones cut and counted) or decode and resize pictures.

        Args:
            items: n items of one modality.
            side: Whether they are queries or documents.

        Returns:
            Ragged features of n rows.
        """

    @abstractmethod
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Make the inputs of one call to `forward`.

        Args:
            features: Features of any number of items.
            rows: The R rows that the call sees.
            width: Padded length, at least the longest of those rows.

        Returns:
            Tensors on the CPU, first dimension R unless the encoder packs rows.
        """

    @abstractmethod
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E), at least float32, of unit length unless the model is one for dot products.

        With `multi_vector` the vectors of all rows, one row after the other: (V, E), V the sum of `num_vectors`.
        """

    def num_vectors(self, features: Features) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return how many vectors `forward` gives for each row, at least 1, (n,); None where each has one."""
        return None

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the encoder into a folder from which `load_encoder` and the family's own library load it."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return what was decided about this encoder and from which file, for the plan and the report."""

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in backward instead of keeping them.

        Raises:
            ValueError: When this encoder can't.
        """
        raise ValueError(f"{self.name} has no gradient checkpointing; set gradient_checkpointing: false")
