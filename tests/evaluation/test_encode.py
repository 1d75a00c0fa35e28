"""Encoding for evaluation: order, mode and randomness stay as they were; slices and budgets change nothing."""

import numpy as np
import pytest
import torch

from vembed.config.keys.model import ModelKeys
from vembed.errors import PreemptedError
from vembed.evaluation import encode as encode_module
from vembed.evaluation.encode import ItemEncoder
from vembed.gradcache.chunking import ChunkBudget
from vembed.models.encoder import Encoder
from vembed.models.registry import load_encoder

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
