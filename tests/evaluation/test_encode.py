"""Encoding for evaluation: order, mode and randomness stay as they were; slices and budgets change nothing."""

import numpy as np
import pytest
import torch

from vembed.errors import PreemptedError
from vembed.gradcache.chunks import ChunkBudget, plan_chunks
from vembed.models.encoder import Encoder
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.plan.devices import Machine
from vembed.vectors import encode as encode_module
from vembed.vectors.encode import ItemEncoder, encoding_budget

CPU = torch.device("cpu")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
TEXTS = [" ".join(WORDS[: 1 + index % 9]) + f" {index}" for index in range(40)]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), TEXTS)


def encode(encoder: Encoder, budget: ChunkBudget) -> np.ndarray:
    return ItemEncoder(encoder, budget, CPU)(TEXTS, "document")


def test_vectors_are_in_the_order_of_the_items_whatever_the_budget(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = np.concatenate([ItemEncoder(encoder, ChunkBudget(8, 512), CPU)([text], "document") for text in TEXTS])
    assert np.abs(one_by_one[0] - one_by_one[1]).max() > 1e-3
    for budget in (ChunkBudget(256, 4096), ChunkBudget(3, 10**6), ChunkBudget(100, 40)):
        np.testing.assert_allclose(encode(encoder, budget), one_by_one, atol=1e-5)
    monkeypatch.setattr(encode_module, "SLICE_ROWS", 7)
    np.testing.assert_allclose(encode(encoder, ChunkBudget(4, 64)), one_by_one, atol=1e-5)


@pytest.mark.parametrize("budget", [ChunkBudget(4, 64), ChunkBudget(100, 40)])
def test_vectors_are_bit_for_bit_those_of_each_call_of_each_slice(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, budget: ChunkBudget
) -> None:
    monkeypatch.setattr(encode_module, "SLICE_ROWS", 7)
    wanted = np.zeros((len(TEXTS), encoder.dimension), dtype=np.float32)
    encoder.eval()
    for start in range(0, len(TEXTS), 7):
        features = encoder.featurize(TEXTS[start : start + 7], "document")
        for chunk in plan_chunks(features.lengths, budget):
            with torch.inference_mode():
                vectors = encoder(encoder.collate(features, chunk.rows, chunk.width))
            wanted[start + chunk.rows] = vectors.numpy()
    np.testing.assert_array_equal(encode(encoder, budget), wanted)
    assert encode(encoder, budget).dtype == np.float32
    np.testing.assert_array_equal(ItemEncoder(encoder, budget, CPU)([], "document"), wanted[:0])


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


def test_mode_is_restored_when_the_poll_stops_it(encoder: Encoder) -> None:
    def stop() -> None:
        raise PreemptedError("stop")

    encoder.train()
    with pytest.raises(PreemptedError):
        ItemEncoder(encoder, ChunkBudget(8, 512), CPU, poll=stop)(TEXTS, "query")
    assert encoder.training
    assert torch.is_grad_enabled()


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


@pytest.mark.parametrize(
    ("num_texts", "tokens", "most_padding"),
    # A thousand texts make five calls of 16,384 tokens: in smaller ones they pad less, and a fast device idles.
    [(8192, 400_000, 1.25), (1024, 400_000, 1.45), (8192, 20_000, 1.25)],
)
def test_large_calls_pad_little(encoder: Encoder, num_texts: int, tokens: int, most_padding: float) -> None:
    lengths = np.random.default_rng(0).lognormal(4.0, 0.8, num_texts).astype(np.int64).clip(1, 512)
    calls = ItemEncoder(encoder, ChunkBudget(tokens, tokens, bucketed=True), CPU)._calls(lengths)
    assert sum(call.padded_tokens for call in calls) < most_padding * lengths.sum()
    assert max(call.padded_tokens for call in calls) <= tokens


def test_rows_that_lie_end_to_end_fill_calls_that_nothing_cuts_finer(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "packs", True, raising=False)
    lengths = np.full(1000, 100)
    calls = ItemEncoder(encoder, ChunkBudget(10**6, 40_000, bucketed=True), CPU)._calls(lengths)
    assert [len(call.rows) for call in calls] == [400, 400, 200]


def test_spare_rows_of_calls_of_few_shapes_change_nothing(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "LEAST_TOKENS", 1)
    texts, budget = 5 * TEXTS, ChunkBudget(32, 300, bucketed=True)
    item_encoder = ItemEncoder(encoder, budget, CPU)
    assert any(call.num_spare for call in item_encoder._calls(encoder.featurize(texts, "document").lengths))
    one_by_one = np.tile(encode(encoder, ChunkBudget(8, 512)), (5, 1))
    np.testing.assert_allclose(item_encoder(texts, "document"), one_by_one, atol=1e-5)


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
