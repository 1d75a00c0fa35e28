"""Encoding shared by ranks: the first gets every vector in its place; all call the encoder equally often if asked."""

import tracemalloc
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rank_pool import RankPool
from torch import Tensor

from vembed.data.retrieval import RetrievalData
from vembed.distributed.ranks import Ranks
from vembed.errors import PreemptedError
from vembed.evaluation.directions import Directions, encode_directions, search_directions
from vembed.evaluation.evaluator import EvaluationOptions
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.encoder import Encoder
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.ngram_bag import NgramBag, NgramBagConfig
from vembed.models.profile.live import LiveBytes
from vembed.vectors import encode as encode_module
from vembed.vectors.encode import ItemEncoder

CPU = torch.device("cpu")
OPTIONS = EvaluationOptions(system="bag")
TASK = RetrievalData(
    name="words",
    queries={"q1": "alpha one", "q2": "beta two", "q3": "gamma three"},
    documents={"d1": "one", "d2": "two beta", "d3": "nobody asks for this", "d4": "three of gamma"},
    qrels={"q1": {"d1": 2}, "q2": {"d2": 1}, "q3": {"d4": 1}},
)
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon"]
TEXTS = [" ".join(WORDS[: 1 + index % 5]) + f" {index}" for index in range(23)]


def tiny_encoder() -> Encoder:
    torch.manual_seed(0)
    return load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), TEXTS)


def encode_shared(rank: int, num_texts: int, slice_rows: int, even_calls: bool) -> dict[str, Any]:
    encoder = tiny_encoder()
    calls: list[tuple[int, ...]] = []
    encoder.register_forward_pre_hook(lambda _, inputs: calls.append(tuple(inputs[0]["input_ids"].shape)))
    polls: list[int] = []
    before, encode_module.SHARED_SLICE_ROWS = encode_module.SHARED_SLICE_ROWS, slice_rows
    try:
        shared = ItemEncoder(
            encoder,
            ChunkBudget(3, 10**6),
            CPU,
            poll=lambda: polls.append(len(calls)),
            ranks=Ranks.of_this_process(),
            even_calls=even_calls,
        )
        vectors = shared(TEXTS[:num_texts], "document")
    finally:
        encode_module.SHARED_SLICE_ROWS = before
    weights: list[Tensor] = list(encoder.parameters())
    return {
        "vectors": vectors,
        "calls": len(calls),
        "polls": len(polls),
        "truncated": shared.num_truncated,
        "inference": any(weight.is_inference() for weight in weights),
    }


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
    alone = ItemEncoder(tiny_encoder(), ChunkBudget(3, 10**6), CPU)(TEXTS[:num_texts], "document")
    first, other = two_ranks.run(encode_shared, num_texts, slice_rows, even_calls)
    np.testing.assert_allclose(first["vectors"], alone, atol=1e-6)
    assert first["polls"] == other["polls"] == -(-num_texts // (2 * slice_rows)), (
        "signals are agreed on at these points"
    )
    if even_calls:
        assert first["calls"] == other["calls"] >= 1
    else:
        own = (num_texts + 1) // 2, num_texts // 2
        assert first["calls"] >= own[0] / 3
        assert (other["calls"] > 0) == (own[1] > 0), "the work is shared"


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
    before, encode_module.SHARED_SLICE_ROWS = encode_module.SHARED_SLICE_ROWS, WIDE_SLICE
    tracemalloc.start()  # sees NumPy's memory, and LiveBytes torch's
    try:
        with LiveBytes() as live:
            vectors = encode(WIDE_TEXTS, "document")
        peak = tracemalloc.get_traced_memory()[1] + max(accumulate(live.events))
    finally:
        tracemalloc.stop()
        encode_module.SHARED_SLICE_ROWS = before
    assert isinstance(vectors, np.ndarray)
    assert vectors.shape == (len(WIDE_TEXTS), WIDTH)
    return vectors if rank == 0 else None, peak


def test_no_rank_but_the_first_holds_more_vectors_than_those_of_a_slice(two_ranks: RankPool) -> None:
    (vectors, first_peak), (_, other_peak) = two_ranks.run(held)
    assert vectors is not None
    np.testing.assert_array_equal(vectors, wide_encoder()(WIDE_TEXTS, "document"))
    slice_bytes = 2 * WIDE_SLICE * 4 * WIDTH
    assert first_peak > vectors.nbytes > 30 * slice_bytes
    assert other_peak < 8 * slice_bytes


def both_directions(rank: int) -> tuple[Directions, int]:
    """Evaluate a set and its reverse; return what every rank is told, and the bytes of the vectors that it has."""
    encode = wide_encoder(Ranks.of_this_process())
    tasks = encode_directions(encode, TASK, OPTIONS, both=True)
    arrays = [vectors for task in tasks for vectors in (task.documents, task.queries)]
    held_bytes = sum(0 if 0 in each.strides else each.nbytes for each in arrays)  # type: ignore[union-attr]
    return encode.ranks.from_first(lambda: search_directions(tasks, OPTIONS)), held_bytes


def test_both_directions_come_out_as_on_one_rank_and_only_the_first_has_vectors(two_ranks: RankPool) -> None:
    (first, held_bytes), (other, none) = two_ranks.run(both_directions)
    alone = search_directions(encode_directions(wide_encoder(), TASK, OPTIONS, both=True), OPTIONS)
    assert first == other
    assert held_bytes > 0 == none
    for mine, theirs in ((first.forward, alone.forward), (first.reverse, alone.reverse)):
        assert mine is not None
        assert theirs is not None
        assert replace(mine, seconds=0.0) == replace(theirs, seconds=0.0)
        assert mine.metrics["ndcg@10"] > 0


def stopped(rank: int) -> str:
    ranks = Ranks.of_this_process()
    agree = ranks.agreement(CPU)
    asked = 0

    def poll() -> None:
        nonlocal asked
        asked += 1
        if not agree(not (rank == 1 and asked == 2)):
            raise PreemptedError("stop")

    before, encode_module.SHARED_SLICE_ROWS = encode_module.SHARED_SLICE_ROWS, 2
    try:
        ItemEncoder(tiny_encoder(), ChunkBudget(3, 10**6), CPU, poll=poll, ranks=ranks)(TEXTS, "query")
    except PreemptedError:
        return f"left at poll {asked}"
    finally:
        encode_module.SHARED_SLICE_ROWS = before
    return "ran to its end"


def test_a_signal_to_one_rank_stops_all_at_the_same_point(two_ranks: RankPool) -> None:
    assert two_ranks.run(stopped) == ["left at poll 2"] * 2
