"""Encode many items: sorted by length in slices, so that neither padding nor memory grows with the corpus.

1. A thread tokenizes or decodes one slice ahead: while the encoder works on one, the next is made, and no third.
2. The device encodes a slice chunk after chunk and never waits for the host; its vectors stay there until the last one.
3. They travel to the host in one copy, which the host waits for when the device has the next slice's work.

On several ranks all of them encode: a rank has every n-th item of a slice, and the first rank gets all vectors of it
before the next. The others never hold more. A signal is looked at only between slices, where all ranks stand at the
same point.

Tokenizers, Pillow's decoders and torch's kernels release Python's lock, so that thread and encoder run side by side.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from vembed.batch import Ragged, ranges
from vembed.device import Transfer, to_device
from vembed.distributed.ranks import Ranks
from vembed.distributed.runtime import describe_machine
from vembed.errors import ConfigError
from vembed.gradcache.chunks import ChunkBudget, plan_chunks
from vembed.plan.chunks import call_tokens
from vembed.plan.devices import Devices

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Features, Item, Modality, Side
    from vembed.gradcache.chunks import Chunk
    from vembed.models.encoder import Encoder

Vectors: TypeAlias = "NDArray[np.float32] | Ragged"
"""Vectors of n items: (n, E), or ragged rows of vectors where an encoder gives several for each item."""


def rows_of(vectors: Vectors, rows: NDArray[np.int64]) -> Vectors:
    """Return the vectors of some items, in that order."""
    return vectors.take(rows) if isinstance(vectors, Ragged) else vectors[rows]


def values_of(vectors: Vectors) -> NDArray[np.float32]:
    """Return all vectors of all items, one after the other, (V, E)."""
    return vectors.values if isinstance(vectors, Ragged) else vectors


class Encoded(NamedTuple):
    """Vectors of a list of items, as the first rank has them."""

    vectors: Vectors
    num_truncated: int  # of this rank's share of the items: longer than the model takes, and cut


SLICE_ROWS = 8192
"""Texts that are tokenized and sorted at a time."""

SHARED_SLICE_ROWS = 1024
"""The same on each of several ranks, which look at signals only between slices; on accelerators at least so many."""

SLICE_CALLS = 32
"""Encoder calls of the longest texts that make a slice on an accelerator beside others: some seconds."""

LEAST_TOKENS = 32_768
"""A slice is cut into about four calls, but the budget of a call isn't lowered below this."""

PICTURE_SLICE_ROWS = 256
"""Pictures that are decoded at a time: at 224 x 224 each is 150 kB of pixels. Two slices stand in memory."""

CPU_TOKENS = 2048
"""Padded tokens of one encoder call on a CPU: small rectangles stay in its caches."""

LAYER_BYTES = 24
"""Memory of a call for each token and each input and output of the widest layer: six arrays of them, in float32."""


def encoding_budget(encoder: Encoder, device: torch.device, rows: int) -> ChunkBudget:
    """Return the limits of one encoder call that suit a device, where no plan has measured the encoder."""
    if device.type == "cpu":
        return ChunkBudget(rows, CPU_TOKENS)
    layers = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    widest = max((layer.in_features + layer.out_features for layer in layers), default=encoder.dimension)
    machine = describe_machine(device)
    room = machine.memory_bytes - sum(parameter.nbytes for parameter in encoder.parameters())
    flops = 2 * sum(layer.weight.numel() for layer in layers)
    tokens = call_tokens(room, LAYER_BYTES * widest, flops, Devices.of(machine).tflops)
    return ChunkBudget(rows, tokens, bucketed=True)


def refuse_several_vectors(encoder: Encoder) -> None:
    """Refuse an encoder of several vectors for each row where one is needed.

    Raises:
        ConfigError: It is one.
    """
    if encoder.multi_vector:
        raise ConfigError(
            f"{encoder.name} gives several vectors for each row: training and vembed evaluate score such a model by "
            f"MaxSim, an index of it is searched so, and encode_multi_vector returns them; here one vector for each "
            f"row is needed"
        )


class _Collected:
    """The vectors of a batch of items, put in as slices come; a rank that gets none holds none."""

    def __init__(self, num_items: int, encoder: Encoder, *, holds: bool) -> None:
        self._num_items, self._dimension = num_items, encoder.dimension
        self.num_truncated = 0
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]] = []
        self._table_NE: NDArray[np.float32] | None = None
        if not encoder.multi_vector:
            shape = num_items, self._dimension
            # A broadcast zero has the shape and no memory: only the first rank holds vectors.
            self._table_NE = np.empty(shape, np.float32) if holds else np.broadcast_to(np.float32(0), shape)

    def put(self, places: NDArray[np.int64], vectors_VE: NDArray[np.float32], counts: NDArray[np.int64] | None) -> None:
        """Put copies of the vectors of some items: one of each, or as many as `counts` says."""
        if self._table_NE is not None:
            self._table_NE[places] = vectors_VE
        else:
            assert counts is not None, "an encoder with multi_vector says how many vectors each row has"
            self._parts.append((places, counts, vectors_VE.copy()))

    def all(self) -> Vectors:
        """Return the vectors of all items: zeros that take no memory, or rows of none, where none was put in."""
        if self._table_NE is not None:
            return self._table_NE
        # How many vectors there are is known only now: lay the rows out, then scatter each part into its ranges.
        lengths = np.zeros(self._num_items, dtype=np.int64)
        for places, counts, _ in self._parts:
            lengths[places] = counts
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values_VE = np.empty((offsets[-1], self._dimension), dtype=np.float32)
        for places, counts, vectors_VE in self._parts:
            values_VE[ranges(offsets[places], counts)] = vectors_VE
        return Ragged(values_VE, offsets)


def _own_rows(call: Chunk) -> NDArray[np.int64]:
    """Return the rows of a call, without those that only fill it up."""
    return call.rows[: len(call.rows) - call.num_spare]


def _no_poll() -> None:
    """Poll nothing."""


@dataclass(slots=True)
class ItemEncoder:
    """Encoder of whole items: texts and pictures in, vectors out.

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
    _transfer: Transfer = field(init=False)

    def __post_init__(self) -> None:
        self._transfer = Transfer(self.device)

    def __call__(self, items: Sequence[Item], side: Side) -> Vectors:
        """Encode items.

        Returns:
            float32 in the order of the items: (n, E), or ragged rows of vectors where the encoder gives several. On
            several ranks the first one has them; the others get zeros that take no memory, or rows of no vectors.
        """
        if not len(items):
            return _Collected(0, self.encoder, holds=True).all()
        (encoded,) = self.stream([items], side)
        return encoded.vectors

    def stream(self, batches: Iterable[Sequence[Item]], side: Side) -> Generator[Encoded]:
        """Yield the vectors of one batch of items after the other, the next ones under way by then.

        Close it where it isn't read to its end: its thread ends with it.

        Args:
            batches: At least one item each; read in a thread, up to two slices ahead.
        """
        slices = self._slices(batches, side)
        arriving: Callable[[], Iterable[Encoded]] | None = None
        with ThreadPoolExecutor(max_workers=1) as thread:
            # Three stages, one slice apart: slice i + 1 is tokenized in the thread, slice i is queued on the device,
            # and only then does the host wait for the copy of slice i - 1, so the device always has work.
            following = thread.submit(next, slices, None)
            while (current := following.result()) is not None:
                following = thread.submit(next, slices, None)
                earlier, arriving = arriving, self._encode_slice(*current, side)
                if earlier is not None:
                    yield from earlier()
            if arriving is not None:
                yield from arriving()

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

    def _slices(
        self, batches: Iterable[Sequence[Item]], side: Side
    ) -> Iterator[tuple[_Collected, list[NDArray[np.int64]], Features, bool]]:
        """Tokenize or decode this rank's share of one slice after the other.

        A slice holds items of one modality, which all ranks encode before any continues.

        Yields:
            The arguments of `_encode_slice` but the side.
        """
        rank, world_size = self.ranks.rank, self.ranks.world_size
        for items in batches:
            batch = _Collected(len(items), self.encoder, holds=self.ranks.is_first)
            slices = [
                places[start : start + rows]
                for modality, places in self.encoder.by_modality(items)
                for rows in [self._slice_rows(modality)]
                for start in range(0, len(places), rows)
            ]
            for number, places in enumerate(slices, 1):
                # Every n-th item, so that no rank gets all the long texts of a sorted corpus. A rank without any
                # featurizes a spare item, which stands for it in calls that all ranks must make.
                shares = [places[first::world_size] for first in range(world_size)]
                featurized = shares[rank] if len(shares[rank]) else places[:1]
                features = self.encoder.featurize([items[place] for place in featurized], side)
                yield batch, shares, features, number == len(slices)

    def _slice_rows(self, modality: Modality) -> int:
        """Return the number of items of a slice on all ranks together."""
        if modality != "text":
            return self.ranks.world_size * PICTURE_SLICE_ROWS
        if self.ranks.is_one:
            return SLICE_ROWS
        # Ranks look at signals between slices only: on an accelerator a slice is some seconds of the longest texts.
        calls = SLICE_CALLS * self.budget.tokens // (self.encoder.max_length or SLICE_ROWS)
        rows = min(SLICE_ROWS, max(SHARED_SLICE_ROWS, calls)) if self.budget.bucketed else SHARED_SLICE_ROWS
        return self.ranks.world_size * rows

    def _encode_slice(
        self,
        batch: _Collected,
        shares: list[NDArray[np.int64]],
        features: Features,
        is_last: bool,
        side: Side,
    ) -> Callable[[], Iterable[Encoded]]:
        """Queue a slice on the device.

        Args:
            batch: Collects the vectors.
            shares: Positions in the batch of the items of each rank.
            features: Of this rank's share; of a spare item where that is empty.
            is_last: Whether the batch is whole with this slice.

        Returns:
            A function that waits for the slice's vectors, and yields those of its batch if that is whole with it.
        """
        if not self.ranks.is_one:
            self.poll()
        places = np.concatenate(shares)
        sizes, counts = [len(share) for share in shares], self.encoder.num_vectors(features)
        share_size = sizes[self.ranks.rank]
        share_counts = np.ones(share_size, dtype=np.int64) if counts is None else counts[:share_size]
        with self._evaluating():
            share_VE = self._encode_share(features, share_counts)
            if counts is not None:  # an encoder of one vector per row spares the exchange
                all_counts = self.ranks.gather_objects(share_counts)
                sizes, counts = [int(rank_counts.sum()) for rank_counts in all_counts], np.concatenate(all_counts)
            host_VE, copied = self._transfer.to_host(self.ranks.rows_at_first(share_VE, sizes))

        if share_size:  # a spare item isn't counted
            batch.num_truncated += features.num_truncated
            self.num_truncated[side] += features.num_truncated

        def arrive() -> Iterable[Encoded]:
            if copied is not None:
                copied.synchronize()
            if self.ranks.is_first:
                batch.put(places, host_VE.numpy(), counts)
            return (Encoded(batch.all(), batch.num_truncated),) if is_last else ()

        return arrive

    def _encode_share(self, features: Features, counts: NDArray[np.int64]) -> Tensor:
        """Return the vectors of this rank's share of a slice in the order of its items, (V, E), on the device.

        Args:
            features: Those of the share; of a spare item where it is empty.
            counts: Vectors of each item of the share.
        """
        calls = self._calls(features.lengths[: len(counts)]) if len(counts) else []
        # Calls take the items sorted by length. `places` says where each vector belongs in the order of the items, on
        # the device, so that scattering the vectors never waits for the host.
        order = np.concatenate([np.zeros(0, dtype=np.int64), *map(_own_rows, calls)])
        places = torch.from_numpy(ranges((np.cumsum(counts) - counts)[order], counts[order]))
        places = to_device(places, self.device)
        share_VE = torch.empty(int(counts.sum()), self.encoder.dimension, dtype=torch.float32, device=self.device)
        if self.even_calls:  # of one item again and again, until there are as many as on the rank that makes most
            most = int(self.ranks.max_(torch.tensor([len(calls)], device=self.device)).item())
            calls += self._calls(features.lengths[:1]) * (most - len(calls))
        stop = 0

        def collate(call: Chunk) -> dict[str, Tensor]:
            return self.encoder.collate(features, call.rows, call.width)

        for call, inputs in self._transfer.ahead(calls, collate):
            if self.ranks.is_one:
                self.poll()
            vectors_VE = self.encoder(inputs)
            if stop < len(places):  # else an even call, whose vectors nobody wants
                start, stop = stop, stop + int(counts[_own_rows(call)].sum())
                share_VE[places[start:stop]] = vectors_VE[: stop - start].float()
        return share_VE

    def _calls(self, lengths: NDArray[np.int64]) -> list[Chunk]:
        """Cut a slice into calls: on an accelerator into several, lest one width pads long and short items alike."""
        budget = self.budget
        if budget.bucketed and not self.encoder.packs:
            quarter = 1 << max(1, int(lengths.sum()) // 4).bit_length() - 1  # a power of 2, for few shapes
            budget = replace(budget, tokens=min(budget.tokens, max(LEAST_TOKENS, quarter)))
        return plan_chunks(lengths, budget, packed=self.encoder.packs)

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
