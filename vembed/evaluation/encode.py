"""Encode many items: sorted by length in slices, so that neither padding nor memory grows with the corpus.

Pictures are decoded one slice ahead, in a thread: while the encoder works on one slice, the next one is made, and no
third. Pillow's decoders and torch's kernels both release Python's lock, so the two run side by side.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.gradcache.chunking import ChunkBudget, plan_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side
    from vembed.models.encoder import Encoder

SLICE_ROWS = 8192
"""Texts that are tokenized and sorted at a time."""

PICTURE_SLICE_ROWS = 256
"""Pictures that are decoded at a time: at 224 x 224 each is 600 kB of pixels. Two slices stand in memory."""

CPU_TOKENS = 2048
"""Padded tokens of one encoder call on a CPU: small rectangles stay in its caches."""

ACCELERATOR_TOKENS = 65_536
ACCELERATOR_WIDTH_MULTIPLE = 8


def encoding_budget(device: torch.device, rows: int) -> ChunkBudget:
    """Return the limits of one encoder call that suit a device.

    Args:
        device: Where the encoder runs.
        rows: Most items.
    """
    if device.type == "cpu":
        return ChunkBudget(rows, CPU_TOKENS)
    return ChunkBudget(rows, ACCELERATOR_TOKENS, ACCELERATOR_WIDTH_MULTIPLE)


def _no_poll() -> None:
    """Poll nothing."""


@dataclass(slots=True)
class ItemEncoder:
    """An encoder as evaluation sees it: items in, vectors out.

    Attributes:
        encoder: The network; it is put into evaluation mode for the call and back afterwards.
        budget: Limits of one encoder call.
        device: Where the encoder is.
        autocast_dtype: Type of mixed precision, or None.
        poll: Called between encoder calls; may raise to stop.
        num_truncated: Over-long items seen so far, by side.
    """

    encoder: Encoder
    budget: ChunkBudget
    device: torch.device
    autocast_dtype: torch.dtype | None = None
    poll: Callable[[], None] = _no_poll
    num_truncated: dict[Side, int] = field(default_factory=lambda: {"query": 0, "document": 0})

    def __call__(self, items: Sequence[Item], side: Side) -> NDArray[np.float32]:
        """Encode items.

        Args:
            items: n items.
            side: Whether they are queries or documents.

        Returns:
            (n, E) float32, in the order of the items.
        """
        vectors_NE = np.empty((len(items), self.encoder.dimension), dtype=np.float32)
        with self._evaluating():
            for modality, places in self.encoder.by_modality(items):
                rows = SLICE_ROWS if modality == "text" else PICTURE_SLICE_ROWS
                slices = [places[start : start + rows] for start in range(0, len(places), rows)]
                if modality == "text":
                    for own in slices:
                        self._encode_slice(self._features(items, side, own), side, own, vectors_NE)
                else:
                    self._encode_ahead(items, side, slices, vectors_NE)
        return vectors_NE

    def _features(self, items: Sequence[Item], side: Side, places: NDArray[np.int64]) -> Features:
        """Tokenize or decode the items of some places, all of one modality."""
        return self.encoder.featurize([items[place] for place in places], side)

    def _encode_ahead(
        self, items: Sequence[Item], side: Side, slices: Sequence[NDArray[np.int64]], out_NE: NDArray[np.float32]
    ) -> None:
        """Encode slices into their places, each while a thread makes the features of the next one."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            following = thread.submit(self._features, items, side, slices[0])
            for index, own in enumerate(slices):
                features = following.result()
                if index + 1 < len(slices):
                    following = thread.submit(self._features, items, side, slices[index + 1])
                self._encode_slice(features, side, own, out_NE)
                del features  # before the slice after the next is begun

    def _encode_slice(
        self, features: Features, side: Side, places: NDArray[np.int64], out_NE: NDArray[np.float32]
    ) -> None:
        """Encode the items of some places into their places."""
        self.num_truncated[side] += features.num_truncated
        for chunk in plan_chunks(features.lengths, self.budget):
            self.poll()
            inputs = self.encoder.collate(features, chunk.rows, chunk.width)
            inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
            out_NE[places[chunk.rows]] = self.encoder(inputs).float().cpu().numpy()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch dropout off and gradients too; leave the mode as it was. No random number is drawn."""
        was_training = self.encoder.training
        precision = (
            nullcontext() if self.autocast_dtype is None else torch.autocast(self.device.type, self.autocast_dtype)
        )
        self.encoder.eval()
        try:
            with torch.inference_mode(), precision:
                yield
        finally:
            self.encoder.train(was_training)
