"""Encoding of many items: the order of the items whatever the calls, one slice ahead, on a device, and on ranks."""

from __future__ import annotations

import contextlib
import io
import threading
import time
import tracemalloc
import weakref
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import PIL.Image
import pytest
import torch
from kit.bare_encoder import BareEncoder
from numpy.typing import NDArray
from test_engine_syncs import Waits
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vembed.batch import Features, Image
from vembed.data.images import ImageError
from vembed.data.judged import RetrievalData
from vembed.distributed.ranks import Ranks
from vembed.errors import DataError, PreemptedError
from vembed.evaluation.evaluate import EvaluationOptions, encode_directions, search_task
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.measure import LiveBytes
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.plan.devices import Machine
from vembed.vectors import encode as encode_module
from vembed.vectors.encode import ItemEncoder, encoding_budget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kit.ranks import RankPool
    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side
    from vembed.evaluation.results import EvaluationResult
    from vembed.models.encoder import Encoder


CPU = torch.device("cpu")


WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


TEXTS = [" ".join(WORDS[: 1 + index % 9]) + f" {index}" for index in range(40)]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), TEXTS)


def encode(encoder: Encoder, budget: ChunkBudget, texts: list[str] = TEXTS) -> np.ndarray:
    return ItemEncoder(encoder, budget, CPU).table(texts, "document")


def test_vectors_are_in_the_order_of_the_items_whatever_the_budget(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = np.concatenate([encode(encoder, ChunkBudget(8, 512), [text]) for text in TEXTS])
    assert np.abs(one_by_one[0] - one_by_one[1]).max() > 1e-3
    for slice_rows, budget in ((8192, (256, 4096)), (8192, (3, 10**6)), (8192, (100, 40)), (7, (4, 64))):
        monkeypatch.setattr(encode_module, "SLICE_ROWS", slice_rows)
        np.testing.assert_allclose(encode(encoder, ChunkBudget(*budget)), one_by_one, atol=1e-5)
    empty = encode(encoder, ChunkBudget(4, 64), [])
    assert (empty.shape, empty.dtype) == ((0, encoder.dimension), np.float32)


def test_dropout_is_off_and_mode_gradients_and_random_state_are_left_alone(encoder: Encoder) -> None:
    assert any(module.p > 0 for module in encoder.modules() if isinstance(module, torch.nn.Dropout))
    encoder.train()
    state = torch.get_rng_state()
    first, second = encode(encoder, ChunkBudget(8, 512)), encode(encoder, ChunkBudget(8, 512))
    np.testing.assert_array_equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert encoder.training
    assert all(parameter.grad is None for parameter in encoder.parameters())
    encoder.eval()
    encode(encoder, ChunkBudget(8, 512))
    assert not encoder.training


def test_over_long_items_are_counted_by_side(encoder: Encoder) -> None:
    item_encoder = ItemEncoder(encoder, ChunkBudget(8, 4096), CPU)
    item_encoder(["alpha " * 500, "beta"], "query")
    item_encoder(["gamma"], "document")
    assert item_encoder.num_truncated == {"query": 1, "document": 0}


def test_bfloat16_comes_out_as_float32_near_the_full_precision(encoder: Encoder) -> None:
    full = encode(encoder, ChunkBudget(8, 512))
    half = ItemEncoder(encoder, ChunkBudget(8, 512), CPU, torch.bfloat16)(TEXTS, "document")
    assert half.dtype == np.float32
    assert 0 < np.abs(full - half).max() < 0.05


class Widths(BareEncoder):
    """A text is its own number of tokens; the rows and the width of every call are remembered."""

    def __init__(self, *, packs: bool = False) -> None:
        super().__init__(1)
        self.packs = packs
        self.calls: list[tuple[int, int]] = []

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        features = super().featurize(items, side)
        return replace(features, lengths=features.per_row["value"])

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, torch.Tensor]:
        self.calls.append((len(rows), width))
        return super().collate(features, rows, width)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["value"].float()[:, None]


def calls_of(lengths: NDArray[np.int64], tokens: int, rows: int, *, packs: bool = False) -> list[tuple[int, int]]:
    widths = Widths(packs=packs)
    found = encode(widths, ChunkBudget(rows, tokens, bucketed=True), [str(length) for length in lengths])
    np.testing.assert_array_equal(found[:, 0], lengths)
    return widths.calls


@pytest.mark.parametrize(
    ("num_texts", "tokens", "most_padding"),
    # A thousand texts make five calls of 16,384 tokens: in smaller ones they pad less, and a fast device idles.
    [(8192, 400_000, 1.25), (1024, 400_000, 1.45), (8192, 20_000, 1.25)],
)
def test_large_calls_pad_little(num_texts: int, tokens: int, most_padding: float) -> None:
    lengths = np.random.default_rng(0).lognormal(4.0, 0.8, num_texts).astype(np.int64).clip(1, 512)
    padded = [rows * width for rows, width in calls_of(lengths, tokens, tokens)]
    assert sum(padded) < most_padding * lengths.sum()
    assert max(padded) <= tokens


def test_rows_that_lie_end_to_end_fill_calls_that_nothing_cuts_finer() -> None:
    calls = calls_of(np.full(1000, 100), 40_000, 10**6, packs=True)
    assert [rows for rows, _ in calls] == [400, 400, 200]


def test_spare_rows_of_calls_of_few_shapes_change_nothing(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "LEAST_TOKENS", 1)
    one_by_one, rows = np.tile(encode(encoder, ChunkBudget(8, 512)), (5, 1)), []
    hook = encoder.register_forward_hook(lambda _, __, vectors: rows.append(len(vectors)))
    found = encode(encoder, ChunkBudget(32, 300, bucketed=True), 5 * TEXTS)
    hook.remove()
    assert sum(rows) > len(found), "there were spare rows"
    np.testing.assert_allclose(found, one_by_one, atol=1e-5)


def test_without_a_plan_calls_fit_what_the_weights_leave_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
    layers.dimension = 1024  # type: ignore[assignment]
    cards = {gib: Machine("cuda", "NVIDIA H100 80GB HBM3", gib << 30, 8, fast_bf16=True) for gib in (1, 24, 80)}

    def tokens(gib: int) -> int:
        monkeypatch.setattr(encode_module, "describe_machine", lambda device: cards[gib])
        budget = encoding_budget(layers, torch.device("cuda"), 256)  # type: ignore[arg-type]
        assert (budget.rows, budget.bucketed) == (256, True)
        return budget.tokens

    weights = sum(each.nbytes for each in layers.parameters())
    assert tokens(24) == ((24 << 30) - weights) // 4 // (encode_module.LAYER_BYTES * (1024 + 4096))
    assert tokens(1) < tokens(24) < tokens(80)
    assert encoding_budget(layers, CPU, 7) == ChunkBudget(7, encode_module.CPU_TOKENS)  # type: ignore[arg-type]


# --- one slice ahead: the same vectors, no more than two slices in memory


SLICE = 4


def picture(number: int) -> Image:
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return Image(f"picture {number}", buffer.getvalue())


PICTURES: list[Item] = [picture(number) for number in range(18)]


PLAIN: list[Item] = [f"text {number}" for number in range(18)]


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

    @property
    def has_a_thread(self) -> bool:
        return any(thread.ident in self.threads for thread in threading.enumerate())

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


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "PICTURE_SLICE_ROWS", SLICE)
    monkeypatch.setattr(encode_module, "SLICE_ROWS", SLICE)


@pytest.fixture
def watched(small_slices: None) -> Watched:
    torch.manual_seed(0)
    return Watched()


def test_vectors_are_those_of_each_picture_alone_in_the_order_of_the_items(watched: Watched) -> None:
    items: list[Item] = ["a text", *PICTURES[:9], "another", *PICTURES[9:]]
    together = ItemEncoder(watched, ChunkBudget(3, 10**6), CPU)(items, "document")
    alone = [ItemEncoder(watched, ChunkBudget(3, 10**6), CPU)([item], "document")[0] for item in items]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-6)
    assert np.abs(together[1] - together[2]).max() > 1e-3


@pytest.mark.parametrize("items", [PICTURES, PLAIN], ids=["pictures", "texts"])
def test_a_slice_is_made_in_a_thread_while_the_one_before_is_encoded_and_no_third_stands_in_memory(
    watched: Watched, items: list[Item]
) -> None:
    watched.num_slices = 5
    ItemEncoder(watched, ChunkBudget(SLICE, 10**6), CPU)(items, "document")
    assert len(watched.alive) == watched.num_encoded == 5
    assert watched.side_by_side == 4
    assert watched.most_alive == 2
    assert len(watched.threads) == 1
    assert threading.get_ident() not in watched.threads
    assert not watched.has_a_thread


def test_the_poll_stops_it_between_two_calls_and_no_thread_stays(watched: Watched) -> None:
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise PreemptedError("stop")

    watched.train()
    with pytest.raises(PreemptedError):
        ItemEncoder(watched, ChunkBudget(SLICE, 10**6), CPU, poll=stop)(PICTURES, "document")
    assert watched.training
    assert torch.is_grad_enabled()
    assert len(watched.alive) <= 3
    assert not watched.has_a_thread


def test_batches_are_read_and_made_ahead_of_the_encoder_and_come_one_by_one(watched: Watched) -> None:
    watched.num_slices = 6
    read: list[int] = []

    def batches() -> Iterator[list[Item]]:
        for number in range(0, 18, 6):
            read.append(threading.get_ident())
            yield [*PLAIN[number : number + 3], *PICTURES[number : number + 3]]

    plain = ItemEncoder(watched, ChunkBudget(3, 10**6), CPU)
    found = list(plain.stream(batches(), "document"))
    assert watched.side_by_side == 5
    assert watched.most_alive == 2
    assert set(read) == watched.threads != {threading.get_ident()}
    watched.num_slices = 0
    for encoded, items in zip(found, batches(), strict=True):
        np.testing.assert_array_equal(encoded.vectors, plain(items, "document"))


def test_a_stream_that_is_closed_early_leaves_no_thread(watched: Watched) -> None:
    encode = ItemEncoder(watched, ChunkBudget(SLICE, 10**6), CPU)
    with closing(encode.stream([PLAIN[:4], PLAIN[4:8], PLAIN[8:]], "query")) as found:
        next(found)
    assert not watched.has_a_thread
    assert torch.is_grad_enabled()


def test_an_error_of_the_thread_is_the_error_that_it_is_and_no_thread_stays(watched: Watched) -> None:
    def lists() -> Iterator[list[Item]]:
        yield PLAIN[:4]
        raise DataError("row 5 is broken")

    plain = ItemEncoder(watched, ChunkBudget(SLICE, 10**6), CPU)
    with pytest.raises(ImageError, match=r"broken\.png"):
        plain([*PICTURES[:10], Image("broken.png", b"no picture"), *PICTURES[10:]], "document")
    with pytest.raises(DataError, match="row 5"):
        list(plain.stream(lists(), "query"))
    assert watched.threads
    assert not watched.has_a_thread


# --- on a CUDA device: the host waits once for each slice


DEVICE_SLICE = 12


NUM_SLICES = 3


DIGITS = [str(number) for number in range(DEVICE_SLICE * NUM_SLICES)]


class Numbers(BareEncoder):
    """A vector of a number is that number times a few weights."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(4)
        self.weights, self.log = torch.nn.Parameter(torch.ones(4, device="cuda")), log

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert inputs["value"].device.type == "cuda"
        self.log.append("call")
        return inputs["value"].to(torch.float32)[:, None] * self.weights


class Stream:
    """A stream that writes down what waits for it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_stream(self, other: object) -> None:
        self.log.append("copy")

    def wait_event(self, other: object) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host did on a fake device; that copies and kernels overlap only a GPU can show."""
    log: list[str] = []

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(FakeTensor, "numpy", lambda tensor: np.zeros(tensor.shape, np.float32), raising=False)
    monkeypatch.setattr(encode_module, "SLICE_ROWS", DEVICE_SLICE)
    return log


@pytest.mark.parametrize("rows", [DEVICE_SLICE, 3])
def test_the_host_waits_once_for_each_slice_when_the_next_is_under_way(
    log: list[str], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, calls, empty = Waits(), ["call"] * (DEVICE_SLICE // rows), torch.empty

    def watched(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        return waits.pin(made) if pin_memory else made

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: waits.pin(tensor))
    monkeypatch.setattr(torch, "empty", watched)
    with FakeTensorMode(allow_non_fake_inputs=True), waits:
        found = ItemEncoder(Numbers(log), ChunkBudget(rows, 10**6), torch.device("cuda"))(DIGITS, "document")
    assert waits.counts == {}, "nothing waits but for the events"
    started = [*calls, "copy"]
    assert log == [*started, *[*started, "wait"] * (NUM_SLICES - 1), "wait"]
    assert found.shape == (len(DIGITS), 4)


# --- shared by ranks: the first gets every vector in its place


OPTIONS = EvaluationOptions(system="bag")


TASK = RetrievalData(
    name="words",
    queries={"q1": "alpha one", "q2": "beta two", "q3": "gamma three"},
    documents={"d1": "one", "d2": "two beta", "d3": "nobody asks for this", "d4": "three of gamma"},
    qrels={"q1": {"d1": 2}, "q2": {"d2": 1}, "q3": {"d4": 1}},
)


SHARED = [" ".join(WORDS[: 1 + index % 5]) + f" {index}" for index in range(23)]


def tiny_encoder() -> Encoder:
    torch.manual_seed(0)
    return load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), SHARED)


def encode_shared(rank: int, num_texts: int, slice_rows: int, even_calls: bool) -> tuple[Any, int, int]:
    encoder, polls, calls = tiny_encoder(), [], []
    encoder.register_forward_pre_hook(lambda _, inputs: calls.append(inputs))
    shared = ItemEncoder(
        encoder, ChunkBudget(3, 10**6), CPU, poll=lambda: polls.append(len(calls)), ranks=Ranks.of_this_process(),
        even_calls=even_calls,
    )  # fmt: skip
    with patch.object(encode_module, "SHARED_SLICE_ROWS", slice_rows):
        return shared(SHARED[:num_texts], "document"), len(calls), len(polls)


def count_cut(rank: int) -> int:
    shared = ItemEncoder(tiny_encoder(), ChunkBudget(3, 10**6), CPU, ranks=Ranks.of_this_process())
    (encoded,) = shared.stream([["alpha " * 5000]], "document")
    assert encoded.num_truncated == shared.num_truncated["document"]
    return encoded.num_truncated


def test_a_rank_without_an_item_counts_no_cut_text(two_ranks: RankPool) -> None:
    assert two_ranks.run(count_cut) == [1, 0]


@pytest.mark.parametrize(("num_texts", "slice_rows"), [(23, 100), (23, 4), (1, 4)])
@pytest.mark.parametrize("even_calls", [False, True])
def test_the_first_rank_has_the_vectors_of_all_in_their_places(
    two_ranks: RankPool, num_texts: int, slice_rows: int, even_calls: bool
) -> None:
    alone = ItemEncoder(tiny_encoder(), ChunkBudget(3, 10**6), CPU)(SHARED[:num_texts], "document")
    (vectors, *first), (_, *other) = two_ranks.run(encode_shared, num_texts, slice_rows, even_calls)
    np.testing.assert_allclose(vectors, alone, atol=1e-6)
    assert first[1] == other[1] == -(-num_texts // (2 * slice_rows)), "signals are agreed on at these points"
    if even_calls:
        assert first[0] == other[0] >= 1
    else:
        assert first[0] >= (num_texts + 1) // 2 / 3
        assert (other[0] > 0) == (num_texts > 1), "the work is shared"


WIDTH, WIDE_SLICE = 512, 64


WIDE_TEXTS = [str(number % 100) for number in range(4096)]


def wide_encoder(ranks: Ranks | None = None) -> ItemEncoder:
    """Return an encoder whose vectors are large beside everything else."""
    torch.manual_seed(0)
    bag = NgramBag(NgramBagConfig(dimension=WIDTH, buckets=64))
    return ItemEncoder(bag, ChunkBudget(WIDE_SLICE, 10**6), CPU, ranks=ranks or Ranks())


def held(rank: int) -> tuple[NDArray[np.float32] | None, int]:
    """Return the vectors that the first rank got, and the peak of a rank's memory."""
    encode = wide_encoder(Ranks.of_this_process())
    tracemalloc.start()  # sees NumPy's memory, and LiveBytes torch's
    try:
        with patch.object(encode_module, "SHARED_SLICE_ROWS", WIDE_SLICE), LiveBytes() as live:
            vectors = encode.table(WIDE_TEXTS, "document")
        peak = tracemalloc.get_traced_memory()[1] + max(accumulate(live.events))
    finally:
        tracemalloc.stop()
    assert vectors.shape == (len(WIDE_TEXTS), WIDTH)
    return vectors if rank == 0 else None, peak


def test_no_rank_but_the_first_holds_more_vectors_than_those_of_a_slice(two_ranks: RankPool) -> None:
    (vectors, first_peak), (_, other_peak) = two_ranks.run(held)
    assert vectors is not None
    np.testing.assert_array_equal(vectors, wide_encoder()(WIDE_TEXTS, "document"))
    slice_bytes = 2 * WIDE_SLICE * 4 * WIDTH
    assert first_peak > vectors.nbytes > 30 * slice_bytes
    assert other_peak < 8 * slice_bytes


def both_directions(rank: int) -> tuple[list[EvaluationResult], int]:
    """Evaluate a set and its reverse; return what every rank is told, and the bytes of the vectors that it has."""
    encode = wide_encoder(Ranks.of_this_process())
    tasks = encode_directions(encode, TASK, OPTIONS, both=True)
    arrays = [vectors for task in tasks for vectors in (task.documents, task.queries)]
    held_bytes = sum(0 if 0 in each.strides else each.nbytes for each in arrays)  # type: ignore[union-attr]
    return encode.ranks.from_first(lambda: [search_task(task, OPTIONS) for task in tasks]), held_bytes


def test_both_directions_come_out_as_on_one_rank_and_only_the_first_has_vectors(two_ranks: RankPool) -> None:
    (first, held_bytes), (other, none) = two_ranks.run(both_directions)
    alone = [search_task(task, OPTIONS) for task in encode_directions(wide_encoder(), TASK, OPTIONS, both=True)]
    assert len(alone) == 2
    assert first == other
    assert held_bytes > 0 == none
    for mine, theirs in zip(first, alone, strict=True):
        assert replace(mine, seconds=0.0) == replace(theirs, seconds=0.0)
        assert mine.metrics["ndcg@10"] > 0


def stopped(rank: int) -> str:
    ranks, asked = Ranks.of_this_process(), []
    agree = ranks.agreement(CPU)

    def poll() -> None:
        asked.append(1)
        if not agree(not (rank == 1 and len(asked) == 2)):
            raise PreemptedError("stop")

    with patch.object(encode_module, "SHARED_SLICE_ROWS", 2), contextlib.suppress(PreemptedError):
        ItemEncoder(tiny_encoder(), ChunkBudget(3, 10**6), CPU, poll=poll, ranks=ranks)(SHARED, "query")
        return "ran to its end"
    return f"left at poll {len(asked)}"


def test_a_signal_to_one_rank_stops_all_at_the_same_point(two_ranks: RankPool) -> None:
    assert two_ranks.run(stopped) == ["left at poll 2"] * 2
