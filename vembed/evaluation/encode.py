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
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from vembed.batch import Ragged
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.gradcache.chunking import ChunkBudget, plan_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side
    from vembed.models.encoder import Encoder

Vectors: TypeAlias = "NDArray[np.float32] | Ragged"
"""Vectors of n items: (n, E), or ragged rows of vectors where an encoder gives several for each item."""

SLICE_ROWS = 8192
"""Texts that are tokenized and sorted at a time."""

SHARED_SLICE_ROWS = 1024
"""The same on each of several ranks, which look at signals only between slices."""

PICTURE_SLICE_ROWS = 256
"""Pictures that are decoded at a time: at 224 x 224 each is 150 kB of pixels. Two slices stand in memory."""

CPU_TOKENS = 2048
"""Padded tokens of one encoder call on a CPU: small rectangles stay in its caches."""

ACCELERATOR_TOKENS = 65_536


def encoding_budget(device: torch.device, rows: int) -> ChunkBudget:
    """Return the limits of one encoder call that suit a device."""
    if device.type == "cpu":
        return ChunkBudget(rows, CPU_TOKENS)
    return ChunkBudget(rows, ACCELERATOR_TOKENS, bucketed=True)


def refuse_several_vectors(encoder: Encoder) -> None:
    """Refuse an encoder of several vectors for each row where one is needed.

    Raises:
        ConfigError: It is one.
    """
    if encoder.multi_vector:
        raise ConfigError(
            f"{encoder.name} gives several vectors for each row: training and vembed evaluate score such a model by "
            f"exact MaxSim; an index, search and encode take a model of one vector for each row"
        )


class _Collected:
    """The vectors of n items, put in as chunks come."""

    def __init__(self, num_items: int, encoder: Encoder) -> None:
        self._dimension = encoder.dimension
        several = encoder.multi_vector
        self._table_NE = np.zeros((0 if several else num_items, self._dimension), dtype=np.float32)
        self._rows: list[NDArray[np.float32]] | None = None
        if several:
            self._rows = [np.zeros((1, self._dimension), dtype=np.float32)] * num_items

    def put(self, places: NDArray[np.int64], vectors_VE: NDArray[np.float32], counts: NDArray[np.int64] | None) -> None:
        """Put the vectors of the items of some places: one of each, or as many as `counts` says."""
        if self._rows is None:
            self._table_NE[places] = vectors_VE
            return
        assert counts is not None, "an encoder with multi_vector says how many vectors each row has"
        for place, own in zip(places, np.split(vectors_VE, np.cumsum(counts)[:-1]), strict=True):
            self._rows[place] = own

    def of(self, places: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        """Return the vectors of the items of some places, and how many each has where that isn't one."""
        if self._rows is None:
            return self._table_NE[places], None
        rows = [self._rows[place] for place in places]
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        return np.concatenate([np.zeros((0, self._dimension), dtype=np.float32), *rows]), counts

    def all(self) -> Vectors:
        """Return all vectors."""
        if self._rows is None:
            return self._table_NE
        values_VE, counts = self.of(np.arange(len(self._rows)))
        assert counts is not None
        return Ragged(values_VE, np.concatenate([[0], np.cumsum(counts)]))


def _no_poll() -> None:
    """Poll nothing."""


@dataclass(slots=True)
class ItemEncoder:
    """An encoder as evaluation sees it: items in, vectors out.

    The encoder is put into evaluation mode for the call and back afterwards.
    """

    encoder: Encoder
    budget: ChunkBudget  # limits of one encoder call
    device: torch.device  # where the encoder is
    autocast_dtype: torch.dtype | None = None
    poll: Callable[[], None] = _no_poll  # called between encoder calls, on several ranks between slices; may raise
    ranks: Ranks = field(default_factory=Ranks)  # all must make the same calls
    even_calls: bool = False  # whether all ranks must call equally often: sharded weights are gathered in each call
    num_truncated: dict[Side, int] = field(default_factory=lambda: {"query": 0, "document": 0})  # on this rank, so far

    def __call__(self, items: Sequence[Item], side: Side) -> Vectors:
        """Encode items.

        Returns:
            float32 in the order of the items: (n, E), or ragged rows of vectors where the encoder gives several. On
            several ranks the first one has them all, the others what they encoded themselves, among zeros.
        """
        vectors = _Collected(len(items), self.encoder)
        if not self.ranks.is_one:
            self._shared(items, side, vectors)
            return vectors.all()
        with self._evaluating():
            for modality, places in self.encoder.by_modality(items):
                rows = SLICE_ROWS if modality == "text" else PICTURE_SLICE_ROWS
                slices = [places[start : start + rows] for start in range(0, len(places), rows)]
                if modality == "text":
                    for own in slices:
                        self._encode_slice(self._features(items, side, own), side, own, vectors)
                else:
                    self._encode_ahead(items, side, slices, vectors)
        return vectors.all()

    def table(self, items: Sequence[Item], side: Side) -> NDArray[np.float32]:
        """Encode items for a caller that holds one vector for each row.

        Returns:
            (n, E) float32, in the order of the items.

        Raises:
            ConfigError: The encoder gives several vectors for each row.
        """
        refuse_several_vectors(self.encoder)
        vectors_NE = self(items, side)
        assert not isinstance(vectors_NE, Ragged)
        return vectors_NE

    def _shared(self, items: Sequence[Item], side: Side, vectors: _Collected) -> None:
        """Encode items on all ranks, in rounds."""
        world_size = self.ranks.world_size
        with self._evaluating():
            for modality, places in self.encoder.by_modality(items):
                rows = world_size * (SHARED_SLICE_ROWS if modality == "text" else PICTURE_SLICE_ROWS)
                for start in range(0, len(places), rows):
                    self.poll()
                    shares = [places[start : start + rows][rank::world_size] for rank in range(world_size)]
                    own = shares[self.ranks.rank]
                    if len(own):
                        num_calls = self._encode_slice(self._features(items, side, own), side, own, vectors)
                    else:
                        num_calls = 0
                    if self.even_calls:
                        self._call_as_often_as_others(num_calls, self._features(items, side, places[:1]))
                    self._send_to_first(vectors, shares)

    def _send_to_first(self, vectors: _Collected, shares: Sequence[NDArray[np.int64]]) -> None:
        """Give the first rank the vectors of what each rank encoded."""
        own_VE, own_counts = vectors.of(shares[self.ranks.rank])
        # An encoder of one vector per row spares the exchange of counts.
        counts = None if own_counts is None else self.ranks.gather_objects(own_counts)
        sizes = [len(share) for share in shares] if counts is None else [int(each.sum()) for each in counts]
        found = self.ranks.rows_at_first(torch.from_numpy(own_VE).to(self.device), sizes)
        if self.ranks.is_first:
            all_counts = None if counts is None else np.concatenate(counts)
            vectors.put(np.concatenate(shares), found.cpu().numpy(), all_counts)

    def _call_as_often_as_others(self, num_calls: int, spare: Features) -> None:
        """Encode one item again and again, until this rank has made as many calls as the one that made most."""
        most = int(self.ranks.max_(torch.tensor([num_calls], device=self.device)).item())
        for _ in range(most - num_calls):
            self._encode_chunk(spare, np.zeros(1, dtype=np.int64), int(spare.lengths[0]))

    def _features(self, items: Sequence[Item], side: Side, places: NDArray[np.int64]) -> Features:
        """Tokenize or decode the items of some places, all of one modality."""
        return self.encoder.featurize([items[place] for place in places], side)

    def _encode_ahead(
        self, items: Sequence[Item], side: Side, slices: Sequence[NDArray[np.int64]], vectors: _Collected
    ) -> None:
        """Encode slices into their places, each while a thread makes the features of the next one."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            following = thread.submit(self._features, items, side, slices[0])
            for index, own in enumerate(slices):
                features = following.result()
                if index + 1 < len(slices):
                    following = thread.submit(self._features, items, side, slices[index + 1])
                self._encode_slice(features, side, own, vectors)
                del features  # before the slice after the next is begun

    def _encode_slice(self, features: Features, side: Side, places: NDArray[np.int64], vectors: _Collected) -> int:
        """Encode the items of some places into their places; return the number of calls."""
        self.num_truncated[side] += features.num_truncated
        counts = self.encoder.num_vectors(features)
        chunks = plan_chunks(features.lengths, self.budget)
        for chunk in chunks:
            if self.ranks.is_one:
                self.poll()
            found_VE = self._encode_chunk(features, chunk.rows, chunk.width)
            vectors.put(places[chunk.rows], found_VE, None if counts is None else counts[chunk.rows])
        return len(chunks)

    def _encode_chunk(self, features: Features, rows: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        inputs = self.encoder.collate(features, rows, width)
        inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
        vectors_VE: NDArray[np.float32] = self.encoder(inputs).float().cpu().numpy()
        return vectors_VE

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
