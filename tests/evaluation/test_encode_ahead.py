"""Texts and pictures are made one slice ahead of the encoder: the same vectors, no more than two slices in memory."""

from __future__ import annotations

import io
import threading
import time
import weakref
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
import torch

from vembed.batch import Image
from vembed.data.images import ImageError
from vembed.errors import DataError, PreemptedError
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.vectors import encode as room
from vembed.vectors.encode import ItemEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.batch import Features, Item, Side

CPU = torch.device("cpu")
SLICE = 4


def picture(number: int) -> Image:
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return Image(f"picture {number}", buffer.getvalue())


PICTURES: list[Item] = [picture(number) for number in range(18)]
TEXTS: list[Item] = [f"text {number}" for number in range(18)]


class Watched(TinyClip):
    """Remembers which thread made what and how many slices stood in memory; encodes no faster than `num_slices` say."""

    def __init__(self) -> None:
        super().__init__(TinyClipConfig(dimension=16, channels=(8, 8), buckets=64))
        self.alive: list[weakref.ref[Any]] = []
        self.most_alive = 0
        self.threads: set[int] = set()
        self.num_slices = 0
        self.num_encoded = 0
        self.side_by_side = 0

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        self.threads.add(threading.get_ident())
        features = super().featurize(items, side)
        self.alive.append(weakref.ref(features.lengths))
        self.most_alive = max(self.most_alive, sum(one() is not None for one in self.alive))
        return features

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.num_encoded += 1
        deadline = time.monotonic() + 10
        if self.num_encoded < self.num_slices:  # the next slice must get ready although this one doesn't
            while len(self.alive) <= self.num_encoded and time.monotonic() < deadline:
                time.sleep(0.001)
            self.side_by_side += len(self.alive) > self.num_encoded
        return super().forward(inputs)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PICTURE_SLICE_ROWS", SLICE)
    monkeypatch.setattr(room, "SLICE_ROWS", SLICE)


@pytest.fixture
def encoder() -> Watched:
    torch.manual_seed(0)
    return Watched()


def test_vectors_are_those_of_each_picture_alone_in_the_order_of_the_items(encoder: Watched) -> None:
    items: list[Item] = ["a text", *PICTURES[:9], "another", *PICTURES[9:]]
    together = ItemEncoder(encoder, ChunkBudget(3, 10**6), CPU)(items, "document")
    alone = [ItemEncoder(encoder, ChunkBudget(3, 10**6), CPU)([item], "document")[0] for item in items]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-6)
    assert np.abs(together[1] - together[2]).max() > 1e-3


@pytest.mark.parametrize("items", [PICTURES, TEXTS], ids=["pictures", "texts"])
def test_a_slice_is_made_in_a_thread_while_the_one_before_is_encoded_and_no_third_stands_in_memory(
    encoder: Watched, items: list[Item]
) -> None:
    encoder.num_slices = 5
    ItemEncoder(encoder, ChunkBudget(SLICE, 10**6), CPU)(items, "document")
    assert len(encoder.alive) == encoder.num_encoded == 5
    assert encoder.side_by_side == 4
    assert encoder.most_alive == 2
    assert len(encoder.threads) == 1
    assert threading.get_ident() not in encoder.threads
    assert not any(thread.ident in encoder.threads for thread in threading.enumerate()), "the thread has ended"


def test_a_picture_that_cannot_be_decoded_is_the_error_that_it_is(encoder: Watched) -> None:
    broken = [*PICTURES[:10], Image("broken.png", b"no picture"), *PICTURES[10:]]
    with pytest.raises(ImageError, match=r"broken\.png"):
        ItemEncoder(encoder, ChunkBudget(SLICE, 10**6), CPU)(broken, "document")
    assert threading.active_count() == 1 or not any(thread.ident in encoder.threads for thread in threading.enumerate())


def test_the_poll_stops_it_between_two_calls_and_no_thread_stays(encoder: Watched) -> None:
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise PreemptedError("stop")

    encoder.train()
    with pytest.raises(PreemptedError):
        ItemEncoder(encoder, ChunkBudget(SLICE, 10**6), CPU, poll=stop)(PICTURES, "document")
    assert encoder.training
    assert len(encoder.alive) <= 3
    assert not any(thread.ident in encoder.threads for thread in threading.enumerate())


def test_batches_are_read_and_made_ahead_of_the_encoder_and_come_one_by_one(encoder: Watched) -> None:
    encoder.num_slices = 6
    read: list[int] = []

    def batches() -> Iterator[list[Item]]:
        for number in range(0, 18, 6):
            read.append(threading.get_ident())
            yield [*TEXTS[number : number + 3], *PICTURES[number : number + 3]]

    encode = ItemEncoder(encoder, ChunkBudget(3, 10**6), CPU)
    found = list(encode.stream(batches(), "document"))
    assert encoder.side_by_side == 5
    assert encoder.most_alive == 2
    assert set(read) == encoder.threads != {threading.get_ident()}
    encoder.num_slices = 0
    for encoded, items in zip(found, batches(), strict=True):
        np.testing.assert_array_equal(encoded.vectors, encode(items, "document"))


def test_a_stream_that_is_closed_early_leaves_no_thread(encoder: Watched) -> None:
    encode = ItemEncoder(encoder, ChunkBudget(SLICE, 10**6), CPU)
    with closing(encode.stream([TEXTS[:4], TEXTS[4:8], TEXTS[8:]], "query")) as found:
        next(found)
    assert not any(thread.ident in encoder.threads for thread in threading.enumerate())
    assert torch.is_grad_enabled()


def test_an_error_while_a_batch_is_read_is_the_error_that_it_is(encoder: Watched) -> None:
    def batches() -> Iterator[list[Item]]:
        yield TEXTS[:4]
        raise DataError("row 5 is broken")

    encode = ItemEncoder(encoder, ChunkBudget(SLICE, 10**6), CPU)
    with pytest.raises(DataError, match="row 5 is broken"):
        list(encode.stream(batches(), "query"))
    assert not any(thread.ident in encoder.threads for thread in threading.enumerate())
