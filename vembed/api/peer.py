"""`Trainer` and `Predictor`: the same functions under the names that some other trainers use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vembed.api.model import load
from vembed.api.training import train

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vembed.api.keys import TrainKeys
    from vembed.api.loading import LoadOptions
    from vembed.api.result import RunResult
    from vembed.batch import Side
    from vembed.data.python_inputs import ItemInput
    from vembed.data.python_rows import RowsInput
    from vembed.training.callbacks import Callback


class Trainer:
    """A model that is about to be trained; `keys` are those of the configuration."""

    def __init__(self, model: str | Path, **keys: Unpack[TrainKeys]) -> None:
        self.model = model
        self.keys = keys

    def train(
        self, data: RowsInput | str | Path | None = None, *, callbacks: Sequence[Callback] = (), **keys: Any
    ) -> RunResult:
        """Train, as `vembed.train` does; its arguments are taken here too, and win over those of `Trainer`."""
        return train(dict(self.keys), model=self.model, data=data, callbacks=callbacks, **keys)


class Predictor:
    """A trained model that turns texts and pictures into vectors; `vembed.load` takes the same options."""

    def __init__(self, path: str | Path, **options: Unpack[LoadOptions]) -> None:
        self.model = load(path, **options)

    def encode(self, rows: Iterable[ItemInput], side: Side = "query", **form: Any) -> NDArray[np.float32]:
        """Turn texts and pictures into vectors, as `EmbeddingModel.encode` does."""
        vectors: NDArray[np.float32] = self.model.encode(rows, side, **form)
        return vectors

    def encode_text(self, texts: Sequence[str], side: Side = "query", **form: Any) -> NDArray[np.float32]:
        """Turn texts into vectors, by default as queries."""
        return self.encode(texts, side, **form)

    def encode_image(self, images: Iterable[ItemInput], side: Side = "document", **form: Any) -> NDArray[np.float32]:
        """Turn pictures into vectors, by default as documents; here a `str` is the path of a file."""
        return self.encode((Path(each) if isinstance(each, str) else each for each in images), side, **form)
