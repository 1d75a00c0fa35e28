"""Encoding shared by ranks: the first gets every vector in its place; all call the encoder equally often if asked."""

from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from vembed.config.keys.model import ModelKeys
from vembed.distributed.ranks import Ranks
from vembed.errors import PreemptedError
from vembed.evaluation import encode as encode_module
from vembed.evaluation.encode import ItemEncoder
from vembed.gradcache.chunking import ChunkBudget
from vembed.models.encoder import Encoder
from vembed.models.registry import load_encoder

CPU = torch.device("cpu")
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
