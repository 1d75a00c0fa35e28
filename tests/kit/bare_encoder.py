"""An encoder that lies in no folder: what tests of encoding and searching fill with a rule of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vembed.batch import Features, texts_of
from vembed.models.encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side


class BareEncoder(Encoder):
    """Takes texts that are numbers; a subclass says what the vectors of them are."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.name, self.dimension, self.max_length = type(self).__name__.lower(), dimension, None

    @classmethod
    def load(cls, files: Any, texts: Iterable[str] = ()) -> BareEncoder:
        raise AssertionError

    def save(self, folder: object) -> None:
        raise AssertionError

    def towers(self) -> Any:
        return ()

    def describe(self) -> dict[str, str]:
        return {}

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        values = np.array([int(text) for text in texts_of(items)], dtype=np.int64)
        return Features({}, np.ones(len(items), dtype=np.int64), {"value": values})

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, torch.Tensor]:
        return {"value": torch.from_numpy(features.per_row["value"][rows])}
