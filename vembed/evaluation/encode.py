"""Encode many items: sorted by length in slices, so that neither padding nor memory grows with the corpus.

On several ranks all of them encode: each has every n-th item, the first one gets all vectors. They go in rounds, and a
signal is looked at only between rounds, where all ranks stand at the same point.

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

from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunking import ChunkBudget, plan_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side
    from vembed.models.encoder import Encoder

SLICE_ROWS = 8192
"""Texts that are tokenized and sorted at a time."""

SHARED_SLICE_ROWS = 1024
"""The same on each of several ranks, which look at signals only between slices."""

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
        poll: Called between encoder calls, on several ranks between slices; may raise to stop.
        ranks: Who shares the work. All must make the same calls.
        even_calls: Whether ranks must call the encoder equally often: sharded weights are gathered in each call.
        num_truncated: Over-long items that this rank has seen so far, by side.
    """

    encoder: Encoder
    budget: ChunkBudget
    device: torch.device
    autocast_dtype: torch.dtype | None = None
    poll: Callable[[], None] = _no_poll
    ranks: Ranks = field(default_factory=Ranks)
    even_calls: bool = False
    num_truncated: dict[Side, int] = field(default_factory=lambda: {"query": 0, "document": 0})

    def __call__(self, items: Sequence[Item], side: Side) -> NDArray[np.float32]:
        """Encode items.

        Args:
            items: n items.
            side: Whether they are queries or documents.

        Returns:
            (n, E) float32, in the order of the items; on several ranks that of the first one, on the others whatever
            they encoded among zeros.
        """
        if not self.ranks.is_one:
            return self._shared(items, side)
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

    def _shared(self, items: Sequence[Item], side: Side) -> NDArray[np.float32]:
        """Encode items on all ranks, in rounds."""
        vectors_NE = np.zeros((len(items), self.encoder.dimension), dtype=np.float32)
        world_size = self.ranks.world_size
        with self._evaluating():
            for modality, places in self.encoder.by_modality(items):
                rows = world_size * (SHARED_SLICE_ROWS if modality == "text" else PICTURE_SLICE_ROWS)
                for start in range(0, len(places), rows):
                    self.poll()
                    shares = [places[start : start + rows][rank::world_size] for rank in range(world_size)]
                    own = shares[self.ranks.rank]
                    if len(own):
                        num_calls = self._encode_slice(self._features(items, side, own), side, own, vectors_NE)
                    else:
                        num_calls = 0
                    if self.even_calls:
                        self._call_as_often_as_others(num_calls, self._features(items, side, places[:1]))
                    found = self.ranks.rows_at_first(
                        torch.from_numpy(vectors_NE[own]).to(self.device), [len(share) for share in shares]
                    )
                    if self.ranks.is_first:
                        vectors_NE[np.concatenate(shares)] = found.cpu().numpy()
        return vectors_NE

    def _call_as_often_as_others(self, num_calls: int, spare: Features) -> None:
        """Encode one item again and again, until this rank has made as many calls as the one that made most."""
        most = int(self.ranks.max_(torch.tensor([num_calls], device=self.device)).item())
        for _ in range(most - num_calls):
            self._encode_chunk(spare, np.zeros(1, dtype=np.int64), int(spare.lengths[0]))

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
    ) -> int:
        """Encode the items of some places into their places; return the number of calls."""
        self.num_truncated[side] += features.num_truncated
        chunks = plan_chunks(features.lengths, self.budget)
        for chunk in chunks:
            if self.ranks.is_one:
                self.poll()
            out_NE[places[chunk.rows]] = self._encode_chunk(features, chunk.rows, chunk.width)
        return len(chunks)

    def _encode_chunk(self, features: Features, rows: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        inputs = self.encoder.collate(features, rows, width)
        inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
        vectors_RE: NDArray[np.float32] = self.encoder(inputs).float().cpu().numpy()
        return vectors_RE

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch dropout off and gradients too; leave the mode as it was. No random number is drawn."""
        was_training = self.encoder.training
        precision = (
            nullcontext() if self.autocast_dtype is None else torch.autocast(self.device.type, self.autocast_dtype)
        )
        self.encoder.eval()
        try:
            # Weights that are gathered inside inference_mode could not be trained with afterwards.
            with torch.no_grad() if self.even_calls else torch.inference_mode(), precision:
                yield
        finally:
            self.encoder.train(was_training)
